"""What in a row belongs to tools?  Schemas in a column, calls of answers, and results, in the common spellings.

tools       a list of schemas, also as a JSON text, also without "type": "function" around them
calls       tool_calls or function_call of an answer; messages of ShareGPT's role function_call, whose value is JSON
results     messages of the role tool, function or observation
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envs.tools import without_nothing
from posttrain.models import Message, parsed_json, plain_calls, tools_key
from posttrain.types import UserError

CALLERS = ("function_call", "tool_call")  # roles of ShareGPT's messages
RESULTS = ("function", "observation", "tool_response")  # roles that are called tool here
BAD_TOOLS = "tools that are not schemas of functions"
BAD_CALLS = "calls of tools that cannot be read"


def schemas_of(value: Any) -> list[dict[str, Any]] | str:
    """Return the schemas in a column, or why they cannot be read."""
    try:
        schemas = parsed_json(value) if isinstance(value, str) else value
        schemas = [schemas] if isinstance(schemas, Mapping) else schemas
        if not isinstance(schemas, list) or not all(isinstance(each, Mapping) for each in schemas):
            return BAD_TOOLS
        whole = [each if each.get("function") else {"type": "function", "function": each} for each in schemas]
        whole = without_nothing(whole)
        tools_key(whole)
    except (ValueError, UserError):
        return BAD_TOOLS
    return whole


def with_calls(message: Message) -> Message | str:
    """Return a message with its calls as `tool_calls` and results as the role tool, or why they cannot be read."""
    if message["role"] in RESULTS:
        return message | {"role": "tool"}
    calls: Any = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
    try:
        if message["role"] in CALLERS:
            calls = parsed_json(message["content"]) if isinstance(message["content"], str) else None
            calls = calls if isinstance(calls, list) else [calls]
            message = message | {"role": "assistant", "content": ""}
        else:  # columns of a table give every call all keys, a JSON text has those that it means
            calls = parsed_json(calls) if isinstance(calls, str) else without_nothing(calls)
        if calls is None:
            return message
        plain = plain_calls(calls)
    except ValueError:
        return BAD_CALLS
    if message["role"] != "assistant":
        return BAD_CALLS
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return rest | {"content": "" if rest["content"] is None else rest["content"], "tool_calls": plain}


def message_size(message: Message) -> int:
    """Return the characters of a message, calls included."""
    return len(message["content"]) + (len(json.dumps(message["tool_calls"])) if message.get("tool_calls") else 0)
