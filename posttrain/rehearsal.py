"""What else could keep phase 3 from forgetting?  The rows of phases 1 and 2 again, or the policy's own answers.

`distillation.method` chooses: `teacher` is posttrain/distillation.py; `on_policy` samples the answers from the policy
in each step and pulls it back by KL(policy || teacher) at their tokens (arXiv 2306.13649 with lmbda 1 and beta 1);
`replay` adds phase 1's cross-entropy and phase 2's loss on rows of their data, whose reference is the teacher.

Shapes: S trained tokens of all rows one after another, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from posttrain import parallel
from posttrain.chat import Chat
from posttrain.config import DataSection, StarPORun
from posttrain.config.data import DPO_KINDS
from posttrain.data import load_preferences, load_sft
from posttrain.distillation import Answered, Distillation, answered
from posttrain.policy import microbatches, token_logprobs
from posttrain.rollout import complete
from posttrain.sampler import Sampler
from posttrain.types import SamplingParams, derive_seed

if TYPE_CHECKING:
    from posttrain.learner import Learner

DPO_BETA = 0.05  # phase 2's in the quickstart, whose loss is the sum of a sigmoid and a cross-entropy


class Row(NamedTuple):
    """A conversation as token ids, and which of them are trained."""

    ids: list[int]
    mask: list[bool]


class Pair(NamedTuple):
    chosen: Row
    rejected: Row


def start(learner: Learner, sampler: Sampler, chat: Chat) -> Distillation:
    """What `distillation.method` names, with the rows of this run."""
    section = learner.cfg.distillation
    assert section is not None
    if section.method == "teacher":
        return Distillation.start(learner, sampler, chat)
    rows = answered(learner.cfg, sampler, chat)
    if section.method == "on_policy":
        return OnPolicy(learner, rows, sampler)
    return Replay(learner, rows, *read(learner.cfg, chat))


class OnPolicy(Distillation):
    """The rows of a step are the policy's own answers to the prompts that `Distillation` would read."""

    def __init__(self, learner: Learner, rows: Sequence[Answered], sampler: Sampler) -> None:
        super().__init__(learner, rows)
        self.sampler, self.fresh = sampler, [[]]
        self.reverse = True

    def refresh(self, step: int) -> None:
        algorithm, section = self.learner.cfg.algorithm, self.learner.cfg.distillation
        assert section is not None
        asked = [super(OnPolicy, self).chosen(step, n) for n in range(algorithm.num_iterations * algorithm.minibatches)]
        prompts = [row.prompt_ids for rows in asked for row in rows]
        mine = parallel.mine(len(prompts))
        said = complete(
            self.sampler,
            [prompts[n] for n in mine],
            SamplingParams(max_new_tokens=section.max_new_tokens, temperature=1.0),
            [derive_seed(self.learner.cfg.seed, "rehearsed", step, n) for n in mine],
        )
        ids = parallel.gather([completion.ids for completion in said])
        fresh = [Answered(prompt, answer, held_out=False) for prompt, answer in zip(prompts, ids, strict=True)]
        size = section.batch_size
        self.fresh = [fresh[start : start + size] for start in range(0, len(fresh), size)]

    def chosen(self, step: int, number: int) -> list[Answered]:
        return self.fresh[number]


class Replay(Distillation):
    """Rows of phase 1, and half as many pairs of phase 2, in every optimizer step."""

    def __init__(
        self, learner: Learner, rows: Sequence[Answered], taught: Sequence[Row], pairs: Sequence[Pair]
    ) -> None:
        super().__init__(learner, rows)
        self.taught, self.pairs = taught, pairs
        assert self.teacher is not None, "replayed pairs need a frozen copy of the model that phase 3 starts from"

    def drawn(self, rows: Sequence[Any], size: int, step: int, number: int) -> list[Any]:
        return [rows[derive_seed(self.learner.cfg.seed, "replayed", step, number, n) % len(rows)] for n in range(size)]

    def backward(self, step: int, number: int) -> tuple[float, int]:
        section = self.learner.cfg.distillation
        assert section is not None
        taught = self.drawn(self.taught, section.batch_size, step, number)
        pairs = self.drawn(self.pairs, section.batch_size // 2, step, number) if self.pairs else []
        tokens = sum(sum(row.mask) for row in taught)
        better = sum(sum(pair.chosen.mask) for pair in pairs)
        total = self._cross_entropy(taught, section.coef / tokens)
        self._preferences(pairs, section.coef / max(1, len(pairs)), section.coef / max(1, better))
        return total, tokens

    def _cross_entropy(self, rows: Sequence[Row], weight: float) -> float:
        own, total = rows[parallel.rank() :: parallel.size()], 0.0
        for micro in microbatches([len(row.ids) for row in own], self.learner.budget):
            logprobs_S = self._logprobs(self.learner.policy, [own[n] for n in micro])
            (-weight * logprobs_S.sum()).backward()
            total -= logprobs_S.sum().item()
        return total

    def _preferences(self, pairs: Sequence[Pair], weight: float, sft_weight: float) -> None:
        """Phase 2's loss: -log sigmoid(beta (log ratio of the chosen - that of the rejected)) and cross-entropy."""
        own = pairs[parallel.rank() :: parallel.size()]
        for micro in microbatches([2 * max(len(row.ids) for row in pair) for pair in own], self.learner.budget):
            rows = [row for n in micro for row in own[n]]
            logprobs_S = self._logprobs(self.learner.policy, rows)
            with torch.no_grad():
                reference_S = self._logprobs(self.teacher, rows)
            counts = [sum(row.mask) for row in rows]
            sums_P2 = torch.stack([part.sum() for part in (logprobs_S - reference_S).split(counts)]).view(-1, 2)
            margin_P = DPO_BETA * (sums_P2[:, 0] - sums_P2[:, 1])
            chosen = torch.stack([part.sum() for part in logprobs_S.split(counts)[::2]])
            (-weight * functional.logsigmoid(margin_P).sum() - sft_weight * chosen.sum()).backward()

    def _logprobs(self, model: Any, rows: Sequence[Row]) -> torch.Tensor:
        with self.learner.autocast():
            return token_logprobs(model, [row.ids for row in rows], [row.mask for row in rows])[0]


def read(cfg: StarPORun, chat: Chat) -> tuple[list[Row], list[Pair]]:
    """The conversations and the pairs that `distillation.sources` names."""
    assert cfg.distillation is not None
    sources, length = cfg.distillation.sources, cfg.rollout.max_context

    def section(wanted: list[Any]) -> DataSection:
        return DataSection(sources=wanted, eval_rows=1, max_length=length, seed=cfg.seed)

    sft = load_sft(section([source for source in sources if source.kind not in DPO_KINDS]), chat).train
    columns = zip(sft["input_ids"][:], sft["assistant_masks"][:], strict=True)
    taught = [Row(ids, [on == 1 for on in mask]) for ids, mask in columns]
    of_pairs = [source for source in sources if source.kind in DPO_KINDS]
    if not of_pairs:
        return taught, []
    told = load_preferences(section(of_pairs), chat).train
    names = ("prompt_ids", "chosen_ids", "rejected_ids")

    def answer(prompt: list[int], said: list[int]) -> Row:
        return Row(prompt + said, [False] * len(prompt) + [True] * len(said))

    pairs = [
        Pair(answer(prompt, better), answer(prompt, worse))
        for prompt, better, worse in zip(*(told[name][:] for name in names), strict=True)
    ]
    return taught, pairs
