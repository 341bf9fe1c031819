"""Which shortcuts does a model allow?  Each is tried on the model itself, and compared with the plain computation.

without_noise               training mode computes the same as evaluation mode
head_agrees                 log-probs from states and output layer equal those from the model's logits
can_share_prefixes          rows that continue a prefilled prefix get the same states as whole rows
can_be_deterministic        on a GPU torch has deterministic implementations of all operations
change_beside_longer_rows   padding does not change the states
why_not_recomputed          gradient checkpointing does not change the gradient
adapter_of                  an adapter can be added, and gets gradients
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain import models
from posttrain.config import ModelSection
from posttrain.models import (
    UNFIT,
    Chat,
    Prefixes,
    attends_to_all,
    backbone_states,
    head_logprobs,
    prefix_of,
    trained_states,
)
from posttrain.runtime import DEVICE_ERRORS, compat, hardware, launcher, runlog, trl_arguments
from posttrain.types import UserError, one_line


def without_noise(model: PreTrainedModel) -> None:
    """Switch off all dropout, layer drop and router jitter, so that sampler and learner are the same policy.

    In the model's config the rates are set to 0 as well, since some architectures read them there.

    Raises:
        UserError: training mode still computes other logits than evaluation mode, in one of two tries.
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
            " cannot train this architecture. Choose a model whose only noise is dropout."
        )


