"""Is every format that people have read as what it says, and is nothing of it lost without a word?"""

from __future__ import annotations

import copy
import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from test_data import account, answers, assistant, replaced, rows_of, section, trained_text, user, write
from transformers import LlamaConfig, PreTrainedTokenizerFast
from trl.data_utils import extract_prompt, maybe_convert_to_chatml, maybe_extract_prompt

from envs import local_rows
from envs.math_judge import MathJudge
from posttrain.config.data import HUB_KINDS, Source
from posttrain.data import __main__ as command, reading
from posttrain.data.encoding import Sample, encode_dialogues, encode_pairs, encode_prompts
from posttrain.data.filters import CHECKS, IGNORED, Example
from posttrain.data.loading import load_preferences, load_prompts, load_questions, load_sft
from posttrain.data.table import SourceReport
from posttrain.models.chat import Chat
from posttrain.types import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
NO_JUDGE: Any = None  # of what is read here, nothing is judged


def sharegpt(*said: str) -> list[dict[str, str]]:
    return [{"from": name, "value": text} for name, text in zip(said[::2], said[1::2], strict=True)]


def read(tmp_path: Path, rows: list[dict[str, Any]], kind: Any = "messages") -> tuple[list[dict[str, Any]], str]:
    """What the phases are given of these rows, and the line under the table."""
    report = SourceReport("mine.jsonl", kind, "your own file")
    source = Source(kind=kind, path=write(tmp_path / "mine.jsonl", rows))
    return list(reading.read_rows(source, "data.sources.0", 0, report)), report.note()


def example(row: dict[str, Any], kind: Any = "messages") -> Example | str:
    return CHECKS[kind](row, Source(kind=kind, path="mine.jsonl"), NO_JUDGE)


# ------------------------------------------------------------------------------------------------------ conversations

HI = [user("Hi"), assistant("Hello")]
TALKS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": HI}, HI),
    ("ShareGPT", {"conversations": sharegpt("human", "Hi", "gpt", "Hello")}, HI),
    ("ShareGPT", {"conversations": sharegpt("user", "Hi", "assistant", "Hello")}, HI),
    ("ShareGPT", {"messages": sharegpt("human", "Hi", "chatgpt", "Hello")}, HI),
    ("ShareGPT", {"conversations": sharegpt("system", "Be brief.", "human", "Hi", "gpt", "Hello")}, [SYSTEM, *HI]),
    ("ShareGPT", {"conversations": sharegpt("human", "Hi", "gpt", "Hello"), "system": "Be brief."}, [SYSTEM, *HI]),
    ("messages in conversations", {"conversations": HI}, HI),
    ("messages in conversation", {"conversation": HI}, HI),
    ("messages", {"messages": [{"role": "developer", "content": "Be brief."}, *HI]}, [SYSTEM, *HI]),
    ("messages", {"messages": [SYSTEM, *HI], "system": "Be brief."}, [SYSTEM, *HI]),
    ("Alpaca", {"instruction": "Hi", "output": "Hello"}, HI),
    (
        "Alpaca",
        {"instruction": "Add.", "input": "2, 2", "output": "4", "text": "all"},
        [user("Add.\n2, 2"), assistant("4")],
    ),
    ("Alpaca", {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief."}, [SYSTEM, *HI]),
    (
        "Alpaca",
        {"instruction": "2+2?", "output": "4", "history": [["Hi", "Hello"]]},
        [*HI, user("2+2?"), assistant("4")],
    ),
    ("prompt and completion", {"prompt": "Hi", "completion": "Hello"}, HI),
    ("prompt and completion", {"prompt": [SYSTEM, HI[0]], "completion": [HI[1]]}, [SYSTEM, *HI]),
    ("prompt and completion", {"prompt": "Hi", "completion": "Hello", "system_prompt": "Be brief."}, [SYSTEM, *HI]),
]


@pytest.mark.parametrize(("name", "row", "messages"), TALKS)
def test_conversations_of_every_format(
    tmp_path: Path, name: str, row: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    nulls = dict.fromkeys(("messages", "conversations", "chosen", "label"))  # as parquet fills up its columns
    for given_row in (row, nulls | row):
        [found], note = read(tmp_path, [given_row])
        assert found["messages"] == messages
        assert note.endswith(f"; {name}, 1 row") or f"; {name}, 1 row; columns not read: " in note
        kept = example(found)
        assert isinstance(kept, Example) and kept.dialogues == [messages] and not kept.cut


def test_the_table_says_what_was_recognised(
    tmp_path: Path, tiny_chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": 1, "conversations": sharegpt("human", f"Hi {n}", "gpt", "Hello")} for n in range(1204)]
    rows += [{"instruction": "a", "output": "b", "source": "x", "lang": None}]
    load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    assert "; ShareGPT, 1,204 rows; Alpaca, 1 row; columns not read: id, source\n" in capsys.readouterr().out


def test_a_column_that_was_used_is_never_called_unread(tmp_path: Path) -> None:
    orca = [{"question": "q", "system": each} | ANSWERS for each in ("", "Be brief.", None)]
    assert read(tmp_path, orca, "preferences")[1].endswith("; Orca pairs, 3 rows")
    talks = [{"messages": HI, "tools": each, "images": []} for each in ("", "[]", "null", [], [CALL], None)]
    assert read(tmp_path, talks)[1].endswith("; messages, 6 rows")
    asked = [{"prompt": "Hi", "tools": each} for each in ("[]", "[1]")]
    assert read(tmp_path, asked, "prompts")[1].endswith("; prompts, 2 rows")
    assert read(tmp_path, [{"text": "a", "system": "Be brief."}])[1].endswith("; columns not read: system")


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text()), max_size=5))
def test_keys_are_renamed_as_trl_renames_them(said: list[tuple[str, str]]) -> None:
    rows = [{"conversations": [{"from": role, "value": text} for role, text in said]} for _ in range(2)]
    ours, theirs = reading.formats.as_dialogue(rows[0]), maybe_convert_to_chatml(rows[1])
    assert not isinstance(ours, str) and ours.row["messages"] == theirs["messages"]


