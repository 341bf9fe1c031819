"""What does the quickstart's model get right in a conversation?  A table for docs/results.md, a column a model.

    make quickstart
    python benchmarks/long/quickstart_chat.py runs/quickstart/phase3/final

Minutes a model. Its own greedy answers stay in the conversation. A row counts the conversations whose answers to the
questions at the end are all right, to the letter of the data's answers.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from posttrain.config import ModelSection
from posttrain.data.embedded.arithmetic import LOSSES, NAMES, OTHER_NAMES, THINGS
from posttrain.data.embedded.conversations import FACTS, GREETINGS, NO_ANSWER, SMALL_TALK
from posttrain.models import load
from posttrain.serving import Conversation, Generator
from posttrain.serving.conversation import Exchange
from posttrain.types import SamplingParams, derive_seed

Turn = tuple[str, str | None]  # a message, and the answer or its end where it is counted
UNKNOWN = (  # none of them is in the data
    "What is the capital of Norway?", "Where is Portugal?", "Who wrote Hamlet?", "How does a train work?",
    "Explain the rainbow.", "Who invented the telephone?", "What year is it?", "Why is the grass green?",
    "How many people live in Chile?", "Write a Python function.", "Who painted it?", "What is a rainbow?",
)  # fmt: skip


def boxed(result: int) -> str:
    return rf"\boxed{{{result}}}."


def fact(rng: random.Random, slot: str, values: Sequence[str] = ()) -> tuple[Turn, Turn]:
    """Return the message that tells a fact, one of `values` if given, and the question for it."""
    value = rng.choice(values or FACTS[slot]["values"])
    told, asked = (rng.choice(FACTS[slot][part]).format(v=value) for part in ("tell", "ask"))
    return (told, None), (asked, FACTS[slot]["answer"][0].format(v=value))


def addition(rng: random.Random, form: str = "{a}+{b}?") -> Turn:
    a, b = rng.randint(1, 15), rng.randint(1, 15)
    return form.format(a=a, b=b), boxed(a + b)


def three_numbers(rng: random.Random) -> Turn:
    """Return a sum of three numbers, the first two of which make more than 15."""
    a = rng.randint(1, 15)
    b, c = rng.randint(16 - a, 15), rng.randint(1, 15)
    return f"{a}+{b}+{c}?", boxed(a + b + c)


def large_story(rng: random.Random) -> Turn:
    """Return a story with a number that is too large for the model."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return (
        f"{name} has {rng.randint(16, 99)} {thing} and gets {rng.randint(2, 15)}. Count the {thing} of {name}.",
        NO_ANSWER,
    )


def losing_story(rng: random.Random) -> Turn:
    """Return a story in which more is lost than there was."""
    low, high = sorted(rng.sample(range(2, 16), 2))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {low} {thing} and {rng.choice(LOSSES)} {high}. Count the {thing} of {name}.", NO_ANSWER


def story(rng: random.Random) -> Turn:
    a, b = rng.randint(2, 15), rng.randint(2, 15)
    c, name, thing = rng.randint(1, 14), rng.choice((*NAMES, *OTHER_NAMES)), rng.choice(THINGS)
    c = min(c, a + b - 1)
    asked = f"{name} has {a} {thing} and gets {b} and then {rng.choice(LOSSES)} {c}. Count the {thing} of {name}."
    return asked, boxed(a + b - c)


def others(rng: random.Random, n: int) -> list[Turn]:
    """Return n messages about other things, which are not counted."""
    kinds = rng.choices(("talk", "sum", "unknown"), k=n)
    made = {
        "talk": lambda: rng.choice(SMALL_TALK)[0],
        "sum": lambda: addition(rng)[0],
        "unknown": lambda: rng.choice(UNKNOWN),
    }
    return [(made[kind](), None) for kind in kinds]


def asked_later(rng: random.Random, slot: str, *distances: int) -> list[Turn]:
    """Return a conversation in which a fact is told and asked for again after each number of other messages."""
    told, asked = fact(rng, slot)
    return [told, *(turn for n in distances for turn in (*others(rng, n), asked))]


def another_name(rng: random.Random) -> list[Turn]:
    """Return a conversation about a name that the stories have and only mixed dialogues tell."""
    told, asked = fact(rng, "name", OTHER_NAMES)
    return [told, *others(rng, 1), asked]


def two_facts(rng: random.Random) -> list[Turn]:
    """Return a conversation in which two facts are told, and both asked for after three other messages."""
    (one, ask_one), (two, ask_two) = (fact(rng, slot) for slot in rng.sample(sorted(FACTS), 2))
    return [one, two, *others(rng, 3), ask_one, ask_two]


