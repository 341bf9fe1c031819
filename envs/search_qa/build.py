"""How does HotpotQA become a library?  All its paragraphs, each once, in a memory-mapped BM25 index with its questions.

python -m envs.search_qa.build --path hotpotqa/hotpot_qa --config distractor --out FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envs.base import split_by_hash
from envs.hub_sets import split_names, stream_rows
from envs.search_qa.library import ARTICLES, INDEX, QUESTIONS, Article, clean_article, index_of, write_lines
from envs.search_qa.scoring import normalised

COLUMNS = ("question", "answer", "supporting_facts", "context")
SPLITS = ("validation", "train")  # HotpotQA publishes no answers of its test split: its validation split is our test
MOST_HOPS = 4
LONGEST_ANSWER, LONGEST_FACT = 300, 400  # characters


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.search_qa.build", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--path", default="hotpotqa/hotpot_qa", help="a Hub id, or a file or folder in its schema")
    parser.add_argument("--config", default="distractor", help="the configuration of a Hub set (default distractor)")
    parser.add_argument("--out", required=True, help="the folder to make; `path` of the environment")
    parser.add_argument("--rows", type=int, help="rows of each split (default all)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.rows is not None and arguments.rows < 1:
            raise ValueError(f"search_qa: --rows={arguments.rows} leaves nothing: write at least 1, or leave it out.")
        articles, questions = build_library(arguments.path, arguments.config, Path(arguments.out), arguments.rows)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    except OSError as problem:
        print(f"search_qa: {arguments.out} cannot be made ({problem}). Name another folder as --out.", file=sys.stderr)
        return 2
    print(f"{articles:,} articles and {questions:,} questions in {arguments.out}")
    return 0


def build_library(path: str, config: str | None, out: Path, rows: int | None = None) -> tuple[int, int]:
    """Make the folder and return the numbers of articles and questions. A failure leaves nothing at `out`."""
    if out.exists():
        raise ValueError(f"search_qa: {out} exists already. Delete it, or name another folder as --out.")
    half = out.with_name(f"{out.name}.{os.getpid()}.part")
    half.mkdir(parents=True)
    try:
        articles: dict[bytes, Article] = {}
        questions = list(_questions(path, config, rows, articles))
        if not questions:
            raise ValueError(f"search_qa: {path} has no question with an answer. Use rows in the schema of HotpotQA.")
        write_lines(half / QUESTIONS, questions)
        write_lines(half / ARTICLES, articles.values())
        index_of(articles.values()).save(half / INDEX, show_progress=False)
        half.rename(out)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return len(articles), len(questions)


def _questions(
    path: str, config: str | None, rows: int | None, articles: dict[bytes, Article]
) -> Iterator[dict[str, Any]]:
    """Yield every question once, with its split; its paragraphs are added to `articles`.

    The validation split comes first, so that a question that stands in both is held out. With it the rest is divided
    into training and validation by hash; without it all is divided into three.
    """
    there = split_names("search_qa", path, config)
    names = [name for name in SPLITS if name in there]
    if not names:
        raise ValueError(f"search_qa: {path} has neither a split train nor validation, only {', '.join(there)}.")
    seen: set[str] = set()
    for name in names:
        for row in stream_rows("search_qa", path, COLUMNS, rows, config, name):
            paragraphs = _paragraphs(row)
            for title, text in paragraphs.items():
                articles.setdefault(
                    hashlib.sha256(f"{title}\n{text}".encode("utf-8", "replace")).digest(), (title, text)
                )
            question, answer = (clean_article(str(row[column] or "")) for column in ("question", "answer"))
            key = question.lower()
            if not question or not normalised(answer) or len(answer) > LONGEST_ANSWER or key in seen:
                continue
            seen.add(key)
            home = split_by_hash(key)
            if name == "validation":
                home = "test"
            elif len(names) == 2 and home == "test":
                home = "train"
            yield {"question": question, "answer": answer, "hops": _hops(row, paragraphs), "split": home}


def _paragraphs(row: dict[str, Any]) -> dict[str, str]:
    """Return the texts by title: the schema of the Hub has a list of titles beside a list of lists of sentences."""
    context = row["context"] or {"title": [], "sentences": []}
    return {
        clean_article(title): clean_article("".join(sentences))
        for title, sentences in zip(context["title"], context["sentences"], strict=False)
    }


def _hops(row: dict[str, Any], paragraphs: dict[str, str]) -> list[list[str]]:
    """Return the supporting articles with their supporting sentences; those named in the question come first."""
    context, facts = row["context"] or {"title": [], "sentences": []}, row["supporting_facts"]
    sentences = dict(zip(context["title"], context["sentences"], strict=False))
    facts_of: dict[str, list[str]] = {}
    for title, number in zip(facts["title"], facts["sent_id"], strict=False) if facts else ():
        of_title = sentences.get(title, [])
        facts_of.setdefault(clean_article(title), []).extend(of_title[number : number + 1] if number >= 0 else [])
    question = str(row["question"]).lower()
    order = sorted(
        (title for title in facts_of if title in paragraphs), key=lambda title: title.lower() not in question
    )
    return [[title, clean_article("".join(facts_of[title]))[:LONGEST_FACT]] for title in order[:MOST_HOPS]]


if __name__ == "__main__":
    sys.exit(main())
