"""How does the policy move?  Sampled tokens under policy, critic and reference; one optimizer step a minibatch.

Shapes: B episodes, N turns of all episodes one after another, S sampled tokens of all turns one after another. The
formulas are in starpo/. Processes share out the micro-batches, whoever played their episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain import parallel
from posttrain.config import StarPORun
from posttrain.critic import Critic
from posttrain.head import head_logprobs
from posttrain.policy import head_agrees, microbatches, trained_states
from posttrain.prefixes import Prefixes, agrees, beginning, worth_sharing
from posttrain.starpo import losses
from posttrain.types import Trajectory, UserError

CRITIC, POLICY = 1, 0  # the optimizer's groups


class Row(NamedTuple):
    """One context of an episode: what is read, what was sampled there, and where these tokens stand in the batch."""

    episode: int
    ids: list[int]
    mask: list[bool]
    tokens: slice


class Batch(NamedTuple):
    """The episodes of an update and which of them each turn and each sampled token belongs to."""

    episodes: list[Trajectory]
    group_B: torch.Tensor
    episode_N: torch.Tensor
    turn_S: torch.Tensor
    sampler_S: torch.Tensor  # the sampler's log-probs
    rows: list[Row]

    @property
    def episode_S(self) -> torch.Tensor:
        return self.episode_N[self.turn_S]

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> Batch:
        turns, tokens, rows, start = [], [], [], 0
        for number, episode in enumerate(episodes):
            turns += [number] * episode.turns
            tokens += episode.turn_tokens
            for segment in episode.segments:
                rows.append(Row(number, segment.ids, segment.mask, slice(start, start := start + segment.tokens)))
        return cls(
            episodes=list(episodes),
            group_B=torch.tensor([episode.group for episode in episodes]),
            episode_N=torch.tensor(turns, dtype=torch.long),
            turn_S=torch.arange(len(tokens)).repeat_interleave(torch.tensor(tokens, dtype=torch.long)),
            sampler_S=torch.tensor([logprob for episode in episodes for logprob in episode.sampled_logprobs]),
            rows=rows,
        )


class Measured(NamedTuple):
    """Every sampled token before the update, (S,): log-probs of the policy and the reference, the critic's values."""

    old_S: torch.Tensor
    reference_S: torch.Tensor | None
    values_S: torch.Tensor | None


