"""Word problems with worked steps and a boxed answer, in the schema of nvidia/OpenMathInstruct-1."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from posttrain.data.embedded.splits import first_accepted, held_out
from posttrain.types import derive_seed

NAMES = "Anna Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Nora Omar Pia Rosa Sam Tina Will".split()
THINGS = "apples books coins cards eggs pens stones shells toys cakes stars nuts".split()
GAINS = ("gets", "finds", "buys", "wins")
LOSSES = ("loses", "sells", "drops", "breaks")
ASKS = (
    "How many {t} does {n} have now?",
    "How many {t} are there in the end?",
    "Count the {t} of {n}.",
)
# Training problems that no evaluation asks, in the few words of people who try a model: formulas, in which each step is
# practised for few tokens, and word problems about other people, half of them with a short question. With their shares.
FORMULAS, OTHER_PEOPLE = 0.28, 0.2
FORMULA_ASKS = (
    "What is {s}?", "How much is {s}?", "{s}=?", "{s}?", "{s}=", "{s}", "What's {s}?", "what is {s}?", "Hi, {s}?",
    "Compute {s}.", "Calculate {s}.", "Please calculate {s}.", "Can you do {s}?", "{s}??", "Tell me {s}.",
    "Tell me what {s} is.",
)  # fmt: skip
SUM_OF = 0.15  # of the sums of two numbers are asked for by one of these
SUM_ASKS = ("What is the sum of {a} and {b}?", "Add {a} and {b}.")
ALL_GONE = 0.1  # of the differences, where they can be, are of a number and itself
SPACED, WORDED = 0.25, 0.12  # of the formulas have spaces between their numbers and signs, or words for the signs
WORDS = {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "}
FEW_WORDS = ("How many?", "How many {t}?", "How many has {n} now?")
OTHER_NAMES = "Tom Ada Bob Eva Lisa Max Paul Zoe".split()  # nobody keeps to those of NAMES
LARGEST = 15  # operand
THREE_NUMBERS = 0.25  # of the formulas out of reach have a third number
LATER_STORIES = 0.3  # of the problems that are out of reach in a later step are stories
BELOW_ZERO = 0.35  # of the stories out of reach have a result below 0


def word_problem(rng: random.Random) -> dict[str, Any]:
    """Return {"question", "steps": [(7, "+", 5, 12), ...], "operands": ("+", 7, 5)} for one or two operations."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    signs = rng.choice([("+",), ("-",), ("+", "+"), ("+", "-")])
    start = total = rng.randint(2, LARGEST)
    text = f"{name} has {start} {thing}"
    steps: list[tuple[int, str, int, int]] = []
    operands = [start]
    for i, sign in enumerate(signs):
        other = rng.randint(2, LARGEST) if sign == "+" else rng.randint(1, min(LARGEST, total - 1))
        result = total + other if sign == "+" else total - other
        verb = rng.choice(GAINS if sign == "+" else LOSSES)
        text += f"{' and then' if i else ' and'} {verb} {other}"
        steps.append((total, sign, other, result))
        operands.append(other)
        total = result
    question = f"{text}. {rng.choice(ASKS).format(n=name, t=thing)}"
    return {"question": question, "steps": steps, "operands": ("".join(signs), *operands)}


def problem_of_split(split: str, rng: random.Random) -> dict[str, Any]:
    return first_accepted(word_problem, lambda problem: split_of(problem) == split, rng)


def training_problem(rng: random.Random) -> dict[str, Any]:
    """Return a problem of the training side: in words, or as "What is 7+5-2?"."""
    return first_accepted(_word_problem_or_formula, lambda problem: split_of(problem) == "train", rng)


