"""Are rows with tools trained as the template writes them, in all common spellings?"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from test_data import answers, assistant, digest, section, user, write
from test_formats import example

from posttrain.config import Source
from posttrain.data import load_preferences, load_prompts, load_questions, load_sft
from posttrain.data.filters import Example
from posttrain.models.chat import Chat
from posttrain.types import UserError

SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
ARGUMENTS = {"word": "fjord"}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "name": "lookup", "tool_call_id": "1", "content": "a bay"}
ASKED = [user("What is a fjord?"), assistant("") | {"tool_calls": [CALL]}, RESULT, assistant("A bay.")]
ROW: dict[str, Any] = {"messages": ASKED, "tools": [SCHEMA]}
WRITTEN = '<tool_call>\n{"name": "lookup", "arguments": {"word": "fjord"}}\n</tool_call>'


def sharegpt(*said: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in said], "tools": [SCHEMA["function"]]}


SPELLINGS: dict[str, dict[str, Any]] = {
    "as JSON": ROW | {"tools": json.dumps([SCHEMA])},
    "a list of JSON texts": ROW | {"tools": [json.dumps(SCHEMA)]},
    "functions": {"messages": ASKED, "functions": [SCHEMA["function"]]},
    "functions beside empty tools": {"messages": ASKED, "tools": "[]", "functions": json.dumps([SCHEMA["function"]])},
    "arguments as JSON": {
        **ROW,
        "messages": [
            ASKED[0],
            assistant(None) | {"tool_calls": [{"function": {"name": "lookup", "arguments": json.dumps(ARGUMENTS)}}]},
            *ASKED[2:],
        ],
    },
    "function_call": {
        **ROW,
        "messages": [
            ASKED[0],
            assistant(None) | {"function_call": {"name": "lookup", "arguments": json.dumps(ARGUMENTS)}},
            {"role": "function", "name": "lookup", "content": "a bay"},
            ASKED[3],
        ],
    },
    "ShareGPT": sharegpt(
        ("human", "What is a fjord?"), ("function_call", json.dumps({"name": "lookup", "arguments": ARGUMENTS})),
        ("observation", "a bay"), ("gpt", "A bay."),
    ),
}  # fmt: skip


def load(tmp_path: Path, chat: Chat, rows: list[dict[str, Any]]) -> Any:
    return load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows)), max_length=2000), chat)


def test_a_null_in_a_json_text_is_an_argument(tmp_path: Path, tiny_chat: Chat) -> None:
    """A table's null is a key of another row; arguments that are a text have the keys that it says."""
    given = [ARGUMENTS | {"place": None}, json.dumps(ARGUMENTS | {"place": None})]
    calls = [{"type": "function", "function": {"name": "lookup", "arguments": each}} for each in given]
    rows = [ROW | {"messages": [ASKED[0], assistant("") | {"tool_calls": [each]}, *ASKED[2:]]} for each in calls]
    said = [answers(tiny_chat, load(tmp_path, tiny_chat, [row]).train)[0] for row in rows]
    assert said == [WRITTEN, WRITTEN.replace('"fjord"', '"fjord", "place": null')]


def test_a_null_is_an_argument_where_the_tool_has_it(tmp_path: Path, tiny_chat: Chat) -> None:
    """In JSON; a table gives every call the keys of all, so that its nulls say nothing."""
    function: dict[str, Any] = SCHEMA["function"]
    both = {"type": "object", "properties": {"word": {"type": "string"}, "place": {"type": ["string", "null"]}}}
    arguments = {"word": "fjord", "place": None, "zone": None}
    call = {"type": "function", "id": None, "function": {"name": "lookup", "arguments": arguments}}
    row = {
        "messages": [ASKED[0], assistant("") | {"tool_calls": [call]}, *ASKED[2:]],
        "tools": [{"type": "function", "function": function | {"parameters": both}}],
    }
    (said, _) = answers(tiny_chat, load(tmp_path, tiny_chat, [row]).train)
    assert said == WRITTEN.replace('"fjord"', '"fjord", "place": null')
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    table = load_sft(section(Source(kind="messages", path=str(tmp_path / "a.parquet")), max_length=2000), tiny_chat)
    assert answers(tiny_chat, table.train)[0] == WRITTEN


def test_calls_are_trained_and_results_are_read(tmp_path: Path, tiny_chat: Chat) -> None:
    data = load(tmp_path, tiny_chat, [ROW])
    assert answers(tiny_chat, data.train) == [WRITTEN, "A bay."]
    ids = data.train[0]["input_ids"]
    assert ids == tiny_chat.tokenizer.apply_chat_template(ASKED, tools=[SCHEMA])["input_ids"]  # type: ignore[index, arg-type]
    for spelled in SPELLINGS.values():
        assert load(tmp_path, tiny_chat, [spelled]).train[0]["input_ids"] == ids
    # Parquet gives every call all keys of all calls
    other = {
        "messages": [
            *ASKED[:1],
            assistant("") | {"tool_calls": [{**CALL, "function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
        ]
    }
    pq.write_table(pa.Table.from_pylist([ROW, other | {"tools": [SCHEMA]}]), tmp_path / "a.parquet")
    again = load_sft(section(Source(kind="messages", path=str(tmp_path / "a.parquet")), max_length=2000), tiny_chat)
    assert ids in again.train["input_ids"] and len(again.train) == 2


def test_rows_differ_in_their_calls_and_tools(tmp_path: Path, tiny_chat: Chat) -> None:
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"word": "bay"}}}
    rows = [ROW, {"messages": ASKED}, ROW | {"messages": [ASKED[0], assistant("") | {"tool_calls": [call]}]}, ROW]
    data = load(tmp_path, tiny_chat, rows)
    assert data.table.sources[0].dropped == {"seen before": 1} and len(data.train) == 3
    assert digest(load(tmp_path, tiny_chat, rows[::-1])) == digest(data)


