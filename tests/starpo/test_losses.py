"""Are losses and weights what their papers say, and TRL's where TRL has them?  On ragged batches, to 1e-6."""

from __future__ import annotations

import doctest
import math
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from trl.trainer.grpo_trainer import GRPOTrainer

from posttrain.starpo import losses
from posttrain.starpo.losses import cispo, gspo, kl, ppo_clip, sampler_weights, token_weights, value_loss

few = settings(max_examples=40, deadline=None)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Tokens:
    """Episodes of ragged length and the sampled tokens of all, one after another."""

    lengths: list[int]
    new: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    advantage_B: torch.Tensor
    advantage: torch.Tensor

    @property
    def episode(self) -> torch.Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        return [part.tolist() for part in values.split(self.lengths)]


@st.composite
def batches(draw: st.DrawFn) -> Tokens:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.2, 2.0]))
    old = -rng.exponential(1.5, sum(lengths))
    new = np.minimum(0, old + scale * rng.normal(size=len(old)))
    advantage_B = rng.normal(size=len(lengths)) * rng.integers(0, 2, len(lengths))
    return Tokens(
        lengths=lengths,
        new=tensor(new),
        old=tensor(old),
        reference=tensor(np.minimum(0, old + rng.normal(size=len(old)))),
        advantage_B=tensor(advantage_B),
        advantage=tensor(np.repeat(advantage_B, lengths)),
    )


def gradient(loss_of, new: torch.Tensor) -> torch.Tensor:
    new = new.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(new), new)
    return grad


def test_the_examples_hold() -> None:
    assert doctest.testmod(losses).attempted >= 5 and doctest.testmod(losses).failed == 0


# Against loops


