"""What surrounds the model in phase 3?  Log-probs and values of sampled tokens, micro-batches, the optimizer.

The algorithm is in train_phase3_starpo.py, its formulas are in starpo/. Shapes: B episodes, N turns of all episodes one
after another, S sampled tokens of all turns one after another, D the width of the model's last states. Processes share
out the micro-batches, whoever played their episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from posttrain.config import StarPORun
from posttrain.models import (
    Chat,
    Prefixes,
    compile_layers,
    head_logprobs,
    microbatches,
    prefix_of,
    reverse_kl,
    simplify_layers,
    trained_states,
    worth_sharing,
)
from posttrain.plan import can_be_deterministic, can_share_prefixes, head_agrees
from posttrain.rollout import Sampler, sampler_of
from posttrain.runtime import parallel, sent, sharding
from posttrain.starpo import losses
from posttrain.starpo.critic import Critic
from posttrain.starpo.experience import Batch, BatchRow, Experience, Measured, token_places
from posttrain.types import Trajectory, UserError

POLICY, CRITIC = 0, 1  # places in `Learner.trainable` and in the optimizer
VALUE_COEF = 0.5  # c1 of PPO (arXiv 1707.06347, eq. 9), which weighs the value loss where the trunk is shared


class Forward(NamedTuple):
    """A micro-batch after its forward pass: log-probs and entropies of its S sampled tokens, with gradient.

    index_S: where these tokens stand in the batch. states_SD: what the output layer multiplied, for a shared critic and
    beside teacher_SD, the teacher's, None without a teacher. weight: what the micro-batch counts, 1
    (`Placement.weight`).
    """

    rows: list[BatchRow]
    index_S: torch.Tensor
    logprobs_S: torch.Tensor
    entropy_S: torch.Tensor
    states_SD: torch.Tensor
    teacher_SD: torch.Tensor | None = None
    weight: float = 1.0

    def take(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return what a tensor over the batch has for these tokens, on their device."""
        return sent(values_S[self.index_S], self.logprobs_S.device)

    @property
    def context_S(self) -> torch.Tensor:
        """The row that each token was sampled in; rows with tokens are 0, 1, 2, ..."""
        counts = torch.tensor([count for row in self.rows if (count := row.tokens.stop - row.tokens.start)]).long()
        return sent(torch.arange(len(counts)).repeat_interleave(counts), self.logprobs_S.device)


class Models(NamedTuple):
    """The models of a learner with all their weights."""

    model: Any  # `policy`, or peft's wrapper around it, which has no types
    policy: PreTrainedModel
    critic: Critic | None


class Taught(NamedTuple):
    """What a teacher says of a micro-batch: KL(policy || teacher) of its tokens, (S,), and a scalar for the loss.

    The scalar has the gradient of the weighted KL, and its value says nothing.
    """

    kl_S: torch.Tensor
    loss: torch.Tensor


class ValueLoss(NamedTuple):
    """The critic's share of a micro-batch's loss, and what it is made of, each (S,)."""

    loss: torch.Tensor
    loss_S: torch.Tensor
    clipped_S: torch.Tensor
    values_S: torch.Tensor
    returns_S: torch.Tensor


