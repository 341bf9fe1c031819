"""What is tried on a model beside the self-tests of a run?  Padding, recomputed activations, adapters.

The model is left as it was.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from posttrain import models, trl_arguments
from posttrain.chat import Chat
from posttrain.config import ModelSection
from posttrain.policy import trained_states
from posttrain.types import UserError, one_line


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
