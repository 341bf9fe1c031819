"""What stands in the synthetic encyclopedia?  Invented articles and questions that several of them answer together.

Everything is generated from one seed: no person, place or work here exists. An article states only the facts of its own
subject, so a question over two facts needs two articles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

SEED = 2026
ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
CODAS = ("l", "m", "n", "r", "s", "th", "nd", "rk", "x")
GIVEN = (
    "Alma", "Arlo", "Bela", "Cora", "Dario", "Edda", "Elio", "Fara", "Gero", "Hanno", "Ida", "Joris", "Kaia", "Lenz",
    "Mara", "Nilo", "Orla", "Pavel", "Runa", "Sami", "Tova", "Ugo", "Vera", "Wim", "Yara", "Zeno",
)  # fmt: skip
ADJECTIVES = (
    "Amber", "Bitter", "Broken", "Burning", "Crimson", "Distant", "Empty", "Endless", "Frozen", "Gentle", "Golden",
    "Hidden", "Hollow", "Iron", "Last", "Lonely", "Narrow", "Pale", "Quiet", "Restless", "Salt", "Silent", "Silver",
    "Sunken",
)  # fmt: skip
NOUNS = (
    "Bridge", "Candle", "Clock", "Door", "Feather", "Garden", "Harbour", "Island", "Ladder", "Lantern", "Letter",
    "Mirror", "Orchard", "Piano", "Road", "Shore", "Staircase", "Summer", "Tower", "Voyage", "Well", "Window",
)  # fmt: skip
SEAS = ("Northern Sea", "Southern Sea", "Amber Gulf", "Grey Ocean", "Sea of Reeds", "Bay of Storms", "Coral Sea")
LANGUAGES, MONEY = 14, 14  # how many are invented
PRODUCTS = (
    "bicycles", "bottles", "bricks", "clocks", "cranes", "glass", "gloves", "lamps", "looms", "maps", "paint", "paper",
    "pumps", "ropes", "scales", "soap", "stoves", "tea", "telescopes", "tents", "violins", "wagons",
)  # fmt: skip
TRADES = (
    "architect", "astronomer", "baker", "botanist", "carpenter", "chemist", "geologist", "historian", "lawyer",
    "mathematician", "physician", "pilot", "surveyor", "teacher", "weaver",
)  # fmt: skip
FORMS = ("novel", "symphony", "painting", "poem", "play", "film")
COUNTS = {"country": 24, "mountain": 60, "river": 90, "city": 260, "person": 480, "work": 320, "company": 160}


class Relation(NamedTuple):
    """A fact of one kind of subject; {s} is the subject, {o} what the fact says of it.

    `target` is the kind of article that the object has; empty where it has none and can only be an answer.
    """

    subject: str
    target: str
    fact: str  # the sentence of the article
    phrase: str  # the object, described by its subject inside a question
    question: str  # how it is asked for


RELATIONS = {
    "capital": Relation(
        "country", "city", "The capital of {s} is {o}.", "the capital of {s}", "What is the capital of {s}?"
    ),
    "language": Relation("country", "", "The people of {s} speak {o}.", "", "Which language do people of {s} speak?"),
    "money": Relation("country", "", "One pays in {s} with the {o}.", "", "What is the money of {s} called?"),
    "within": Relation("mountain", "country", "{s} lies in {o}.", "the country where {s} lies", "Where does {s} lie?"),
    "climber": Relation(
        "mountain", "person", "The first to climb {s} was {o}.", "the first to climb {s}", "Who was first to climb {s}?"
    ),
    "height": Relation("mountain", "", "{s} is {o} metres high.", "", "How many metres high is {s}?"),
    "source": Relation(
        "river", "mountain", "{s} rises on {o}.", "the mountain on which {s} rises", "On which mountain does {s} rise?"
    ),
    "length": Relation("river", "", "{s} is {o} km long.", "", "How many km long is {s}?"),
    "sea": Relation("river", "", "{s} flows into the {o}.", "", "Into which sea does {s} flow?"),
    "country": Relation(
        "city", "country", "{s} is a city of {o}.", "the country of {s}", "To which country does {s} belong?"
    ),
    "river": Relation("city", "river", "{s} lies on {o}.", "the river of {s}", "On which river does {s} lie?"),
    "mayor": Relation("city", "person", "The mayor of {s} is {o}.", "the mayor of {s}", "Who is the mayor of {s}?"),
    "founded": Relation("city", "", "{s} was founded in {o}.", "", "In which year was {s} founded?"),
    "birthplace": Relation(
        "person", "city", "{s} was born in {o}.", "the city where {s} was born", "In which city was {s} born?"
    ),
    "tutor": Relation("person", "person", "{s} was taught by {o}.", "the tutor of {s}", "Who taught {s}?"),
    "trade": Relation("person", "", "{s} worked as {o}.", "", "What was the trade of {s}?"),
    "birth": Relation("person", "", "The year of birth of {s} is {o}.", "", "In which year was {s} born?"),
    "author": Relation("work", "person", "{s} was made by {o}.", "the maker of {s}", "Who made {s}?"),
    "setting": Relation("work", "city", "{s} is set in {o}.", "the city where {s} is set", "Where is {s} set?"),
    "made": Relation("work", "", "{s} was finished in {o}.", "", "In which year was {s} finished?"),
    "founder": Relation(
        "company", "person", "{s} was founded by {o}.", "the founder of {s}", "Who founded {s}?"
    ),
    "seat": Relation(
        "company", "city", "{s} has its seat in {o}.", "the city of the seat of {s}", "In which city is {s}?"
    ),
    "product": Relation("company", "", "{s} makes {o}.", "", "What does {s} make?"),
}  # fmt: skip
OF_KIND = {kind: tuple(name for name, each in RELATIONS.items() if each.subject == kind) for kind in COUNTS}


class Hop(NamedTuple):
    """A step of the way to an answer: Hop("Mara Tolk", "Mara Tolk was born in Beirnd.")."""

    title: str
    fact: str


class Encyclopedia(NamedTuple):
    """`articles` are (title, text); `facts` says by title and relation what the object is."""

    articles: tuple[tuple[str, str], ...]
    kinds: dict[str, str]
    facts: dict[str, dict[str, str]]


@lru_cache
def encyclopedia() -> Encyclopedia:
    """Return all articles, in an order without meaning."""
    rng = np.random.default_rng(SEED)
    names = _names(rng)
    kinds = {title: kind for kind, titles in names.items() for title in titles}
    words = _words(rng, LANGUAGES + MONEY)
    literals: dict[str, Callable[[], str]] = {
        "language": lambda: _one(rng, words[:LANGUAGES]) + "ish",
        "money": lambda: _one(rng, words[LANGUAGES:]).lower(),
        "height": lambda: str(rng.integers(900, 7000)),
        "length": lambda: str(rng.integers(80, 3000)),
        "sea": lambda: _one(rng, SEAS),
        "founded": lambda: str(rng.integers(700, 1850)),
        "trade": lambda: _one(rng, TRADES),
        "birth": lambda: str(rng.integers(1750, 1960)),
        "made": lambda: str(rng.integers(1780, 2010)),
        "product": lambda: _one(rng, PRODUCTS),
    }
    facts: dict[str, dict[str, str]] = {}
    for title, kind in kinds.items():
        facts[title] = {}
        for name in OF_KIND[kind]:
            target = RELATIONS[name].target
            others = [other for other in names[target] if other != title] if target else []
            facts[title][name] = _one(rng, others) if target else literals[name]()
    capitals = rng.choice(len(names["city"]), len(names["country"]), replace=False)
    for country, city in zip(names["country"], (names["city"][int(i)] for i in capitals), strict=True):
        facts[country]["capital"], facts[city]["country"] = city, country
    articles = [(title, _article(title, kinds[title], facts[title], rng)) for title in kinds]
    order = rng.permutation(len(articles))
    return Encyclopedia(tuple(articles[int(i)] for i in order), kinds, facts)


def draw_question(rng: np.random.Generator) -> tuple[str, str, tuple[Hop, ...]] | None:
    """Return a question over two or three facts, its answer and the way; None where fewer articles suffice."""
    book = encyclopedia()
    title = start = book.articles[int(rng.integers(len(book.articles)))][0]
    hops, phrase = [], start
    for left in range(int(rng.integers(2, 4)), 0, -1):
        names = [name for name in OF_KIND[book.kinds[title]] if left == 1 or RELATIONS[name].target]
        name = names[int(rng.integers(len(names)))]
        value = book.facts[title][name]
        hops.append(Hop(title, RELATIONS[name].fact.format(s=title, o=value)))
        if value in [hop.title for hop in hops] or any(value in book.facts[hop.title].values() for hop in hops[:-1]):
            return None
        if left == 1:
            return RELATIONS[name].question.format(s=phrase), value, tuple(hops)
        phrase, title = RELATIONS[name].phrase.format(s=phrase), value
    raise AssertionError("the last hop returns")


def _article(title: str, kind: str, facts: dict[str, str], rng: np.random.Generator) -> str:
    """Return the facts in any order, after a sentence on what the subject is."""
    opening = f"{title} is a {_one(rng, FORMS) if kind == 'work' else kind}."
    sentences = [RELATIONS[name].fact.format(s=title, o=value) for name, value in facts.items()]
    return " ".join([opening, *(sentences[int(i)] for i in rng.permutation(len(sentences)))])


def _names(rng: np.random.Generator) -> dict[str, list[str]]:
    """Return the titles by kind, all different."""
    words = iter(_words(rng, sum(COUNTS.values())))
    works = [f"The {adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    shapes: dict[str, Callable[[], str]] = {
        "country": lambda: f"{next(words)}ia",
        "mountain": lambda: f"Mount {next(words)}",
        "river": lambda: f"{next(words)} River",
        "city": lambda: next(words),
        "person": lambda: f"{_one(rng, GIVEN)} {next(words)}",
        "company": lambda: f"{next(words)} Works",
    }
    titles = {kind: [shapes[kind]() for _ in range(count)] for kind, count in COUNTS.items() if kind in shapes}
    return titles | {"work": [works[int(i)] for i in rng.choice(len(works), COUNTS["work"], replace=False)]}


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Return invented words, all different, of two or three syllables."""
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(_one(rng, ONSETS) + _one(rng, VOWELS) for _ in range(int(rng.integers(1, 3))))
        words[(word + _one(rng, ONSETS) + _one(rng, VOWELS[:5]) + _one(rng, CODAS)).capitalize()] = None
    return list(words)


def _one(rng: np.random.Generator, choices: tuple[str, ...] | list[str]) -> str:
    return choices[int(rng.integers(len(choices)))]
