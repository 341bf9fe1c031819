"""Does a client get the calls of a model as OpenAI's `tool_calls`, whole and streamed, and may it answer them?"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import LlamaConfig, LlamaForCausalLM

from envs.tools import Tool
from posttrain.models.chat import Chat
from posttrain.serving import serve
from posttrain.serving.served_calls import CallReader


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


TOOLS: Any = [Tool(add, "add").schema]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
BARE = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture
def scripted(tiny_chat: Chat) -> Any:
    """A client of a model that writes what `says` holds; `read` holds the prompts that it was given."""
    shape = LlamaConfig(
        vocab_size=len(tiny_chat.tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=4096,
    )  # fmt: skip
    model, it = LlamaForCausalLM(shape).eval(), SimpleNamespace(says="", read=[])

    def generate(input_ids: Any, streamer: Any, generation_config: Any, **_: Any) -> None:
        it.read.append(input_ids[0].tolist())
        streamer.put(input_ids)
        for token in [*tiny_chat.content_ids(it.says), tiny_chat.stop_id][: generation_config.max_new_tokens]:
            streamer.put(torch.tensor([token]))
        streamer.end()

    model.generate = generate  # type: ignore[assignment]
    http = TestClient(serve.build_server_app(model, tiny_chat, "m"), "http://localhost", raise_server_exceptions=False)
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)

    def ask(says: str, **given: Any) -> Any:
        it.says = says
        return client.chat.completions.create(**{"model": "m", "messages": QUESTION, "tools": TOOLS, **given})

    it.ask = ask
    return it


def streamed(pieces: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    text, calls, reason = "", [], None
    for piece in pieces:
        (choice,) = piece.choices
        text += choice.delta.content or ""
        calls += [(each.function.name, each.function.arguments) for each in choice.delta.tool_calls or []]
        reason = choice.finish_reason or reason
    return text, calls, reason


@pytest.mark.parametrize(
    ("says", "content", "calls"),
    [
        (CALL, "", 1),
        (f"I add.\n{CALL}\n{CALL}", "I add.", 2),
        ("It is 5.", "It is 5.", 0),
        (f" {BARE}", "", 1),
        ('{"sum": 5}', '{"sum": 5}', 0),
        ("Well <tool_call>{", "Well <tool_call>{", 0),
        ("", "", 0),
        (f"<think>I add.</think>\n{BARE}", "<think>I add.</think>", 1),
        (f"<think>I add.</think>{BARE}", "<think>I add.</think>", 1),
        (f"<think>{BARE}</think> It is 5.", f"<think>{BARE}</think> It is 5.", 0),
        ('<think>A sum.</think>\n{"sum": 5}', '<think>A sum.</think>\n{"sum": 5}', 0),
        (f"<think>Is it {CALL}?</think>\n{BARE}", f"<think>Is it {CALL}?</think>", 1),
        (f"<think>{BARE}", f"<think>{BARE}", 0),
    ],
)
def test_calls_arrive_whole_and_streamed(scripted: Any, tiny_chat: Chat, says: str, content: str, calls: int) -> None:
    (choice,) = scripted.ask(says).choices
    assert scripted.read == [tiny_chat.prompt(QUESTION, TOOLS)]
    made = choice.message.tool_calls or []
    assert (choice.message.content or "", len(made)) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert all((each.function.name, json.loads(each.function.arguments)) == ("add", {"a": 2, "b": 3}) for each in made)
    text, parts, reason = streamed(scripted.ask(says, stream=True))
    assert text.rstrip("\n") == content and reason == choice.finish_reason
    assert parts == [(each.function.name, each.function.arguments) for each in made]


@pytest.mark.parametrize("behind", [BARE, f"\n{BARE}", f"\n{CALL}", " It is 5."])
def test_a_thought_that_the_prompt_opened_is_streamed_as_it_comes(tiny_chat: Chat, behind: str) -> None:
    chat = copy.copy(tiny_chat)
    chat.opens_thoughts = True
    thought = f"{BARE} or not?</think>"
    reader, sent = CallReader(chat), [""]
    for letter in thought + behind:
        sent.append(sent[-1] + "".join(each["text"] for each in reader.feed(letter)))
    assert sent[len(thought)] == thought
    _, events = reader.finalize()
    calls = [each for each in events if each["type"] == "region_close"]
    rest = "".join(each["text"] for each in events if each["type"] == "region_chunk")
    assert len(calls) == behind.count("{") // 2 and (sent[-1] + rest).rstrip() == thought + behind * (not calls)


def test_a_client_answers_calls_and_chooses(scripted: Any, tiny_chat: Chat) -> None:
    (choice,) = scripted.ask(CALL).choices
    answered = [*QUESTION, choice.message.model_dump(exclude_none=True)]
    answered.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "5"})
    (then,) = scripted.ask("It is 5.", messages=answered).choices
    assert then.message.content == "It is 5." and then.finish_reason == "stop"
    plain = [*QUESTION, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "5"}]
    assert scripted.read[-1] == tiny_chat.prompt(plain, TOOLS)
    (none,) = scripted.ask(CALL, tool_choice="none").choices
    assert scripted.read[-1] == tiny_chat.prompt(QUESTION)
    assert none.message.content == CALL and none.finish_reason == "stop"
    assert scripted.ask(CALL, tool_choice="auto").choices[0].finish_reason == "tool_calls"
    assert scripted.ask(CALL, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice is not supported"),
        ({"tools": TOOLS * 129}, "at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]}, "control token"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "only the assistant calls"),
    ],
)
def test_what_is_refused(scripted: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        scripted.ask("a", **given)