def out_of_reach(rng: random.Random, low: int, high: int) -> Turn:
    numbers = [rng.randint(low, high), rng.randint(1, 15)]
    rng.shuffle(numbers)
    sign = rng.choice("+-") if numbers[0] > numbers[1] else "+"
    return f"{numbers[0]}{sign}{numbers[1]}?", NO_ANSWER


def large_of_three(rng: random.Random) -> Turn:
    numbers = [rng.randint(16, 99), rng.randint(1, 15), rng.randint(1, 15)]
    rng.shuffle(numbers)
    return f"{'+'.join(map(str, numbers))}?", NO_ANSWER


def product(rng: random.Random) -> Turn:
    return f"{rng.randint(2, 15)}{rng.choice('*/')}{rng.randint(2, 15)}?", NO_ANSWER


def below_zero(rng: random.Random) -> Turn:
    low, high = sorted(rng.sample(range(1, 16), 2))
    return f"{low}-{high}?", NO_ANSWER


def untold(rng: random.Random) -> tuple[str, str]:
    """Return the question for a fact, and that there is no answer."""
    return rng.choice(FACTS[rng.choice(sorted(FACTS))]["ask"]), NO_ANSWER


def untold_beside(rng: random.Random) -> list[Turn]:
    told, asked = rng.sample(sorted(FACTS), 2)
    return [fact(rng, told)[0], *others(rng, 2), (rng.choice(FACTS[asked]["ask"]), NO_ANSWER)]


def untold_after_both(rng: random.Random) -> list[Turn]:
    """Return a conversation in which two facts are told and one of them is asked for before the one not told."""
    *told, asked = rng.sample(sorted(FACTS), 3)
    (one, _), (two, ask_two) = (fact(rng, slot) for slot in told)
    return [one, two, ask_two, (rng.choice(FACTS[asked]["ask"]), NO_ANSWER)]


def corrected(rng: random.Random, slot: str) -> list[Turn]:
    """Return a conversation in which a fact is told, and after two other messages another value of it."""
    (first, _), (then, asked) = fact(rng, slot), fact(rng, slot)
    return [first, *others(rng, 2), then, *others(rng, 1), asked]


def small_talk(rng: random.Random) -> list[Turn]:
    """Return a conversation in which a name is told, and after four other messages something is said as in the data."""
    return [fact(rng, "name")[0], *others(rng, 4), rng.choice(SMALL_TALK)]


def below_zero_later(rng: random.Random, by_one: bool = False) -> Turn:
    """Return a formula of two steps, the second of which has a result below 0, or of -1."""
    a, b = rng.randint(2, 9), rng.randint(1, 5)
    sign = rng.choice("+-") if b < a else "+"
    total = a + b if sign == "+" else a - b
    return f"{a}{sign}{b}-{total + 1 if by_one else rng.randint(total + 1, 15)}?", NO_ANSWER


def losing_story_later(rng: random.Random) -> Turn:
    """Return a story in which more is lost than was there after a gain."""
    a, b = rng.randint(2, 7), rng.randint(2, 6)
    name, thing, more = rng.choice(NAMES), rng.choice(THINGS), rng.randint(a + b + 1, 15)
    asked = f"{name} has {a} {thing} and gets {b} and then {rng.choice(LOSSES)} {more}. Count the {thing} of {name}."
    return asked, NO_ANSWER


def sum_too_large(rng: random.Random) -> Turn:
    """Return a sum of four numbers within reach, whose result is not."""
    return f"{'+'.join(str(rng.randint(12, 15)) for _ in range(4))}?", NO_ANSWER


def greeting(rng: random.Random) -> list[Turn]:
    said, answer = rng.choice(GREETINGS)
    return [(said.lower(), answer)]


