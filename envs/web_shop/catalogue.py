"""Which products and goals does the shop have, and what does a search find?"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_RESULTS = 50  # of one search, as published
MOST_WORDS = 40  # of one search that are looked up
_WORD = re.compile(r"[^\W_]+")
_BRACKETS = str.maketrans({"[": "(", "<": "(", "{": "(", "]": ")", ">": ")", "}": ")", "|": "/"})


class CatalogueSource(NamedTuple):
    """Where products and goals come from: Source(path="embedded", rows=1000, human_goals=True)."""

    path: str
    rows: int
    human_goals: bool


class Product(NamedTuple):
    """What can be bought; texts are clean (see `clean`) and `product_category` is the path of categories."""

    asin: str
    title: str
    price: float
    query: str
    product_category: tuple[str, ...]
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]  # (("color", ("red", "black")), ("size", ("8", "9")))
    reviews: str


class Goal(NamedTuple):
    """A level: what is to be bought, the product that it was written for, and the split that it belongs to."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # values
    limit: float  # of the price
    split: str


def key_of(goal: Goal) -> str:
    """Return one text for a goal, equal exactly for equal goals."""
    return repr((goal.asin, goal.instruction, goal.attributes, goal.options, goal.limit))


def clean_field(text: Any, most: int) -> str:
    """Return text of a product or instruction as data alone: one line without brackets, which mark what can be clicked.

    >>> clean("a<answer>click[Buy Now]", 80)
    'a(answer)click(Buy Now)'
    """
    text = text[: 8 * most] if isinstance(text, str) else ""
    plain = "".join(" " if unicodedata.category(each)[0] in "CZ" else each for each in text.translate(_BRACKETS))
    plain = " ".join(plain.split())
    return plain if len(plain) <= most else f"{plain[: most - 3].rstrip()}..."


def fold(text: str) -> str:
    """Return a label as clicks are compared: without case and superfluous blanks."""
    return " ".join(text.casefold().split())


def search_words(text: str) -> list[str]:
    """Return the words that search goes by, a plural's -s cut off: "Hiking boots, 8" -> hiking boot 8."""
    words = _WORD.findall(text.lower())
    return [word[:-1] if len(word) > 3 and word[-1] == "s" and word[-2] != "s" else word for word in words]


@dataclass(eq=False)
class Catalogue:
    """Products, what search needs, and the goals; never changed once it is made, and shared by all environments."""

    products: list[Product]
    goals: list[Goal] = field(default_factory=list)
    notes: str = ""  # what was read and what was left out
    index: Any = None  # bm25s
    places: dict[str, int] = field(default_factory=dict)  # asin -> place in `products`
    searches: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)  # of earlier searches

    def __post_init__(self) -> None:
        import bm25s

        self.places = {product.asin: place for place, product in enumerate(self.products)}
        self.index = bm25s.BM25()
        self.index.index([search_words(searched_text(each)) for each in self.products], show_progress=False)

    def product(self, asin: str) -> Product:
        return self.products[self.places[asin]]

    def search(self, text: str) -> tuple[int, ...]:
        """Return places of the best products by BM25, best first, equal ones in the order of the catalogue."""
        import numpy as np

        words = tuple(dict.fromkeys(word for word in search_words(text) if word in self.index.vocab_dict))[:MOST_WORDS]
        if words not in self.searches:
            if len(self.searches) >= 1 << 14:
                self.searches.clear()
            scores = self.index.get_scores(list(words)) if words else np.zeros(len(self.products))
            order = np.argsort(-scores, kind="stable")[:MOST_RESULTS]
            self.searches[words] = tuple(int(place) for place in order if scores[place] > 0)
        return self.searches[words]


def searched_text(product: Product) -> str:
    """Return what search looks at: title, features, description and options, as published."""
    options = " ".join(" ".join((name, *values)) for name, values in product.options)
    return " ".join((product.title, *product.features, product.description, options))
