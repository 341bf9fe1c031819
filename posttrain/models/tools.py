"""How does a model call a tool?  In the form that its chat template writes, which is read again from sampled text.

    hermes      <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>    Qwen2.5, Qwen3, SmolLM3, chatml;
                read also without its tags, where the call is the whole turn
    llama       {"name": "add", "parameters": {"a": 1}}                              Llama 3
    mistral     [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "q1w2e3r4t"}]   Mistral's v3 templates
    response    what the tokenizer's own `parse_response` reads

A call that cannot be read is kept with an error, which the model reads as the tool's answer. Nothing is evaluated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from envs.tools import Call
from posttrain.types import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["hermes", "llama", "mistral", "response"]
Marks = tuple[str, str]  # that stand before and after a call
Tools = Sequence[Mapping[str, Any]]  # schemas, as transformers' apply_chat_template takes them

PROBE = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "probe_of_tools",
                "description": "Probe.",
                "parameters": {
                    "type": "object",
                    "properties": {"probe": {"type": "string", "description": "Probe."}},
                    "required": ["probe"],
                },
            },
        }
    ]
)
PROBE_CALL = {"type": "function", "function": {"name": "probe_of_tools", "arguments": {"probe": "probed"}}}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
SPACE = re.compile(r"[ \t\n\r]*")  # of JSON
CLOSED = re.compile(SPACE.pattern + CLOSE)
ARGUMENTS = ("arguments", "parameters")  # small models take the other form's key
PYTHON_TAG = "<|python_tag|>"  # which Llama 3.1 may write before a call
BETWEEN = " \n;"  # calls of Llama's form
TOOL_CALLS = "[TOOL_CALLS]"
BEGINS = re.compile(rf"(?:\A|{OPEN}|{re.escape(PYTHON_TAG)}|{re.escape(TOOL_CALLS)})\s*(?=[\[{{])")  # JSON of calls
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


class Said(NamedTuple):
    """What a turn says: Said("I look it up.", [Call("search", {"query": "fjord"})]); without calls all of its text."""

    content: str
    calls: list[Call]


def tools_key(tools: Tools | None) -> str | None:
    """Return the schemas as JSON; None where there are none. UserError if they are not schemas of functions."""
    if not tools:
        return None
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(
                f"A tool is {tool!r:.80}, not the schema of a function: write"
                ' {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}.'
            )
    try:
        return json.dumps(list(tools), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"The schemas of the tools cannot be written as JSON: {one_line(error)}.") from error


def plain_calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls as templates expect them, with arguments as a mapping. ValueError says what is wrong.

    Arguments may be a JSON text, as OpenAI writes them.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError("tool_calls is not a list")
    plain: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a call has no function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parsed_json(arguments) if arguments.strip() else {}
        if arguments is not None and not isinstance(arguments, Mapping):
            raise ValueError("the arguments of a call are not an object")
        given = {"name": function["name"], "arguments": dict(arguments or {})}
        names = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        plain.append(names | {"type": "function", "function": given})
    return plain


def openai_calls(calls: Sequence[Call], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return calls, with an id for each, as the `tool_calls` of OpenAI's interface."""
    return [
        {
            "id": each,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for each, call in zip(ids, calls, strict=True)
    ]


def nine(name: Any, number: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates want it, for the id of a call.

    number: of the call in its turn, which is its id where it has none.
    """
    if not isinstance(name, str) or not name:
        return f"{number:09d}"
    return (
        name if re.fullmatch("[A-Za-z0-9]{9}", name) else hashlib.sha256(name.encode(errors="replace")).hexdigest()[:9]
    )


def named_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each result has the id of its call: its own, that of the call, or its number."""
    named: list[dict[str, Any]] = []
    names: list[Any] = []  # of the calls whose results follow
    number = 0
    for message in messages:
        if message["role"] != "tool":
            names = [call.get("id") for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
            number = 0
            named.append(dict(message))
        else:
            name = message.get("tool_call_id") or (names[number] if number < len(names) else None)
            named.append({**message, "tool_call_id": nine(name, number)})
            number += 1
    return named


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, keys included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from texts_in(each)
    elif isinstance(value, str):
        yield value


def parsed_json(text: str) -> Any:
    """Return what a JSON text holds; ValueError where it is not JSON or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# Forms


def form_of(written: str) -> Form | None:
    """Return the form of `PROBE_CALL` as a template has written it; None where it is not one of those known here."""
    forms: tuple[Form, ...] = ("hermes", "mistral", "llama")
    function = PROBE_CALL["function"]
    probe = Call(function["name"], function["arguments"])  # type: ignore[index]
    return next(
        (form for form in forms if [(t, c._replace(id="")) for t, c in _READ[form](written)] == [("", probe)]), None
    )


def hermes_text(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return what Qwen2.5 writes, for templates that explain this form and leave calls out of what they render."""
    parts = [content] if content else []
    for call in calls:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        parts.append(f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}")
    return "\n".join(parts)


def marks_of(written: str) -> Marks:
    """Return the marks around `PROBE_CALL` as a template has written it: tags, or all that stands there."""
    before, _, _ = written.partition("probe_of_tools")
    _, _, after = written.rpartition("probed")
    before = re.sub(f"{THINK}.*?{THOUGHT}", "", before, flags=re.DOTALL)  # some templates write an empty thought
    opening, closing = TAG.findall(before), TAG.findall(after)
    return (opening or [before.strip()])[0], (closing or [after.strip()])[-1]


def read_calls(
    text: str,
    form: Form,
    tokenizer: PreTrainedTokenizerBase | None = None,
    marks: Marks = ("", ""),
    *,
    thought_open: bool = False,
) -> Said:
    """Return the calls of a turn, those that cannot be read with an error; what stands in a closed thought is not one.

    A first thought that is not closed is all of the turn.

    Args:
        tokenizer, marks: of the form "response".
        thought_open: whether the prompt ends with <think>, so that the turn begins in a thought. Elsewhere a </think>
            without an opening tag is text.
    """
    end = thought_end(text, thought_open, marks)
    if end == len(text):
        return Said(text, [])
    if form == "response":
        assert tokenizer is not None
        said = _response(text[end:], tokenizer, *marks)
        return said._replace(content=text[:end] + said.content)
    found = list(_READ[form](text[end:]))
    return Said((text[:end] + found[0][0]).rstrip(), [call for _, call in found]) if found else Said(text, [])


def thought_end(text: str, thought_open: bool, marks: Marks = ("", "")) -> int:
    """Return where the thought that a text begins with ends: 0 without one, the end of the text if it is not closed.

    The arguments of a call that it considers may hold </think>. thought_open: as in `read_calls`. marks: of calls that
    are not JSON.
    """
    opened = text.lstrip().startswith(THINK)
    if not opened and not thought_open:
        return 0
    thought, place = text.partition(THINK)[2] if opened else text, 0
    while (closed := thought.find(THOUGHT, place)) >= 0:
        if begins := BEGINS.search(thought, place, closed):
            place = _json_end(thought, begins.end())
        elif (around := _call_around(thought, place, closed, marks)) >= 0:
            place = around
        else:
            return len(text) - len(thought) + closed + len(THOUGHT)
    return len(text)


def _call_around(text: str, start: int, place: int, marks: Marks) -> int:
    """Return where the call between these marks ends that begins from `start` on and stands around a place.

    -1 where there is none: no mark opens a call before the place, or none closes it before another one opens.
    """
    opening, closing = marks
    opened = text.rfind(opening, start, place) if opening and closing else -1
    closed = text.find(closing, opened + len(opening)) if opened >= 0 else -1
    return closed + len(closing) if closed > place and text.find(opening, place, closed) < 0 else -1


def _json_end(text: str, start: int) -> int:
    """Return where the JSON values that begin here end, one or more as in Llama's form; the next place if none does."""
    end = start + 1
    with suppress(ValueError, RecursionError):
        while True:
            _, end = json.JSONDecoder().raw_decode(text, start)
            start = len(text) - len(text[end:].lstrip(BETWEEN))
            if not text.startswith(("{", "["), start):  # a quotation, say, is a JSON value and no call
                return end
    return end


def _spoken(text: str, mark: str, start: int = 0) -> int:
    """Return where a mark stands that is in no closed thought; -1 where there is none."""
    while (found := text.find(mark, start)) >= 0:
        thought = text.find(THINK, start, found)
        closed = text.find(THOUGHT, thought) if thought >= 0 else -1
        if closed < 0:
            return found
        start = closed + len(THOUGHT)
    return -1


def _hermes(text: str) -> Iterator[tuple[str, Call]]:
    start = _spoken(text, OPEN)
    first = text[:start]
    if start < 0 and (bare := _bare(text)):
        yield "", bare  # small models leave out the tags
    while start >= 0:
        call, end = _tagged(text, start + len(OPEN))
        yield first, call
        first, start = "", _spoken(text, OPEN, end)


def _tagged(text: str, start: int) -> tuple[Call, int]:
    """Return the call that begins here, and where it ends: its texts may hold the closing tag."""
    begins = SPACE.match(text, start)
    assert begins is not None
    with suppress(ValueError, RecursionError):
        value, end = json.JSONDecoder().raw_decode(text, begins.end())
        if closed := CLOSED.match(text, end):
            return _read(value, "arguments"), closed.end()
    end = text.find(CLOSE, start)
    if end < 0:
        return Call("", {}, f"The call is not closed by {CLOSE}."), len(text)
    return _call(text[start:end]), end + len(CLOSE)


def _bare(text: str) -> Call | None:
    """Return the call that is all of a text, a JSON object of a name and arguments."""
    text = text.strip()
    try:
        value = parsed_json(text) if text.startswith("{") else None
    except ValueError:
        return None
    return _read(value, "arguments") if isinstance(value, dict) and set(value) == {"name", "arguments"} else None


def _llama(text: str) -> Iterator[tuple[str, Call]]:
    start = _spoken(text, PYTHON_TAG)
    tag, first = start >= 0, text[: max(start, 0)]
    rest = (text[start + len(PYTHON_TAG) :] if tag else text).strip()
    if not tag and not rest.startswith("{"):
        return
    decoder = json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            if tag or '"name"' in rest[: rest.find(",") if "," in rest else None]:
                yield first, Call("", {}, _not_json(error))
            return
        if not isinstance(value, dict) or "name" not in value or not (len(value) == 1 or set(ARGUMENTS) & set(value)):
            return  # an answer that is JSON
        yield first, _read(value, "parameters")
        first, rest = "", rest[end:].lstrip(BETWEEN)


def _mistral(text: str) -> Iterator[tuple[str, Call]]:
    start = _spoken(text, TOOL_CALLS)
    if start < 0:
        return
    before = text[:start]
    try:
        calls = parsed_json(text[start + len(TOOL_CALLS) :])
    except ValueError as error:
        yield before, Call("", {}, _not_json(error))
        return
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        name = call.get("id") if isinstance(call, dict) else None
        yield "" if number else before, _read(call, "arguments")._replace(id=name if isinstance(name, str) else "")


_READ = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}


def _response(text: str, tokenizer: PreTrainedTokenizerBase, opening: str, closing: str) -> Said:
    """Return what `parse_response` reads, where each call that is opened is closed and was read whole."""
    start = _spoken(text, opening) if opening else -1
    blocks = text[start:].split(opening)[1:] if start >= 0 else []
    try:
        message: Any = tokenizer.parse_response(text, prefix="")
    except Exception as error:  # the tokenizer's own template may raise anything
        return Said(text, [Call("", {}, f"The call cannot be read: {one_line(error)}.")])
    calls = message.get("tool_calls") or [] if isinstance(message, dict) else []
    read = [_read(each.get("function", each) if isinstance(each, dict) else each, "arguments") for each in calls]
    if any(closing not in block for block in blocks):
        return Said(text[:start].rstrip(), [Call("", {}, f"The call is not closed by {closing}.")])
    said = message.get("content") or "" if isinstance(message, dict) else ""
    rest = [said, *(part for call in read for part in texts_in([call.name, call.arguments]))]
    if blocks and (
        len(read) < len(blocks) or any(mark and mark in part for mark in (opening, closing) for part in rest)
    ):
        example = f"{opening}...{closing}"
        return Said(text[:start].rstrip(), [Call("", {}, f"What stands in {example} cannot be read as a call.")])
    if not read:
        return Said(text, [])
    return Said(text[:start].rstrip() if blocks else said, read)  # the parser may keep the text behind the calls alone


def _call(text: str) -> Call:
    try:
        return _read(parsed_json(text), "arguments")
    except ValueError as error:
        return Call("", {}, _not_json(error))


def _read(value: Any, key: str) -> Call:
    """Return the call in a JSON value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call("", {}, f'A call is an object {{"name": ..., "{key}": {{...}}}}.')
    arguments = next((value[each] for each in (key, *ARGUMENTS) if each in value), {})
    with suppress(ValueError):
        arguments = parsed_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return Call(name, {}, f'"{key}" is not an object.')
    return Call(name, arguments)


def _not_json(error: Exception) -> str:
    return f"The call is not valid JSON: {one_line(error)}."