def slow_clip(ratio: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    inside = min(max(ratio, low), high)
    return -min(ratio * advantage, inside * advantage), inside * advantage < ratio * advantage


@few
@given(batches(), st.sampled_from([None, 1.5, 3.0]))
def test_ppo_clip_is_the_loop(batch: Tokens, delta: float | None) -> None:
    loss, clipped = ppo_clip(batch.new, batch.old, batch.advantage, 0.2, 0.28, delta=delta)
    for i, (n, o, a) in enumerate(zip(batch.new.tolist(), batch.old.tolist(), batch.advantage.tolist(), strict=True)):
        slow, bitten = slow_clip(math.exp(n - o), a, 0.8, 1.28)
        if delta is not None and a < 0 and slow > -delta * a:
            slow, bitten = -delta * a, True
        assert loss[i].item() == pytest.approx(slow, abs=1e-9)
        assert clipped[i].item() == bitten


@few
@given(batches())
def test_gspo_is_the_loop_and_has_the_gradient_of_the_paper(batch: Tokens) -> None:
    """Eq. 7 written out, differentiated by autograd: s = exp(mean of the log-ratios), clipped once per episode."""

    def loss_of(new: torch.Tensor) -> torch.Tensor:
        weight = token_weights(batch.episode, "sequence_mean", torch.tensor(batch.lengths))
        return (gspo(new, batch.old, batch.advantage, batch.episode, 0.1, 0.15)[0] * weight).sum()

    def slow_of(new: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one, old, a in zip(
            new.split(batch.lengths), batch.old.split(batch.lengths), batch.advantage_B.tolist(), strict=True
        ):
            s = ((one - old).sum() / len(one)).exp()
            total = total - torch.minimum(s * a, s.clamp(0.9, 1.15) * a)
        return total / len(batch.lengths)

    assert loss_of(batch.new).item() == pytest.approx(slow_of(batch.new).item(), abs=1e-6)
    assert torch.allclose(gradient(loss_of, batch.new), gradient(slow_of, batch.new), atol=1e-6)


@few
@given(batches())
def test_cispo_is_the_loop_and_silences_nobody(batch: Tokens) -> None:
    loss, clipped = cispo(batch.new, batch.old, batch.advantage, 1.3)
    grad = gradient(lambda new: cispo(new, batch.old, batch.advantage, 1.3)[0].sum(), batch.new)
    for i, (n, o, a) in enumerate(zip(batch.new.tolist(), batch.old.tolist(), batch.advantage.tolist(), strict=True)):
        weight = min(math.exp(n - o), 1.3)
        assert loss[i].item() == pytest.approx(-weight * a * n, abs=1e-9)
        assert grad[i].item() == pytest.approx(-weight * a, abs=1e-9)
        assert clipped[i].item() == (math.exp(n - o) > 1.3)


@few
@given(batches())
def test_every_policy_loss_starts_as_plain_policy_gradient(batch: Tokens) -> None:
    """Before the first update the ratio is 1 to the last bit, nothing is clipped, and all gradients are the same."""
    for loss_of in (
        lambda new: ppo_clip(new, batch.old, batch.advantage, 0.2, 0.28, delta=3.0),
        lambda new: gspo(new, batch.old, batch.advantage, batch.episode, 3e-4, 4e-4),
        lambda new: cispo(new, batch.old, batch.advantage, 5.0),
    ):
        assert not loss_of(batch.old)[1].any()
        assert torch.equal(gradient(lambda new, f=loss_of: f(new)[0].sum(), batch.old), -batch.advantage)


@few
@given(batches())
def test_kl_is_the_loop(batch: Tokens) -> None:
    found = kl(batch.new, batch.reference)
    for i, (n, r) in enumerate(zip(batch.new.tolist(), batch.reference.tolist(), strict=True)):
        assert found[i].item() == pytest.approx(math.exp(r - n) - (r - n) - 1, abs=1e-9)
    assert (found >= 0).all() and (kl(batch.old, batch.old) == 0).all()


@pytest.mark.parametrize("gap", [30.0, 95.0, 1e4])
def test_k3_never_overflows(gap: float) -> None:
    new = torch.tensor([-1.0, -1.0 - gap, -1.0], requires_grad=True)
    value = kl(new, torch.tensor([-1.5, -1.0, -1.0 - gap]))
    (grad,) = torch.autograd.grad(value.sum(), new)
    assert value[1].item() == pytest.approx(math.exp(20) - 21) and grad[1] == 0  # its neighbours keep their pull
    assert value[2].item() == pytest.approx(gap - 1 + math.exp(-gap))
    assert grad[2] > 0.9 and grad[0].item() == pytest.approx(1 - math.exp(-0.5))


@few
@given(batches())
def test_value_loss_is_the_loop(batch: Tokens) -> None:
    values, old, returns = batch.new, batch.old, batch.reference
    loss, clipped = value_loss(values, old, returns, 0.5)
    for i, (v, o, target) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
        near = min(max(v, o - 0.5), o + 0.5)
        assert loss[i].item() == pytest.approx(0.5 * max((v - target) ** 2, (near - target) ** 2))
        assert clipped[i].item() == ((near - target) ** 2 > (v - target) ** 2)


@few
@given(batches(), st.data())
def test_token_weights_are_the_loops(batch: Tokens, data: st.DataObject) -> None:
    loss, rows = batch.new, batch.rows(batch.new)
    lengths = torch.tensor([0, *batch.lengths])  # of one more episode no token counts
    slow = {
        "token_mean": sum(map(sum, rows)) / sum(batch.lengths),
        "sequence_mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "dr_grpo": sum(map(sum, rows)) / (len(rows) * 7),
    }
    parts = data.draw(st.lists(st.integers(0, 2), min_size=len(loss), max_size=len(loss)))
    for aggregation, wanted in slow.items():
        weight = token_weights(batch.episode + 1, aggregation, lengths, 7)
        assert (loss * weight).sum().item() == pytest.approx(wanted, abs=1e-6)
        # any split into micro-batches, episodes cut in two included, is the same step
        split = [[i for i, part in enumerate(parts) if part == number] for number in range(3)]
        total = sum(
            (loss[i] * token_weights((batch.episode + 1)[i], aggregation, lengths, 7)).sum().item() for i in split
        )
        assert total == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ValueError, match="token_mean"):
        token_weights(batch.episode, "mean", lengths)


@few
@given(batches(), st.sampled_from([0.5, 2.0]))
def test_sampler_weights_are_the_loop(batch: Tokens, clip_max: float) -> None:
    wanted = [min(math.exp(gap), clip_max) for gap in (batch.new - batch.old).tolist()]
    assert np.allclose(sampler_weights(batch.new, batch.old, clip_max).numpy(), wanted, atol=1e-6)
    assert (sampler_weights(batch.new, batch.old, None) == 1).all()


OBJECTIVES = {
    "ppo_clip": lambda new, b: ppo_clip(new, b.old, b.advantage, 0.2, 0.28, delta=3.0),
    "gspo": lambda new, b: gspo(new, b.old, b.advantage, b.episode, 0.2, 0.28),
    "cispo": lambda new, b: cispo(new, b.old, b.advantage, 0.28),
}


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@few
@given(batch=batches(), entropy_coef=st.sampled_from([0.0, 0.3]), beta=st.sampled_from([0.0, 0.2]))
def test_the_objective_is_its_formula(loss_type: str, batch: Tokens, entropy_coef: float, beta: float) -> None:
    """The sum of weight * (importance weight * policy loss - bonus * entropy + beta * KL), and its gradient."""
    settings = losses.Settings(loss_type, 0.2, 0.28, 3.0, entropy_coef, beta)
    rng = np.random.default_rng(len(batch.old))
    weight, importance = (tensor(rng.uniform(size=len(batch.old))) for _ in range(2))
    entropy, new = (tensor(rng.uniform(size=len(batch.old))).requires_grad_(), batch.new.clone().requires_grad_())
    found = losses.objective(
        losses.Tokens(new, batch.old, batch.advantage, weight, importance, entropy, batch.reference, batch.episode),
        settings,
    )
    gradients = torch.autograd.grad(found.loss, [new, entropy], allow_unused=True)

    policy, clipped = OBJECTIVES[loss_type](new, batch)
    distance = kl(new, batch.reference)
    wanted = sum(
        w * (rho * loss - entropy_coef * h + beta * d)
        for w, rho, loss, h, d in zip(weight, importance, policy, entropy, distance, strict=True)
    )
    assert isinstance(wanted, torch.Tensor) and found.loss.item() == pytest.approx(wanted.item(), abs=1e-9)
    assert torch.equal(found.clipped_S, clipped) and torch.equal(found.policy_S, policy)
    for own, expected in zip(gradients, torch.autograd.grad(wanted, [new, entropy]), strict=True):
        assert torch.allclose(torch.zeros_like(expected) if own is None else own, expected, atol=1e-9)


def test_an_unknown_policy_loss_is_an_error() -> None:
    one = tensor([1.0])
    with pytest.raises(ValueError, match="ppo_clip"):
        losses.policy_loss(losses.Tokens(one, one, one, one, one, one), losses.Settings(loss_type="reinforce"))


# Against TRL


def padded(batch: Tokens, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(batch.lengths)), batch_first=True)


