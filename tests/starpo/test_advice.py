"""Does the advice before training count rightly, and say what follows from it?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_learner import config, played, policy
from test_phase3 import settings, train

import envs
from posttrain.config import EnvSection, StarPORun, TrainingEnvSection
from posttrain.evaluation import held_out_levels
from posttrain.rollout import open_env
from posttrain.starpo import advice
from posttrain.starpo.advice import GAIN, Start, advice_text, measure_start, rate_warning, steps_to_see, verdicts
from posttrain.starpo.learner import Learner
from posttrain.starpo.run import levels
from posttrain.types import Trajectory

GOOD = Start("sokoban", 0.3, 0.9, 16, 0.8, 0.5, 0.05, 0.0, 0.04, 0.1, graded=0.8)


def episode(won: bool, invalid: int = 0, unfinished: int = 0) -> Trajectory:
    t = Trajectory(env="frozen_lake", level_seed=1, noise_seed=0, success=won, invalid_turns=invalid)
    t.turn_rewards, t.turn_penalties, t.unfinished_turns = [0.0, float(won)], [0.0, 0.0], unfinished
    return t


def test_a_start_is_counted() -> None:
    groups = [
        [episode(True), episode(True)],
        [episode(True, invalid=1), episode(False, unfinished=1)],
        [episode(False), episode(False, invalid=1)],
    ]
    start = Start.of("frozen_lake", groups, [0.2, 0.4])
    expected = Start("frozen_lake", 0.5, 2 / 3, 2, 1 / 3, 0.3, 2 / 12, 1 / 12, 0.25 - 1 / 12, 1 / 6, 3, 0.0, 1 / 3)
    assert (start.env, start.k) == (expected.env, expected.k)
    assert start[1:3] + start[4:] == pytest.approx(expected[1:3] + expected[4:])


def test_crashed_episodes_are_left_out_and_counted() -> None:
    whole = [[episode(True), episode(False)], [episode(False), episode(False)]]
    crashed = episode(False, invalid=2, unfinished=2)
    crashed.crashed = "RuntimeError: x"
    without = Start.of("frozen_lake", whole, [0.2])
    assert without.crashed == 0 and "crashed" not in without.figures()
    start = Start.of("frozen_lake", [[*group, crashed, crashed] for group in whole] + [[crashed] * 4], [0.2])
    assert start._replace(crashed=0.0) == without._replace(k=4) and start.crashed == pytest.approx(8 / 12)
    assert "cut-off answers 0%, crashed 67%" in start.figures()


@pytest.mark.parametrize(
    ("changes", "parameters", "words"),
    [
        ({}, 1e9, ["A good start: 80% of the groups teach."]),
        ({"pass_1": 0.95, "pass_k": 1.0, "differ": 0.1}, 1e9, ["Saturated: 90% of the groups teach nothing", "boxes"]),
        ({"pass_1": 0.95, "pass_k": 1.0, "differ": 1.0}, 1e9, ["Saturated: 95% of the episodes succeed. Take harder"]),
        (
            {"pass_1": 0.0, "pass_k": 0.05, "differ": 0.1, "graded": 0.1},
            1e9,
            ["Hopeless as it is: 16 tries succeed on 5% of the levels. First demonstrations", "demos"],
        ),
        (
            {"pass_1": 0.0, "pass_k": 0.05, "differ": 1.0, "graded": 0.1},
            1e9,
            ["Hopeless as it is", "Groups differ by penalties, which teach the format alone."],
        ),
        ({"pass_1": 0.0, "pass_k": 0.0}, 1e9, ["Rewards differ in 80% of the groups, which teach", "partial rewards"]),
        ({"differ": 0.0}, 1e9, ["Few groups teach: the rewards of 0% differ", "envs.difficulty: auto"]),
        ({"invalid": 0.6}, 1e9, ["format is not learnt"]),
        ({"unfinished": 0.5}, 1e9, ["raise rollout.max_completion_length (now 64)"]),
        ({"pass_1": 0.0, "pass_k": 0.0, "levels": 2}, 1e9, ["32 episodes are too few to judge success by"]),
        ({"entropy": 0.1}, 1e9, ["The entropy is low"]),
        ({"entropy": 0.1}, 5e5, ["A good start"]),  # as small models have it
    ],
)
def test_what_follows_is_said(changes: dict[str, Any], parameters: float, words: list[str]) -> None:
    found = verdicts(GOOD._replace(**changes), envs.make("sokoban"), 64, int(parameters))
    assert len(found) == 1 and all(each in found[0] for each in words), found


def test_prompts_have_no_demonstrations_to_begin_with() -> None:
    start = GOOD._replace(pass_1=0.0, pass_k=0.05, differ=0.1, graded=0.1)
    (found,) = verdicts(start, envs.make("prompts"), 64, 10**9)
    assert "phase 1 on good answers" in found and "demos" not in found and "protocol." not in found


def test_graded_rewards_of_prompts_teach_below_success() -> None:
    """A reward of 0 to .9 never counts as solved, and all groups may differ."""
    (found,) = verdicts(GOOD._replace(pass_1=0.0, pass_k=0.0, differ=1.0, graded=1.0), envs.make("prompts"), 64, 10**9)
    assert "differ in 100% of the groups" in found and "options.success (by default 1)" in found
    assert "Hopeless" not in found


def test_advice_on_prompts_speaks_of_prompts_and_answers() -> None:
    env = envs.make("prompts")
    cfg = config().model_copy(update={"envs": [TrainingEnvSection(name="prompts")]})
    for changes in (
        {},
        {"levels": 2},
        {"differ": 0.1},
        {"pass_1": 0.95},
        {"pass_1": 0.95, "differ": 1.0},
        {"pass_k": 0.05, "pass_1": 0.0},
        {"pass_k": 0.05, "pass_1": 0.0, "differ": 0.1, "graded": 0.1},
        {"pass_k": 0.05, "pass_1": 0.0, "differ": 0.8, "graded": 0.1},
        {"entropy": 0.1},
    ):
        start = GOOD._replace(env="prompts", **changes)
        text = "\n".join([advice_text(cfg, {"prompts": start}, 10**9), *verdicts(start, env, 64, 10**9)])
        assert f"prompts, {start.levels} prompts: pass@1" in text
        assert re.findall(r".*\b(?:levels?|won|wins|plays?|episodes?)\b.*", text) == []


@pytest.mark.parametrize(
    ("name", "more"), [("prompts", "Add rows for training: a tenth of them is for validation"), ("sokoban", "options")]
)
def test_advise_does_not_recommend_itself_where_validation_levels_are_few(name: str, more: str) -> None:
    cfg = config().model_copy(update={"envs": [TrainingEnvSection(name=name)]})
    starts = {name: GOOD._replace(env=name, levels=1)}
    samples, levels = ("answers", "prompts") if name == "prompts" else ("episodes", "levels")
    few = f"16 {samples} are too few to judge success by"
    told = advice_text(cfg, starts, 10**9, 60.0)
    assert f"{few}: more validation {levels} are needed. " in told and more in told and "--advise" not in told
    assert f"{few}; --advise" in advice_text(cfg, starts, 10**9), "before the first update of a run"


@pytest.mark.parametrize(
    ("k", "pass_k", "hopeless"), [(8, 0.09, False), (8, 0.04, True), (4, 0.04, False), (32, 0.09, True)]
)
def test_fewer_tries_need_not_win_as_much(k: int, pass_k: float, hopeless: bool) -> None:
    start = GOOD._replace(pass_1=pass_k / k, pass_k=pass_k, k=k, differ=0.1, graded=0.1)
    (found,) = verdicts(start, envs.make("sokoban"), 64, 10**9)
    assert found.startswith("Hopeless as it is" if hopeless else "Few groups teach")


def test_single_episodes_are_no_groups() -> None:
    start = GOOD._replace(pass_k=GOOD.pass_1, k=1, differ=0.0)
    assert "pass@1 30%, entropy" in start.figures() and start.figures().count("pass@") == 1
    assert verdicts(start, envs.make("sokoban"), 64, 10**9) == ["A good start: success is 30%."]


def test_advice_asks_no_prompt_twice(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(60)))
    section = EnvSection(name="prompts", options={"path": str(tmp_path / "few.jsonl")})
    env = open_env(section)
    for repeat in (True, False):
        keys: list[str] = []
        for level in held_out_levels(section, "validation", 50, repeat=repeat):
            env.reset(seed=level, options={"split": "validation"})
            keys.append(env.level_key())
        assert len(set(keys)) > 1 and (len(keys) == 50) == repeat and (len(set(keys)) == len(keys)) == (not repeat)


@pytest.mark.parametrize(
    ("changes", "parameters", "words"),
    [
        ({}, 1e9, []),
        ({"pass_1": 0.95, "pass_k": 1.0, "differ": 0.1}, 1e9, []),
        ({"pass_1": 0.0, "pass_k": 0.05, "differ": 0.0}, 1e9, []),
        ({"invalid": 0.6}, 1e9, ["60% of the turns are invalid"]),
        ({"unfinished": 0.5}, 1e9, ["raise rollout.max_completion_length (now 64)"]),
        ({"entropy": 0.1}, 1e9, ["The entropy is low"]),
    ],
)
def test_without_rewards_groups_need_not_differ(changes: dict[str, Any], parameters: float, words: list[str]) -> None:
    start = GOOD._replace(**changes)
    *found, last = verdicts(start, envs.make("sokoban"), 64, int(parameters), rewarded=False)
    assert len(found) == len(words) and all(each in text for each, text in zip(words, found, strict=True))
    assert f"success is {start.pass_1:.0%}" in last and "teacher" in last
    distillation = {"teacher": "runs/teacher", "teacher_coef": 1.0, "reward": False}
    cfg = StarPORun.model_validate(
        config(filter={"strategy": "none"}).model_dump(exclude_unset=True)
        | {"envs": ["sokoban"], "distillation": distillation}
    )
    told = advice_text(cfg, {"sokoban": start}, int(parameters))
    assert "differ" not in told and "Saturated" not in told and "Hopeless" not in told and "pass@1" in told


def test_a_rate_above_what_is_known_is_named() -> None:
    fast = config().model_copy(update={"trainer": config().trainer.model_copy(update={"learning_rate": 1e-4})})
    assert "trainer.learning_rate 0.0001 is above" in rate_warning(fast, 10**9)
    assert rate_warning(fast, 10**6) == ""


@pytest.mark.parametrize(
    ("success", "halfway", "size", "groups"),
    [
        ((0.5,), (0.525,), 4, 8),
        ((0.5,), (0.525,), 8, 16),
        ((0.1,), (0.125,), 4, 8),
        ((0.02,), (0.045,), 4, 4),
        ((0.97,), (0.975,), 4, 4),
        ((0.0, 0.2, 1.0), (0.0, 0.26, 1.0), 16, 8),
    ],
)
def test_a_gain_is_seen_in_as_many_steps_as_are_said(
    success: tuple[float, ...], halfway: tuple[float, ...], size: int, groups: int
) -> None:
    """Halfway through the gain, differences of so many steps' means lie within it in 95 of 100 cases by chance."""
    draw = np.random.default_rng(0)

    def won(count: int, episodes: int, chances: tuple[float, ...]) -> Any:
        return draw.binomial(episodes, draw.choice(chances, count))

    # what --advise plays
    measured = [[[episode(n < wins) for n in range(16)] for wins in won(64, 16, success)] for _ in range(40)]
    steps = [steps_to_see(Start.of("frozen_lake", each, []), groups, size) for each in measured]
    said = round(float(np.mean(steps)))
    assert np.std(steps) < 0.25 * said
    means = won(4000 * 2 * said * groups, size, halfway).reshape(4000, 2, -1).mean(-1) / size
    seen = float(np.quantile(np.abs(means[:, 0] - means[:, 1]), 0.95))
    assert 0.92 * GAIN < seen < 1.05 * GAIN  # no variance is below 0, so it is slightly overestimated