def test_a_last_turn_without_an_answer_is_cut_and_counted(tmp_path: Path, tiny_chat: Chat) -> None:
    rows = [
        {"messages": [*HI, user("Bye")]},
        {"conversations": sharegpt("human", "2+2?", "gpt", "4", "human", "And", "human", "now?")},
        {"messages": [user("No answer")]},
        {"messages": [user("a"), assistant("b")]},
    ]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    report = data.table.sources[0]
    assert (report.dropped, report.cut, report.train) == ({"does not end with the assistant": 1}, 2, 3)
    assert sorted(answers(tiny_chat, data.train)) == ["4", "Hello", "b"]
    account(data.table)
    whole = [tiny_chat.decode([*row["input_ids"], tiny_chat.stop_id]) for row in rows_of(data.train)]
    assert not any("Bye" in text or "now?" in text for text in whole)


def test_contents_may_be_parts_of_text(tmp_path: Path) -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "image_url": None} for text in texts]

    [row], _ = read(tmp_path, [{"messages": [user(parts("H", "i")), assistant(parts("Hello"))]}])
    kept = example(row)
    assert isinstance(kept, Example) and kept.dialogues == [HI]
    other = {"type": "image_url", "image_url": {"url": "a.png"}}
    assert example({"messages": [user([*parts("What?"), other]), HI[1]]}) == "content with parts that are not text"
    empty = {"type": "text", "text": None}
    assert example({"messages": [user([empty]), HI[1]]}) == "content with parts that are not text"
    assert example({"messages": [user(["Hi"]), HI[1]]}) == "content is not text"


# ---------------------------------------------------------------------------------------------------------- plain text


def test_plain_text_is_trained_whole_and_ends(tmp_path: Path, tiny_chat: Chat) -> None:
    rows = [{"text": "It rains."}, {"text": "one two " * 100}, {"text": " "}, {"text": None}, {"text": 3}]
    rows += [{"text": "<|im_start|>user\nHi<|im_end|>"}]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows)), max_length=50), tiny_chat)
    report = data.table.sources[0]
    assert report.dropped == {"empty content": 3, "text with control tokens, as a template writes them": 1}
    assert (report.train, report.truncated, report.formats) == (2, 1, {"text": 6})
    short, long = sorted(rows_of(data.train), key=lambda row: len(row["input_ids"]))
    assert short["input_ids"] == [*tiny_chat.content_ids("It rains."), tiny_chat.tokenizer.eos_token_id]
    assert all(short["assistant_masks"]) and len(long["input_ids"]) == 50
    assert long["input_ids"] == tiny_chat.content_ids("one two " * 100)[:50]


def test_plain_text_begins_as_the_tokenizer_begins(tiny_tokenizer: PreTrainedTokenizerFast, tiny_chat: Chat) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|endoftext|>"
    bos: Any = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    chat = Chat.load(tokenizer, None)
    text = Example("a", [[{"role": "plain text", "content": "It rains."}]])
    [begun], [bare] = (encode_dialogues([text], each, 100) for each in (chat, tiny_chat))
    assert isinstance(begun, Sample) and isinstance(bare, Sample)
    assert begun.columns[0].tolist() == [bos, *bare.columns[0].tolist()]
    assert begun.columns[1].tolist() == [0, *bare.columns[1].tolist()]


def test_plain_text_has_no_prompt(tmp_path: Path, tiny_chat: Chat) -> None:
    source = Source(kind="messages", path=write(tmp_path / "a.jsonl", [{"text": "It rains."}]))
    for load in (load_prompts, load_questions):
        with pytest.raises(UserError, match="1 plain text has no prompt"):
            load(section(source), tiny_chat)


# --------------------------------------------------------------------------------------------------------------- pairs

