"""How are WebShop's own files read?  Those that setup.sh of the repository princeton-nlp/WebShop downloads.

A folder holds three JSON files (the sets of 1,000 products have `_1000` before `.json`):

items_shuffle.json    a list of products: `asin`, `name`, `pricing` ("$12.99" or "$10.00 - $20.00"), `query`,
                      `product_category` ("Beauty › Hair › Oils"), `full_description`, `small_description` (a list),
                      `customization_options` ({"color": [{"value": "red", ...}]})
items_ins_v2.json     asin -> `attributes` (a list), and for some `instruction`, `instruction_attributes`
items_human_ins.json  asin -> a list of `instruction`, `instruction_attributes`, `instruction_options` (list or dict)
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.web_shop.catalogue import Catalogue, CatalogueSource, Goal, Product, clean_field, key_of
from envs.web_shop.reward import matching_options, purchase_score, wins

HELD_OUT = (500, 1000)  # goals for test and validation, as in RAGEN
SMALL = 4500  # goals below which a ninth and two ninths are held out instead
NO_LIMIT = 1_000_000.0  # of the price, where published goals have none
NO_PRICE = 100.0  # of a product without a price, as published
MOST_COMBINATIONS = 200  # of options of one product, where an instruction is generated for each
CHUNK = 1 << 20
_PRICE = re.compile(r"\$\s*([\d,]{1,12}(?:\.\d{1,4})?)")
_SLASH = re.compile(r"\s*[/|]\s*")
_log = logging.getLogger(__name__)


def files(source: CatalogueSource) -> dict[str, Path]:
    """Return the files of a source by their part; a ValueError says which are missing."""
    folder, by_part, missing = Path(source.path), {}, []
    parts = ("items_shuffle", "items_ins_v2", *(["items_human_ins"] if source.human_goals else []))
    endings = ("_1000.json", ".json") if source.rows <= 1000 else (".json", "_1000.json")
    for part in parts:
        paths = [folder / f"{part}{ending}" for ending in endings]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            missing.append(f"{part}.json")
        else:
            by_part[part] = path
    if missing:
        raise ValueError(
            f'web_shop cannot be loaded from path="{source.path}": there is no {", ".join(missing)} (or ..._1000.json).'
            " The path is a folder with the files that setup.sh of the repository princeton-nlp/WebShop downloads;"
            ' they are not on the Hugging Face Hub. path="embedded" needs no files.'
        )
    return by_part


def load_published(source: CatalogueSource) -> Catalogue:
    """Return the catalogue of a folder. What is left out is counted, logged and kept in `notes`."""
    paths, left = files(source), Counter()
    about = _table(paths["items_ins_v2"])
    products: dict[str, Product] = {}
    for row in _rows(paths["items_shuffle"], source.rows):
        product = _product(row, about)
        if product is None or product.asin in products:
            left["damaged products" if product is None else "repeated products"] += 1
        else:
            products[product.asin] = product
    if not products:
        raise ValueError(f"web_shop found no product with an asin and a name in {paths['items_shuffle']}.")
    shop, goals = Catalogue(list(products.values())), {}
    instructions = _table(paths["items_human_ins"]) if source.human_goals else about
    for product in shop.products:
        for goal in _goals(product, instructions.get(product.asin), source.human_goals, left):
            goals[key_of(goal)] = goal
    if not goals:
        raise ValueError(
            f"web_shop found no goal for the {len(products):,} products of {source.path}: they have no instructions"
            f" with attributes. Try more rows, or human_goals={str(not source.human_goals).lower()}."
        )
    shop.goals = _with_splits(goals)
    left["goals kept that their own product cannot win"] = sum(not _winnable(shop, goal) for goal in shop.goals)
    counts = "; ".join(f"{count:,} {what}" for what, count in sorted(left.items()) if count)
    shop.notes = f"{len(products):,} products, {len(goals):,} goals{f'; {counts}' if counts else ''}"
    _log.warning("web_shop read %s: %s.", source.path, shop.notes)
    return shop


def _winnable(shop: Catalogue, goal: Goal) -> bool:
    target = shop.product(goal.asin)
    return wins(purchase_score(target, goal, target, matching_options(target, goal.options)))


def _with_splits(goals: dict[str, Goal]) -> list[Goal]:
    """Return the goals in an order that only they themselves decide: the first for test, the next for validation."""
    order = sorted(goals, key=lambda key: hashlib.sha256(key.encode()).digest())
    test, validation = HELD_OUT if len(order) >= SMALL else (len(order) // 9, 2 * len(order) // 9)
    names = ["test"] * test + ["validation"] * validation + ["train"] * (len(order) - test - validation)
    return [goals[key]._replace(split=name) for key, name in zip(order, names, strict=True)]


# -- JSON --------------------------------------------------------------------------------------------------------------


def _rows(path: Path, most: int) -> Iterator[Any]:
    """Yield the first members of a list in a JSON file, which is read no further than these: all products are 5 GB."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(CHUNK).lstrip()
        if not text.startswith("["):
            raise ValueError(f"{path} must be a JSON list of products.")
        place = 1
        for _ in range(most):
            while True:
                start = _after_commas(text, place)
                if text[start : start + 1] == "]":
                    return
                try:
                    row, place = decoder.raw_decode(text, start)
                    break
                except RecursionError:
                    raise ValueError(f"{path} is nested too deeply.") from None
                except json.JSONDecodeError as error:
                    more = file.read(max(CHUNK, len(text)))
                    if not more:
                        raise ValueError(f"{path} is cut off or no JSON: {error.msg} behind a product.") from None
                    text, place = text[start:] + more, 0
            yield row


