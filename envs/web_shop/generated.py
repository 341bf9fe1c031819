"""Which products does the embedded shop sell?  A synthetic catalogue and its goals, made by rules from a fixed seed.

Brands, products and instructions are inventions. For each goal one purchase is known to have reward 1, and a search for
the instruction's words is known to list it on an early page. A split has trios of products of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from envs.base import split_by_hash
from envs.web_shop.catalogue import Catalogue, Goal, Product, key_of
from envs.web_shop.reward import matching_options, purchase_score, wins

SEED = "web shop 1"
TRIOS = 5  # of products of a kind; the three of a trio differ in maker and price alone
GOALS = (8, 3, 0)  # tried for the cheapest, the middle and the dearest of a trio
EARLY = 9  # results among which an instruction's words must find the product: three pages of three
COLOURS = "black white navy red olive beige teal gray burgundy mustard lavender coral".split()
CLOTHES = ("x-small", "small", "medium", "large", "x-large", "xx-large")
MAKERS = (
    "Norvale Pellam Ostrik Brixel Tamsin Kuvira Lodera Merrin Aldony Quensa Rovik Sundel Talbry Umbrel Vextra Wendor"
    " Yarrow Zelmar Corvid Dunmor Elphin Farrow Gildan Hestia"
).split()
LETTERS = "ABCDEFGHKLMNRSTVX"  # of a model
END_OF_INSTRUCTION = "price lower than"
FORMS = (  # of an instruction
    "i am looking for {kind} that should be {attributes}, with {options}, and price lower than {limit:.2f} dollars",
    "find me {attributes} {kind} with {options}, and price lower than {limit:.2f} dollars",
    "i need {kind}, {attributes}, {options}, and price lower than {limit:.2f} dollars",
    "i would like to buy {kind} with {options}. they must be {attributes}, price lower than {limit:.2f} dollars",
)
FILLER = frozenset(
    "i am looking for that should be with and find me need would like to buy they must a an the of in is are my some"
    " want which it please".split()
)


class Aisle(NamedTuple):
    """A category: Aisle("fashion", {"hiking boots": 80}, ("waterproof",), {"color": ("red",), "size": ("8",)})."""

    department: str
    kinds: dict[str, int]  # kind of product -> usual price
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_COLOUR = {"color": tuple(COLOURS)}
AISLES = {
    "shoes": Aisle(
        "fashion",
        {"hiking boots": 85, "running shoes": 70, "penny loafers": 60, "beach sandals": 28, "house slippers": 22},
        _listed("waterproof, slip resistant, memory foam, arch support, lightweight, rubber sole, machine washable"),
        {**_COLOUR, "size": ("6", "7", "8", "9", "10", "11", "12")},
    ),
    "clothing": Aisle(
        "fashion",
        {"rain jacket": 65, "fleece hoodie": 38, "linen shirt": 32, "yoga pants": 26, "wool sweater": 55},
        _listed("quick drying, long sleeve, stretch fabric, deep pockets, loose fit, moisture wicking, tumble dry"),
        {**_COLOUR, "size": CLOTHES},
    ),
    "bags": Aisle(
        "fashion",
        {"school backpack": 48, "canvas tote": 24, "travel duffel": 57, "crossbody purse": 35, "waist pack": 18},
        _listed("water resistant, padded straps, anti theft, hidden pocket, carry on size, leather trim"),
        {**_COLOUR, "size": ("15 liters", "25 liters", "35 liters", "45 liters")},
    ),
    "kitchen": Aisle(
        "home",
        {"frying pan": 34, "electric kettle": 42, "storage jars": 27, "coffee grinder": 39, "cutting board": 21},
        _listed("dishwasher safe, bpa free, stainless steel, easy to clean, heat resistant, rust proof, space saving"),
        {**_COLOUR, "size": ("1 quart", "2 quarts", "3 quarts", "5 quarts")},
    ),
    "bedding": Aisle(
        "home",
        {"bed sheets": 44, "down comforter": 88, "throw blanket": 29, "blackout curtains": 36, "pillow covers": 16},
        _listed("machine washable, hypoallergenic, wrinkle resistant, organic cotton, fade resistant, extra soft"),
        {**_COLOUR, "size": ("twin", "full", "queen", "king", "california king")},
    ),
    "furniture": Aisle(
        "home",
        {"office chair": 140, "side table": 110, "bar stool": 75, "floor lamp": 58, "shoe bench": 66},
        _listed("easy assembly, solid wood, height adjustable, space saving, steel frame, scratch resistant, non slip"),
        {**_COLOUR, "style": ("farmhouse", "industrial", "scandinavian", "rustic")},
    ),
    "audio": Aisle(
        "electronics",
        {
            "wireless earbuds": 52,
            "bluetooth speaker": 46,
            "gaming headset": 63,
            "microphone": 71,
            "clock radio": 33,
        },
        _listed("noise cancelling, water resistant, long battery life, hands free, stereo sound, plug and play"),
        {**_COLOUR, "warranty": ("one year", "two years", "lifetime")},
    ),
    "computers": Aisle(
        "electronics",
        {"mechanical keyboard": 74, "optical mouse": 23, "laptop stand": 31, "usb hub": 26, "monitor arm": 82},
        _listed("plug and play, aluminum alloy, fast charging, high speed, ergonomic design, dust proof"),
        {**_COLOUR, "style": ("compact", "standard", "professional")},
    ),
    "beauty": Aisle(
        "care",
        {"face moisturizer": 19, "hair shampoo": 14, "lip balm": 7, "sunscreen lotion": 16, "body scrub": 13},
        _listed("cruelty free, sulfate free, paraben free, sensitive skin, dermatologist tested, long lasting"),
        {
            "scent": _listed("lavender, coconut, vanilla, eucalyptus, rosemary, citrus, unscented"),
            "size": ("2 ounce", "4 ounce", "8 ounce", "16 ounce"),
        },
    ),
    "grocery": Aisle(
        "care",
        {"green tea": 12, "protein bars": 24, "trail mix": 15, "olive oil": 21, "potato chips": 9},
        _listed("gluten free, non gmo, low sodium, sugar free, certified organic, kosher certified, dairy free"),
        {
            "flavor": _listed("original, ginger, lemon, garlic, honey, sea salt, chili"),
            "size": ("pack of 1", "pack of 2", "pack of 6", "pack of 12"),
        },
    ),
    "pets": Aisle(
        "leisure",
        {"dog leash": 17, "cat tree": 79, "pet fountain": 37, "litter mat": 20, "puppy harness": 28},
        _listed("chew proof, easy to clean, reflective stitching, non slip, heavy duty, water resistant"),
        {**_COLOUR, "size": CLOTHES[1:5]},
    ),
    "camping": Aisle(
        "leisure",
        {"dome tent": 120, "sleeping bag": 64, "folding chair": 41, "led lantern": 25, "hammock straps": 19},
        _listed("waterproof, ultra lightweight, uv protection, easy setup, compact design, heavy duty, tear resistant"),
        {**_COLOUR, "capacity": ("one person", "two persons", "four persons")},
    ),
}


def generate_catalogue() -> Catalogue:
    """Return the whole embedded catalogue with its goals: the same in every process."""
    rng = random.Random(SEED)  # a text as the seed is hashed by sha512, not by hash()
    products: list[tuple[Product, int]] = []
    for category, aisle in AISLES.items():
        for kind, usual in aisle.kinds.items():
            for _ in range(TRIOS):
                products += zip(_trio(rng, category, aisle, kind, usual), GOALS, strict=True)
    rng.shuffle(products)  # the first of equal results is listed first: that must not depend on the price
    named = [(product._replace(asin=f"P{100 + place}"), goals) for place, (product, goals) in enumerate(products)]
    shop = Catalogue([product for product, _ in named])
    drawn = (goal for product, goals in named for goal in _goals(rng, product, goals))
    shop.goals = list({key_of(goal): goal for goal in drawn if proven(shop, goal)}.values())
    return shop


def _trio(rng: random.Random, category: str, aisle: Aisle, kind: str, usual: int) -> Iterator[Product]:
    """Return three products with the same attributes and options at three prices: the limit decides."""
    attributes = rng.sample(aisle.attributes, 3)
    options = tuple((name, _some(rng, values)) for name, values in aisle.options.items())
    price = usual * rng.uniform(0.5, 1.0)
    for maker in rng.sample(MAKERS, len(GOALS)):
        chosen = rng.sample(attributes, len(attributes))
        model = f"{rng.choice(LETTERS)}{rng.choice(LETTERS)}{rng.randrange(10, 100)}"
        stars = rng.randrange(32, 50) / 10
        yield Product(
            asin="",
            title=f"{', '.join(each.title() for each in (kind, *chosen))}, {model}",
            price=int(price) + rng.choice((0.0, 0.49, 0.95, 0.99)),
            query=kind,
            product_category=(aisle.department, category, kind),
            description=f"{model} by {maker}: {kind} for every day.",
            features=tuple(each.capitalize() for each in attributes),
            attributes=tuple(attributes),
            options=options,
            reviews=f"{stars:.1f} of 5 stars from {rng.randrange(3, 900)} buyers",
        )
        price = price * rng.uniform(1.4, 1.7) + 10


def _some(rng: random.Random, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return three or four of the values, in their order."""
    kept = set(rng.sample(values, min(len(values), rng.choice((3, 4)))))
    return tuple(value for value in values if value in kept)


