"""Which problems are there without a network?  Templates with parameters: embedded, not taken from a data set.

Each template draws its numbers and gives two ways to ask for the same thing, the working and the answer. Template and
numbers decide the split: other words, names and things make no other problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Iris", "Jon", "Kim", "Lea", "Milo", "Nora", "Omar",
)  # fmt: skip
THINGS = ("apples", "beads", "cards", "coins", "eggs", "marbles", "nails", "pens", "shells", "stamps", "tiles", "plums")


class Drawn(NamedTuple):
    """What a template gives: Drawn(("How many ...?", "Say how many ..."), "3 * 4 = 12", "12")."""

    questions: tuple[str, str]
    working: str
    answer: str


class Parameters:
    """The numbers and words of one problem."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.name = NAMES[int(rng.integers(len(NAMES)))]
        self.thing = THINGS[int(rng.integers(len(THINGS)))]

    def __call__(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))


def bags(p: Parameters) -> Drawn:
    count, each, more = p(3, 19), p(3, 24), p(2, 30)
    return Drawn(
        (
            f"{p.name} has {count} bags with {each} {p.thing} each, and {more} more {p.thing}. "
            f"How many {p.thing} does {p.name} have?",
            f"There are {count} bags, each holding {each} {p.thing}. {p.name} owns them, and {more} loose {p.thing} as "
            f"well. Find the number of {p.thing} in all.",
        ),
        f"{count} * {each} = {count * each}, {count * each} + {more} = {count * each + more}",
        str(count * each + more),
    )


def change(p: Parameters) -> Drawn:
    price, count = p(2, 9), p(2, 9)
    paid = price * count + p(1, 40)
    cost = price * count
    return Drawn(
        (
            f"{p.name} buys {count} books at {price} dollars each and pays with {paid} dollars. How many dollars does "
            f"{p.name} get back?",
            f"For {count} books, each of which costs {price} dollars, {p.name} hands over {paid} dollars. What is the "
            "change in dollars?",
        ),
        f"{count} * {price} = {cost}, {paid} - {cost} = {paid - cost}",
        str(paid - cost),
    )


def left_over(p: Parameters) -> Drawn:
    had, days, each = p(60, 150), p(2, 9), p(2, 6)
    used = days * each
    return Drawn(
        (
            f"{p.name} has {had} {p.thing} and gives away {each} a day for {days} days. How many {p.thing} are left?",
            f"Out of {had} {p.thing}, {p.name} hands out {each} on each of {days} days. How many remain?",
        ),
        f"{each} * {days} = {used}, {had} - {used} = {had - used}",
        str(had - used),
    )


def average(p: Parameters) -> Drawn:
    mean, first, second = p(20, 60), p(1, 15), p(1, 15)
    numbers = mean - first, mean + second, mean + first - second
    total = sum(numbers)
    listed = f"{numbers[0]}, {numbers[1]} and {numbers[2]}"
    return Drawn(
        (f"What is the average of {listed}?", f"Find the mean of the numbers {listed}."),
        f"{numbers[0]} + {numbers[1]} + {numbers[2]} = {total}, {total} / 3 = {mean}",
        str(mean),
    )


def discount(p: Parameters) -> Drawn:
    percent, price = p(1, 9) * 5, p(2, 30) * 20
    off = price * percent // 100
    return Drawn(
        (
            f"A coat costs {price} dollars. Its price falls by {percent} percent. What is the new price in dollars?",
            f"What does a coat of {price} dollars cost, in dollars, after {percent} percent are taken off?",
        ),
        f"{price} * {percent} / 100 = {off}, {price} - {off} = {price - off}",
        str(price - off),
    )


def part_of(p: Parameters) -> Drawn:
    bottom, times = p(3, 9), p(3, 30)
    top = p(2, bottom - 1)
    whole = bottom * times
    return Drawn(
        (
            f"{p.name} has {whole} {p.thing} and sells {top}/{bottom} of them. How many {p.thing} does {p.name} sell?",
            f"How many {p.thing} are {top}/{bottom} of the {whole} {p.thing} of {p.name}?",
        ),
        f"{whole} / {bottom} = {times}, {times} * {top} = {top * times}",
        str(top * times),
    )


def trip(p: Parameters) -> Drawn:
    fast, long, slow, short = p(40, 90), p(2, 6), p(10, 35), p(1, 5)
    total = fast * long + slow * short
    return Drawn(
        (
            f"{p.name} drives {long} hours at {fast} km an hour and cycles {short} hours at {slow} km an hour. How "
            "many km is the trip?",
            f"A trip of {p.name} has {long} hours by car at {fast} km an hour, then {short} hours by bicycle at {slow} "
            "km an hour. What is its length in km?",
        ),
        f"{long} * {fast} = {long * fast}, {short} * {slow} = {short * slow}, {long * fast} + {short * slow} = {total}",
        str(total),
    )