class OneProcess:
    num_processes, sync_gradients = 1, True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def trainer(batch: Tokens, new: torch.Tensor, **settings) -> SimpleNamespace:
    """What `GRPOTrainer._compute_loss` reads of its trainer; the model's log-probs are given."""
    args = SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1)
    entropies = settings.pop("entropies", torch.zeros_like(padded(batch, batch.old)))
    defaults = dict(
        args=args, accelerator=OneProcess(), model=SimpleNamespace(training=True), aux_loss_enabled=False,
        _get_per_token_logps_and_entropies=lambda *a, **k: (padded(batch, new), entropies, None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28, use_vllm=False, current_gradient_accumulation_steps=1,
        vllm_importance_sampling_correction=False, max_completion_length=7, _entropy_bonus_enabled=False,
        use_adaptive_entropy=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    return SimpleNamespace(**{**defaults, **settings})


def trl_loss(batch: Tokens, weight: torch.Tensor | None = None, **settings):
    """TRL's loss as a function of the new log-probs, and the trainer that computed it last."""

    def loss_of(new: torch.Tensor) -> torch.Tensor:
        mask = padded(batch, torch.ones_like(batch.old))
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long), "prompt_mask": torch.ones(len(mask), 1),
            "completion_ids": torch.zeros_like(mask, dtype=torch.long), "completion_mask": mask,
            "advantages": batch.advantage_B, "old_per_token_logps": padded(batch, batch.old),
            "ref_per_token_logps": padded(batch, batch.reference), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        extra = {}
        if weight is not None:
            inputs["importance_sampling_ratio"] = padded(batch, weight)
            extra = {"use_vllm": True, "vllm_importance_sampling_correction": True}
        return GRPOTrainer._compute_loss(trainer(batch, new, **settings, **extra), None, inputs)  # pyright: ignore

    return loss_of


def agrees(batch: Tokens, theirs, aggregation: str, token_loss) -> None:
    """Value and gradient, to 1e-6, relative where they are large: weights are float32."""
    weight = token_weights(batch.episode, aggregation, torch.tensor(batch.lengths), 7)

    def ours(new: torch.Tensor) -> torch.Tensor:
        return (token_loss(new) * weight).sum()

    assert ours(batch.new).item() == pytest.approx(theirs(batch.new).item(), rel=1e-6, abs=1e-6)
    assert torch.allclose(gradient(ours, batch.new), gradient(theirs, batch.new), atol=1e-6)


AGGREGATIONS = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "dr_grpo"}


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@few
@given(batch=batches(), delta=st.sampled_from([None, 3.0]), beta=st.sampled_from([0.0, 0.1]))
def test_ppo_clip_with_delta_and_kl_is_that_of_trl(loss_type, batch: Tokens, delta, beta: float) -> None:
    theirs = trl_loss(batch, loss_type=loss_type, delta=delta, beta=beta)
    agrees(
        batch, theirs, AGGREGATIONS[loss_type],
        lambda new: ppo_clip(new, batch.old, batch.advantage, 0.2, 0.28, delta=delta)[0]
        + beta * kl(new, batch.reference),
    )  # fmt: skip


