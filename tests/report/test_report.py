"""Does the page say what was measured, by itself, without a network?  On a run whose answers are made up, no model."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import evaluate_model
from envs import make
from envs.episode import Episode
from envs.protocol import Protocol, format_response
from posttrain import metrics, report
from posttrain.evaluation import store
from posttrain.evaluation.quickstart_goals import goals
from posttrain.report import (
    __main__ as report_command,
    animation,
    answers,
    charts,
    comparison,
    sections,
    tables,
    training_log,
    verdict,
)
from posttrain.report.episodes import Pictures, acted_out, browser_row, evaluation_stage, gif
from posttrain.report.page import build_transcripts, read_run
from posttrain.report.rendering import TEMPLATES
from posttrain.runtime import checkpoint
from posttrain.serving.publish import measured
from posttrain.types import Record, UserError

Rows = list[Record]
NAMES = ("base", "phase1", "phase2", "phase3")
# What a made-up checkpoint can do: base knows nothing, phase 1 talks, phase 2 repeats less, phase 3 plays.
MATH = {"base": 0.0, "phase1": 0.72, "phase2": 0.70, "phase3": 0.69}
RECALL = {"base": 0.0, "phase1": 0.93, "phase2": 0.92, "phase3": 0.9}
RANKED = {"base": 0.5, "phase1": 0.58, "phase2": 0.86, "phase3": 0.85}
LOOPS = {"base": 0.6, "phase1": 0.35, "phase2": 0.1, "phase3": 0.12}
PLAYS_WELL = {"base": -1.0, "phase1": 0.05, "phase2": 0.05, "phase3": 0.85}  # share of turns; -1 says nothing valid


def write_rows(file: Path, *rows: Record) -> Path:
    """Write a file of JSON lines, in a folder that may not be there yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def made_up(cfg: Any, name: str, task: Any, tick: Callable[[int], None], _: Any) -> list[Record]:
    """Stands for `evaluation.scoring.run_task`: rows of the same form, from a random generator instead of a model."""
    rows: list[Record] = []
    where = {"checkpoint": name, "suite": task.suite, "source": task.source, "part": task.part}
    where |= {"setting": task.setting}
    for index, item in enumerate(task.items):
        rng = random.Random(f"{name} {task.suite} {task.part} {task.setting} {index}")
        row = _episode(cfg, name, task, item, rng) if task.suite == "envs" else _said(name, task, item, rng)
        rows.append(where | {"index": index} | item | row)
    tick(len(task.items))
    return rows


def _said(name: str, task: Any, item: Record, rng: random.Random) -> Record:
    if task.suite == "preferences":
        margin = abs(rng.gauss(6, 3)) * (1 if rng.random() < RANKED[name] else -1)
        return {"chosen_logprob": margin - 60, "rejected_logprob": -60.0, "margin": margin, "accuracy": margin > 0}
    if task.suite == "repetition":
        ids = [rng.randrange(600) for _ in range(rng.randrange(50, 80))]
        if rng.random() < LOOPS[name]:
            ids[20:] = ids[10:20] * 5
        text = "The old garden is worth a visit. Birds sing above it at dawn. " + "Cats sleep in the shade. " * 3
        figures = {"seq_rep_4": metrics.seq_rep_n(ids), "seq_rep_4_first": metrics.seq_rep_n(ids[:60])}
        figures |= {"longest_repeat": metrics.longest_repeat(ids), "ids": ids, "never_stops": name == "base"}
        return figures | {"text": text if name != "base" else "ö<&>nten ten " * 9, "tokens": len(ids)}
    right = rng.random() < {"math": MATH, "recall": RECALL}[task.suite][name]
    given = item["answer"] if right else "7"
    text = rf"7+5=12. The answer is \boxed{{{given}}}." if task.suite == "math" else f"Your city is {given}."
    text = text if name != "base" else "qu qu<script>alert(1)</script> the the"
    marks = {"accuracy": right, "boxed": "box" in text, "last_number": right, "never_stops": name == "base"}
    return {"text": text, "tokens": 20, **marks}


def _episode(cfg: Any, name: str, task: Any, item: Record, rng: random.Random) -> Record:
    protocol = Protocol.of(make(task.part), **cfg.suites.envs.protocol.arguments())
    episode = Episode(make(task.part), protocol, item["seed"], cfg.suites.envs.split)
    paid, penalties = list[float](), list[float]()
    while not episode.done:
        action = episode.env.expert() if rng.random() < PLAYS_WELL[name] else episode.env.players()["random"]
        said = "qu qu the the" if name == "base" else format_response(episode.env.thought(), [action], protocol)
        turn = episode.step(said)
        paid.append(turn.reward)
        penalties.append(turn.penalty)
    names = ("messages", "actions", "success", "failure", "turns", "invalid_turns")
    figures = {"return": sum(paid), "penalties": sum(penalties), "turn_rewards": paid, "turn_penalties": penalties}
    figures |= {"failed": bool(episode.failure), "unfinished_turns": 0, "crashed": "", "level": episode.level_key}
    return {name: getattr(episode, name) for name in names} | figures


def curves(phase: str) -> list[Record]:
    """A made-up metrics.jsonl."""
    rng = random.Random(phase)
    if phase == "phase3":
        rows = []
        for step in range(61):
            success = 0.25 + 0.6 * step / (step + 15)
            row = {"step": step, "rollout/frozen_lake/success": success + rng.gauss(0, 0.05)}
            row |= {"policy/entropy": 0.6 / (1 + step / 20), "rollout/invalid_turns": 0.02}
            rows.append(row | {"rollout/in_group_std": 0.4 - step / 300 + rng.gauss(0, 0.02)})
            if step % 10 == 0:
                held_out = {"evaluation/frozen_lake/success": success, "evaluation/sokoban/success": success / 2}
                rows.append({"step": step, **held_out})
        return rows
    steps = range(20, 1300, 20) if phase == "phase1" else range(2, 80, 2)
    rows = [{"step": s, "loss": 0.4 + 3 / (1 + s / steps[10]) + rng.gauss(0, 0.05), "entropy": 1.2} for s in steps]
    rows += [{"step": s, "eval_loss": 0.45 + 3 / (1 + s / steps[10])} for s in steps[::8]]
    if phase == "phase2":
        rows += [{"step": s, "rewards/accuracies": min(1.0, 0.5 + s / 100)} for s in steps]
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole evaluated run, as evaluate_model.py leaves it, of made-up answers."""
    folder = tmp_path_factory.mktemp("runs") / "made_up"
    return build_run(folder, episodes=40)


def build_run(folder: Path, episodes: int, with_report: bool = True) -> Path:
    config = {
        "report": with_report,
        "output_dir": str(folder),
        "checkpoints": {name: str(folder / name / "final") for name in NAMES},
        "dtype": "float32",  # the same on any CPU
        "goals": True,
        "workers": 1,
        "hardware": "two CPU cores",
        "settings": [{"name": "greedy", "temperature": 0.0}, {"name": "t05", "temperature": 0.5}],
        "suites": {
            "math": {"n": 60, "n_others": 20},
            "repetition": {"n": 60},
            "recall": {"n": 60, "settings": ["greedy"]},
            "preferences": {"n": 60, "reference": "phase1"},
            "envs": {"envs": ["frozen_lake", "sokoban"], "episodes": episodes, "episodes_others": 10},
        },
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))
    for name in NAMES[1:]:
        write_rows(folder / name / "metrics.jsonl", *curves(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_model, "run_task", made_up)
        patch.setattr(evaluate_model, "check", lambda *_, **__: None)
        patch.setattr(store, "store_fingerprint", lambda _, name: name)
        patch.setattr(sys, "argv", ["evaluate_model.py", "--config", str(folder / "config.yaml")])
        evaluate_model.main()
    return folder


@pytest.fixture(scope="module")
def results(run: Path) -> Record:
    return json.loads((run / "results.json").read_text())


@pytest.fixture(scope="module")
def rows(run: Path) -> Rows:
    return read_rows(run)


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return (run / "report.html").read_text()


def read_rows(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]


def words_of(html: str) -> str:
    """Return the text of a piece of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def test_page_needs_nothing_from_outside(html: str) -> None:
    without_data = re.sub(r'<script type="text/plain".*?</script>', "", html.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"https?://|//\w+\.\w+/", without_data)
    assert not re.search(r"<iframe|@import|url\(|fetch|import |XMLHttp|innerHTML|eval\(", without_data)
    assert re.findall(r"<script[^>]*>", without_data) == ["<script>"]
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in html
    assert not re.search(r"\ssrc=", without_data.split("<script>")[0])
    assert all(target.startswith(("#", "data:,")) for target in re.findall(r'href="([^"]+)"', html))


