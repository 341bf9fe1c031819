"""Are rows of local files what is written there, whatever the kind of file?"""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from envs import make
from envs.hub_sets import all_rows, split_names

ROWS: list[dict[str, Any]] = [
    {"question": "q 1", "answer": "2024-01-02"},
    {"question": "q 2", "answer": 7},
    {"question": [{"role": "user", "content": "z"}], "answer": None},
    {"question": "NA", "answer": ["a", "b"]},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**20) | st.text("a1-: é\n\u2028", max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=4,
)
TEXTS = st.sampled_from(["NA", "None", "nan", "007", "2024-01-02", "1e3", "True", "", "a,b", 'a "b"', "a\nb", "é"])


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Save rows in the way that the name of the file says."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "csv":
        out = io.StringIO()
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        text = out.getvalue()
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = f"[{', '.join(lines)}]" if kind == "json" else "\n".join(lines)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}), min_size=1, max_size=5))
def test_rows_of_json_stay_as_they_are(name: str, rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all_rows("prompts", str(written(Path(folder, name), rows)), None, None, "train") == rows


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@settings(max_examples=20, deadline=None)
@given(cells=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_cells_of_csv_are_texts_and_empty_ones_are_missing(name: str, cells: list[tuple[str, str]]) -> None:
    rows = [{"question": one, "answer": other} for one, other in cells]
    with tempfile.TemporaryDirectory() as folder:
        found = all_rows("prompts", str(written(Path(folder, name), rows)), None, None, "train")
    assert found == [{key: value or None for key, value in row.items()} for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_files_of_a_folder_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        written(tmp_path / f"{split}{suffix}", rows)
    assert sorted(split_names("prompts", str(tmp_path))) == ["test", "train"]
    assert all_rows("prompts", str(tmp_path), None, None, "train") == ROWS
    assert all_rows("prompts", str(tmp_path), 1, None, "test") == ROWS[:1]


def test_files_of_a_folder_that_are_not_read_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train.jsonl", "train-more.jsonl", "test.jsonl", "more.jsonl", "old/more.csv", ".cache/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, [{"question": f"Is it {name}?", "answer": "1"}])
    (tmp_path / "state.json").write_text("{}")
    assert len(all_rows("prompts", str(tmp_path), None, None, "train")) == 2
    assert len(all_rows("prompts", str(tmp_path), None, None, "test")) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path} is read without more.jsonl, old/more.csv. Only" in said
    (tmp_path / "more.jsonl").unlink()
    (tmp_path / "old" / "more.csv").unlink()
    assert all_rows("prompts", str(tmp_path), None, None, "train") and not capsys.readouterr().err


def test_a_file_among_several_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data" / "train-00000-of-00002.csv", [{"question": "a"}])
    (tmp_path / "data" / "train-00001-of-00002.csv").write_text("question\na,b\n")
    with pytest.raises(ValueError, match=r"data/train-00001-of-00002\.csv: line 2 has 2 cells, its header 1"):
        make("prompts", path=str(tmp_path))


def test_the_model_is_shown_a_text_without_quotes_and_messages(tmp_path: Path) -> None:
    env: Any = make("prompts", path=str(written(tmp_path / "rows.json", ROWS)), prompt="question", rewards=["length"])
    assert env.table.keys == ["q 1", "q 2", "z", "NA"]


def test_messages_in_a_cell_are_json(tmp_path: Path) -> None:
    row = {"prompt": json.dumps([{"role": "user", "content": "z"}]), "answer": "[{1}]"}
    env: Any = make("prompts", path=str(written(tmp_path / "rows.csv", [row])))
    assert env.table.keys == ["z"] and env.table.rows[0]["answer"] == "[{1}]"


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Oslo"}',
        '[{"city": "Oslo"}, {"from": "Oslo", "to": "Rome"}]',
        '{"a": ',
        '[{"from": "USD", "to": "EUR", "value": 3}]',
        '{"role": "admin", "content": "hello"}',
        '[{"role": ["user"], "content": "hello"}]',
    ],
)
@pytest.mark.parametrize("column", ["prompt", "completion", "chosen", "rejected"])
def test_a_text_that_is_json_stays_a_text(tmp_path: Path, column: str, text: str) -> None:
    path = written(tmp_path / "rows.csv", [{column: text}])
    assert all_rows("prompts", str(path), None, None, "train") == [{column: text}]
    for messages in (
        [{"role": "user", "content": text}],
        [{"from": "human", "value": text}],
        [{"role": "system", "content": text, "mood": "good"}, {"role": "narrator", "content": ""}],
    ):
        path = written(tmp_path / "messages.csv", [{column: json.dumps(messages)}])
        assert all_rows("prompts", str(path), None, None, "train") == [{column: messages}]


def test_one_message_alone_is_an_answer_of_a_pair(tmp_path: Path) -> None:
    """As LLaMA-Factory writes chosen and rejected; elsewhere messages are a list, and this is an answer in JSON."""
    message = {"role": "user", "content": "hello"}
    for column in ("prompt", "completion", "chosen", "rejected"):
        path = written(tmp_path / "rows.csv", [{column: json.dumps(message)}])
        expected = message if column in ("chosen", "rejected") else json.dumps(message)
        assert all_rows("prompts", str(path), None, None, "train") == [{column: expected}]