def together(p: Parameters) -> Drawn:
    one, other = p(2, 12), p(2, 12)
    time = Fraction(one * other, one + other)
    return Drawn(
        (
            f"One pump fills a tank in {one} hours, another in {other} hours. How many hours do both need together?",
            f"A tank takes {one} hours to fill by one pump and {other} hours by another. In how many hours is it full "
            "when both run?",
        ),
        f"{one} * {other} = {one * other}, {one} + {other} = {one + other}, {one * other} / {one + other} = {time}",
        str(time),
    )


def linear(p: Parameters) -> Drawn:
    factor, x, added = p(2, 15), p(2, 30), p(1, 50)
    result = factor * x + added
    return Drawn(
        (f"Solve {factor}x + {added} = {result} for x.", f"Which x satisfies {result} = {factor}x + {added}?"),
        f"{result} - {added} = {factor * x}, {factor * x} / {factor} = {x}",
        str(x),
    )


def two_numbers(p: Parameters) -> Drawn:
    small, gap = p(3, 60), p(2, 40)
    total = 2 * small + gap
    return Drawn(
        (
            f"Two numbers have the sum {total} and the difference {gap}. What is the larger one?",
            f"The sum of two numbers is {total}, and one is {gap} more than the other. Find the larger number.",
        ),
        f"{total} + {gap} = {total + gap}, {total + gap} / 2 = {small + gap}",
        str(small + gap),
    )


def rectangle(p: Parameters) -> Drawn:
    width, height = p(3, 25), p(3, 25)
    area, half = width * height, width + height
    return Drawn(
        (
            f"A rectangle has the area {area} and one side of length {width}. What is its perimeter?",
            f"Find the perimeter of a rectangle with a side of length {width} and the area {area}.",
        ),
        f"{area} / {width} = {height}, {width} + {height} = {half}, 2 * {half} = {2 * half}",
        str(2 * half),
    )


def common_divisor(p: Parameters) -> Drawn:
    shared, one = p(2, 15), p(2, 12)
    first, second = shared * one, shared * (one + p(1, 9))
    divisor = math.gcd(first, second)
    return Drawn(
        (
            f"What is the greatest common divisor of {first} and {second}?",
            f"Find the largest whole number that divides both {first} and {second}.",
        ),
        f"{first} / {divisor} = {first // divisor}, {second} / {divisor} = {second // divisor}, divisor {divisor}",
        str(divisor),
    )


def common_multiple(p: Parameters) -> Drawn:
    first, second = p(4, 30), p(4, 30)
    shared, multiple = math.gcd(first, second), math.lcm(first, second)
    return Drawn(
        (
            f"What is the least common multiple of {first} and {second}?",
            f"Find the smallest positive number that both {first} and {second} divide.",
        ),
        f"{first} / {shared} = {first // shared}, {first // shared} * {second} = {multiple}",
        str(multiple),
    )


def remainder(p: Parameters) -> Drawn:
    divisor, times = p(3, 19), p(5, 60)
    rest = p(1, divisor - 1)
    number = divisor * times + rest
    return Drawn(
        (
            f"What is the remainder when {number} is divided by {divisor}?",
            f"{p.name} packs {number} {p.thing} into boxes of {divisor}, as many full boxes as there can be. How many "
            f"{p.thing} are left?",
        ),
        f"{divisor} * {times} = {divisor * times}, {number} - {divisor * times} = {rest}",
        str(rest),
    )


def sequence(p: Parameters) -> Drawn:
    first, step, place = p(1, 30), p(2, 15), p(8, 40)
    term = first + (place - 1) * step
    return Drawn(
        (
            f"A sequence starts {first}, {first + step}, {first + 2 * step} and goes on by equal steps. What is term "
            f"number {place}?",
            f"Equal steps lead from {first} to {first + step} to {first + 2 * step} and so on. Find term number "
            f"{place}.",
        ),
        f"{place} - 1 = {place - 1}, {place - 1} * {step} = {(place - 1) * step}, "
        f"{first} + {(place - 1) * step} = {term}",
        str(term),
    )


def series(p: Parameters) -> Drawn:
    first = p(1, 20)
    last = first + p(2, 15) * 2
    count = last - first + 1
    total = (first + last) * count // 2
    return Drawn(
        (
            f"What is the sum of all whole numbers from {first} to {last}?",
            f"Add up every whole number from {first} to {last}. What is the total?",
        ),
        f"{last} - {first} + 1 = {count}, {first} + {last} = {first + last}, {first + last} * {count} / 2 = {total}",
        str(total),
    )


