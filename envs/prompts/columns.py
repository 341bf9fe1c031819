"""Which columns of a row is a function of your own called with?  Those that it has parameters for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from envs.by_path import by_path
from envs.prompts.rows import EVERY_COLUMN


class UserReply(NamedTuple):
    """The function that writes the next user message, and the columns that it is called with."""

    function: Callable[..., Any]
    columns: tuple[str, ...]

    def to(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> str | None:
        """Return the next user message, None at the end."""
        said = self.function(messages, **{name: row[name] for name in self.columns})
        if said is not None and not isinstance(said, str):
            raise ValueError(f"reply returned {type(said).__name__}; it returns the next user message, or None to end")
        return said


def reply_of(path: str, columns: Sequence[str]) -> UserReply:
    """Return what `reply` names; ValueError, in words, where it cannot be called."""
    try:
        function = by_path(path)
    except ValueError as problem:
        raise ValueError(f"prompts: reply={path} cannot be used: {problem}") from problem.__cause__
    if not callable(function):
        raise ValueError(f"prompts: reply={path} is not a function.")
    return UserReply(function, columns_for(function, f"reply={path}", columns, ["messages"]))


def columns_read_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the columns that a method may be given, whichever the rows have; EVERY_COLUMN where it takes all."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function in C
        return EVERY_COLUMN
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return EVERY_COLUMN
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


def columns_for(
    function: Callable[..., Any], named: str, columns: Sequence[str], before: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the columns that a function takes; ValueError, in words, where it cannot be called with them.

    A column with the name of a parameter that is given otherwise, `self` included, is left out.

    Args:
        named: what the message calls the function.
        columns: of the rows.
        before: what it is given by position.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return tuple(columns)
    parameters = list(signature.parameters.values())
    by_name = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    taken = {*_owner(function), *places[: len(before)]}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    given = tuple(name for name in columns if name not in taken and (takes_all or name in by_name))
    try:
        signature.bind(*before, **dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"prompts: {named} has the parameters {signature} and cannot be called ({error}). It is called with"
            f" ({', '.join([*before, '**columns'])}), and the columns are {', '.join(columns)}."
        ) from None
    return given


def _owner(function: Callable[..., Any]) -> list[str]:
    """Return the name of a method's first parameter, `self`."""
    method = function if inspect.ismethod(function) or inspect.isclass(function) else function.__call__
    of = getattr(method, "__func__", None)
    return list(inspect.signature(of).parameters)[:1] if of else []
