"""Which private parts of other libraries are used or replaced?  Each in one place, with its reason.

CHECKED names the versions. test_compat.py fails as soon as something here no longer fits (a name or an argument has
changed) and as soon as the library does the same itself. Each docstring ends with the condition for deleting it
("Until ..."). Not here: TRL's trainers (finetune/trl_trainers.py), reading TRL's dataclasses without
importing them (config/trl_fields.py) and importing transformers' chat templates alone
(models/template_limits.py), which must load without torch; vLLM's engine, a failed capture (rollout/engines/);
what only envs/ needs, which imports no posttrain: gym-sokoban's room generator (envs/sokoban/rooms.py) and OpenEnv's
socket (envs/adapters/openenv_client.py).
"""

from __future__ import annotations

import importlib
import json
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.utils import httpx
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

CHECKED = {
    "accelerate": "1.15", "trl": "1.16", "transformers": "5.23", "tokenizers": "0.23", "huggingface_hub": "2.4",
    "peft": "0.21", "bitsandbytes": "0.50", "torch": "2.13", "trackio": "0.43", "wandb": "0.31",
}  # fmt: skip
__all__ = ["TOKEN_CHUNK_SIZE"]  # for memory plans; all else is defined here

# ---------------------------------------------------------------------------------------------------------------- TRL


