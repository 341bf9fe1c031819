"""Which articles answer a query?  BM25 by bm25s over articles in memory, or over a memory-mapped folder."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.search_qa.synthetic import encyclopedia

Article = tuple[str, str]  # title, text
INDEX, ARTICLES, QUESTIONS = "bm25", "articles.jsonl", "questions.jsonl"  # inside a folder that build.py made
TITLE_WEIGHT = 3  # a title counts as if it stood in the text so many times


class JsonLines:
    """The lines of a .jsonl file, read from the disk when they are needed."""

    def __init__(self, path: Path) -> None:
        self.offsets = np.load(path.with_suffix(".offsets.npy"), mmap_mode="r")
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Any:
        return json.loads(self.bytes[int(self.offsets[number]) : int(self.offsets[number + 1])])


def write_lines(path: Path, rows: Iterable[Any]) -> int:
    """Write what JsonLines reads; return the number of rows."""
    offsets = [0]
    with path.open("wb") as file:
        for row in rows:
            offsets.append(offsets[-1] + file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n"))
    np.save(path.with_suffix(".offsets.npy"), np.array(offsets, dtype=np.int64))
    return len(offsets) - 1


class Library:
    """Articles and their BM25 index: Library(articles, index).search("mayor of Velmar", 3) -> the best, best first."""

    def __init__(self, articles: Sequence[Article] | JsonLines, index: Any) -> None:
        self.articles, self.index = articles, index

    def search(self, query: str, k: int) -> list[Article]:
        """Return at most `k` articles that share a word with the query; of equal scores the earlier comes first."""
        words = [word for word in index_words([query])[0] if word in self.index.vocab_dict]
        if not words:
            return []
        scores = np.asarray(self.index.get_scores(words))
        least = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        places = np.flatnonzero((scores >= least) & (scores > 0))
        best = places[np.argsort(-scores[places], kind="stable")][:k]
        articles = [self.articles[int(number)] for number in best]
        return [(title, text) for title, text in articles]


def index_words(texts: list[str]) -> list[list[str]]:
    """Return what is indexed and searched: lower-case words without English stop words."""
    import bm25s

    return bm25s.tokenize(  # type: ignore[return-value]
        texts, token_pattern=r"(?u)\b\w+\b", stopwords="en", return_ids=False, show_progress=False
    )


def index_of(articles: Iterable[Article]) -> Any:
    """Return the BM25 index of articles, in memory."""
    import bm25s

    texts = [" ".join([title] * TITLE_WEIGHT + [text]) for title, text in articles]
    tokens = bm25s.tokenize(texts, token_pattern=r"(?u)\b\w+\b", stopwords="en", show_progress=False)
    index = bm25s.BM25(method="lucene", backend="numpy")
    index.index(tokens, show_progress=False)
    return index


@lru_cache(maxsize=1)
def synthetic_library() -> Library:
    articles = encyclopedia().articles
    return Library(articles, index_of(articles))


@lru_cache(maxsize=4)
def library_of(folder: str) -> Library:
    """Return the library that build.py made, mapped from the disk; processes that read it share its memory."""
    import bm25s

    try:
        index = bm25s.BM25.load(Path(folder) / INDEX, mmap=True, show_progress=False)
        return Library(JsonLines(Path(folder) / ARTICLES), index)
    except (OSError, ValueError) as error:
        raise _no_folder(folder, error) from error


@lru_cache(maxsize=4)
def questions_of(folder: str) -> JsonLines:
    """Return the questions that build.py wrote."""
    try:
        return JsonLines(Path(folder) / QUESTIONS)
    except (OSError, ValueError) as error:
        raise _no_folder(folder, error) from error


def _no_folder(folder: str, error: Exception) -> ValueError:
    return ValueError(
        f"search_qa: path={folder} is not a folder with articles and questions ({type(error).__name__}: {error}). Make "
        "one from HotpotQA with `python -m envs.search_qa.build --path hotpotqa/hotpot_qa --config distractor --out "
        "FOLDER` and name it as path; path=embedded needs none."
    )


def clean_article(text: str) -> str:
    """Return one line of printable characters: an article cannot break an observation's lines or encoding."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