def _word_problem_or_formula(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    return _formula(rng) if kind < FORMULAS else _story(rng, other_people=kind < FORMULAS + OTHER_PEOPLE)


def _story(rng: random.Random, other_people: bool) -> dict[str, Any]:
    problem = word_problem(rng)
    if other_people:
        _, fact = problem["question"].partition(". ")[0].split(" ", 1)
        name, thing = rng.choice(OTHER_NAMES), fact.split()[2]
        problem["question"] = f"{name} {fact}. {rng.choice((*ASKS, *FEW_WORDS)).format(n=name, t=thing)}"
    return problem


def short_formula(rng: random.Random) -> dict[str, Any]:
    """Return a formula of the training side with one or two operations: what people try a model with."""
    return first_accepted(lambda rng: _formula(rng, 2), lambda problem: split_of(problem) == "train", rng)


def _formula(rng: random.Random, longest: int = 8) -> dict[str, Any]:
    """Return a problem of up to `longest` operations without a story, in the form of `word_problem`."""
    formula = _unasked(rng, longest)
    return {**formula, "question": _asked(formula["question"], rng)}


def _unasked(rng: random.Random, longest: int) -> dict[str, Any]:
    """Return the same with the formula alone as its question."""
    start = total = rng.randint(0, LARGEST)
    text, steps, signs, operands = str(start), [], "", [start]
    for _ in range(rng.randint(1, longest)):
        sign = "+" if total == 0 else "-" if total > 2 * LARGEST else rng.choice("++-")
        other = rng.randint(0, LARGEST if sign == "+" else min(LARGEST, total))
        if sign == "-" and total <= LARGEST and rng.random() < ALL_GONE:
            other = total
        result = total + other if sign == "+" else total - other
        text += f"{sign}{other}"
        steps.append((total, sign, other, result))
        signs, total = signs + sign, result
        operands.append(other)
    return {"question": text, "steps": steps, "operands": (signs, *operands)}


def _asked(formula: str, rng: random.Random) -> str:
    """Return the question for the value of a formula."""
    if rng.random() < SUM_OF and (both := re.fullmatch(r"(\d+)\+(\d+)", formula)):
        return rng.choice(SUM_ASKS).format(a=both[1], b=both[2])
    if (kind := rng.random()) < WORDED:
        formula = re.sub("[-+*/]", lambda sign: WORDS[sign[0]], formula)
    question = rng.choice(FORMULA_ASKS).format(s=formula)
    return re.sub("([-+*/=])", r" \1 ", question).strip() if WORDED <= kind < WORDED + SPACED else question


def formula_out_of_reach(rng: random.Random) -> tuple[str, str]:
    """Return a formula that no problem is like, with a larger number, a product, a quotient or a result below 0.

    And the step that cannot be done, "3-7=?", where it is one of numbers and a sign that the model knows, else "".
    """
    kind = rng.choices(("large", "product", "negative"), (8, 3, 3))[0]
    numbers, sign = sorted(rng.sample(range(1, LARGEST + 1), 2)), rng.choice("+-")
    if kind == "large":
        numbers[rng.randrange(2)] = rng.randint(LARGEST + 1, rng.choice((99, 99, 99, 999, 9999)))
    elif kind == "product":
        sign = rng.choice("*/")
        rng.shuffle(numbers)
    else:
        sign = "-"
    formula = sign.join(map(str, numbers))
    step = f"{formula}=?" if kind == "negative" else ""
    if rng.random() < THREE_NUMBERS:
        other, more = rng.randint(1, LARGEST), rng.choice("+-")
        # Behind a result below 0, not before it: 9+3-7 is within reach.
        ahead = kind != "negative" and rng.random() < 0.5
        formula = f"{other}{more}{formula}" if ahead else f"{formula}{more}{other}"
    return _asked(formula, rng), step


def story_out_of_reach(rng: random.Random) -> tuple[str, str]:
    """Return the same as a word problem: with a larger number, or somebody loses more than there was."""
    below, other_people = rng.random() < BELOW_ZERO, rng.random() < 0.5
    stories = partial(_story, other_people=other_people)
    problem = first_accepted(stories, lambda problem: not below or problem["operands"][0] == "-", rng)
    numbers = re.findall(r"\d+", problem["question"])
    if below:
        numbers.reverse()
    else:
        large = rng.randrange(len(numbers))
        for place in range(len(numbers)):
            if place == large or rng.random() < 0.2:  # one number at least is too large
                numbers[place] = str(rng.randint(LARGEST + 1, rng.choice((99, 99, 99, 999))))
    left = iter(numbers)
    return re.sub(r"\d+", lambda _: next(left), problem["question"]), f"{'-'.join(numbers)}=?" if below else ""


def later_out_of_reach(rng: random.Random) -> tuple[str, str]:
    """Return a problem whose last step alone is out of reach, below 0 or above 45, and its steps: "4+2=6. 6-7=?"."""
    in_words = rng.random() < LATER_STORIES
    if in_words:
        stories = partial(_story, other_people=rng.random() < 0.5)
        problem = first_accepted(
            stories, lambda story: story["operands"][0] == "+-" and story["steps"][0][3] < LARGEST, rng
        )
        sign, steps = "-", problem["steps"][:1]
    else:
        sign = rng.choice("+-")
        problem = first_accepted(
            partial(_unasked, longest=3),
            lambda problem: problem["steps"][-1][3] < LARGEST if sign == "-" else problem["steps"][-1][3] > 2 * LARGEST,
            rng,
        )
        steps = problem["steps"]
    total = steps[-1][3]
    other = rng.randint(total + 1 if sign == "-" else 3 * LARGEST + 1 - total, LARGEST)
    if in_words:
        before, _, asked = problem["question"].partition(f"{problem['operands'][-1]}. ")
        question = f"{before}{other}. {asked}"
    else:
        question = _asked(f"{problem['question']}{sign}{other}", rng)
    return question, f"{worked_steps(steps)} {total}{sign}{other}=?"


def split_of(problem: dict[str, Any]) -> str:
    if held_out("operands", *problem["operands"]):
        return "unseen_operands"
    return "unseen_questions" if held_out("question", problem["question"]) else "train"


def worked_solution(steps: list[tuple[int, str, int, int]]) -> str:
    return rf"{worked_steps(steps)} The answer is \boxed{{{steps[-1][3]}}}."


def worked_steps(steps: list[tuple[int, str, int, int]]) -> str:
    return " ".join(f"{a}{sign}{b}={c}." for a, sign, b, c in steps)


def _miscalculated(steps: list[tuple[int, str, int, int]], rng: random.Random) -> list[tuple[int, str, int, int]]:
    """Return the same steps with the last sum wrong by a little."""
    a, sign, b, c = steps[-1]
    return [*steps[:-1], (a, sign, b, max(0, c + rng.choice([-3, -2, -1, 1, 2, 3])) if c else c + 1)]


def openmathinstruct(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in the schema of nvidia/OpenMathInstruct-1; about one in twelve is made for the filters to drop."""
    for i in range(n):
        rng = random.Random(derive_seed(seed, "openmathinstruct", i))
        if rng.random() < 0.02 and i:  # a duplicate of the row before
            rng = random.Random(derive_seed(seed, "openmathinstruct", i - 1))
            rng.random()
        problem = training_problem(rng)
        yield _math_row(problem, rng)


def _math_row(problem: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    steps, kind = problem["steps"], rng.random()
    expected = predicted = str(steps[-1][3])
    solution, error = worked_solution(steps), "<not_executed>"
    if kind < 0.03:
        steps = _miscalculated(steps, rng)
        solution, predicted = worked_solution(steps), str(steps[-1][3])
    elif kind < 0.05:
        code = "\n".join(f"x = {a} {sign} {b}" for a, sign, b, _ in steps)
        solution = (
            f"Let us compute.\n<llm-code>\n{code}\nx\n</llm-code>\n<llm-code-output>\n{expected}\n</llm-code-output>\n"
            rf"The answer is \boxed{{{expected}}}."
        )
        error = ""
    elif kind < 0.06:
        solution = rf"\boxed{{{steps[0][2]}}} is too simple. {solution}"
    return {
        "question": problem["question"],
        "generated_solution": solution,
        "expected_answer": expected,
        "predicted_answer": predicted,
        "error_message": error,
        "is_correct": predicted == expected,
        "dataset": "gsm8k",
        "generation_type": "without_reference_solution",
    }


def math_problems(n: int, seed: int, split: str = "unseen_questions") -> list[dict[str, str]]:
    """Return held-out problems: new questions over operands met in training, or operands never met together there."""
    assert split in ("unseen_questions", "unseen_operands")
    rngs = (random.Random(derive_seed(seed, "math_problems", split, i)) for i in range(n))
    problems = [problem_of_split(split, rng) for rng in rngs]
    return [{"question": p["question"], "answer": str(p["steps"][-1][3])} for p in problems]