def test_what_cannot_be_known_of_a_gain_is_not_said() -> None:
    always, never = GOOD._replace(pass_1=1.0), GOOD._replace(pass_1=0.0)
    assert "A gain of" not in advice_text(config(), {"a": always, "frozen_lake": never}, 1, 60.0)
    told = advice_text(config(), {"frozen_lake": GOOD, "a": never}, 1, 60.0, updated=False)
    assert "A gain of 5 points" in told and "A step takes 60 s without an update" in told


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.004, "A step takes 0.004 s, all 200 take 0.8 s."),
        (2.5, "A step takes 2.5 s, all 200 take 8.3 min."),
        (60.0, "A step takes 60 s, all 200 take 3.3 h."),
        (150.0, "A step takes 2.5 min, all 200 take 8.3 h."),
    ],
)
def test_a_fast_step_takes_more_than_0_s(seconds: float, words: str) -> None:
    cfg = config().model_copy(update={"trainer": config().trainer.model_copy(update={"max_steps": 200})})
    assert words in advice_text(cfg, {"frozen_lake": GOOD}, 1, seconds)


def test_a_step_is_timed_without_distillation_and_says_so() -> None:
    cfg = config()
    sources = {"sources": [{"kind": "prompts", "path": "old.jsonl"}]}
    taught = StarPORun.model_validate(cfg.model_dump(exclude_unset=True) | {"distillation": sources})
    assert "s without distillation from its sources, all" in advice_text(taught, {"frozen_lake": GOOD}, 1, 60.0)
    assert "distillation" not in advice_text(cfg, {"frozen_lake": GOOD}, 1, 60.0)