def chunked_logprobs(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    tokens_S: torch.Tensor,
    *,
    columns: int,
    temperature: float = 1.0,
    cap: float | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each token and the entropy at its position, in nats, both (S,), with gradient.

    TRL's own function, `TOKEN_CHUNK_SIZE` rows at a time, with a Triton kernel on a GPU. It takes its arguments by
    position. Until TRL has a function for it. `columns`: columns of the logits to compute at a time.
    """
    logprobs_S, entropy_S, *_ = ChunkedLogProbFunction.apply(
        hidden_SD, weight_VD, bias_V, tokens_S, temperature, columns, cap, scale, ("entropy",)
    )
    return logprobs_S, entropy_S


def score_trained_positions_only() -> None:
    """Let TRL project onto the vocabulary only the positions that have a label, on a CPU as it does on a GPU.

    Prompts and padding are most of a batch of short dialogues. The loss is the same. TRL asks this private function
    about nothing else. Until TRL decides by the device's need for fixed shapes, which its comment announces.
    """
    from trl.trainer import utils

    assert hasattr(utils, "_use_triton"), "this TRL decides elsewhere which positions are scored"
    utils._use_triton = lambda device: True  # pyright: ignore[reportPrivateImportUsage]


def score_few_columns(columns: int) -> None:
    """Make TRL's trainers compute `columns` columns of the logits at a time instead of 32,768.

    On a CPU each tile lies in memory in ten forms, for which TRL has one kernel on a GPU. The loss is the same up to
    rounding. Until TRL takes the number as a setting.
    """
    from trl.trainer import utils

    assert hasattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE"), "this TRL sets the width of its tiles elsewhere"
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = columns


def replace_reference_bar(shown: Callable[..., Iterator[Any]]) -> None:
    """Let DPOTrainer iterate over `shown(iterable, desc, disable)` while it computes the reference's log-probs.

    Its own bar writes to a log file many times a second, and can only be switched off. Until TRL
    takes a bar, or writes lines where there is no terminal.
    """
    from trl.trainer import dpo_trainer

    assert hasattr(dpo_trainer, "tqdm"), "this TRL shows the reference's progress in another way"
    dpo_trainer.tqdm = shown  # pyright: ignore[reportPrivateImportUsage]


def trained_tokens(trainer: Any) -> int:
    """Return the number of tokens that a SFTTrainer or DPOTrainer has trained on.

    It counts them, logs them as `num_tokens` and forgets them when a run is resumed. Until it saves them.
    """
    return int(trainer._total_train_tokens)


def set_trained_tokens(trainer: Any, count: int) -> None:
    """Continue to count from a checkpoint's `trained_tokens`. Until TRL does so."""
    assert hasattr(trainer, "_total_train_tokens"), "this TRL counts its tokens in another way"
    trainer._total_train_tokens = count


def write_no_model_card(trainer: Any) -> None:
    """Keep TRL from writing a model card with every checkpoint; ours is in final/. Until there is a switch."""
    trainer.create_model_card = lambda *_, **__: None


def tokenizer_of_each_request(handler: Any) -> Any:
    """Return this handler of transformers' server with its own `tokenizer` for all text, whatever model it has.

    Until transformers tokenises prompts outside its event loop: the whole server waits for it.
    """

    class Own(handler):
        def _resolve_model(self, body: dict[str, Any]) -> Any:
            return *super()._resolve_model(body)[:2], self.tokenizer

    return Own


def stream_error() -> type[Any]:
    """Return the class of a failure in a stream of transformers' server. Until it has a public name."""
    from transformers.cli.serving.utils import _StreamError

    return _StreamError


def shard_on_cpus() -> None:
    """Let accelerate shard over processes on CPUs, where it silently trains a copy in each instead.

    Its state takes FSDP from the environment only where it has found several GPUs. Until it does so on CPUs.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    assert state["distributed_type"] == DistributedType.MULTI_CPU, "this accelerate names processes on CPUs otherwise"
    state["distributed_type"] = DistributedType.MULTI_GPU


def ignore_renamed_argument() -> None:
    """Hide transformers' warning about `gradient_checkpointing`, which TRL and peft use. Until both have changed it."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)


# ------------------------------------------------------------------------------------------------------- transformers


def load_checkpoint_weights(trainer: Trainer, folder: Path) -> None:
    """Put a checkpoint's weights, or its adapter, into a trainer's model, as --resume does.

    Until Trainer has a public method for it.
    """
    trainer._load_from_checkpoint(str(folder))


def attention_of(config: PreTrainedConfig) -> str:
    """Return a model's attention: "sdpa", "eager", ... Until the config has a public name for it."""
    return config._attn_implementation or "eager"


def commit_of(config: PreTrainedConfig) -> str | None:
    """Return the Hub's commit of a config; None for a folder. Until the config has a public name for it."""
    return getattr(config, "_commit_hash", None)


@contextmanager
def grouped_queries() -> Iterator[None]:
    """Compute attention of heads that share keys and values together, under a mask of our own.

    transformers does this where there is one query token, and copies keys and values for each head where there are
    more: in a cache of long conversations that is most of the time that reading takes. Until `use_gqa_in_sdpa` is true
    under a mask, on CPUs and GPUs.
    """
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:  # replaced by other code
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(_attend, cache(lambda mask, group: mask.repeat(1, 1, group, 1)))
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _attend(
    repeated: Callable[[torch.Tensor, int], torch.Tensor],  # one mask for all layers, as each keeps it to go backward
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return sdpa attention of queries (B, heads, Q, D) over keys and values (B, key-value heads, K, D)."""
    batch, heads, queries, size = query.shape
    group = heads // key.shape[1]
    special = any(settings.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
    if group == 1 or attention_mask is None or attention_mask.shape[1] > 1 or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    mixed = functional.scaled_dot_product_attention(
        query.reshape(batch, -1, group * queries, size),
        key,
        value,
        attn_mask=repeated(attention_mask, group),
        dropout_p=settings.get("dropout", 0.0),
        scale=settings.get("scaling"),
    )
    return mixed.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


class CacheLayer(CacheLayerMixin):
    """A layer of a KV cache whose user gives positions and a finished mask, so that its length is not needed.

    Subclasses have `update` and `get_mask_sizes`. transformers changes what else it asks of a layer from version to
    version. Until it has caches whose rows are written at positions of their own.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def set_rates_to_zero(thing: object) -> None:
    """Set what is named as a rate of dropout or jitter to 0, in a module or a config and the configs inside it.

    Architectures have many names for them. Until transformers can switch off all noise of a model.
    """
    for name, value in list(vars(thing).items()):
        if isinstance(value, PreTrainedConfig):
            set_rates_to_zero(value)
        elif type(value) in (int, float) and 0 < value <= 1 and ("drop" in name or "jitter" in name):
            setattr(thing, name, type(value)(0))  # a config may take no other type


def is_rust_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust has panicked: that exception is not an Exception and cannot be imported.

    Until tokenizers and safetensors raise a ValueError for every damaged file.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_in_words() -> Iterator[None]:
    """Raise a UserError where a tokenizer's own rule fails on a text. Until tokenizers raises a ValueError there."""
    try:
        yield
    except BaseException as error:  # a panic is not an Exception
        if not is_rust_panic(error):
            raise
        raise UserError(
            f"The tokenizer fails on a text ({one_line(error)}). A rule in its tokenizer.json is damaged or tries too"
            " many ways to match: take the model's own."
        ) from error


def plain_text_tokenizer(tokenizer: PreTrainedTokenizerBase, control_ids: set[int]) -> Tokenizer:
    """Return the same tokenizer for text in the middle of a conversation.

    Two things differ: all control tokens are marked special, so that `encode_special_tokens` can hide them, and no
    space is put in front of the text, which SentencePiece does at the start of what it takes for a sentence. Both are
    changed in the form in which tokenizer.json holds them. Until tokenizers can do both on a tokenizer in memory.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or token["id"] in control_ids
    spec["truncation"] = spec["padding"] = spec["post_processor"] = None
    spec["normalizer"] = _without_prefix(spec["normalizer"])
    spec["pre_tokenizer"] = _without_prefix(spec["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(spec))


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for parts in ("normalizers", "pretokenizers"):
        if parts in step:
            step[parts] = [part for part in map(_without_prefix, step[parts]) if part is not None]
    if step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    return step


# ---------------------------------------------------------------------------------- huggingface_hub, peft, bitsandbytes

# What the Hub's client raises when it cannot reach the Hub, from the library it was built with: httpx or httpx2. Until
# huggingface_hub raises an error of its own.
HTTP_ERROR: type[Exception] = httpx.HTTPError


def pass_on_bias() -> None:
    """Let peft's wrapper around a layer with trained rows have the layer's bias, which a fused head reads.

    Until the wrapper does.
    """
    from peft.utils.other import TrainableTokensWrapper

    def bias(wrapper: Any) -> torch.Tensor | None:
        adapter = vars(wrapper)["_modules"].get("token_adapter")  # absent while the wrapper is made
        return getattr(getattr(adapter, "base_layer", None), "bias", None)

    TrainableTokensWrapper.bias = property(bias)  # pyright: ignore[reportAttributeAccessIssue]


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's tensors under their names without an adapter, with what an active adapter adds.

    peft's `merge_adapter` would change the weights in place, and rounding would leave them changed. Until peft gives
    merged tensors away.
    """
    for name, parameter in model.named_parameters():
        whole, of_adapter, part = name.partition(".base_layer.")
        if ".lora_" in name or ".trainable_tokens_delta." in name:
            continue
        tensor = parameter.detach()
        if of_adapter and part == "weight":
            layer: Any = model.get_submodule(whole)
            if whole.endswith(".token_adapter"):  # rows of the embedding that are trained beside an adapter
                tensor = layer.get_merged_weights(layer.active_adapters).detach()
            else:
                tensor = sum((layer.get_delta_weight(adapter) for adapter in layer.active_adapters), tensor)
        yield f"{whole.removesuffix('.token_adapter')}.{part}" if of_adapter else name, tensor


def keep_four_bit_layout(net: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in a model's first evaluation, on CPUs with AVX512-BF16.

    The kernel for that layout has no gradient: everything trained afterwards would silently get a wrong one. Until it
    has one.
    """
    for layer in net.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------- trackio and wandb


def trackio_asks_nobody() -> None:
    """Keep trackio from asking the Hub for the user's name at the start of every local run, where a token is stored.

    Only the run's config contains the name. Until local runs do not need it.
    """
    from trackio.run import Run

    Run._get_username = lambda self: None


def read_wandb_log(file: Path) -> list[tuple[int, str]]:
    """Return (step, key) of all that a run's transaction log holds, by the metric `step`, without a torn end.

    The log has the format of LevelDB's: blocks of 32 KiB, behind 7 bytes of header, with records in pieces of checksum,
    length and kind (1 whole, 2 first, 3 middle, 4 last). Until wandb offers a reader in Python.
    """
    from wandb.proto import wandb_internal_pb2

    steps_and_keys: list[tuple[int, str]] = []
    record: Any = vars(wandb_internal_pb2)["Record"]  # protobuf makes it when the module is imported
    data, place, gathered = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        piece, place = data[place + 7 : place + 7 + length], place + 7 + length
        if len(piece) < length or not 1 <= kind <= 4:
            break
        gathered = piece if kind in (1, 2) else gathered + piece
        if kind in (1, 4):
            # of a picture or a table, which has several values, the first
            history = record.FromString(gathered).history
            items = {item.key or item.nested_key[0]: item for item in reversed(history.item)}
            if "step" in items:
                steps_and_keys += [(json.loads(items["step"].value_json), key) for key in items]
    return steps_and_keys


# ----------------------------------------------------------------------------------------------- lm-evaluation-harness


@contextmanager
def no_task_code(own: bool, run_answers: Iterable[str]) -> Iterator[None]:
    """Refuse, with a UserError, the code that a benchmark task brings along.

    Tasks of the package may have some, but for the folders `run_answers`; a file of the user (`own`) may not even
    include one that has. YAML names Python functions (`!function`), templates may reach into Python, and an unknown
    metric is a script of the Hub. Until the harness has a switch: `unsafe_code` covers none of these.
    """
    loading: Any = importlib.import_module("lm_eval.tasks._yaml_loader")
    templates: Any = importlib.import_module("lm_eval.utils")
    metrics: Any = importlib.import_module("evaluate")
    package = Path(loading.__file__).parent
    import_function, environment, load = loading._import_func_in_yml, templates.env, metrics.load
    sandbox = SandboxedEnvironment(undefined=environment.undefined, keep_trailing_newline=True)
    sandbox.filters |= environment.filters

    def function(qual: str, base_dir: Path) -> Any:
        if not Path(base_dir).resolve().is_relative_to(package):
            raise UserError(f"{base_dir} names the Python function {qual}")
        if own:
            raise UserError(f"it includes a file of the harness that names the Python function {qual}")
        places = [folder / qual.replace(".", "/") for folder in (Path(base_dir).resolve(), package.parents[1])]
        if any(place.is_relative_to(package / folder) for place in places for folder in run_answers):
            raise UserError(f"its function {qual} runs what the model writes, on this machine and without a sandbox")
        return import_function(qual, base_dir)

    def metric(path: str, *_: Any, **__: Any) -> Any:
        raise UserError(f"the metric {path} is a script of the Hub")

    loading._import_func_in_yml, templates.env, metrics.load = function, sandbox, metric
    try:
        yield
    finally:
        loading._import_func_in_yml, templates.env, metrics.load = import_function, environment, load


# ------------------------------------------------------------------------------------------------------- torch, glibc


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has forward hooks. Until torch has a public function for it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
