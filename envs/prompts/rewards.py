"""Which reward functions are there?  Built-in ones by name, your own by path, each with a weight.

rewards:
  - math                                      # 1 where the answer is that of the column `answer`
  - {name: length, words: 200, weight: 0.2}
  - my_module:my_function

Every function has TRL's signature: reward(prompts, completions, **columns) -> list[float | None]. An exception in the
place of a number says why there is none for this answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import regex

from envs.base import known
from envs.by_path import by_path
from envs.math_judge import LONGEST_ANSWER, equal, last_boxed, last_number

CALLED_WITH = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")  # by TRL
NO_COLUMNS = (*CALLED_WITH, "prompt", "completion")  # names that no column has when a function is called
MARK = "####"  # before the answer in GSM8K
THINK_FORMAT = r"<think>(?!.*<think>).*?</think>(?!.*<think>).*\S.*"
SANDBOXES = 8  # programs of answers at the same time; the sandbox starts no more than there are cores
MATCH_SECONDS = 1.0  # of a pattern for one answer: some take a time that is exponential in the length of a text
LEAST = {"words": 1, "n": 1, "seconds": 0.01, "memory_mb": 1}  # of options that are numbers
Value = float | Exception | None  # of one answer


class Reward(NamedTuple):
    """A function with its name in metrics and its weight; `names` are the parameters it has, any with `takes_all`.

    path: the name with that of the module, "my_module.my_function". options: parameters that no column fills, since the
    config sets them, or they are options of a built-in function. workers: how many answers a built-in function judges
    at the same time, each by a call of its own; 0 for any other function, which is called once for all answers.
    """

    title: str
    path: str
    function: Callable[..., Any]
    weight: float
    names: tuple[str, ...]
    takes_all: bool
    options: tuple[str, ...] = ()
    workers: int = 0

    def takes(self, name: str) -> bool:
        """Return whether it can be called with this name."""
        return self.takes_all or name in self.names

    def given(self, columns: Sequence[str]) -> list[str]:
        """Return which of these columns it is called with."""
        return [name for name in columns if name not in (*NO_COLUMNS, *self.options) and self.takes(name)]


def reward_of(given: str | Mapping[str, Any], columns: Sequence[str]) -> Reward:
    """Return the reward that an entry of a config names; ValueError says what is wrong with it.

    Args:
        given: a name, a path, or a mapping with `name`, `weight` and the options of a built-in function.
        columns: of the rows.
    """
    entry: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
    name, weight = entry.pop("name", None), entry.pop("weight", 1.0)
    if not isinstance(name, str) or type(weight) not in (int, float) or not isfinite(weight):
        raise ValueError(f"prompts: {given!r} is not a reward. Write a name, module:function, or {{name, weight}}.")
    if ":" in name:
        try:
            function = by_path(name)
        except ValueError as problem:
            raise ValueError(f"prompts: the reward {name} cannot be used: {problem}") from problem.__cause__
        if not callable(function):
            raise ValueError(f"prompts: the reward {name} is not a function.")
        title = name.partition(":")[2]
    else:
        if "." in name and name not in BUILT_IN:
            path = ":".join(name.rsplit(".", 1))
            raise ValueError(f"prompts: {name} is not a built-in reward. A function of yours has a colon: {path}")
        function, title = BUILT_IN[known("reward of prompts", name, BUILT_IN)], name
    accepted = inspect.signature(function).parameters
    for option in entry:
        kind = accepted[option].kind if option in accepted else None
        if option in CALLED_WITH or kind not in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            raise ValueError(f"prompts: the reward {name} has no option {option}.")
    own = {} if ":" in name else {key: each for key, each in accepted.items() if each.kind is each.KEYWORD_ONLY}
    if ":" not in name:
        defaults = {key: each.default for key, each in own.items()}
        if problem := _wrong_option(function, defaults | entry, columns):
            raise ValueError(f"prompts: the reward {name} {problem}")
    options = (*entry, *(key for key, each in own.items() if each.default is not each.empty))
    workers = 0 if ":" in name else SANDBOXES if function is program_tests else 1
    called = partial(function, **entry) if entry else function
    return _with_columns(title, name.replace(":", "."), called, weight, columns)._replace(
        options=options, workers=workers
    )


def _wrong_option(function: Callable[..., Any], options: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return what is wrong with the options of a built-in function, defaults included; empty where nothing is."""
    if function is exit_code and (type(options["lost"]) is not int or options["lost"] == 0):
        return (
            "needs to know with which exit code a program says that it lost: write {name: exit_code, lost: 1}. Any"
            " other but 0 is a crash; so choose another number where an uncaught exception of Python, which ends a"
            " program with 1, is not a loss."
        )
    if "column" in options and options["column"] not in columns:
        return (
            f"reads the column {options['column']}, and the rows have {', '.join(columns)}: name another with the"
            " option column."
        )
    if options.get("column") in (*NO_COLUMNS, *options):
        return (
            f"cannot read the column {options['column']}, whose name is that of an argument of reward functions: rename"
            " the column in the rows, and write its new name as the option column."
        )
    for option, least in LEAST.items():
        value = options.get(option, least)
        whole = type(value) is int or (type(value) is float and option in ("words", "seconds"))
        if not whole or not least <= value < float("inf"):
            return f"has the option {option}, a number of at least {least}, not {value!r:.40}."
    try:
        regex.compile(options.get("pattern", ""))
    except (regex.error, TypeError) as error:
        return f"has the option pattern, which is not a regular expression ({error}): {options['pattern']!r:.80}."
    return ""


