"""What in a row belongs to tools?  Schemas in a column, calls of answers, and results, in the common spellings.

tools       a list of schemas, also as a JSON text or of JSON texts, also without "type": "function" around them, and
            also in a column `functions`
calls       tool_calls or function_call of an answer; messages of ShareGPT's role function_call, whose value is JSON
results     messages of the role tool, function or observation
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.local_rows import CALLERS, RESULTS
from envs.tools import without_nothing
from posttrain.models import Message, parsed_json, plain_calls, tools_key
from posttrain.types import UserError

BAD_TOOLS = "tools that are not schemas of functions"
BAD_CALLS = "calls of tools that cannot be read"


def schemas_of(value: Any) -> list[dict[str, Any]] | str:
    """Return the schemas in a column, or why they cannot be read."""
    try:
        schemas = parsed_json(value) if isinstance(value, str) else value
        schemas = [schemas] if isinstance(schemas, Mapping) else schemas
        if isinstance(schemas, list):
            schemas = [parsed_json(each) if isinstance(each, str) else each for each in schemas]
        if not isinstance(schemas, list) or not all(isinstance(each, Mapping) for each in schemas):
            return BAD_TOOLS
        whole = [each if each.get("function") else {"type": "function", "function": each} for each in schemas]
        whole = without_nothing(whole)
        tools_key(whole)
    except (ValueError, UserError):
        return BAD_TOOLS
    return whole


def with_calls(message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> Message | str:
    """Return a message with its calls as `tool_calls` and results as the role tool, or why they cannot be read.

    tools: the schemas of the row. An argument that is null belongs to a call if its tool has that parameter: files that
    were made of a table give every call all keys. A JSON text has those that it means.
    """
    if message["role"] in RESULTS:
        return message | {"role": "tool"}
    calls: Any = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
    try:
        if message["role"] in CALLERS:
            calls = parsed_json(message["content"]) if isinstance(message["content"], str) else None
            calls = calls if isinstance(calls, list) else [calls]
            message = message | {"role": "assistant", "content": ""}
        else:
            calls = parsed_json(calls) if isinstance(calls, str) else _with_own_nulls(calls, tools)
        if calls is None:
            return message
        plain = plain_calls(calls)
    except ValueError:
        return BAD_CALLS
    if message["role"] != "assistant":
        return BAD_CALLS
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return rest | {"content": "" if rest["content"] is None else rest["content"], "tool_calls": plain}


def _with_own_nulls(calls: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    plain = without_nothing(calls)
    for new, old in zip(_functions(plain), _functions(calls), strict=True):
        if isinstance(old.get("arguments"), Mapping):
            given, known = old["arguments"], _parameters(old.get("name"), tools)
            new["arguments"] = {
                name: value if name in known else without_nothing(value)
                for name, value in given.items()
                if value is not None or name in known
            }
    return plain


def _functions(calls: Any) -> Iterator[Any]:
    """Yield what has the name and the arguments of each call, as far as they have the form of calls."""
    for call in calls if isinstance(calls, list) else []:
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        yield function if isinstance(function, Mapping) else {}


def _parameters(name: Any, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of a tool's parameters; none where its schema is not known."""
    schema = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    parameters = schema.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return set(properties) if isinstance(properties, Mapping) else set()


def message_size(message: Message) -> int:
    """Return the characters of a message, calls included."""
    return len(message["content"]) + (len(json.dumps(message["tool_calls"])) if message.get("tool_calls") else 0)
