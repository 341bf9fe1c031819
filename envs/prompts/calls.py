"""How are reward functions called?  As TRL's GRPOTrainer calls them, all answers at once, each function on its own.

    def reward(prompts, completions, **columns) -> list[float | None]

Everything is given by keyword. A prompt that is a text gives completions that are texts, a prompt of messages gives
lists of messages. Columns are those of the rows, one value for each answer. Functions may be async; these run side by
side. None means that a function does not apply to an answer. A function that raises, takes too long or returns
something else gives nothing, and the reason is printed once for each function and rollout, with the row. Built-in
functions judge each answer by itself, within limits of their own, so that a slow answer costs no other one.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from envs.in_time import TooLate, awaited_in_time, error_text, in_time
from envs.prompts.logged import Logged
from envs.prompts.rewards import Reward
from envs.protocol import Message
from envs.sentences import escaped
from envs.web import NoAnswer

LARGEST = 1e100  # of a reward with its weight; squares of larger ones overflow
TEXTS = (  # to whoever a TypeError of their function surprises
    ' (the prompts are texts, so completions are texts: a function that reads completion[0]["content"] needs prompts of'
    " messages)"
)
GIVEN_MESSAGES = (  # and to whoever writes a function of texts
    " (with tools, and for prompts of messages, completions are lists of messages: completion[-1] has the last text in"
    ' its "content")'
)
Parts = dict[str, float]  # what each function gave an answer, by its title; those that do not apply are left out


class TrainerState(NamedTuple):
    """How far training is, in steps: TrainerState(4, 200) while answers for the fifth of 200 steps are scored."""

    global_step: int
    max_steps: int

    @property
    def epoch(self) -> None:
        """None, which TRL's type allows: prompts are drawn, and not read from the first to the last."""
        return None


class Answered(NamedTuple):
    """A finished conversation: its prompt, what was said since, the row it came from and the row's number.

    ids: the tokens after the prompt, those of tools and users between the answers included.
    """

    prompt: str | list[Message]
    said: list[Message]
    row: dict[str, Any]
    number: int
    ids: list[int]

    @property
    def completion(self) -> str | list[Message]:
        """What the model wrote: a text for a prompt that is one and was answered once, else messages."""
        alone = isinstance(self.prompt, str) and len(self.said) == 1
        return self.said[0]["content"] if alone else list(self.said)


def call_rewards(
    rewards: Sequence[Reward],
    answered: Sequence[Answered],
    timeout: float,
    stop: bool,
    state: TrainerState,
    logged: Logged,
) -> list[Parts | Exception]:
    """Return for each answer what each function gave, or why there is no reward.

    Args:
        timeout: seconds that a function which is not built in may take for all answers.
        stop: raise `NoAnswer`, which ends a run with its message, where a function fails.
        state: of the training that the answers are for.
        logged: takes what functions record.
    """
    parts: list[Parts] = [{} for _ in answered]
    failed: dict[int, str] = {}

    def leave_out(places: Sequence[int], reason: str) -> None:
        shown = answered[places[0]]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        reason = escaped(reason)
        text = (
            f"{reason[0].upper()}{reason[1:]}: row {shown.number + 1}{more},"
            f" prompt {_short(shown.prompt)}, answer {_short(shown.completion)}"
        )
        if stop:
            raise NoAnswer(f"{text}. With on_error: skip a run leaves such answers out.")
        print(
            f"{text}. These answers are left out of training; an evaluation counts them as not solved.", file=sys.stderr
        )
        failed.update(dict.fromkeys(places, reason))

    for reward, result in zip(rewards, _all(rewards, answered, timeout, state, logged), strict=True):
        values = _values(result, len(answered), reward.weight)
        if bad := [place for place, value in enumerate(values) if isinstance(value, str)]:
            leave_out(bad, f"the reward {reward.title} {values[bad[0]]}{_hint(result, answered[bad[0]])}")
        for place, value in enumerate(values):
            if isinstance(value, float):
                parts[place][reward.title] = value
    if lacking := [place for place in range(len(answered)) if not parts[place] and place not in failed]:
        leave_out(lacking, "no reward function applies")
    return [ValueError(failed[i]) if i in failed else parts[i] for i in range(len(answered))]