def own_reward_of(environment: Any) -> Reward:
    """Return the reward that an environment in TRL's style gives itself, by its `get_reward`."""

    def get_reward(prompts: list[Any], completions: list[Any], *, environments: list[Any]) -> list[Any]:
        def of(each: Any) -> Any:
            try:
                return each.get_reward()
            except (Exception, SystemExit) as error:  # of one instance, which costs its own answer alone
                return error

        return [of(each) for each in environments]

    async def wait_for_reward(prompts: list[Any], completions: list[Any], *, environments: list[Any]) -> list[Any]:
        async def of(each: Any) -> Any:
            try:
                return await each.get_reward()
            except BaseException as error:  # SystemExit of a task would end the loop
                return error

        return await asyncio.gather(*map(of, environments))

    function = wait_for_reward if inspect.iscoroutinefunction(environment.get_reward) else get_reward
    kind = type(environment)
    return _with_columns(kind.__name__, f"{kind.__module__}.{kind.__name__}", function, 1.0, ["environments"])


def with_own_titles(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """Return rewards of which no two have the same title, by which their values are told apart."""
    often = Counter(each.title for each in rewards)
    found: dict[str, Reward] = {}
    for reward in rewards:
        name = title = reward.path if often[reward.title] > 1 else reward.title
        number = 1
        while title in found:
            number += 1
            title = f"{name}_{number}"
        found[title] = reward._replace(title=title)
    return tuple(found.values())


def _with_columns(title: str, path: str, function: Callable[..., Any], weight: float, columns: Sequence[str]) -> Reward:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    given = [name for name in names if name in (*CALLED_WITH, *columns)]
    wanted = [name for name in needed if name not in given]
    reward = Reward(title, path, function, float(weight), tuple(names), takes_all)
    if wanted or not (reward.takes("prompts") and reward.takes("completions")):
        raise ValueError(
            f"prompts: the reward {title} is called as {title}(prompts, completions, **columns), by keyword, with the"
            f" columns {', '.join(columns)}; it has the parameters {inspect.signature(function)}"
            f"{f', and there is no column {wanted[0]}' if wanted else ''}."
        )
    return reward


def text_of(completion: Any) -> str:
    """Return what the model wrote last: a completion is a text, or messages."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m["role"] == "assistant"), "")


def after_thought(text: str) -> str:
    """Return what follows the thought that a text begins with; nothing where the thought is not closed.

    The opening <think> may stand at the end of the prompt, as some templates write it.
    """
    before, closed, after = text.partition("</think>")
    if before.lstrip().startswith("<think>"):
        return after
    return after if closed and "<think>" not in before else text


# -- built in ----------------------------------------------------------------------------------------------------------


def math(
    prompts: list[Any], completions: list[Any], *, column: str = "answer", **columns: list[Any]
) -> list[float | None]:
    r"""Return 1 for an answer that equals the reference, else 0; None where the row has none.

    The answer is what the last \boxed{} behind the thought holds, else what stands in <answer>, else all of it or its
    last number. The reference is what follows #### in the column, else what its last \boxed{} holds, else all of it.
    """
    references = columns[column]
    return [
        None if reference is None else float(same_answer(text_of(completion), str(reference)))
        for completion, reference in zip(completions, references, strict=True)
    ]


def same_answer(text: str, reference: str) -> bool:
    """Return whether a text gives the answer of a reference solution, by math-verify."""
    text = after_thought(text)
    answer = reference.rpartition(MARK)[2].strip() if MARK in reference else last_boxed(reference) or reference.strip()
    boxed = last_boxed(text) or (_tagged(text) or "").strip()
    given = [boxed] if boxed else [text.strip(), last_number(text)]  # an answer may be nothing but the result
    return any(equal(each, answer) for each in given if each and len(each) <= LONGEST_ANSWER)


def exact_match(
    prompts: list[Any], completions: list[Any], *, column: str = "answer", **columns: list[Any]
) -> list[float | None]:
    """Return 1 where the answer is the text of the column or one of its list of texts, case and white space aside.

    What <answer> holds counts, else all that follows the thought.
    """
    references = columns[column]
    return [
        None if reference is None else float(_is_text(text_of(completion), reference))
        for completion, reference in zip(completions, references, strict=True)
    ]


def _is_text(text: str, reference: Any) -> bool:
    text = after_thought(text)
    tagged = _tagged(text)
    given = _plain(text if tagged is None else tagged)
    return any(given == _plain(str(each)) for each in (reference if isinstance(reference, list) else [reference]))


def _tagged(text: str) -> str | None:
    """Return what the last complete <answer> of a text holds, in a time that is linear in its length."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    return None if start < 0 else text[start + len("<answer>") :].partition("</answer>")[0]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def format(
    prompts: list[Any], completions: list[Any], *, pattern: str = THINK_FORMAT, **columns: list[Any]
) -> list[Value]:
    """Return 1 where the whole answer matches a regular expression, else 0; the default asks for one thought first."""
    compiled, found = regex.compile(pattern, regex.DOTALL), list[Value]()
    for completion in completions:
        try:
            found.append(float(compiled.fullmatch(text_of(completion).strip(), timeout=MATCH_SECONDS) is not None))
        except TimeoutError:
            found.append(TimeoutError(f"the pattern took more than {MATCH_SECONDS:g} s for this answer"))
    return found