BLUE, NO = assistant("Blue."), assistant("No.")
ASK = user("Name a colour.")
ANSWERS = {"chosen": "Blue.", "rejected": "No."}
HUMAN = "\n\nHuman: Name a colour.\n\nAssistant:"
PAIRS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("prompt, chosen, rejected", {"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "No."}, [ASK]),
    ("prompt, chosen, rejected", {"prompt": [SYSTEM, ASK], "chosen": [BLUE], "rejected": [NO]}, [SYSTEM, ASK]),
    ("prompt, chosen, rejected", ANSWERS | {"prompt": [ASK], "system": "Be brief."}, [SYSTEM, ASK]),
    ("pairs of dialogues", {"chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [ASK]),
    ("pairs of dialogues", {"chosen": [ASK, BLUE], "rejected": [ASK, NO], "system": "Be brief."}, [SYSTEM, ASK]),
    ("pairs of dialogues", {"prompt": "Name a colour.", "chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [ASK]),
    ("pairs of dialogues", {"prompt": [SYSTEM], "chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [SYSTEM, ASK]),
    ("pairs of dialogues", {"prompt": [ASK], "chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [ASK]),
    ("pairs of dialogues", {"prompt": HI, "chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [*HI, ASK]),
    ("pairs of dialogues", {"prompt": [SYSTEM, ASK], "chosen": [ASK, BLUE], "rejected": [ASK, NO]}, [SYSTEM, ASK]),
    (
        "pairs of dialogues",
        {"prompt": [ASK], "chosen": [SYSTEM, ASK, BLUE], "rejected": [SYSTEM, ASK, NO]},
        [SYSTEM, ASK],
    ),
    (
        "pairs of dialogues",
        {
            "chosen": sharegpt("human", "Name a colour.", "gpt", "Blue."),
            "rejected": sharegpt("human", "Name a colour.", "gpt", "No."),
        },
        [ASK],
    ),
    ("HH dialogues", {"chosen": f"{HUMAN} Blue.", "rejected": f"{HUMAN} No."}, [ASK]),
    (
        "HH dialogues",
        {
            "chosen": f"\n\nHuman: Hi\n\nAssistant: Hello{HUMAN} Blue.",
            "rejected": f"\n\nHuman: Hi\n\nAssistant: Hello{HUMAN} No.",
        },
        [*HI, ASK],
    ),
    ("HH dialogues", {"prompt": HUMAN, "chosen": " Blue.", "rejected": " No."}, [ASK]),
    ("HH dialogues", {"prompt": HUMAN, "chosen": f"{HUMAN} Blue.", "rejected": f"{HUMAN} No."}, [ASK]),
    (
        "HH dialogues",
        {"prompt": HUMAN[:-12], "system": "Be brief."}
        | {name: HUMAN[-12:] + text for name, text in (("chosen", " Blue."), ("rejected", " No."))},
        [SYSTEM, ASK],
    ),
    ("HH dialogues", {"prompt": "", "chosen": f"{HUMAN} Blue.", "rejected": f"{HUMAN} No."}, [ASK]),
    (
        "LLaMA-Factory pairs",
        {
            "conversations": sharegpt("system", "Be brief.", "human", "Name a colour."),
            "chosen": {"from": "gpt", "value": "Blue."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        [SYSTEM, ASK],
    ),
    ("Alpaca pairs", ANSWERS | {"instruction": "Name a", "input": "colour."}, [user("Name a\ncolour.")]),
    ("input, chosen, rejected", ANSWERS | {"input": "Name a colour."}, [ASK]),
    ("input, chosen, rejected", ANSWERS | {"input": "Hi", "prompt": "", "system": "Be brief."}, [SYSTEM, HI[0]]),
    ("Orca pairs", ANSWERS | {"input": "no", "question": "Name a colour."}, [ASK]),
    ("Orca pairs", ANSWERS | {"system": "Be brief.", "question": "Name a colour."}, [SYSTEM, ASK]),
    ("Orca pairs", ANSWERS | {"system": "", "question": "Name a colour."}, [ASK]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "prompt"), PAIRS)
def test_pairs_of_every_format(
    tmp_path: Path, tiny_chat: Chat, name: str, row: dict[str, Any], prompt: list[dict[str, Any]]
) -> None:
    [found], note = read(tmp_path, [row], "preferences")
    assert f"; {name}, 1 row" in note
    kept = example(found, "preferences")
    assert isinstance(kept, Example)
    spaces = " " * (row["chosen"] == " Blue.")  # behind a prompt, the answer is the row's own
    assert kept.dialogues == [[*prompt, assistant(spaces + "Blue.")], [*prompt, assistant(spaces + "No.")]]
    # phase 2 and the evaluation read the same
    path = str(tmp_path / "mine.jsonl")
    [pair] = rows_of(load_preferences(section(Source(kind="preferences", path=path)), tiny_chat).train)
    assert pair["prompt_ids"] == tiny_chat.prompt(prompt)
    assert tiny_chat.decode(pair["chosen_ids"]).strip() == "Blue."
    [asked] = reading.evaluation_rows(path, "preferences", "source")
    assert [asked["chosen"], asked["rejected"]] == kept.dialogues


MORE = "\n\nHuman: More?"


@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{HUMAN} Blue.", "rejected": f"{HUMAN} No."},
        {"prompt": HUMAN, "chosen": "Blue.", "rejected": "No."},
        {"chosen": [ASK, BLUE], "rejected": [ASK, NO]},
        {"prompt": [ASK], "chosen": [BLUE], "rejected": [NO]},
        {"conversations": sharegpt("human", "Name a colour."), "chosen": [BLUE], "rejected": [NO]},
    ],
)
def test_a_last_turn_without_an_answer_is_cut_from_pairs(
    tmp_path: Path, tiny_chat: Chat, row: dict[str, Any], ends: tuple[bool, bool]
) -> None:
    longer = dict(row)
    for name, more in zip(("chosen", "rejected"), ends, strict=True):
        if more:
            longer[name] = row[name] + (MORE if isinstance(row[name], str) else [user("More?")])
    source = Source(kind="preferences", path=write(tmp_path / "a.jsonl", [longer]))
    data = load_preferences(section(source), tiny_chat)
    report = data.table.sources[0]
    assert (report.dropped, report.cut, report.train) == ({}, 1, 1)
    [pair] = rows_of(data.train)
    assert pair["prompt_ids"] == tiny_chat.prompt([ASK])
    assert [tiny_chat.decode(pair[f"{name}_ids"]) for name in ("chosen", "rejected")] == ["Blue.", "No."]
    [asked] = reading.evaluation_rows(source.path, "preferences", "source")
    assert [asked["chosen"], asked["rejected"]] == [[ASK, BLUE], [ASK, NO]]


def test_a_turn_with_an_answer_is_not_cut_from_pairs() -> None:
    more = [user("More?"), assistant("Green.")]
    assert example({"chosen": [ASK, BLUE, *more], "rejected": [ASK, BLUE, more[0]]}, "preferences") == (
        "two different prompts"
    )
    found = reading.formats.as_pair({"prompt": HUMAN, "chosen": f"Blue.{MORE}\n\nAssistant: Green.", "rejected": "No."})
    assert not isinstance(found, str) and example(found.row, "preferences") == "two different prompts"
    assert example({"chosen": [ASK], "rejected": [ASK]}, "preferences") == "does not end with the assistant"


def test_an_explicit_prompt_stands_before_the_answers_as_in_trl(tmp_path: Path) -> None:
    row = {"prompt": [SYSTEM], "chosen": [ASK, BLUE], "rejected": [ASK, NO]}
    theirs = maybe_extract_prompt(dict(row))
    [found], note = read(tmp_path, [row], "preferences")
    assert [found[name] for name in ("chosen", "rejected")] == [theirs["prompt"] + theirs["chosen"], [SYSTEM, ASK, NO]]
    assert "not read" not in note
    [found], _ = read(tmp_path, [row | {"prompt": [user("Another.")]}], "preferences")
    assert example(found, "preferences") == "roles do not alternate"  # and not another prompt in silence


def test_an_implicit_prompt_is_the_one_that_trl_finds() -> None:
    for chosen, rejected in (([ASK, BLUE], [ASK, NO]), ([*HI, ASK, BLUE], [*HI, ASK, NO])):
        theirs = extract_prompt({"chosen": chosen, "rejected": rejected})
        kept = example({"chosen": chosen, "rejected": rejected}, "preferences")
        assert isinstance(kept, Example)
        assert [theirs["prompt"], theirs["chosen"]] == [kept.dialogues[0][:-1], kept.dialogues[0][-1:]]


@pytest.mark.parametrize(
    ("kind", "row", "parts"),
    [
        ("preferences", ANSWERS, ["chosen, rejected", "chosen and rejected are text, and there is no prompt"]),
        (
            "preferences",
            ANSWERS | {"query": "Hi"},
            ["chosen, query, rejected", "there is no prompt", "Rename the columns"],
        ),
        ("preferences", {"chosen": [ASK, BLUE], "rejected": "No."}, ["rejected is text, and there is no prompt"]),
        ("preferences", {"prompt": "Hi", "completion": "Hello", "label": True}, ["KTO", "prompt, chosen and rejected"]),
        ("messages", {"prompt": "Hi", "completion": "Hello", "label": False}, ["KTO", "phase 1"]),
        ("messages", {"conversations": HI, "kto_tag": False}, ["KTO"]),
        ("preferences", {"messages": HI}, ["rows of one answer (messages)", "phase 1", "kind: messages"]),
        ("preferences", {"instruction": "Hi", "output": "Hello"}, ["rows of one answer (Alpaca)"]),
        ("messages", {"prompt": "Hi"} | ANSWERS, ["pairs of answers", "phase 2", "kind: preferences"]),
        ("messages", {"conversations": HI[:1]} | ANSWERS, ["pairs of answers"]),
        (
            "messages",
            {"query": "Hi"} | ANSWERS,
            ["for phase 2", "but chosen and rejected are text, and there is no prompt"],
        ),
        ("messages", {"prompt": "Hi", "chosen": 3, "rejected": "No."}, ["for phase 2", "but column chosen should be"]),
        ("messages", {"prompt": "Hi"}, ["has the columns prompt", "instruction and output", "text"]),
        ("messages", {"prompt": 3, "completion": "Hello"}, ["column prompt should be text or a list of messages", "3"]),
        ("messages", {"conversations": "Hi"}, ["column conversations should be a list of messages"]),
        ("messages", {"instruction": "a", "output": "b", "history": [["a"]]}, ["column history"]),
        ("preferences", {"prompt": {"a": 1}} | ANSWERS, ["column prompt should be text or a list of messages"]),
    ],
)
def test_rows_in_no_format_are_told_what_there_is(
    tmp_path: Path, kind: Any, row: dict[str, Any], parts: list[str]
) -> None:
    good = {"messages": HI} if kind == "messages" else {"chosen": [ASK, BLUE], "rejected": [ASK, NO]}
    path = write(tmp_path / "mine.jsonl", [good, row])
    with pytest.raises(UserError) as told:
        list(reading.read_rows(Source(kind=kind, path=path), "data.sources.0", 0))
    for part in (*parts, "data.sources.0", "line 2", path):
        assert part in str(told.value)
    assert "\n" not in str(told.value)


LABELS = (True, False, 0, 1, 1.0, -1, "0", "1", "False ", " true", "TRUE", "no", "Yes", "good", "bad", "rejected")


@pytest.mark.parametrize("label", [*LABELS, "so-so", 0.3, 7])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_label_beside_a_completion_is_kto_s_however_it_is_spelled(tmp_path: Path, name: str, label: object) -> None:
    path = saved(tmp_path / name, [{"prompt": "p", "completion": "a bad answer", "label": label}])
    for kind in ("messages", "preferences"):
        source = Source(kind=kind, path=path)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"This is KTO's format.* Rename it if it has another meaning"):
            list(reading.read_rows(source, "data.sources.0", 0))
    with pytest.raises(UserError, match="KTO"):
        command.main([path])


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("talk", [{"messages": HI}, {"instruction": "Hi", "output": "Hello"}])
def test_a_label_that_calls_an_answer_good_or_bad_is_kto_s_in_every_format(talk: dict[str, Any], label: object) -> None:
    assert reading.formats.as_dialogue(talk | {"label": label}) == reading.formats.KTO
    assert reading.formats.as_dialogue(talk | {"kto_tag": label}) == reading.formats.KTO


@pytest.mark.parametrize(
    "row",
    [
        {"text": "It rains.", "label": 1},  # as sets for classification have it
        {"messages": HI, "label": "billing"},
        {"prompt": "Hi", "completion": "Hello", "label": None},
        {"prompt": "Hi", "completion": "Hello", "label": " ", "kto_tag": ""},
        {"messages": HI, "label": ""},
    ],
)
def test_a_label_that_judges_no_answer_is_not_read(row: dict[str, Any]) -> None:
    found = reading.formats.as_dialogue(row)
    assert not isinstance(found, str) and not {"label", "kto_tag"} & found.columns


@pytest.mark.parametrize(("name", "row", "_"), PAIRS)
def test_what_phase_1_sends_to_phase_2_is_read_there(name: str, row: dict[str, Any], _: object) -> None:
    assert reading.formats.as_dialogue(row) == "These are pairs of answers: phase 2 reads them (kind: preferences)"
    found = reading.formats.as_pair(row)
    assert not isinstance(found, str) and found.format == name


def test_pairs_that_cannot_be_compared_are_dropped_under_their_own_reason(tmp_path: Path, tiny_chat: Chat) -> None:
    rows = {
        "no prompt before the answer": {"chosen": [BLUE], "rejected": [NO]},
        "empty content": {"prompt": "", "chosen": "Blue.", "rejected": "No."},
        "does not end with the assistant": {"chosen": "\n\nHuman: Hi", "rejected": "\n\nHuman: Hi"},
        "a role other than system, user and assistant": {"chosen": f"Well.{HUMAN} a", "rejected": f"Well.{HUMAN} b"},
        "two different prompts": {"chosen": [ASK, BLUE], "rejected": [user("b"), NO]},
        "an answer that is not to be trained whole": {"prompt": "a", "chosen": [BLUE | {"train": 0}], "rejected": [NO]},
        "calls of tools": {"prompt": "a", "chosen": [BLUE], "rejected": [NO | {"tool_calls": [{"id": 1}]}]},
        "thoughts beside the content": {"prompt": "b", "chosen": [BLUE | {"reasoning": "Hm"}], "rejected": [NO]},
        "names of speakers": {"prompt": [ASK | {"name": "Al"}], "chosen": [BLUE], "rejected": [NO]},
    }  # fmt: skip
    marked = {"prompt": "c", "chosen": [assistant("It is blue.") | {"mask_spans": [[0, 6]]}], "rejected": "No."}
    good = {
        "chosen": [*HI[:1], HI[1] | {"weight": 0}, ASK, BLUE],
        "rejected": [*HI, ASK, NO],
    }  # a prompt is not trained
    path = write(tmp_path / "a.jsonl", [*rows.values(), marked, good])
    data = load_preferences(section(Source(kind="preferences", path=path)), tiny_chat)
    expected = dict.fromkeys(rows, 1) | {"an answer that is not to be trained whole": 2}
    assert data.table.sources[0].dropped == expected
    assert [row["prompt_ids"] for row in rows_of(data.train)] == [tiny_chat.prompt([*HI, ASK])]
    account(data.table)


@pytest.mark.parametrize("kind", ["messages", "preferences", "prompts"])
def test_whatever_stands_in_a_row_it_is_kept_dropped_or_told(tiny_chat: Chat, kind: Any) -> None:
    """A value changed at random in a row of each format: never an exception, and what is kept becomes token ids."""
    rng = random.Random(f"formats {kind}")
    rows = [row for _, row, _ in (PAIRS if kind == "preferences" else TALKS)] + [{"prompt": "Hi"}, {"text": "Hi"}]
    recognise = reading.FORMATS[kind][0]
    outcomes: set[str] = set()
    for number in range(2000):
        row = replaced(rows[number % len(rows)], rng)
        found = recognise(
            row if isinstance(row, dict) else {"text": row, "prompt": row, "chosen": row, "rejected": row}
        )
        kept = found if isinstance(found, str) else example(found.row, kind)
        outcomes.add(type(found).__name__ + type(kept).__name__)
        if isinstance(kept, Example):
            encode_prompts([kept], tiny_chat, 100)
            encoded = encode_pairs if kind == "preferences" else encode_dialogues
            assert kind == "prompts" or len(encoded([kept], tiny_chat, 100)) == 1
    assert outcomes == {"strstr", "Recognisedstr", "RecognisedExample"}


# ------------------------------------------------------------------------------------------------- keys of a message

CALL = {"type": "function", "function": {"name": "lookup", "arguments": "{}"}}
REASONS: list[tuple[str, dict[str, Any]]] = [
    ("calls of tools that cannot be read", assistant("I look it up.") | {"tool_calls": ["lookup"]}),
    ("calls of tools that cannot be read", assistant("") | {"function_call": {"name": "lookup", "arguments": "{"}}),
    ("calls of tools that cannot be read", {"from": "function_call", "value": "lookup"}),
    ("calls of tools that cannot be read", user("Look.") | {"tool_calls": [CALL]}),
    ("roles do not alternate", {"role": "tool", "content": "4", "tool_call_id": "1"}),
    ("thoughts beside the content", assistant("4") | {"reasoning_content": "2 and 2"}),
    ("thoughts beside the content", assistant("4") | {"thinking": "2 and 2"}),
    ("pictures, sound or files", assistant("4") | {"images": ["a.png"]}),
    ("names of speakers", assistant("4") | {"name": "Al"}),
    ("refusals beside the content", assistant("4") | {"refusal": "I cannot."}),
    ("unknown key of a message: mood", assistant("4") | {"mood": "calm"}),
    (r"unknown key of a message: '\x1b[2J'", assistant("4") | {"\x1b[2J": 1}),
    ("weight of a message is neither 0 nor 1", assistant("4") | {"weight": 0.5}),
    ("train of a message is neither 0 nor 1", assistant("4") | {"train": "no"}),
    ("roles do not alternate", {"from": "observation", "value": "4"}),
    ("a role other than system, user and assistant", {"from": "critic", "value": "4"}),
]


@pytest.mark.parametrize(("reason", "message"), REASONS)
def test_a_key_that_changes_what_a_message_means_takes_its_row(
    tmp_path: Path, tiny_chat: Chat, reason: str, message: dict[str, Any]
) -> None:
    rows = [{"messages": [user("2+2?"), message, user("And 3+3?"), assistant("6")]}, {"messages": HI}]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    assert data.table.sources[0].dropped == {reason: 1}
    assert answers(tiny_chat, data.train) == ["Hello"]


def test_keys_that_change_nothing_and_keys_without_a_value_are_passed_over(tmp_path: Path, tiny_chat: Chat) -> None:
    ours = dict.fromkeys(IGNORED, "x")
    nothing = {"tool_calls": None, "name": "", "function_call": {}, "images": [], "weight": None, "mood": None}
    rows = [{"messages": [user("Hi") | ours | nothing, assistant("Hello") | ours | nothing], "tools": "[]"}]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    assert data.table.sources[0].dropped == {} and answers(tiny_chat, data.train) == ["Hello"]


@pytest.mark.parametrize(
    ("column", "reason"),
    [("tools", "calls of tools"), ("images", "pictures, sound or files"), ("audio", "pictures, sound or files")],
)
def test_columns_beside_the_messages_that_matter(column: str, reason: str) -> None:
    of_tools = "tools that are not schemas of functions"  # others are trained
    assert example({"messages": HI, column: [{"kind": "lookup"}]}) == (of_tools if column == "tools" else reason)
    assert example({"prompt": "a", "chosen": "b", "rejected": "c", column: "[1]"}, "preferences") == reason
    assert example({"prompt": "a", column: "[1]"}, "prompts") == reason


ONE_ANSWER: list[dict[str, Any]] = [
    {"messages": HI}, {"conversations": HI}, {"instruction": "Hi", "output": "Hello"},
    {"prompt": "Hi", "completion": "Hello"}, {"text": "It rains."},
]  # fmt: skip
OF_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"tool_calls": [CALL]}, "calls of tools"),
    ({"tool_calls": json.dumps([CALL])}, "calls of tools"),
    ({"function_call": {"name": "lookup"}}, "calls of tools"),
    ({"reasoning_content": "2 and 2"}, "thoughts beside the content"),
    ({"thinking": "2 and 2"}, "thoughts beside the content"),
    ({"attachments": ["a.pdf"]}, "pictures, sound or files"),
    ({"weight": 0}, "marked as not to be trained"),
    ({"weight": 0.0, "train": True}, "marked as not to be trained"),
    ({"weight": "0"}, "marked as not to be trained"),
    ({"train": False}, "marked as not to be trained"),
    ({"train": "False "}, "marked as not to be trained"),
    ({"training": False}, "marked as not to be trained"),
    ({"loss": False}, "marked as not to be trained"),
    ({"weight": 0.5}, "weight of a row is neither 0 nor 1"),
    ({"train": "no"}, "train of a row is neither 0 nor 1"),
]


@pytest.mark.parametrize(("columns", "reason"), OF_ROWS)
def test_a_column_that_changes_what_a_row_means_takes_the_row(
    tmp_path: Path, columns: dict[str, Any], reason: str
) -> None:
    for talk in ONE_ANSWER:
        [row], note = read(tmp_path, [talk | columns])
        assert example(row) == reason and "not read" not in note
    for kind, talk in (("preferences", {"prompt": "a"} | ANSWERS), ("prompts", {"prompt": "a"})):
        [row], note = read(tmp_path, [talk | columns], kind)
        thoughts = kind == "prompts" and reason in ("thoughts beside the content", "calls of tools")
        files = kind == "prompts" and "attachments" in columns
        expected = reason if not (thoughts or files) else None  # which belong to an answer that is not read
        found = example(row, kind)
        assert (found if isinstance(found, str) else None) == expected
        assert ("not read" in note) == (expected is None)


def test_columns_that_say_nothing_and_those_of_other_meaning_keep_the_row(tmp_path: Path) -> None:
    said = {"weight": 1, "train": "True", "loss": "", "training": None, "tool_calls": "[]", "reasoning": ""}
    for talk in ONE_ANSWER:
        [row], note = read(tmp_path, [talk | said | {"name": "a set", "mood": "calm"}])
        assert isinstance(example(row), Example) and note.endswith("; columns not read: mood, name")
    # an evaluation trains on nothing
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "weight": 0} | ANSWERS])
    assert len(reading.evaluation_rows(path, "preferences", "source")) == 1


def test_a_source_of_rows_that_are_not_trained_says_what_to_change(tmp_path: Path, tiny_chat: Chat) -> None:
    for weight, words in ((0, "remove that column to train on them"), (2.5, "Write 0 or 1 into the column `weight`")):
        source = Source(kind="messages", path=write(tmp_path / "a.jsonl", [{"messages": HI, "weight": weight}]))
        with pytest.raises(UserError, match=words):
            load_sft(section(source), tiny_chat)


def test_a_user_s_message_cannot_be_trained() -> None:
    assert example({"messages": [HI[0] | {"train": True}, HI[1]]}) == "a message to be trained that is not an answer"
    assert isinstance(example({"messages": [HI[0] | {"train": False, "weight": 0}, HI[1] | {"weight": 1}]}), Example)


def test_names_of_keys_cannot_fill_the_table(tmp_path: Path, tiny_chat: Chat) -> None:
    rows = [{"messages": [user("Hi"), assistant("Hello") | {f"key {n}": 1}]} for n in range(100)]
    rows += [{"messages": HI, "tools": [1]}, {"messages": HI}]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    dropped = data.table.sources[0].dropped
    assert len(dropped) == 41 and dropped["other reasons"] == 61
    account(data.table)


MARKS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, True),
    "null": ({"weight": None}, True),
    "weight 0": ({"weight": 0}, False),
    "weight 0.0": ({"weight": 0.0}, False),
    "weight 1": ({"weight": 1}, True),
    "train false": ({"train": False}, False),
    "train true": ({"train": True, "mask_spans": []}, True),
    "training false": ({"training": False}, False),
    "loss 0": ({"loss": False}, False),
    "both": ({"weight": 1, "train": False}, False),
    "both, in another order": ({"train": False, "weight": 1}, False),
}
contents = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip)
turns = st.lists(st.tuples(contents, contents, st.sampled_from(sorted(MARKS))), min_size=1, max_size=5)


@given(turns=turns, system=st.booleans(), share=st.booleans())
@settings(deadline=None)
def test_marks_mask_exactly_the_answers_that_they_stand_on(
    turns: list[tuple[str, str, str]], system: bool, share: bool
) -> None:
    """The ids are those of the dialogue without marks; the mask loses those answers, with their stop tokens, alone."""
    chat = CHATS[0]
    plain = [SYSTEM] * system
    marked: list[dict[str, Any]] = list(plain)
    for asked, told, mark in turns:
        plain = [*plain, user(asked), assistant(told)]
        marked += [user(asked), assistant(told) | MARKS[mark][0]]
    if share:
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        keys = ("role", "content")
        marked = [
            {"from": names[m["role"]], "value": m["content"]} | {key: m[key] for key in m if key not in keys}
            for m in marked
        ]
    found = reading.formats.as_dialogue({"conversations" if share else "messages": marked})
    assert not isinstance(found, str)
    kept = example(found.row)
    assert isinstance(kept, Example) and not kept.cut
    whole = chat.encode(plain)
    expected, answer = [], -1
    for place, on in enumerate(whole.mask):
        answer += on and (place == 0 or not whole.mask[place - 1])
        expected.append(on and MARKS[turns[answer][2]][1])
    [sample] = encode_dialogues([kept], chat, 100_000)
    if not any(expected):
        assert sample == "no trained token"
        return
    assert isinstance(sample, Sample)
    ids, mask = (column.tolist() for column in sample.columns)
    assert ids == whole.ids and mask == [int(on) for on in expected]
    stops = [place for place, token in enumerate(ids) if token == chat.stop_id and mask[place]]
    assert len(stops) == sum(MARKS[mark][1] for *_, mark in turns)


CHATS: list[Chat] = []


@pytest.fixture(autouse=True, scope="module")
def chat_of_the_properties(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    CHATS[:] = [Chat.load(copy.deepcopy(tiny_tokenizer), None)]


def test_a_long_dialogue_ends_with_a_trained_answer(tiny_chat: Chat) -> None:
    said = [message for n in range(9) for message in (user(f"Question {n}?"), assistant("Yes."))]
    said[7] |= {"weight": 0}
    kept = example({"messages": said})
    assert isinstance(kept, Example)
    ends = [place + 1 for place, on in enumerate(tiny_chat.encode(said).mask) if on]
    fourth = len(tiny_chat.encode(said[:8]).ids)
    [sample] = encode_dialogues([kept], tiny_chat, fourth)
    assert isinstance(sample, Sample) and sample.truncated
    assert len(sample.columns[0]) == max(end for end in ends if end <= len(tiny_chat.encode(said[:6]).ids))


def test_rows_that_differ_in_their_marks_are_two(tmp_path: Path, tiny_chat: Chat) -> None:
    talk = [*HI, user("2+2?"), assistant("4")]
    marked = [talk[0], talk[1] | {"train": False}, *talk[2:]]
    rows = [{"messages": each} for each in (talk, marked, marked)]
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows))), tiny_chat)
    assert data.table.sources[0].dropped == {"seen before": 1}
    assert sorted(trained_text(tiny_chat, row) for row in rows_of(data.train)) == [["4"], ["Hello", "4"]]