def _hint(result: Any, answered: Answered) -> str:
    """Return which kind of completion a function was given, where what it raised may be about the other kind."""
    if isinstance(answered.completion, str):
        return TEXTS if isinstance(result, TypeError) else ""
    about_lists = isinstance(result, AttributeError | TypeError) and "list" in error_text(result)
    return GIVEN_MESSAGES if about_lists else ""


def _values(result: Any, count: int, weight: float) -> list[float | str | None]:
    """Return what a function gave each answer: a number, None, or in words what is wrong."""
    if isinstance(result, BaseException):
        return [_raised(result)] * count
    if not isinstance(result, list):
        return [f"returned {type(result).__name__}, and not a list with a number for each answer"] * count
    if len(result) != count:
        return [f"returned {len(result)} values for {count} answers"] * count
    return [None if value is None else _value(value, weight) for value in result]


def _value(value: Any, weight: float) -> float | str:
    if isinstance(value, BaseException):
        return _raised(value)
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
        return "returned coroutines: await them in an async function, for example by asyncio.gather"
    try:  # somebody's object may raise anything
        number = float(value)
    except Exception:
        number = math.nan
    if math.isfinite(number) and not isinstance(value, str):
        fits = max(abs(number), abs(number * weight)) < LARGEST
        return number if fits else f"returned {number:g}, which is too large with its weight {weight:g}"
    try:
        shown = f"{value!r:.40}"
    except Exception:
        shown = type(value).__name__
    return f"returned {shown}, which is not a finite number"


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error_text(error)[:200]}"


def _all(
    rewards: Sequence[Reward], answered: Sequence[Answered], timeout: float, state: TrainerState, logged: Logged
) -> list[Any]:
    """Return the result of each function, or what it raised; async ones side by side, the others one after another."""
    names = dict.fromkeys(name for each in answered for name in each.row)

    def call(reward: Reward, chosen: Sequence[Answered]) -> Any:
        given: dict[str, Any] = {
            "prompts": [each.prompt for each in chosen],
            "completions": [each.completion for each in chosen],
            "completion_ids": [each.ids for each in chosen],
            "trainer_state": state,
            "log_metric": logged.log_metric,
            "log_extra": logged.log_extra,
        }
        called_with = {name: value for name, value in given.items() if reward.takes(name)}
        columns = {name: [each.row.get(name) for each in chosen] for name in reward.given(list(names))}
        return _listed(reward.function(**called_with, **columns))

    results: list[Any] = [
        _one_by_one(lambda each, r=reward: call(r, [each])[0], answered, reward.workers)
        if reward.workers
        else in_time(lambda r=reward: call(r, answered), timeout)
        for reward in rewards
    ]
    waiting = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
    found = awaited_in_time([_then_listed(results[place]) for place in waiting], timeout)
    for place, result in zip(waiting, found, strict=True):
        results[place] = result
    return [TimeoutError(f"it took more than {timeout:g} s") if isinstance(r, TooLate) else r for r in results]


def _one_by_one(judge: Callable[[Answered], Any], answered: Sequence[Answered], workers: int) -> list[Any]:
    """Return the value of each answer, or what was raised for it."""

    def value(each: Answered) -> Any:
        try:
            return judge(each)
        except NoAnswer:  # a judge that does not start ends the run, with its message
            raise
        except Exception as error:
            return error

    if workers == 1 or len(answered) == 1:  # threads would take each other's seconds
        return [value(each) for each in answered]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(value, answered))


def _listed(result: Any) -> Any:
    """Return the values of an array, a tensor or a generator as a list, within the time of their function.

    Not those of a set, which has lost their order.
    """
    several = isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping | set | frozenset)
    return list(result) if several and not inspect.isawaitable(result) else result


async def _then_listed(work: Awaitable[Any]) -> Any:
    return _listed(await work)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else value[-1]["content"] if value else ""
    text = " ".join(text.split())
    return f'"{escaped(text[:60])}{"..." if len(text) > 60 else ""}"'
