"""Is a row known from an evaluation set?  If 13 words in a row agree, it is (Brown et al., arXiv 2005.14165, app. C).

A question of fewer words counts as known when a user's message is that question, punctuation and case apart.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants

from posttrain.config import Source
from posttrain.data import embedded, reading
from posttrain.data.filters import Example, is_readable_text
from posttrain.data.gsm8k import is_held_out
from posttrain.types import one_line

N = 13
EMBEDDED_PROBLEMS = 500  # of each kind
QUESTIONS = {"gsm8k": ("GSM8K test", "question"), "math500": ("MATH-500", "problem")}  # title and column
WORD = re.compile(r"\w+")


def lower_words(text: str) -> list[str]:
    """Return the words of a text in lower case: lower_words("It's 1,000!") -> ["it", "s", "1", "000"]."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return WORD.findall(text.lower())


def _ngrams(words: list[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(N)), strict=False)


class EvaluationQuestions:
    """The questions that no training row may contain; `notes` name their sets, and those that could not be loaded."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._ngrams: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()

    def add(self, name: str, questions: Iterable[str]) -> None:
        count = 0
        for question in questions:
            its_words = lower_words(question)
            if len(its_words) < N:
                self._short.add(tuple(its_words))
            else:
                self._ngrams.update(_ngrams(its_words))
            count += 1
        self.notes.append(f"Checked against {count:,} questions of {name}.")

    def seen_in(self, row: Example) -> bool:
        """Return whether the row shares 13 words in a row with a question, or a user asks a short one of them."""
        for messages in row.dialogues:
            for message in messages:
                its_words = lower_words(message["content"])
                if not self._ngrams.isdisjoint(_ngrams(its_words)):
                    return True
                if message["role"] == "user" and len(its_words) < N and tuple(its_words) in self._short:
                    return True
        return False


def evaluation_questions(sources: Sequence[Source], seed: int, key: str = "data.sources") -> EvaluationQuestions:
    """Return the questions that rows of these sources must not contain: the embedded problems, the real sets, or both,
    and for GSM8K's training split its held-out questions. key: where the config names the sources."""
    paths, known = {source.path for source in sources}, EvaluationQuestions()
    for number, source in enumerate(sources):
        if source.kind == "gsm8k":
            rows = reading.read_rows(source, f"{key}.{number}", seed)
            held_out = [
                row["question"] for row in rows if is_readable_text(row["question"]) and is_held_out(row["question"])
            ]
            known.add(f"{source.path} that are held out", held_out)
    if reading.EMBEDDED in paths:
        splits = ("unseen_questions", "unseen_operands")
        problems = [p["question"] for split in splits for p in embedded.math_problems(EMBEDDED_PROBLEMS, seed, split)]
        known.add("the embedded evaluation", problems)
    if paths - {reading.EMBEDDED}:
        for name, (title, column) in QUESTIONS.items():
            hub = reading.HELD_OUT[name]
            try:
                if not (Path(constants.HF_HUB_CACHE) / f"datasets--{hub.path.replace('/', '--')}").is_dir():
                    HfApi().repo_info(hub.path, repo_type="dataset", timeout=10)  # load_dataset would retry for long
                known.add(title, reading.load_hub(hub)[column])
            except reading.HUB_ERRORS as error:
                known.notes.append(
                    f"NOT checked against {title}: {hub.path} could not be loaded ({one_line(error)[:100]})."
                )
    return known