def length(prompts: list[Any], completions: list[Any], *, words: int = 200, **columns: list[Any]) -> list[float | None]:
    """Return 0 up to so many words, then falling in a line to -1 at twice as many."""
    counts = [len(text_of(completion).split()) for completion in completions]
    return [-min(1.0, max(0.0, (count - words) / words)) for count in counts]


def repetition(prompts: list[Any], completions: list[Any], *, n: int = 4, **columns: list[Any]) -> list[float | None]:
    """Return minus the share of n-grams of words that stood there before."""
    found: list[float | None] = []
    for completion in completions:
        text = text_of(completion).split()
        grams = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
        total = sum(grams.values())
        found.append(-(total - len(grams)) / total if total else 0.0)
    return found


def program_tests(
    prompts: list[Any],
    completions: list[Any],
    *,
    column: str = "tests",
    seconds: float = 2.0,
    memory_mb: int = 1024,
    **columns: list[Any],
) -> list[Value]:
    """Return the share of tests that the program in the answer passes, in a sandbox.

    The program is the last fenced block, else what <answer> holds, else all that follows the thought.

    The column holds a list of {"input", "output"}, what the program reads and must print; with a column `function`, the
    arguments and the value of that function as JSON. It may be a JSON text of that list.
    """
    from envs.deep_coder.sandbox import Limits, require
    from envs.deep_coder.verdict import CodeProblem, Test, fenced, judge, program_of

    require()
    all_tests, names = columns[column], columns.get("function") or [""] * len(completions)
    found: list[Value] = []
    for completion, tests, function in zip(completions, all_tests, names, strict=True):
        if not tests or tests == "[]":
            found.append(None)
            continue
        try:
            listed = json.loads(tests) if isinstance(tests, str) else tests
            cases = [Test(each["input"], each["output"]) for each in listed]
            if not all(isinstance(text, str) for case in cases for text in (case.input, case.output)):
                raise TypeError
        except (TypeError, ValueError, LookupError):
            found.append(ValueError(f'{column} is not a list of {{"input", "output"}}, two texts: {tests!r:.80}'))
            continue
        problem = CodeProblem("", function or "", tuple(cases), 0, "")
        text = after_thought(text_of(completion))
        text = text if fenced(text) else _tagged(text) or text
        verdict = judge(problem, program_of(text), Limits(seconds, seconds * len(cases), memory_mb))
        found.append(verdict.passed / len(cases))
    return found


def exit_code(
    prompts: list[Any], completions: list[Any], *, lost: int, exit_code: list[int | None]
) -> list[float | None]:
    """Return 1 where the program of `agent` ended with 0, and 0 where it ended with `lost` or was stopped."""
    return [float(code == 0) for code in exit_code]


def is_exit_code(reward: Reward) -> bool:
    """Return whether a reward is `exit_code`, whose options are keywords of a partial."""
    return isinstance(reward.function, partial) and reward.function.func is exit_code


BUILT_IN: dict[str, Callable[..., Any]] = {
    "math": math,
    "exact_match": exact_match,
    "format": format,
    "length": length,
    "repetition": repetition,
    "program_tests": program_tests,
    "exit_code": exit_code,
}
