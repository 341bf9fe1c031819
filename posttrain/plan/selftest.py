"""What must a model pass before a run?  Each shortcut is tried on the very model, against the plain way.

without_noise               in training mode it computes what it computes in evaluation mode
head_agrees                 log-probs from its states and its output layer are those of its own logits
can_share_prefixes          rows that continue a prefilled prefix get the states of whole rows
can_be_deterministic        on a GPU torch has a deterministic implementation of each of its operations
change_beside_longer_rows   padding changes nothing
why_not_recomputed          gradient checkpointing gives the gradient that it saves memory for
adapter_of                  an adapter can be put on, and a gradient reaches it
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
            states_TD = backbone_states(model, predicts_1T, input_ids=ids_1T, use_cache=False) * factor
            said_T, _ = head_logprobs(model, states_TD, ids_1T[0, 1:])
    finally:
        larger.remove()
        model.train(was_training)
    own_T = own_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    exact = states_TD.dtype == head.weight.dtype == torch.float32
    return bool((own_T - said_T).abs().max() <= (0.1 if exact else 10.0))


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


# ------------------------------------------------------------ tried by check_model alone; the model is left as it was
@torch.no_grad()
def change_beside_longer_rows(net: Any, pad_id: int) -> float:
    """By which share the states of a row change when it is padded on the right, beside a longer row.

    With a mask, as phases 1 and 2 read rows, and without one, as phase 3 does.
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
    """Why gradient checkpointing cannot be used, or "": at the embeddings it must give the gradient that it saves."""
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
        if net.is_gradient_checkpointing:
            net.gradient_checkpointing_disable()
        net.train(was_training)
        for parameter in trained:
            parameter.requires_grad_(True)


def _gradient_at_the_embeddings(net: Any) -> torch.Tensor:
    leaf: list[torch.Tensor] = []

    def cut(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
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
    names: list[str]  # of the layers that it sits on
    idle: list[str]  # those of them that no gradient reaches
    head: bool  # whether the output layer is among them


def on(section: ModelSection, names: list[str]) -> ModelSection:
    """The same with an adapter on these layers."""
    return section.model_copy(update={"lora": section.lora.model_copy(update={"target_modules": names})})


def linear_names(net: Any) -> list[str]:
    """The last names of all linear layers but the output layer."""
    head = net.get_output_embeddings()
    linear = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name, layer in linear if layer is not head})


def adapter_of(section: ModelSection, net: Any, chat: Chat) -> Adapter | str:
    """The adapter that `models.peft_config` asks for, put on, tried and taken off again; why not, in words."""
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
    """Why peft takes no such adapter, or "": asked on a model without memory, for a refusal leaves one half changed."""
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(copy.deepcopy(net.config), trust_remote_code=section.trust_remote_code)
    settings: Any = models.peft_config(section)
    try:
        with trl_arguments.refusals_in_words():
            get_peft_model(bare, settings)
    except UserError as problem:
        return " ".join(str(problem.__cause__).split())[:300].rstrip(".")
    return ""
