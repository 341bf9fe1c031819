"""What must a model pass before a run?  Each shortcut is tried on the very model, against the plain way.

check_it_runs               it computes, and its logits are finite
without_noise               in training mode it computes what it computes in evaluation mode
head_agrees                 log-probs from its states and its output layer are those of its own logits
can_share_prefixes          rows that continue a prefilled prefix get the states of whole rows
why_unfit                   with a kept KV cache it samples with the log-probs of a full forward pass; or by replaying
can_be_deterministic        on a GPU torch has a deterministic implementation of each of its operations
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain import compat, hardware, launcher, runlog
from posttrain.head import head_logprobs
from posttrain.policy import read, trained_states
from posttrain.prefixes import Prefixes, prefix_of
from posttrain.sampler.replay import ReplaySampler
from posttrain.sampler.slots import SlotSampler
from posttrain.types import Completion, SamplingParams, UserError, one_line

# what a model raises in a self-test if its cache or its attention is of another kind
UNFIT = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
# RuntimeErrors that tell of the device instead: no self-test may take them for an answer
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)

Engine = type[SlotSampler] | type[ReplaySampler]


@torch.no_grad()
def check_it_runs(name: str, model: PreTrainedModel) -> None:
    """UserError where a model can be loaded and not computed with: a config.json may hold anything."""
    try:
        ids = torch.arange(2, device=model.device)[None]
        finite = torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its code does with a value that does not fit
        raise UserError(
            f"{name} can be loaded, but not computed with ({one_line(error)}). A value of its config.json does not fit:"
            " get a whole copy of the model."
        ) from error
    if not finite:
        raise UserError(
            f"{name} answers with numbers that are not finite. Its weights or its config.json are damaged, or too large"
            " for this precision (model.dtype=float32): get a whole copy of the model."
        )


def without_noise(model: PreTrainedModel) -> None:
    """Switch off all dropout, layer drop and router jitter, so that sampler and learner are the same policy.

    What the model computes in training mode must then be what it computed in evaluation mode before, twice in a row;
    otherwise a UserError. In the model's config the rates are 0 as well, for some architectures read them there.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids_1T = torch.arange(3, min(67, vocabulary), device=model.device)[None]
    devices = [model.device] if model.device.type == "cuda" else []
    was_training = model.training

    def logits(training: bool) -> torch.Tensor:
        return model.train(training)(input_ids=ids_1T, use_cache=False).logits.float()

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            expected = logits(training=False)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                compat.set_rates_to_zero(module)
                if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
                    compat.set_rates_to_zero(config)
            tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * expected.abs().max()
            differs = any(bool((logits(training=True) - expected).abs().max() > tolerance) for _ in range(2))
    finally:
        model.train(was_training)
    if differs:
        raise UserError(
            f"{type(model).__name__} computes other probabilities in training mode than in evaluation mode, although"
            " all rates of dropout and jitter were set to 0: sampler and learner would not be the same policy. Phase 3"
            " cannot train this architecture. Take a model without noise of its own."
        )


