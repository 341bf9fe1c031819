"""Are calls written, trained exactly and read back with a template as Mistral's v3: ids, alternation, one question?"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from test_chat import dialogue, metaspace_tokenizer
from test_tool_turns import section
from test_tools import TEMPLATES, TOOLS, asked, call, hostile
from tokenizers import AddedToken

from envs.episode import Episode
from envs.tools import Call
from posttrain.config import ProtocolSection
from posttrain.models.chat import Chat
from posttrain.models.tools import Said
from posttrain.rollout.agents.requests import message_of
from posttrain.rollout.episodes import FULL, new_episode
from posttrain.rollout.game import Game
from posttrain.serving.generation import Answer
from posttrain.types import Completion, UserError

TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
TOKENS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
TEXT = (TEMPLATES / "mistral_v3.jinja").read_text(encoding="utf-8")


def chat_with(template: str) -> Chat:
    tokenizer = metaspace_tokenizer("first")
    added: Any = [AddedToken(name, special=True, normalized=False) for name in TOKENS]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template
    return Chat.load(tokenizer, None)


@cache
def mistral() -> Chat:
    return chat_with(TEXT)


def named(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with ids of nine characters, as the template itself needs them."""
    ids = iter(f"abcd{n:05d}" for n in range(100))
    open_ids: list[str] = []
    out: list[dict[str, Any]] = []
    for m in messages:
        if m.get("tool_calls"):
            open_ids = [next(ids) for _ in m["tool_calls"]]
            calls = [each | {"id": name} for each, name in zip(m["tool_calls"], open_ids, strict=True)]
            out.append(m | {"tool_calls": calls})
        else:
            out.append(m | {"tool_call_id": open_ids.pop(0)} if m["role"] == "tool" else m)
    return out


def whole(messages: list[dict[str, Any]], tools: Any = TOOLS) -> str:
    tokenizer: Any = mistral().tokenizer
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def spelled(ids: list[int]) -> str:
    backend: Any = mistral().tokenizer.backend_tokenizer
    return backend.decode(ids, skip_special_tokens=False)


