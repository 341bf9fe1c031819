"""Which functions may a model call, and what do they answer?  Functions of your own, by path, with types and docstring.

    - {name: prompts, tools: [examples.own_tool:calculate], max_calls: 4, call_seconds: 5, options: ...}

The schema comes from type hints and docstring, as transformers makes it; arguments are checked against the hints before
the function is called. Whatever goes wrong becomes a text that the model reads as the answer.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from envs.by_path import by_path
from envs.in_time import TooLate, awaited_in_time, error_text, in_time
from envs.sentences import escaped

MOST_CHARACTERS = 4000  # of an answer


class Call(NamedTuple):
    """A call in the text of a turn: Call("add", {"a": 1, "b": 2}); `error` says why it could not be read.

    id: that the model wrote with the call, which its result repeats; few forms of calls have one.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""
    id: str = ""


class ToolAnswer(NamedTuple):
    """What a call came to, as the model reads it: ToolAnswer("3", failed=False)."""

    text: str
    failed: bool


class Tool:
    """A function that a model may call.

    name, schema   what the model is told, the schema as transformers' apply_chat_template takes it
    """

    def __init__(self, function: Callable[..., Any], named: str) -> None:
        """Raise ValueError, one paragraph, where no schema can be made. named: what the message calls it."""
        self.function = function if inspect.isroutine(function) else function.__call__  # of an object
        self.schema = _schema(self.function, named)
        self.name: str = self.schema["function"]["name"]

    @cached_property
    def _checked(self) -> Callable[..., Any]:
        from pydantic import ConfigDict, validate_call

        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(self.function)

    def answer(self, arguments: dict[str, Any], seconds: float) -> ToolAnswer:
        """Return what the function answers, within a time; errors in words. It may run in a thread."""
        from pydantic import ValidationError

        began = time.monotonic()
        result = in_time(lambda: self._checked(**arguments), seconds)
        if inspect.isawaitable(result):
            (result,) = awaited_in_time([result], seconds - (time.monotonic() - began))
        if isinstance(result, TooLate):
            return ToolAnswer(f"Error: {self.name} took more than {seconds:g} s.", True)
        if isinstance(result, ValidationError):
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in result.errors(include_url=False)
            )
            return ToolAnswer(capped(f"Error: {self.name}: {wrong}"), True)
        if isinstance(result, BaseException):
            return ToolAnswer(capped(f"Error: {type(result).__name__}: {error_text(result)}"), True)
        try:
            text = None if isinstance(result, list) and not result else text_in(result)  # no results are no parts
            text = json.dumps(result, ensure_ascii=False, default=str) if text is None else text
        except Exception as error:  # what a function returns may raise anything where it is written
            return ToolAnswer(f"Error: {self.name} returned neither a text nor JSON ({type(error).__name__}).", True)
        return ToolAnswer(capped(text), False)


def tool_of(path: str) -> Tool:
    """Return the tool that `module:function` names. ValueError says in words what is missing and what to write."""
    try:
        function = by_path(path)
    except ValueError as problem:
        raise ValueError(f"the tool {path} cannot be used: {problem}") from problem.__cause__
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"the tool {path} is not a function.")
    return Tool(function, path)


def tools_of(paths: Sequence[str], own: Sequence[Tool] = ()) -> list[Tool]:
    """Return an environment's own tools and those that paths name. ValueError where two have the same name."""
    tools = [*own, *(tool_of(path) for path in paths)]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"two tools have the name {twice}, by which the model calls them: rename one function or method."
        )
    return tools


def methods_of(instance: Any) -> list[Tool]:
    """Return the public methods of an environment in TRL's style as tools, `reset` and `get_reward` aside."""
    members = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    names = [name for name in members if name[0] != "_" and name not in ("reset", "get_reward")]
    return [Tool(getattr(instance, name), f"{type(instance).__name__}.{name}") for name in names]


def environment_of(path: str) -> Callable[[], Any]:
    """Return what makes environments in TRL's style. ValueError, in words, where it cannot be called."""
    try:
        made = by_path(path)
    except ValueError as problem:
        raise ValueError(f"the environment {path} cannot be used: {problem}") from problem.__cause__
    if not callable(made):
        raise ValueError(f"the environment {path} is neither a class nor a function that returns an environment.")
    return made


def first_environment(make: Callable[[], Any], path: str) -> Any:
    """Return an environment in TRL's style. ValueError, in words, where there is none, or it is not one.

    Args:
        make: a class or a function, as `environment_of` returns it.
        path: what the message calls it.
    """
    try:
        made = make()
    except (Exception, SystemExit) as error:  # somebody's code may raise anything
        words = escaped(error_text(error))
        raise ValueError(f"the environment {path} cannot be made: it raised {type(error).__name__}: {words}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise ValueError(f"the environment {path} is an async function: write it without async.")
    if not callable(getattr(made, "reset", None)):
        raise ValueError(
            f"the environment {path} makes a {type(made).__name__}, which has no method reset(**row) -> str | None, as"
            " TRL's environment_factory expects it."
        )
    return made


def answer_of(call: Call, tools: Sequence[Tool], seconds: float) -> ToolAnswer:
    """Return the answer to one call."""
    if call.error:
        return ToolAnswer(f"Error: {capped(call.error)}", True)
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return ToolAnswer(capped(f"Error: there is no tool {call.name[:80]}, only {known}."), True)
    return tool.answer(call.arguments, seconds)


def result_of(call: Call, text: str) -> dict[str, Any]:
    """Return what a call came to as a message."""
    return {"role": "tool", "name": call.name, "content": text} | ({"tool_call_id": call.id} if call.id else {})


def without_nothing(value: Any) -> Any:
    """Return mappings without their keys that are None, at any depth: a table gives every row all keys."""
    if isinstance(value, Mapping):
        return {key: without_nothing(each) for key, each in value.items() if each is not None}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


def text_in(content: Any) -> str | None:
    """Return a content as a text: it may be a list of parts of type text. None for anything else."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(text for text in texts if text) if whole else None


def capped(text: str) -> str:
    """Return a text of whole Unicode characters, at most MOST_CHARACTERS long and a remark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... ({len(text) - MOST_CHARACTERS} more characters)"


def _schema(function: Callable[..., Any], named: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # hints and docstrings may hold anything
        raise ValueError(
            f"the tool {named} has no schema ({' '.join(str(error).split())[:300]}). Write a type for each parameter"
            ' and a docstring that begins with what the function does and has a line "name: what it is" for each'
            ' parameter under "Args:".'
        ) from error
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            before = " before /" if each.kind is each.POSITIONAL_ONLY else ""
            raise ValueError(
                f"the tool {named} has the parameter {str(each).partition(':')[0]}{before}: a model calls it with"
                " parameters that have names. Write each of them."
            )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"the tool {named} yields, and a model reads one answer: return the whole of it.")
    if function.__name__ == "__call__":
        schema["function"]["name"] = named.rpartition(":")[2]
    return schema
