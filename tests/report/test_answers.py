"""Does a page of prompts, tools and agents say what was answered, what was called, and what it earned?"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as some
from test_report import Page, data_of, write_rows

from posttrain.report import __main__ as report_command, answers, comparison, messages, training_log
from posttrain.report.episodes import browser_row
from posttrain.report.page import read_run
from posttrain.report.training_page import build_training, is_training_run
from posttrain.types import Record, UserError

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "4 + 3"}}\n</tool_call>'
BYTES = "a\ufffd\x00b"


def words_of(page: Path | str) -> str:
    """Return the text of a page, without its style and scripts."""
    html = page if isinstance(page, str) else page.read_text()
    return " ".join(unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", html, flags=re.DOTALL)).split())


def answered(said: str, reward: float, step: int = 1, prompt: str = "What is 4 + 3?", **more: Any) -> Record:
    """A row of phase 3's transcripts.jsonl of `prompts`."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
    row = {
        "step": step,
        "env": "sums",
        "group": 0,
        "success": reward == 1,
        "failure": "" if reward == 1 else "wrong answer",
    }
    row |= {"crashed": "", "invalid_turns": 0, "actions": [said], "turn_rewards": [reward], "turn_penalties": [0.0]}
    return row | {"messages": turns} | more


def called(result: str, reward: float, step: int = 1) -> Record:
    """An answer after one call of a tool."""
    row = answered("7", reward, step)
    row["messages"][1:1] = [
        {"role": "assistant", "content": CALL},
        {"role": "tool", "name": "calculate", "content": result},
    ]
    return row | {"turn_rewards": [0.0, reward], "turn_penalties": [0.0, 0.0]}


def training_run(folder: Path, *rows: Record, env: Record | None = None) -> Path:
    """The files of a run of phase 3 on prompts."""
    write_rows(folder / "transcripts.jsonl", *rows)
    metrics = [
        {"step": n, "rollout/sums/success": n / 4, "rollout/tool_calls": 1.0, "seconds/update": 2.0} for n in range(4)
    ]
    shares = [{"step": n, "evaluation/sums/success": n / 3, "evaluation/sums/levels": 8} for n in (0, 3)]
    write_rows(folder / "metrics.jsonl", *metrics, *shares)
    (folder / "alarms.jsonl").write_text("")
    config = {"envs": [{"name": "prompts", "label": "sums", "options": {}} | (env or {})], "protocol": {}}
    (folder / "run_config.yaml").write_text(
        json.dumps(config | {"model": {"name_or_path": "tiny"}, "hardware": "a CPU"})
    )
    return folder


def test_a_training_run_has_a_page_before_it_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [called("7", 1.0, 3), called("Error: no <number>", 0.0, 3)]
    rows = [answered("It is 7.", 1.0), answered("It is 8 <b>.", 0.0), answered(BYTES, -1.0, step=2, prompt="Next?")]
    run = training_run(tmp_path / "mine", *rows, called("7", 1.0, 2), *calls)
    assert is_training_run(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["report", str(run)])
        report_command.main()
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    html = (run / "report.html").read_text()
    assert Page(html).tags and data_of(html)["recorded"][0]["reward"] == 1.0
    text = words_of(html)
    for told in (
        "3 steps from tiny on sums.", "A good and a bad answer", "Sums: 0 % before training → 100 % at step 3, on 8",
        "Answers by reward", "Calls and results", 'calculate(expression="4 + 3")', "Error: no <number>", "6 answers",
        "Step 2: 1 of 1 answers with a call are right; 0 of 1 answers without a call are right.",
        "Step 3: 1 of 2 answers with a call are right.", "No alarm was raised.",
    ):  # fmt: skip
        assert told in text, told
    assert "\ufffd" not in text
    for command in (lambda: read_run(run), lambda: comparison.open_model(str(run))):
        with pytest.raises(
            UserError, match=rf"is a training run, .* A page of the training itself: posttrain report {run}"
        ):
            command()


def test_a_run_without_episodes_or_config_has_its_curves(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 2 - n / 9, "eval_loss": 2.0 - n / 9} for n in range(1, 9)]
    write_rows(tmp_path / "metrics.jsonl", *rows)
    text = words_of(build_training(tmp_path))
    assert "Loss: 1.89 at step 1 → 1.11 at step 8, on held-out rows." in text and "Answers by reward" not in text
    (tmp_path / "run_config.yaml").write_text("envs: [")
    with pytest.raises(UserError, match=r"run_config.yaml is damaged: .* Remove it, then the page does without it"):
        build_training(tmp_path)