# --------------------------------------------------------------------------------------------------------------- files


def saved(path: Path, rows: list[dict[str, Any]]) -> str:
    """These rows in a file of the format that its name says."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name in ("array.json", "array.json.gz"):
        text = json.dumps(rows, indent=1)
    if ".csv" in path.name:
        with path.with_name("plain.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        text = path.with_name("plain.csv").read_text(encoding="utf-8")
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8", newline="")
    return str(path)


FILES = ("a.jsonl", "a.jsonl.gz", "array.json", "array.json.gz", "lines.json", "a.csv", "a.csv.gz", "a.parquet")


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_rows(tmp_path: Path, tiny_chat: Chat, name: str) -> None:
    rows = [
        {"instruction": f'Say "{n}",\nplease\u2028.', "input": "" if n else "5", "output": f"It's {n}; \u00e9."}
        for n in range(5)
    ]
    found = list(reading.read_rows(Source(kind="messages", path=saved(tmp_path / name, rows)), "data.sources.0", 0))
    plain = list(reading.read_rows(Source(kind="messages", path=write(tmp_path / "plain.jsonl", rows)), "key", 0))
    assert found == plain and len(found) == 5
    pairs = [{"prompt": f"p{n}", "chosen": "a" * 200_000, "rejected": "b", "score_chosen": n, "score_rejected": 2.5}
             for n in range(5)]  # fmt: skip
    source = Source(kind="preferences", path=saved(tmp_path / name, pairs), min_margin=0.5)
    kept = [CHECKS["preferences"](row, source, NO_JUDGE) for row in reading.read_rows(source, "key", 0)]
    assert [isinstance(each, Example) for each in kept] == [False] * 4 + [True]


def test_messages_in_cells_of_csv_are_json(tmp_path: Path) -> None:
    rows = [{"messages": json.dumps(HI), "id": "7"}, {"messages": json.dumps(HI[::-1]), "id": ""}]
    found = list(reading.read_rows(Source(kind="messages", path=saved(tmp_path / "a.csv", rows)), "key", 0))
    assert [row["messages"] for row in found] == [HI, HI[::-1]]
    pair = {"conversations": json.dumps(HI[:1]), "chosen": json.dumps(HI[1]), "rejected": json.dumps(NO)}
    [row] = reading.read_rows(Source(kind="preferences", path=saved(tmp_path / "b.csv", [pair])), "key", 0)
    assert isinstance(example(row, "preferences"), Example)
    path = saved(tmp_path / "c.csv", [{"prompt": "a", "chosen": "[1]", "rejected": "[{"}])
    [row] = reading.read_rows(Source(kind="preferences", path=path), "key", 0)
    assert (row["chosen"], row["rejected"]) == ("[1]", "[{")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.csv", b"prompt,completion\na,b\nc\n", ["line 3", "has 1 cells, its header 2", "prompt, completion"]),
        ("a.csv", b"prompt;completion\na, b;c\n", ["line 2", "has 2 cells, its header 1", "separated by commas"]),
        ("a.csv", b"text,text\na,b\n", ["names a column twice"]),
        ("a.csv", b'prompt,completion\na,"b\n', ["line 2", "is not CSV"]),
        ("a.csv", b"prompt,completion\na,\xe9\n", ["is not UTF-8", "0xe9"]),
        ("a.json", b'[{"text": "a"}, 3]', ["row 2", "is 3, not a JSON object"]),
        ("a.json", b'[{"text": "a"}, {"text": ]', ["is not a JSON array", "line 1 column 26"]),
        ("a.json", b"[" * 100_000, ["is not a JSON array"]),
        ("a.json", b'{\n "text": "a"\n}', ["line 1", "is not JSON"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a\n', ["line 2", "is not JSON"]),
        ("a.jsonl", b"[1, 2]", ["line 1", "not a JSON object"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "is not JSON"]),
        ("a.jsonl", b'{"text": ' + b"9" * 5001 + b"}", ["line 1", "is not JSON"]),
        ("a.jsonl", b'{"text": "\xe9"}\n', ["line 1", "is not UTF-8 text (byte 0xe9 at place 11)"]),
        ("a.parquet", b"no parquet", ["cannot be read as a parquet file"]),
        ("a.txt", b'{"text": "a"}\n', ["is not a .jsonl, .json, .csv"]),
        ("a.jsonl.gz", b"no gzip", ["cannot be read", "gzip"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20], ["cannot be read"]),
        ("a.jsonl", b'{"text": "' + b"a" * 2000 + b'"}', ["line 1", "more than 1,000 bytes"]),
        ("a.json", b'[{"text": "' + b"a" * 2000 + b'"}]', ["more than 1,000 bytes"]),
    ],
)
def test_damaged_files_are_told_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, parts: list[str]
) -> None:
    if any("1,000" in part for part in parts):
        monkeypatch.setattr(local_rows, "LONGEST_LINE", 1000)
        monkeypatch.setattr(local_rows, "LONGEST_ARRAY", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as told:
        list(reading.read_rows(Source(kind="messages", path=str(tmp_path / name)), "data.sources.0", 0))
    for part in (*parts, "data.sources.0", str(tmp_path / name)):
        assert part in str(told.value)
    assert "\n" not in str(told.value) and len(str(told.value)) < 1000


def test_known_sets_have_their_own_kind() -> None:
    assert {hub.path: kind for kind, hub in reading.TRAINING.items()} == HUB_KINDS


# ----------------------------------------------------------------------------------------------------- without an end


def test_a_text_that_cannot_fit_is_never_tokenised(
    tmp_path: Path, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer takes 200 bytes for each character, so 50 MB would take ten gigabytes."""
    endless = "word and " * 150_000
    rows = [
        {"messages": [user(endless), assistant("never read")]},
        {"messages": [*HI, user(endless), assistant("never read")]},
        {"messages": [user("2+2?"), assistant("4")]},
        {"text": endless},
    ]
    read: list[int] = []
    tokenise = tiny_chat._content_ids
    monkeypatch.setattr(tiny_chat, "_content_ids", lambda texts: read.append(sum(map(len, texts))) or tokenise(texts))
    data = load_sft(section(Source(kind="messages", path=write(tmp_path / "a.jsonl", rows)), max_length=60), tiny_chat)
    report = data.table.sources[0]
    assert (report.dropped, report.truncated, report.train) == ({"longer than 60 tokens": 1}, 2, 3)
    assert sum(read) < 1_100_000
    pairs = [{"prompt": "a", "chosen": "b", "rejected": endless}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    path = write(tmp_path / "b.jsonl", pairs)
    read.clear()
    pairs_kept = load_preferences(section(Source(kind="preferences", path=path), max_length=60), tiny_chat)
    assert pairs_kept.table.sources[0].dropped == {"longer than 60 tokens": 1} and sum(read) < 1000
    for load in (load_prompts, load_questions):
        prompts = [{"prompt": endless}, {"prompt": "Hi"}, {"prompt": [*HI, user(endless)]}]
        source = Source(kind="prompts", path=write(tmp_path / "c.jsonl", prompts))
        with MathJudge():
            table: Any = load(section(source, max_length=60), tiny_chat)[-1]
        assert table.sources[0].dropped == {"longer than 60 tokens": 2} and sum(read) < 1000


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("questions", {"question": "a" * 101, "answer": 4}),
        ("recall", {"messages": [*HI, user("a" * 101)], "answer": "b"}),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c" * 101}),
        (
            "instructions",  # whose lists are not of messages, though a name may have `content` in it
            {"prompt": "a" * 101, "instruction_id_list": ["detectable_content:postscript"], "kwargs": [None]},
        ),
    ],
)
def test_an_evaluation_refuses_a_text_that_no_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, row: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    assert len(reading.evaluation_rows(path, kind, "suites.x.source")) == 1
    monkeypatch.setattr(reading, "LONGEST_TEXT", 100)
    with pytest.raises(UserError, match=r"line 1 of .*a text of 101 characters"):
        reading.evaluation_rows(path, kind, "suites.x.source")


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_shows_rows_as_the_model_sees_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = sharegpt("human", "Hi \x1b[2J", "gpt", "Hello", "human", "2+2?", "gpt", "4\u00e9")
    talk[1] |= {"weight": 0}  # type: ignore[dict-item]
    rows = [{"conversations": talk}, {"conversations": [*talk[:2], talk[1] | {"mood": "calm"}]}]
    command.main([write(tmp_path / "mine.jsonl", rows)])
    out = capsys.readouterr().out
    assert "ShareGPT, 2 rows" in out and "- unknown key of a message: mood" in out
    assert "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n2+2?" in out
    assert "<|im_start|>assistant\n[[4\u00e9<|im_end|>]]" in out
    assert "\x1b" not in out and r"Hi \x1b[2J" in out
    lengths = {line[:32].strip(): line[32:].split() for line in out.splitlines()}
    assert len(set(lengths["a row"])) == 1 and lengths["of it trained"] == ["4"] * 5


