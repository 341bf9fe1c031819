"""Does the comparison on RAGEN's levels train, play and count what its table says?"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from envs.demos import main as write_demonstrations
from posttrain.config.loading import resolve
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.config.starpo import StarPORun

FILE = Path(__file__).parents[2] / "benchmarks" / "long" / "ragen_levels.py"


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ragen_levels_benchmark", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LEVELS", 8)
    return module


def prepared(levels: ModuleType, label: str, folder: Path) -> None:
    """The first stages of a run, with 12 episodes."""
    levels.GAMES[label] = levels.GAMES[label]._replace(episodes=12)
    command = levels.demonstrations(levels.GAMES[label], 0, folder / "episodes.jsonl")
    assert write_demonstrations(list(map(str, command[3:]))) == 0
    levels.stage("base", label, "0", str(folder))


@pytest.mark.parametrize("label", ["slippery", "sokoban-2", "sudoku", "rubiks-cube"])
def test_the_tokenizer_has_a_token_for_all_that_stands_in_a_row(levels: ModuleType, label: str, tmp_path: Path) -> None:
    from posttrain.models import loading as models

    prepared(levels, label, tmp_path)
    model, chat = models.load(
        ModelSection(name_or_path=str(tmp_path / "base")), device="cpu", chat_template=None, training=False
    )
    assert sum(p.numel() for p in model.parameters()) <= 20e6
    rows = [json.loads(line)["messages"] for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert all([m["role"] for m in row] == ["system", "user", "assistant"] for row in rows)
    rules = rows[0][0]["content"]
    assert len(chat.content_ids(rules)) == 1 and all(row[0]["content"] == rules for row in rows)
    for row in rows:
        ids, trained = chat.encode(row)
        assert len(ids) + 1 < 512 and sum(trained) <= levels.GAMES[label].reply
        assert chat.decode([i for i, on in zip(ids, trained, strict=True) if on][:-1]) == row[2]["content"]


def test_a_row_is_what_is_seen_in_play_and_others_turns_are_left_out(levels: ModuleType, tmp_path: Path) -> None:
    system, mask = {"role": "system", "content": "Rules"}, {"mask_spans": [[0, 4]]}
    others = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Left"} | mask]
    others += [{"role": "user", "content": "two"}, {"role": "assistant", "content": "Down"}]
    (tmp_path / "episodes.jsonl").write_text(json.dumps({"messages": [system, *others], "env": "x"}) + "\n")
    assert levels.write_turns(tmp_path / "episodes.jsonl", tmp_path / "turns.jsonl") == 1
    assert json.loads((tmp_path / "turns.jsonl").read_text()) == {"messages": [system, *others[2:]]}


@pytest.mark.thorough
def test_both_models_are_played_on_levels_that_chose_no_checkpoint(levels: ModuleType, tmp_path: Path) -> None:
    label = "frozen-lake"
    prepared(levels, label, tmp_path)
    game = levels.GAMES[label]._replace(reply=4)  # the model has learnt nothing and would write on
    config = tmp_path / "rl.yaml"
    config.write_text(
        yaml.safe_dump(levels.phase3(game, 0, tmp_path, tmp_path / "base") | {"output_dir": str(tmp_path / "rl")})
    )
    found = levels.measure(config)
    assert found.keys() == {"sampled", "greedy", "parameters"} and 0 <= found["greedy"] <= 8
    cfg = resolve(StarPORun, config, [])
    assert cfg.protocol.max_turns == levels.TURNS and cfg.rollout.context_turns == 1
    for other in levels.GAMES.values():
        config.write_text(yaml.safe_dump(levels.phase3(other, 0, tmp_path, tmp_path / "base") | {"output_dir": "rl"}))
        assert resolve(StarPORun, config, []).envs[0].name == other.name
    told = levels.baselines(game)
    assert told["expert"] == 8 and told["optimum"] == 1.0 and told["random"] < 8
    sft = tmp_path / "sft.yaml"
    sft.write_text(yaml.safe_dump(levels.phase1(game, 0, tmp_path) | {"output_dir": str(tmp_path / "sft")}))
    assert resolve(SFTRun, sft, []).data.sources[0].path == str(tmp_path / "turns.jsonl")


def test_a_finished_stage_is_not_run_again_and_a_failed_one_costs_what_it_took(
    levels: ModuleType, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'a').write('x'); sum(range(10**6))"]
    for _ in range(2):
        levels.Stages(tmp_path).run("one", command)
    assert mark.read_text() == "x"
    before = levels.Stages(tmp_path).done["one"]
    assert before["finished"] and before["seconds"] > 0
    with pytest.raises(SystemExit, match="two did not end well"):
        levels.Stages(tmp_path).run("two", [sys.executable, "-c", "raise SystemExit(3)"])
    assert not levels.Stages(tmp_path).done["two"]["finished"]
    levels.Stages(tmp_path).run("two", [sys.executable, "-c", ""])
    assert levels.Stages(tmp_path).done["two"]["finished"]


def test_a_row_that_is_there_is_not_made_again(levels: ModuleType, tmp_path: Path, capsys, monkeypatch) -> None:
    model = {"sampled": 240, "greedy": 250, "parameters": 1_234_567}
    row = {
        "env": "slippery",
        "seed": 0,
        "sft": model | {"sampled": 128},
        "rl": model,
        "minutes": {"sft": 9.6, "rl": 20},
    }
    row |= {"random": 90, "expert": 243, "optimum": 0.9776, "of": 256, "commit": "abc", "machine": "x"}
    file = tmp_path / "rows.jsonl"
    second = row | {"seed": 1, "sft": model | {"sampled": 192}, "minutes": {"sft": 14.4}}
    file.write_text("".join(json.dumps(each) + "\n" for each in (second, row)))
    options = ["--envs", "slippery", "--seeds", "0", "--results", str(file), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["ragen_levels.py", *options])
    levels.main()
    table = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "runs").exists()
    assert table[2].startswith("| slippery | 0.24 | 0.47 | 0.46 | 0.88 | sampled | 0.50 [0.44, 0.56], 0.75 [")
    assert "| 0.625 | 0.94 [" in table[2] and "| 0.977 |" in table[3]
    assert table[3].endswith("| 0.978 | 1.23M | 22 |") and len(table) == 4


def test_the_table_of_the_committed_rows_stands_in_the_documentation(levels: ModuleType) -> None:
    folder = FILE.parent.parent
    rows = levels.read_rows(folder / "results" / "ragen_levels.jsonl")
    assert levels.show(rows) in (folder / "README.md").read_text(encoding="utf-8")
    wanted = {(label, seed) for label in levels.GAMES for seed in range(1 if label in levels.ONE_SEED else 3)}
    assert {(row["env"], row["seed"]) for row in rows} == wanted