def head_agrees(model: PreTrainedModel) -> bool:
    """Whether `head_logprobs` gives what the model's own logits give, also where these are as large as in training."""
    head: Any = model.get_output_embeddings()
    factor, was_training = 1.0, model.training
    ids_1T = torch.tensor([[3, 4, 5, 6, 7, 8]], device=model.device)
    predicts_1T = torch.tensor([[True] * 5 + [False]], device=model.device)
    asked = []

    def enlarge(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        asked.append(True)
        return (given[0] * factor, *given[1:])

    larger = head.register_forward_pre_hook(enlarge)
    model.eval()
    try:
        with torch.no_grad():
            largest = model(input_ids=ids_1T, use_cache=False).logits.abs().max().clamp(min=1e-6).item()
            if not math.isfinite(largest):  # the weights are at fault, as the sampler's check and an evaluation say
                return True
            factor = 100.0 / largest if asked else 1.0  # some use the layer's weights without asking the layer
            own_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
            states_TD = read(model, predicts_1T, input_ids=ids_1T, use_cache=False) * factor
            said_T, _ = head_logprobs(model, states_TD, ids_1T[0, 1:])
    finally:
        larger.remove()
        model.train(was_training)
    own_T = own_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    exact = states_TD.dtype == head.weight.dtype == torch.float32
    return bool((own_T - said_T).abs().max() <= (0.1 if exact else 10.0))


def attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer attends to everything before it, in the same way however long the rows are.

    Engines that keep a cache and shared prefixes need both.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if {"dynamic", "longrope"} & {rope.get("rope_type")}:  # there a token's rotation depends on the longest row
        return False
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is not None:
        return all(kind in ("full_attention", "global") for kind in kinds)
    windows = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
    return all(getattr(config, name, None) is None for name in windows)


@torch.no_grad()
def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Whether rows that continue a prefix get the states that they get when they are read as a whole.

    Of two prefixes one is longer, so that the other is padded: some attention (ALiBi) counts the places of keys.
    """
    if not attends_to_all(model):
        return False
    was_training = model.training
    model.eval()
    prefixes = [tuple(range(3, 13)), (3, 4)]
    rows = [[*range(3, 16)], [3, 4, 5, 6, 7], [*range(3, 13), 8, 9], [3, 4, 5, 8], [3, 4]]
    masks = [[False] * 11 + [True] * 2, [False] * 3 + [True] * 2, [False] * 11 + [True], [False] * 3 + [True]]
    masks.append([False, True])
    assert {prefix_of(row, mask) for row, mask in zip(rows, masks, strict=True)} == {*prefixes, ()}
    try:
        with torch.autocast(model.device.type, enabled=False):
            whole_SD, _ = trained_states(model, rows, masks)
            shared_SD, _ = Prefixes(model, prefixes).states(rows, masks)
    except DEVICE_ERRORS:
        raise
    except UNFIT:
        return False
    finally:
        model.train(was_training)
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    return bool((whole_SD - shared_SD).abs().max() <= tolerance * whole_SD.abs().max())


def why_unfit(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine = SlotSampler) -> str | None:
    """Why this engine, ours with a kept cache or the one that replays, cannot be used for this model, in words.

    None where it can. What tells of the device and not of the model (no memory left, a CUDA error) is raised. A
    UserError where the model gives no numbers.
    """
    keeps = issubclass(engine, SlotSampler)
    if keeps and not attends_to_all(model):
        return "not every layer attends to all tokens before it (sliding windows, or positions that depend on others)"
    was_training = model.training
    try:
        difference, tolerance = _compare(model, stop_ids, pad_id, engine)
    except DEVICE_ERRORS:
        raise
    except UNFIT as error:
        return f"its self-test raised {one_line(error)}"
    finally:
        model.train(was_training)
    if difference <= tolerance:
        return None
    how = "with a kept cache" if keeps else "in rows that are padded on the left"
    return f"{how} its log-probs differ from those of a full forward pass by up to {difference:.2g} nats"


def _compare(
    model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine = SlotSampler
) -> tuple[float, float]:
    """The largest difference of a log-prob in the self-test, and the largest that is rounding.

    Computed in float32, without autocast: bfloat16 alone makes differences of .2 nats. Of weights in half precision a
    copy is made, where the memory allows one.
    """
    with torch.autocast(model.device.type, enabled=False):
        if _can_copy(model):
            return _largest_difference(copy.deepcopy(model).float(), stop_ids, pad_id, engine), 1e-3
        return _largest_difference(model, stop_ids, pad_id, engine), 1e-3 if model.dtype == torch.float32 else 0.25


def _can_copy(model: PreTrainedModel) -> bool:
    """Whether these are weights in half precision of which there is room for a copy in float32."""
    if model.dtype not in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False):
        return False
    if model.device.type != "cuda":
        return True
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())  # a copy, and another one while it grows
    return needed < torch.cuda.mem_get_info(model.device)[0]


def _largest_difference(model: PreTrainedModel, stop_ids: Sequence[int], pad_id: int, engine: Engine) -> float:
    sampler = engine(model, stop_ids, pad_id)
    plain = [token for token in range(model.config.get_text_config().vocab_size) if token not in set(stop_ids)][:64]
    handles = sampler.open([plain[:5], plain[3:15], plain[:5]])
    params = SamplingParams(max_new_tokens=4)
    start = [5, 12, 5]
    spans: list[list[tuple[int, Completion]]] = [[], [], []]
    for turn in range(2):
        for row, done in enumerate(sampler.sample(handles, params, [turn * 3 + row for row in range(3)])):
            spans[row].append((start[row], done))
            reply = plain[7 : 10 + row]
            sampler.append(handles[row], reply)
            start[row] += len(done.ids) + len(reply)
    worst = [0.0]
    with torch.no_grad():
        for row, handle in enumerate(handles):
            ids_1T = torch.tensor([sampler._ids[handle]], device=model.device)
            logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
            if logprobs_TV.isnan().any():
                raise UserError(
                    f"{type(model).__name__} gives probabilities that are no numbers (NaN), so its weights are damaged:"
                    " a training that diverged leaves such ones. Take an earlier checkpoint, or another model."
                )
            for begin, done in spans[row]:
                for n, (token, logprob) in enumerate(zip(done.ids, done.logprobs, strict=True)):
                    difference = abs(logprobs_TV[begin + n - 1, token].item() - logprob)
                    worst.append(math.inf if math.isnan(difference) else difference)
    return max(worst)


def can_be_deterministic(model: Any, bf16: bool) -> bool:
    """Whether this model trains under torch's deterministic algorithms on a GPU, by a training step of eight tokens.

    False on a CPU, which needs none, and for a sharded model. Operations that are not torch's own are not looked at.
    """
    device = model.device
    if device.type != "cuda" or launcher.sharding() != "none":
        return False
    training, ids = model.training, torch.zeros(1, 8, dtype=torch.long, device=device)
    # also of a model whose weights are frozen, as those of 4 bits are before they get an adapter
    hook = model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: out.requires_grad_())
    try:
        with (
            torch.random.fork_rng(devices=[device]),
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
            hardware.deterministic(),
        ):
            model.train()(input_ids=ids, use_cache=False).logits.float().mean().backward()
    except DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        cause = one_line(error).partition(", but")[0]
        runlog.say(f"Training is not deterministic on this GPU, so a resumed run will differ by rounding: {cause}.")
        return False
    finally:
        hook.remove()
        model.zero_grad(set_to_none=True)
        model.train(training)
    return True
