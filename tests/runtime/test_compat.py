"""Does every patch of another library still fit, and is it still needed?  To be run first after an upgrade.

Where a test of this file fails, look at what the library does now: change the patch, or remove it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors
import pytest
import torch
import transformers
import trl.kernels
from accelerate.state import AcceleratorState
from jinja2.sandbox import SandboxedEnvironment
from peft import LoraConfig, get_peft_model
from peft.utils.other import TrainableTokensWrapper
from tiny_runs import python
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.kernels import chunked_logprob
from trl.trainer import dpo_trainer, sft_trainer, utils as trl_utils
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import posttrain.models.convgpt  # noqa: F401  registers ConvGPT with the Auto classes
from envs.adapters.openenv_client import connection
from posttrain.finetune import training, trl_trainers
from posttrain.models import template_limits
from posttrain.runtime import compat
from posttrain.types import UserError

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = dict(
    vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
# in other files: envs/adapters/trl.py looks into its own environment (public methods are tools there), and OpenEnv's
# client is no matter of compat.py, since envs/ imports no posttrain
# and what a copy of posttrain/models/convgpt.py, beside the weights, cannot import from compat
# and gradio's queue, which only the chat in the browser has, and the pool that only a failed capture leaves
EXCEPTIONS = (
    "game._episode", "getattr(client, '_ws', None)", "self.config._attn_implementation", "page._queue",
    "torch._C", "torch._C._cuda_endAllocateToPool",
)  # fmt: skip
# of our own classes, of the standard library, and what transformers asks a model's class for
NOT_PRIVATE = {"_asdict", "_fields", "_make", "_replace", "_exit", "_init_weights", "_option_string_actions"}


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def public(names: Any, *parts: str) -> list[str]:
    """Public names that have all these parts: where the library may have taken over what is patched."""
    return [name for name in names if not name.startswith("_") and all(part in name for part in parts)]


# ------------------------------------------------------------------------------------------------------ the file itself


def test_versions_are_those_that_were_checked() -> None:
    """After an upgrade: make this file pass, look at what changed, then write the new version into compat.CHECKED."""
    assert {name: ".".join(version(name).split(".")[:2]) for name in compat.CHECKED} == compat.CHECKED


def test_everything_has_a_reason_an_end_and_a_test() -> None:
    found = [(thing, module) for module in (compat, trl_trainers) for thing in vars(module).values()]
    own = [(thing, module) for thing, module in found if getattr(thing, "__module__", "") == module.__name__]
    names = {
        thing.__name__: thing
        for thing, module in own
        if callable(thing) and not thing.__name__.startswith("_")
        # of trl_trainers the classes that override methods of a trainer
        if module is compat or (inspect.isclass(thing) and issubclass(thing, Trainer) and len(thing.__bases__) == 1)
    }
    assert len(names) > 20
    assert [name for name, thing in names.items() if "Until " not in " ".join((thing.__doc__ or "").split())] == []
    tests = [name.removeprefix("test_").replace("_", "") for name in globals() if name.startswith("test_")]
    tested = {name for name in names if any(test.startswith(name.replace("_", "").lower()) for test in tests)}
    assert tested == set(names)


def private_uses(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value) not in ("self", "cls") and node.attr not in NOT_PRIVATE
    ]
    found += [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
        if re.match(r"'_[^_]", ast.unparse(node.args[1]))
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = [alias.name for node in imports if not str(node.module).startswith("posttrain") for alias in node.names]
    return found + [f"{path.relative_to(ROOT)}: import {name}" for name in names if name.startswith("_")]


def test_no_other_file_uses_private_parts() -> None:
    files = [path for folder in ("posttrain", "envs", "examples") for path in (ROOT / folder).rglob("*.py")]
    files += ROOT.glob("*.py")
    meant = ("compat.py", "trl_trainers.py")
    uses = [use for path in files if path.name not in meant for use in private_uses(path)]
    assert [use for use in uses if not use.endswith(EXCEPTIONS)] == []
    assert [name for name in EXCEPTIONS if not any(use.endswith(name) for use in uses)] == []
    assert len(private_uses(ROOT / "posttrain" / "runtime" / "compat.py")) > 5


# ------------------------------------------------------------------------------------------------------------------ TRL


def test_chunked_logprobs() -> None:
    """Values and gradients are in test_head.py."""
    names = list(inspect.signature(trl.kernels.ChunkedLogProbFunction.forward).parameters)
    assert names[1:] == [
        "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
        "outputs",
    ]  # fmt: skip
    assert set(trl.kernels.__all__) <= {"ChunkedLogProbFunction", "selective_log_softmax_and_entropy"}
    hidden, weight, tokens = torch.randn(5, 3), torch.randn(11, 3), torch.arange(5)
    logprobs, entropy = compat.chunked_logprobs(hidden, weight, None, tokens, columns=4, temperature=0.5)
    table = (hidden @ weight.T / 0.5).log_softmax(-1)
    assert torch.allclose(logprobs, table.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-5)


def test_score_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles get narrower; no loss and no gradient is another one."""
    utils: Any = trl_utils
    assert "\n_CHUNKED_LOGPROB_CHUNK_SIZE = 32768\n" in source(utils), "posttrain/plan/rows.py counts on it"
    widths, results = [], []
    apply = utils._ChunkedLogProbFunction.apply
    spy = SimpleNamespace(apply=lambda *given: (widths.append(given[5]), apply(*given))[1])
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", spy)
    for columns in (32768, 40):
        monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
        compat.score_few_columns(columns)
        torch.manual_seed(1)
        net = LlamaForCausalLM(LlamaConfig(**SMALL))
        utils.add_fused_lm_head(net)
        ids = torch.randint(97, (3, 11))
        out: Any = net(input_ids=ids, labels=ids, fused_lm_head=True)
        out.loss.backward()
        results.append((out.log_probs, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    assert widths == [32768, 40]
    for wide, narrow in zip(*results, strict=True):
        assert torch.allclose(wide, narrow, atol=1e-6)


@pytest.mark.parametrize("labelled", [0.0, 0.4, 1.0])
def test_score_trained_positions_only(labelled: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows go through the output layer; no loss and no gradient is another one."""
    utils: Any = trl_utils
    monkeypatch.setattr(utils, "_use_triton", chunked_logprob._use_triton)  # other tests may have left the patch
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", scored := Counting(utils._ChunkedLogProbFunction))
    assert source(utils).count("_use_triton(") == 1, "it decides about something else as well"
    results = []
    for compact in (False, True):
        if compact:
            compat.score_trained_positions_only()
        torch.manual_seed(1)
        net = LlamaForCausalLM(LlamaConfig(**SMALL))
        utils.add_fused_lm_head(net, outputs=("log_probs", "entropy", "is_top1"))
        ids = torch.randint(97, (3, 11))
        labels = ids.masked_fill(torch.rand(3, 11) >= labelled, -100)
        out: Any = net(input_ids=ids, labels=labels, fused_lm_head=True)
        (-out.log_probs.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        results.append((out.log_probs, out.entropy, out.is_top1.float(), gradient))
    trained = int((labels[:, 1:] != -100).sum())
    assert scored.rows == [30, trained], "TRL scores trained positions only by itself"
    for plain, compact in zip(*results, strict=True):
        assert torch.allclose(plain, compact, atol=1e-6)


class Counting:
    """An autograd function that remembers how many rows it was asked about."""

    def __init__(self, function: Any) -> None:
        self.function, self.rows = function, []

    def apply(self, hidden: torch.Tensor, *rest: Any) -> Any:
        self.rows.append(len(hidden))
        return self.function.apply(hidden, *rest)


def test_replace_reference_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = dpo_trainer
    imports = [node for node in ast.parse(source(module)).body if isinstance(node, ast.ImportFrom)]
    bars = [node.module for node in imports for name in node.names if name.name == "tqdm"]
    assert bars == ["accelerate.utils"], "TRL has another bar now"
    calls = [node for node in ast.walk(ast.parse(source(module))) if isinstance(node, ast.Call)]
    (bar,) = [call for call in calls if ast.unparse(call.func) == "tqdm"]
    assert not bar.args and {word.arg for word in bar.keywords} == {"iterable", "desc", "disable"}
    monkeypatch.setattr(module, "tqdm", module.tqdm)
    compat.replace_reference_bar(own := lambda iterable, desc, disable=False: iter(iterable))
    assert module.tqdm is own


def test_token_trainer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A whole run with it is in test_data.py."""
    assert "self._prepare_dataset(" in source(DPOTrainer.__init__)
    rows: Any = SimpleNamespace(column_names=["prompt_ids", "chosen_ids", "rejected_ids"])
    trainer: Any = trl_trainers.TokenTrainer
    assert trainer._prepare_dataset(None, rows, tiny_tokenizer, None, "train") is rows
    with pytest.raises(AssertionError):
        trainer._prepare_dataset(None, SimpleNamespace(column_names=["prompt"]), tiny_tokenizer, None, "train")
    assert issubclass(trainer, DPOTrainer)
    assert "is_processed" in source(SFTTrainer._prepare_dataset)
    assert "is_processed" not in source(DPOTrainer._prepare_dataset), "DPOTrainer takes rows of token ids now"


def test_pair_trainer() -> None:
    """That it does not depend on micro-batches, and that TRL's does, is in test_phase2.py."""
    assert issubclass(trl_trainers.PairTrainer, DPOTrainer)
    assert list(inspect.signature(DPOTrainer._compute_loss).parameters) == ["self", "model", "inputs", "return_outputs"]
    assert "in zip(self.loss_types, self.loss_weights, strict=True)" in source(DPOTrainer._compute_loss)


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer])
def test_weighing_trainer(trainer: Any) -> None:
    """That its figures are the same in any batches is in test_phase1.py and test_phase2.py."""
    assert issubclass(getattr(trl_trainers, trainer.__name__), (trl_trainers.WeighingTrainer, trainer))
    assert "sum(val) / len(val)" in source(trainer.log), "TRL weighs its batches"
    assert "losses.repeat(batch_size)" in source(Trainer.evaluation_loop), "transformers weighs its batches"


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer])
def test_ahead_trainer(trainer: Any) -> None:
    """That it waits for nothing, and that figures are TRL's, is in test_both_phases.py."""
    assert issubclass(getattr(trl_trainers, trainer.__name__), (trl_trainers.AheadTrainer, trainer))
    body = source(trainer._compute_loss if trainer is DPOTrainer else trainer.compute_loss)
    assert "mean().item()" in body, "TRL does not wait in each micro-batch now"
    assert "sum(val) / len(val)" in source(trainer.log), "TRL reads its figures when it logs"


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer])
def test_grouping_trainer(trainer: Any) -> None:
    """That each epoch has batches of its own, also after --resume, is in test_phase1.py and test_sharding.py."""
    assert issubclass(getattr(trl_trainers, trainer.__name__), (trl_trainers.GroupingTrainer, trainer))
    assert trainer._get_train_sampler is Trainer._get_train_sampler, "TRL has its own sampler"
    assert "sampler_fn=self._get_train_sampler" in source(Trainer.get_train_dataloader)
    assert "set_epoch(epoch)" in source(Trainer._run_epoch), "an epoch has another name now"
    assert trainer._get_eval_sampler is Trainer._get_eval_sampler, "TRL has its own sampler of held-out rows"