def test_the_requests_of_a_program_are_counted_and_its_examples_are_not_the_models(tmp_path: Path) -> None:
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Final: 2"}]
    row = answered("Final: 7", 1.0) | {"actions": ["Ask", "Final: 7"], "turn_rewards": [0.0, 1.0]}
    row["messages"] = [*example, row["messages"][0], {"role": "assistant", "content": "Ask"}]
    row["messages"] += [{"role": "user", "content": "Result: 7"}, {"role": "assistant", "content": "Final: 7"}]
    # a second conversation of the program, with the example once more, behind the answers of the first
    other = row | {"messages": [*row["messages"], *example]}
    for each in (row, other):
        shown = browser_row(each)
        roles = [message["role"] for message in shown["messages"]]
        assert shown["turns"] == 2 and roles.count("assistant") == 2 and roles[1] == messages.EXAMPLE
        assert answers.prompt_of(shown) == "What is 4 + 3?"
    run = training_run(tmp_path, row, answered("Final: 8", 0.0), env={"options": {"agent": ["python", "x.py"]}})
    text = words_of(build_training(run))
    assert "requests of the program step 1 3 none" in text and "→ Result: 7" in text
    assert "2.0 requests for an answer that is right (1); 1.0 requests for an answer that is wrong (1)" in text


def test_tokens_of_an_answer_behind_examples_are_kept() -> None:
    token = {"text": ["7"], "logprob": [-0.1], "entropy": [0.1], "advantage": [1.0], "loss": [1]}
    row = answered("7", 1.0, tokens=[token])
    row["messages"][:0] = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    shown = browser_row(row)
    assert shown["tokens"] is not None and shown["turns"] == 1 and shown["messages"][1]["role"] == messages.EXAMPLE


@pytest.mark.parametrize(
    ("text", "calls", "beside"),
    [
        (CALL, [("calculate", 'expression="4 + 3"')], ""),
        ("I add.\n" + CALL, [("calculate", 'expression="4 + 3"')], "I add."),
        (
            '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": [1]}}]',
            [("a", ""), ("b", "x=[1]")], "",
        ),
        ('<|python_tag|>{"name": "a", "parameters": {"x": null}}', [("a", "x=null")], ""),
        ('{"name": "a"} {"x": {"name": "b"}} {', [], '{"name": "a"} {"x": {"name": "b"}} {'),
    ],
)  # fmt: skip
def test_calls_are_read_in_any_form(text: str, calls: list[tuple[str, str]], beside: str) -> None:
    assert [call[:2] for call in messages.written_calls(text)] == calls
    assert messages.beside_calls(text) == beside


@given(some.text(alphabet='{}[]":, namearguments1', max_size=300))
def test_reading_calls_never_fails(text: str) -> None:
    assert len(messages.written_calls(text)) <= messages.MOST_OBJECTS
    assert messages.beside_calls(text) in text


def test_a_result_stands_beside_the_call_that_it_answers() -> None:
    unread = {"role": "tool", "name": "", "content": "Error: The call is not closed."}
    row = called("7", 1.0)
    row["messages"].insert(2, unread)
    found = [m for m in browser_row(row)["messages"] if m["role"] == "tool"]
    assert [(m["call"], m["failed"]) for m in found] == [("", True), ('calculate(expression="4 + 3")', False)]
    ((title, tools, worth),) = answers.calls_table([browser_row(row)])
    assert title == "step 1" and worth == "1 of 1 answers with a call are right"
    assert tools == [("cannot be read", 1, "1 (100 %)", unread["content"]), ("calculate", 1, "none", "")]
    assert answers.calls_table([browser_row(answered("7", 1.0))]) == []


def test_good_and_bad_answers_are_chosen_by_a_rule() -> None:
    rows = [browser_row(row) for row in (
        answered("7", 1.0), answered("8", 0.0), answered(BYTES, -1.0), answered("seven", 1.0, step=2),
        answered("16", 1.0, step=2, prompt="9 + 7?"),
    )]  # fmt: skip
    good, bad = answers.good_and_bad(rows)
    assert (good.title, good.pieces[0].opening, good.row["from"]) == ("A good answer", "seven", "step 2")
    assert (bad.title, bad.pieces[0].opening, bad.prompt) == ("A bad answer", "8", good.prompt)
    assert answers.good_and_bad(rows[:1]) == answers.good_and_bad([]) == []
    assert answers.good_and_bad(rows[1:3]) == [], "bytes are no answer to show"
    failed = [browser_row(answered(str(reward), reward)) for reward in (0.1, 0.5)]
    assert [each.title for each in answers.good_and_bad(failed)] == ["The highest reward", "A lower reward"]