def test_a_dialogue_that_ends_with_results_is_cut_after_its_call(tmp_path: Path, tiny_chat: Chat) -> None:
    data = load(tmp_path, tiny_chat, [{"messages": [*ASKED[:3], RESULT, user("And?")], "tools": [SCHEMA]}])
    assert answers(tiny_chat, data.train) == [WRITTEN] and data.table.sources[0].cut == 1
    parallel = [ASKED[0], assistant("I look.") | {"tool_calls": [CALL, CALL]}, RESULT, RESULT, ASKED[3], *ASKED[:2]]
    assert answers(tiny_chat, load(tmp_path, tiny_chat, [{"messages": parallel}]).train) == [
        f"I look.\n{WRITTEN}\n{WRITTEN}", "A bay.", WRITTEN,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW | {"tools": "[{"}, "tools that are not schemas of functions"),
        (ROW | {"tools": ["{"]}, "tools that are not schemas of functions"),
        (ROW | {"tools": [{"description": "x"}]}, "tools that are not schemas of functions"),
        ({"messages": [ASKED[0], assistant("") | {"tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
         "calls of tools that cannot be read"),
        ({"messages": [ASKED[0], assistant("") | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
         "calls of tools that cannot be read"),
        ({"messages": [user("Hi") | {"tool_calls": [CALL]}, assistant("Hello")]}, "calls of tools that cannot be read"),
        ({"messages": [ASKED[0], RESULT, ASKED[3]]}, "roles do not alternate"),
        ({"messages": [*ASKED[:2], ASKED[3]]}, "roles do not alternate"),
        ({"messages": [*ASKED[:2], RESULT | {"content": None}, ASKED[3]]}, "content is not text"),
    ],
)  # fmt: skip
def test_reasons(row: dict[str, Any], reason: str) -> None:
    assert example(row) == reason


def test_other_kinds_drop_rows_with_tools(tmp_path: Path, tiny_chat: Chat) -> None:
    assert example({"prompt": [*ASKED[:3]]}, "prompts") == "calls of tools"
    assert isinstance(example(ROW), Example)
    path = write(tmp_path / "a.jsonl", [ROW, {"messages": ASKED[::3]}])
    source = section(Source(kind="messages", path=path), max_length=2000)
    questions, table = load_questions(source, tiny_chat)
    assert len(questions) == 1 and table.sources[0].dropped == {"calls of tools": 1}
    prompts = load_prompts(source, tiny_chat).train["prompt_ids"]
    assert any("# Tools" in tiny_chat.decode(ids) for ids in prompts)


def test_a_template_without_tools_is_refused_with_the_way_out(tmp_path: Path, tiny_chat: Chat) -> None:
    tokenizer = copy.deepcopy(tiny_chat.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = Chat.load(tokenizer, None)
    with pytest.raises(UserError, match=r"does not show tools to the model.*chat\.template=chatml"):
        load(tmp_path, chat, [ROW])
    assert answers(chat, load(tmp_path, chat, [{"messages": ASKED[::3]}]).train) == ["A bay."]


REFUSING = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system message!') }}{% endif %}"
REFUSING += "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
REFUSING += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def test_rows_that_the_template_cannot_write_are_dropped_with_the_first_reason(tmp_path: Path, tiny_chat: Chat) -> None:
    schema = {"type": "function", "function": {"name": "now", "description": "The <|im_end|> of time."}}
    unwritten = {"messages": ASKED, "tools": [schema]}
    data = load(tmp_path, tiny_chat, [unwritten, ROW, unwritten | {"messages": ASKED[:2]}])
    assert answers(tiny_chat, data.train) == [WRITTEN, "A bay."]
    (report,) = data.table.sources
    assert report.dropped == {"not written by the chat template": 2}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(data.table)
    assert "schema of a tool holds the control token <|im_end|>" in shown.get()
    with pytest.raises(UserError, match=r"2 not written by the chat template.*holds the control token") as caught:
        load(tmp_path, tiny_chat, [unwritten, unwritten | {"messages": ASKED[:2]}])
    assert "\n" not in str(caught.value)


def test_all_kinds_drop_roles_that_the_template_refuses(tmp_path: Path, tiny_chat: Chat) -> None:
    tokenizer = copy.deepcopy(tiny_chat.tokenizer)
    tokenizer.chat_template = REFUSING
    chat = Chat.load(tokenizer, None)
    system = {"role": "system", "content": "Be kind."}
    talks = [{"messages": [*head, user("Hi"), assistant("Hello")]} for head in ([system], [])]
    data = section(Source(kind="messages", path=write(tmp_path / "a.jsonl", talks)), max_length=2000)
    pairs = [{"prompt": row["messages"][:-1], "chosen": "Hello", "rejected": "No"} for row in talks]
    path = write(tmp_path / "b.jsonl", pairs)
    rivals = load_preferences(section(Source(kind="preferences", path=path), max_length=2000), chat)
    questions, table = load_questions(data, chat)
    assert len(questions) == 1
    tables = [one.table for one in (load_sft(data, chat), load_prompts(data, chat), rivals)]
    for report in (each.sources[0] for each in (*tables, table)):
        assert report.dropped == {"not written by the chat template": 1} and "No system message!" in report.unwritten
