"""What do the environments cost, some beside the games they are made of, and how much of an iteration is it?

Levels and steps a second of ours, with text to read, exact lengths of solutions and splits, and of the raw packages.
    python benchmarks/envs.py [--player runs/quickstart/phase2/final [--config FILE]] [--json FILE]
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import sys
import time
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure

import envs
from envs.base import draw_level
from envs.deep_coder import verdict
from envs.episode import Episode
from envs.lean.backends import replay_tactics
from envs.metamath_qa import is_right
from envs.protocol import format_response

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart" / "phase3_starpo.yaml"
SLOW = 20  # levels and steps of an environment that waits for a sandbox or a server


def our_levels(name: str, count: int) -> None:
    """Levels that nobody has asked for before, drawn and shown as text."""
    draw_level.cache_clear()
    env = envs.make(name)
    for seed in range(count):
        env.reset(seed=seed)


def our_steps(name: str, moves: list[tuple[int, list[str]]]) -> None:
    """Plays these actions on these levels, with what is seen after each. Every answer is judged, none looked up."""
    verdict._cache.clear()
    replay_tactics.cache_clear()
    is_right.cache_clear()
    env = envs.make(name)
    for seed, actions in moves:
        env.reset(seed=seed)
        for action in actions:
            env.step(action)


def moves_of(name: str, count: int) -> list[tuple[int, list[str]]]:
    """`count` actions of the random player: seeds of levels with what is played there."""
    env, found, left = envs.make(name), [], count
    for seed in range(count):
        env.reset(seed=seed)
        actions: list[str] = []
        over = False
        while not over and len(actions) < min(left, env.max_turns):
            actions.append(env.players()["random"])
            over = any(env.step(actions[-1])[2:4])
        found.append((seed, actions))
        left -= len(actions)
        if left == 0:
            break
    return found


def lake_levels(count: int) -> None:
    for seed in range(count):
        FrozenLakeEnv(desc=generate_random_map(4, seed=seed), is_slippery=False).reset(seed=seed)


def lake_steps(lake: gymnasium.Env[Any, Any], count: int) -> None:
    rng = random.Random(0)
    lake.reset(seed=0)
    for _ in range(count):
        _, _, over, _, _ = lake.step(rng.randrange(4))
        if over:
            lake.reset(seed=0)


def gym_sokoban() -> Any:
    """The package, which asks setuptools for a module that it no longer has, and warns of its own age."""
    shim = types.ModuleType("pkg_resources")
    shim.resource_filename = lambda package, path: str(  # type: ignore[attr-defined]
        Path(importlib.import_module(package).__file__ or "").parent / path
    )
    sys.modules.setdefault("pkg_resources", shim)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return importlib.import_module("gym_sokoban.envs.sokoban_env").SokobanEnv


def sokoban_levels(kind: Any, count: int) -> None:
    """As the package makes them, of any length, with its smallest picture; one that fails (it raises) is repeated."""
    random.seed(0)
    np.random.seed(0)
    game = kind(dim_room=(6, 6), num_boxes=1, reset=False)
    for _ in range(count):
        while True:
            try:
                game.reset(render_mode="tiny_rgb_array")
                break
            except (RuntimeError, RuntimeWarning):
                continue


def sokoban_steps(game: Any, count: int) -> None:
    """With its smallest picture of each state."""
    rng = random.Random(0)
    for _ in range(count):
        game.step(rng.randrange(1, 5), observation_mode="tiny_rgb_array")


def share(player: Path, file: Path, env: str) -> dict[str, float]:
    """Seconds of one iteration of phase 3 in one environment: in that environment, and in all.

    The model of the player writes, and the environment is played by its random player whatever was written: answers
    that no environment understands cost it nothing.
    """
    import train_phase3_starpo as phase3
    from posttrain.config.loading import resolve
    from posttrain.config.starpo import StarPORun
    from posttrain.models.loading import load
    from posttrain.rollout.episodes import open_sampler
    from posttrain.starpo.run import make_learner

    changes = [f"model.name_or_path={player}", "output_dir=unused", f"envs=[{env}]", "distillation=null"]
    changes += ["evaluation.suites={}", "rollout.groups=8", "rollout.max_context=2048", "protocol.max_turns=25"]
    cfg = resolve(StarPORun, file, changes)
    model, chat = load(cfg.model, device="cpu", chat_template=None)
    learner = make_learner(cfg, model, chat)
    sampler = open_sampler(learner.policy, chat, cfg.rollout.engine)
    kind, play, spent, inside = type(envs.make(env)), Episode.step, 0.0, False

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal spent, inside
            if inside:
                return method(*given, **named)
            start, inside = time.perf_counter(), True
            try:
                return method(*given, **named)
            finally:
                spent, inside = spent + time.perf_counter() - start, False

        return run

    def at_random(episode: Episode, response: str) -> Any:
        return play(episode, format_response("", [episode.env.players()["random"]], episode.protocol))

    with contextlib.ExitStack() as patches:
        for name in ("reset", "step", "observe"):
            patches.enter_context(mock.patch.object(kind, name, timed(getattr(kind, name))))
        patches.enter_context(mock.patch.object(Episode, "step", at_random))
        start = time.perf_counter()
        groups = phase3.rollout(cfg, sampler, chat, 1)
        scored = phase3.score_and_filter(cfg, groups)
        if not scored.kept:  # chance has won nowhere
            scored = scored._replace(kept=list(range(0, len(groups), 2)))
        phase3.update(cfg, learner, phase3.collect(cfg, learner, groups, scored), 1)
    return {"envs": spent, "iteration": time.perf_counter() - start}


def markdown(results: dict[str, Any]) -> str:
    cells = []
    for row in results["rows"]:
        speeds = {name: f"{row['count'] / median(taken):,.0f}" for name, taken in row["seconds"].items()}
        cells.append([row["env"], f"{row['what']}/s", speeds["ours"], "-", "-"])
        for peer in speeds.keys() - {"ours"}:
            cells[-1][3:] = [f"{peer} {speeds[peer]}", _measure.ratio(row["seconds"][peer], row["seconds"]["ours"])]
    text = f"{_measure.told(results)}\n\n{_measure.table(['environment', '', 'ours', 'peer', 'ours vs peer'], cells)}"
    if "shares" in results:
        shares = [
            [name, f"{found['envs']:.2f}", f"{found['iteration']:.1f}", f"{found['envs'] / found['iteration']:.1%}"]
            for name, found in results["shares"].items()
        ]
        text += "\n\n" + _measure.table(["environment", "its seconds", "of an iteration's", "share"], shares)
    return text


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--levels", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--player", type=Path, help="a model: also measure the share of each in an iteration with it")
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of the iteration; the quickstart's by default")
    given = parser.parse_args()
    _measure.threads()

    kind = gym_sokoban()
    np.random.seed(0)
    random.seed(0)
    raw_lake = FrozenLakeEnv(is_slippery=False)
    raw_room = kind(dim_room=(6, 6), num_boxes=1, max_steps=10**9)
    counts: dict[tuple[str, str], int] = {}
    contests: dict[tuple[str, str], dict[str, Callable[[], object]]] = {
        ("frozen_lake", "levels"): {"gymnasium": partial(lake_levels, given.levels)},
        ("frozen_lake", "steps"): {"gymnasium": partial(lake_steps, raw_lake, given.steps)},
        ("sokoban", "levels"): {"gym-sokoban": partial(sokoban_levels, kind, given.levels)},
        ("sokoban", "steps"): {"gym-sokoban": partial(sokoban_steps, raw_room, given.steps)},
    }
    for name in _measure.environments():
        slow = envs.make(name).slow
        levels, steps = (min(count, SLOW) if slow else count for count in (given.levels, given.steps))
        counts[name, "levels"], counts[name, "steps"] = levels, steps
        contests.setdefault((name, "levels"), {})["ours"] = partial(our_levels, name, levels)
        contests.setdefault((name, "steps"), {})["ours"] = partial(our_steps, name, moves_of(name, steps))
    results = _measure.surroundings() | {"repeats": given.repeats, "rows": []}
    for (env, what), contestants in sorted(contests.items()):
        seconds = _measure.alternating(contestants, given.repeats)
        results["rows"].append({"env": env, "what": what, "count": counts[env, what], "seconds": seconds})
    if given.player:
        fast = [name for name in _measure.environments() if not envs.make(name).slow]  # the others play in threads
        results["shares"] = {name: share(given.player, given.config, name) for name in fast}
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
