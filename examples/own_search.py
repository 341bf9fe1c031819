"""A tool that searches the encyclopedia of `search_qa` by BM25, for questions over several articles.

    envs: [{name: search_qa, tools: [examples.own_search:search], max_calls: 6}]

or as questions with an answer, which this file writes (`python -m examples.own_search questions.jsonl`):

    envs:
      - name: prompts
        tools: [examples.own_search:search]
        options: {path: questions.jsonl, rewards: [exact_match]}

For a library of your own, name a folder of `python -m envs.search_qa.build` in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import envs
from envs.search_qa.library import clean_article, library_of, synthetic_library

FOLDER = ""  # "" is the synthetic encyclopedia
ARTICLES, CHARACTERS = 3, 600  # shown by a search, and of each
QUESTIONS = 400


def search(query: str) -> str:
    """Search the encyclopedia and return the articles that fit best.

    Args:
        query: a few words, for example the name of a person or of a place
    """
    library = library_of(FOLDER) if FOLDER else synthetic_library()
    found = [f"{title}: {text}" for title, text in library.search(query, ARTICLES)]
    lines = [f"{n}. {clean_article(text)[:CHARACTERS]}" for n, text in enumerate(found, 1)]
    return "\n".join(lines) or "Nothing found."


def write_questions(file: Path, count: int = QUESTIONS) -> None:
    """Write questions of search_qa with their answers as rows for `prompts`."""
    env = envs.make("search_qa", path=FOLDER or "embedded")
    with file.open("w", encoding="utf-8") as rows:
        for seed in range(count):
            env.reset(seed=seed, options={"split": "train"})
            rows.write(json.dumps({"prompt": env.level.question, "answer": env.level.answer}) + "\n")


if __name__ == "__main__":
    write_questions(Path(sys.argv[1]))