@pytest.mark.parametrize("module", [sft_trainer, dpo_trainer])
def test_trained_tokens(module: Any) -> None:
    """That a resumed run goes on counting is in test_phase1.py."""
    lines = [line.strip() for line in source(module).splitlines() if "_total_train_tokens" in line]
    assert lines[0] == "self._total_train_tokens = 0" and all("num_tokens" in line for line in lines[1:])
    assert len(lines) == 3, "TRL does something else with its tokens: perhaps it saves them"


def test_set_trained_tokens() -> None:
    trainer = SimpleNamespace(_total_train_tokens=0)
    compat.set_trained_tokens(trainer, 7)
    assert compat.trained_tokens(trainer) == 7
    with pytest.raises(AssertionError, match="counts its tokens in another way"):
        compat.set_trained_tokens(SimpleNamespace(), 7)


@pytest.mark.parametrize(("trainer", "arguments"), [(SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig)])
def test_write_no_model_card(trainer: Any, arguments: Any) -> None:
    assert "self.create_model_card(" in source(trainer._save_checkpoint)
    assert public((field.name for field in dataclasses.fields(arguments)), "card") == [], "there is a switch now"
    written: Any = SimpleNamespace(create_model_card=lambda: pytest.fail("written"))
    compat.write_no_model_card(written)
    written.create_model_card(model_name="x")