def data_of(html: str) -> Record:
    """Return what the page hands to its scripts."""

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (code,) = re.findall(r'<script type="text/plain" id="data">([^<]+)</script>', html)
    return json.loads(gzip.decompress(base64.b64decode(code)), parse_constant=refused)


def command(*given: object) -> None:
    """Run `python -m posttrain.report` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", *map(str, given)])
        report_command.main()


def transcripts_of(folder: Path, *rows: Record) -> Rows:
    """Return what transcripts.html shows of these rows."""
    return data_of(build_transcripts(write_rows(folder / "transcripts.jsonl", *rows)).read_text())["rows"]


CHANGED: Any = TEMPLATES.get_template("parts.html.j2").module.changed  # type: ignore[attr-defined]
MARK = "'\"><hostile hostile=1 onhostile=1>"
KEPT = {"", "math", "recall", "repetition", "preferences", "envs", "accuracy", "success", "failed", "equal_length"}
KEPT |= {"seq_rep_4", "seq_rep_4_first", "assistant", "test", "phase1", "phase2", "phase3", "base"}


def spoiled(value: Any, renamed: set[str], key: str = "") -> Any:
    """Every string with MARK behind it, every name used as a key as well; what the code asks for by name is kept."""
    if isinstance(value, str):
        return value if (value in KEPT and value not in renamed) or key == "actions" else value + MARK
    if isinstance(value, list):
        return [spoiled(each, renamed, key) for each in value]
    if isinstance(value, dict):
        return {k + MARK if k in renamed else k: spoiled(each, renamed, k) for k, each in value.items()}
    return value


def hostile_run(run: Path, folder: Path) -> tuple[Path, str]:
    """A copy of a run in which every name, answer and word is hostile, and the name of its first checkpoint."""
    results = json.loads((run / "results.json").read_text())
    renamed = {*NAMES, "greedy", "t05", "embedded", "frozen_lake", "sokoban", *results["versions"]}
    for entry in results["checkpoints"].values():
        renamed |= set(entry["math"]["embedded"]["parts"])
        for found in entry["envs"].values():
            renamed |= set(found["failures"])
    for players in results["baselines"].values():
        renamed |= set(players)
    task = {"version": "1", "n": "4", "of": "4", "fewshot": "2", "chat_template": True, "dtype": "x", "harness": "y"}
    task |= {"metrics": [{"metric": "m", "filter": "f", "value": 0.5, "stderr": None}]}
    results |= {"benchmarks": {"base": {"tasks": {"t" + MARK: task}}}, "failed": {"base": "no"}}
    changed = spoiled(results, renamed)
    for entry in changed["config"]["suites"]["envs"]["envs"]:  # the environments are there under their own names
        entry |= {"name": entry["name"].removesuffix(MARK), "label": entry["name"]}
    changed["config"]["suites"]["envs"]["protocol"] = results["config"]["suites"]["envs"]["protocol"]
    for entry in changed["checkpoints"].values():  # counts as words
        for found in (*entry["math"].values(), *entry["math"]["embedded" + MARK]["parts"].values(), entry["recall"]):
            found["n"] = f"{found['n']}{MARK}"
        for found in entry["envs"].values():
            found["levels"] = f"{found['levels']}{MARK}"
    rows = [spoiled(row, renamed) for row in read_rows(run) if row["index"] < 3]
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(changed))
    write_rows(folder / "transcripts.jsonl", *rows)
    for name in NAMES[1:]:
        place = folder / (name + MARK)
        (place / "rows").mkdir(parents=True)
        keys = [{k.replace("frozen_lake", "frozen_lake" + MARK): v for k, v in row.items()} for row in curves(name)]
        write_rows(place / "metrics.jsonl", *keys)
        alarm = {"step": 10, "name": MARK, "severity": MARK, "message": MARK, "remedy": MARK}
        write_rows(place / "alarms.jsonl", alarm)
        source = {"path": MARK, "kind": MARK, "licence": MARK, "read": 3, "train": 2, "dropped": {MARK: 1}}
        (place / "rows" / "table.json").write_text(json.dumps([source]))
        token = {"text": [MARK], "logprob": [MARK], "entropy": [None], "advantage": [0.5], "loss": [1]}
        row = {"step": 1, "env": MARK, "success": False, "failure": MARK, "crashed": "", "invalid_turns": MARK}
        row |= {"turn_rewards": [0.5], "turn_penalties": [0.0], "group": MARK, "tokens": [token]}
        row |= {"messages": [{"role": MARK, "content": MARK}, {"role": "assistant", "content": MARK}]}
        write_rows(place / "transcripts.jsonl", row)
    return folder, "base" + MARK


def hostile_pages(run: Path, folder: Path) -> list[Path]:
    place, first = hostile_run(run, folder)
    found = [report.build(place), build_transcripts(place / "transcripts.jsonl")]
    found.append(build_transcripts(place / f"phase3{MARK}" / "transcripts.jsonl"))
    return [*found, comparison.build_comparison([f"{place}:{first}", str(place)])]


class Page(HTMLParser):
    """Every element and attribute of a page whose elements are nested as HTML wants it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.open = set[str](), set[str](), list[str]()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [tag] if tag not in ("meta", "link", "br") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_nothing_in_the_files_of_a_run_becomes_an_element_or_attribute(run: Path, html: str, tmp_path: Path) -> None:
    assert Page(html).tags and "&lt;script&gt;alert(1)" in html
    for file, least in zip(hostile_pages(run, tmp_path / "<hostile>"), (150, 1, 1, 30), strict=True):
        hostile = file.read_text()
        found = Page(hostile)
        assert not [name for name in found.tags | found.attributes if "hostile" in name or name.startswith("on")]
        assert hostile.count("&lt;hostile") >= least and "<hostile" not in hostile, file


def test_a_page_runs_its_own_script_alone(html: str, tmp_path: Path) -> None:
    (tmp_path / "transcripts.jsonl").write_text('{"text": "x"}\n')
    for text in (html, build_transcripts(tmp_path / "transcripts.jsonl").read_text()):
        (allowed,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
        rules = dict(rule.strip().split(" ", 1) for rule in allowed.split(";"))
        (code,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"
        assert rules["base-uri"] == rules["form-action"] == "'none'"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 10**400, "x", None], ids=lambda bad: repr(bad)[:5])
def test_a_number_that_is_not_finite_leaves_the_page_whole(run: Path, tmp_path: Path, bad: Any) -> None:
    token = {"text": ["a", "b"], "logprob": [bad, -1], "entropy": [bad, 0.1], "advantage": [bad, 1], "loss": [1, 1]}
    row = {"step": 1, "env": "x", "success": True, "invalid_turns": bad, "tokens": [token], "turn_penalties": [0.0]}
    row |= {"messages": [{"role": "assistant", "content": "ab"}], "turn_rewards": [bad], "return": 0.5}
    row |= {"anything": bad, "group": bad}
    second = row | {"return": bad} if isinstance(bad, float | int) else row
    first, second = transcripts_of(tmp_path, row, second)
    assert first["rewards"] == [None] and first["reward"] == 0.5 and first["invalid"] is None
    assert [first["tokens"][0][name][0] for name in ("logprob", "entropy", "advantage")] == [None] * 3
    if isinstance(bad, float | int):
        assert second["reward"] is None and "the reward is not a finite number" in second["facts"]
    else:
        assert "not a finite" not in second["facts"]


def test_a_run_that_was_copied_shows_its_own_training(run: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(run, tmp_path / "copy"))
    results = json.loads((place / "results.json").read_text())
    assert training_log.phase_folders(results, place) == {"base": None} | {name: place / name for name in NAMES[1:]}
    shutil.rmtree(place / "phase1")
    assert training_log.phase_folders(results, place)["phase1"] == run / "phase1", "else where the results say"


def test_a_checkpoint_that_is_an_earlier_step_of_its_run_says_which(run: Path, tmp_path: Path) -> None:
    """Phase 3 keeps the best policy on its validation levels, which may be the one that it started from."""
    place = Path(shutil.copytree(run, tmp_path / "copy"))
    for name, step in (("phase2", 78), ("phase3", 0)):
        (place / name / "final").mkdir()
        checkpoint.seal(place / name / "final", step=step)
    text = words_of(report.build(place).read_text())
    assert "phase3 is step 0 of 60: no later evaluation of the run was better beyond chance." in text
    assert "60 (kept: step 0)" in text and "phase2 is step" not in text and "kept: step 78" not in text


