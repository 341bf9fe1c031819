"""Which of its own answers should a model prefer?  Sampled, judged, and written as preference pairs for phase 2.

    posttrain pairs                                           configs/pairs.yaml
    posttrain pairs model.name_or_path=MODEL "sources=[{kind: prompts, path: my.jsonl}]" output_dir=runs/my
    posttrain pairs --resume                                  go on where it was stopped (in bfloat16 with
                                                                        other rounding than without the stop)

Rows of `prompts` have a column `prompt` or `messages`, and `answer` where it is known what is right. Then a right
answer wins over a wrong one, by math-verify on the last \\boxed{}. Without it, the answer that repeats itself loses
against one of similar length that does not, both cut to the shorter. Of all such pairs of a prompt those most alike in
length (with a known answer) or furthest apart in repetition (without) are written. An answer that `max_new_tokens` cut
off is written up to its last whole sentence, since phase 2 puts the stop token behind it; it is never taken for right.

`output_dir` gets prompts.jsonl, answers.jsonl (a row as each answer comes) and, at the end, pairs.jsonl:
{"prompt": [...], "chosen": [{"role": "assistant", ...}], "rejected": [...], "score_chosen": 1, "score_rejected": -.3},
and best.jsonl, {"messages": [...]}: the best answer of each prompt, which phase 1 can imitate (rejection sampling).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from posttrain import config, files
from posttrain.config import DataSection, PairsRun
from posttrain.metrics import seq_rep_n
from posttrain.runtime import runlog
from posttrain.types import Completion, SamplingParams, UserError, derive_seed

if TYPE_CHECKING:
    from envs.math_judge import MathJudge
    from posttrain.data import PromptQuestion
    from posttrain.models import Chat
    from posttrain.rollout import Sampler

PROMPTS, ANSWERS, BEST, PAIRS = "prompts.jsonl", "answers.jsonl", "best.jsonl", "pairs.jsonl"
# a full stop may be one of a number until a blank follows; those of other scripts end a sentence at once
SENTENCE_END = re.compile(r"[.!?][\"')\]”’»]*(?=\s)|[。｡！？؟۔।॥][\"')\]”’»」』）】》]*")
MESSAGE = ("role", "content")
ADVICE = {  # why a prompt gave no pair, and what to change when none did
    "all answers right": "take harder prompts, or raise the temperatures",
    "all answers wrong": "take easier prompts, more answers (num_generations), or a model after more of phase 1",
    "all answers the same or empty": "raise the temperatures, or num_generations",
    "no whole sentence": "raise max_new_tokens, or take a model after more of phase 1",
    "no answer repeats itself more than another": "lower the temperatures (0 is greedy), or min_repetition",
    "answers too unlike in length": "lower min_length_ratio, or raise num_generations",
}


Kept = TypeVar("Kept")


@dataclass(frozen=True)
class OwnAnswer:
    """One answer: Answer(prompt=3, number=0, ids=[17, 4], text="It is 4.", finished=True, right=None).

    ids: without the stop token. right: None where the prompt has no known answer.
    """

    prompt: int
    number: int
    ids: list[int]
    text: str
    finished: bool
    right: bool | None

    @property
    def sentences(self) -> str:
        """The text, of an unfinished answer up to the end of its last whole sentence."""
        return (
            self.text
            if self.finished
            else self.text[: max((m.end() for m in SENTENCE_END.finditer(self.text)), default=0)]
        )

    @property
    def score(self) -> float:
        """1 for a right answer, less the share of its 4-grams that are repeated."""
        return float(self.right or False) - seq_rep_n(self.ids)


def main(argv: list[str] | None = None) -> None:
    cfg, flags = config.load(PairsRun, "configs/pairs.yaml", argv, add_flags, __doc__)
    out = Path(cfg.output_dir)
    runlog.keep_private(out)

    from envs.math_judge import MathJudge
    from posttrain import data, models
    from posttrain.plan import check_run
    from posttrain.runtime import checkpoint, run_identity

    check_run(cfg, resume=flags.resume)
    if flags.resume:
        run_identity.same_run(out, cfg.model_dump(mode="json"))
    checkpoint.claim(out, flags.resume)
    model, chat = models.load(cfg.model, device=cfg.device, chat_template=cfg.chat.template, training=False)
    with checkpoint.full_disk_in_words(out), MathJudge() as judge:
        longest = max(8, cfg.max_length - cfg.max_new_tokens)
        kept, drawn = out / PROMPTS, []
        if not kept.exists():
            section = DataSection(
                sources=cfg.sources, max_length=longest, seed=cfg.seed, decontaminate=cfg.decontaminate
            )
            drawn = data.load_questions(section, chat)[0]
        run_identity.remember_run(out, cfg.model_dump(mode="json"), flags.resume)  # before the first row of this run
        if drawn:
            write_rows(kept, (question._asdict() for question in drawn))
        questions = kept_questions(kept, vocabulary=max(chat.tokenizer.get_vocab().values()) + 1, longest=longest)
        answers = answer_questions(cfg, model, chat, questions, judge)
    imitated = best_answers(answers)
    if imitated:
        write_rows(out / BEST, (dialogue(questions[answer.prompt], answer) for answer in imitated))
    if cfg.pairs_per_prompt:
        pairs, reasons = chosen(cfg, answers)
        told = report(len(questions), pairs, reasons)
        if not pairs:
            raise UserError(told)
        write_rows(out / PAIRS, (row(questions[better.prompt], better, worse) for better, worse in pairs))
        print(f"{told}\nRead them with data.sources: [{{kind: preferences, path: {out / PAIRS}}}]")
    elif not imitated:
        raise UserError(
            f"No answer to {len(questions):,} prompts is good enough to imitate: none is right, or, where nobody knows"
            " what is right, has a whole sentence. Raise max_new_tokens or num_generations, or take easier prompts."
        )
    print(
        f"The best answers, of {len(imitated):,} of {len(questions):,} prompts, are for phase 1:"
        f" [{{kind: messages, path: {out / BEST}}}]"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="keep the answers that output_dir holds, and go on")


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    files.write_whole(file, (json.dumps(row) + "\n" for row in rows))


# -- what a run keeps -------------------------------------------------------------------------------------------------


def kept_questions(file: Path, *, vocabulary: int, longest: int) -> list[PromptQuestion]:
    """The prompts of the folder, each with ids that the model has, at most `longest` of them."""
    from posttrain.data import PromptQuestion

    def wrong(question: PromptQuestion) -> str | None:
        if not question.messages or any(not isinstance(m.get(k), str) for m in question.messages for k in MESSAGE):
            return "messages should be a list of objects with the texts role and content"
        if not 0 < len(question.ids) <= longest or not all(0 <= number < vocabulary for number in question.ids):
            return f"ids should be 1 to {longest:,} numbers below {vocabulary:,}"
        return None

    remedy = "Delete this file, and --resume draws the same prompts again from the same sources and settings."
    questions = _kept(file, PromptQuestion, wrong, remedy)
    # It was written at once, so an end without a row is damage here, and not a row that was being written.
    if not questions or file.read_bytes().split(b"\n")[len(questions) :] != [b""]:
        raise UserError(f"{file} is damaged: its last rows are cut off. {remedy}")
    return questions


def kept_answers(file: Path, questions: Sequence[PromptQuestion], per_prompt: int) -> list[OwnAnswer]:
    """The answers of the folder, each to one of these prompts."""

    def wrong(answer: OwnAnswer) -> str | None:
        if not 0 <= answer.prompt < len(questions):
            return f"prompt is {answer.prompt!r:.50}, and {PROMPTS} has 0 to {len(questions) - 1}"
        if not 0 <= answer.number < per_prompt:
            return f"number is {answer.number!r:.50}, and should be from 0 to {per_prompt - 1}"
        if (answer.right is None) != (questions[answer.prompt].answer is None):
            return f"right should be true or false where its prompt in {PROMPTS} has an answer, and null elsewhere"
        return None

    return _kept(file, OwnAnswer, wrong, "Delete this line, and --resume samples its answer again.")


def _kept(file: Path, kind: type[Kept], wrong: Callable[[Kept], str | None], remedy: str) -> list[Kept]:
    """Each row as a `kind`; UserError with the line of one that is none, or of which `wrong` says what is wrong."""
    reader, rows = TypeAdapter(kind), []
    remedy = f"{remedy} Or start anew in another folder (output_dir=...)."
    for line, found in enumerate(files.read_json_lines(file, remedy), 1):
        try:
            rows.append(reader.validate_json(json.dumps(found), strict=True))
            problem = wrong(rows[-1])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'row'}: {first['msg']}"
        if problem:
            raise UserError(f"Line {line} of {file} is damaged: {' '.join(problem.split())[:300]}. {remedy}")
    return rows


# -- answers -----------------------------------------------------------------------------------------------------------


def answer_questions(
    cfg: PairsRun, model: Any, chat: Chat, questions: Sequence[PromptQuestion], judge: MathJudge
) -> list[OwnAnswer]:
    """`num_generations` answers to each question: those in the folder, then new ones, written there as they come."""
    from posttrain import plan
    from posttrain.evaluation.scoring import MOST_ROWS
    from posttrain.rollout import open_sampler

    file = Path(cfg.output_dir) / ANSWERS
    answers = kept_answers(file, questions, cfg.num_generations) if file.exists() else []
    write_rows(file, map(asdict, answers))  # without what a kill left at its end
    found = {(answer.prompt, answer.number) for answer in answers}
    places = [(n, number) for n in range(len(questions)) for number in range(cfg.num_generations)]
    left = sorted((place for place in places if place not in found), key=lambda place: _temperature(cfg, place[1]))
    if not left:
        return answers
    if answers and model.dtype.itemsize < 4:
        kind = str(model.dtype).removeprefix("torch.")
        runlog.say(
            f"{len(answers):,} answers are kept. The other {len(left):,} are sampled in other batches than without the"
            f" stop, which {kind} rounds otherwise: some of them differ from those of an uninterrupted run, and are as"
            " good. Where both have to be equal, start anew with model.dtype=float32 (output_dir=...)."
        )
    longest = max(len(question.ids) for question in questions) + cfg.max_new_tokens
    slots = plan.rows_at_once(model, cfg.model, longest, cfg.max_new_tokens, cfg.batch_size or MOST_ROWS)
    sampler = open_sampler(model, chat, max_context=longest)
    with (
        file.open("a", encoding="utf-8") as lines,
        runlog.Progress(len(places), "answers", start=len(answers), unit="answer") as progress,
    ):

        def came(place: tuple[int, int], completion: Completion) -> None:
            ids = completion.ids[:-1] if completion.finished else completion.ids
            text, wanted = chat.decode(completion.ids), questions[place[0]].answer
            right = None if wanted is None else judge.correct(text, wanted)
            answers.append(OwnAnswer(*place, ids, text, completion.finished, right))
            lines.write(json.dumps(asdict(answers[-1])) + "\n")
            lines.flush()
            judged = [answer.right for answer in answers if answer.right is not None]
            figures = {"right": fmean(judged)} if judged else {}
            progress.update(len(answers), tokens=fmean(len(answer.ids) for answer in answers), **figures)

        for temperature, several in groupby(left, key=lambda place: _temperature(cfg, place[1])):
            params = SamplingParams(max_new_tokens=cfg.max_new_tokens, temperature=temperature)
            ask(sampler, questions, list(several), params, cfg.seed, slots, came)
    return answers


def _temperature(cfg: PairsRun, number: int) -> float:
    return cfg.temperatures[number % len(cfg.temperatures)]


def ask(
    sampler: Sampler,
    questions: Sequence[PromptQuestion],
    places: list[tuple[int, int]],
    params: SamplingParams,
    seed: int,
    slots: int,
    came: Callable[[tuple[int, int], Completion], None],
) -> None:
    """One answer for each (question, number), at most `slots` at a time; who is done makes room for who waits."""
    waiting = places[::-1]
    writing: dict[int, tuple[int, int]] = {}

    def enter(count: int) -> list[tuple[int, int]]:
        several = [waiting.pop() for _ in range(min(count, len(waiting)))]
        if not several:
            return []
        handles = sampler.open([questions[place[0]].ids for place in several])
        writing.update(zip(handles, several, strict=True))
        return [(handle, derive_seed(seed, "answer", *writing[handle])) for handle in handles]

    def then(finished: list[tuple[int, Completion]]) -> list[tuple[int, int]]:
        for handle, completion in finished:
            came(writing.pop(handle), completion)
        sampler.close([handle for handle, _ in finished])
        return enter(slots - len(writing))

    sampler.converse(enter(slots), params, then)


# -- pairs -------------------------------------------------------------------------------------------------------------


def chosen(cfg: PairsRun, answers: Sequence[OwnAnswer]) -> tuple[list[tuple[OwnAnswer, OwnAnswer]], Counter[str]]:
    """The pairs, better answer first, in the order of the prompts; and why how many prompts gave none."""
    pairs: list[tuple[OwnAnswer, OwnAnswer]] = []
    reasons: Counter[str] = Counter()
    for _, several in groupby(sorted(answers, key=lambda answer: (answer.prompt, answer.number)), lambda a: a.prompt):
        different = list({text: answer for answer in several if (text := answer.text.strip())}.values())
        of_prompt, reason = pairs_of(cfg, different)
        pairs += of_prompt
        if not of_prompt:
            reasons[reason] += 1
    return pairs, reasons


def pairs_of(cfg: PairsRun, answers: list[OwnAnswer]) -> tuple[list[tuple[OwnAnswer, OwnAnswer]], str]:
    """At most `pairs_per_prompt` pairs of different answers to one prompt, and why there are no more."""
    found: list[tuple[OwnAnswer, OwnAnswer]] = []
    while True:
        pair = best(cfg, answers)
        if isinstance(pair, str):
            return found, pair
        found.append(pair)
        if len(found) == cfg.pairs_per_prompt:
            return found, ""
        answers = [answer for answer in answers if answer not in pair]


def best(cfg: PairsRun, answers: Sequence[OwnAnswer]) -> tuple[OwnAnswer, OwnAnswer] | str:
    """The clearest pair of these answers, or why there is none (a key of ADVICE)."""
    if len(answers) < 2:
        if not answers or answers[0].right is None:
            return "all answers the same or empty"
        return "all answers right" if answers[0].right and answers[0].finished else "all answers wrong"
    answers = [answer for answer in answers if answer.sentences]
    if not answers:
        return "no whole sentence"
    if answers[0].right is None:
        apart = [(one, other) for one in answers for other in answers if gap(one, other) >= cfg.min_repetition]
        if not apart:
            return "no answer repeats itself more than another"
        alike = [pair for pair in apart if length_ratio(*pair) >= cfg.min_length_ratio]
        return max(alike, key=lambda pair: gap(*pair)) if alike else "answers too unlike in length"
    right, wrong = [a for a in answers if a.right and a.finished], [a for a in answers if not a.right]
    if not right or not wrong:
        return "all answers right" if right else "all answers wrong"
    alike = [(a, b) for a in right for b in wrong if length_ratio(a, b) >= cfg.min_length_ratio]
    return max(alike, key=lambda pair: length_ratio(*pair)) if alike else "answers too unlike in length"


def gap(one: OwnAnswer, other: OwnAnswer) -> float:
    """By how much the other repeats itself more, both cut to the shorter; -1 where the whole texts say otherwise."""
    length = min(len(one.ids), len(other.ids))
    more = seq_rep_n(other.ids[:length]) - seq_rep_n(one.ids[:length])
    return more if one.score > other.score else -1.0


def length_ratio(one: OwnAnswer, other: OwnAnswer) -> float:
    shorter, longer = sorted((len(one.ids), len(other.ids)))
    return shorter / longer if longer else 1.0


def row(question: PromptQuestion, better: OwnAnswer, worse: OwnAnswer) -> dict[str, Any]:
    """A row as phase 2 reads it."""
    sides = {"chosen": better, "rejected": worse}
    return (
        {"prompt": question.messages}
        | {side: [{"role": "assistant", "content": answer.sentences}] for side, answer in sides.items()}
        | {f"score_{side}": round(answer.score, 6) for side, answer in sides.items()}
    )


def best_answers(answers: Sequence[OwnAnswer]) -> list[OwnAnswer]:
    """The answer with the highest score of each prompt that has a good one, in the order of the prompts.

    Good is a right and finished answer, or, where nobody knows what is right, one with a whole sentence.
    """
    good = [a for a in answers if (a.sentences.strip() if a.right is None else a.right and a.finished)]
    by_prompt = groupby(sorted(good, key=lambda a: (a.prompt, a.number)), lambda a: a.prompt)
    return [max(several, key=lambda answer: answer.score) for _, several in by_prompt]


def dialogue(question: PromptQuestion, answer: OwnAnswer) -> dict[str, Any]:
    """A row as phase 1 reads it."""
    return {"messages": [*question.messages, {"role": "assistant", "content": answer.sentences}]}


def report(prompts: int, pairs: Sequence[tuple[OwnAnswer, OwnAnswer]], reasons: Counter[str]) -> str:
    """What became of the prompts, and what to change where too little did."""
    by_answer = sum(better.right is not None for better, _ in pairs)
    told = [f"{len(pairs):,} pairs of {prompts:,} prompts: {by_answer:,} right against wrong, "]
    told[0] += f"{len(pairs) - by_answer:,} by repetition."
    if pairs:
        tokens = [fmean(len(pair[side].ids) for pair in pairs) for side in (0, 1)]
        told.append(f"Chosen answers have {tokens[0]:.0f} tokens, rejected ones {tokens[1]:.0f}.")
    told += [f"Without a pair: {reason} {count:,} ({ADVICE[reason]})." for reason, count in reasons.most_common()]
    return " ".join(told)


if __name__ == "__main__":
    config.run(main)