def test_tokenizer_of_each_request() -> None:
    """That prompts are read with it is in test_serve.py."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.utils import BaseHandler

    assert "return model_id, model, processor" in source(BaseHandler._resolve_model)
    for handler, reads in (
        (ChatCompletionHandler, "processor.apply_chat_template("),
        (CompletionHandler, "tokenizer("),
    ):
        text = source(handler.handle_request)
        assert "self._resolve_model(body)" in text and reads in text, "it gets its tokenizer in another way"
        assert "thread" not in text and "executor" not in text, "it reads beside the event loop now"


def test_stream_error() -> None:
    """That it is told is in test_serve.py."""
    from transformers.cli.serving import utils

    assert compat.stream_error()("words").msg == "words"
    assert not public(vars(utils), "StreamError"), "it has a public name now"


@pytest.mark.parametrize("library", ["trl", "peft"])
def test_ignore_renamed_argument(library: str, tmp_path: Path) -> None:
    def use() -> None:
        if library == "trl":
            SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
        else:
            net = LlamaForCausalLM(LlamaConfig(**SMALL))
            get_peft_model(net, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if patched:
                compat.ignore_renamed_argument()
            use()
        return [str(each.message) for each in caught if "gradient_checkpointing" in str(each.message)]

    patched = False
    assert warned(), f"{library} does not use the old name any more"
    patched = True
    assert not warned()


# --------------------------------------------------------------------------------------------------------- transformers


def test_load_checkpoint_weights() -> None:
    """That it puts the weights in place is in test_phase1.py."""
    first = list(inspect.signature(Trainer._load_from_checkpoint).parameters.values())
    assert [each.name for each in first if each.default is each.empty] == ["self", "resume_from_checkpoint"]
    assert public(dir(Trainer), "load", "checkpoint") == public(dir(Trainer), "load", "weights") == []


def test_attention_of() -> None:
    config = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation="eager").config
    assert compat.attention_of(config) == "eager"
    assert compat.attention_of(LlamaForCausalLM(LlamaConfig(**SMALL)).config) == "sdpa"
    assert public(dir(config), "attn", "implementation") == [], "the config says it under a public name"


def test_commit_of(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    assert compat.commit_of(config) is None
    config._commit_hash = "0123abc"
    assert compat.commit_of(config) == "0123abc"
    assert "_commit_hash" in source(transformers.PreTrainedConfig)
    assert public(dir(config), "commit") == [], "the config says it under a public name"


def test_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, and somebody else's attention, are in test_policy.py."""
    assert list(inspect.signature(sdpa_attention_forward).parameters) == [
        "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "position_bias",
        "cache", "kwargs",
    ]  # fmt: skip
    heads: list[int] = []
    masks: list[torch.Tensor] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        heads.append(key.shape[1])
        masks.append(named["attn_mask"])
        return plain(query, key, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    sizes: dict[str, Any] = {**SMALL, "num_hidden_layers": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids, mask = torch.arange(6).view(1, 6), torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9)
    with torch.no_grad():
        copied = net(ids, attention_mask=mask, use_cache=False).logits
        with compat.grouped_queries():
            grouped = net(ids, attention_mask=mask, use_cache=False).logits
    assert heads == [4, 4, 2, 2], "transformers does not copy keys and values under a mask any more"
    assert torch.allclose(copied, grouped, atol=1e-5)
    assert masks[2].shape[2] == 2 * 6 and masks[2] is masks[3], "each layer would keep a copy for its backward pass"


def test_shard_on_cpus_is_still_needed() -> None:
    """Its state takes FSDP from the environment in a branch that processes on CPUs do not come to."""
    state = source(AcceleratorState.__init__)
    branch = state[: state.index("DistributedType.FSDP")].rpartition("elif self.distributed_type in [")[2]
    assert "ACCELERATE_USE_FSDP" in branch and "DistributedType.MULTI_GPU" in branch
    assert "MULTI_CPU" not in branch, "accelerate shards on CPUs by itself: `shard_on_cpus` can go"


def test_read_in_slices_is_given_what_it_expects() -> None:
    net: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    given: list[set[str]] = []
    whole = net.model.forward

    def forward(*rest: Any, **named: Any) -> Any:
        given.append(set(named))
        return whole(*rest, **named)

    net.model.forward = forward
    training.read_in_slices(net)
    trl_utils.add_fused_lm_head(net, outputs=("log_probs",))
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    net(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True)
    assert given == [{"input_ids", "attention_mask", "use_cache"}] * 2, "TRL gives the decoder something else"
    about = " ".join(source(SFTConfig).split())
    assert "only supported with the FlashAttention 2 or 3" in about, "TRL may train without padding on a CPU"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "convgpt"])
