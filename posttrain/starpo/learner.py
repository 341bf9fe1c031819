"""What surrounds the model in phase 3?  Log-probs and values of sampled tokens, micro-batches, the optimizer.

The algorithm is in train_phase3_starpo.py, its formulas are in starpo/. Shapes: B episodes, N turns of all episodes one
after another, S sampled tokens of all turns one after another, D the width of the model's last states. Processes share
out the micro-batches, whoever played their episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.config import StarPORun
from posttrain.models import Prefixes, head_logprobs, microbatches, prefix_of, trained_states, worth_sharing
from posttrain.plan import can_be_deterministic, can_share_prefixes, head_agrees
from posttrain.runtime import Shards, launcher, load_whole_state, parallel
from posttrain.starpo import losses
from posttrain.starpo.critic import Critic
from posttrain.starpo.experience import Batch, BatchRow, Experience, Measured
from posttrain.types import Trajectory, UserError

POLICY, CRITIC = 0, 1  # places in `Learner.trainable` and in the optimizer
VALUE_COEF = 0.5  # c1 of PPO (arXiv 1707.06347, eq. 9), which weighs the value loss where the trunk is shared


class Forward(NamedTuple):
    """A micro-batch after its forward pass: log-probs and entropies of its S sampled tokens, with gradient.

    index_S: where these tokens stand in the batch. states_SD: what the output layer multiplied, for a shared critic.
    """

    rows: list[BatchRow]
    index_S: torch.Tensor
    logprobs_S: torch.Tensor
    entropy_S: torch.Tensor
    states_SD: torch.Tensor

    def take(self, values_S: torch.Tensor) -> torch.Tensor:
        """What a tensor over the batch has for these tokens, on their device."""
        return values_S[self.index_S].to(self.logprobs_S.device)

    @property
    def counts(self) -> bool:
        return not isinstance(self.rows, StandIn)

    def weights(self, weights_S: torch.Tensor) -> torch.Tensor:
        """What these tokens count in the loss."""
        return self.take(weights_S) if self.counts else torch.zeros_like(self.logprobs_S)


class StandIn(list[BatchRow]):
    """A micro-batch that another process has as well; this one reads it, with weight 0, to keep pace.

    Under FSDP2 all processes gather a layer together, as often as the one with most micro-batches needs it.
    """


class Trained(NamedTuple):
    """The models that learn and are asked: those of the learner, or their twins in shards.

    model: `policy`, or peft's wrapper around it.
    """

    model: Any
    policy: Any
    critic: Critic | None
    reference: Any


class ValueLoss(NamedTuple):
    """The critic's share of a micro-batch's loss, and what it is made of, each (S,)."""

    loss: torch.Tensor
    loss_S: torch.Tensor
    clipped_S: torch.Tensor
    values_S: torch.Tensor
    returns_S: torch.Tensor


class Learner:
    """The policy, with what is trained and asked beside it.

    model: a transformers model, or peft's wrapper around one. reference: a frozen copy of the model that the run began
    with; None where nobody asks for it or the adapter is switched off instead.
    """

    def __init__(self, cfg: StarPORun, model: Any, reference: Any = None) -> None:
        self.cfg, self.model, self.reference = cfg, model, reference
        self.critic = Critic(cfg.algorithm.critic.kind, model) if cfg.algorithm.critical else None
        self.adapted = hasattr(model, "get_base_model")
        self.policy: Any = self._base(model)  # an adapter's layers sit inside it
        if hasattr(self.policy.get_output_embeddings(), "lora_A"):
            raise UserError(
                "Phase 3 computes log-probs from the output layer's own weight, without an adapter: leave the output"
                " layer (lm_head) out of model.lora.target_modules."
            )
        device = self.policy.device
        self.device = device
        self.autocast: Callable[[], Any] = lambda: torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=bool(cfg.trainer.bf16)
        )
        if not head_agrees(self.policy):
            raise UserError(
                f"{type(model).__name__} does more to its logits than phase 3 knows: log-probs of sampled"
                " tokens would be wrong. Choose a model of another architecture."
            )
        sharded = launcher.sharding() == "fsdp2"
        # a prefix that some processes have and others do not would be gathered for by some and not by others
        self.shares = not sharded and cfg.can_share_prefixes and can_share_prefixes(self.policy)
        # sampler and trainer round alike in float32 alone
        our_engine = cfg.rollout.engine in ("auto", "slots", "replay")
        self.exact = our_engine and self.policy.dtype == torch.float32 and not cfg.trainer.bf16
        self.shards: Shards | None = None
        self.trained = Trained(model, self.policy, self.critic, reference)
        if sharded:
            parts = {"model": model, "critic": self.critic, "reference": reference}
            self.shards = Shards({name: part for name, part in parts.items() if part is not None}, device)
            twins = {name: self.shards.part(name) if part is not None else None for name, part in parts.items()}
            self.trained = Trained(policy=self._base(twins["model"]), **twins)
        of_critic = self.trained.critic.own_parameters() if self.trained.critic else []
        of_policy = [p for p in self.trained.model.parameters() if p.requires_grad]
        self.trainable = [of_policy, of_critic]
        self.optimizer = self._optimizer()
        self.deterministic = can_be_deterministic(model, bool(cfg.trainer.bf16))

    def _base(self, model: Any) -> Any:
        return model.get_base_model() if self.adapted else model

    def train(self) -> None:
        self.trained.model.train()

    @contextmanager
    def whole(self, critic: bool = False, write: bool = False) -> Iterator[None]:
        """Within it `model` and `policy` have all their weights in every process, to play, to be asked and saved.

        Only a run with a sharded model ever lacks them; then it is for all processes together. critic: those of the
        critic as well. write: what is written into them is trained on.
        """
        if self.shards is None:
            yield
            return
        names = ["model", "critic"] if critic and self.critic else ["model"]
        with self.shards.gathered(*names, write=write):
            yield

    def compute(self, run: Callable[[], Any]) -> Any:
        """`run()`, which computes with what is trained; all processes do so equally often."""
        return run() if self.shards is None else self.shards(run)

    def release(self) -> None:
        """After passes without gradient: let go of what they have gathered."""
        if self.shards is not None:
            self.shards.release()

    # ----------------------------------------------------------------------------------------- before the update

    def measure(self, batch: Batch) -> Measured:
        """Every sampled token without gradient; what is not needed is not computed."""
        return Measured(
            reference_S=self._measured(batch, self._reference_logprobs) if self.cfg.algorithm.beta > 0 else None,
            values_S=self._measured(batch, self._values) if self.critic else None,
        )

    def logprobs(self, batch: Batch, needed_B: torch.Tensor) -> torch.Tensor:
        """Of the sampled tokens of these episodes under the policy as it is now, (S,); NaN for the others.

        needed_B: bool. The sampler's own, and none to compute, where it rounds as the learner does.
        """
        if self.exact:
            return batch.sampler_S
        return self._measured(batch, lambda rows: self._head(self.trained.policy, rows)[0], needed_B)

    def entropies(self, batch: Batch) -> torch.Tensor:
        """Entropy of the distribution that each sampled token was drawn from, nats, (S,).

        One more pass over the episodes of a rollout; of the policy in the learner's precision, whatever engine sampled.
        """
        return self._measured(batch, lambda rows: self._head(self.trained.policy, rows)[1])

    def mean_entropies(self, episodes: Sequence[Trajectory]) -> torch.Tensor:
        """The mean of `entropies` over each episode's tokens, (B,)."""
        batch = Batch.of(episodes)
        sums_B = torch.zeros(len(batch.episodes), dtype=torch.float64)
        sums_B = sums_B.index_add(0, batch.episode_S, self.entropies(batch).double())
        return sums_B / torch.tensor([t.tokens for t in episodes], dtype=torch.float64).clamp(min=1)

    @torch.no_grad()
    def _measured(
        self, batch: Batch, measure: Callable[[list[BatchRow]], torch.Tensor], needed_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = []
        for rows in self.micro_batches([row for row in batch.rows if needed_B is None or needed_B[row.episode]]):
            measured_S = self.compute(partial(measure, rows))
            if isinstance(rows, StandIn):
                continue
            parts = measured_S.float().cpu().split([row.tokens.stop - row.tokens.start for row in rows])
            found += [(row.tokens, part) for row, part in zip(rows, parts, strict=True)]
        self.release()
        out_S = torch.full_like(batch.sampler_S, math.nan)
        for tokens, part in parallel.gather(found):
            out_S[tokens] = part
        return out_S

    def _head(self, model: Any, rows: list[BatchRow]) -> tuple[torch.Tensor, torch.Tensor]:
        with self.autocast():
            states = trained_states(model, [row.ids for row in rows], [row.mask for row in rows])
            return head_logprobs(model, *states, self.cfg.rollout.temperature)

    def _reference_logprobs(self, rows: list[BatchRow]) -> torch.Tensor:
        if self.trained.reference is not None:
            return self._head(self.trained.reference, rows)[0]
        with self.trained.model.disable_adapter():
            return self._head(self.trained.policy, rows)[0]

    def _values(self, rows: list[BatchRow]) -> torch.Tensor:
        critic = self.trained.critic
        assert critic
        ids, masks = [row.ids for row in rows], [row.mask for row in rows]
        with self.autocast():
            if critic.kind == "shared":
                return critic.of(trained_states(self.trained.policy, ids, masks)[0])
            return critic.values(ids, masks)

    # ------------------------------------------------------------------------------------------------ the update

    def micro_batches(self, rows: list[BatchRow], shared: Sequence[tuple[int, ...]] = ()) -> list[list[BatchRow]]:
        """This process's share of the rows as micro-batches; all have the same number of them, or one less.

        Prefixes that are `shared` do not count. Where the model is sharded, a `StandIn` takes the place of the missing
        one.
        """
        known = set(shared)

        def length(row: BatchRow) -> int:
            begins = prefix_of(row.ids, row.mask) if known else ()
            return len(row.ids) - (len(begins) if begins in known else 0)

        chosen = list(microbatches([length(row) for row in rows], self._budget))
        own = [[rows[i] for i in batch] for batch in chosen[parallel.rank() :: parallel.size()]]
        if self.shards is not None and len(own) < math.ceil(len(chosen) / parallel.size()):
            own.append(StandIn(rows[i] for i in chosen[-1]))
        return own

    def prefill(self, rows: list[BatchRow]) -> tuple[Prefixes, list[list[BatchRow]]]:
        """This process's micro-batches of these rows, and the prefixes that rows share, prefilled."""
        shared = worth_sharing([(row.ids, row.mask) for row in rows], self._budget) if self.shares else []
        micro_batches = self.micro_batches(rows, shared)
        needed = {prefix_of(row.ids, row.mask) for micro in micro_batches for row in micro}
        with self.autocast():
            return Prefixes(self.trained.policy, [key for key in shared if key in needed]), micro_batches

    def forward(self, rows: list[BatchRow], prefixes: Prefixes) -> Forward:
        """One micro-batch through the policy, behind prefixes that were read before."""
        index_S = torch.cat([torch.arange(row.tokens.start, row.tokens.stop) for row in rows])

        def run() -> tuple[torch.Tensor, ...]:
            policy, temperature = self.trained.policy, self.cfg.rollout.temperature
            states_SD, tokens_S = prefixes.states([row.ids for row in rows], [row.mask for row in rows])
            return *head_logprobs(policy, states_SD, tokens_S, temperature), states_SD

        with self.autocast():
            logprobs_S, entropy_S, states_SD = self.compute(run)
        return Forward(rows, index_S, logprobs_S.float(), entropy_S.float(), states_SD)

    def value_loss(self, forward: Forward, experience: Experience, weights_S: torch.Tensor) -> ValueLoss:
        """VALUE_COEF * sum over S of weight_S * `losses.value_loss`, with gradient."""
        critic = self.trained.critic
        assert critic and experience.measured.values_S is not None and experience.returns_S is not None
        if critic.kind == "shared":
            values_S = critic.of(forward.states_SD)
        else:
            ids, masks = [row.ids for row in forward.rows], [row.mask for row in forward.rows]
            with self.autocast():
                values_S = self.compute(lambda: critic.values(ids, masks))
        returns_S, old_S = forward.take(experience.returns_S).float(), forward.take(experience.measured.values_S)
        clip = self.cfg.algorithm.critic.clip or math.inf
        loss_S, clipped_S = losses.value_loss(values_S.float(), old_S, returns_S, clip)
        return ValueLoss(VALUE_COEF * (weights_S * loss_S).sum(), loss_S, clipped_S, values_S, returns_S)

    def set_learning_rates(self, policy: float, critic: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, (policy, critic), strict=False):
            group["lr"] = rate

    @property
    def _budget(self) -> float:
        return self.cfg.trainer.micro_batch_tokens or math.inf

    # ----------------------------------------------------------------------------------------------------- state

    def _optimizer(self) -> torch.optim.Optimizer:
        trainer = self.cfg.trainer
        groups = [{"params": parameters} for parameters in self.trainable if parameters]
        options = {
            "lr": self.cfg.learning_rate,
            "betas": (trainer.adam_beta1, trainer.adam_beta2),
            "weight_decay": trainer.weight_decay,
        }
        if trainer.optim == "adamw_torch":
            return torch.optim.AdamW(groups, **options)
        from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

        kind = AdamW8bit if trainer.optim == "adamw_8bit" else PagedAdamW8bit
        return kind(groups, **options)

    def sum_gradients(self) -> None:
        """Add up what all processes have found; FSDP2 does so after each micro-batch."""
        if self.shards is None:
            parallel.sum_gradients(self.trainable[POLICY] + self.trainable[CRITIC])

    def load_optimizer(self, folder: Path) -> None:
        """Of a checkpoint, whose weights are already there."""
        place = "cpu" if self.shards is not None else self.device
        load_whole_state(self.optimizer, torch.load(folder / "optimizer.pt", map_location=place, weights_only=True))


def schedule(cfg: StarPORun, step: int) -> float:
    """The learning rate's factor in step 1, 2, ...: a linear warm-up, then what the scheduler says.

    `warmup_stable_decay` is constant up to the last quarter of the run and falls linearly in it (Hu et al., arXiv
    2404.06395, who let it fall exponentially).
    """
    trainer = cfg.trainer
    if step <= trainer.warmup_steps:
        return step / trainer.warmup_steps
    done = (step - 1 - trainer.warmup_steps) / max(1, trainer.max_steps - trainer.warmup_steps)
    match trainer.lr_scheduler_type:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * done)
        case "warmup_stable_decay":
            return min(1.0, 4 * (trainer.max_steps - step + 1) / trainer.max_steps)


def objective_settings(cfg: StarPORun) -> losses.Settings:
    """What `losses.objective` is set to."""
    algorithm = cfg.algorithm
    return losses.Settings(
        loss_type=algorithm.loss_type,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        delta=algorithm.delta,
        entropy_coef=algorithm.entropy_coef,
        beta=algorithm.beta,
    )
