"""How well does a purchase match a goal?  The reward of Yao et al. 2022 (arXiv 2207.01206).

    r = r_type * (|attributes matched| + |options matched| + [price <= limit]) / (|attributes| + |options| + 1)

r_type compares the bought product with the goal's own: TextMatch is the share of the nouns of the goal's title that the
bought title has, too. r_type = 0 if TextMatch = 0; 0.1 if TextMatch < 0.1; 0.5 if TextMatch <= 0.2, the products were
listed under different queries and share fewer than two categories; else 1.

An attribute is matched if it resembles one of the product's (token set ratio above 85) or stands in its title, features
or description. An option is matched by a chosen value: of "size" the same, of others one that resembles it.

Where this differs from the published code: docs/environments.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

from envs.web_shop.catalogue import Goal, Product

ALIKE = 0.85  # token set ratio above which two texts mean the same, as published
EXACT = "size"  # the option whose values must be equal, as published
COLOURS = frozenset(
    "beige black blue bronze brown burgundy copper coral cream cyan gold gray green indigo ivory khaki lavender lime"
    " magenta maroon mint mustard navy olive orange peach pink plum purple red rose rust silver tan teal turquoise"
    " violet white wine yellow".split()
)
_WORD = re.compile(r"[^\W_]+")
_NO_NOUNS = frozenset(
    "a an and are as at by can each every for from has have her his in is it its more most my not of on one or our per"
    " set she so than that the their these this those to two up use very was we which with without you your best big"
    " black blue brown classic clean cold comfortable cool cute deep dry dual durable easy extra fast fine flat free"
    " fresh full gray great green heavy high hot large light little long loose low mini modern natural new non old"
    " organic original perfect pink plain portable premium pure quick quiet rare real red rich round safe sharp short"
    " slim small smart soft solid strong super sweet tall thick thin tight true ultra vegan vintage warm wet white wide"
    " wild yellow young".split()
)
_ADJECTIVE = re.compile(r"(ly|able|ible|ful|ous|ive|less|proof|ed|ant|ent|est)$")


class Score(NamedTuple):
    """What a purchase is worth, and which parts of the goal it lacks."""

    total: float
    kind: float  # r_type
    attributes: tuple[str, ...]  # asked for and lacking
    options: tuple[str, ...]  # asked for and not chosen
    price: bool  # within the limit


def purchase_score(product: Product, goal: Goal, target: Product, chosen: Mapping[str, str]) -> Score:
    """Return the score of buying `product` with the `chosen` options; `wanted` is the goal's own product."""
    attributes = tuple(each for each in goal.attributes if not has_attribute(product, each))
    options = tuple(
        each for each in goal.options if not any(same_option(name, value, each) for name, value in chosen.items())
    )
    price, kind = product.price <= goal.limit, type_match(product, target)
    parts = len(goal.attributes) + len(goal.options) + 1
    total = kind * (parts - len(attributes) - len(options) - (not price)) / parts
    return Score(total, kind, attributes, options, price)


def wins(scored: Score) -> bool:
    """Return whether nothing is lacking."""
    return scored.total > 1 - 1e-9


def matching_options(product: Product, options: tuple[str, ...]) -> dict[str, str]:
    """Return for each of these options a value of the product that matches it: {"color": "red", "size": "8"}."""
    chosen: dict[str, str] = {}
    for option in options:
        for name, values in product.options:
            matching = [value for value in values if same_option(name, value, option)]
            if matching and name not in chosen:
                chosen[name] = min(matching, key=lambda value: value.lower() != option.lower())
                break
    return chosen


def type_match(product: Product, target: Product) -> float:
    """Return r_type."""
    if product.asin == target.asin:  # whatever its title
        return 1.0
    nouns = nouns_of(target.title, target.attributes)
    text = len(set(nouns_of(product.title, ())) & set(nouns)) / len(nouns) if nouns else 0.2
    if text < 0.1:
        return 0.0 if text == 0 else 0.1
    shared = len(set(product.product_category) & set(target.product_category))
    return 1.0 if text > 0.2 or product.query == target.query != "" or shared >= 2 else 0.5


@lru_cache(maxsize=1 << 14)
def nouns_of(title: str, attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a title that may name a kind of product.

    Left out are numbers, function words, adjectives by list or ending, and the words of the product's attributes: an
    attribute that two products share does not make them the same kind.
    """
    others = _NO_NOUNS.union(_WORD.findall(" ".join(attributes).lower()))
    words = (word for word in _WORD.findall(title.lower()) if word.isalpha() and len(word) > 2)
    return tuple(word for word in words if word not in others and not _ADJECTIVE.search(word))


def has_attribute(product: Product, attribute: str) -> bool:
    """Return whether a product has an attribute, or says so in its texts."""
    if any(alike(each, attribute) for each in product.attributes):
        return True
    lowered = attribute.lower()
    return any(lowered in text.lower() for text in (product.title, " ".join(product.features), product.description))


def same_option(name: str, value: str, option: str) -> bool:
    """Return whether a chosen value is the option that was asked for."""
    value, option = value.lower(), option.lower()
    if value == option or name.lower() == EXACT:
        return value == option
    if "color" in name.lower() or "colour" in name.lower():
        value, option = plain_colour(value), plain_colour(option)
    return alike(value, option)


@lru_cache(maxsize=1 << 14)
def plain_colour(value: str) -> str:
    """Return the first word that names a plain colour, or the value itself: "heather gray" -> gray."""
    return next((word for word in _WORD.findall(value) if word in COLOURS), value)


@lru_cache(maxsize=1 << 17)
def alike(one: str, other: str) -> bool:
    """Return whether the token set ratio (as in fuzzy matching libraries) is above `ALIKE` and the numbers agree.

    Compared are the shared words, and these with the rest of either text; the best of the three similarities counts.
    """
    first, second = (frozenset(_WORD.findall(text.lower())) for text in (one, other))
    numbers = [{word for word in words if word.isdecimal()} for words in (first, second)]
    if not first or not second or numbers[0] != numbers[1]:
        return False
    shared = first & second
    if shared in (first, second):
        return True
    texts = [" ".join((*sorted(shared), *sorted(words - shared))) for words in (shared, first, second)]
    pairs = ((texts[1], texts[2]), *(((texts[0], texts[1]), (texts[0], texts[2])) if shared else ()))
    return any(_above(*pair) for pair in pairs)


def _above(one: str, other: str) -> bool:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return matcher.real_quick_ratio() > ALIKE and matcher.quick_ratio() > ALIKE and matcher.ratio() > ALIKE
