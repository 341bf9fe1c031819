"""Are calls of tools rendered as the template writes them, trained exactly, and read back from what a model writes?"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trl
from test_chat import OPEN, QWEN25, llama3_tokenizer, with_template
from tiny_tokenizers import byte_level_tokenizer
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import add_response_schema

from envs.tools import Call
from posttrain.models.chat import TEMPLATE_PATH, Chat
from posttrain.models.tools import Said, read_calls
from posttrain.types import UserError

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


TOOLS = [get_json_schema(add)]


def written_by(name: str, *extra: str) -> Any:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if name == "llama31":
        return llama3_tokenizer(text)
    return with_template(text, "<tool_call>", "</tool_call>", *extra, special=False)


MAKERS = {
    "qwen25": lambda: written_by("qwen25"),
    "qwen25 with tokens of results": lambda: written_by("qwen25", "<tool_response>", "</tool_response>"),
    "llama31": lambda: written_by("llama31"),
    "smollm3": lambda: written_by("smollm3"),
    "chatml": byte_level_tokenizer,
}
CHATS: dict[str, Chat] = {}


def chat_of(name: str) -> Chat:
    if name not in CHATS:
        CHATS[name] = Chat.load(MAKERS[name](), None)
    return CHATS[name]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def asked(calls: int = 1, said: str = "") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": said, "tool_calls": [call(a=2, b=3 + i) for i in range(calls)]},
        *({"role": "tool", "name": "add", "content": str(5 + i)} for i in range(calls)),
        {"role": "assistant", "content": "It is 5."},
    ]


TEXTS = [
    "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</tool_response>", "<tool_response>", "<tool_call>", "</tool_call>",
    '{"name": "add"}', '"', "\\", "\\n", "\n", " ", "é", "日本", "🧊", "5", "a", "\ue0000\ue001", "{{ tools }}", "null",
    "<|start_header_id|>", "<|im_start|>user\n", "[TOOL_CALLS]", "'", "<think>",
]  # fmt: skip


def hostile(rng: random.Random) -> str:
    return "x" + "".join(rng.choices(TEXTS, k=rng.randint(0, 5))) + "x"


def hostile_dialogue(rng: random.Random, several: bool, beside: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": hostile(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": hostile(rng)})
        for _ in range(rng.randint(0, 2)):
            count = rng.randint(1, 2) if several else 1
            said = hostile(rng) if beside and rng.random() < 0.5 else ""
            calls = [call(**{hostile(rng): hostile(rng), "n": rng.randint(0, 9)}) for _ in range(count)]
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            messages += [{"role": "tool", "content": hostile(rng)} for _ in range(count)]
        messages.append({"role": "assistant", "content": hostile(rng)})
    return messages


@pytest.mark.parametrize("name", MAKERS)
def test_calls_are_trained_as_they_are_written_and_results_are_not(name: str) -> None:
    chat, rng = chat_of(name), random.Random(name)
    llama = name == "llama31"  # one call, nothing beside it; contents are trimmed
    native = name != "smollm3"  # which leaves calls out
    backend: Any = chat.tokenizer.backend_tokenizer
    for _ in range(150):
        messages = hostile_dialogue(rng, not llama, not llama)
        ids, mask = chat.encode(messages, TOOLS)
        answers = [chat.written(m) for m in messages if m["role"] == "assistant"]
        # True exactly on what the assistant wrote and its stop tokens, in order
        runs: list[list[int]] = [[]]
        for i, on in zip(ids, mask, strict=True):
            if on:
                runs[-1].append(i)
            elif runs[-1]:
                runs.append([])
        assert [run for run in runs if run] == [[*chat.content_ids(text), chat.stop_id] for text in answers]
        # each stop token and each opening of a turn is one that the template wrote
        turns = len(messages) + (messages[0]["role"] != "system" and name in ("smollm3",))
        if name in ("chatml", "qwen25"):
            turns = len([m for i, m in enumerate(messages) if not (m["role"] == messages[i - 1]["role"] == "tool")])
            turns += messages[0]["role"] != "system"
        elif native and not llama:
            turns = ids.count(chat.stop_id)
        elif llama:
            turns += messages[0]["role"] != "system"
        assert ids.count(chat.stop_id) == turns
        spelled = backend.decode(ids, skip_special_tokens=False)
        plain = [
            m if native or not m.get("tool_calls") else {"role": "assistant", "content": chat.written(m)}
            for m in messages
        ]
        tokenizer: Any = chat.tokenizer
        whole = tokenizer.apply_chat_template(plain, tools=TOOLS, tokenize=False)
        assert spelled == whole
        # a rollout builds the same ids turn by turn
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        grown = chat.prompt(messages[: places[0]], TOOLS)
        for at, following in pairwise(places):
            grown += [*chat.content_ids(chat.written(messages[at])), chat.stop_id]
            grown += chat.extend(messages[at + 1 : following], tools=TOOLS)
        grown += [*chat.content_ids(chat.written(messages[-1])), chat.stop_id]
        assert ids[: len(grown)] == grown


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_those_of_apply_chat_template(name: str) -> None:
    """Where no text holds control tokens, and nothing is joined across the edge of a content."""
    chat = chat_of(name)
    for messages in (asked(), asked(said="Let me see."), asked(2)) if name != "llama31" else (asked(),):
        plain = messages
        if name == "smollm3":
            plain = [m if "tool_calls" not in m else {"role": m["role"], "content": chat.written(m)} for m in messages]
        tokenizer: Any = chat.tokenizer
        theirs = tokenizer.apply_chat_template(plain, tools=TOOLS)["input_ids"]
        assert chat.encode(messages, TOOLS).ids == theirs


@pytest.mark.parametrize("name", MAKERS)
def test_what_the_template_writes_is_read_back(name: str) -> None:
    chat, rng = chat_of(name), random.Random(name)
    for _ in range(200):
        key, value = hostile(rng), hostile(rng)
        arguments = {key: value, "n": [1, {"x": None}]}
        said = "" if name == "llama31" else rng.choice(["", "<think>\nI add.\n</think>\n\n", "I look."])
        message = {"role": "assistant", "content": said, "tool_calls": [call(**arguments)]}
        message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
        assert chat.read_calls(chat.written(message)) == Said(said.rstrip(), [Call("add", arguments)])


def test_chatml_without_tools_is_what_it_was() -> None:
    before = (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
        " + '\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    rng, tokenizer = random.Random(0), byte_level_tokenizer()
    for _ in range(100):
        roles = rng.choices(["system", "user", "assistant"], k=rng.randint(1, 6))
        messages = [{"role": role, "content": hostile(rng)} for role in roles]
        for opened in (False, True):
            now, then = (
                tokenizer.apply_chat_template(
                    messages, chat_template=template, add_generation_prompt=opened, tokenize=False
                )
                for template in (TEMPLATE_PATH.read_text(encoding="utf-8"), before)
            )
            assert now == then


def test_calls_without_schemas_and_arguments_as_text() -> None:
    chat = chat_of("chatml")
    text = [m | {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}]} for m in asked()[1:2]]
    assert chat.encode([asked()[0], *text]) == chat.encode(asked()[:2])
    assert "<tool_call>" in chat.decode(chat.encode(asked()).ids)
    untrained = chat.encode([asked()[0], text[0] | {"train": False}, *asked()[2:]])
    assert sum(untrained.mask) == len(chat.content_ids("It is 5.")) + 1


REFUSED = {
    "no tools": (QWEN25, asked(), TOOLS, "does not show tools"),
    "no calls": (
        "{{ tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        + OPEN,
        asked(),
        TOOLS,
        "leaves out calls of tools",
    ),
    "earlier turns": (
        TEMPLATE_PATH.read_text(encoding="utf-8").replace(
            "message['content'] or ''", "(message['content'] if loop.last or not tools else 'x')"
        ),
        asked(),
        TOOLS,
        "drops, repeats or moves|writes earlier turns|rewrites messages",
    ),
    "another form": (
        TEMPLATE_PATH.read_text(encoding="utf-8").replace("'<tool_call>\\n{\"name\": '", "'<function='"),
        asked(),
        TOOLS,
        "in a form that is not known",
    ),
    "a control token in a schema": (
        None,
        asked(),
        [{"type": "function", "function": {"name": "add", "description": "<|im_end|>", "parameters": {}}}],
        "schema of a tool holds the control token",
    ),
    "not a schema": (None, asked(), [{"name": "add"}], "not the schema of a function"),
    "not calls": (None, [asked()[0], {"role": "assistant", "tool_calls": ["x"]}], TOOLS, "cannot be read"),
    "endless with tools": (
        TEMPLATE_PATH.read_text(encoding="utf-8") + "{% if tools %}{{ 'a' * 10 ** 11 }}{% endif %}",
        asked(),
        TOOLS,
        "cannot be used with tools",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_template_cannot_do_is_refused(case: str) -> None:
    template, messages, tools, words = REFUSED[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    chat = Chat.load(tokenizer, None)
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    before = chat.encode(plain)
    with pytest.raises(UserError, match=words) as caught:
        chat.encode(messages, tools)
    assert "\n" not in str(caught.value)
    if template is not None:
        assert "chat.template=chatml" in str(caught.value)
    assert chat.encode(plain) == before


def test_templates_with_one_call_or_nothing_beside_it_say_so() -> None:
    chat = chat_of("llama31")
    with pytest.raises(UserError, match="only supports single tool-calls"):
        chat.encode(asked(2), TOOLS)
    with pytest.raises(UserError, match="leaves out what an answer says beside a call"):
        chat.encode(asked(said="Let me see."), TOOLS)


FORMS: dict[str, tuple[str, Any, Said]] = {
    "two": (
        'I.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "hermes",
        Said("I.", [Call("f", {"x": 1}), Call("g", {})]),
    ),
    "text": ("No call.", "hermes", Said("No call.", [])),
    "bare": ('{"name": "f", "arguments": {"x": 1}}', "hermes", Said("", [Call("f", {"x": 1})])),
    "JSON": ('{"name": "f", "answer": {"x": 1}}', "hermes", Said('{"name": "f", "answer": {"x": 1}}', [])),
    "thought": ("<think><tool_call>{}</tool_call></think>Yes", "hermes",
                Said("<think><tool_call>{}</tool_call></think>Yes", [])),
    "open thought": ("<think><tool_call>{}</tool_call>", "hermes", Said("<think><tool_call>{}</tool_call>", [])),
    "later thought": (
        "Sure. <think>Is it <tool_call>{}</tool_call>?</think>No.", "hermes",
        Said("Sure. <think>Is it <tool_call>{}</tool_call>?</think>No.", []),
    ),
    "call after a later thought": (
        'A <think>b <tool_call>{}</tool_call></think>c\n<tool_call>{"name": "f"}</tool_call>'
        '<think><tool_call>{"name": "g"}</tool_call></think><tool_call>{"name": "h"}</tool_call>',
        "hermes",
        Said("A <think>b <tool_call>{}</tool_call></think>c", [Call("f", {}), Call("h", {})]),
    ),
    "end of a thought as an argument": (
        'I. <tool_call>\n{"name": "f", "arguments": {"x": "y</think>"}}\n</tool_call>', "hermes",
        Said("I.", [Call("f", {"x": "y</think>"})]),
    ),
    "llama end of a thought as an argument": (
        '{"name": "f", "parameters": {"x": "</think>"}}', "llama", Said("", [Call("f", {"x": "</think>"})]),
    ),
    "mistral end of a thought as an argument": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "</think>"}}]', "mistral",
        Said("", [Call("f", {"x": "</think>"})]),
    ),
    "end of a thought behind a call": (
        '<tool_call>{"name": "f"}</tool_call>\nThe tag </think> ends a thought.', "hermes", Said("", [Call("f", {})]),
    ),
    "call as an argument": (
        '<tool_call>{"name": "f", "arguments": {"x": "<tool_call>{\\"name\\"} and </think>"}}</tool_call>', "hermes",
        Said("", [Call("f", {"x": '<tool_call>{"name"} and </think>'})]),
    ),
    "end of a thought that nothing opened": (
        'So.</think>\n{"name": "f", "arguments": {}}', "hermes",
        Said('So.</think>\n{"name": "f", "arguments": {}}', []),
    ),
    "llama end of a thought in the second call": (
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {"x": "</think>"}}', "llama",
        Said("", [Call("f", {"x": 1}), Call("g", {"x": "</think>"})]),
    ),
    "thought as an argument": (
        '<tool_call>{"name": "f", "arguments": {"x": "<think>y</think>"}}</tool_call>', "hermes",
        Said("", [Call("f", {"x": "<think>y</think>"})]),
    ),
    "thought that is never closed": (
        'A <think>b <tool_call>{"name": "f"}</tool_call>', "hermes", Said("A <think>b", [Call("f", {})]),
    ),
    "closing tag as an argument": (
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call> and <tool_call>{"name": "g"}'
        "</tool_call>", "hermes", Said("", [Call("f", {"x": "</tool_call>"}), Call("g", {})]),
    ),
    "hermes with parameters": (
        '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "hermes", Said("", [Call("f", {"x": 1})]),
    ),
    "llama with arguments": ('{"name": "f", "arguments": {"x": 1}}', "llama", Said("", [Call("f", {"x": 1})])),
    "llama without arguments": ('{"name": "f"}', "llama", Said("", [Call("f", {})])),
    "llama person": ('{"name": "Bob", "age": 5}', "llama", Said('{"name": "Bob", "age": 5}', [])),
    "llama thought": (
        'So <think><|python_tag|>{"name": "f"}</think>no', "llama",
        Said('So <think><|python_tag|>{"name": "f"}</think>no', []),
    ),
    "mistral thought": (
        "So <think>[TOOL_CALLS] []</think>no", "mistral", Said("So <think>[TOOL_CALLS] []</think>no", []),
    ),
    "llama": ('{"name": "f", "parameters": {"x": "y"}}', "llama", Said("", [Call("f", {"x": "y"})])),
    "llama two": (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "llama",
        Said("", [Call("f", {}), Call("g", {})]),
    ),
    "llama json": ('{"answer": 5}', "llama", Said('{"answer": 5}', [])),
    "llama text": ('So {"name": "f"}', "llama", Said('So {"name": "f"}', [])),
    "mistral": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', "mistral", Said("", [Call("f", {"x": 1})]),
    ),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "hermes", Said("", [Call("f", {"x": 1})]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_calls(case: str) -> None:
    text, form, expected = FORMS[case]
    assert read_calls(text, form) == expected


OPENED: dict[str, tuple[str, Any, Said]] = {  # where the prompt ends in <think>
    "text": (
        'So <tool_call>{"name": "f"}</tool_call></think> 5', "hermes",
        Said('So <tool_call>{"name": "f"}</tool_call></think> 5', []),
    ),
    "call after a thought": (
        'So <tool_call>{"name": "f"}</tool_call>\n</think>Yes.\n<tool_call>{"name": "g"}</tool_call>', "hermes",
        Said('So <tool_call>{"name": "f"}</tool_call>\n</think>Yes.', [Call("g", {})]),
    ),
    "mark in it": (
        "I need <tool_call>, or not.</think>5", "hermes", Said("I need <tool_call>, or not.</think>5", []),
    ),
    "bare call after a thought": (
        'So.</think>\n{"name": "f", "arguments": {}}', "hermes", Said("So.</think>", [Call("f", {})]),
    ),
    "llama call in it": (
        '{"name": "f"} or </think>{"name": "g"}', "llama", Said('{"name": "f"} or </think>', [Call("g", {})]),
    ),
    "mistral call in it": (
        "So [TOOL_CALLS] []</think>no", "mistral", Said("So [TOOL_CALLS] []</think>no", []),
    ),
    "open": ('<tool_call>{"name": "f"}</tool_call>', "hermes", Said('<tool_call>{"name": "f"}</tool_call>', [])),
    "its end as an argument": (
        '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call> <tool_call>{"name": "g"}</tool_call>'
        '</think><tool_call>{"name": "h"}</tool_call>', "hermes",
        Said('<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call> <tool_call>{"name": "g"}</tool_call>'
             "</think>", [Call("h", {})]),
    ),
    "its end in arguments that are not JSON": (
        'So <tool_call>{"name": "</think>",}</tool_call><tool_call>{"name": "f"}</tool_call>', "hermes",
        Said('So <tool_call>{"name": "</think>",}</tool_call>', [Call("f", {})]),
    ),
    "quotation behind JSON": (
        '{"a":1} "quoted </think> <tool_call>{"name":"f"}</tool_call>', "hermes",
        Said('{"a":1} "quoted </think>', [Call("f", {})]),
    ),
    "llama quotation behind JSON": (
        '[1, 2] "so</think>{"name":"f","arguments":{}}', "llama", Said('[1, 2] "so</think>', [Call("f", {})]),
    ),
    "llama end of it in the second call": (
        '{"name": "f"}; {"name": "g", "parameters": {"x": "</think>"}}</think>{"name": "h"}', "llama",
        Said('{"name": "f"}; {"name": "g", "parameters": {"x": "</think>"}}</think>', [Call("h", {})]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPENED)
def test_no_call_in_a_thought_that_the_prompt_opened(case: str) -> None:
    text, form, expected = OPENED[case]
    assert read_calls(text, form, thought_open=True) == expected


def test_the_template_says_whether_the_prompt_opens_a_thought() -> None:
    own = TEMPLATE_PATH.read_text(encoding="utf-8")
    opening = own.replace("message['role'] + '\\n' -}}", "message['role'] + '\\n' -}}\n        @", 1)
    opening = opening.replace("@", "{{- '<think>\\n' if message['role'] == 'assistant' -}}")
    opening = opening.replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")
    text = 'So <tool_call>{"name": "f"}</tool_call></think>No.'
    assert Chat.load(with_template(opening), None).read_calls(text) == Said(text, [])
    assert chat_of("chatml").read_calls(text) == Said("So", [Call("f", {})])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', "hermes"),
        ("<tool_call>{'name': 'f'}</tool_call>", "hermes"),
        ('<tool_call>\n{"name": "f", "arguments": {"x": "</think>",}}\n</tool_call>', "hermes"),
        ("<tool_call>[1]</tool_call>", "hermes"),
        ('<tool_call>{"name": "f"} and more</tool_call>', "hermes"),
        ('<tool_call>{"name": 5}</tool_call>', "hermes"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "hermes"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "hermes"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "hermes"),
        ('{"name": "f", "parameters": {', "llama"),
        ('<|python_tag|>f.call("x")', "llama"),
        ("[TOOL_CALLS] f", "mistral"),
    ],
)
def test_a_malformed_call_is_kept_with_an_error(text: str, form: Any) -> None:
    (found,) = read_calls(text, form).calls
    assert found.error and len(found.error) < 400


@pytest.fixture(scope="module")
def listing() -> Chat:
    """LFM2's calls, a list as in Python, which the tokenizer reads itself."""
    template = Path(trl.__file__).parent / "chat_templates" / "lfm2_v2.jinja"
    marks = "<|tool_call_start|>", "<|tool_call_end|>"
    tokenizer = with_template(template.read_text(encoding="utf-8"), *marks, special=False)
    add_response_schema(tokenizer)
    return Chat.load(tokenizer, None)


