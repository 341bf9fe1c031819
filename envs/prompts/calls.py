"""How are reward functions called?  As TRL's GRPOTrainer calls them, all answers at once, each function on its own.

    def reward(prompts, completions, **columns) -> list[float | None]

A prompt that is a text gives completions that are texts, a prompt of messages gives lists of messages. Columns are
those of the rows, one value for each answer. Functions may be async; these run side by side. None means that a function
does not apply to an answer. A function that raises, takes too long or returns something else gives nothing, and the
reason is printed once for each function and rollout, with the row.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from envs.in_time import in_time
from envs.prompts.rewards import Reward
from envs.protocol import Message
from envs.web import NoAnswer

Parts = dict[str, float]  # what each function gave an answer, by its title; those that do not apply are left out


class Answered(NamedTuple):
    """A finished conversation: its prompt, what was said since, the row it came from and the row's number."""

    prompt: str | list[Message]
    said: list[Message]
    row: dict[str, Any]
    number: int

    @property
    def completion(self) -> str | list[Message]:
        """What the model wrote: a text for a prompt that is one and was answered once, else messages."""
        alone = isinstance(self.prompt, str) and len(self.said) == 1
        return self.said[0]["content"] if alone else list(self.said)


class RewardFailed(Exception):
    """What is wrong with a call, and for which answers: all of them where `numbers` is empty."""

    def __init__(self, reason: str, numbers: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.numbers = list(numbers)


def call_rewards(
    rewards: Sequence[Reward], answered: Sequence[Answered], timeout: float, stop: bool
) -> list[Parts | Exception]:
    """Return for each answer what each function gave, or why there is no reward.

    Args:
        timeout: seconds that a function may take for all answers.
        stop: raise `NoAnswer`, which ends a run with its message, where a function fails.
    """
    prompts, completions = [each.prompt for each in answered], [each.completion for each in answered]
    names = dict.fromkeys(name for each in answered for name in each.row)
    columns = {name: [each.row.get(name) for each in answered] for name in names}
    results = _all(rewards, prompts, completions, columns, timeout)
    parts: list[Parts] = [{} for _ in answered]
    failed: dict[int, str] = {}
    for reward, result in zip(rewards, results, strict=True):
        try:
            values = _checked(result, len(answered))
        except RewardFailed as problem:
            places = problem.numbers or list(range(len(answered)))
            shown = answered[places[0]]
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            text = (
                f"The reward {reward.title} {problem}: row {shown.number + 1}{more},"
                f" prompt {_short(shown.prompt)}, answer {_short(shown.completion)}"
            )
            if stop:
                raise NoAnswer(f"{text}. With on_error: skip a run leaves such answers out.") from None
            print(f"{text}. These answers are left out.", file=sys.stderr)
            failed |= dict.fromkeys(places, f"the reward {reward.title} {problem}")
            values = [
                None if place in failed else value for place, value in enumerate(problem_values(result, answered))
            ]
        for place, value in enumerate(values):
            if value is not None:
                parts[place][reward.title] = value
    for place in range(len(answered)):
        if not parts[place] and place not in failed:
            failed[place] = "no reward function applies"
    return [ValueError(failed[i]) if i in failed else parts[i] for i in range(len(answered))]


def problem_values(result: Any, answered: Sequence[Answered]) -> list[float | None]:
    """Return the usable values of a result of which some are not."""
    if isinstance(result, BaseException) or not isinstance(result, list) or len(result) != len(answered):
        return [None] * len(answered)
    return [float(value) if _is_number(value) else None for value in result]


def _checked(result: Any, count: int) -> list[float | None]:
    """Return the values of one call; `RewardFailed` says what is wrong with them."""
    if isinstance(result, BaseException):
        raise RewardFailed(f"raised {type(result).__name__}: {' '.join(str(result).split())[:200]}")
    if not isinstance(result, list | tuple):
        raise RewardFailed(f"returned {type(result).__name__}, and not a list with a number for each answer")
    if len(result) != count:
        raise RewardFailed(f"returned {len(result)} values for {count} answers")
    bad = [place for place, value in enumerate(result) if value is not None and not _is_number(value)]
    if bad:
        raise RewardFailed(f"returned {result[bad[0]]!r:.40}, which is not a finite number", bad)
    return [None if value is None else float(value) for value in result]


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, str)
    except (TypeError, ValueError, OverflowError):
        return False


def _all(
    rewards: Sequence[Reward], prompts: list[Any], completions: list[Any], columns: dict[str, list[Any]], timeout: float
) -> list[Any]:
    """Return the result of each function, or what it raised; async ones side by side, the others one after another."""
    results: list[Any] = [None] * len(rewards)
    waiting = {}
    for place, reward in enumerate(rewards):
        given = {name: columns[name] for name in reward.given(list(columns))}
        if inspect.iscoroutinefunction(reward.function):
            waiting[place] = (reward, given)
        else:
            results[place] = in_time(lambda r=reward, g=given: r.function(prompts, completions, **g), timeout)
    if waiting:

        async def together() -> list[Any]:
            calls = [
                asyncio.wait_for(reward.function(prompts=prompts, completions=completions, **given), timeout)
                for reward, given in waiting.values()
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        found = in_time(lambda: asyncio.run(together()), timeout + 5)
        late = [found] * len(waiting) if isinstance(found, BaseException) else found
        results = [late[list(waiting).index(place)] if place in waiting else each for place, each in enumerate(results)]
    return [_timed_out(each, timeout) for each in results]


def _timed_out(result: Any, timeout: float) -> Any:
    late = isinstance(result, TimeoutError) and not str(result)
    return TimeoutError(f"it took more than {timeout:g} s") if late else result


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else value[-1]["content"] if value else ""
    text = " ".join(text.split())
    return f'"{text[:60]}{"..." if len(text) > 60 else ""}"'