def test_a_good_answer_does_not_repeat_itself_and_is_short() -> None:
    twice = r"4+3=7. The answer is \boxed{7. The answer is \boxed{7}."
    again = "4 and 3 is 7. " * 3
    plain = r"Now I add both numbers: 4+3=7. The answer is \boxed{7}."
    other = answered("7", 1.0, env="counts")  # another kind of item, which is shorter
    rows = [answered(text, 1.0) for text in (twice, again, plain + " So it is.", plain)]
    rows = [browser_row(row) for row in (answered(r"\boxed{7}", 1.0, step=0), *rows, answered("8", 0.0), other)]
    good, bad = answers.good_and_bad(rows)
    assert (good.pieces[0].opening, bad.pieces[0].opening, good.row["from"]) == (plain, "8", "step 1")
    good, _ = answers.good_and_bad([rows[1], rows[5]])
    assert good.pieces[0].opening == twice, "without a better one it is shown"


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("Über 7 °C\n\ttab", True), ("日本", True), ("", False), ("...", False), ("a\ufffd", False), ("a\x07", False),
        ("\ue000a", False),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text(text: str, readable: bool) -> None:
    assert messages.is_readable(text) == readable
    assert answers.legible(text) == (text if readable or text in ("", "...") else f"({messages.NO_TEXT})")


@given(some.lists(some.tuples(some.integers(1, 9), some.floats(-5, 5)), min_size=1, max_size=60))
def test_the_table_of_rewards_counts_every_answer_once(found: list[tuple[int, float]]) -> None:
    rows = [browser_row(answered("7", reward, step)) for step, reward in sorted(found)]
    table = answers.reward_counts(rows)
    assert len(table["rows"]) <= answers.MOST_BINS and len(table["heads"]) <= answers.MOST_COLUMNS
    counts = [[cell[0] for cell in cells] for _, cells in table["rows"]]
    assert [sum(column) for column in zip(*counts, strict=True)] == [count for _, count in table["heads"]]
    assert sum(count for _, count in table["heads"]) == len(found)


def test_answers_to_a_prompt_stand_by_their_reward() -> None:
    rows = [browser_row(answered(str(reward), reward, step)) for step in (1, 2, 3) for reward in (0.0, 1.0, 0.5)]
    shown = answers.by_reward(rows, [])["groups"]
    assert [where for where, *_ in shown] == ["Step 1", "Step 3"]
    assert all([each.row["reward"] for each in group] == [1.0, 0.5, 0.0] for *_, group in shown)
    assert answers.by_reward([browser_row({"messages": [], "success": True})], []) == {}


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({}, "The loss of a pair is 1 × sigmoid (DPO’s loss of a pair, which is ln 2 = 0.69"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.25]}, "+ 0.25 × sft (the mean negative log-"),
        ({"loss_type": "ipo"}, "The loss of a pair is 1 × ipo (the squared distance"),
        ({"loss_type": ["apo_zero"], "loss_weights": [2]}, "The loss of a pair is 2 × apo_zero."),
        (None, "The loss is about pairs of answers: DPO’s loss"),
    ],
)  # fmt: skip
def test_the_loss_of_phase_2_says_what_is_in_it(tmp_path: Path, trainer: Record | None, told: str) -> None:
    rows = [{"step": n, "loss": 1.0 - n / 9, "rewards/margins": n / 9} for n in range(4)]
    write_rows(tmp_path / "metrics.jsonl", *rows)
    if trainer is not None:
        (tmp_path / "run_config.yaml").write_text(json.dumps({"trainer": trainer}))
    ((_, _, drawn, about, _),) = training_log.curves({"phase2": tmp_path})
    assert told in about
    assert next(each.about for each in drawn if each.title == "Loss").split(" ")[-1] == "memorises."
    assert ("as explained above" in drawn[0].about) == (trainer is not None)


def test_every_curve_has_a_sentence() -> None:
    for curve in training_log.CURVES:
        assert curve.about.endswith(".") and len(curve.about) > 40, curve.title
    lines = training_log.curve_lines([{"step": 1, "rollout/sums/reward_math": 0.5}], (("rollout/*/reward_*", "*"),))
    assert lines == {"sums, math": [(1, 0.5)]}


def test_suites_that_are_measured_while_training_are_drawn() -> None:
    figures = {"evaluation/math/gsm8k/accuracy": 0.25, "evaluation/recall/accuracy": 0.5}
    rows = [{"step": step, "evaluation/repetition/seq_rep_4": 0.1, **figures} for step in (0, 4)]
    right, repeated = training_log.drawn(rows)
    curve = next(each for each in training_log.CURVES if each.title == right.title)
    assert training_log.curve_lines(rows, curve.lines) == {
        "gsm8k": [(0, 0.25), (4, 0.25)],
        "recall": [(0, 0.5), (4, 0.5)],
    }
    assert repeated.title.startswith("Repetition")