def test_the_entropy_is_that_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(config(), model := policy(), None)
    groups = played(model)
    title = groups[0][0].env
    flat = [t for group in groups for t in group if t.tokens and not t.crashed]
    start = measure_start(learner, groups, title)
    assert start.entropy == pytest.approx(learner.mean_entropies(flat).mean().item())
    monkeypatch.setattr(advice, "READ_AGAIN", 3)
    some = flat[:: -(-len(flat) // 3)]
    assert len(some) in (2, 3) and len(some) < len(flat)
    assert measure_start(learner, groups, title).entropy == pytest.approx(learner.mean_entropies(some).mean().item())


def test_all_processes_measure_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of names has another order in each process, and measuring is done by all of them together."""
    names = [f"lake-{n}" for n in range(20)]
    found: list[str] = []
    monkeypatch.setattr(advice, "measure_start", lambda learner, groups, title: found.append(title) or GOOD)
    learner: Any = None
    advice.first_advice(config(), learner, [[Trajectory(env=name)] for name in names], 1)
    assert found == names
    advice.first_advice(config(), learner, [[Trajectory(env="never", crashed="RuntimeError: x")]], 1)
    assert found == names  # there is nothing to measure


def test_advice_is_given_and_nothing_is_kept(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from posttrain import starpo

    monkeypatch.setattr(starpo, "LEVELS", 4)
    monkeypatch.setattr(starpo, "ANSWERS", 3)
    train(settings(tmp_path / "run.yaml", player), "--advise")
    told = "".join(capsys.readouterr())
    assert "frozen_lake, 4 levels: pass@1 " in told and "pass@3 " in told and "A step takes " in told
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("rewarded", [True, False])
def test_a_run_begins_with_the_advice(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rewarded: bool
) -> None:
    few = {"every": 2, "episodes": 2, "final_episodes": 2}
    taught = {} if rewarded else {"distillation": {"teacher": str(player), "reward": False}}
    file = settings(tmp_path / "run.yaml", player, trainer={"max_steps": 2}, evaluation=few, **taught)
    train(file)
    told = "".join(capsys.readouterr())
    assert told.count("Before the first update, on training levels:") == 1 and "frozen_lake, 4 levels: " in told


def test_reward_functions_know_the_step_that_answers_are_for() -> None:
    cfg = config().model_copy(update={"envs": [TrainingEnvSection(name="prompts")]})
    episodes, _ = levels(cfg, 3)
    made: list[Any] = [episode.env for episode in episodes if not isinstance(episode, Trajectory)]
    states = {env.trainer_state for env in made}
    assert states == {(2, cfg.trainer.max_steps)}


def test_the_limits_of_advice_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.partition("## Advice")[2].partition("\n## ")[0]
    for row, limit in {
        "answers are cut off": advice.CUT_OFF,
        "turns are invalid": advice.UNREADABLE,
        "pass@1 above": advice.SATURATED,
        "pass@16 below": advice.HOPELESS,
        "rewards differ": advice.FEW,
    }.items():
        (line,) = [line for line in section.splitlines() if line.startswith("| ") and row in line.split(" | ")[0]]
        assert f"{limit:.0%}".replace("%", " %") in line.split(" | ")[0]
    assert f"below {advice.COLD:.1f}".replace("0.", ".") in section
    assert f"above {advice.FASTEST['full']:.0e}".replace("e-0", "e-") in section and "LoRA: 2e-4" in section
    assert advice.FASTEST["lora"] == 2e-4 and f"plays {advice.ANSWERS} episodes of each of {advice.LEVELS}" in section