def test_read_in_slices_changes_no_loss_and_no_gradient(kind: str, checkpointing: bool) -> None:
    shape: dict[str, Any] = dict(vocab_size=97, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    shape |= dict(hidden_size=256, num_key_value_heads=2, head_dim=8, initializer_range=0.1)
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 11, 4, 11, 2, 7])
    mask = (torch.arange(11) < lengths[:, None]).long()
    ids = torch.randint(97, mask.shape, generator=draw)
    labels = ids.masked_fill((torch.rand(mask.shape, generator=draw) < 0.4) | (mask == 0), -100)
    results, read = [], []
    for sliced in (False, True):
        torch.manual_seed(2)
        net: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).train()
        if checkpointing:
            net.gradient_checkpointing_enable()
        if sliced:
            training.read_in_slices(net)
        trl_utils.add_fused_lm_head(net, outputs=("log_probs", "entropy", "is_top1"))
        widths: list[tuple[int, int]] = []
        net.get_input_embeddings().register_forward_hook(lambda _, given, __, to=widths: to.append(given[0].shape))
        scored = net(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        loss = -scored.log_probs.sum() / (labels != -100).sum()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        results.append((loss, scored.log_probs, scored.entropy, gradient))
        read.append(widths)
    assert read == [[(6, 11)], [(2, 11), (1, 7), (2, 4), (1, 2)]]
    plain, slices = results
    assert slices[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    for whole, part in zip(plain[1:], slices[1:], strict=True):
        assert torch.allclose(whole[whole != 0], part[whole != 0], rtol=1e-4, atol=1e-6)


def test_read_in_slices_only_what_the_trainer_gives() -> None:
    """Generation and packed rows go through the decoder as they are."""
    shape = LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    net: Any = LlamaForCausalLM(shape).eval()
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    before = net(ids, attention_mask=mask, use_cache=True)
    packed = dict(input_ids=ids.view(1, 12), position_ids=torch.arange(6).repeat(2)[None], use_cache=False)
    flat = net(**packed).logits
    training.read_in_slices(net)
    after = net(ids, attention_mask=mask, use_cache=True)
    assert torch.equal(after.logits, before.logits) and after.past_key_values.get_seq_length() == 6
    assert torch.equal(net(**packed).logits, flat)
    with pytest.raises(AssertionError, match="right"):
        net.model(input_ids=ids, attention_mask=mask.flip(1), use_cache=False)


def test_cache_layer_has_all_that_transformers_asks_for() -> None:
    """CacheLayer; what it computes is in test_sampler.py and test_prefixes.py."""
    assert CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length",
    }  # fmt: skip
    assert compat.CacheLayer.__abstractmethods__ == {"update", "get_mask_sizes"}


def test_set_rates_to_zero() -> None:
    """More architectures are in test_policy.py."""
    rates = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
    config = AutoConfig.for_model("opt", vocab_size=97, layerdrop=0.3, attention_dropout=0.2, **rates)
    net = AutoModelForCausalLM.from_config(config).train()
    assert public(dir(PreTrainedModel), "dropout") == [], "transformers can switch noise off by itself"
    trl_utils.disable_dropout_in_model(net)
    assert config.layerdrop == 0.3, "TRL switches off more than modules of class Dropout"
    for module in net.modules():
        compat.set_rates_to_zero(module)
    assert net.model.decoder.layerdrop == config.layerdrop == config.attention_dropout == 0
    assert config.vocab_size == 97 and config.num_hidden_layers == 2


def test_is_rust_panic() -> None:
    class PanicException(BaseException):
        pass

    assert compat.is_rust_panic(PanicException("called `Option::unwrap()` on a `None` value"))
    assert not compat.is_rust_panic(KeyboardInterrupt())


def test_panics_in_words() -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(UserError, match=r"fails on a text .*retry-limit"), compat.panics_in_words():
        tokenizer.encode("a" * 30 + "!")
    with pytest.raises(KeyboardInterrupt), compat.panics_in_words():
        raise KeyboardInterrupt


def test_plain_text_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Without it, text becomes a control token where an added token is not marked special."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<|mark|>"])
    number = tokenizer.convert_tokens_to_ids("<|mark|>")
    assert isinstance(number, int)
    before: Any = copy.deepcopy(tokenizer).backend_tokenizer
    before.encode_special_tokens = True
    assert number in before.encode("a<|mark|>b").ids, "tokenizers can hide such tokens by itself"
    plain = compat.plain_text_tokenizer(tokenizer, {number})
    plain.encode_special_tokens = True
    assert number not in plain.encode("a<|mark|>b").ids
    assert plain.decode(plain.encode("a<|mark|>b").ids) == "a<|mark|>b"
    spec = json.loads(before.to_str())
    assert {"added_tokens", "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"} <= set(spec)