def handshakes(p: Parameters) -> Drawn:
    guests, absent = p(5, 60), p(1, 3)
    left = guests - absent
    return Drawn(
        (
            f"{p.name} invites {guests} people, and {absent} of them stay away. Those who come shake hands once with "
            f"each other; {p.name} does not. How many handshakes are there?",
            f"Of {guests} invited people {absent} do not come to the party of {p.name}. Each pair of those who come "
            f"shakes hands once, without {p.name}. Find the number of handshakes.",
        ),
        f"{guests} - {absent} = {left}, {left} * {left - 1} / 2 = {left * (left - 1) // 2}",
        str(left * (left - 1) // 2),
    )


def chance(p: Parameters) -> Drawn:
    red, blue, green = p(1, 20), p(1, 20), p(1, 20)
    total = red + blue + green
    probability = Fraction(red, total)
    return Drawn(
        (
            f"A bag holds {red} red, {blue} blue and {green} green balls. One is drawn at random. What is the "
            "probability that it is red?",
            f"Of {red} red, {blue} blue and {green} green balls one is taken blindly. How likely is a red one, as a "
            "fraction?",
        ),
        f"{red} + {blue} + {green} = {total}, {red} / {total} = {probability}",
        str(probability),
    )


def fractions(p: Parameters) -> Drawn:
    first, second = (Fraction(p(1, 9), p(2, 12)) for _ in range(2))
    return Drawn(
        (
            f"Compute {first} + {second} as a fraction in lowest terms or a whole number.",
            f"What is the sum of {first} and {second}, in lowest terms?",
        ),
        f"{first} + {second} = {first + second}",
        str(first + second),
    )


def ages(p: Parameters) -> Drawn:
    young, years, times = p(2, 15), p(1, 9), p(2, 5)
    old = times * (young + years) - years
    return Drawn(
        (
            f"{p.name} is {young} years old. In {years} years the mother of {p.name} will be {times} times as old as "
            f"{p.name} will be then. How old is she now?",
            f"The mother of {p.name} will be {times} times as old as {p.name} in {years} years. {p.name} is {young} "
            "now. Find the age of the mother now.",
        ),
        f"{young} + {years} = {young + years}, {times} * {young + years} = {old + years}, {old + years} - {years} = "
        f"{old}",
        str(old),
    )


def roots(p: Parameters) -> Drawn:
    small, gap = p(1, 12), p(1, 9)
    large = small + gap
    return Drawn(
        (
            f"What is the larger solution of x^2 - {small + large}x + {small * large} = 0?",
            f"The equation x^2 + {small * large} = {small + large}x has two solutions. Find the larger one.",
        ),
        f"{small} + {large} = {small + large}, {small} * {large} = {small * large}, larger {large}",
        str(large),
    )


def ratio(p: Parameters) -> Drawn:
    one, other, part = p(1, 9), p(1, 9), p(3, 25)
    total = (one + other) * part
    return Drawn(
        (
            f"{p.name} and a friend share {total} {p.thing} in the ratio {one}:{other}. How many does {p.name} get?",
            f"{total} {p.thing} are split between {p.name} and a friend as {one}:{other}. Find the share of {p.name}.",
        ),
        f"{one} + {other} = {one + other}, {total} / {one + other} = {part}, {part} * {one} = {one * part}",
        str(one * part),
    )


def square_grid(p: Parameters) -> Drawn:
    rows, columns, missing = p(4, 25), p(4, 25), p(1, 12)
    total = rows * columns
    return Drawn(
        (
            f"A hall has {rows} rows of {columns} seats. {missing} seats are broken. How many seats can be used?",
            f"Of the seats in a hall with {rows} rows, {columns} seats in each, {missing} cannot be used. How many "
            "can?",
        ),
        f"{rows} * {columns} = {total}, {total} - {missing} = {total - missing}",
        str(total - missing),
    )


def powers(p: Parameters) -> Drawn:
    base, high, low = p(2, 9), p(2, 4), p(2, 9)
    first, second = base**high, low**2
    return Drawn(
        (f"What is {base}^{high} + {low}^2 ?", f"Compute the sum of {base}^{high} and {low}^2."),
        f"{base}^{high} = {first}, {low}^2 = {second}, {first} + {second} = {first + second}",
        str(first + second),
    )


TEMPLATES: dict[str, Callable[[Parameters], Drawn]] = {
    template.__name__: template
    for template in (
        bags, change, left_over, average, discount, part_of, trip, together, linear, two_numbers, rectangle,
        common_divisor, common_multiple, remainder, sequence, series, handshakes, chance, fractions, ages, roots,
        ratio, square_grid, powers,
    )
}  # fmt: skip