KINDS: dict[str, Callable[[random.Random], list[Turn]]] = {
    "a sum": lambda rng: [addition(rng)],
    "five sums in a row": lambda rng: [addition(rng) for _ in range(5)],
    "a sum in words after two others": lambda rng: [*others(rng, 2), addition(rng, "{a} plus {b}")],
    "What's 2+3?": lambda rng: [addition(rng, "What's {a}+{b}?")],
    "hi, 2+3?": lambda rng: [addition(rng, "hi, {a}+{b}?")],
    "Calculate 2+3.": lambda rng: [addition(rng, "Calculate {a}+{b}.")],
    "What is the sum of 2 and 3?": lambda rng: [addition(rng, "What is the sum of {a} and {b}?")],
    "a sum with 0": lambda rng: [(f"{(a := rng.randint(1, 15))}{rng.choice('+-')}0?", boxed(a))],
    "a number less itself": lambda rng: [(f"{(a := rng.randint(1, 15))}-{a}?", boxed(0))],
    "a sum of three numbers, the first two more than 15": lambda rng: [three_numbers(rng)],
    "a story of two steps": lambda rng: [story(rng)],
    "a story of two steps after four others": lambda rng: [*others(rng, 4), story(rng)],
    "a city after one other": lambda rng: asked_later(rng, "city", 1),
    "a city after four others": lambda rng: asked_later(rng, "city", 4),
    "a city after four others, and again four later": lambda rng: asked_later(rng, "city", 4, 4),
    "a city after eight others": lambda rng: asked_later(rng, "city", 8),
    "a name after one other": lambda rng: asked_later(rng, "name", 1),
    "a name after eight others": lambda rng: asked_later(rng, "name", 8),
    "a name of the stories after one other": another_name,
    "two facts after three others": two_facts,
    "a city told anew": lambda rng: corrected(rng, "city"),
    "a greeting in small letters": greeting,
    "small talk after a name and four others": small_talk,
    "refused: a fact that was not told": lambda rng: [untold(rng)],
    "refused: the same after two others": lambda rng: [*others(rng, 2), untold(rng)],
    "refused: the same where another fact was told": untold_beside,
    "refused: the same after two facts and a question for one": untold_after_both,
    "refused: a question about the world": lambda rng: [(rng.choice(UNKNOWN), NO_ANSWER)],
    "refused after three others: the same": lambda rng: [*others(rng, 3), (rng.choice(UNKNOWN), NO_ANSWER)],
    "refused: a sum with a number from 16 to 45": lambda rng: [out_of_reach(rng, 16, 45)],
    "refused: a sum with a number from 46 to 99": lambda rng: [out_of_reach(rng, 46, 99)],
    "refused after three others: the same sum": lambda rng: [*others(rng, 3), out_of_reach(rng, 46, 99)],
    "refused: a sum with a number from 100 to 999": lambda rng: [out_of_reach(rng, 100, 999)],
    "refused: a sum with a number from 1,000 to 9,999": lambda rng: [out_of_reach(rng, 1000, 9999)],
    "refused: three numbers, one of them from 16 to 99": lambda rng: [large_of_three(rng)],
    "refused: a story with a number from 16 to 99": lambda rng: [large_story(rng)],
    "refused: a story with a result below 0": lambda rng: [losing_story(rng)],
    "refused: a product or quotient": lambda rng: [product(rng)],
    "refused: a result below 0": lambda rng: [below_zero(rng)],
    "refused: a result below 0 in the second step": lambda rng: [below_zero_later(rng)],
    "refused: a result of -1 in the second step": lambda rng: [below_zero_later(rng, by_one=True)],
    "refused: a story with a result below 0 in the second step": lambda rng: [losing_story_later(rng)],
    "refused: four numbers, the sum more than 45": lambda rng: [sum_too_large(rng)],
}


def right(generator: Generator, turns: list[Turn]) -> bool:
    """Hold the conversation; return whether each answer that is counted is right."""
    talk = Conversation(generator.chat, generator.context, max_new_tokens=128)
    greedy, good = SamplingParams(max_new_tokens=128, temperature=0.0), True
    for message, expected in turns:
        answer = generator.answer(talk.prompt(message), greedy, seed=0)
        text = "".join(answer)
        talk.exchanges.append(Exchange(message, answer.written, answer.finished, text))
        good &= expected is None or text.endswith(expected)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--n", type=int, default=60, help="conversations of each kind (default: %(default)s)")
    given = parser.parse_args()
    sections = [ModelSection(name_or_path=model, dtype="float32") for model in given.models]
    generators = [Generator(*load(each, device="cpu", chat_template=None, training=False)) for each in sections]
    print(f"| right of {given.n} | " + " | ".join(given.models) + " |")
    print("| --- |" + " --: |" * len(generators))
    for kind, make in KINDS.items():
        talks = [make(random.Random(derive_seed(0, kind, i))) for i in range(given.n)]
        counts = [sum(right(generator, turns) for turns in talks) for generator in generators]
        print(f"| {kind} | " + " | ".join(map(str, counts)) + " |", flush=True)


if __name__ == "__main__":
    main()
