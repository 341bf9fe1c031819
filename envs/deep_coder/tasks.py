"""Which tasks are built in?  Functions that solve them, each with its text, its parameters and how to draw arguments.

A function is the reference: its own source is the expert's program, and calling it gives the expected outputs. So it
is written as a short answer would be. Two marks make the flawed players' programs: a line that ends in `# edge` is left
out by the one who forgets edge cases, and `# off: ...` is what stands there for the one who is off by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Rng = np.random.Generator


@dataclass(frozen=True)
class Task:
    """A function of arguments and parameters; `text` names the parameters in braces, `edges` are arguments to try."""

    function: Callable[..., Any]
    text: str
    idea: str
    parameters: Callable[[Rng], dict[str, int]]
    sample: Callable[[Rng], tuple[Any, ...]]
    edges: tuple[tuple[Any, ...], ...]


def between(low: int, high: int, name: str = "k") -> Callable[[Rng], dict[str, int]]:
    return lambda rng: {name: int(rng.integers(low, high + 1))}


def ints(rng: Rng, low: int = -20, high: int = 40, shortest: int = 3, longest: int = 12) -> list[int]:
    return [int(x) for x in rng.integers(low, high + 1, rng.integers(shortest, longest + 1))]


def letters(rng: Rng, alphabet: str = "abcdefghijklmnopqrstuvwxyz  ", longest: int = 24) -> str:
    chosen = rng.integers(len(alphabet), size=rng.integers(4, longest))
    return "".join(alphabet[i] for i in chosen).strip() or alphabet[0]


def words(rng: Rng) -> list[str]:
    return [letters(rng, "abcde", 8) for _ in range(rng.integers(3, 9))]


def count_pairs(numbers, total):
    seen = {}
    pairs = 0
    for x in numbers:  # off: for x in numbers[1:]:
        pairs += seen.get(total - x, 0)
        seen[x] = seen.get(x, 0) + 1
    return pairs


def caesar(text, k):
    result = ""
    for c in text:
        if "a" <= c <= "z":
            c = chr((ord(c) - 97 + k) % 26 + 97)  # off: c = chr((ord(c) - 97 + k) % 25 + 97)
        result += c
    return result


def compress(text, k):
    result = ""
    i = 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        if j - i >= k:  # off: if j - i > k:
            result += text[i] + str(j - i)
        else:
            result += text[i:j]
        i = j
    return result


def fewest_coins(amount, a, b):
    best = [0] + [amount] * amount
    for value in range(1, amount + 1):
        for coin in (1, a, b):
            if coin <= value:  # off: if coin < value:
                best[value] = min(best[value], best[value - coin] + 1)
    return best[amount]


def largest_window(numbers, k):
    if len(numbers) < k:  # edge
        return sum(numbers)  # edge
    best = sum(numbers[:k])
    for i in range(len(numbers) - k + 1):  # off: for i in range(len(numbers) - k):
        best = max(best, sum(numbers[i : i + k]))
    return best


def last_in_circle(n, k):
    place = 0
    for size in range(2, n + 1):  # off: for size in range(2, n):
        place = (place + k) % size
    return place + 1


def to_base(n, base):
    if n == 0:  # edge
        return "0"  # edge
    digits = ""
    while n > 0:  # off: while n > 1:
        digits = str(n % base) + digits
        n //= base
    return digits


def every_kth(words, k):
    return words[k - 1 :: k]  # off: return words[k::k]


def longest_smooth(numbers, d):
    best = length = 0
    for i, x in enumerate(numbers):
        if i > 0 and abs(x - numbers[i - 1]) <= d:  # off: if i > 0 and abs(x - numbers[i - 1]) < d:
            length += 1
        else:
            length = 1
        best = max(best, length)
    return best


def rotate(numbers, k):
    if not numbers:  # edge
        return []  # edge
    k = k % len(numbers)
    return numbers[k:] + numbers[:k]  # off: return numbers[k + 1 :] + numbers[: k + 1]


def at_most_k_times(numbers, k):
    result = []
    for x in numbers:
        if result.count(x) < k:  # off: if result.count(x) <= k:
            result.append(x)
    return result


def recurrence(n, a, b, m):
    x, y = 0, 1
    for _ in range(n):  # off: for _ in range(n - 1):
        x, y = y, (a * y + b * x) % m
    return x


def depth_of(text, k):
    depth = count = 0
    for c in text:
        if c == "(":
            depth += 1
            if depth >= k:  # off: if depth > k:
                count += 1
        elif c == ")":
            depth -= 1
            if depth < 0:  # edge
                return -1  # edge
    if depth > 0:  # edge
        return -1  # edge
    return count


def grid_paths(rows, columns, r, c):
    ways = [[0] * (columns + 1) for _ in range(rows + 1)]
    ways[0][1] = 1
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            ways[i][j] = ways[i - 1][j] + ways[i][j - 1]
            if (i, j) == (r, c):  # off: if (i - 1, j - 1) == (r, c):
                ways[i][j] = 0
    return ways[rows][columns]


def count_primes(n, m, r):
    count = 0
    for x in range(2, n + 1):  # off: for x in range(2, n):
        if x % m == r and all(x % d for d in range(2, int(x**0.5) + 1)):
            count += 1
    return count


def sorted_words(words, k):
    chosen = {w for w in words if len(w) >= k}  # off: chosen = {w for w in words if len(w) > k}
    return sorted(chosen, key=lambda w: (len(w), w))


def climb(n, a, b):
    ways = [1] + [0] * n
    for i in range(1, n + 1):
        for step in (1, a, b):
            if step <= i:  # off: if step < i:
                ways[i] += ways[i - step]
    return ways[n]


def by_remainder(numbers, k):
    return sorted(numbers, key=lambda x: (x % k, x))  # off: return sorted(numbers, key=lambda x: (x % k, -x))


def steps_to_one(n, k):
    steps = 0
    while n > 1:  # off: while n >= 1:
        if n % k == 0:
            n //= k
        else:
            n -= 1
        steps += 1
    return steps


def balance(numbers, limit):
    money = 0
    for x in numbers:
        if money + x >= -limit:  # off: if money + x > -limit:
            money += x
    return money


def closest(numbers, target):
    if not numbers:  # edge
        return target  # edge
    return min(numbers, key=lambda x: (abs(x - target), x))  # off: return min(numbers[1:], key=lambda x: abs(x))


def most_common(words, k):
    words = [w for w in words if len(w) >= k]  # off: words = [w for w in words if len(w) > k]
    if not words:  # edge
        return "none"  # edge
    return min(words, key=lambda w: (-words.count(w), w))


def coefficients(rng: Rng) -> dict[str, int]:
    return {"a": int(rng.integers(1, 6)), "b": int(rng.integers(1, 6)), "m": int(rng.integers(50, 1000))}


def two_sizes(rng: Rng) -> dict[str, int]:
    a = int(rng.integers(2, 8))
    return {"a": a, "b": a + int(rng.integers(1, 9))}


def residue(rng: Rng) -> dict[str, int]:
    m = int(rng.integers(3, 11))
    return {"m": m, "r": int(rng.integers(1, m))}


def number(low: int, high: int) -> Callable[[Rng], tuple[int]]:
    return lambda rng: (int(rng.integers(low, high + 1)),)


TASKS = (
    Task(
        count_pairs,
        "Count the pairs of places i < j whose numbers add up to {total}.",
        "Go through the numbers and count how often the missing part was seen before.",
        between(0, 30, "total"),
        lambda rng: (ints(rng, 0, 20, 6),),
        (([],), ([5, 5, 5, 5, 5, 10, 10],)),
    ),
    Task(
        caesar,
        "Move each lowercase letter {k} places on in the alphabet, from z on to a; leave other characters as they are.",
        "Shift the letter's number modulo 26.",
        between(1, 25),
        lambda rng: (letters(rng),),
        (("xyz z",), ("a-b",)),
    ),
    Task(
        compress,
        "Replace each run of at least {k} equal characters by the character and the length of the run; leave shorter"
        " runs as they are.",
        "Find the end of each run and compare its length with {k}.",
        between(2, 5),
        lambda rng: ("".join(c * int(rng.integers(1, 8)) for c in letters(rng, "abc", 9)),),
        (("",), ("aabbb",), ("ccccc",)),
    ),
    Task(
        fewest_coins,
        "There are coins of 1, {a} and {b}. How few coins pay the amount exactly?",
        "Fill a table: the best for a value is one more than the best for the value less a coin.",
        two_sizes,
        number(5, 150),
        ((0,), (1,), (30,)),
    ),
    Task(
        largest_window,
        "Find the largest sum of {k} neighbouring numbers; if there are fewer than {k} numbers, the sum of them all.",
        "Try every place where a window can begin; fewer numbers than {k} are a case of their own.",
        between(2, 6),
        lambda rng: (ints(rng),),
        (([],), ([4],), ([1, 2, 3, 4, 5, 6, 7],)),
    ),
    Task(
        last_in_circle,
        "The people 1 to n stand in a circle. Counting from 1, every {k}-th one leaves until one is left. Who is it?",
        "Build the place of the last one up from a circle of one: add {k} modulo the size.",
        between(2, 40),
        number(2, 200),
        ((1,), (2,)),
    ),
    Task(
        to_base,
        "Write the number n in base {base}.",
        "Take remainders by {base} from the right; 0 is a case of its own.",
        between(2, 9, "base"),
        number(1, 5000),
        ((0,), (1,)),
    ),
    Task(
        every_kth,
        "Give every {k}-th word, beginning with word number {k}.",
        "Slice the list from {k} - 1 in steps of {k}.",
        between(2, 5),
        lambda rng: (words(rng) + words(rng),),
        (([],), (["a"],)),
    ),
    Task(
        longest_smooth,
        "How long is the longest stretch of numbers in which neighbours differ by at most {d}?",
        "Keep the length of the stretch that ends here, and the longest so far.",
        between(1, 12, "d"),
        lambda rng: (ints(rng, 0, 25, 5, 16),),
        (([],), ([7],), ([0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55],)),
    ),
    Task(
        rotate,
        "Rotate the list to the left by {k} places.",
        "Cut the list at {k} modulo its length and swap the parts; an empty list stays empty.",
        between(1, 20),
        lambda rng: (ints(rng),),
        (([],), ([1, 2],)),
    ),
    Task(
        at_most_k_times,
        "Keep the first {k} occurrences of each number, in order, and drop the others.",
        "Keep a number while the result has fewer than {k} of it.",
        between(1, 4),
        lambda rng: (ints(rng, 0, 3, 8, 16),),
        (([],), ([2, 2, 2, 2, 2, 2],)),
    ),
    Task(
        recurrence,
        "f(0) = 0, f(1) = 1, and f(i) = ({a} f(i-1) + {b} f(i-2)) mod {m}. Find f(n).",
        "Carry two neighbours of the sequence along, n times.",
        coefficients,
        number(2, 60),
        ((0,), (1,)),
    ),
    Task(
        depth_of,
        "Count the opening brackets ( at depth {k} or more, the outermost having depth 1; -1 if the brackets do not"
        " match.",
        "Carry the depth along; it must never fall below 0 and must end at 0.",
        between(1, 5),
        lambda rng: (nested(rng),),
        (("(((((())))))",), (")(",), ("((",)),
    ),
    Task(
        grid_paths,
        "A robot goes from row 1, column 1 to the last row and column, one step right or down at a time, never onto the"
        " blocked cell in row {r}, column {c}. How many ways are there?",
        "The ways to a cell are those to the cell above and to the one on the left; the blocked cell has none.",
        lambda rng: {"r": int(rng.integers(1, 5)), "c": int(rng.integers(2, 6))},
        lambda rng: (int(rng.integers(2, 9)), int(rng.integers(2, 9))),
        ((1, 1), (5, 6)),
    ),
    Task(
        count_primes,
        "How many primes up to n, n included, leave the remainder {r} when divided by {m}?",
        "Test each number with that remainder by dividing up to its root.",
        residue,
        number(10, 400),
        ((1,), (2,), (13,)),
    ),
    Task(
        sorted_words,
        "Give the different words of at least {k} letters, shorter ones first, those of one length by the alphabet.",
        "Put the words into a set and sort it by length, then by the word.",
        between(2, 7),
        lambda rng: (words(rng) + words(rng),),
        (([],), (["abcdefg", "b", "ab", "abc", "abcd", "abcde", "abcdef"],)),
    ),
    Task(
        climb,
        "In how many ways can one climb n stairs with steps of 1, {a} or {b} stairs? The order of the steps counts.",
        "The ways to a stair are the sum of the ways to the stairs from which a step leads there.",
        two_sizes,
        number(3, 25),
        ((0,), (1,)),
    ),
    Task(
        by_remainder,
        "Sort the numbers by their remainder when divided by {k} (never negative), those of one remainder ascending.",
        "Sort by a pair: the remainder, then the number.",
        between(2, 12),
        lambda rng: (ints(rng, -30, 60),),
        (([],), ([-1, 0, 1, 30, 60, 90],)),
    ),
    Task(
        steps_to_one,
        "From n, divide by {k} where that leaves no remainder, else subtract 1. How many steps lead to 1?",
        "Do what the text says and count.",
        between(2, 20),
        number(2, 3000),
        ((1,), (400,)),
    ),
    Task(
        balance,
        "An account begins at 0. Each number is a deposit or, if negative, a withdrawal; one that would take the"
        " account below -{limit} is refused. Find the final balance.",
        "Add each number unless the sum falls below -{limit}.",
        between(0, 25, "limit"),
        lambda rng: (ints(rng, -30, 20, 5),),
        (([],), ([-5, -5, -1, -9],), ([-1] * 30,)),
    ),
    Task(
        closest,
        "Which number is closest to {target}? Of two equally close ones the smaller; {target} if there are no numbers.",
        "Take the minimum by distance, then by value; an empty list is a case of its own.",
        between(-9, 30, "target"),
        lambda rng: (ints(rng),),
        (([],), ([10],)),
    ),
    Task(
        most_common,
        "Which word of at least {k} letters is the most frequent? Of several the first in the alphabet; none if there"
        " is not one of these words.",
        "Filter the words, then take the best by count and alphabet; no word left is a case of its own.",
        between(1, 6),
        lambda rng: (words(rng) + words(rng),),
        (([],), (["a", "ab", "abc", "abcd", "abcde", "abcdef"],)),
    ),
)


def nested(rng: Rng) -> str:
    """Brackets that match, now and then with one too many."""
    text, depth = "", 0
    for _ in range(int(rng.integers(4, 16))):
        if depth == 0 or rng.random() < 0.55:
            text, depth = f"{text}(", depth + 1
        else:
            text, depth = f"{text})", depth - 1
    return text + ")" * (depth - (rng.random() < 0.15))