def trained(ids: list[int], mask: list[bool]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for i, on in zip(ids, mask, strict=True):
        if on:
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def test_an_answer_begins_with_the_space_that_the_template_writes() -> None:
    chat = mistral()
    messages = dialogue("Hi", "Hello", "And?", "Yes.")
    ids, mask = chat.encode(messages)
    assert spelled(ids) == whole(messages, None)
    assert [chat.decode(run) for run in trained(ids, mask)] == [" Hello", " Yes."]
    grown = [*chat.prompt(messages[:1]), *chat.content_ids(" Hello"), chat.stop_id, *chat.extend("And?")]
    assert ids[: len(grown)] == grown
    assert chat.encode(dialogue("Hi", " Hello")) == chat.encode(dialogue("Hi", "Hello"))
    cut = messages[1] | {"mask_spans": [[0, 2]]}
    ids, mask = chat.encode([messages[0], cut])
    assert [chat.decode(run) for run in trained(ids, mask)] == [" ", "llo"]


def test_calls_and_results_are_written_exactly() -> None:
    chat, rng = mistral(), random.Random(0)
    marker: Any = chat.tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    for _ in range(100):
        messages: list[dict[str, Any]] = [{"role": "user", "content": hostile(rng)}]
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(1, 3)
            calls = [call(**{hostile(rng): hostile(rng), "n": i}) for i in range(count)]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [{"role": "tool", "content": hostile(rng)} for _ in range(count)]
        messages.append({"role": "assistant", "content": hostile(rng)})
        messages = named(messages)
        ids, mask = chat.encode(messages, TOOLS)
        assert spelled(ids) == spelled(chat.tokenizer(whole(messages), add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        runs = trained(ids, mask)
        assert len(runs) == len(answers) == ids.count(chat.stop_id)
        assert [run[0] == marker for run in runs] == [True] * (len(runs) - 1) + [False]
        assert ids.count(marker) == len(runs) - 1
        for run, at in zip(runs[:-1], answers[:-1], strict=True):
            said = chat.read_calls(chat.decode(run))
            given = messages[at]["tool_calls"]
            assert said == Said("", [Call("add", c["function"]["arguments"], id=c["id"]) for c in given])
        # a rollout builds the same ids turn by turn
        grown = chat.prompt(messages[:1], TOOLS)
        for run, (at, following) in zip(runs, pairwise([*answers, len(messages)]), strict=True):
            grown += run + (chat.extend(messages[at + 1 : following], tools=TOOLS) if following < len(messages) else [])
        assert grown == ids


def test_ids_of_other_lengths_and_missing_ones_are_paired() -> None:
    chat = mistral()
    plain = asked(2)
    text = spelled(chat.encode(plain, TOOLS).ids)
    assert text.count('"id": "000000001"') == text.count('"call_id": "000000001"') == 1
    long = [dict(m) for m in plain]
    long[1] = long[1] | {"tool_calls": [c | {"id": f"call_{n}_of_many"} for n, c in enumerate(plain[1]["tool_calls"])]}
    long[2:4] = [m | {"tool_call_id": f"call_{n}_of_many"} for n, m in enumerate(plain[2:4])]
    unnamed = [*long[:2], *plain[2:]]  # results in the order of the calls
    assert chat.encode(long, TOOLS) == chat.encode(unnamed, TOOLS)
    ids = [part[:9] for part in spelled(chat.encode(long, TOOLS).ids).split('id": "')[1:]]
    assert ids[:2] == ids[2:] and len(set(ids)) == 2 and all(each.isalnum() for each in ids)
    (sampled,) = chat.read_calls('[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "q1w2e3r4t"}]').calls
    assert sampled == Call("add", {}, id="q1w2e3r4t")
    result = {"role": "tool", "content": "5", "tool_call_id": sampled.id}
    assert '5, "call_id": "q1w2e3r4t"}' in chat.decode(chat.extend([result], tools=TOOLS))


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        (dialogue("Hi", "Hello", "And?", "Yes."), TOOLS, "shows tools before the last message of the user alone"),
        (dialogue("Hi", "Hello", system="Be kind."), None, "leaves out a system message once an answer follows"),
        (asked(said="Let me see."), TOOLS, "leaves out what an answer says beside a call"),
    ],
)
def test_what_the_template_cannot_do_is_said(messages: Any, tools: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        mistral().encode(messages, tools)


def test_calls_without_schemas_may_have_several_messages_of_the_user() -> None:
    messages = named([*asked(), *asked()])
    assert spelled(mistral().encode(messages).ids) == whole(messages, None)


def test_ids_before_results_are_refused() -> None:
    moved = TEXT.replace(
        """{"content": ' ~ m.content ~ ', "call_id": "' ~ checked(m.tool_call_id) ~ '"}""",
        """' ~ checked(m.tool_call_id) ~ ' ' ~ m.content ~ '""",
    )
    assert moved != TEXT
    with pytest.raises(UserError, match="writes the ids of calls before their results"):
        chat_with(moved).encode(asked(), TOOLS)


def test_a_rollout_answers_the_call_that_was_sampled(tmp_path: Any) -> None:
    chat, arguments = mistral(), {"expression": "12*12"}
    episode = new_episode(section(tmp_path), ProtocolSection(), 0, "train")
    assert isinstance(episode, Episode)
    game = Game(chat, episode, FULL, 100)
    assert game.begin()
    function = {"name": "calculate", "arguments": arguments}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "q1w2e3r4t", "function": function}]}
    schemas = [tool.schema for tool in episode.env.tools]
    told = [*episode.messages, called, {"role": "tool", "content": "144", "tool_call_id": "q1w2e3r4t"}]
    told.append({"role": "assistant", "content": "144"})
    ids, mask = chat.encode(told, schemas)
    for run in trained(ids, mask):
        going = game.take_turn(Completion(run, [0.0] * len(run), True))
        assert not going or game.look()
    game.finish()
    assert (game.segment.ids, game.segment.mask) == (ids, mask)
    assert not game.trajectory.crashed and game.trajectory.messages[-1]["content"] == "144"


def test_text_is_without_the_space_and_ids_reach_programs() -> None:
    chat = mistral()
    answer = Answer(chat, iter([*chat.content_ids(" It is 5."), chat.stop_id]))
    assert "".join(answer) == answer.text == "It is 5."
    said = Said("", [Call("add", {}, id="q1w2e3r4t"), Call("add", {}, id="000000001")])
    assert [each["id"] for each in message_of(said, "x")["tool_calls"]] == ["q1w2e3r4t", "000000001"]
    twice = Said("", [said.calls[0]] * 2)
    assert [each["id"] for each in message_of(twice, "x")["tool_calls"]] == ["call_x_0", "call_x_1"]


def test_a_system_message_before_the_first_question_stays() -> None:
    chat = chat_with(TEXT.replace("{%- if start and loop.last -%}", "{%- if start and m == messages[1] -%}"))
    assert "Be kind." in chat.decode(chat.encode(dialogue("Hi", "Hello", "And?", "Yes.", system="Be kind.")).ids)