class Learner:
    """The policy, with what is trained and asked beside it."""

    def __init__(self, cfg: StarPORun, model: Any, reference: Any = None) -> None:
        self.cfg, self.model, self.reference = cfg, model, reference
        self.critic = Critic(cfg.algorithm.critic.kind, model) if cfg.algorithm.critical else None
        own = self.critic.own_parameters() if self.critic else []
        known = {id(parameter) for parameter in own}
        self.groups = [[p for p in model.parameters() if p.requires_grad and id(p) not in known], own]
        self.optimizer = self._optimizer()
        # adds the gradient of a further loss, given step and number of the optimizer step in it; the sum of that loss
        # over this process's tokens, and how many tokens all have
        self.distil: Callable[[int, int], tuple[float, int]] | None = None
        self.entropy_coef = self.entropy_bonus = cfg.algorithm.entropy_coef  # kept, and applied in the coming update
        self.adapted = hasattr(model, "get_base_model")
        self.policy: Any = model.get_base_model() if self.adapted else model  # an adapter's layers sit inside it
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
                f"{type(model).__name__} does more to its logits than posttrain/policy.py knows: log-probs of sampled"
                " tokens would be wrong. Choose a model of another architecture."
            )
        # the update reads common beginnings once: not where layers are computed again, or a critic reads for itself
        self.shares = (
            not cfg.trainer.gradient_checkpointing
            and (self.critic is None or self.critic.kind == "shared")
            and agrees(self.policy)
        )
        # sampler and trainer round alike in float32 alone
        own = cfg.rollout.engine != "vllm"
        self.exact = own and self.policy.dtype == torch.float32 and not cfg.trainer.bf16

    # -------------------------------------------------------------------------------------------------- before

    def measure(self, batch: Batch) -> Measured:
        """One look at every token, without gradient; what is not needed is not computed."""
        beta, found = self.cfg.algorithm.beta, {}
        if not self.exact:
            found["old"] = self._look(batch, lambda rows: self._logprobs(self.policy, rows))
        if beta > 0:
            found["reference"] = self._look(batch, self._reference_logprobs)
        if self.critic:
            found["values"] = self._look(batch, lambda rows: self._values(rows))
        return Measured(found.get("old", batch.sampler_S), found.get("reference"), found.get("values"))

    @torch.no_grad()
    def _look(self, batch: Batch, ask: Callable[[list[Row]], torch.Tensor]) -> torch.Tensor:
        found = []
        for rows in self.share(batch.rows):
            parts = ask(rows).float().cpu().split([row.tokens.stop - row.tokens.start for row in rows])
            found += [(row.tokens, part) for row, part in zip(rows, parts, strict=True)]
        out_S = torch.empty_like(batch.sampler_S)
        for tokens, part in parallel.gather(found):
            out_S[tokens] = part
        return out_S

    def entropies(self, batch: Batch) -> torch.Tensor:
        """Entropy of the distribution that each sampled token was drawn from, nats, (S,).

        One more pass over the episodes of a rollout; of the policy in the learner's precision, whatever engine sampled.
        """
        return self._look(batch, lambda rows: self._head(self.policy, rows)[1])

    def share(self, rows: list[Row], shared: Sequence[tuple[int, ...]] = ()) -> list[list[Row]]:
        """This process's share of the rows as micro-batches; all have the same number of them, or one less.

        Beginnings that are `shared` do not count. A ratio of whole episodes needs all segments of an episode in one
        micro-batch.
        """
        known = set(shared)
        together = self.cfg.algorithm.loss_type == "gspo_episode"
        parts: dict[int, list[Row]] = {}
        for number, row in enumerate(rows):
            parts.setdefault(row.episode if together else number, []).append(row)
        units = list(parts.values())

        def length(row: Row) -> int:
            begins = beginning(row.ids, row.mask) if known else ()
            return len(row.ids) - (len(begins) if begins in known else 0)

        lengths = [sum(map(length, unit)) for unit in units]
        chosen = list(microbatches(lengths, self.cfg.trainer.micro_batch_tokens or math.inf))
        return [[row for i in batch for row in units[i]] for batch in chosen[parallel.rank() :: parallel.size()]]

    def _head(self, model: Any, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        with self.autocast():
            states = trained_states(model, [row.ids for row in rows], [row.mask for row in rows])
            return head_logprobs(model, *states, self.cfg.rollout.temperature)

    def _logprobs(self, model: Any, rows: list[Row]) -> torch.Tensor:
        return self._head(model, rows)[0]

    def _reference_logprobs(self, rows: list[Row]) -> torch.Tensor:
        if self.reference is not None:
            return self._logprobs(self.reference, rows)
        with self.model.disable_adapter():
            return self._logprobs(self.policy, rows)

    def _values(self, rows: list[Row]) -> torch.Tensor:
        assert self.critic
        ids, masks = [row.ids for row in rows], [row.mask for row in rows]
        with self.autocast(), self.critic.active():
            if self.critic.kind == "shared":
                return self.critic.of(trained_states(self.policy, ids, masks)[0])
            return self.critic.values(ids, masks)

    # -------------------------------------------------------------------------------------------------- update

    def update(
        self,
        batch: Batch,
        measured: Measured,
        advantages_S: torch.Tensor,
        returns_S: torch.Tensor | None,
        trains_B: torch.Tensor,
        passes: Iterable[list[list[int]]],
        step: int,
        scale: float = 1.0,
        fresh: bool = False,
    ) -> dict[str, float]:
        """One optimizer step for each list of episodes of each pass; what happened, as means over tokens.

        trains_B: episodes whose tokens count. passes: for each pass over the batch, its minibatches as episode numbers.
        scale: what the policy loss is multiplied by. fresh: the policy is still the one that was measured, so in the
        first minibatch the old log-probs are today's, to the bit.
        """
        algorithm, trainer = self.cfg.algorithm, self.cfg.trainer
        warming = self.critic is not None and step <= algorithm.critic.warmup_steps
        rates = {POLICY: self.cfg.learning_rate, CRITIC: algorithm.critic.learning_rate}
        for number, setting in enumerate(self.optimizer.param_groups):
            setting["lr"] = 0.0 if warming and number == POLICY else rates[number] * schedule(self.cfg, step)
        lengths_B = torch.bincount(batch.episode_S, minlength=len(batch.episodes)) * trains_B
        low, high = algorithm.importance_range
        trusted_S, _ = losses.sampler_weights(
            measured.old_S, batch.sampler_S, algorithm.importance, batch.episode_S, low=low, high=high
        )
        self.model.train()
        sums: dict[str, float] = {}
        gap, compared, steps, skipped = 0.0, 0.0, 0, 0
        norms, distilled = [0.0, 0.0], [0.0, 0]
        for iteration, minibatches in enumerate(passes):
            for number, chosen in enumerate(minibatches):
                counted_B = torch.zeros_like(lengths_B)
                counted_B[chosen] = lengths_B[chosen]
                if counted_B.sum() == 0:
                    continue
                rows = [row for row in batch.rows if counted_B[row.episode] > 0]
                shared = worth_sharing([(row.ids, row.mask) for row in rows], trainer.micro_batch_tokens or math.inf)
                shared = shared if self.shares else []
                micros = self.share(rows, shared)
                mine = {beginning(row.ids, row.mask) for micro in micros for row in micro}
                with self.autocast():
                    prefixes = Prefixes(self.policy, [key for key in shared if key in mine])
                for micro in micros:
                    found = self._backward(
                        micro, prefixes, batch, measured, advantages_S, returns_S, trusted_S, counted_B, scale,
                        fresh=fresh and steps == 0, warming=warming,
                    )  # fmt: skip
                    apart = found.pop("gap")
                    if steps == 0:  # later the policy has moved
                        gap, compared = gap + apart, compared + found["tokens"]
                    for key, value in found.items():
                        sums[key] = sums.get(key, 0.0) + value
                prefixes.backward()
                if self.distil and not warming:
                    more = self.distil(step, iteration * algorithm.minibatches + number)
                    distilled = [a + b for a, b in zip(distilled, more, strict=True)]
                parallel.sum_gradients(self.groups[POLICY] + self.groups[CRITIC])
                for parameter in self.groups[POLICY] if warming else ():
                    parameter.grad = None  # not even the optimizer's moments learn from the critic's loss
                each = [torch.nn.utils.clip_grad_norm_(own, trainer.max_grad_norm).item() for own in self.groups]
                if all(map(math.isfinite, each)):
                    self.optimizer.step()
                    norms = [a + b for a, b in zip(norms, each, strict=True)]
                else:
                    skipped += 1
                self.optimizer.zero_grad(set_to_none=True)
                steps += 1
        keys = sorted({key for keys in parallel.gather([list(sums)]) for key in keys})
        sums = {key: parallel.total(sums.get(key, 0.0), self.device) for key in keys}
        gap, compared = (parallel.total(value, self.device) for value in (gap, compared))
        tokens = sums.pop("tokens")
        row = {key: value / tokens for key, value in sums.items()}
        row |= {
            "policy/grad_norm": norms[POLICY] / max(1, steps - skipped),
            "policy/skipped_steps": skipped,
            "policy/sampler_gap": gap / max(1.0, compared),
            "policy/learning_rate": self.optimizer.param_groups[POLICY]["lr"],
            "policy/entropy_coef": self.entropy_bonus,
        }
        if distilled[1]:
            row["distillation/kl"] = parallel.total(distilled[0], self.device) / distilled[1]
        if self.critic:
            row["critic/grad_norm"] = norms[CRITIC] / max(1, steps - skipped)
        if algorithm.entropy_target is not None:
            self.entropy_coef, self.entropy_bonus = losses.adaptive_entropy(
                self.entropy_coef, row["policy/entropy"], algorithm.entropy_target, delta=algorithm.entropy_delta
            )
        return row

    def _backward(
        self,
        rows: list[Row],
        prefixes: Prefixes,
        batch: Batch,
        measured: Measured,
        advantages_S: torch.Tensor,
        returns_S: torch.Tensor | None,
        trusted_S: torch.Tensor,
        counted_B: torch.Tensor,
        scale: float,
        *,
        fresh: bool,
        warming: bool,
    ) -> dict[str, float]:
        """Gradients of one micro-batch, added to those that are there; sums over its tokens."""
        algorithm = self.cfg.algorithm
        index_S = torch.cat([torch.arange(row.tokens.start, row.tokens.stop) for row in rows])

        def here(values_S: torch.Tensor) -> torch.Tensor:
            return values_S[index_S].to(self.device)

        ids, masks = [row.ids for row in rows], [row.mask for row in rows]
        weights_S = losses.token_weights(
            batch.episode_S[index_S], algorithm.aggregation, counted_B, self._longest()
        ).to(self.device)
        with self.autocast():
            hidden_SD, tokens_S = prefixes.states(ids, masks)
            new_S, entropy_S = head_logprobs(self.policy, hidden_SD, tokens_S, self.cfg.rollout.temperature)
        new_S, entropy_S = new_S.float(), entropy_S.float()
        sampler_S, advantage_S, trusted_S = here(batch.sampler_S), here(advantages_S).float(), here(trusted_S)
        old_S = new_S.detach() if fresh else here(measured.old_S)
        loss_S, bites_S = self._policy_loss(new_S, old_S, advantage_S, batch, index_S)
        total_S = scale * loss_S * trusted_S
        if self.entropy_bonus:  # without it the output layer is spared the gradient of the entropy
            total_S = total_S - self.entropy_bonus * entropy_S
        with torch.no_grad():
            found = {
                "gap": (new_S - sampler_S).abs().sum().item(),
                "tokens": float(len(new_S)),
                "policy/loss": loss_S.sum().item(),
                "policy/entropy": entropy_S.sum().item(),
                "policy/clip_fraction": bites_S.sum().item(),
                "policy/clip_fraction_high": (bites_S & (advantage_S > 0)).sum().item(),
                "policy/kl_to_old": losses.kl(new_S, old_S, "k3").sum().item(),
                "policy/importance_weight": trusted_S.sum().item(),
            }
        if measured.reference_S is not None:
            reference_S = here(measured.reference_S)
            found["policy/kl_to_reference"] = losses.kl(new_S.detach(), reference_S, "k3").sum().item()
            if algorithm.kl_in == "loss":
                total_S = total_S + algorithm.beta * losses.kl(new_S, reference_S, algorithm.kl_kind)
        # while the critic warms up, nothing of the policy's loss: 0 times a number that is not finite is not finite
        total = None if warming else (weights_S * total_S).sum()
        if self.critic and self.critic.kind == "shared":
            value, more = self._value_loss(self.critic.of(hidden_SD), measured, returns_S, weights_S, here)
            (value if total is None else total + value).backward()
            return found | more
        if total is not None:
            total.backward()
        if not self.critic:
            return found
        with self.critic.active():  # recomputed activations, too, must be the critic's
            with self.autocast():
                values_S = self.critic.values(ids, masks)
            value, more = self._value_loss(values_S, measured, returns_S, weights_S, here)
            value.backward()
        return found | more

    def losses_of(
        self, rows: list[Row], batch: Batch, measured: Measured, advantages_S: torch.Tensor
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Policy loss, entropy and, with a reference, KL of these rows: for each micro-batch its share of the means.

        Before the policy has moved: the old log-probs are today's.
        """
        count = sum(row.tokens.stop - row.tokens.start for row in rows)
        self.model.train()
        for chosen in microbatches([len(row.ids) for row in rows], self.cfg.trainer.micro_batch_tokens or math.inf):
            index_S = torch.cat([torch.arange(rows[i].tokens.start, rows[i].tokens.stop) for i in chosen])
            with self.autocast():
                states = trained_states(self.policy, [rows[i].ids for i in chosen], [rows[i].mask for i in chosen])
                new_S, entropy_S = head_logprobs(self.policy, *states, self.cfg.rollout.temperature)
            advantage_S = advantages_S[index_S].to(self.device).float()
            found = {
                "task": self._policy_loss(new_S, new_S.detach(), advantage_S, batch, index_S)[0].sum() / count,
                "entropy": -entropy_S.sum() / count,
            }
            if measured.reference_S is not None:
                reference_S = measured.reference_S[index_S].to(self.device)
                kind = self.cfg.algorithm.kl_kind
                # the gradient of k2 is what k1 has in the reward
                found["kl"] = losses.kl(new_S, reference_S, "k2" if kind == "k1" else kind).sum() / count
            yield found

    def _policy_loss(
        self, new_S: torch.Tensor, old_S: torch.Tensor, advantage_S: torch.Tensor, batch: Batch, index_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        algorithm = self.cfg.algorithm
        low, high = algorithm.epsilon, algorithm.epsilon_high
        match algorithm.loss_type:
            case "ppo_clip":
                return losses.ppo_clip(new_S, old_S, advantage_S, low, high, dual_clip=algorithm.dual_clip)
            case "gspo_turn":
                return losses.gspo(new_S, old_S, advantage_S, batch.turn_S[index_S].to(self.device), low, high)
            case "gspo_episode":
                return losses.gspo(new_S, old_S, advantage_S, batch.episode_S[index_S].to(self.device), low, high)
            case "cispo":
                return losses.cispo(new_S, old_S, advantage_S, high)
            case "dppo_tv":
                return losses.dppo_tv(new_S, old_S, advantage_S, algorithm.delta)

    def _value_loss(
        self,
        values_S: torch.Tensor,
        measured: Measured,
        returns_S: torch.Tensor | None,
        weights_S: torch.Tensor,
        here: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert measured.values_S is not None and returns_S is not None
        critic, target_S = self.cfg.algorithm.critic, here(returns_S).float()
        clip = math.inf if critic.clip is None else critic.clip
        loss_S, bites_S = losses.value_loss(values_S.float(), here(measured.values_S), target_S, clip)
        with torch.no_grad():
            found = {
                "critic/loss": loss_S.sum().item(),
                "critic/value": values_S.sum().item(),
                "critic/clip_fraction": bites_S.sum().item(),
                "critic/error": (values_S.float() - target_S).abs().sum().item(),
            }
        return critic.coef * (weights_S * loss_S).sum(), found

    def _longest(self) -> int:
        """The constant of Dr. GRPO: the most tokens an episode can be sampled."""
        stages = [stage.max_turns or 0 for world in self.cfg.worlds for stage in world.curriculum]
        return self.cfg.rollout.max_completion_length * max([self.cfg.protocol.max_turns, *stages])

    # --------------------------------------------------------------------------------------------------- state

    def _optimizer(self) -> torch.optim.Optimizer:
        trainer = self.cfg.trainer
        groups = [{"params": group} for group in self.groups if group]
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

    def save(self, folder: Path) -> None:
        """What a resumed run needs beside the policy's weights."""
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        if self.critic:
            self.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Optimizer and critic of a checkpoint; the weights of the policy are already there."""
        self.optimizer.state.clear()  # or the old moments would be there beside the new ones
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=self.device, weights_only=True))
        if self.critic:
            self.critic.load(folder)


def schedule(cfg: StarPORun, step: int) -> float:
    """The learning rate's factor in step 1, 2, ...: a linear warm-up, then what the scheduler says.

    `warmup_stable_decay` is constant up to the last quarter of the run and falls linearly in it (Hu et al., arXiv
    2404.06395, who let it fall exponentially).
    """
    trainer = cfg.trainer
    if step <= trainer.warmup_steps:
        return step / trainer.warmup_steps
    done = (step - 1 - trainer.warmup_steps) / max(1, trainer.max_steps - trainer.warmup_steps)
    return {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * done),
        "warmup_stable_decay": min(1.0, 4 * (trainer.max_steps - step + 1) / trainer.max_steps),
    }[trainer.lr_scheduler_type]