ADDED = Call("add", {"a": 2, "b": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{[add(a=2, b=3)]}", Said("", [ADDED])),
        ("I look. {[add(a=2, b=3)]}", Said("I look.", [ADDED])),
        ("{[add(a=2, b=3), add(a=2, b=3)]}", Said("", [ADDED] * 2)),
        ("It is 5.", Said("It is 5.", [])),
        ("<think>{[add(a=2)]}</think>no", Said("<think>{[add(a=2)]}</think>no", [])),
        ("<think>x</think>{[add(a=2, b=3)]}", Said("<think>x</think>", [ADDED])),
        ("<think>x</think> I look. {[add(a=2, b=3)]} tail", Said("<think>x</think> I look.", [ADDED])),
        ("I look. {[add(a=2, b=3)]} tail", Said("I look.", [ADDED])),
        ("<think>maybe {[add(a=2, b=3)]}", Said("<think>maybe {[add(a=2, b=3)]}", [])),
        ("<think>x {[add(a='</think>')]}", Said("<think>x {[add(a='</think>')]}", [])),
        (
            "<think>x {[add(a='</think>')]}</think>{[add(a=2, b=3)]}",
            Said("<think>x {[add(a='</think>')]}</think>", [ADDED]),
        ),
        ("<think>Not {.</think>{[add(a=2, b=3)]}", Said("<think>Not {.</think>", [ADDED])),
        ("<think>{[add(a=2)]} no</think>{[add(a=2, b=3)]}", Said("<think>{[add(a=2)]} no</think>", [ADDED])),
        ("So </think> is text. {[add(a=2, b=3)]}", Said("So </think> is text.", [ADDED])),
        ("{[add(a='</think>')]}", Said("", [Call("add", {"a": "</think>"})])),
        ("{[add(a=2", "not closed by }"),
        ("{[add(a=2, b=3)]", "not closed by }"),
        ("<think>x</think> I look. {[add(a=2, b=3)]", "not closed by }"),
        ("I look. {[add(a=2}", "cannot be read as a call"),
        ("{add a 2}", "cannot be read as a call"),
        ("{[]}", "cannot be read as a call"),
        ("{[add(a=__import__('os').getcwd())]}", "cannot be read as a call"),
    ],
)
def test_calls_that_the_tokenizer_reads_itself(listing: Chat, text: str, said: Said | str) -> None:
    def marked(text: str) -> str:
        return text.replace("{", "<|tool_call_start|>").replace("}", "<|tool_call_end|>")

    read = listing.read_calls(marked(text))
    assert listing.call_form == "response"
    if isinstance(said, Said):
        assert read == said._replace(content=marked(said.content))
    else:
        (found,) = read.calls
        assert marked(said) in found.error and not found.name and read.content == text.partition("{")[0].rstrip()


def test_no_listed_call_in_a_thought_that_the_prompt_opened(listing: Chat) -> None:
    call, thought = "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>", "So <|tool_call_start|>[add(a=2)]</think>"
    assert read_listed(listing, f"{thought}no") == Said(f"{thought}no", [])
    assert read_listed(listing, f"{thought}Yes. {call}") == Said(f"{thought}Yes.", [ADDED])
    assert read_listed(listing, call) == Said(call, [])
    thought = "So " + call.replace("2", "'</think>'") + " or </think>"
    assert read_listed(listing, f"{thought}{call}") == Said(thought, [ADDED])


def read_listed(listing: Chat, text: str) -> Said:
    return read_calls(text, "response", listing.tokenizer, listing._call_marks, thought_open=True)


def test_no_text_raises() -> None:
    rng = random.Random(0)
    pieces = [*TEXTS, "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}", "</think>", "<|python_tag|>"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        for form in ("hermes", "llama", "mistral"):
            said = read_calls(text, form, thought_open=rng.random() < 0.5)
            assert said.calls or said.content == text
