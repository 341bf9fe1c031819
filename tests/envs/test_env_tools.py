"""What does a model read when it calls a function: results, and errors in words, within a time."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

import envs
from envs.episode import Episode
from envs.protocol import Protocol
from envs.tools import MOST_CHARACTERS, Call, Tool, answer_of, methods_of, tool_of, tools_of
from examples import own_tool
from examples.own_search import search, write_questions
from examples.own_tool import calculate


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


class Unwritten:
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Silent(Unwritten, Exception): ...


def look(word: str, where: Literal["here", "there"] = "here") -> Any:
    """Look up a word.

    Args:
        word: what to look up
        where: in which book
    """
    if word == "list":
        return {"found": [word, "é"], "where": where}
    if word == "hang":
        threading.Event().wait()
    if word == "raise":
        raise KeyError("no such\nword")
    if word == "exit":
        raise SystemExit(3)
    if word == "silent":
        raise Silent
    if word == "late":
        raise TimeoutError
    if word == "unwritten":
        return Unwritten()
    if word == "half":
        return "\ud800"
    if word == "parts":
        return [{"type": "text", "text": "It is "}, {"type": "text", "text": "5."}]
    if word == "picture":
        return [{"type": "text", "text": "It is"}, {"type": "image", "image": "x"}]
    if word == "nothing":
        return []
    if word == "loop":
        loop: list[Any] = []
        loop.append(loop)
        return loop
    return word * 10_000


async def wait(forever: bool) -> str:
    """Wait.

    Args:
        forever: or only until the loop comes by again
    """
    over = asyncio.Event()
    if not forever:
        asyncio.get_running_loop().call_soon(over.set)
    await over.wait()
    return "done"


TURN = asyncio.Semaphore(1)


async def take_turns(seconds: float) -> str:
    """Wait while nobody else does.

    Args:
        seconds: how long
    """
    async with TURN:
        await asyncio.sleep(seconds)
    return "done"


async def block(seconds: float) -> str:
    """Block the event loop.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


async def leave() -> str:
    """Leave."""
    raise SystemExit(3)


def listed(*numbers: int) -> int:
    """Add numbers.

    Args:
        numbers: which ones
    """
    return sum(numbers)


def named(word: str, **more: int) -> int:
    """Add numbers.

    Args:
        word: which
        more: which ones
    """
    return len(word)


def by_place(word: str, /) -> int:
    """Count letters.

    Args:
        word: which
    """
    return len(word)


def pieces(word: str) -> Any:
    """Spell a word.

    Args:
        word: which
    """
    yield from word


async def later_pieces(word: str) -> Any:
    """Spell a word.

    Args:
        word: which
    """
    yield word


class Scaled:
    """It is an object."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        """Multiply a number.

        Args:
            number: which
        """
        return self.factor * number


twice = Scaled(2)


def no_types(a):
    """Do it.

    Args:
        a: what
    """


def no_docstring(a: int) -> int:
    return a


class Counter:
    """An environment in TRL's style."""

    def reset(self, **row: Any) -> str | None:
        self.value = 0
        return None

    def step(self, by: int) -> str:
        """Count on.

        Args:
            by: how far
        """
        self.value += by
        return str(self.value)

    def _hidden(self) -> None: ...


def step(by: int) -> str:
    """Count on.

    Args:
        by: how far
    """
    return str(by)


TOOLS = [Tool(function, "here") for function in (add, look, wait)]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("add", {"a": "4"}, "5"),
        ("look", {"word": "list"}, '{"found": ["list", "é"], "where": "here"}'),
        ("wait", {"forever": False}, "done"),
        ("look", {"word": "half"}, "?"),
        ("look", {"word": "parts"}, "It is 5."),
        ("look", {"word": "picture"}, '[{"type": "text", "text": "It is"}, {"type": "image", "image": "x"}]'),
        ("look", {"word": "nothing"}, "[]"),
    ],
)
def test_results_are_texts(name: str, arguments: dict[str, Any], text: str) -> None:
    assert answer_of(Call(name, arguments), TOOLS, 5.0) == (text, False)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("add", {"a": "x"}, "add: a: Input should be a valid integer"),
        ("add", {}, "add: a: Missing required argument"),
        ("add", {"a": 1, "c": 2}, "add: c: Unexpected keyword argument"),
        ("look", {"word": "a", "where": "else"}, "where: Input should be 'here' or 'there'"),
        ("look", {"word": "raise"}, "Error: KeyError: 'no such"),
        ("look", {"word": "exit"}, "Error: SystemExit: 3"),
        ("look", {"word": "loop"}, "neither a text nor JSON"),
        ("look", {"word": "silent"}, "Error: Silent: (without words"),
        ("look", {"word": "unwritten"}, "neither a text nor JSON (RuntimeError)"),
        ("look", {"word": "late"}, "Error: TimeoutError: "),
        ("subtract", {}, "there is no tool subtract, only add, look, wait"),
    ],
)
def test_errors_are_texts(name: str, arguments: dict[str, Any], words: str) -> None:
    text, failed = answer_of(Call(name, arguments), TOOLS, 5.0)
    assert failed and words in text and text.startswith("Error: ")


def test_what_hangs_is_left_behind_and_long_results_are_cut() -> None:
    began = time.monotonic()
    assert answer_of(Call("look", {"word": "hang"}), TOOLS, 0.05).text == "Error: look took more than 0.05 s."
    assert answer_of(Call("wait", {"forever": True}), TOOLS, 0.05).failed
    assert time.monotonic() - began < 20
    text = answer_of(Call("look", {"word": "word"}), TOOLS, 5.0).text
    assert text[:MOST_CHARACTERS] == ("word" * 10_000)[:MOST_CHARACTERS] and text.endswith("(36000 more characters)")
    assert answer_of(Call("", {}, "It is not JSON."), TOOLS, 5.0) == ("Error: It is not JSON.", True)