def test_a_page_of_prompts_does_not_speak_of_levels(run: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(run, tmp_path / "copy"))
    results = json.loads((place / "results.json").read_text())
    for env in results["config"]["suites"]["envs"]["envs"]:
        env |= {"label": env["name"], "name": "prompts", "options": {}}
    results["baselines"] = {env: {} for env in results["baselines"]}
    (place / "results.json").write_text(json.dumps(results))
    text = words_of(re.sub(r"<(script|style).*?</\1>", "", report.build(place).read_text(), flags=re.DOTALL))
    assert "prompts solved" in text and "The prompts" in text and "The same prompt, before and after" in text
    assert re.search(r"40 answers to \d+ test prompts", text)
    assert re.findall(r"[^.]*\b(?:levels?|won|play\w*)\b[^.]*", text) == []


def test_page_shows_the_measured_figures(results: Record, html: str) -> None:
    for entry in results["checkpoints"].values():
        for found in (entry["math"]["embedded"], entry["recall"], entry["preferences"]):
            assert f"<b>{tables.percent(found['accuracy'])}</b>" in html
            assert f"{100 * found['low']:.0f} to {100 * found['high']:.0f}" in html
        for part in entry["math"]["embedded"]["parts"].values():
            assert f"{100 * part['low']:.0f} to {100 * part['high']:.0f}, n 60" in html
    for title in ("unseen questions", "unseen operands", "Frozen lake", "Sokoban", "optimum", "Loss", "Entropy"):
        assert title in html
    for words in ("greedy</small>", "episodes on", "60 items", "ranking accuracy"):
        assert words in html
    assert "Reward accuracy, against the reference" in html, "DPO's own accuracy has another name"
    assert html.count("✓ reached") == sum(goal["reached"] for goal in results["goals"])
    assert html.count("✗ not reached") == sum(not goal["reached"] for goal in results["goals"])
    assert "python inference_with_improved_settings.py" in html


def test_curves_are_of_the_phases_that_were_trained_here(html: str) -> None:
    curves = html.partition("Learning curves</h2>")[2].partition("</section>")[0]
    assert "metrics.jsonl" not in curves and "Success in validation" in curves
    assert curves.count('<figure class="chart"') == html.count('<figure class="chart"') == 2 + 3 + 5
    phases = dict(zip(NAMES[1:], curves.split("<h3>")[1:], strict=True))
    assert [name for name, drawn in phases.items() if "ln 2 = 0.69" in drawn] == ["phase2"], "DPO's loss is explained"


def test_episodes_are_shown_as_they_were_played(rows: Rows, results: Record, html: str) -> None:
    solved = next(r for r in rows if r["suite"] == "envs" and r["checkpoint"] == "phase3" and r["success"])
    frames, turns = acted_out(evaluation_stage(results, solved), solved)
    assert len(frames) == 1 + len(solved["actions"])
    assert [action for _, taken in turns for action in taken] == solved["actions"]
    env = make(solved["part"], render_mode="rgb_array")
    env.reset(seed=solved["seed"], options={"split": "test"})
    for action in solved["actions"]:
        *_, info = env.step(action)
    assert info["success"]
    assert (frames[-1] == env.render()).all()

    data = data_of(html)
    films = [episode for pair in data["pairs"] for episode in pair]
    assert 4 <= len(films) <= 2 * 3 * sections.LEVELS * 2  # two environments, three kinds of level, before and after
    for film in films:
        turns = sum(message["role"] == "assistant" for message in film["messages"])
        assert film["moments"][0] == [-1, 0] and film["moments"][-1] == [turns - 1, len(film["frames"]) - 1]
        assert len(film["actions"]) == turns and sum(map(len, film["actions"])) == len(film["frames"]) - 1
        for frame in film["frames"]:
            with Image.open(BytesIO(base64.b64decode(data["pictures"][frame]))) as image:
                assert image.format == "PNG" and image.size == (208, 208)
    top = data["top"]
    assert top["columns"] == ["base model", "SFT + DPO", "SFT + DPO + RL"]
    for row in top["rows"]:
        assert [len(cells) for cells in row["cells"]] == [sections.LEVELS] * 3
        assert [cell["at"] for cell in row["cells"][2]] == [f"phase3 level {n}" for n in range(sections.LEVELS)]


@pytest.mark.thorough
def test_animation_shows_the_same_levels_side_by_side(
    run: Path, rows: Rows, results: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["base", "phase2", "phase3"]
    found = animation.shown_episodes(results, rows, names, levels=2)
    assert set(found) == {(env, name, n) for env in ("frozen_lake", "sokoban") for name in names for n in (0, 1)}
    lengths = {place: len(animation.panels(results, row)) for place, row in found.items()}
    for place, row in found.items():
        panels = animation.panels(results, row)
        assert lengths[place] >= 1 + row["turns"] and panels[-1].end and not any(panel.end for panel in panels[:-1])
        assert (panels[-1].frame == acted_out(evaluation_stage(results, row), row)[0][-1]).all()
        assert (panels[-1].end == "solved") == row["success"]
    shown = list(animation.pictures(results, found, names))
    longest = [max(length for (*_, level), length in lengths.items() if level == n) for n in (0, 1)]
    assert len(shown) == sum(longest)
    assert [duration for _, duration in shown].count(animation.LAST) == 2

    out = tmp_path / "pictures" / "played.gif"  # in a folder that is not there yet
    command(run, "--gif", out)
    assert capsys.readouterr().out.strip() == str(out)
    with Image.open(out) as picture:
        assert picture.format == "GIF" and getattr(picture, "n_frames", 1) > 6
    assert 10_000 < out.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ("I go\nright.", "I go right."),
        ("friEbJ\ufffd -\ufffd9ie", "(no readable text)"),
        ("a\x07b", "(no readable text)"),
    ],
)
def test_animation_draws_no_bytes_that_are_no_text(
    rows: Rows, results: Record, said: str, drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in rows if row["suite"] == "envs" and row["checkpoint"] == "phase3")
    frames, turns = acted_out(evaluation_stage(results, row), row)
    monkeypatch.setattr(animation, "acted_out", lambda *_: (frames, [(said, turns[0][1]), *turns[1:]]))
    assert [panel.text for panel in animation.panels(results, row)][:2] == ["", drawn]


def test_animation_says_which_checkpoints_it_shows(run: Path, results: Record, tmp_path: Path) -> None:
    shutil.copy(run / "transcripts.jsonl", tmp_path)
    few = results | {"checkpoints": {"phase1": results["checkpoints"]["phase1"]}}
    (tmp_path / "results.json").write_text(json.dumps(few))
    with pytest.raises(UserError, match=r"checkpoints base, phase2, phase3, but .* has evaluated only phase1"):
        command(tmp_path, "--gif", tmp_path / "played.gif")


def test_levels_are_counted_by_who_solved_them(rows: Rows, results: Record, html: str) -> None:
    """`lost` would read as a step back, so every kind is said, and what was solved before is a kind of its own."""
    for env in ("frozen_lake", "sokoban"):
        setting = results["checkpoints"]["phase3"]["envs"][env]["setting"]
        two, three = (
            [r["success"] for r in rows if (r["checkpoint"], r["part"], r["setting"]) == (name, env, setting)]
            for name in ("phase2", "phase3")
        )
        n = Counter(zip(two, three, strict=True))
        counts = f"{n[False, True]} solved by phase3 alone, {n[True, False]} solved by phase2 alone, "
        counts += f"{n[False, False]} solved by neither, {n[True, True]} solved by both."
        assert f"40 levels: {counts}" in html
    assert "lost" not in re.sub(r"base64,[^\"]+", "", html)
    assert html.count('<details class="levels"><summary>') >= 2


def test_long_answers_are_cut_and_folded() -> None:
    assert answers.folded("short <b>") == ("short <b>", "")
    opening, rest = answers.folded("a<" * 200)
    assert opening + rest == "a<" * 200 and len(opening) == answers.OPENING_CHARACTERS
    assert answers.shorten("a\nb") == "a ↵ b" and len(answers.shorten("\n" * 5000)) == answers.SHOWN_CHARACTERS + 2


def test_a_checkpoint_that_failed_is_named_everywhere(run: Path, tmp_path: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    del results["checkpoints"]["phase2"]
    results["failed"] = {"phase2": "math: its weights <hold> NaN [bold]"}
    keep = {"base", "phase1", "phase3"}
    results["differences"] = [d for d in results["differences"] if {d["from"], d["to"]} <= keep]
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "transcripts.jsonl").write_bytes((run / "transcripts.jsonl").read_bytes())
    found = report.build(tmp_path).read_text()
    assert "not measured" in found and "weights &lt;hold&gt; NaN" in found
    assert "phase2 could not be measured: math: its weights <hold> NaN" in report.markdown(results)
    report.show(results)


