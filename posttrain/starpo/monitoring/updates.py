"""What did an update do?  Sums over the tokens of its micro-batches, and at its end means over all processes."""

from __future__ import annotations

import torch

from posttrain.runtime import floats, parallel
from posttrain.starpo import losses
from posttrain.starpo.learner import CRITIC, POLICY, Forward, Learner, Taught, ValueLoss


class UpdateFigures:
    """Figures of an update: call `policy` and `critic` for a micro-batch, `step` for an optimizer step, then `row`.

    The sums of micro-batches become numbers in `row` alone, so that nothing waits for a GPU before.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[torch.Tensor]] = {}
        self.tokens, self.compared = 0, 0
        self.steps, self.skipped, self.norms = 0, 0, [0.0, 0.0]
        self.distilled, self.distilled_tokens = 0.0, 0

    @torch.no_grad()
    def policy(
        self, forward: Forward, tokens: losses.Tokens, result: losses.Objective, sampler_S: torch.Tensor
    ) -> None:
        """Add a micro-batch; sampler_S: the sampler's log-probs, (S,), compared in the first optimizer step alone."""
        if not forward.weight:
            return
        new_S, clipped_S = tokens.logprobs_S, result.clipped_S
        self.tokens += len(new_S)
        sums = {
            "policy/loss": result.policy_S.sum(),
            "policy/entropy": tokens.entropy_S.sum(),
            "policy/clip_fraction": clipped_S.sum(),
            "policy/clip_fraction_high": (clipped_S & (tokens.advantages_S > 0)).sum(),
            "policy/kl_to_old": losses.kl(new_S, tokens.old_S).sum(),
            "policy/importance_weight": tokens.importance_weights_S.sum(),
        }
        if self.steps == 0:
            sums["policy/sampler_gap"] = (new_S - sampler_S).abs().sum()
            self.compared += len(new_S)
        if tokens.reference_S is not None:
            sums["policy/kl_to_reference"] = losses.kl(new_S, tokens.reference_S).sum()
        self._add(sums)

    @torch.no_grad()
    def critic(self, forward: Forward, value: ValueLoss | None) -> None:
        """Add a micro-batch; value: of the critic, None for no critic."""
        if value is None or not forward.weight:
            return
        sums = {
            "critic/loss": value.loss_S.sum(),
            "critic/value": value.values_S.sum(),
            "critic/clip_fraction": value.clipped_S.sum(),
            "critic/error": (value.values_S.float() - value.returns_S).abs().sum(),
        }
        self._add(sums)

    def teacher(self, forward: Forward, taught: Taught | None) -> None:
        """Add a micro-batch; taught: by the teacher, None without one."""
        if taught is not None and forward.weight:
            self._add({"update/teacher_kl": taught.kl_S.sum()})

    def distillation(self, kl: float, tokens: int) -> None:
        """Add a distillation loss. kl: the sum over this process's tokens. tokens: of all processes."""
        self.distilled, self.distilled_tokens = self.distilled + kl, self.distilled_tokens + tokens

    def step(self, norms: list[float], stepped: bool) -> None:
        """Add an optimizer step. norms: of the gradients of policy and critic before clipping."""
        self.steps += 1
        if stepped:
            self.norms = [a + b for a, b in zip(self.norms, norms, strict=True)]
        else:
            self.skipped += 1

    def row(self, learner: Learner) -> dict[str, float]:
        """Return means over the trained tokens of all processes; norms are means over optimizer steps."""
        keys = sorted({key for keys in parallel.gather([list(self.sums)]) for key in keys})
        own = {key: sum(floats(torch.stack(values))) for key, values in self.sums.items()}
        sums = {key: parallel.total(own.get(key, 0.0), learner.device) for key in keys}
        gap = sums.pop("policy/sampler_gap", 0.0)
        tokens, compared = (parallel.total(count, learner.device) for count in (self.tokens, self.compared))
        stepped = max(1, self.steps - self.skipped)
        row = {key: value / tokens for key, value in sums.items()}
        row |= {
            "policy/grad_norm": self.norms[POLICY] / stepped,
            "policy/skipped_steps": self.skipped,
            "policy/sampler_gap": gap / max(1.0, compared),
            "policy/learning_rate": learner.optimizer.param_groups[POLICY]["lr"],
        }
        if self.distilled_tokens:
            row["distillation/kl"] = parallel.total(self.distilled, learner.device) / self.distilled_tokens
        if learner.critic:
            row["critic/grad_norm"] = self.norms[CRITIC] / stepped
        return row

    def _add(self, sums: dict[str, torch.Tensor]) -> None:
        for key, value in sums.items():
            self.sums.setdefault(key, []).append(value)


def advantage_figures(advantages_S: torch.Tensor, trained_S: torch.Tensor) -> dict[str, float]:
    """Return figures of the advantages of the trained tokens. trained_S: which tokens are trained on."""
    own_S = advantages_S[trained_S]
    return {
        "advantage/mean": own_S.mean().item(),
        "advantage/std": own_S.std(correction=0).item(),
        "advantage/max": own_S.abs().max().item(),
    }