@few
@given(batches())
def test_gspo_is_that_of_trl(batch: Tokens) -> None:
    theirs = trl_loss(batch, loss_type="grpo", importance_sampling_level="sequence")
    agrees(
        batch, theirs, "sequence_mean",
        lambda new: gspo(new, batch.old, batch.advantage, batch.episode, 0.2, 0.28)[0],
    )  # fmt: skip


@few
@given(batches())
def test_cispo_is_that_of_trl(batch: Tokens) -> None:
    theirs = trl_loss(batch, loss_type="cispo", epsilon_high=5.0)
    agrees(batch, theirs, "token_mean", lambda new: cispo(new, batch.old, batch.advantage, 5.0)[0])


@few
@given(batch=batches())
def test_sampler_weights_enter_the_loss_as_in_trl(batch: Tokens) -> None:
    """The weight itself (`token_truncate`) is a line in the middle of TRL's rollout: written out here."""
    ratio = padded(batch, batch.old - batch.reference).exp().clamp(max=3.0)
    wanted = torch.cat([row[:length] for row, length in zip(ratio, batch.lengths, strict=True)])
    weight = sampler_weights(batch.old, batch.reference, clip_max=3.0)
    assert torch.allclose(weight, wanted, atol=1e-9)
    theirs = trl_loss(batch, weight=wanted)
    agrees(
        batch, theirs, "token_mean",
        lambda new: weight * ppo_clip(new, batch.old, batch.advantage, 0.2, 0.28)[0],
    )  # fmt: skip


def test_k3_in_the_loss_has_the_gradient_of_the_other_direction() -> None:
    """Over all tokens, weighted by the policy: the value is KL(policy || reference), the gradient the other one's."""
    torch.manual_seed(0)
    logits_V = torch.randn(7, dtype=torch.float64, requires_grad=True)
    log_r_V = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    log_p_V = logits_V.log_softmax(-1)
    loss = (log_p_V.detach().exp() * kl(log_p_V, log_r_V)).sum()
    assert loss.item() == pytest.approx((log_p_V.exp() * (log_p_V - log_r_V)).sum().item(), rel=1e-12)
    (found,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (reverse,) = torch.autograd.grad((log_r_V.exp() * (log_r_V - log_p_V)).sum(), logits_V, retain_graph=True)
    (same,) = torch.autograd.grad((log_p_V.exp() * (log_p_V - log_r_V)).sum(), logits_V)
    assert torch.allclose(found, reverse, atol=1e-12) and not torch.allclose(found, same, atol=1e-2)


def test_the_figure_of_old_tokens_is_a_kl_to_second_order_alone() -> None:
    """policy/kl_to_old: tokens of the old policy, weighted by it, in the formula of k3."""
    torch.manual_seed(0)
    old_V, away_V = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def figures(scale: float) -> tuple[float, float, float]:
        log_o_V, log_n_V = old_V.log_softmax(-1), (old_V + scale * away_V).log_softmax(-1)
        there, back = ((a.exp() * (a - b)).sum().item() for a, b in ((log_o_V, log_n_V), (log_n_V, log_o_V)))
        return (log_o_V.exp() * kl(log_n_V, log_o_V)).sum().item(), there, back

    value, *both = figures(0.001)
    assert all(value == pytest.approx(each, rel=1e-2) for each in both)
    value, *both = figures(1.0)
    assert all(abs(value / each - 1) > 0.05 for each in both)