def test_async_functions_share_one_loop() -> None:
    """What a module keeps between calls belongs to the loop of its first use."""
    tools = [Tool(function, "here") for function in (take_turns, block, leave, wait)]

    def called(name: str, limit: float, **arguments: Any) -> str:
        return answer_of(Call(name, arguments), tools, limit).text

    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            assert list(threads.map(lambda _: called("take_turns", 20.0, seconds=0.01), range(3))) == ["done"] * 3
    assert called("take_turns", 0.05, seconds=60) == "Error: take_turns took more than 0.05 s."
    assert called("take_turns", 20.0, seconds=0) == "done", "a call that is late is cancelled"
    assert called("leave", 20.0) == "Error: SystemExit: 3"
    assert called("block", 0.05, seconds=3) == "Error: block took more than 0.05 s."
    assert called("wait", 2.0, forever=False) == "done", "a loop that is blocked is left behind"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{__name__}:listed", r"has the parameter \*numbers: a model calls it"),
        (f"{__name__}:named", r"has the parameter \*\*more"),
        (f"{__name__}:by_place", "has the parameter word before /: a model calls it"),
        (f"{__name__}:pieces", "yields, and a model reads one answer"),
        (f"{__name__}:later_pieces", "yields, and a model reads one answer"),
        (f"{__name__}:no_types", "has no schema .*Write a type for each parameter"),
        (f"{__name__}:no_docstring", "has no schema .*docstring"),
        (f"{__name__}:absent", "has no absent"),
        (f"{__name__}:Counter", "is not a function"),
        (f"{__name__}:TOOLS", "is not a function"),
        ("no_such_module_of_mine:f", "there is no module"),
        ("calculate", "write `module:name`"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_words(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        tool_of(path)
    assert path in str(caught.value)


def test_an_object_that_can_be_called_is_a_tool_with_its_own_name() -> None:
    tool = tool_of(f"{__name__}:twice")
    assert (tool.name, tool.schema["function"]["description"]) == ("twice", "Multiply a number.")
    assert answer_of(Call("twice", {"number": "4"}), [tool], 5.0) == ("8", False)


def test_a_method_and_a_function_with_one_name_are_refused() -> None:
    environment = Counter()
    with pytest.raises(ValueError, match="two tools have the name step, by which the model calls them"):
        tools_of([f"{__name__}:step"], methods_of(environment))
    assert [tool.name for tool in tools_of([f"{__name__}:add"], methods_of(environment))] == ["step", "add"]


def test_methods_of_an_environment_are_tools_of_one_instance() -> None:
    first, second = Counter(), Counter()
    for each in (first, second):
        each.reset()
    (step,) = methods_of(first)
    assert step.schema["function"]["name"] == "step"
    assert [answer_of(Call("step", {"by": 2}), [step], 5.0).text for _ in range(2)] == ["2", "4"]
    assert (first.value, second.value) == (4, 0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 * (2 + 4.5)", "19.5"), ("-7 // 2", "-4"), ("1,200 % 7", "3"), ("1/3", "0.3333333333"), (" 2 ", "2")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "9 ** 9 ** 9",
        "a",
        "'x' * 9",
        "(1).real",
        "[1]",
        "1 if 1 else 2",
        "1" * 201,
        "True",
        "1 +",
        "1j",
    ],
)
def test_the_calculator_reads_numbers_alone(expression: str) -> None:
    assert answer_of(Call("calculate", {"expression": expression}), [Tool(calculate, "here")], 5.0).failed


@pytest.mark.parametrize("kinds", [own_tool.SUMS, own_tool.IN_WORDS])
def test_the_calculators_questions_are_rows_for_prompts(tmp_path: Path, kinds: dict[str, str]) -> None:
    own_tool.write_questions(tmp_path / "questions.jsonl", kinds, 60)
    env: Any = envs.make("prompts", path=str(tmp_path / "questions.jsonl"), rewards=["math"])
    forms = {re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(text)): sum_of for text, sum_of in kinds.items()}
    for seed in range(3):
        episode = Episode(env, Protocol(), seed, "train")
        question = episode.messages[-1]["content"]
        (expression,) = [
            sum_of.format(**match.groupdict())
            for form, sum_of in forms.items()
            if (match := re.fullmatch(form, question))
        ]
        answer = answer_of(Call("calculate", {"expression": expression}), [Tool(calculate, "here")], 5.0)
        assert episode.step(f"It is \\boxed{{{answer.text}}}.").reward == 1


def test_the_example_searches_the_articles_of_search_qa(tmp_path: Path) -> None:
    env: Any = envs.make("search_qa")
    env.tools = [tool_of("examples.own_search:search")]
    episode = Episode(env, Protocol(), 3, "train")
    told = [episode.call("", "", [Call("search", {"query": hop.title})]).results[0] for hop in env.level.hops]
    assert all(hop.fact in each["content"] for hop, each in zip(env.level.hops, told, strict=True))
    assert episode.step(f"<think>I know.</think><answer>finish[{env.level.answer}]</answer>").done and episode.success
    assert search("zzzz") == "Nothing found."

    write_questions(tmp_path / "questions.jsonl", 20)
    asked: Any = envs.make("prompts", path=str(tmp_path / "questions.jsonl"), rewards=["exact_match"])
    asked.tools = env.tools
    single = Episode(asked, Protocol(), 1, "train")
    question = single.messages[-1]["content"]
    assert (
        question.endswith("?")
        and "1. " in single.call("", "", [Call("search", {"query": question})]).results[0]["content"]
    )
    assert not single.step("I do not know.").reward