def head_agrees(model: PreTrainedModel) -> bool:
    """Return whether `head_logprobs` agrees with the model's own logits, also for logits as large as in training."""
    head: Any = model.get_output_embeddings()
    factor, was_training = 1.0, model.training
    ids_1T = torch.tensor([[3, 4, 5, 6, 7, 8]], device=model.device)
    predicts_1T = torch.tensor([[True] * 5 + [False]])
    calls = []

    def enlarge(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        calls.append(True)
        return (inputs[0] * factor, *inputs[1:])

    larger = head.register_forward_pre_hook(enlarge)
    model.eval()
    try:
        with torch.no_grad():
            largest = model(input_ids=ids_1T, use_cache=False).logits.abs().max().clamp(min=1e-6).item()
            if not math.isfinite(largest):  # the weights are wrong, which the sampler's check and an evaluation report
                return True
            factor = 100.0 / largest if calls else 1.0  # some models use the layer's weights without calling it
            own_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
            states_TD = backbone_states(model, predicts_1T, input_ids=ids_1T, use_cache=False) * factor
            head_T, _ = head_logprobs(model, states_TD, ids_1T[0, 1:])
    finally:
        larger.remove()
        model.train(was_training)
    own_T = own_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    exact = states_TD.dtype == head.weight.dtype == torch.float32
    return bool((own_T - head_T).abs().max() <= (0.1 if exact else 10.0))


@torch.no_grad()
def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Return whether rows that continue a prefix get the same states as when they are read as a whole.

    The two prefixes differ in length, so that one is padded: some attention (ALiBi) counts the positions of keys.
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


def can_be_deterministic(model: Any, bf16: bool) -> bool:
    """Return whether a model trains with torch's deterministic algorithms on a GPU, by a step of eight tokens.

    False on a CPU, which does not need them, and for a sharded model. Operations outside of torch are not checked.
    """
    device = model.device
    if device.type != "cuda" or launcher.sharding() != "none":
        return False
    training, ids = model.training, torch.zeros(1, 8, dtype=torch.long, device=device)
    # gives gradients to a model with frozen weights as well, e.g. one of 4 bits before it gets an adapter
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


# ------------------------------------------------------------ only for check_model; the model is left unchanged
@torch.no_grad()
def change_beside_longer_rows(net: Any, pad_id: int) -> float:
    """Return the relative change of a row's states when it is padded on the right, beside a longer row.

    The larger of two: with a mask, as in phases 1 and 2, and without one, as in phase 3.
    """
    rows = [[3, 4, 5, 6, 7, 8, 9, 10] * 3, [3, 4, 9]]
    masks = [[False] + [True] * 23, [False, True, True]]
    was_training = net.training
    net.eval()
    alone = trained_states(net, rows[1:], masks[1:])[0]
    beside = trained_states(net, rows, masks)[0][-2:]
    ids = torch.tensor([rows[0], rows[1] + [pad_id] * 21], device=net.device)
    mask = torch.tensor([[1] * 24, [1] * 3 + [0] * 21], device=net.device)
    masked = net.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[1, :2]
    net.train(was_training)
    return max(float((each - alone).abs().max() / alone.abs().max()) for each in (beside, masked))


def why_not_recomputed(net: Any) -> str:
    """Return why gradient checkpointing cannot be used, or "" if the gradient at the embeddings stays the same."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    was_training = net.training
    net.train().requires_grad_(False)
    try:
        expected = _gradient_at_the_embeddings(net)
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        off = float((_gradient_at_the_embeddings(net) - expected).abs().max() / expected.abs().max())
        return "" if off < 0.05 else f"gradients differ by {off:.1%}"
    except (ValueError, RuntimeError) as error:
        return one_line(error)
    finally:
        if net.is_activation_checkpointing:
            net.gradient_checkpointing_disable()
        net.train(was_training)
        for parameter in trained:
            parameter.requires_grad_(True)


def _gradient_at_the_embeddings(net: Any) -> torch.Tensor:
    leaf: list[torch.Tensor] = []

    def cut(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        leaf.append(out.detach().requires_grad_())
        return leaf[-1]

    hook = net.get_input_embeddings().register_forward_hook(cut)
    try:
        _loss(net).backward()
    finally:
        hook.remove()
    assert leaf[0].grad is not None
    return leaf[0].grad


def _loss(net: Any) -> torch.Tensor:
    return net(input_ids=torch.arange(3, 9, device=net.device)[None], use_cache=False).logits.float().sin().sum()


class Adapter(NamedTuple):
    """The layers of a LoRA adapter: Adapter(names=["q_proj", "v_proj"], idle=[], head=False)"""

    names: list[str]  # of the layers with an adapter
    idle: list[str]  # those that get no gradient
    head: bool  # whether the output layer has one


def on(section: ModelSection, names: list[str]) -> ModelSection:
    """Return the section with an adapter on these layers."""
    return section.model_copy(update={"lora": section.lora.model_copy(update={"target_modules": names})})


def linear_names(net: Any) -> list[str]:
    """Return the last parts of the names of all linear layers but the output layer."""
    head = net.get_output_embeddings()
    linear = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name, layer in linear if layer is not head})


def adapter_of(section: ModelSection, net: Any, chat: Chat) -> Adapter | str:
    """Return the adapter of `models.peft_config` after it was added, tried and removed; or a text that says why not."""
    if refused := _refused(section, net):
        return refused
    try:
        settings: Any = models.peft_config(section, net, chat)
    except UserError as problem:
        return str(problem).rstrip(".")
    kept = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    was_training = net.training
    wrapped: Any = get_peft_model(net, settings)
    try:
        _loss(wrapped.train()).backward()
        reached: dict[str, bool] = {}
        for name, layer in net.named_modules():
            if hasattr(layer, "lora_B"):
                short = name.rpartition(".")[2]
                learns = any(p.grad is not None for p in layer.lora_B.parameters())
                reached[short] = reached.get(short, False) or learns
        head = hasattr(net.get_output_embeddings(), "lora_A")
    finally:
        wrapped.unload()
        net.train(was_training)
        for parameter, trains in kept:
            parameter.requires_grad_(trains).grad = None
    return Adapter(sorted(reached), sorted(name for name, learns in reached.items() if not learns), head)


def _refused(section: ModelSection, net: Any) -> str:
    """Return why peft refuses the adapter, or "". Tried without memory, since a refusal leaves a model half changed."""
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(copy.deepcopy(net.config), trust_remote_code=section.trust_remote_code)
    settings: Any = models.peft_config(section)
    try:
        with trl_arguments.refusals_in_words():
            get_peft_model(bare, settings)
    except UserError as problem:
        return " ".join(str(problem.__cause__).split())[:300].rstrip(".")
    return ""