# --------------------------------------------------------------------------- huggingface_hub, peft, bitsandbytes, torch


def test_http_error_is_what_the_hub_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP_ERROR: nobody listens on this port."""
    with pytest.raises(compat.HTTP_ERROR) as raised:
        huggingface_hub.HfApi(endpoint="http://127.0.0.1:9").repo_info("a/b", timeout=1)
    assert not isinstance(raised.value, OSError)
    assert not type(raised.value).__module__.startswith("huggingface_hub"), "the Hub has an error of its own"


def with_trained_rows(net: Any, **targets: Any) -> Any:
    rows = {"embed_tokens": [3, 4], "lm_head": [3, 4]}
    settings = LoraConfig(r=2, init_lora_weights=False, trainable_token_indices=rows, **targets)
    tuned = get_peft_model(net, settings).get_base_model()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(1.0)
    return tuned.eval()


def test_pass_on_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    net: Any = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
    net.lm_head = torch.nn.Linear(16, 97, bias=True)
    bias, wrapper = net.lm_head.bias, with_trained_rows(net, target_modules=["q_proj"]).lm_head
    assert isinstance(wrapper, TrainableTokensWrapper)
    monkeypatch.setattr(TrainableTokensWrapper, "bias", None, raising=False)
    monkeypatch.delattr(TrainableTokensWrapper, "bias")
    assert getattr(wrapper, "bias", None) is None, "peft passes the bias on by itself"
    compat.pass_on_bias()
    assert wrapper.bias is bias


def test_merged_weights() -> None:
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)).eval()
    tuned = with_trained_rows(copy.deepcopy(plain), target_modules=["q_proj", "down_proj"])
    names, merged = dict(plain.named_parameters()), dict(compat.merged_weights(tuned))
    assert merged.keys() == names.keys()
    changed = {name for name in names if not torch.equal(merged[name], names[name])}
    adapted = ("q_proj", "down_proj", "embed_tokens", "lm_head")
    assert changed == {name for name in names if any(layer in name for layer in adapted)}
    plain.load_state_dict(merged)
    ids = torch.arange(2, 30)[None]
    assert torch.allclose(plain(input_ids=ids).logits, tuned(input_ids=ids).logits, atol=1e-3)


@pytest.mark.thorough
def test_bitsandbytes_says_nothing_at_import() -> None:
    told = "import logging, posttrain, bitsandbytes.backends.cpu.ops as ops; ops.logger.warning('told')"
    assert not python("-c", told).stderr
    assert "logger.warning" in source(importlib.import_module("bitsandbytes.backends.cpu.ops")), "it is quiet itself"


def test_keep_four_bit_layout() -> None:
    from bitsandbytes.nn.modules import Linear4bit

    layer: Any = Linear4bit(16, 16)
    assert layer.support_avx512bf16_for_cpu in (False, True)
    assert "support_avx512bf16_for_cpu" in source(Linear4bit.forward), "it decides elsewhere about the layout"
    layer.support_avx512bf16_for_cpu = True
    compat.keep_four_bit_layout(torch.nn.Sequential(layer, torch.nn.Linear(2, 2)))
    assert layer.support_avx512bf16_for_cpu is False


def test_has_hooks() -> None:
    module = torch.nn.Linear(2, 2)
    assert not compat.has_hooks(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert compat.has_hooks(module)
    handle.remove()
    module.register_forward_pre_hook(lambda *_: None)
    assert compat.has_hooks(module)
    assert public(dir(module), "has", "hook") == [], "torch can be asked"


# ---------------------------------------------------------------------------------------------------- trackio and wandb


def test_trackio_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still asks, at the start of every run; that a run then reaches nobody is in test_dashboards.py."""
    from trackio import run, utils

    assert "whoami(" in source(utils._get_default_namespace) and "_get_username()" in source(run.Run.__init__)
    monkeypatch.setattr(run.Run, "_get_username", run.Run._get_username)  # so that it is put back
    compat.trackio_asks_nobody()
    assert run.Run._get_username(object.__new__(run.Run)) is None