def _after_commas(text: str, place: int) -> int:
    while text[place : place + 1].isspace() or text[place : place + 1] == ",":
        place += 1
    return place


def _table(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object."""
    try:
        table = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} must be a JSON object with asins as keys.")
    return table


# -- rows --------------------------------------------------------------------------------------------------------------


def _product(row: Any, about: dict[str, Any]) -> Product | None:
    """Return a product of a row; None where it has no usable asin or name."""
    if not isinstance(row, dict):
        return None
    asin, title = row.get("asin"), clean_field(row.get("name"), 200)
    if not isinstance(asin, str) or not (asin.isalnum() and asin.isascii() and len(asin) <= 10) or asin == "nan":
        return None
    if not title:
        return None
    known = about.get(asin)
    path = row.get("product_category")
    return Product(
        asin=asin,
        title=title,
        price=price_of(row.get("pricing")),
        query=clean_field(row.get("query"), 100).lower(),
        product_category=tuple(clean_field(each, 100) for each in (path if isinstance(path, str) else "").split("›")),
        description=clean_field(row.get("full_description"), 2000),
        features=_texts(row.get("small_description"), 20, 300),
        attributes=_texts(known.get("attributes") if isinstance(known, dict) else None, 50, 60),
        options=_options(row.get("customization_options")),
        reviews="",
    )


def _texts(value: Any, most: int, length: int) -> tuple[str, ...]:
    """Return the texts of a list, or of one text."""
    texts = (clean_field(each, length) for each in (value if isinstance(value, list) else [value])[:most])
    return tuple(text for text in texts if text)


def _options(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the options with their different values, the first hundred of each."""
    values_of: dict[str, dict[str, None]] = {}
    for name, contents in list(value.items())[:6] if isinstance(value, dict) else ():
        values = [_option(each.get("value")) for each in (contents or [])[:100] if isinstance(each, dict)]
        if any(values) and clean_field(name, 40):
            values_of.setdefault(clean_field(name, 40).lower(), {}).update(dict.fromkeys(filter(None, values)))
    return tuple((name, tuple(values)) for name, values in values_of.items())


def _option(value: Any) -> str:
    """Return a value as goals and products have it alike: "Small | Medium" -> small/medium."""
    return _SLASH.sub("/", clean_field(value, 80).lower())


def price_of(value: Any) -> float:
    """Return a price, the middle of a range, or `NO_PRICE`: "$10.00 - $20.00" -> 15.0."""
    text = " ".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else ""
    prices = [float(each.replace(",", "") or 0) for each in _PRICE.findall(text[:200])][:2]
    return round(sum(prices) / len(prices), 2) if prices and sum(prices) > 0 else NO_PRICE


def _goals(product: Product, instructions: Any, human: bool, left: Counter[str]) -> Iterator[Goal]:
    """Yield the goals of a product: instructions of people, or generated ones with each combination of options."""
    for row in instructions if isinstance(instructions, list) else [instructions] if instructions else ():
        instruction = clean_field(row.get("instruction"), 600) if isinstance(row, dict) else ""
        if not instruction:
            left["damaged instructions" if human else "products without instruction"] += 1
            continue
        attributes = _texts(row.get("instruction_attributes"), 20, 60)
        if not attributes:
            left["instructions without attributes"] += 1
            continue
        if not human:
            for names in _combinations(product):
                text = ", and ".join(f"{name}: {value}" for name, value in names.items())
                sentence = f"{instruction.strip('.')}{f' with {text}' if text else ''}"
                yield _goal(product, sentence, attributes, tuple(names.values()))
            continue
        options = row.get("instruction_options")
        values = list(options.values()) if isinstance(options, dict) else options if isinstance(options, list) else []
        chosen = tuple(filter(None, map(_option, values[:20])))
        yield _goal(product, instruction.strip("."), attributes, chosen)


def _combinations(product: Product) -> Iterator[dict[str, str]]:
    """Yield different choices of a value for every option: all of them, or `MOST_COMBINATIONS` drawn ones."""
    options, many = sorted(product.options), 1
    for _, values in options:
        many *= len(values)
    drawn = (
        random.Random(product.asin).sample(range(many), MOST_COMBINATIONS) if many > MOST_COMBINATIONS else range(many)
    )
    for number in drawn:
        chosen, rest = {}, number
        for name, values in options:
            rest, place = divmod(rest, len(values))
            chosen[name] = values[place]
        yield chosen


def _goal(product: Product, instruction: str, attributes: tuple[str, ...], options: tuple[str, ...]) -> Goal:
    """Return a goal with the published limit: the larger of two of the next four multiples of ten above the price."""
    above = [10.0 * step for step in range(1, 100) if 10.0 * step > product.price][:4]
    if len(above) < 2:
        return Goal(product.asin, instruction, attributes, options, NO_LIMIT, "")
    limit = max(random.Random(repr((product.asin, instruction, options))).sample(above, 2))
    return Goal(
        product.asin, f"{instruction}, and price lower than {limit:.2f} dollars", attributes, options, limit, ""
    )
