"""What keeps phase 3 from forgetting?  The model that it starts from, by its own answers to old prompts.

Before the first step that model, the teacher, answers prompts of the former phases. In every optimizer step the policy
reads some of these rows, and

    coef x mean over their answers' tokens of KL(teacher || policy), over the whole vocabulary

is added to the loss. It is generalized knowledge distillation (Agarwal et al., arXiv 2306.13649) with lmbda 0 and beta
0: rows of the teacher, forward KL. Which rows a step reads is derived from seed and step, and the rows lie in the run's
folder, so a resumed run reads what it would have read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from posttrain.config import DataSection, DistillationSection, StarPORun
from posttrain.data import SOURCES, TokenData, load_prompts
from posttrain.models import Chat, kl_backward, microbatches, trained_states
from posttrain.rollout import Sampler, complete
from posttrain.runtime import checkpoint, floats, parallel, runlog
from posttrain.types import Record, SamplingParams, derive_seed

if TYPE_CHECKING:
    from posttrain.starpo.learner import Learner

FOLDER, FILE = "distillation", "rows.jsonl"


class Answered(NamedTuple):
    """A prompt and what the teacher answered, as token ids; the stop token is there where it came."""

    prompt_ids: list[int]
    completion_ids: list[int]
    held_out: bool

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def mask(self) -> list[bool]:
        return [False] * len(self.prompt_ids) + [True] * len(self.completion_ids)


def answered(cfg: StarPORun, sampler: Sampler, chat: Chat) -> list[Answered]:
    """Return the rows of this run: those in its folder, or new ones, which the model as it is now samples.

    New ones are written into the folder.

    Raises:
        UserError: the folder is damaged.
    """
    folder = Path(cfg.output_dir) / FOLDER
    if folder.exists():
        checkpoint.verify(folder)
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
        return [Answered(**{key: row[key] for key in Answered._fields}) for row in map(json.loads, lines)]
    prompts, rows = _sample(cfg, _section(cfg), sampler, chat)

    def write(out: Path) -> None:
        (out / SOURCES).write_text(json.dumps(prompts.table.for_card()), encoding="utf-8")
        with (out / FILE).open("w", encoding="utf-8") as file:
            for row in rows:
                text = {"prompt": chat.decode(row.prompt_ids), "completion": chat.decode(row.completion_ids)}
                file.write(json.dumps(row._asdict() | text) + "\n")

    parallel.barrier()  # every process has looked for the folder
    if runlog.is_main_process():
        checkpoint.save(folder, write, teacher=cfg.model.name_or_path)
    return rows


def sources(cfg: StarPORun) -> list[Record]:
    """Return what the model card says of the prompts: data sets, licences and rows; none without distillation."""
    file = Path(cfg.output_dir) / FOLDER / SOURCES
    if not file.exists():  # a run without distillation, or begun before the file was written
        return []
    records: list[Record] = json.loads(file.read_text(encoding="utf-8"))
    return [source | {"kind": f"{source['kind']}, prompts alone"} for source in records]


def _section(cfg: StarPORun) -> DistillationSection:
    assert cfg.distillation is not None
    return cfg.distillation


def _sample(
    cfg: StarPORun, wanted: DistillationSection, sampler: Sampler, chat: Chat
) -> tuple[TokenData, list[Answered]]:
    """Prompts from the sources, and those with their answers, which all processes sample together."""
    prompts = load_prompts(
        DataSection(
            sources=wanted.sources,
            eval_rows=wanted.eval_rows,
            max_length=cfg.rollout.max_context - wanted.max_new_tokens,
            seed=cfg.seed,
            decontaminate=wanted.decontaminate,
        ),
        chat,
    )
    ids: list[list[int]] = [*prompts.train["prompt_ids"][:], *prompts.eval["prompt_ids"][:]]
    mine = parallel.mine(len(ids))
    with runlog.Progress(len(mine), "answers to old prompts", unit="row") as progress:
        completions = complete(
            sampler,
            [ids[n] for n in mine],
            SamplingParams(max_new_tokens=wanted.max_new_tokens, temperature=1.0),
            [derive_seed(cfg.seed, "distillation", n) for n in mine],
            batch=cfg.rollout.conversations,
            done=lambda count: progress.update(progress.done + count),
        )
    answers = parallel.gather([completion.ids for completion in completions])
    return prompts, [
        Answered(prompt, completion, n >= len(prompts.train))
        for n, (prompt, completion) in enumerate(zip(ids, answers, strict=True))
    ]


class Distillation:
    """The KL to the teacher, its gradient, and its mean on the rows that are held out.

    The teacher is the learner's reference, a frozen copy of the model that phase 3 starts from; without one the policy
    is an adapter on that model, which is switched off.
    """

    def __init__(self, learner: Learner, rows: Sequence[Answered]) -> None:
        self.learner, self.teacher = learner, learner.reference
        self.rows = [row for row in rows if not row.held_out]
        self.held_out = [row for row in rows if row.held_out]
        if not self.held_out:
            runlog.say(
                f"distillation: {len(rows)} prompts are too few to hold any out, so there is no"
                " evaluation/distillation_kl and no alarm for forgetting. Add prompts to distillation.sources."
            )
        self.order = cache(self._order)

    @classmethod
    def start(cls, learner: Learner, sampler: Sampler, chat: Chat) -> Distillation:
        """Begin with the rows of this run, which are sampled now where its folder has none."""
        return cls(learner, answered(learner.cfg, sampler, chat))

    @property
    def coef(self) -> float:
        return _section(self.learner.cfg).coef

    def chosen(self, step: int, number: int) -> list[Answered]:
        """Return the rows of the `number`-th optimizer step of a step: each row once before any comes again."""
        algorithm, size = self.learner.cfg.algorithm, _section(self.learner.cfg).batch_size
        done = (step - 1) * algorithm.num_iterations * algorithm.minibatches + number
        places = (divmod(place, len(self.rows)) for place in range(done * size, (done + 1) * size))
        return [self.rows[self.order(epoch)[place]] for epoch, place in places]

    def _order(self, epoch: int) -> list[int]:
        return sorted(range(len(self.rows)), key=lambda n: derive_seed(self.learner.cfg.seed, "distilled", epoch, n))

    def backward(self, step: int, number: int) -> tuple[float, int]:
        """Add this process's share of the gradient; gradients are to be summed as those of the policy loss.

        Returns:
            the sum of the KL over this process's tokens, nats, and how many tokens all processes have; 0 and 0, and
            nothing is added, where `distillation.coef` is 0.
        """
        if not self.coef:
            return 0.0, 0
        rows = self.chosen(step, number)
        tokens = sum(len(row.completion_ids) for row in rows)
        return self._kl(rows, self.coef / tokens), tokens

    def measure(self) -> float:
        """Return the mean KL of the held-out rows' tokens, in nats, over all processes; there is at least one."""
        with self.learner.placement.measuring():
            total = parallel.total(self._kl(self.held_out, None), self.learner.device)
        return total / max(1, sum(len(row.completion_ids) for row in self.held_out))

    def _kl(self, rows: Sequence[Answered], weight: float | None) -> float:
        """The sum of this process's rows, dealt out by length; rows of similar length share a micro-batch."""
        learner, policy, found = self.learner, self.learner.policy, list[tuple[torch.Tensor, float]]()
        teacher = policy if self.teacher is None else self.teacher
        for micro in self._micro_batches(rows):
            counts = learner.placement.weight(micro)
            ids, masks = [row.ids for row in micro], [row.mask for row in micro]

            def states(ids: list[list[int]] = ids, masks: list[list[bool]] = masks) -> tuple[torch.Tensor, ...]:
                with torch.no_grad(), self._without_adapter(), learner.autocast():
                    teacher_SD, _ = trained_states(teacher, ids, masks)
                with learner.autocast():
                    return teacher_SD, trained_states(policy, ids, masks)[0]

            with learner.autocast():
                teacher_SD, hidden_SD = learner.placement.compute(states)
                share = None if weight is None else weight * counts
                kl_S = kl_backward(policy, hidden_SD, teacher, teacher_SD, share, self._without_adapter())
            found.append((kl_S, counts))
        total = 0.0
        for kl_S, counts in found:  # now: Python waits for a GPU here
            total += sum(floats(kl_S)) * counts
        return total

    def _without_adapter(self) -> AbstractContextManager[object]:
        """Make the policy the teacher inside, where there is no reference."""
        return nullcontext() if self.teacher is not None else self.learner.model.disable_adapter()

    def _micro_batches(self, rows: Sequence[Answered]) -> list[list[Answered]]:
        """This process's micro-batches; where the model is sharded, all have equally many."""
        budget, size = self.learner.cfg.trainer.micro_batch_tokens or math.inf, parallel.size()
        longest_first = sorted(rows, key=lambda row: -len(row.ids))
        shares = [longest_first[rank::size] for rank in range(size)]
        dealt = [
            [[own[n] for n in micro] for micro in microbatches([len(row.ids) for row in own], budget)] for own in shares
        ]
        return self.learner.placement.even(dealt[parallel.rank()], max(map(len, dealt)), longest_first[-1:])
