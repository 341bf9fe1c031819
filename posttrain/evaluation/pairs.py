"""Which of its own answers should a model prefer?  They become preference pairs for phase 2.

    posttrain pairs                                           configs/pairs.yaml
    posttrain pairs model.name_or_path=MODEL "sources=[{kind: prompts, path: my.jsonl}]" output_dir=runs/my
    posttrain pairs --resume                                  continue a stopped run (in bfloat16 it rounds
                                                              otherwise than a run without the stop)

Rows of `prompts` have a column `prompt` or `messages`, and `answer` if the right answer is known. If it is, a right
answer is preferred to a wrong one, by math-verify on the last \\boxed{}. Otherwise an answer that repeats itself loses
to one of similar length that does not, with both cut to the shorter length. Written are the pairs of a prompt with the
most similar lengths (known answer) or the largest difference in repetition (otherwise). An answer that
`max_new_tokens` cut off is written up to its last whole sentence, since phase 2 adds the stop token; it never counts
as right.

`output_dir` gets prompts.jsonl, answers.jsonl (a row when each answer is finished) and, at the end, pairs.jsonl:
{"prompt": [...], "chosen": [{"role": "assistant", ...}], "rejected": [...], "score_chosen": 1, "score_rejected": -.3},
and best.jsonl, {"messages": [...]}: the best answer to each prompt, which phase 1 can imitate (rejection sampling).
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
# A full stop may belong to a number unless a space follows; the full stops of other scripts always end a sentence.
SENTENCE_END = re.compile(r"[.!?][\"')\]”’»]*(?=\s)|[。｡！？؟۔।॥][\"')\]”’»」』）】》]*")
MESSAGE = ("role", "content")
ADVICE = {  # why a prompt gave no pair, and what to change
    "all answers right": "take harder prompts, or raise the temperatures",
    "all answers wrong": "take easier prompts, more answers (num_generations), or a model after more of phase 1",
    "all answers the same or empty": "raise the temperatures, or num_generations",
    "no whole sentence": "raise max_new_tokens, or take a model after more of phase 1",
    "no answer repeats itself more than another": "lower the temperatures (0 is greedy), or min_repetition",
    "answers too unlike in length": "lower min_length_ratio, or raise num_generations",
}

T = TypeVar("T")


@dataclass(frozen=True)
class OwnAnswer:
    """An answer of the model: OwnAnswer(prompt=3, number=0, ids=[17, 4], text="It is 4.", finished=True, right=None).

    prompt, number: the place of the prompt, and of the answer among those to it. ids: without the stop token.
    right: None where the right answer to the prompt is not known.
    """

    prompt: int
    number: int
    ids: list[int]
    text: str
    finished: bool
    right: bool | None

    @property
    def sentences(self) -> str:
        """Return the text; of an unfinished answer only the whole sentences."""
        if self.finished:
            return self.text
        return self.text[: max((match.end() for match in SENTENCE_END.finditer(self.text)), default=0)]

    @property
    def score(self) -> float:
        """Return 1 for a right answer and 0 for any other, minus the share of its 4-grams that are repeated."""
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
        file, drawn = out / PROMPTS, []
        if not file.exists():
            section = DataSection(
                sources=cfg.sources, max_length=longest, seed=cfg.seed, decontaminate=cfg.decontaminate
            )
            drawn = data.load_questions(section, chat)[0]
        run_identity.remember_run(out, cfg.model_dump(mode="json"), flags.resume)  # before the first row of this run
        if drawn:
            write_rows(file, (question._asdict() for question in drawn))
        questions = kept_questions(file, vocabulary=max(chat.tokenizer.get_vocab().values()) + 1, longest=longest)
        answers = answer_questions(cfg, model, chat, questions, judge)
    best_ones = best_answers(answers)
    if best_ones:
        write_rows(out / BEST, (dialogue(questions[answer.prompt], answer) for answer in best_ones))
    if cfg.pairs_per_prompt:
        pairs, reasons = choose_pairs(cfg, answers)
        summary = report(len(questions), pairs, reasons)
        if not pairs:
            raise UserError(summary)
        write_rows(out / PAIRS, (preference_row(questions[better.prompt], better, worse) for better, worse in pairs))
        print(f"{summary}\nRead them with data.sources: [{{kind: preferences, path: {out / PAIRS}}}]")
    elif not best_ones:
        raise UserError(
            f"No answer to {len(questions):,} prompts is good enough to imitate: no answer is right, or, where the"
            " right answer is not known, has a whole sentence. Raise max_new_tokens or num_generations, or use easier"
            " prompts."
        )
    print(
        f"The best answers, of {len(best_ones):,} of {len(questions):,} prompts, are for phase 1:"
        f" [{{kind: messages, path: {out / BEST}}}]"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="keep the answers in output_dir, and continue")


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    files.write_whole(file, (json.dumps(row) + "\n" for row in rows))


# -- what a run keeps -------------------------------------------------------------------------------------------------


def kept_questions(file: Path, *, vocabulary: int, longest: int) -> list[PromptQuestion]:
    """Return the prompts in the file of a run.

    Args:
        vocabulary: number of token ids of the model, which those of the prompts must be below.
        longest: the most tokens of a prompt.

    Raises:
        UserError: the file is damaged.
    """
    from posttrain.data import PromptQuestion

    def find_problem(question: PromptQuestion) -> str | None:
        if not question.messages or any(not isinstance(m.get(k), str) for m in question.messages for k in MESSAGE):
            return "messages should be a list of objects with the texts role and content"
        if not 0 < len(question.ids) <= longest or not all(0 <= number < vocabulary for number in question.ids):
            return f"ids should be 1 to {longest:,} numbers below {vocabulary:,}"
        return None

    remedy = "Delete this file, and --resume draws the same prompts again from the same sources and settings."
    questions = _read_rows(file, PromptQuestion, find_problem, remedy)
    # The file was written at once, so an incomplete last row is damage.
    if not questions or file.read_bytes().split(b"\n")[len(questions) :] != [b""]:
        raise UserError(f"{file} is damaged: its last rows are cut off. {remedy}")
    return questions


def kept_answers(file: Path, questions: Sequence[PromptQuestion], per_prompt: int) -> list[OwnAnswer]:
    """Return the answers in the file of a run, each to one of these prompts.

    Raises:
        UserError: the file is damaged.
    """

    def find_problem(answer: OwnAnswer) -> str | None:
        if not 0 <= answer.prompt < len(questions):
            return f"prompt is {answer.prompt!r:.50}, and {PROMPTS} has 0 to {len(questions) - 1}"
        if not 0 <= answer.number < per_prompt:
            return f"number is {answer.number!r:.50}, and should be from 0 to {per_prompt - 1}"
        if (answer.right is None) != (questions[answer.prompt].answer is None):
            return f"right should be true or false where its prompt in {PROMPTS} has an answer, and null elsewhere"
        return None

    return _read_rows(file, OwnAnswer, find_problem, "Delete this line, and --resume samples its answer again.")


def _read_rows(file: Path, kind: type[T], find_problem: Callable[[T], str | None], remedy: str) -> list[T]:
    """Return the rows as objects of `kind`; raise UserError for a row that is not one or that has a problem."""
    reader, rows = TypeAdapter(kind), []
    remedy = f"{remedy} Or start again in another folder (output_dir=...)."
    for line, content in enumerate(files.read_json_lines(file, remedy), 1):
        try:
            rows.append(reader.validate_json(json.dumps(content), strict=True))
            problem = find_problem(rows[-1])
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
    """Return `num_generations` answers to each question: those in the folder and new ones, which are added there."""
    from posttrain import plan
    from posttrain.evaluation.scoring import MOST_ROWS
    from posttrain.rollout import open_sampler

    file = Path(cfg.output_dir) / ANSWERS
    answers = kept_answers(file, questions, cfg.num_generations) if file.exists() else []
    write_rows(file, map(asdict, answers))  # without an incomplete last row
    done = {(answer.prompt, answer.number) for answer in answers}
    places = [(n, number) for n in range(len(questions)) for number in range(cfg.num_generations)]
    left = sorted((place for place in places if place not in done), key=lambda place: _temperature(cfg, place[1]))
    if not left:
        return answers
    if answers and model.dtype.itemsize < 4:
        kind = str(model.dtype).removeprefix("torch.")
        runlog.say(
            f"{len(answers):,} answers are kept. The other {len(left):,} are sampled in other batches than without the"
            f" stop, and {kind} rounds differently there: some of them differ from those of an uninterrupted run, and"
            " are as good. For identical answers start again with model.dtype=float32 (output_dir=...)."
        )
    longest = max(len(question.ids) for question in questions) + cfg.max_new_tokens
    slots, graphs = plan.rows_at_once(model, cfg.model, longest, cfg.max_new_tokens, cfg.batch_size or MOST_ROWS)
    sampler = open_sampler(model, chat, max_context=longest, graphs=graphs)
    with (
        file.open("a", encoding="utf-8") as lines,
        runlog.Progress(len(places), "answers", start=len(answers), unit="answer") as progress,
    ):

        def add(place: tuple[int, int], completion: Completion) -> None:
            ids = completion.ids[:-1] if completion.finished else completion.ids
            text, expected = chat.decode(completion.ids), questions[place[0]].answer
            right = None if expected is None else judge.correct(text, expected)
            answers.append(OwnAnswer(*place, ids, text, completion.finished, right))
            lines.write(json.dumps(asdict(answers[-1])) + "\n")
            lines.flush()
            judged = [answer.right for answer in answers if answer.right is not None]
            figures = {"right": fmean(judged)} if judged else {}
            progress.update(len(answers), tokens=fmean(len(answer.ids) for answer in answers), **figures)

        for temperature, several in groupby(left, key=lambda place: _temperature(cfg, place[1])):
            params = SamplingParams(max_new_tokens=cfg.max_new_tokens, temperature=temperature)
            ask(sampler, questions, list(several), params, cfg.seed, slots, add)
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
    finish: Callable[[tuple[int, int], Completion], None],
) -> None:
    """Sample an answer for each (question, number), at most `slots` at a time, and pass each to `finish`."""
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
            finish(writing.pop(handle), completion)
        sampler.close([handle for handle, _ in finished])
        return enter(slots - len(writing))

    sampler.converse(enter(slots), params, then)


# -- pairs -------------------------------------------------------------------------------------------------------------


def choose_pairs(cfg: PairsRun, answers: Sequence[OwnAnswer]) -> tuple[list[tuple[OwnAnswer, OwnAnswer]], Counter[str]]:
    """Return the pairs, better answer first, in the order of the prompts, and the reasons of prompts without a pair."""
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
    """Return at most `pairs_per_prompt` pairs of different answers to one prompt, and why there are no more."""
    pairs: list[tuple[OwnAnswer, OwnAnswer]] = []
    while True:
        pair = best_pair(cfg, answers)
        if isinstance(pair, str):
            return pairs, pair
        pairs.append(pair)
        if len(pairs) == cfg.pairs_per_prompt:
            return pairs, ""
        answers = [answer for answer in answers if answer not in pair]


def best_pair(cfg: PairsRun, answers: Sequence[OwnAnswer]) -> tuple[OwnAnswer, OwnAnswer] | str:
    """Return the pair of answers that differs most clearly, or why there is no pair (a key of ADVICE)."""
    if len(answers) < 2:
        if not answers or answers[0].right is None:
            return "all answers the same or empty"
        return "all answers right" if answers[0].right and answers[0].finished else "all answers wrong"
    answers = [answer for answer in answers if answer.sentences]
    if not answers:
        return "no whole sentence"
    if answers[0].right is None:
        different = [(one, other) for one in answers for other in answers if gap(one, other) >= cfg.min_repetition]
        if not different:
            return "no answer repeats itself more than another"
        alike = [pair for pair in different if length_ratio(*pair) >= cfg.min_length_ratio]
        return max(alike, key=lambda pair: gap(*pair)) if alike else "answers too unlike in length"
    right, wrong = [a for a in answers if a.right and a.finished], [a for a in answers if not a.right]
    if not right or not wrong:
        return "all answers right" if right else "all answers wrong"
    alike = [(a, b) for a in right for b in wrong if length_ratio(a, b) >= cfg.min_length_ratio]
    return max(alike, key=lambda pair: length_ratio(*pair)) if alike else "answers too unlike in length"


def gap(one: OwnAnswer, other: OwnAnswer) -> float:
    """Return how much more the other repeats itself, both cut to the shorter; -1 if its whole text repeats no more."""
    length = min(len(one.ids), len(other.ids))
    more = seq_rep_n(other.ids[:length]) - seq_rep_n(one.ids[:length])
    return more if one.score > other.score else -1.0


def length_ratio(one: OwnAnswer, other: OwnAnswer) -> float:
    """Return the length of the shorter answer as a share of the longer, in tokens."""
    shorter, longer = sorted((len(one.ids), len(other.ids)))
    return shorter / longer if longer else 1.0


def preference_row(question: PromptQuestion, better: OwnAnswer, worse: OwnAnswer) -> dict[str, Any]:
    """Return a row of preferences as phase 2 reads it."""
    sides = {"chosen": better, "rejected": worse}
    return (
        {"prompt": question.messages}
        | {side: [{"role": "assistant", "content": answer.sentences}] for side, answer in sides.items()}
        | {f"score_{side}": round(answer.score, 6) for side, answer in sides.items()}
    )


def best_answers(answers: Sequence[OwnAnswer]) -> list[OwnAnswer]:
    """Return the answer with the highest score to each prompt that has a good one, in the order of the prompts.

    An answer is good if it is right and finished, or, where the right answer is not known, if it has a whole sentence.
    """
    good = [a for a in answers if (a.sentences.strip() if a.right is None else a.right and a.finished)]
    by_prompt = groupby(sorted(good, key=lambda a: (a.prompt, a.number)), lambda a: a.prompt)
    return [max(several, key=lambda answer: answer.score) for _, several in by_prompt]


def dialogue(question: PromptQuestion, answer: OwnAnswer) -> dict[str, Any]:
    """Return a conversation as phase 1 reads it."""
    return {"messages": [*question.messages, {"role": "assistant", "content": answer.sentences}]}


def report(prompts: int, pairs: Sequence[tuple[OwnAnswer, OwnAnswer]], reasons: Counter[str]) -> str:
    """Return a summary: the number of pairs, why prompts gave no pair, and what to change."""
    by_answer = sum(better.right is not None for better, _ in pairs)
    sentences = [
        f"{len(pairs):,} pairs of {prompts:,} prompts: {by_answer:,} right against wrong,"
        f" {len(pairs) - by_answer:,} by repetition."
    ]
    if pairs:
        tokens = [fmean(len(pair[side].ids) for pair in pairs) for side in (0, 1)]
        sentences.append(f"Chosen answers have {tokens[0]:.0f} tokens, rejected ones {tokens[1]:.0f}.")
    sentences += [f"Without a pair: {reason} {count:,} ({ADVICE[reason]})." for reason, count in reasons.most_common()]
    return " ".join(sentences)


if __name__ == "__main__":
    config.run(main)
