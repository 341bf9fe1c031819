"""Do a model's own answers become pairs that phase 2 reads, in one go or in two? Is a prompt without one explained?"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_fuzz import damaged, no_hang
from tiny_runs import ROOT, called, taught, tiny_base
from waiting import wait_until

from posttrain import config
from posttrain.config.data import DataSection, Source
from posttrain.config.pairs import PairsRun
from posttrain.data import loading
from posttrain.data.filters import CHECKS
from posttrain.data.loading import PromptQuestion, load_preferences, load_sft
from posttrain.evaluation.pairs import (
    ADVICE,
    OwnAnswer,
    best_answers,
    best_pair,
    choose_pairs,
    dialogue,
    kept_answers,
    kept_questions,
    length_ratio,
    main,
    preference_row,
    report,
)
from posttrain.metrics import seq_rep_n
from posttrain.types import UserError


def settings(file: Path, **changes: Any) -> Path:
    given = {
        "output_dir": str(file.parent / "pairs"),
        "device": "cpu",
        "sources": [{"kind": "prompts", "path": str(file.parent / "prompts.jsonl")}],
        "decontaminate": False,
        "num_generations": 4,
        "temperatures": [0.0, 1.0, 1.0, 1.0],
        "max_new_tokens": 48,
        "max_length": 128,
        "batch_size": 4,
        "min_repetition": 0.05,
        "min_length_ratio": 0.1,
    }
    file.write_text(yaml.safe_dump(given | changes))
    return file


def prompts(file: Path, count: int = 6) -> None:
    """Rows of both columns, some with an answer."""
    rows: list[dict[str, Any]] = [{"prompt": f"Tell me about {n}."} for n in range(count)]
    rows += [{"messages": [{"role": "user", "content": f"{n} + 1 = ?"}], "answer": n + 1} for n in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_known_answer_may_be_zero_and_an_empty_one_is_none() -> None:
    source: Any = Source(kind="prompts", path="mine.jsonl")
    judge: Any = None
    for answer, known in ((0, "0"), (2.5, "2.5"), (" 7 ", "7"), ("", None), (" ", None), (None, None)):
        found = CHECKS["prompts"]({"prompt": "3 - 3 = ?", "answer": answer}, source, judge)
        assert not isinstance(found, str) and found.answer == known


def test_prompts_that_were_not_checked_are_told() -> None:
    data = DataSection(sources=[Source(kind="prompts", path="mine.jsonl")], decontaminate=False)
    notes = loading._evaluation_questions(data, "sources", "decontaminate").notes
    assert notes == ["NOT checked against any evaluation set: decontaminate is false."]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tiny_base(tmp_path_factory.mktemp("pairs") / "base", tiny_tokenizer)
    taught(folder, tiny_tokenizer)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    prompts(tmp_path / "prompts.jsonl")
    return settings(tmp_path / "pairs.yaml", model={"name_or_path": str(model)})


def made(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return called(main, "--config", str(run), *words)


def answer(
    text: str, *, finished: bool = True, right: bool | None = None, number: int = 0, prompt: int = 0
) -> OwnAnswer:
    """A token a word."""
    words = text.split()
    return OwnAnswer(prompt, number, [hash(word) % 10**6 for word in words], text, finished, right)


def cfg(**changes: Any) -> PairsRun:
    given = {"output_dir": "x", "model": {"name_or_path": "y"}, "sources": [{"kind": "prompts", "path": "z.jsonl"}]}
    return PairsRun.model_validate(given | changes)


FRESH, LOOP = "one two three four five six seven eight", "one two three four one two three four"


def test_a_right_answer_wins_over_the_wrong_one_of_most_similar_length():
    answers = [answer(text, right=not n, number=n) for n, text in enumerate(("a b c d", "w x", "p q r"))]
    assert best_pair(cfg(), answers) == (answers[0], answers[2])
    assert best_pair(cfg(min_length_ratio=0.9), answers) == "answers too unlike in length"
    assert best_pair(cfg(), answers[1:]) == "all answers wrong"
    assert best_pair(cfg(), [answers[0], answer("e", right=True, number=1)]) == "all answers right"
    cut = answer("a b c d", right=True, finished=False)
    assert best_pair(cfg(), [cut, *answers[1:]]) == "all answers wrong"  # a cut answer is never chosen


def test_of_open_answers_the_repetitive_one_loses_at_equal_length():
    answers = [answer(FRESH), answer(LOOP, number=1)]
    assert seq_rep_n(answers[1].ids) > 0.1
    assert best_pair(cfg(), answers) == tuple(answers)
    assert best_pair(cfg(min_repetition=0.5), answers) == "no answer repeats itself more than another"
    assert best_pair(cfg(), [answers[0], answer(f"{LOOP} {LOOP} {LOOP}", number=1)]) == "answers too unlike in length"
    # the longer one repeats itself only behind the end of the shorter
    assert best_pair(cfg(), [answer("one two three four"), answers[1]]) == "no answer repeats itself more than another"
    assert best_pair(cfg(), [answer(FRESH, finished=False), answer(LOOP, finished=False)]) == "no whole sentence"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("我住在东京。我喜欢", "我住在东京。"),
        ("「東京です。」と彼", "「東京です。」"),
        ("本当？はい！たぶ", "本当？はい！"),
        ("आप कैसे हैं। मैं", "आप कैसे हैं।"),
        ("کیا حال ہے؟ میں", "کیا حال ہے؟"),
        ("He said “yes.” Then", "He said “yes.”"),
        ("It costs 3.5", ""),
        ("It costs 3.", ""),
    ],
)
def test_a_sentence_ends_in_every_script(text: str, sentences: str):
    assert answer(text, finished=False).sentences == sentences


def test_an_answer_that_was_cut_off_is_written_up_to_its_last_whole_sentence():
    texts = ("One is (so) two. Two is. And thr", 'Is it? "It is." it is')
    fresh, loop = (answer(text, finished=False) for text in texts)
    assert (fresh.sentences, loop.sentences) == ("One is (so) two. Two is.", 'Is it? "It is."')
    assert answer("No end", finished=False).sentences == "" and answer("No end").sentences == "No end"
    written = preference_row(PromptQuestion([{"role": "user", "content": "?"}], [1], None), fresh, loop)
    assert written["chosen"] == [{"role": "assistant", "content": "One is (so) two. Two is."}]


def test_prompts_without_a_pair_are_counted_and_told_what_to_change():
    answers = [answer("a", prompt=0), answer(" a ", prompt=0, number=1)]
    answers += [answer(FRESH, prompt=1), answer(LOOP, prompt=1, number=1)]
    answers += [answer("c", prompt=2, right=False), answer("d", prompt=2, number=1, right=False)]
    pairs, reasons = choose_pairs(cfg(), answers)
    assert [better.prompt for better, _ in pairs] == [1]
    assert reasons == {"all answers the same or empty": 1, "all answers wrong": 1}
    same = [answer("e", prompt=3, right=right, number=n) for right in (True, False) for n in (0, 1)]
    assert [choose_pairs(cfg(), same[:2])[1], choose_pairs(cfg(), same[2:])[1]] == [
        {"all answers right": 1},
        {"all answers wrong": 1},
    ]
    told = report(3, pairs, reasons)
    assert told.startswith("1 pairs of 3 prompts: 0 right against wrong, 1 by repetition.")
    assert all(f"{reason} 1 ({ADVICE[reason]})" in told for reason in reasons)


def test_several_pairs_of_a_prompt_share_no_answer():
    texts = [f"{FRESH} {n}" for n in range(3)] + [f"{LOOP} {n}" for n in range(2)]
    answers = [answer(text, number=n) for n, text in enumerate(texts)]
    pairs, _ = choose_pairs(cfg(pairs_per_prompt=5), answers)
    assert len(pairs) == 2 and len({id(one) for pair in pairs for one in pair}) == 4
    assert all(length_ratio(*pair) == 1 for pair in pairs)


def test_the_best_answer_of_a_prompt_is_right_or_repeats_itself_least():
    open_ones = [answer(LOOP, prompt=4), answer(f"{FRESH}. And", number=1, prompt=4, finished=False)]
    cut = [answer("No end", prompt=1, finished=False), answer(" ", prompt=1, number=1)]
    math = [
        answer(LOOP, right=True),
        answer(FRESH, right=True, number=1),
        answer(f"{FRESH}.", right=True, number=2, finished=False),
        answer("z", right=False, number=3),
    ]
    wrong = [answer("z", right=False, prompt=2), answer("y.", right=True, prompt=2, number=1, finished=False)]
    assert best_answers([*open_ones, *cut, *math, *wrong]) == [math[1], open_ones[1]]
    written = dialogue(PromptQuestion([{"role": "user", "content": "?"}], [1], None), open_ones[1])
    assert [message["content"] for message in written["messages"]] == ["?", f"{FRESH}."]


def test_the_rows_are_what_phase_2_and_phase_1_read(run: Path, tiny_chat: Any):
    done = made(run)
    assert done.returncode == 0, done.stderr[-2000:]
    out = run.parent / "pairs"
    asked, answers, pairs = (rows_of(out / name) for name in ("prompts.jsonl", "answers.jsonl", "pairs.jsonl"))
    assert len(asked) == 8 and len(answers) == 32
    assert sum(row["answer"] is not None for row in asked) == 2
    assert {answer["right"] for answer in answers if asked[answer["prompt"]]["answer"]} <= {True, False}
    assert f"{len(pairs)} pairs of 8 prompts" in done.stdout
    assert {pair["score_chosen"] > 0.9 for pair in pairs} == {True, False}  # a right sum, and words
    assert all(pair["score_chosen"] > pair["score_rejected"] for pair in pairs)

    imitated = rows_of(out / "best.jsonl")
    assert len(imitated) >= len({json.dumps(pair["prompt"]) for pair in pairs})
    assert f"The best answers, of {len(imitated)} of 8 prompts" in done.stdout
    for kind, name, load, rows in (
        ("preferences", "pairs.jsonl", load_preferences, pairs),
        ("messages", "best.jsonl", load_sft, imitated),
    ):
        source = {"kind": kind, "path": str(out / name)}
        section = DataSection.model_validate({"sources": [source], "max_length": 256, "decontaminate": False})
        loaded = load(section, tiny_chat)
        assert len(loaded.train) + len(loaded.eval) == len(rows) > 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_gives_the_same(run: Path):
    whole = made(run)
    assert whole.returncode == 0, whole.stderr[-2000:]
    out, killed = run.parent / "pairs", run.parent / "killed"
    command = [sys.executable, "-m", "posttrain.evaluation.pairs", "--config", str(run), f"output_dir={killed}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    answers = killed / "answers.jsonl"
    wait_until(lambda: process.poll() is not None or (answers.exists() and len(rows_of_whole(answers)) > 2), 120)
    assert process.poll() is None
    process.kill()
    process.wait()
    before = rows_of_whole(killed / "answers.jsonl")
    with (killed / "answers.jsonl").open("a") as file:
        file.write('{"prompt": 0, "num')
    (killed / "pairs.jsonl").unlink(missing_ok=True)  # where the kill came too late

    refused = made(run, f"output_dir={killed}")
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    changed = made(run, f"output_dir={killed}", "seed=1", "--resume")
    assert changed.returncode == 2 and "seed was 0, now 1" in changed.stderr
    again = made(run, f"output_dir={killed}", "--resume")
    assert again.returncode == 0, again.stderr[-2000:]
    assert rows_of(killed / "answers.jsonl")[: len(before)] == before
    by_place = [
        sorted(rows_of(folder / "answers.jsonl"), key=lambda row: (row["prompt"], row["number"]))
        for folder in (out, killed)
    ]
    assert by_place[0] == by_place[1]
    for name in ("pairs.jsonl", "best.jsonl"):
        assert rows_of(out / name) == rows_of(killed / name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_that_a_stop_may_change_are_announced(run: Path, dtype: str):
    """Half precision rounds by batches, and who is in a batch depends on when the run began."""
    small = ["num_generations=2", "max_new_tokens=8", f"model.dtype={dtype}", f"output_dir={run.parent / dtype}"]
    first = made(run, *small)
    answers = run.parent / dtype / "answers.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:5]))
    again = made(run, *small, "--resume")
    assert "Traceback" not in first.stderr + again.stderr and len(rows_of(answers)) == len(lines) == 16
    words = "5 answers are kept. The other 11 are sampled in other batches than without the stop, and bfloat16 rounds"
    assert (words in again.stderr) == (dtype == "bfloat16") and words not in first.stderr


ASKED = {"messages": [{"role": "user", "content": "1 + 1 = ?"}], "ids": [5, 9], "answer": "2"}
KEPT = {"prompt": 0, "number": 0, "ids": [7, 8], "text": "It is 2.", "finished": True, "right": True}


def kept(folder: Path) -> None:
    """What a run leaves: a prompt with a known answer and one without, four answers to each."""
    asked = [ASKED, ASKED | {"answer": None}]
    kept = [KEPT | {"prompt": n, "number": k, "right": [k > 1, None][n]} for n in range(2) for k in range(4)]
    for name, rows in (("prompts.jsonl", asked), ("answers.jsonl", kept)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_and_used(folder: Path) -> None:
    questions = kept_questions(folder / "prompts.jsonl", vocabulary=512, longest=80)
    answers = kept_answers(folder / "answers.jsonl", questions, 4)
    pairs, reasons = choose_pairs(cfg(), answers)
    report(len(questions), pairs, reasons)
    json.dumps([preference_row(questions[better.prompt], better, worse) for better, worse in pairs])
    json.dumps([dialogue(questions[answer.prompt], answer) for answer in best_answers(answers)])


@pytest.mark.parametrize("name", ["prompts.jsonl", "answers.jsonl"])
def test_damaged_rows_end_in_words(name: str, tmp_path: Path):
    kept(tmp_path)
    read_and_used(tmp_path)
    file, draw, refused = tmp_path / name, random.Random(name), 0
    lines = file.read_bytes().splitlines()
    for number in range(100):
        place = draw.randrange(len(lines))
        harm = b"\n".join([*lines[:place], damaged(lines[place], draw), *lines[place + 1 :], b""])
        file.write_bytes(harm)
        try:
            with no_hang():
                read_and_used(tmp_path)
        except UserError as problem:
            refused += 1
            assert name in str(problem) and "Delete this" in str(problem), problem
        except Exception as error:
            raise AssertionError(f"variant {number}, {harm[:300]!r}: {error!r}") from error
        assert file.read_bytes() == harm
    assert refused > 30


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("answers.jsonl", {"ids": None}, "ids"),
        ("answers.jsonl", {"ids": [True]}, r"ids\.0"),
        ("answers.jsonl", {"prompt": 2}, r"prompt is 2, and prompts\.jsonl has 0 to 1"),
        ("answers.jsonl", {"prompt": -1}, "prompt is -1"),
        ("answers.jsonl", {"number": 4}, "number is 4, and should be from 0 to 3"),
        ("answers.jsonl", {"right": None}, "right should be true or false"),
        ("prompts.jsonl", {"messages": []}, "messages should be"),
        ("prompts.jsonl", {"messages": [{"role": "user"}]}, "messages should be"),
        ("prompts.jsonl", {"ids": [512]}, "numbers below 512"),
        ("prompts.jsonl", {"ids": [1] * 81}, "1 to 80 numbers"),
        ("prompts.jsonl", {"answer": 2}, "answer"),
        ("prompts.jsonl", {"more": 2}, "more"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(name: str, changes: dict[str, Any], words: str, tmp_path: Path):
    kept(tmp_path)
    whole = ASKED if name == "prompts.jsonl" else KEPT
    with (tmp_path / name).open("a") as file:
        file.write(json.dumps(whole | changes) + "\n")
    with pytest.raises(UserError, match=rf"Line \d of \S*{name} is damaged: .*{words}"):
        read_and_used(tmp_path)


def test_prompts_that_are_cut_off_are_not_fewer_prompts(tmp_path: Path):
    kept(tmp_path)
    whole = (tmp_path / "prompts.jsonl").read_bytes()
    for harm in (b"", whole[:-1], whole[:-20], whole + b"\x00" * 9, whole + b"{\n"):
        (tmp_path / "prompts.jsonl").write_bytes(harm)
        with pytest.raises(UserError, match=r"prompts\.jsonl is damaged: its last rows are cut off\. Delete this file"):
            read_and_used(tmp_path)


@pytest.mark.slow
def test_a_damaged_row_or_absent_settings_when_a_run_goes_on(run: Path):
    assert made(run).returncode == 0
    out = run.parent / "pairs"
    before = (out / "answers.jsonl").read_bytes()
    harm = before + b'{"prompt": 0, "number": 9}\n'
    (out / "answers.jsonl").write_bytes(harm)
    told = made(run, "--resume")
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "Line 33 of" in told.stderr and "Delete this line" in told.stderr
    assert (out / "answers.jsonl").read_bytes() == harm
    (out / "answers.jsonl").write_bytes(before)

    (out / "run_config.yaml").unlink()  # then those of now are taken, and written
    again = made(run, "--resume", "seed=7")
    assert again.returncode == 0, again.stderr[-2000:]
    assert yaml.safe_load((out / "run_config.yaml").read_text())["seed"] == 7
    changed = made(run, "--resume")
    assert changed.returncode == 2 and "seed was 7, now 0" in changed.stderr
    assert (out / "answers.jsonl").read_bytes() == before


def rows_of_whole(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_where_no_pair_is_left_the_end_says_what_to_change(run: Path):
    told = made(run, "num_generations=2", "temperatures=[0]")
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "0 pairs of 8 prompts" in told.stderr and "all answers the same or empty" in told.stderr
    assert ADVICE["all answers the same or empty"] in told.stderr
    assert not (run.parent / "pairs" / "pairs.jsonl").exists()


def test_who_wants_the_best_answers_alone_needs_no_pair(run: Path):
    same = ["num_generations=2", "temperatures=[0]", "pairs_per_prompt=0"]
    told = made(run, *same)
    assert told.returncode == 0, told.stderr[-2000:]
    out = run.parent / "pairs"
    assert f"The best answers, of {len(rows_of(out / 'best.jsonl'))} of 8 prompts" in told.stdout
    assert not (out / "pairs.jsonl").exists() and "pair" not in told.stdout.replace("/pairs/", "")
    (run.parent / "prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ?", "answer": 50}) + "\n")
    none = made(run, *same, f"output_dir={run.parent}/none")
    assert none.returncode == 2 and "No answer to 1 prompts is good enough" in none.stderr, none.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.name_or_path=nowhere/at/all"], "nowhere/at/all"),
        (["sources=[{kind: prompts, path: absent.jsonl}]"], "The data file absent.jsonl"),
        (["temperature=1"], "unknown key; did you mean `temperatures`?"),
        (["num_generations=1"], "num_generations"),
        (["max_length=20"], "longer than"),
    ],
)
def test_bad_input_ends_in_words(run: Path, changes: list[str], words: str):
    told = made(run, *changes)
    assert told.returncode == 2 and "Traceback" not in told.stderr and words in told.stderr, told.stderr[-1500:]


def test_a_row_that_is_no_prompt_is_named(run: Path):
    (run.parent / "prompts.jsonl").write_text('{"prompt": 3}\n')
    told = made(run)
    assert told.returncode == 2 and "line 1 of" in told.stderr and "column prompt should be text" in told.stderr


def test_the_default_config_is_valid():
    assert config.resolve(PairsRun, ROOT / "configs" / "pairs.yaml").num_generations == 8