class Learner:
    """The policy, with the models that are trained and consulted beside it.

    model: a transformers model, or peft's wrapper around one; policy: the same without peft's wrapper. critic: None
    where advantages need none. reference: a frozen copy of the model that the run began with; None where nobody needs
    it or the adapter is switched off instead. teacher: the model of `distillation.teacher`. These compute and are
    trained; inside `whole` and `sampling` there are those to play with and to save. exact: whether the sampler's
    log-probs are the learner's, to the bit. trainable: the parameters of the policy and those of the critic alone, as
    places POLICY and CRITIC.

    Raises:
        UserError: the model does more to its logits than `head_logprobs` knows, or its output layer has an adapter.
    """

    def __init__(
        self,
        cfg: StarPORun,
        model: Any,
        reference: PreTrainedModel | None = None,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        self.cfg, self.adapted = cfg, hasattr(model, "get_base_model")
        critic = Critic(cfg.algorithm.critic.kind, model) if cfg.algorithm.critical else None
        policy = self._base(model)  # an adapter's layers sit inside it
        if hasattr(policy.get_output_embeddings(), "lora_A"):  # pyright: ignore[reportUnknownArgumentType]
            raise UserError(
                "Phase 3 computes log-probs from the output layer's own weight, without an adapter: leave the output"
                " layer (lm_head) out of model.lora.target_modules."
            )
        if not head_agrees(policy):
            raise UserError(
                f"{type(model).__name__} does more to its logits than phase 3 knows: log-probs of sampled"
                " tokens would be wrong. Choose a model of another architecture."
            )
        self.device = device = policy.device
        self.autocast: Callable[[], torch.autocast] = lambda: torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=bool(cfg.trainer.bf16)
        )
        self.settings = objective_settings(cfg)
        self.deterministic = can_be_deterministic(model, bool(cfg.trainer.bf16))
        # sampler and trainer round alike in float32 alone
        our_engine = cfg.rollout.engine in ("auto", "slots", "replay")
        compiled = bool(cfg.trainer.torch_compile)
        self.exact = our_engine and policy.dtype == torch.float32 and not cfg.trainer.bf16 and not compiled
        models = {"model": model, "critic": critic, "reference": reference, "teacher": teacher}
        for each in models.values():
            if each is None:
                continue
            simplify_layers(each)
            if compiled:
                compile_layers(each, deterministic=self.deterministic)
        self.placement = sharding.place(models, device)
        self.model = self.placement.models["model"]
        self.reference: PreTrainedModel | None = self.placement.models["reference"]
        self.critic: Critic | None = self.placement.models["critic"]
        self.teacher: PreTrainedModel | None = self.placement.models["teacher"]
        self.policy = self._base(self.model)
        # a prefix that some processes have and others do not would be gathered for by some and not by others
        self.shares = not self.placement.lockstep and cfg.can_share_prefixes and can_share_prefixes(self.policy)
        of_critic = self.critic.own_parameters() if self.critic else []
        of_policy = [p for p in self.model.parameters() if p.requires_grad]
        self.trainable = [of_policy, of_critic]
        self.optimizer = self._optimizer()

    def _base(self, model: Any) -> PreTrainedModel:
        return model.get_base_model() if self.adapted else model

    @contextmanager
    def whole(self, critic: bool = False, write: bool = False) -> Generator[Models]:
        """Give the models with all their weights in every process, to play, to be measured and to be saved.

        Every process has to enter it.

        Args:
            critic: give the critic its weights as well.
            write: what is written into the models inside is trained from then on.
        """
        with self.placement.whole("model", *["critic"] * critic, write=write) as models:
            model = models["model"]
            yield Models(model, self._base(model), models.get("critic"))

    @contextmanager
    def sampling(self) -> Generator[Models]:
        """Give the models to play with and to ask: whole, and in the precision of the update."""
        with self.whole() as models, self.autocast():
            yield models

    def open_sampler(self, chat: Chat) -> Sampler:
        """Return the engine of `rollout.engine` on the policy; it plays inside `sampling`."""
        with self.whole() as models:
            return sampler_of(self.cfg, models.policy, chat)

    # ----------------------------------------------------------------------------------------- before the update

    def measure(self, batch: Batch) -> Measured:
        """Measure every sampled token without gradient; what is not needed is not computed."""
        return Measured(
            reference_S=self._measured(batch, self._reference_logprobs) if self.cfg.algorithm.beta > 0 else None,
            values_S=self._measured(batch, self._values) if self.critic else None,
        )

    def logprobs(self, batch: Batch, needed_B: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of the sampled tokens under the policy as it is now, (S,).

        They are the sampler's own, and nothing is computed, where it rounds as the learner does.

        Args:
            needed_B: bool, whose tokens are needed; those of other episodes are NaN.
        """
        if self.exact:
            return batch.sampler_S
        return self._measured(batch, lambda rows: self._head(self.policy, rows)[0], needed_B)

    def entropies(self, batch: Batch) -> torch.Tensor:
        """Return the entropy of the distribution that each sampled token was drawn from, nats, (S,).

        It takes one more pass over the episodes of a rollout, in the learner's precision, whatever engine sampled.
        """
        return self._measured(batch, lambda rows: self._head(self.policy, rows)[1])

    def mean_entropies(self, episodes: Sequence[Trajectory]) -> torch.Tensor:
        """Return the mean of `entropies` over each episode's tokens, nats, (B,)."""
        batch = Batch.of(episodes)
        sums_B = torch.zeros(len(batch.episodes), dtype=torch.float64)
        sums_B = sums_B.index_add(0, batch.episode_S, self.entropies(batch).double())
        return sums_B / torch.tensor([t.tokens for t in episodes], dtype=torch.float64).clamp(min=1)

    def _measured(
        self, batch: Batch, measure: Callable[[list[BatchRow]], torch.Tensor], needed_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        read, parts_S = list[BatchRow](), list[torch.Tensor]()
        micro_batches = self.micro_batches([row for row in batch.rows if needed_B is None or needed_B[row.episode]])
        with self.placement.measuring():
            for rows, measured_S in self.placement.each(micro_batches, measure):
                read += rows
                parts_S.append(measured_S.float())
        own_S = torch.cat(parts_S).cpu() if parts_S else batch.sampler_S[:0]  # once: here Python waits for a GPU
        out_S = torch.full_like(batch.sampler_S, math.nan)
        for index_S, part_S in parallel.gather([(token_places(read), own_S)]):
            out_S[index_S] = part_S
        return out_S

    def _head(self, model: PreTrainedModel, rows: list[BatchRow]) -> tuple[torch.Tensor, torch.Tensor]:
        with self.autocast():
            states = trained_states(model, [row.ids for row in rows], [row.mask for row in rows])
            return head_logprobs(model, *states, self.cfg.rollout.temperature)

    def _reference_logprobs(self, rows: list[BatchRow]) -> torch.Tensor:
        if self.reference is not None:
            return self._head(self.reference, rows)[0]
        with self.model.disable_adapter():
            return self._head(self.policy, rows)[0]

    def _values(self, rows: list[BatchRow]) -> torch.Tensor:
        critic = self.critic
        assert critic
        ids, masks = [row.ids for row in rows], [row.mask for row in rows]
        with self.autocast():
            if critic.kind == "shared":
                return critic.of(trained_states(self.policy, ids, masks)[0])
            return critic.values(ids, masks)

    # ------------------------------------------------------------------------------------------------ the update

    def micro_batches(self, rows: list[BatchRow], shared: Sequence[tuple[int, ...]] = ()) -> list[list[BatchRow]]:
        """Return this process's share of the rows as micro-batches; all have the same number of them, or one less.

        Args:
            shared: prefixes that do not count towards a micro-batch's tokens.
        """
        prefixes = set(shared)

        def length(row: BatchRow) -> int:
            begins = prefix_of(row.ids, row.mask) if prefixes else ()
            return len(row.ids) - (len(begins) if begins in prefixes else 0)

        chosen = list(microbatches([length(row) for row in rows], self._budget))
        own = [[rows[i] for i in batch] for batch in chosen[parallel.rank() :: parallel.size()]]
        most = math.ceil(len(chosen) / parallel.size())
        return self.placement.even(own, most, spare=[rows[i] for i in chosen[-1]] if chosen else [])

    def prefill(self, rows: list[BatchRow]) -> tuple[Prefixes, list[list[BatchRow]]]:
        """Return the prefixes that these rows share, prefilled, and this process's micro-batches of the rows."""
        shared = worth_sharing([(row.ids, row.mask) for row in rows], self._budget) if self.shares else []
        micro_batches = self.micro_batches(rows, shared)
        needed = {prefix_of(row.ids, row.mask) for micro in micro_batches for row in micro}
        with self.autocast():
            return Prefixes(self.policy, [key for key in shared if key in needed]), micro_batches

    def forward(self, rows: list[BatchRow], prefixes: Prefixes) -> Forward:
        """Send one micro-batch through the policy, behind prefixes that were prefilled."""

        def run() -> tuple[torch.Tensor, ...]:
            policy, temperature = self.policy, self.cfg.rollout.temperature
            of_teacher = [] if self.teacher is None else [self._teacher_states(self.teacher, rows)]
            states_SD, tokens_S = prefixes.states([row.ids for row in rows], [row.mask for row in rows])
            return *head_logprobs(policy, states_SD, tokens_S, temperature), states_SD, *of_teacher

        with self.autocast():
            logprobs_S, entropy_S, *states = self.placement.compute(run)
        teacher_SD = states[1] if self.teacher is not None else None
        weight = self.placement.weight(rows)
        return Forward(rows, token_places(rows), logprobs_S.float(), entropy_S.float(), states[0], teacher_SD, weight)

    def _teacher_states(self, teacher: PreTrainedModel, rows: list[BatchRow]) -> torch.Tensor:
        """Return the teacher's states where the tokens of these rows were sampled, (S, D).

        It reads the prefixes of all rows, which the policy may share, and so a few rows at a time.
        """
        states: dict[int, torch.Tensor] = {}
        for places in microbatches([len(row.ids) for row in rows], self._budget):
            some = [rows[place] for place in places]
            with torch.no_grad():
                states_SD, _ = trained_states(teacher, [row.ids for row in some], [row.mask for row in some])
            counts = [row.tokens.stop - row.tokens.start for row in some]
            states |= zip(places, torch.split(states_SD, counts), strict=True)
        return torch.cat([states[place] for place in range(len(rows))])

    def towards_teacher(self, forward: Forward, weights_S: torch.Tensor, critic_alone: bool) -> Taught | None:
        """Return a micro-batch's KL(policy || teacher), and what lowers it; None without a teacher.

        The KL is over the whole vocabulary at each token that the policy sampled: generalized knowledge distillation
        with lmbda 1 and beta 1 (arXiv 2306.13649). So its gradient at a position is exact; log teacher - log policy in
        the advantage of the sampled token would estimate the same gradient from one sample. Neither counts what a token
        does to the positions behind it.

        Args:
            weights_S: what the tokens count in the loss.
            critic_alone: only measure, as with `distillation.teacher_coef: 0`.
        """
        if self.teacher is None or forward.teacher_SD is None or self.cfg.distillation is None:
            return None
        coef, temperature = self.cfg.distillation.teacher_coef, self.cfg.rollout.temperature
        learned_S = coef * weights_S if coef and not critic_alone else None
        states = self.policy, forward.states_SD, self.teacher, forward.teacher_SD
        with self.autocast():
            return Taught(*reverse_kl(*states, learned_S, temperature))

    def backward(
        self, loss: torch.Tensor, forward: Forward, experience: Experience, weights_S: torch.Tensor, critic_alone: bool
    ) -> ValueLoss | None:
        """Add the gradients of a micro-batch: of the policy's loss, and of the critic's where there is one.

        Args:
            loss: of the policy, a scalar with gradient.
            weights_S: what the tokens count in the critic's loss.
            critic_alone: leave the policy's loss out.
        """
        if self.critic is None:
            torch.autograd.backward(loss)
            return None
        together = self.critic.kind == "shared" and not critic_alone  # one trunk: one backward pass for both
        if not (together or critic_alone):
            torch.autograd.backward(loss)  # frees what it holds before the critic computes
        value = self.value_loss(forward, experience, weights_S)
        torch.autograd.backward(loss + value.loss if together else value.loss)
        return value

    def value_loss(self, forward: Forward, experience: Experience, weights_S: torch.Tensor) -> ValueLoss:
        """Return VALUE_COEF * sum over S of weight_S * `losses.value_loss`, with gradient."""
        critic = self.critic
        assert critic and experience.measured.values_S is not None and experience.returns_S is not None
        if critic.kind == "shared":
            values_S = critic.of(forward.states_SD)
        else:
            ids, masks = [row.ids for row in forward.rows], [row.mask for row in forward.rows]
            with self.autocast():
                values_S = self.placement.compute(lambda: critic.values(ids, masks))
        returns_S, old_S = forward.take(experience.returns_S).float(), forward.take(experience.measured.values_S)
        clip = self.cfg.algorithm.critic.clip or math.inf
        loss_S, clipped_S = losses.value_loss(values_S.float(), old_S, returns_S, clip)
        return ValueLoss(VALUE_COEF * (weights_S * loss_S).sum(), loss_S, clipped_S, values_S, returns_S)

    def critic_alone(self, step: int) -> bool:
        """Return whether the critic learns alone in this step: in the first `algorithm.critic.warmup_steps`."""
        return self.critic is not None and step <= self.cfg.algorithm.critic.warmup_steps

    def begin_update(self, step: int) -> None:
        """Set the learning rates of this step, and the model to training."""
        rates = (0.0 if self.critic_alone(step) else self.cfg.learning_rate, self.cfg.algorithm.critic.learning_rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * schedule(self.cfg, step)
        self.model.train()

    def clipped_gradients(self, critic_alone: bool) -> list[float]:
        """Add up the gradients of all processes, clip them, and return the norms of policy and critic before that.

        Args:
            critic_alone: drop those of the policy: not even the optimizer's moments learn from the critic's loss.
        """
        self.placement.sum_gradients(self.trainable[POLICY] + self.trainable[CRITIC])
        for parameter in self.trainable[POLICY] if critic_alone else ():
            parameter.grad = None
        return [self.placement.clip(parameters, self.cfg.trainer.max_grad_norm) for parameters in self.trainable]

    @property
    def _budget(self) -> float:
        return self.cfg.trainer.micro_batch_tokens or math.inf

    # ----------------------------------------------------------------------------------------------------- state

    def _optimizer(self) -> torch.optim.Optimizer:
        trainer = self.cfg.trainer
        groups = [{"params": parameters} for parameters in self.trainable if parameters]
        if trainer.optim == "adamw_torch":
            # one kernel for all weights, without tensors of its own
            kind: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=self.device.type == "cuda")
        else:
            from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

            kind = AdamW8bit if trainer.optim == "adamw_8bit" else PagedAdamW8bit
        betas = (trainer.adam_beta1, trainer.adam_beta2)
        return kind(groups, lr=self.cfg.learning_rate, betas=betas, weight_decay=trainer.weight_decay)

    def load_optimizer(self, folder: Path) -> None:
        """Read the optimizer's state of a checkpoint, whose weights are already there."""
        self.placement.load_optimizer(self.optimizer, folder / "optimizer.pt")


def schedule(cfg: StarPORun, step: int) -> float:
    """Return the learning rate's factor in step 1, 2, ...: a linear warm-up, then what the scheduler says.

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
    """Return what `losses.objective` is set to."""
    algorithm = cfg.algorithm
    return losses.Settings(
        loss_type=algorithm.loss_type,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        delta=algorithm.delta,
        entropy_coef=algorithm.entropy_coef,
        beta=algorithm.beta,
    )