def test_the_command_takes_tokenizer_and_template_of_a_model_without_weights(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, tiny_chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(vocab_size=512).save_pretrained(tmp_path / "model")
    tiny_chat.save(tmp_path / "model")
    rows = [{"chosen": f"{HUMAN} {n} blue.", "rejected": f"{HUMAN} {n} no."} for n in range(5)]
    command.main([write(tmp_path / "mine.jsonl", rows), "--model", str(tmp_path / "model")])
    out = capsys.readouterr().out
    assert "preferences: " in out and "HH dialogues, 5 rows" in out
    assert out.count("prompt:\n<|im_start|>user\nName a colour.<|im_end|>") == 3
    assert "chosen:\n[[" in out and " blue.<|im_end|>]]" in out
    lengths = {line[:32].strip(): line[32:].split() for line in out.splitlines()}
    assert lengths["a prompt"] == [str(len(tiny_chat.prompt([ASK])))] * 5 and "tokens" in lengths
    with pytest.raises(UserError, match="5 longer than 8 tokens"):
        command.main([str(tmp_path / "mine.jsonl"), "--model", str(tmp_path / "model"), "--max-length", "8"])
    with pytest.raises(UserError, match="is neither a folder nor a name"):
        command.main([str(tmp_path / "mine.jsonl"), "--model", str(tmp_path / "none")])
    with pytest.raises(UserError, match=r"The tokenizer of .* cannot be loaded"):
        command.main([str(tmp_path / "mine.jsonl"), "--model", str(tmp_path)])


def test_the_command_shortens_long_rows_and_refuses_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([write(tmp_path / "mine.jsonl", [{"text": "word " * 2000}] * 2), "--rows", "8"])
    out = capsys.readouterr().out
    assert "characters are left out here" in out and len(out) < 8000 and "seen before" in out
    with pytest.raises(UserError, match=r"nothing.jsonl does not exist"):
        command.main([str(tmp_path / "nothing.jsonl")])
    with pytest.raises(SystemExit) as left:
        command.main([str(tmp_path / "mine.jsonl"), "--rows", "0"])
    assert left.value.code == 2
