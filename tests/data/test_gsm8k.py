"""Do GSM8K's rows become answers that evaluation reads, and can a held-out question ever be trained on?"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from envs.math_judge import MathJudge, last_number
from posttrain.config.data import DataSection
from posttrain.config.evaluation import EvaluateRun
from posttrain.data import gsm8k
from posttrain.data.loading import load_prompts, load_questions, load_sft
from posttrain.evaluation.tasks import build_tasks
from posttrain.models.chat import Chat
from posttrain.types import UserError

ROW = {"question": "Anna has 48 clips, Ben half as many. How many?", "answer": "48/2 = <<48/2=24>>24.\n#### 1,072"}


def split(file: Path, count: int = 280, **changes: Any) -> tuple[Path, list[str]]:
    """A file of distinct questions, and which of them are held out."""
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"{n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(count)
    ]
    rows = [row | changes for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, [row["question"] for row in rows if gsm8k.is_held_out(row["question"])]


def section(path: Path, **changes: Any) -> DataSection:
    given = {"sources": [{"kind": "gsm8k", "path": str(path)}], "max_length": 256, "decontaminate": False}
    return DataSection.model_validate(given | changes)


def evaluation(source: str, n: int = 500) -> EvaluateRun:
    return EvaluateRun.model_validate(
        {
            "output_dir": "x",
            "checkpoints": {"base": "y"},
            "settings": [{"name": "greedy", "temperature": 0}],
            "suites": {"math": {"sources": [source], "n": n}},
        }
    )


def test_an_answer_ends_in_the_box_that_evaluation_reads():
    assert gsm8k.worked_answer(ROW["answer"]) == "48/2 = 24.\nThe answer is \\boxed{1072}."
    with MathJudge() as judge:
        assert judge.correct(gsm8k.worked_answer(ROW["answer"]), "1072")
    assert gsm8k.final("no number") is None and gsm8k.final("steps\n####  ") is None and gsm8k.final("#### 3") is None


def test_the_side_of_a_question_is_its_own():
    assert gsm8k.is_held_out("What is\n 1 + 1?") == gsm8k.is_held_out("what is 1 + 1?")
    share = sum(gsm8k.is_held_out(f"question {n}") for n in range(7473))
    assert abs(share - 7473 / gsm8k.SHARE) < 80


def test_no_question_is_trained_on_and_asked(tmp_path: Path, tiny_chat: Chat):
    file, held_out = split(tmp_path / "rows.jsonl")
    assert len(held_out) >= 10
    data = load_sft(section(file), tiny_chat)
    (report,) = data.table.sources
    assert report.dropped == {"held out for the evaluation": len(held_out)}
    trained = {tiny_chat.decode(row) for part in (data.train, data.eval) for row in part["input_ids"]}
    assert not any(question in text for question in held_out for text in trained)
    assert any("\\boxed{14}" in text for text in trained) and not any("<<" in text for text in trained)
    prompts = load_prompts(section(file), tiny_chat)
    assert len(prompts.train) + len(prompts.eval) == 280 - len(held_out)

    (task,) = build_tasks(evaluation(f"gsm8k_held_out={file}"))
    assert [item["messages"][0]["content"] for item in task.items] == held_out
    assert task.items[0]["answer"] == str(2 * int(held_out[0].split()[2])) and task.source == "gsm8k_held_out"
    (few,) = build_tasks(evaluation(f"gsm8k_held_out={file}", n=3))
    assert len(few.items) == 3


def test_rows_that_share_text_with_a_held_out_question_go(tmp_path: Path, tiny_chat: Chat):
    file, held_out = split(tmp_path / "rows.jsonl")
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    near = next(q for n in range(1000) if gsm8k.is_held_out(q := f"{words} {n}?"))
    like = next(q for n in range(1000) if not gsm8k.is_held_out(q := f"{words} {n} more?"))
    with file.open("a") as rows:
        rows.writelines(json.dumps({"question": q, "answer": "1+1 = 2\n#### 2"}) + "\n" for q in (near, like))
    data = load_sft(section(file, decontaminate=True), tiny_chat)
    assert data.table.sources[0].dropped == {
        "held out for the evaluation": len(held_out) + 1,
        "in an evaluation set": 1,
    }


def test_questions_bring_their_answers(tmp_path: Path, tiny_chat: Chat):
    file, held_out = split(tmp_path / "rows.jsonl")
    questions, _ = load_questions(section(file), tiny_chat)
    assert len(questions) == 280 - len(held_out)
    asked = questions[0].messages[0]["content"]
    assert questions[0].answer == str(2 * int(asked.split()[2]))
    assert questions[0].ids == tiny_chat.prompt(questions[0].messages)


def test_the_hub_is_asked_for_the_training_split(monkeypatch: pytest.MonkeyPatch):
    from posttrain.data import reading

    def load_dataset(path: str, config: str, *, split: str, **_: Any) -> list[dict[str, str]]:
        assert (path, config, split) == ("openai/gsm8k", "main", "train")
        return [{"question": f"What is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(100)]

    monkeypatch.setattr(reading.datasets, "load_dataset", load_dataset)
    (task,) = build_tasks(evaluation("gsm8k_held_out"))
    assert task.items and all(gsm8k.is_held_out(item["messages"][0]["content"]) for item in task.items)


@pytest.mark.parametrize("answer", ["no number", "####", "steps ####"])
def test_an_answer_without_a_number_is_counted_and_refused(tmp_path: Path, tiny_chat: Chat, answer: str):
    file, _ = split(tmp_path / "rows.jsonl", answer=answer)
    with pytest.raises(UserError, match="280 no number behind ####"):
        load_sft(section(file), tiny_chat)
    with pytest.raises(UserError, match="with a number after ####"):
        build_tasks(evaluation(f"gsm8k_held_out={file}"))


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="needs question, answer"):
        build_tasks(evaluation(f"gsm8k_held_out={file}"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is $1,200.", "1200"),
        ("3 or -4.5", "-4.5"),
        ("none", None),
        ("\\boxed{7}", "7"),
        ("9" * 9999 + ",", "9" * 9999),
        ("It is -$5.", "-5"),
        ("It is $-5.", "-5"),
        (r"It is -\$5.", "-5"),
        ("She lost -£1,000.25!", "-1000.25"),
        ("It is US$-5.", "-5"),
        ("It is -US$5.", "-5"),
        ("5 US$ - 3", "3"),
        ("The answer is '-5'.", "-5"),
        ("the 90s'-5", "5"),
        ("She is left with −12 points.", "-12"),
        ("**-18**", "-18"),
        ("x=-5", "-5"),
        (r"\boxed{-5}", "-5"),
        ("4 - 9 = -5 floors", "-5"),
        ("2\n-3", "-3"),
        ("It costs $.50.", "0.50"),
        ("The answer is .5", "0.5"),
        ("-.5", "-0.5"),
        ("18.", "18"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("5 -$3", "3"),
        ("$5$-$3$", "3"),
        ("5$-10$", "10"),
        ("pages 3–5", "5"),
        ("COVID-19", "19"),
        ("- 5 apples", "5"),
        ("3, 4 and 5", "5"),
        ("3,4,5", "5"),
        ("1234,567", "567"),
        ("12,345,678 in all", "12345678"),
        ("1,00,000", "100000"),
        ("1{,}200", "1200"),
        (r"10,\!080", "10080"),
        ("1e-05", "1e-05"),
        ("1.2.3", "3"),
        ("3/4", "4"),
        ("答案是−１２。", "-12"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None):
    assert last_number(text) == number


@given(
    value=st.decimals(-(10**9), 10**9, places=2),
    form=st.sampled_from(["{:,}", "{}", "${:,}", "**{:,}**", "x = {}", "({})", "「{}」", "\\boxed{{{}}}"]),
    behind=st.sampled_from(["", ".", " apples.", ", all told", "!", "\n", "円"]),
)
def test_a_number_at_the_end_is_the_last_number(value: Decimal, form: str, behind: str):
    text = f"Of 7 and 8 it is {form.format(value)}{behind}"
    assert last_number(text) == str(value)
    assert last_number(text.replace("-", "−")) == str(value)
