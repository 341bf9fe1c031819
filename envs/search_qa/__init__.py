"""Can the model find an answer that takes several articles?  search[...] and finish[...], as in HotpotQA.

The library is made from HotpotQA, or is a synthetic encyclopedia. Articles are data: nothing that stands in one ends
the episode or is taken for an action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from envs.base import TextEnv, split_by_hash
from envs.hub_sets import EMBEDDED
from envs.search_qa.library import Article, clean_article, library_of, questions_of, synthetic_library
from envs.search_qa.retriever import Retriever
from envs.search_qa.scoring import exact_match, f1, reward
from envs.search_qa.synthetic import Hop, draw_question
from envs.web import LONGEST_WAIT

ACTION = re.compile(r"\s*(search|finish)\s*\[([^\[\]]*)\]\s*", re.IGNORECASE)
LONGEST = 300  # characters of a query or an answer
LONGEST_TITLE = 80  # characters of a title, as it is shown: it fits into every line
WORD = re.compile(r"\w+")
SENTENCES = re.compile(r"(?<=[.!?\"')])\s")  # between them; a fact may be several that do not follow each other


class HopQuestion(NamedTuple):
    """Question("Who is the mayor of the birthplace of Mara Tolk?", "Ugo Bein", (Hop(...), Hop(...)), "train")."""

    question: str
    answer: str
    hops: tuple[Hop, ...]  # the articles on the way to the answer, with what they say
    split: str


class SearchQA(TextEnv):
    """Answer a question that takes several articles, by searching them.

    ## Action space
    Free text: `search[words]` or `finish[answer]`, each with at most 300 characters and no bracket inside.

    ## Observation space
    Text: the question and the articles of the last search.

    ## Rewards
    For `finish`: 1 for an exact match, else F1 over words where it is at least 0.3, else 0. Nothing for a search.

    ## Starting state
    A question over the embedded synthetic encyclopedia, or over the library of `path`.

    ## Episode end
    Terminated by `finish`: success for an exact match, else `failure` "wrong answer". Truncation is left to the
    protocol, after `max_turns`: 5.

    ## Arguments
    - `path="embedded"`: or a folder made by `python -m envs.search_qa.build`.
    - `top_k=3`: articles that a search shows, 1 to 50.
    - `characters=1200`: of all articles shown, at least 100 for each.
    - `retriever=""`: the address of a retriever that replaces BM25.
    - `timeout=10.0`: seconds that the retriever may take, at most 3,600.
    - `render_mode=None`: or "ansi".

    `info["f1"]` is the F1 of the answer.
    """

    name = "search_qa"
    example_state = "If the question were: Where was the writer of Emma born?"
    actions = None
    max_turns = 5
    observable = False  # the articles that no search has shown yet

    def __init__(
        self,
        path: str = EMBEDDED,
        top_k: int = 3,
        characters: int = 1200,
        retriever: str = "",
        timeout: float = 10.0,
        render_mode: str | None = None,
    ) -> None:
        if not 1 <= top_k <= 50 or characters < 100 * top_k:
            raise ValueError(
                f"search_qa needs 1 <= top_k <= 50 and characters >= 100 * top_k, not top_k={top_k}, "
                f"characters={characters}."
            )
        if not 0 < timeout <= LONGEST_WAIT:
            raise ValueError(f"search_qa needs timeout above 0 and at most {LONGEST_WAIT:g}, not timeout={timeout:g}.")
        super().__init__(render_mode)
        self.path, self.top_k, self.characters = path, top_k, characters
        self.retriever = Retriever(retriever, timeout) if retriever else None
        self.slow, self.deterministic = bool(retriever), not retriever
        self.config = path
        if path != EMBEDDED:  # report an unreadable folder at once
            questions_of(path)
            if self.retriever is None:
                library_of(path)

    @classmethod
    def draw(cls, config: str, rng: np.random.Generator) -> Iterator[HopQuestion | None]:
        if config != EMBEDDED:
            questions = questions_of(config)
            while True:
                row = questions[int(rng.integers(len(questions)))]
                hops = tuple(Hop(title, fact) for title, fact in row["hops"])
                yield HopQuestion(row["question"], row["answer"], hops, row["split"])
        while True:
            drawn = draw_question(rng)
            yield drawn and HopQuestion(*drawn, split_by_hash(drawn[0].lower()))

    @classmethod
    def key_of(cls, level: HopQuestion) -> str:
        return level.question.lower()

    @classmethod
    def split_of(cls, level: HopQuestion) -> str:
        return level.split

    def begin(self, level: HopQuestion) -> None:
        self.level = level
        self.results: tuple[Article, ...] | None = None  # of the last search, as far as they were shown
        self.seen: frozenset[Article] = frozenset()
        self.queries: frozenset[str] = frozenset()  # for the expert, who does not repeat a search that did not help
        self.answer: str | None = None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        gain, before, read = 0.0, len(self.seen), read_action(action)
        finishes = read is not None and read[0] == "finish" and self.answer is None
        if read is not None and self.answer is None:
            if finishes:
                self.answer = read[1]
                gain = reward(self.answer, self.level.answer)
            else:
                self.search(read[1])
        right = self.answer is not None and exact_match(self.answer, self.level.answer)
        info = {
            "success": right,
            "action_is_valid": read is not None,
            "action_is_effective": finishes or len(self.seen) > before,
            "failure": "" if right or self.answer is None else "wrong answer",
            "f1": f1(self.answer or "", self.level.answer),
        }
        return self.observe(), gain, self.answer is not None, False, info

    def search(self, query: str) -> None:
        """Show the articles that answer a query."""
        if self.retriever is not None:
            articles = self.retriever.search(query, self.top_k)
        else:
            library = synthetic_library() if self.path == EMBEDDED else library_of(self.path)
            articles = library.search(query, self.top_k)
        self.results = self._cut(
            [(title_shown(title), clean_article(text[: self.characters])) for title, text in articles]
        )
        self.seen |= set(self.results)
        self.queries |= {query}

    # -- text ------------------------------------------------------------------------------------------------------

    def observe(self) -> str:
        if self.answer is not None:
            return f"Question: {self.level.question}\nAnswered."
        question = f"Question: {self.level.question}"
        if self.results is None:
            return question
        lines = [f"{number}. {title}: {text}" for number, (title, text) in enumerate(self.results, 1)]
        return "\n".join([question, *lines]) if lines else f"{question}\nNothing found."

    def _cut(self, articles: list[Article]) -> tuple[Article, ...]:
        """Return what is shown: lines of at most `characters` together; the next may take what a short one leaves."""
        cut, left = [], self.characters
        for number, (title, text) in enumerate(articles):
            head = len(f"{number + 1}. {title}: ") + 1  # and a line feed
            room = left // (len(articles) - number) - head
            cut.append((title, text if len(text) <= room else f"{text[: room - 4]} ..."))
            left -= head + len(cut[-1][1])
        return tuple(cut)

    def rules(self) -> str:
        of = "a synthetic encyclopedia" if self.path == EMBEDDED and self.retriever is None else "an encyclopedia"
        if self.style == "plain":
            return (
                f"Answer the question with the help of {of}. There are two actions: search[words] shows the articles"
                " that fit these words best, and finish[answer] gives your answer, in a few words, and ends the game."
            )
        return (
            f"Answer the question with the articles of {of}. Actions: search[words] shows the articles that fit best; "
            "finish[answer] answers, in a few words, and ends the episode."
        )

    def state_key(self) -> str:
        """Return what was answered, or all that has been shown of articles: it is what later searches may add to."""
        if self.answer is not None:
            return f"{self.level.question}\nanswered {self.answer}"
        return "\n".join([self.level.question, *sorted(f"{title}: {text}" for title, text in self.seen)])

    # -- players ---------------------------------------------------------------------------------------------------

    def _shown_hops(self) -> list[Hop]:
        """Return the hops whose facts stand in what has been shown: the rest of a long article was cut off."""
        return [hop for hop in self.level.hops if any(states(article, hop) for article in self.seen)]

    def _next_hop(self) -> Hop | None:
        """Return the first article on the way whose fact was not shown and that was not searched for."""
        hops = self._shown_hops()
        return next((h for h in self.level.hops if h not in hops and query_of(h.title) not in self.queries), None)

    def expert(self) -> str:
        """Search the articles on the way one after the other, then give the answer, which the data contain."""
        hop = self._next_hop()
        return f"finish[{query_of(self.level.answer)}]" if hop is None else f"search[{query_of(hop.title)}]"

    def players(self) -> dict[str, str]:
        """`hasty` answers without a search, or with the first title it is shown; `astray` searches other things."""
        words = WORD.findall(self.level.question)[:LONGEST] or ["what"]
        read = WORD.findall(" ".join(text for _, text in self.results or ()))[:LONGEST] or words
        random = f"{('search', 'finish')[int(self.policy_rng.integers(2))]}[{self.choose([*words, *read])[:LONGEST]}]"
        title = query_of(self.results[0][0]) if self.results else ""
        hasty = f"finish[{title or self.choose(words)[:LONGEST]}]"
        return {"random": random, "hasty": hasty, "astray": f"search[{self.choose(read)[:LONGEST]}]"}

    def example(self) -> tuple[str, tuple[str, ...]]:
        return "I need to know first who wrote Emma.", ("search[Emma]",)

    def thought(self) -> str:
        """Return what the articles have said so far, and what is missing, where that follows from what they said."""
        hops, hop = self._shown_hops(), self._next_hop()
        sentences = [clean_article(each.fact) for each in hops if each.fact]
        before = self.level.hops if hop is None else self.level.hops[: self.level.hops.index(hop)]
        if all(each in hops for each in before):
            if self.style == "compact":
                sentences.append("Enough." if hop is None else f"Missing: {query_of(hop.title)}.")
            else:
                sentences.append(
                    "That is enough to answer." if hop is None else f"Next I look up {query_of(hop.title)}."
                )
        return " ".join(sentences)


def read_action(action: str) -> tuple[str, str] | None:
    """Return the kind and the text of an action; None for what is neither of the two, empty, or too long.

    >>> read_action(" Search[the Velmar River]"), read_action("search[a] finish[b]")
    (('search', 'the Velmar River'), None)
    """
    match = ACTION.fullmatch(action) if len(action) <= 2 * LONGEST else None
    text = clean_article(match[2]) if match else ""
    return (match[1].lower(), text) if match and text and len(text) <= LONGEST else None


def query_of(text: str) -> str:
    """Return a title or an answer as it can stand between the brackets of an action."""
    return clean_article(text.replace("[", "").replace("]", ""))[:LONGEST].strip() or "?"


def states(article: Article, hop: Hop) -> bool:
    """Return whether an article, as it was shown, says what a hop needs of it."""
    title, text = article
    return title == title_shown(hop.title) and all(part in text for part in SENTENCES.split(clean_article(hop.fact)))


def title_shown(title: str) -> str:
    """Return a title as a result shows it."""
    return clean_article(title[:LONGEST_TITLE])