def _goals(rng: random.Random, product: Product, many: int) -> Iterator[Goal]:
    """Yield instructions whose best purchase is `product`, with one or two attributes and one or two options."""
    split = split_by_hash(repr((product.query, product.attributes, product.options)))
    for _ in range(many):
        attributes = rng.sample(product.attributes, rng.choice((1, 2)))
        groups = sorted(rng.sample(range(len(product.options)), rng.choice((1, 2))))
        options = [(product.options[place][0], rng.choice(product.options[place][1])) for place in groups]
        limit = limit_above(product.price, rng.choice((0, 1)))
        instruction = rng.choice(FORMS).format(
            kind=product.query,
            attributes=" and ".join(attributes),
            options=" and ".join(f"{name} {value}" for name, value in options),
            limit=limit,
        )
        values = tuple(value for _, value in options)
        yield Goal(product.asin, instruction, tuple(attributes), values, limit, split)


def limit_above(price: float, more: int) -> float:
    """Return a limit as published: a multiple of ten dollars above the price, the first or one of the next."""
    return 10.0 * (int(price // 10) + 1 + more)


def search_text(instruction: str) -> str:
    """Return the words of an instruction that say what is wanted: neither the filling words nor the price."""
    query = instruction.lower().partition(END_OF_INSTRUCTION)[0]
    words = (word.strip(".,;:!?()\"'") for word in query.split())
    return " ".join(itertools.islice((word for word in words if word and word not in FILLER), 20))


def proven(shop: Catalogue, goal: Goal) -> bool:
    """Return whether the goal's own product has reward 1 with the options asked for, and is found early."""
    target = shop.product(goal.asin)
    bought = purchase_score(target, goal, target, matching_options(target, goal.options))
    return wins(bought) and shop.places[goal.asin] in shop.search(search_text(goal.instruction))[:EARLY]