def test_sources_of_math_are_never_pooled(results: Record) -> None:
    """One column for each, with a title of its own; GSM8K's figures never hold those of toy sums."""
    changed = copy.deepcopy(results)
    for entry in changed["checkpoints"].values():
        entry["math"]["gsm8k"] = {**entry["math"]["embedded"], "accuracy": 0.015, "parts": {}}
    columns = {column.title: column for column in tables.columns(changed)}
    found = columns["GSM8K"].get(changed["checkpoints"]["phase1"])
    assert found is not None and found.value == 0.015
    assert "Math (toy sums)" in columns and "Math" not in columns
    assert goals(changed) == goals(results)


def test_the_terminal_table_names_every_column(results: Record, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(results)
    told = capsys.readouterr().out
    assert "…" not in told
    for title in ("Math (toy sums)", "Recall", "Preferences", "Repetition", "Frozen lake", "Sokoban", "no sampling"):
        assert f" {title} " in told
    for goal in results["goals"]:  # a goal is one line, whatever its length
        assert any(goal["goal"] in line and line.endswith(goal["measured"]) for line in told.splitlines())


def test_differences_have_the_names_of_the_table() -> None:
    where = {"suite": "math", "part": "embedded", "metric": "accuracy"}
    assert tables.what(where) == "Math (toy sums): accuracy"
    assert tables.what(where | {"part": "gsm8k"}) == "GSM8K: accuracy"
    assert tables.what(where | {"part": "unseen_operands"}) == "Math, unseen operands: accuracy"
    failed = {"suite": "envs", "part": "frozen_lake", "metric": "failed"}
    assert tables.what(failed) == "Frozen lake: ended in a failure"


def test_every_figure_has_a_label_where_a_phone_shows_no_head(html: str) -> None:
    """page.css hides the first row of these tables on a narrow screen, and shows data-label instead."""
    for kind in ("headline", "parts"):
        (found,) = re.findall(rf'<table class="{kind} cards">(.*?)</table>', html, re.DOTALL)
        head, *rows = found.split("</tr>")
        titles = list(map(words_of, re.findall(r"<th>(.*?)</th>", head)[1:]))
        assert len(titles) >= 3 and len(rows) == 1 + (6 if kind == "headline" else len(NAMES))
        assert all(re.findall(r'data-label="([^"]+)"', row) == titles for row in rows[:-1])


def test_replay_of_a_silent_player_is_one_picture(rows: Rows, results: Record) -> None:
    silent = next(r for r in rows if r["suite"] == "envs" and r["checkpoint"] == "base")
    frames, turns = acted_out(evaluation_stage(results, silent), silent)
    assert len(frames) == 1 and len(turns) == 8
    assert all(taken == [] for _, taken in turns)
    with Image.open(BytesIO(gif(frames))) as image:
        assert image.size == (208, 208)


def test_report_is_made_again_by_its_own_command(run: Path, html: str) -> None:
    (run / "report.html").unlink()
    command(run)
    assert (run / "report.html").read_text() == html
    line = [sys.executable, "-m", "posttrain.report", str(run / "nothing")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert "evaluate_model.py" in done.stderr and "Traceback" not in done.stderr


def test_report_needs_no_torch() -> None:
    code = "import sys, posttrain.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_last_row_without_its_line_end_is_a_row(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "results.json", tmp_path)
    (tmp_path / "transcripts.jsonl").write_text((run / "transcripts.jsonl").read_text().removesuffix("\n"))
    assert comparison.open_model(str(tmp_path)).rows == comparison.open_model(str(run)).rows


def test_damaged_results_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text((run / "results.json").read_text()[:500])
    (tmp_path / "transcripts.jsonl").write_text("")
    with pytest.raises(UserError, match="--overwrite"):
        report.build(tmp_path)
    whole = json.loads((run / "results.json").read_text())
    wrong = [whole | {part: 5} for part in ("checkpoints", "differences", "baselines", "config")]
    for damaged in ({"checkpoints": {}}, whole | {"checkpoints": {}}, *wrong):
        (tmp_path / "results.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="damaged or not what"):
            report.build(tmp_path)
        with pytest.raises(UserError, match="damaged or not what"):
            comparison.open_model(str(tmp_path))
    assert not (tmp_path / "report.html").exists()
    shutil.copy(run / "results.json", tmp_path)
    (tmp_path / "transcripts.jsonl").write_text("{torn")
    with pytest.raises(UserError, match=r"The files in .* are damaged .* Measure again"):
        comparison.open_model(str(tmp_path))


def test_markdown_holds_every_table(run: Path, results: Record) -> None:
    text = (run / "results.md").read_text()
    for entry in results["checkpoints"].values():
        found = entry["math"]["embedded"]
        assert f"{tables.percent(found['accuracy'])} ({tables.span(tables.figure_of(found, 'accuracy'))})" in text
    for heading in ("## Paired differences", "## Frozen lake: players", "## Every setting", "## Goals"):
        assert heading in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_plots_are_pictures(run: Path) -> None:
    for name in ("headline.png", "settings.png"):
        with Image.open(run / "plots" / name) as image:
            image.verify()
            assert image.width > 800


def set_figures(results: Record, path: str, **figures: Any) -> Record:
    """A copy of the results with some figures of one checkpoint changed."""
    changed = copy.deepcopy(results)
    found = changed["checkpoints"]
    for key in path.split("."):
        found = found[key]
    found.update(figures)
    return changed


@pytest.mark.parametrize(
    ("path", "figures", "goal", "reached"),
    [
        ("base.math.embedded", {"accuracy": 0.1}, "30 points", True),
        ("phase1.math.embedded", {"accuracy": 0.29}, "30 points", False),
        ("phase1.recall", {"accuracy": 0.49}, "50 points", False),
        ("phase2.preferences", {"accuracy": 0.75}, "75 % of held-out pairs", True),
        ("phase2.preferences", {"accuracy": 0.74}, "75 % of held-out pairs", False),
        ("phase2.repetition", {"tokens": 20.0}, "20 % shorter", False),
        ("phase2.math.embedded", {"accuracy": 0.5}, "5 points lower", False),
        ("phase2.envs.frozen_lake", {"success": 0.46}, "from less than 45 %", False),
        ("phase3.envs.frozen_lake", {"success": 0.80}, "from less than 45 %", True),
        ("phase3.envs.frozen_lake", {"success": 0.79}, "from less than 45 %", False),
        ("phase3.envs.frozen_lake", {"success": 0.6}, "beats every demonstrator", False),
        ("phase3.envs.frozen_lake", {"failures": {"hole": 39}}, "half the deaths", False),
        ("phase2.envs.frozen_lake", {"failures": {}}, "half the deaths", False),
        ("phase3.envs.frozen_lake", {"low": 0.2}, "Frozen lake: intervals", False),
        ("phase2.envs.sokoban", {"success": 0.0}, "Sokoban at least doubled", False),
        ("phase3.envs.sokoban", {"success": 0.2}, "Sokoban at least doubled", False),
        ("phase3.envs.sokoban", {"success": 0.45}, "Sokoban to at least", True),
        ("phase3.envs.sokoban", {"success": 0.44}, "Sokoban to at least", False),
    ],
)
def test_goals_at_their_limits(results: Record, path: str, figures: Record, goal: str, reached: bool) -> None:
    (found,) = [entry for entry in goals(set_figures(results, path, **figures)) if goal in entry["goal"]]
    assert found["reached"] is reached


@pytest.mark.parametrize(
    ("shares", "average", "each"),
    [
        ({"math": 1.0, "recall": 0.93, "preferences": 0.99}, True, True),
        ({"math": 0.96, "recall": 0.96, "preferences": 0.97}, False, True),
        ({"math": 1.1, "recall": 0.91, "preferences": 1.0}, True, False),
    ],
)
def test_what_phase_2_knew_is_kept(results: Record, shares: dict[str, float], average: bool, each: bool) -> None:
    for suite, share in shares.items():
        path = "math.embedded" if suite == "math" else suite
        results = set_figures(results, f"phase2.{path}", accuracy=0.5)
        results = set_figures(results, f"phase3.{path}", accuracy=0.5 * share)
    found = {entry["goal"]: entry["reached"] for entry in goals(results)}
    names = "math, recall, preferences"
    assert found[f"{names}: at least 97 % of phase 2's, on average"] is average
    assert found[f"{names}: at least 92 % of phase 2's, each"] is each


@pytest.mark.parametrize(("low", "reached"), [(-0.01, True), (0.001, False)])
def test_repetition_may_not_rise_in_phase_3(results: Record, low: float, reached: bool) -> None:
    changed = copy.deepcopy(results)
    for row in changed["differences"]:
        if (row["from"], row["to"], row["suite"]) == ("phase2", "phase3", "repetition"):
            row |= {"value": 0.01, "low": low, "high": 0.02}
    (found,) = [entry for entry in goals(changed) if "repeats no more" in entry["goal"]]
    assert found["reached"] is reached


def test_goals_of_the_made_up_run(results: Record) -> None:
    found = {entry["goal"]: entry for entry in results["goals"]}
    assert len(found) == 16
    assert found["Sokoban at least doubled"]["reached"]
    assert "unseen questions +" in found["math at least 30 points above base"]["measured"]


def test_goals_about_absent_checkpoints_are_left_out(results: Record) -> None:
    fewer = copy.deepcopy(results)
    del fewer["checkpoints"]["phase2"]
    assert {goal["phase"] for goal in goals(fewer)} == {"phase1"}


def test_a_change_is_called_one_only_where_its_interval_leaves_zero_out(run: Path, results: Record) -> None:
    (math,) = [column for column in tables.columns(results) if column.suite == "math"]
    steps = verdict.steps(run, *read_run(run))
    found = sections.change_since_last(steps, "phase1", math)
    assert found is not None and found[0] == "base" and found[1].change.low > 0
    assert sections.change_since_last(steps, "base", math) is None
    assert re.search(r'class="change good">\+\d+\.\d \(\+.*<br>better</i>', CHANGED(found[1]))
    unsure = found[1]._replace(change=metrics.Interval(0.01, -0.1, 0.1), parts=[])
    assert "(-10.0 to +10.0)<br>cannot tell</i>" in CHANGED(unsure)


def test_both_pages_have_the_same_verdicts(run: Path, html: str) -> None:
    for old, new in itertools.pairwise(NAMES):
        before, after = (comparison.open_model(f"{run}:{name}") for name in (old, new))
        for each in verdict.compare_models(before, after):
            assert CHANGED(each) in html
    assert html.count('<i class="change ') == 18


def merged_run(run: Path, folder: Path, *models: object, names: Sequence[str] = NAMES) -> str:
    """The page of a run of these checkpoints, of which phase3 was merged of these models, by its manifest."""
    folder.mkdir()
    results = json.loads((run / "results.json").read_text())
    results["checkpoints"] = {name: results["checkpoints"][name] for name in names}
    (folder / "results.json").write_text(json.dumps(results))
    shutil.copy(run / "transcripts.jsonl", folder)
    record = {"phase": "merge", "merged": [{"model": str(model), "share": 0.5} for model in models]}
    checkpoint.save(folder / "phase3", lambda _: None, phase="merge", history=[{"phase": "phase2"}, record])
    return report.build(folder).read_text()


def test_a_merged_model_is_compared_with_those_it_was_made_of(run: Path, html: str, tmp_path: Path) -> None:
    assert "<h1>What each phase changed</h1>" in html and "one that is named" not in html
    assert "base → phase1 → phase2 → phase3, on" in html
    page = merged_run(run, tmp_path / "one", run / "phase1" / "final", "elsewhere/phase2")
    assert "<h1>What training and merging changed</h1>" in page and "base → phase1 → phase2, phase3, on" in page
    steps = [("base", "phase1"), ("phase1", "phase2"), ("phase1", "phase3")]
    (told,) = re.findall(r'<ul class="phases">(.*?)</ul>', page, re.DOTALL)
    assert re.findall(r"(phase\d)</span> against .*?>(\w+)</span>", told) == [(new, old) for old, new in steps]
    assert page.count(", against phase1") == 6 and "or since the one that is named" in page
    assert "solved by phase3 alone" in page and "solved by phase1 alone" in page and "phase2 alone" not in page

    page = merged_run(run, tmp_path / "two", run / "phase2", run / "phase1")
    assert "phase2</span>: " in page and page.count("> against <") == 4 and ", against phase" not in page


def compared(page: str) -> list[tuple[str, str]]:
    """The pairs of checkpoints that the summary of a page compares."""
    return re.findall(r"(\w+)</span> against <[^>]*>(\w+)</span>", page)


def test_a_merged_model_is_not_compared_if_its_models_were_not_evaluated(run: Path, tmp_path: Path) -> None:
    page = merged_run(run, tmp_path / "page", "elsewhere/phase1", "elsewhere/phase2")
    assert "<h1>What training and merging changed</h1>" in page and "base → phase1 → phase2, phase3, on" in page
    assert compared(page) == [("phase1", "base"), ("phase2", "phase1")] and page.count('<i class="change ') == 12
    assert "is compared with a model that it was made of, if one is in the table" in page
    assert "phase3</span> minus <" in page and "</span> → <" not in page, "the differences of results.json are named"


def test_a_phase_is_compared_with_the_last_model_that_was_not_merged(run: Path, tmp_path: Path) -> None:
    names = ("base", "phase1", "phase3", "phase2")
    page = merged_run(run, tmp_path / "page", run / "phase1", run / "phase2", names=names)
    assert "base → phase1 → phase2, phase3, on" in page
    steps = [("phase1", "base"), ("phase3", "phase1"), ("phase3", "phase2"), ("phase2", "phase1")]
    assert compared(page) == steps and "solved by phase2 alone" in page and "phase3 alone" not in page
    assert page.count(", against phase1") == 6 and page.count(", against phase2") == 6, "in the cells of the table"


def test_a_single_model_that_was_merged_is_not_called_a_phase(run: Path, tmp_path: Path) -> None:
    page = merged_run(run, tmp_path / "page", run / "phase1", run / "phase2", names=["phase3"])
    assert "<h1>What training and merging changed</h1>" in page and "phase3, on held-out" in page
    assert compared(page) == []


def test_models_are_found_from_any_working_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    place = Path(shutil.copytree(run, root / "runs" / "comparison", ignore=shutil.ignore_patterns("phase*")))
    shutil.copytree(run / "phase1", root / "runs" / "mine" / "phase1")
    models = [{"model": f"runs/mine/phase{number}/final", "share": 0.5} for number in (1, 2)]
    record = {"phase": "merge", "merged": models}
    checkpoint.save(root / "runs" / "mine" / "phase3", lambda _: None, phase="merge", history=[record])
    results = json.loads((run / "results.json").read_text())
    results["config"]["checkpoints"] = {name: f"runs/mine/{name}/final" for name in NAMES}
    results["config"]["checkpoints"]["phase3"] = "runs/mine/phase3"
    (place / "results.json").write_text(json.dumps(results))
    for folder in (root, tmp_path):
        monkeypatch.chdir(folder)
        page = report.build(place).read_text()
        assert compared(page)[2:] == [("phase3", "phase1"), ("phase3", "phase2")]
        assert "<h1>What training and merging changed</h1>" in page
        assert training_log.phase_folders(results, place)["phase1"] is not None, "its curves"


def test_each_phase_has_a_sentence(run: Path, results: Record, html: str) -> None:
    (told,) = re.findall(r'<ul class="phases">(.*?)</ul>', html, re.DOTALL)
    found = [words_of(item) for item in re.findall(r"<li>(.*?)</li>", told, re.DOTALL)]
    assert [words.split(":")[0] for words in found] == [
        f"{new} against {old}" for old, new in itertools.pairwise(NAMES)
    ]
    assert "better in" in found[0] and re.search(r"Math \(toy sums\) \(0 % → \d+ %\)", found[0])
    for words in found:  # every figure of the table stands in it once
        assert all(words.count(column.title) == 1 for column in tables.columns(results))


def test_cost_and_data_as_far_as_they_are_recorded(run: Path, results: Record, tmp_path: Path) -> None:
    folders = training_log.phase_folders(results, run)
    assert folders["base"] is None and folders["phase1"] == run / "phase1" and training_log.data(folders) == []
    assert training_log.cost(results, folders)["rows"][0][2:] == ("not recorded", "not recorded", "", "not recorded")
    rows = [{"step": 1, "seconds": 60.0, "num_tokens": 500}, {"step": 9, "seconds": 30.0, "num_tokens": 4000}]
    write_rows(tmp_path / "phase1" / "metrics.jsonl", *rows)
    row = {"step": 7, "seconds/rollout": 3000.0, "seconds/update": 1000.0, "tokens": 12_345, "memory": 1.25}
    write_rows(tmp_path / "phase3" / "metrics.jsonl", row)
    assert training_log.cost(results, {name: tmp_path / name for name in ("phase1", "phase3")}) == {
        "rows": [
            ("phase1", "9", "4,000 read", "1:30 min", "", "not recorded"),
            ("phase3", "7", "12,345 sampled", "1:06 h", "rollout 50:00 min, update 16:40 min", "1.2 GiB"),
        ],
        "total": "1:08 h",
        "hardware": "two CPU cores",
    }
    source = {"path": "a<b.jsonl", "kind": "messages", "licence": None, "train": 1100, "held_out": 97}
    (tmp_path / "phase1" / "rows").mkdir()
    for name, more, read_rows, dropped in (
        ("sources", {}, "", "not recorded"),  # of an older run
        ("table", {"read": 1200, "dropped": {"empty": 3}}, "1,200", "3 empty"),
        ("table", {"read": 1197, "dropped": {}}, "1,197", "none"),
    ):
        (tmp_path / "phase1" / "rows" / f"{name}.json").write_text(json.dumps([source | more]))
        cells = ["a<b.jsonl", "not stated", read_rows, "1,100", "97", dropped]
        assert training_log.data({"phase1": tmp_path / "phase1", "base": None}) == [("phase1", [("messages", cells)])]


@pytest.mark.thorough
def test_every_episode_of_the_evaluator_is_played_again(run: Path, rows: Rows) -> None:
    data = data_of(build_transcripts(run / "transcripts.jsonl").read_text())
    assert len(data["rows"]) == len(rows) and len(set(data["pictures"])) == len(data["pictures"])
    for row, shown in zip(rows, data["rows"], strict=True):
        assert ("frames" in shown) == (row["suite"] == "envs")
        if row["suite"] == "envs":
            assert len(shown["frames"]) == 1 + len(row["actions"])
            assert shown["reward"] == pytest.approx(row["return"] + row["penalties"])
            assert shown["rewards"] == row["turn_rewards"] and shown["penalties"] == row["turn_penalties"]
            assert shown["invalid"] == row["invalid_turns"] and shown["won"] == row["success"]


def test_episodes_beyond_the_limit_say_why_they_have_no_pictures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_log, "MOST_PICTURES", 1)
    rows = data_of(build_transcripts(run / "transcripts.jsonl").read_text())["rows"]
    played = [row for row in rows if "the page keeps 1, of the latest" in row["facts"] or "frames" in row]
    assert "frames" in played[-1] and len(played) > 1
    assert all("frames" not in row and "without pictures" in row["facts"] for row in played[:-1])
    place = tmp_path / "phase4"  # of two phases the later one has them, and the episodes stay in their order
    place.mkdir()
    episodes = [row for row in read_rows(run) if row["suite"] == "envs"]
    for folder, row in ((tmp_path, episodes[0]), (place, episodes[-1])):
        shutil.copy(run / "results.json", folder)
        write_rows(folder / "transcripts.jsonl", row)
    first, last = training_log.recorded_episodes({"phase3": tmp_path, "phase4": place}, Pictures())
    assert "frames" in last and "frames" not in first and first["from"] == episodes[0]["checkpoint"]


def test_episodes_of_older_runs_have_no_reward_for_each_turn(tmp_path: Path) -> None:
    row = {"return": 0.5, "penalties": -0.1, "messages": [{"role": "assistant", "content": "Up"}]}
    (shown,) = transcripts_of(tmp_path, row)
    assert shown["reward"] == 0.4 and shown["rewards"] is None and shown["penalties"] is None


def test_an_episode_whose_environment_has_changed_is_shown_without_pictures(tmp_path: Path) -> None:
    row = {
        "step": 1, "env": "frozen_lake", "level_seed": 3, "noise_seed": 4, "success": False, "failure": "hole",
        "crashed": "", "invalid_turns": 0, "actions": ["Up"], "turn_rewards": [0.5], "turn_penalties": [-0.1],
        "messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "<answer>Sideways</answer>"}],
    }  # fmt: skip
    config = {"envs": [{"name": "frozen_lake", "options": {}, "label": None}], "protocol": {"think": False}}
    (tmp_path / "run_config.yaml").write_text(json.dumps(config))
    first, second = transcripts_of(tmp_path, row, row | {"env": "gone"})
    assert first["facts"].startswith("cannot be played again: ") and second["facts"].startswith("cannot be played")
    assert "frames" not in first and (first["reward"], first["end"], first["won"]) == (0.4, "hole", False)
    (tmp_path / "run_config.yaml").write_text("envs: [")
    with pytest.raises(
        UserError, match=r"run_config.yaml is damaged: .*Remove it, then the episodes are shown without"
    ):
        transcripts_of(tmp_path, row)


def test_a_line_that_is_not_an_episode_is_named(tmp_path: Path) -> None:
    file = tmp_path / "transcripts.jsonl"
    with pytest.raises(UserError, match=r"There is no file .*transcripts.jsonl"):
        build_transcripts(file)
    none = "does not hold a complete row"
    lines = {'{"messages": [7]}\n': "Line 1 of .* is not an episode", "": none, "[1]\n": none, "{\n{}\n": "damaged"}
    for line, told in lines.items():
        file.write_text(line)
        with pytest.raises(UserError, match=told):
            build_transcripts(file)
    for last in ("", "\n", '\n{"torn'):  # a whole row counts without its line end
        file.write_text('{"whatever": 1}' + last)
        (row,) = data_of(build_transcripts(file).read_text())["rows"]
        assert (row["env"], row["won"], row["reward"], row["turns"]) == ("episode", None, None, 0)


def test_figures_of_other_tokens_than_the_text_shade_nothing(tmp_path: Path) -> None:
    token = {"text": ["a", "b"], "logprob": [-1.0], "entropy": [0.5, 0.1], "advantage": [1, 1], "loss": [1, 1]}
    row = {"messages": [{"role": "assistant", "content": "ab"}], "tokens": [token]}
    assert transcripts_of(tmp_path, row)[0]["tokens"] is None


@pytest.mark.parametrize("low, high", [(0, 1), (0.213, 0.219), (-3.2, 11), (5, 5), (0, 0), (1e-6, 3e-6), (-0.7, 1234)])
def test_ticks_enclose_and_are_even(low: float, high: float) -> None:
    steps = charts.ticks(low, high)
    assert 3 <= len(steps) <= 7
    assert steps[0] <= low + 1e-12 and high - 1e-12 <= steps[-1]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-6)


def test_long_lines_are_thinned_to_their_ends() -> None:
    line = [(float(n), float(n)) for n in range(1001)]
    thin = charts.thinned(line, 300)
    assert len(thin) <= 302 and thin[0] == line[0] and thin[-1] == line[-1]
    assert charts.smooth([(0, 1.0), (1, 4.0), (2, 1.0)])[1] == (1, 2.0)
    assert charts.chart("nothing", {"a": [(1, 2.0)]}) is None


def test_curves_take_environment_names_from_their_keys() -> None:
    row = {"step": 1, "evaluation/frozen_lake/success": 0.5, "evaluation/success": 0.4, "loss": None}
    lines = training_log.curve_lines(
        [row, {"step": 2, "x": "y"}], [("evaluation/*/success", "*"), ("loss", "training")]
    )
    assert lines == {"frozen lake": [(1, 0.5)]}


# -------------------------------------------------------------------------------------------------- comparing runs


@pytest.fixture(scope="module")
def other(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same evaluation of another run, whose last checkpoint plays better and has forgotten what it was told."""
    folder = tmp_path_factory.mktemp("others") / "other"
    folder.mkdir()
    rows = read_rows(run)
    for row in rows:
        if row["checkpoint"] == "phase3" and row["suite"] == "recall":
            row["accuracy"] = row["accuracy"] and row["index"] % 2 == 0
    solved = {
        (row["part"], row["setting"], row["index"]): row
        for row in rows
        if row["suite"] == "envs" and row["checkpoint"] == "phase3" and row["success"]
    }
    for row in rows:
        if row["suite"] == "envs" and row["checkpoint"] == "phase2":
            row |= solved.get((row["part"], row["setting"], row["index"]), {}) | {"checkpoint": "phase2"}
    write_rows(folder / "transcripts.jsonl", *rows)
    shutil.copy(run / "results.json", folder)
    return folder


def test_verdicts_are_better_worse_and_cannot_tell(run: Path, other: Path) -> None:
    before, after = (comparison.open_model(f"{folder}") for folder in (run, other))
    found = {each.column.title: each for each in verdict.compare_models(before, after)}
    assert len(found) == 6
    assert found["Recall"].verdict == "worse" and found["Recall"].change.high < 0 and found["Recall"].n == 60
    assert {each.verdict for title, each in found.items() if title != "Recall"} == {"cannot tell"}
    same = {title: comparison.needed(each) for title, each in found.items()}
    assert same["Recall"] == "" and same["Sokoban"] == ": the same on all 40 levels"
    assert same["Preferences"] == ": the same on all 60 pairs"
    assert all(rows[0]["accuracy"] and not rows[1]["accuracy"] for rows in found["Recall"].examples)
    word, sentence = verdict.overall(list(found.values()))
    assert word == "worse" and sentence.startswith("worse in Recall; cannot tell in Math (toy sums), ")

    two = comparison.open_model(f"{run}:phase2")
    assert two.checkpoint == "phase2" and two.title == "made_up:phase2"
    found = {each.column.title: each for each in verdict.compare_models(two, comparison.open_model(f"{other}:phase2"))}
    assert found["Sokoban"].verdict == "better" and found["Frozen lake"].verdict == "better"
    back = {each.column.title: each for each in verdict.compare_models(comparison.open_model(f"{other}:phase2"), two)}
    assert back["Sokoban"].verdict == "worse" and back["Sokoban"].change.value == -found["Sokoban"].change.value
    assert verdict.overall([found["Sokoban"], back["Sokoban"]])[0] == "mixed"


def test_less_repetition_is_better(run: Path) -> None:
    one, two = (comparison.open_model(f"{run}:{name}") for name in ("phase1", "phase2"))
    (repetition,) = [each for each in verdict.compare_models(one, two) if each.column.suite == "repetition"]
    assert repetition.change.value < 0 and repetition.verdict in ("better", "better in part", "cannot tell")
    (again,) = [each for each in verdict.compare_models(two, one) if each.column.suite == "repetition"]
    assert again.verdict == repetition.verdict.replace("better", "worse")


def test_the_items_that_are_needed_do_tell() -> None:
    """With a difference of six points between coins of 50 and 56 %, in 300 items, and in as many as it asked for."""
    column = tables.Column("Coin", "", "recall", "", "accuracy", "")

    def played(n: int, seed: int) -> verdict.Comparison:
        rng = random.Random(seed)
        pairs = [({"accuracy": rng.random() < 0.5}, {"accuracy": rng.random() < 0.56}) for _ in range(n)]
        return verdict.compare_rows(column, pairs, 0.025, 4)

    # Of two independent coins a share of .5 changes: Connor's formula (1987), and half a step of the test.
    exact = ((1.96 * 0.5**0.5 + 0.8416 * (0.5 - 0.06**2) ** 0.5) / 0.06) ** 2 + 1 / 0.06
    small = [played(300, seed) for seed in range(40)]
    assert sum(each.verdict == "cannot tell" for each in small) > 20
    told = [played(round(exact), seed).verdict for seed in range(40)]
    assert 26 <= told.count("better") <= 38, "80 % of them"
    close = next(each for each in small if abs(each.change.value - 0.06) < 0.005)
    assert close.needed == pytest.approx(exact, rel=0.25)
    words = f": about {close.needed:,} questions needed to tell this difference, 300 compared"
    assert comparison.needed(close) == words


def test_without_a_difference_the_page_says_how_many_levels_show_five_points() -> None:
    column = tables.Column("Lake", "", "envs", "lake", "success", "")
    pairs = [({"success": number % 2 == 0}, {"success": number % 2 == 1}) for number in range(60)]
    pairs += [({"success": True}, {"success": True})] * 240
    found = verdict.compare_rows(column, pairs, 0.025, 4)
    exact = ((1.96 * 0.2**0.5 + 0.8416 * (0.2 - 0.05**2) ** 0.5) / 0.05) ** 2 + 1 / 0.05
    assert found.change.value == 0 and found.needed == pytest.approx(exact, abs=2)
    words = f": no difference seen; about {found.needed} levels needed to tell one of 5 points, 300 compared"
    assert comparison.needed(found) == words
    few = found._replace(change=found.change._replace(value=1e-4), needed=10**7)
    assert comparison.needed(few) == ": more than 100,000 levels needed to tell this difference, 300 compared"


def test_a_part_that_changed_is_named_where_the_whole_cannot_tell() -> None:
    column = tables.Column("Math", "", "math", "embedded", "accuracy", "greedy")

    def compared(**changes: tuple[int, int]) -> verdict.Comparison:
        """Of each part 200 items: how many became right, how many wrong."""
        pairs: list[Any] = []
        for part, (right, wrong) in changes.items():
            for old, new, count in ((0, 1, right), (1, 0, wrong), (1, 1, 200 - right - wrong)):
                pairs += [({"accuracy": old, "part": part}, {"accuracy": new, "part": part})] * count
        return verdict.compare_rows(column, pairs, 0.025 / 6, 0)

    one = compared(unseen_questions=(16, 8), unseen_operands=(2, 17))
    assert one.change.low < 0 < one.change.high and one.verdict == "worse in part"
    assert verdict.overall([one]) == ("worse in part", "worse in Math: unseen operands")
    shown = CHANGED(one)
    assert "worse in part" in shown and "unseen operands -7.5" in shown and "cannot tell" not in shown
    assert sections.phases({("a", "b"): [one]}) == [("b", "a", [("worse", "Math: unseen operands (99 % → 92 %)")])]

    assert compared(unseen_questions=(20, 2), unseen_operands=(2, 20)).verdict == "mixed"
    assert compared(unseen_questions=(8, 8), unseen_operands=(8, 9)).verdict == "cannot tell"
    assert compared(unseen_questions=(2, 30), unseen_operands=(2, 30)).verdict == "worse"
    assert compared(unseen_operands=(2, 10)).parts == [], "one kind of problem is the whole"


def test_what_changed_under_another_setting_is_named_where_the_setting_of_the_table_cannot_tell() -> None:
    column = tables.Column("Sokoban", "", "envs", "sokoban", "success", "sampled")

    def pairs(right: int, wrong: int, same: int) -> list[Any]:
        changes = ((False, True, right), (True, False, wrong), (True, True, same))
        rows = [(old, new) for old, new, count in changes for _ in range(count)]
        return [({"success": old, "level": n}, {"success": new, "level": n}) for n, (old, new) in enumerate(rows)]

    def compared(main: list[Any]) -> verdict.Comparison:
        return verdict.compare_rows(
            column, main, 0.025 / 6, 0, {"greedy": pairs(0, 9, 21), "chat": pairs(3, 3, 24), "hot": pairs(9, 0, 21)}
        )

    found = compared(pairs(20, 22, 258))
    assert found.verdict == "mixed" and len(found.parts) == 3
    assert [part.title for part in found.changed_parts["worse"]] == ["greedy"]
    shown = CHANGED(found)
    assert "greedy -30.0" in shown and "sampling setting “hot” +30.0" in shown and "“chat”" not in shown
    told = [("better", "Sokoban: sampling setting “hot” (70 % → 100 %)"), ("worse", "Sokoban: greedy (100 % → 70 %)")]
    assert sections.phases({("a", "b"): [found]}) == [("b", "a", told)]
    twice = verdict.compare_rows(column, pairs(20, 22, 258), 0.025, 0, {"greedy": pairs(0, 3, 21) * 3})
    assert twice.verdict == "cannot tell", "a level counts once, however often it is played"
    assert compared(pairs(40, 2, 258)).verdict == "better", "what the setting of the table says is the verdict"


def test_the_margin_of_preferences_is_named_where_the_accuracy_cannot_tell() -> None:
    column = tables.Column("Preferences", "", "preferences", "", "accuracy", "")
    pairs = [({"accuracy": True, "margin": 30.0 + n}, {"accuracy": True, "margin": 27.5 + n}) for n in range(20)]
    found = verdict.compare_rows(column, pairs, 0.025 / 6, 0)
    assert found.verdict == "worse in part" and re.search(
        r"log-prob margin -2\.5 \(-.* to -.*\) nats</i>", CHANGED(found)
    )
    told = [("worse", "Preferences: log-prob margin (39.5 → 37.0 nats)")]
    assert sections.phases({("a", "b"): [found]}) == [("b", "a", told)]


def test_a_change_that_rounds_to_zero_is_not_called_better_or_worse() -> None:
    column = tables.Column("Preferences", "", "preferences", "", "accuracy", "")

    def compared(more: float) -> verdict.Comparison:
        rows = [({"accuracy": True, "margin": 33.34}, {"accuracy": True, "margin": 33.34 + more}) for _ in range(20)]
        return verdict.compare_rows(column, rows, 0.025 / 6, 0)

    unseen = compared(0.02)
    assert (
        unseen.parts[0].change.low > 0
        and unseen.verdict == "cannot tell"
        and "+0.0 (+0.0" in unseen.parts[0].with_change
    )
    assert sections.phases({("a", "b"): [unseen]}) == [("b", "a", [("cannot tell", "Preferences")])]
    seen = compared(-0.06)
    assert seen.verdict == "worse in part" and seen.parts[0].with_values == "log-prob margin (33.34 → 33.28 nats)"

    whole = unseen._replace(change=metrics.Interval(0.0004, 0.0001, 0.0007), parts=[])
    assert whole.verdict == "cannot tell" and "+0.0 (+0.0 to +0.1)<br>cannot tell" in CHANGED(whole)
    assert comparison.needed(whole) == ": a difference that rounds to 0"
    assert whole._replace(change=metrics.Interval(0.0006, 0.0001, 0.0011)).verdict == "better"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (0.45, 0.375, "45 % → 38 %"),
        (0.45, 0.45, "45 % → 45 %"),
        (0.452, 0.454, "45.2 % → 45.4 %"),
        (0.4506, 0.4512, "45.06 % → 45.12 %"),
    ],
)
def test_two_shares_have_digits_that_tell_them_apart(before: float, after: float, told: str) -> None:
    assert tables.from_to(before, after) == told


def test_other_settings_are_compared_on_common_items_with_equal_sampling(run: Path, other: Path) -> None:
    before, after = (comparison.open_model(str(folder)) for folder in (run, other))
    column = next(column for column in tables.columns(before.results) if column.suite == "repetition")
    (name,) = {each["name"] for each in before.results["config"]["settings"]} - {column.setting}

    def titles(after: verdict.Model) -> list[str]:
        found = verdict.compare_models(before, after)
        return [part.title for each in found for part in each.parts if each.column.suite == "repetition"]

    assert titles(after).count(tables.setting_of(name)) == 1
    changed = copy.deepcopy(after.results)
    (gone,) = [each for each in changed["config"]["settings"] if each["name"] == name]
    gone["temperature"] = 0.3
    assert tables.setting_of(name) not in titles(after._replace(results=changed))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_few_items_tell_nothing_and_say_how_many_would(n: int) -> None:
    """Even where every one of them changed for the better: six figures are looked at."""
    for metric, suite in (("success", "envs"), ("seq_rep_4", "repetition")):
        column = tables.Column("Lake", "", suite, "lake", metric, "")
        pairs: list[Any] = [({metric: 0.5 if suite != "envs" else False}, {metric: 1.0})] * n
        found = verdict.compare_rows(column, pairs, 0.025 / 6, 4)
        assert found.verdict == "cannot tell" and found.change.low <= 0 <= found.change.high
        assert found.change.low < found.change.value
        assert 8 <= found.needed < 20 and f": about {found.needed} " in comparison.needed(found)
        many = verdict.compare_rows(column, pairs[:1] * found.needed, 0.025 / 6, 4)
        assert many.verdict == ("better" if suite == "envs" else "worse")


def test_what_to_type_next_is_meant_for_this_run(results: Record) -> None:
    """The quickstart's models are talked to with the quickstart's presets."""
    endpoint = {"endpoint": "http://x"}
    local = {"phase2": "runs/my run/phase2/final", "phase3": "runs/q/phase3/final"}
    places = {"base": endpoint, "phase1": endpoint, **local}
    asked = results | {"config": results["config"] | {"checkpoints": places}}
    found = [command for _, command in sections.commands(asked, Path("runs/q"))]
    chat = "python inference_with_improved_settings.py --config configs/quickstart/chat.yaml"
    chat += " model.name_or_path=runs/q/phase3/final"
    assert {chat, f"{chat} --play sokoban", f"{chat} --web --beside 'runs/my run/phase2/final'"} <= set(found)
    asked["config"] |= {"goals": False, "checkpoints": places | {"phase3": endpoint}}
    found = [command for _, command in sections.commands(asked, Path("runs/q"))]
    assert "python inference_with_improved_settings.py 'model.name_or_path=runs/my run/phase2/final' --web" in found


def test_several_intervals_hold_together(run: Path, other: Path) -> None:
    """Six figures at once: each interval is wider than one alone would be."""
    before, after = (comparison.open_model(f"{folder}") for folder in (run, other))
    found = next(each for each in verdict.compare_models(before, after) if each.column.title == "Recall")
    pairs = verdict.common_rows(before, after, found.column)
    alone = verdict.compare_rows(found.column, pairs, 0.025, 0)
    assert found.change.low < alone.change.low < alone.change.high < found.change.high
    assert found.change.value == alone.change.value


def test_figures_of_other_items_or_sampling_are_not_compared(run: Path, other: Path, tmp_path: Path) -> None:
    before = comparison.open_model(str(run))
    changed = json.loads((other / "results.json").read_text())
    changed["config"]["settings"][0]["temperature"] = 0.3  # what the headlines were sampled with
    mine = comparison.open_model(str(other))._replace(results=changed)
    assert [each.column.suite for each in verdict.compare_models(before, mine)] == ["preferences"]
    ((*_, apart),) = comparison.verdicts(before, [mine], [verdict.compare_models(before, mine)])
    assert apart[:2] == ["Math (toy sums)", "Recall"] and "Sokoban" in apart and "Preferences" not in apart
    ((*_, apart),) = comparison.verdicts(before, [before], [verdict.compare_models(before, before)])
    assert apart == []
    for suite, limit in (("math", "max_new_tokens"), ("envs", "max_completion_length")):
        changed = json.loads((other / "results.json").read_text())
        changed["config"]["suites"][suite][limit] += 1
        found = {each.column.suite for each in verdict.compare_models(before, mine._replace(results=changed))}
        assert suite not in found and "recall" in found
    rows = [row | {"index": row["index"] + 1000} for row in mine.rows]
    with pytest.raises(UserError, match=r"have no figure in common .* same suites, settings and seed"):
        verdict.compare_models(before, mine._replace(rows=rows))
    with pytest.raises(UserError, match=r"has no checkpoint last: write .*:NAME with one of base, phase1"):
        comparison.open_model(f"{run}:last")


def test_runs_side_by_side(run: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(f"{run}:phase2", other, f"{other}:phase2")
    assert capsys.readouterr().out.strip() == str(other / "comparison.html")
    html = (other / "comparison.html").read_text()
    assert html.count('<p class="verdict">') == 2 and "other:phase3 against made_up:phase2: better in " in html
    assert html.count('data-label="other:phase2"') == 6
    data = data_of(html)
    assert data["pairs"] and all(len(pair) == 2 for pair in data["pairs"])
    assert any("frames" in episode for pair in data["pairs"] for episode in pair)
    assert "not about how they were made" in html


def test_standard_benchmarks_have_a_table_of_their_own(run: Path) -> None:
    results, _ = read_run(run)
    before = report.markdown(results)
    found = {"metric": "exact_match", "filter": "strict-match", "value": 0.25, "stderr": 0.0125}
    entry = {"version": 3, "n": 50, "of": 1319, "fewshot": 5, "chat_template": True, "dtype": "bfloat16"}
    perplexity = {"metric": "ppl", "filter": "none", "value": 7.5, "stderr": None}
    entry |= {"harness": "0.4.13", "metrics": [found, perplexity]}
    results["benchmarks"] = {"phase3": {"digest": "x", "tasks": {"<gsm8k>": entry}}}
    text = report.markdown(results)
    row = "| phase3 | &lt;gsm8k> | 3 | exact_match (strict-match) | 0.25 ± 0.013 | 50 of 1319 |"
    assert f"{row} 5 examples, chat template, bfloat16, lm-eval 0.4.13 |" in text
    assert "| ppl | 7.5 | 50 of 1319 |" in text
    assert before.split("## Goals")[0] in text and "Standard benchmarks" not in before
    section: Any = TEMPLATES.get_template("sections.html.j2").module
    shown = section.benchmarks(list(tables.benchmark_rows(results)))
    for told in ("&lt;gsm8k&gt;", "0.25 ± 0.013", "n 50 of 1319", "lm-eval 0.4.13"):
        assert told in shown, told


def test_what_a_run_adds_to_a_published_model(run: Path) -> None:
    """Figures, plot and animation of exactly one checkpoint, here known by its name instead of a digest."""
    results, _ = read_run(run)
    assert results["digests"] == {name: name for name in NAMES}
    found = measured.of_run(results, "phase3", run)
    with Image.open(BytesIO(found.files["before_and_after.gif"])) as moving:
        assert getattr(moving, "n_frames", 1) > 10
    assert found.files["headline.png"].startswith(b"\x89PNG") and set(found.files) == set(found.pictures)
    assert {entry.dataset_type for entry in found.index} == set(results["baselines"])
    shown = tables.columns(results)
    assert len(found.rows) == len(shown)
    assert all(row[0].startswith(column.title) for row, column in zip(found.rows, shown, strict=True))
    assert measured.of_run(results, "weights of yesterday", run).rows == []


def test_what_each_reward_function_gave_is_shown() -> None:
    row = {"messages": [], "turn_rewards": [1.5], "turn_penalties": [0.0], "reward_parts": {"math": 1.0, "length": 0.5}}
    assert browser_row(row)["facts"] == "math 1 · length 0.5"
    assert browser_row(row | {"reward_parts": {"math": 1.0}})["facts"] == ""  # it is the reward
    assert browser_row(row | {"extra": {"length": 3}})["facts"] == "math 1 · length 0.5 · length 3"