def test_read_wandb_log(tmp_path: Path) -> None:
    """Records of all sizes, and a file that is torn at any place; real files are in test_dashboards.py."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    assert public(dir(pytest.importorskip("wandb")), "read") == []
    blocks, written = b":W&B\x8d\xe1\x00", []
    for step, size in enumerate((1, 40_000, 70_000, 10, 32_000)):
        record = proto.Record()
        for key, value in (("step", step), ("words", "w" * size)):
            record.history.item.add(key=key, value_json=json.dumps(value))
        for part in ("sha", "path"):
            record.history.item.add(nested_key=["picture", part], value_json="1")
        left, begun = record.SerializeToString(), False
        while left:
            room = 32768 - len(blocks) % 32768
            if room < 7:  # no header fits there
                blocks += b"\0" * room
                continue
            piece, left = left[: room - 7], left[room - 7 :]
            kind = {(False, False): 1, (False, True): 2, (True, True): 3, (True, False): 4}[begun, bool(left)]
            blocks, begun = blocks + struct.pack("<IHB", 0, len(piece), kind) + piece, True
        written.append({(step, "step"), (step, "words"), (step, "picture")})
    file = tmp_path / "run.wandb"
    file.write_bytes(blocks)
    assert set(compat.read_wandb_log(file)) == set().union(*written)
    assert len(compat.read_wandb_log(file)) == 15
    for end in (0, 3, 12, 40_000, len(blocks) - 1):
        file.write_bytes(blocks[:end])
        found = set(compat.read_wandb_log(file))
        assert all(each <= found or not each & found for each in written) and len(found) < 15


# -------------------------------------------------------------------------------------- envs/adapters/openenv_client.py


def test_connection_of_openenv() -> None:
    """`connection` there: what it is for is in test_adapters_openenv.py."""
    core = pytest.importorskip("openenv.core")
    assert version("openenv").startswith("0.10.")
    client = core.GenericEnvClient(base_url="http://127.0.0.1:9")
    assert connection(client) is None and "_ws" in vars(client)
    assert public(dir(client), "ws") == public(dir(client), "socket") == public(dir(client), "connected") == []


# -------------------------------------------------------------------------------------------- posttrain/template_limits


def test_chat_templates_can_be_imported_alone() -> None:
    """What the child process renders with is transformers' own module, without its packages."""
    program = (
        "import sys; sys.path.insert(0, 'posttrain/..')\n"
        "from posttrain.models.template_limits import import_alone\n"
        "module = import_alone('transformers.utils.chat_template_utils')\n"
        "print(module.render_jinja_template([[{'role': 'user', 'content': 'hi'}]], chat_template=sys.argv[1]))\n"
        "print(module.__file__, 'torch' in sys.modules)"
    )
    template = "{{ messages[0].content }}{% generation %}!{% endgeneration %}{{ namespace(a=1).a }}"
    from transformers.utils import chat_template_utils

    expected = chat_template_utils.render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template=template)
    ran = subprocess.run(
        [sys.executable, "-c", program, template], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(expected), f"{chat_template_utils.__file__} False"]
    assert template_limits.why_not(template, {}, [[{"role": "user", "content": "hi"}]]) == ""


# ----------------------------------------------------------------------------------------------- lm-evaluation-harness


def test_no_task_code(tmp_path: Path) -> None:
    """What it refuses is tried out in test_harness.py; here: what is replaced is there, and afterwards again."""
    loading = pytest.importorskip("lm_eval.tasks._yaml_loader", reason="lm-eval is not installed")
    from lm_eval import evaluator, utils  # pyright: ignore[reportMissingImports]

    before = loading._import_func_in_yml, utils.env
    assert not isinstance(utils.env, SandboxedEnvironment), "its templates have a sandbox by now"
    assert "env.from_string" in source(utils.apply_template) and "_import_func_in_yml" in source(loading)
    assert "trust" not in inspect.signature(evaluator.simple_evaluate).parameters
    with pytest.raises(KeyError), compat.no_task_code(False, []):
        assert isinstance(utils.env, SandboxedEnvironment) and set(utils.env.filters) >= set(before[1].filters)
        with pytest.raises(UserError, match="names the Python function"):
            loading._import_func_in_yml("os.getcwd", tmp_path)
        assert loading._import_func_in_yml("os.getcwd", Path(loading.__file__).parent) is os.getcwd
        raise KeyError
    assert (loading._import_func_in_yml, utils.env) == before
