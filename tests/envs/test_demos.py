"""Are demonstrations true, their pairs ordered, and do phases 1 and 2 train on what `posttrain env demos` writes?"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from open_envs import open_or_skip
from tiny_runs import ROOT, rows_of, settings, tiny_base
from transformers import PreTrainedTokenizerFast

import envs
import train_phase1_sft
import train_phase2_dpo
from envs import demos, players
from envs.countdown.arithmetic import parse_expression
from envs.episode import Episode
from envs.players import Style
from envs.protocol import STYLES, Protocol, parse
from envs.sentences import listed
from posttrain.config.data import Source
from posttrain.config.shared import ModelSection
from posttrain.data import embedded, reading
from posttrain.data.embedded.environments import TOY, TOY_STYLE
from posttrain.models import loading as models
from posttrain.types import UserError, derive_seed


def rows(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    assert demos.main([*command, "--out", str(file)]) == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert demos.main([*command]) == 2
    told = capsys.readouterr()
    assert not told.out and "\n\n" not in told.err and told.err.strip()
    return told.err


def turns(row: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """Thought, action, and the state that came of it, which the last turn has not."""
    found = []
    for n, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            (action,) = parse(message["content"], Protocol(), None).actions
            thought = message["content"].removeprefix("<think>").partition("</think>")[0]
            after = row["messages"][n + 1]["content"] if n + 1 < len(row["messages"]) else None
            found.append((thought, action, after))
    return found


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_the_next_state_is_the_one_that_comes(name: str, tmp_path: Path) -> None:
    shown = ["--options", f"{name}.observation=coordinates"]
    found = rows(tmp_path, name, *shown, "--n", "20", "--player", "expert:1,random:1", "--thought", "next_state")
    told = [(thought, after) for row in found for thought, _, after in turns(row)]
    assert all(after is None or thought.removeprefix("Then I will see:\n") in after for thought, after in told)
    assert sum(after is not None for _, after in told) > 20


@pytest.mark.parametrize(
    ("style", "words", "between"), [("plain", "My plan is {}.", ", then "), ("compact", "Plan: {}", " || ")]
)
def test_a_plan_is_what_the_expert_then_does(tmp_path: Path, style: str, words: str, between: str) -> None:
    shown = ["--options", "sokoban.observation=grid", "--style", style]
    for row in rows(tmp_path, "sokoban", *shown, "--n", "20", "--thought", "plan", "--plan", "3"):
        played = [action for _, action, _ in turns(row)]
        for n, (thought, _, _) in enumerate(turns(row)):
            assert thought == words.format(between.join(played[n : n + 3]))


@pytest.mark.parametrize(("style", "begins"), [("plain", "The goal is "), ("compact", "goal ")])
def test_cues_and_no_thoughts(tmp_path: Path, style: str, begins: str) -> None:
    cues = rows(tmp_path, "frozen_lake", "--n", "5", "--style", style)
    bare = rows(tmp_path, "frozen_lake", "--n", "5", "--style", style, "--thought", "none")
    for one, other in zip(cues, bare, strict=True):
        assert all(thought.startswith(begins) for thought, _, _ in turns(one))
        assert [(action, after) for _, action, after in turns(one)] == [(a, after) for _, a, after in turns(other)]
        assert all(thought == "" for thought, _, _ in turns(other))


def test_rows_are_the_episodes_of_their_seeds_and_the_expert_wins_them(tmp_path: Path) -> None:
    for row in rows(tmp_path, "frozen_lake", "--n", "10", "--options", "frozen_lake.size=6", "--split", "test"):
        env = envs.make("frozen_lake", size=6)
        episode = Episode(env, Protocol.of(env), row["seed"], "test")
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert episode.step(message["content"]).valid
        assert row["messages"] == episode.messages and row["success"] and episode.success
        assert len(row["messages"][1]["content"].partition("\n\n")[0].splitlines()) == 6


@pytest.mark.thorough
def test_the_file_is_the_same_every_time_and_the_first_rows_do_not_depend_on_how_many(tmp_path: Path) -> None:
    command = ["sokoban", "frozen_lake=2", "--player", "expert:0.7,random:0.3", "--seed", "3"]
    files = []
    for n, hash_seed in ((30, "1"), (30, "2"), (12, "3")):
        files.append(tmp_path / f"{hash_seed}.jsonl")
        done = subprocess.run(
            [sys.executable, "-m", "envs.demos", *command, "--n", str(n), "--out", str(files[-1])],
            cwd=ROOT, env={"PYTHONHASHSEED": hash_seed, "PATH": ""}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert done.stdout.startswith(f"Wrote {n} episodes") and "kind: messages" in done.stdout
    one, other, short = (file.read_bytes() for file in files)
    assert one == other and one.startswith(short)
    counts = Counter(json.loads(line)["env"] for line in one.splitlines())
    assert counts == {"sokoban": 10, "frozen_lake": 20}
    assert not list(tmp_path.glob("*.part"))


def test_beside_an_expert_the_turns_of_others_are_not_trained(tmp_path: Path) -> None:
    masked = shown = 0
    for row in rows(tmp_path, "frozen_lake", "--n", "40", "--player", "expert:0.6,random:0.4"):
        env = envs.make("frozen_lake")
        episode, trained = Episode(env, Protocol.of(env), row["seed"]), 0
        for message in (message for message in row["messages"] if message["role"] == "assistant"):
            if "mask_spans" in message:
                assert message["mask_spans"] == [[0, len(message["content"])]]
                masked += 1
            else:
                trained += 1
                assert f"<answer>{env.expert()}</answer>" in message["content"]
            episode.step(message["content"])
        assert trained
        shown += trained
    assert masked > 20 and shown > 50
    assert not any("mask_spans" in m for row in rows(tmp_path, "sokoban", "--n", "5", "--player", "random")
                   for m in row["messages"])  # fmt: skip


def test_unsolved_episodes_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(tmp_path, "frozen_lake", "--n", "20", "--player", "random", "--success-only")
    assert all(row["success"] for row in found) and "Left out not solved:" in capsys.readouterr().out
    assert not all(row["success"] for row in rows(tmp_path, "frozen_lake", "--n", "20", "--player", "random"))


@pytest.mark.parametrize("name", envs.names())
def test_every_environment_is_demonstrated_by_whom_it_has(name: str, tmp_path: Path) -> None:
    env = open_or_skip(name)
    env.reset(seed=0)
    who = "expert" if env.has("expert") else next(iter(players.player_names(env)), None)
    if who is None or env.slow:
        pytest.skip("nobody plays it, or only in a sandbox or on a server")
    thoughts = ["cues", "next_state", "plan"] if env.deterministic and env.observable else ["cues"]
    for thought in thoughts:
        for row in rows(tmp_path, name, "--n", "2", "--player", who, "--thought", thought, "--turns", "6"):
            assert all(parse(m["content"], Protocol(), None).well_formed for m in row["messages"][2::2])
    if env.has("expert") and env.players():
        for pair in rows(tmp_path, name, "--n", "1", "--pairs", "--turns", "6"):
            assert pair["chosen"] != pair["rejected"] and pair["prompt"][-1]["role"] == "user"


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_the_chosen_answer_is_the_experts_and_leads_to_more(tmp_path: Path) -> None:
    found = rows(tmp_path, "frozen_lake", "--n", "40", "--pairs", "--player", "expert:0.5,random:0.5")
    lengths = Counter()
    for pair in found:
        env: Any = envs.make("frozen_lake")
        results = {}
        for side in ("chosen", "rejected"):
            episode = Episode(env, Protocol.of(env), pair["seed"])
            for message in pair["prompt"][2::2]:
                episode.step(message["content"])
            assert episode.messages == pair["prompt"]
            expert = env.expert()
            assert (f"<answer>{expert}</answer>" in pair[side][0]["content"]) == (side == "chosen")
            episode.step(pair[side][0]["content"])
            results[side] = env.optimal_length() if not episode.failure else 99
        assert results["chosen"] < results["rejected"]
        lengths[len(pair["prompt"])] += 1
    assert len(lengths) > 2, "turns from all over the episodes"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["countdown", "metamath_qa"])
def test_a_worse_answer_has_true_steps_before_it(name: str, style: str, tmp_path: Path) -> None:
    for pair in rows(tmp_path, name, "--n", "20", "--pairs", "--style", style):
        sides = [pair[side][0]["content"].removeprefix("<think>") for side in ("chosen", "rejected")]
        (good, _, _), (bad, _, reply) = (side.partition("</think>") for side in sides)
        if name == "metamath_qa":  # the right working, and another number than it comes to
            assert good == bad and not bad.endswith(f" {reply.removeprefix('<answer>').removesuffix('</answer>')}")
        else:  # the steps of its own expression
            reading = parse_expression(reply.removeprefix("<answer>").removesuffix("</answer>"))
            assert reading is not None and bad != good
            assert bad == (" ; ".join(reading.steps) if style == "compact" else f"{listed(reading.steps)}.")


def test_two_equally_good_moves_are_no_pair() -> None:
    env = envs.make("frozen_lake", size=3)
    episode = Episode(env, Protocol.of(env), 0)
    env.begin(("SFF", "FFF", "FFG"))
    assert not players.is_better(episode, "Right", "Down"), "both are on a shortest way"
    assert players.is_better(episode, "Right", "Left") and not players.is_better(episode, "Left", "Right")
    assert episode.observation == Episode(env, Protocol.of(env), 0).observation


def test_where_chance_decides_a_difference_must_stand_out() -> None:
    env = envs.make("frozen_lake", size=3, slippery=True)
    episode = Episode(env, Protocol.of(env), 0)
    env.begin(("SHF", "FFF", "FFG"))
    assert players.is_better(episode, "Down", "Right"), "into the hole with chance .8"
    env.begin(("SFF", "FFF", "FFG"))
    assert not players.is_better(episode, "Down", "Right"), "mirror images"


def test_left_out_pairs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path, "sokoban", "--n", "30", "--pairs", "--rejected", "random")
    told = capsys.readouterr().out
    assert "both do the same: " in told and "kind: preferences" in told
    said = refused(capsys, "sokoban", "--pairs", "--rejected", "expert", "--out", str(tmp_path / "none.jsonl"))
    assert "200 episodes in a row gave nothing" in said and "both do the same" in said
    assert not list(tmp_path.glob("none*"))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["frozen_lak"], 'Did you mean "frozen_lake"'),
        (["frozen_lake=0"], "not a positive number"),
        (["frozen_lake=much"], "not a positive number"),
        (["frozen_lake", "--player", "save"], 'Did you mean "safe"'),
        (["frozen_lake", "--player", "safe:x"], "names no players"),
        (["frozen_lake", "--player", "safe:-1"], "names no players"),
        (["frozen_lake", "--thought", "plans"], 'Did you mean "plan"'),
        (["frozen_lake", "--plan", "0"], "at least one move"),
        (["frozen_lake", "--options", "size=5"], "does not name an environment"),
        (["frozen_lake", "--options", "sokoban.size=5"], 'no environment of this command "sokoban"'),
        (["frozen_lake", "--options", "frozen_lake.size=big"], "valid integer"),
        (["frozen_lake", "--options", "frozen_lake.slippery=true", "--thought", "plan"], "chance decides"),
        (
            ["frozen_lake", "--thought", "plan", "--options", "frozen_lake.observation=neighbours"],
            "Set observation=coordinates",
        ),
        (
            ["sokoban", "--thought", "next_state", "--pairs", "--options", "sokoban.observation=neighbours"],
            "Set observation=coordinates",
        ),
        (["prompts"], "prompts cannot be demonstrated"),
        (["frozen_lake", "--style", "plane"], 'no style "plane". Did you mean "plain"'),
        (["web_shop", "--thought", "plan"], "what the observation does not show in web_shop"),
        (["search_qa", "--thought", "next_state"], "what the observation does not show in search_qa"),
        (["frozen_lake", "--split", "tests"], "test"),
        (["frozen_lake", "--n", "0"], "at least 1"),
        (["frozen_lake", "--rejected", "random"], "about --pairs"),
        (["frozen_lake", "--pairs", "--success-only"], "whole episodes"),
        (["search_qa", "--options", "search_qa.retriever=http://127.0.0.1:9"], "retriever http://127.0.0.1:9 gave no"),
    ],
)
def test_bad_input_is_told_in_one_paragraph(
    command: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *command, "--out", str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.iterdir())


def test_a_file_is_only_written_over_when_that_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("precious")
    command = ["frozen_lake", "--n", "1", "--out", str(file)]
    assert "exists already" in refused(capsys, *command) and file.read_text() == "precious"
    assert demos.main([*command, "--overwrite"]) == 0 and file.read_text().startswith("{")
    for out in (str(file / "below.jsonl"), "/proc/rows.jsonl"):
        said = refused(capsys, "frozen_lake", "--n", "1", "--out", out)
        assert f"{out} cannot be written" in said and "--out" in said and ".part" not in said and "Errno" not in said


# -- phases 1 and 2 ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_phase_1_trains_on_the_rows(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    command = ["frozen_lake", "sokoban", "--n", "60", "--player", "expert:0.8,random:0.2", "--thought", "plan"]
    shown = ["--options", "frozen_lake.observation=coordinates", "sokoban.observation=coordinates"]
    assert demos.main([*command, *shown, "--out", str(file)]) == 0
    base = tiny_base(tmp_path / "base", tiny_tokenizer)
    config = settings(tmp_path / "sft.yaml", "messages", base, file, max_steps=2)
    train_phase1_sft.main(["--config", str(config), "data.max_length=2048"])
    assert set(rows_of(tmp_path / "run")) == {1, 2}


@pytest.mark.thorough
def test_phase_2_trains_on_the_pairs(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "pairs.jsonl"
    command = ["rubiks_cube", "--pairs", "--n", "40", "--thought", "next_state"]
    assert demos.main([*command, "--out", str(file)]) == 0
    section = ModelSection(name_or_path=str(tiny_base(tmp_path / "base", tiny_tokenizer)))
    net, chat = models.load(section, device="cpu", chat_template=None)
    before = models.save(tmp_path / "phase1" / "final", net, chat, {}, source=section, phase="phase1", step=1)
    config = settings(tmp_path / "dpo.yaml", "preferences", before, file, max_steps=2)
    train_phase2_dpo.main(["--config", str(config), "data.max_length=2048"])
    assert set(rows_of(tmp_path / "run")) == {1, 2}


def test_a_source_of_phase_1_may_name_the_player_and_the_thought() -> None:
    said: dict[str, Any] = {"kind": "demonstrations", "path": "embedded", "rows": 6, "envs": ["rubiks_cube"]}
    source = Source(**said, player="expert:0.9,random:0.1", thought="plan")
    found = list(reading.read_rows(source, "data.sources.0", 0))
    assert len(found) == 6
    assert all("<think>My plan is " in message["content"] for row in found for message in row["messages"][2::2])
    assert Source(**said).thought == "cues" and Source(**said).player is None
    with pytest.raises(UserError, match=r"data\.sources\.0\.envs: There is no player of rubiks_cube"):
        list(reading.read_rows(Source(**said, player="gaol"), "data.sources.0", 0))
    with pytest.raises(ValueError, match="belongs to the kind demonstrations"):
        Source(kind="capybara", path="embedded", rows=6, player="expert")
    for thought in players.THOUGHTS:
        assert Source(**{**said, "thought": thought}).thought == thought
    with pytest.raises(ValueError, match="thought"):
        Source(**{**said, "thought": "deep"})
    with pytest.raises(ValueError, match='no thought "deep"'):
        Style("deep")


@pytest.mark.parametrize("name", ["countdown", "metamath_qa", "rubiks_cube", "sudoku", "web_shop"])
def test_without_a_player_the_expert_demonstrates_and_the_answers_are_right(name: str) -> None:
    default = players.parse_mix(demos.parser().get_default("player"))
    assert players.default_mix(envs.make(name)) == default == {"expert": 1.0}
    for i, row in enumerate(embedded.demonstrations([(name, {})], 4, 0)):
        env = envs.make(name)
        episode = Episode(env, Protocol.of(env), derive_seed(0, "demonstrations", i) % 2**32)
        for message in row["messages"][2::2]:
            assert f"<answer>{env.expert()}</answer>" in message["content"]
            episode.step(message["content"])
        assert episode.success


def test_rows_without_a_player_stay_those_of_the_quickstart() -> None:
    found = json.dumps(list(embedded.demonstrations(TOY, 300, 0, style=TOY_STYLE)))
    assert hashlib.sha256(found.encode()).hexdigest().startswith("36584cb2346d7143")
