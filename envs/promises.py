"""What does an environment promise, and which promises does it break?  A function each, which says so in sentences."""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from envs import SPLITS, TextEnv, gymnasium_id, make
from envs.base import NoLevel
from envs.episode import Episode
from envs.in_time import named_error
from envs.players import demonstrate, next_action, play_scripted, player_names
from envs.protocol import ACTION_SEP, Protocol, format_response, parse
from envs.web import NoAnswer

LEVELS = 64  # drawn from each split to count the different ones
FEW = 0.25  # below this share of different levels, held-out episodes repeat each other
SAME = "success there is counted on the same few levels again and again"
LONG = 100  # turns in which an expert that knows no deadline does as well as one that does
TURNS = 1400  # of an episode, at most: players that cannot win use any number that an option allows; 2048 needs 1358
SAMPLE = 12  # levels that are played for each promise about steps
MOST = 3  # sentences about one promise
PATIENCE = 60  # seconds for all hostile texts
UNKNOWN = "no such action"
INFO = {"success": bool, "action_is_valid": bool, "action_is_effective": bool, "failure": str}


@dataclass(frozen=True)
class Subject:
    """What is checked: Subject("frozen_lake", {"size": 4}, Protocol(), episodes=200, split="test")."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=Protocol)
    episodes: int = 200
    split: str = "test"

    def make(self) -> TextEnv:
        return make(self.name, **self.options)

    def at(self, seed: int, split: str = "train") -> TextEnv:
        """Return the environment at the start of a level."""
        env = self.make()
        env.reset(seed=seed, options={"split": split})
        return env

    @cached_property
    def players(self) -> list[str]:
        return player_names(self.at(0))

    @cached_property
    def levels(self) -> dict[str, list[Any]]:
        """Return `LEVELS` levels of each split."""
        return {split: [self.at(seed, split).level for seed in range(LEVELS)] for split in SPLITS}

    @cached_property
    def distinct(self) -> dict[str, int]:
        """Return how many levels of each split are different."""
        env = self.make()
        return {split: len({env.key_of(level) for level in levels}) for split, levels in self.levels.items()}


def protocol_for(env: TextEnv, turns: int | None = None) -> Protocol:
    """Return the protocol in which an environment is checked: its own number of turns up to `TURNS`, unless given."""
    return Protocol.of(env, max_turns=min(env.max_turns, TURNS) if turns is None else turns)


def broken_promises(subject: Subject) -> list[str]:
    """Return what does not hold, one sentence each; empty for a good environment.

    Raises:
        NoLevel: a split has no levels.
        NoAnswer: a server does not answer.
    """
    broken: list[str] = []
    for promise in PROMISES:
        sentences: list[str] = []
        try:
            for sentence in promise(subject):
                if sentence not in sentences:
                    sentences.append(sentence)
                if len(sentences) == MOST:
                    break
        except (NoLevel, NoAnswer):
            raise
        except (Exception, SystemExit) as error:  # an environment may raise anything
            if not already(broken, cause := where_raised(subject, error)):
                checked = (inspect.getdoc(promise) or "").partition("\n")[0]
                sentences.append(f"{cause[:-1]} while this was checked: {checked}")
        broken += sentences
    return broken


def already(sentences: Iterable[str], cause: str) -> bool:
    """Return whether the same error at the same place was reported before, by any check."""
    return any(sentence.startswith(cause[:-1]) for sentence in sentences)


def where_raised(subject: Subject, error: BaseException) -> str:
    """Return where an environment raised, as a sentence: the innermost line of its own file, or of any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = inspect.getsourcefile(type(subject.make()))
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"it raised {named_error(error)} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})."


# -- the promises ------------------------------------------------------------------------------------------------------


def gymnasiums_api(subject: Subject) -> Iterator[str]:
    """It passes gymnasium's check_env, with every render mode that it declares."""
    kind: Any = type(subject.make())
    spec = EnvSpec(gymnasium_id(kind), entry_point=kind)  # also of a class that gymnasium does not know by name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(gymnasium.make(spec, **subject.options).unwrapped)
        except AssertionError as error:
            yield f"gymnasium's check_env fails: {error}"
    for warning in caught:
        if issubclass(warning.category, ResourceWarning):  # of any object that is collected meanwhile
            continue
        message = re.sub(r"\x1b\[\d+m|WARN: ", "", str(warning.message))  # gymnasium's colours
        yield f"gymnasium's check_env warns: {message}"
    if "ansi" not in subject.make().metadata["render_modes"]:
        yield 'metadata["render_modes"] lacks "ansi", which every environment has.'


def distinct_levels(subject: Subject) -> Iterator[str]:
    """Each split has many different levels."""
    env = subject.make()
    for split, count in subject.distinct.items():
        held_out = any(env.split_of(level) is not None for level in subject.levels[split])
        if held_out and count < FEW * LEVELS:
            yield (
                f"the split {split} has only {count} different levels in {LEVELS} draws: {SAME}. Let draw() make"
                " more of them, or choose options with more levels; where there are no more, let split_of() return"
                " None."
            )


def disjoint_splits(subject: Subject) -> Iterator[str]:
    """No level is in two splits."""
    env = subject.make()
    homes = {split: {env.split_of(level) for level in levels} for split, levels in subject.levels.items()}
    for split, of_levels in homes.items():
        if others := sorted(str(home) for home in of_levels - {split, None}):
            yield f"the split {split} gave levels of {', '.join(others)}."
    for one, other in itertools.combinations(SPLITS, 2):
        if None in homes[one] | homes[other]:
            continue
        keys = {env.key_of(level) for level in subject.levels[one]} & {
            env.key_of(level) for level in subject.levels[other]
        }
        same = set(subject.levels[one]) & set(subject.levels[other])
        if keys or same:
            yield (
                f"{max(len(keys), len(same))} of {LEVELS} levels are both in {one} and in {other}: key_of() must be a"
                " function of the level, and split_of() of its key."
            )


def pure_resets(subject: Subject) -> Iterator[str]:
    """A seed and a split give one level, and the same actions the same episode."""
    for split, seed in itertools.product(SPLITS, range(SAMPLE)):
        env, other = subject.at(seed, split), subject.at(seed, split)
        first, key = env.observe(), env.level_key()
        if (other.observe(), other.level_key()) != (first, key):
            yield f"reset(seed={seed}) gave two environments of the split {split} different levels."
        walks = [_walk(each, subject.players, seed) for each in (env, other)]
        if walks[0] != walks[1]:
            yield f"reset(seed={seed}) and the same actions gave two episodes: chance must come from self.noise."
        env.reset(seed=seed, options={"split": split})
        if (env.observe(), env.level_key()) != (first, key):
            yield f"reset(seed={seed}) after an episode begins elsewhere: begin() must set the whole state again."
        env.reset(seed=seed, options={"split": split, "noise_seed": seed + 1})
        if (env.observe(), env.level_key()) != (first, key):
            yield f"another noise_seed changes the first state of reset(seed={seed}): begin() must not use self.noise."


def _walk(env: TextEnv, players: list[str], seed: int, turns: int = 6) -> list[Any]:
    """Return what a few actions lead to."""
    rng, steps = np.random.default_rng(seed), []
    for _ in range(turns):
        observation, reward, over, cut, info = env.step(some_action(env, players, rng))
        steps.append((observation, float(reward), bool(over), bool(cut), bool(info["success"])))
        if over or cut:
            break
    return steps


def some_action(env: TextEnv, players: list[str], rng: np.random.Generator) -> str:
    """Return one of the listed actions, or for free text what a player says, if there is one."""
    if env.actions is not None:
        return env.actions[int(rng.integers(len(env.actions)))]
    return next_action(env, players[int(rng.integers(len(players)))]) if players else "some text"


def steps_that_say_all(subject: Subject) -> Iterator[str]:
    """step() returns five values, and info says whether the action was valid and had an effect."""
    for seed in range(SAMPLE):
        env, rng = subject.at(seed), np.random.default_rng(seed)
        for turn in range(8):
            action = UNKNOWN if turn == 1 and env.actions is not None else some_action(env, subject.players, rng)
            before = _state(env)
            result = env.step(action)
            wrong = list(_wrong_step(env, action, before, result))
            yield from wrong
            if wrong or result[2] or result[3]:
                break


def _state(env: TextEnv) -> str:
    return env.state_key() if env.has("state_key") else env.observe()


def _wrong_step(env: TextEnv, action: str, before: str, result: Any) -> Iterator[str]:
    """Yield what is wrong with what a step returned."""
    did = f"step({action!r})"
    if not isinstance(result, tuple) or len(result) != 5:
        yield f"{did} returned {result!r}, not observation, reward, terminated, truncated and info."
        return
    observation, reward, over, cut, info = result
    if observation != env.observe():
        yield f"{did} returned another text than observe() does."
    if not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        yield f"{did} gave the reward {reward!r}, which is not a finite number."
    if not all(isinstance(flag, bool | np.bool_) for flag in (over, cut)):
        yield f"{did} returned terminated={over!r}, truncated={cut!r}: both must be bool."
    for key, kind in INFO.items():
        value = info.get(key)
        if not isinstance(value, kind | np.bool_ if kind is bool else kind):
            yield f'{did} has {value!r} for info["{key}"], which must be a {kind.__name__}.'
            return
    changed = _state(env) != before
    if info["success"] and info["failure"]:
        yield f'{did} both succeeds and fails ("{info["failure"]}").'
    if action == UNKNOWN and info["action_is_valid"]:
        yield f"{did} is reported as valid, though it is not in the list of actions."
    if not info["action_is_valid"] and (changed or info["action_is_effective"]):
        yield f"{did} was invalid and yet changed the state: an invalid action must change nothing."
    elif env.has("state_key") and changed != info["action_is_effective"]:
        now = "another" if changed else "the same"
        yield f"{did} has action_is_effective={info['action_is_effective']} and {now} state_key as before."


def play_in_the_protocol(subject: Subject) -> Iterator[str]:
    """A model can be told the rules, and its answers reach the environment."""
    env, protocol = subject.at(0), subject.protocol
    if env.messages() is None and not (isinstance(env.rules(), str) and env.rules().strip()):
        yield f"rules() returned {env.rules()!r}, not the text that begins the system message."
    if not isinstance(env.observe(), str) or not env.observe().strip():
        yield f"observe() returned {env.observe()!r}, not the text of the state."
    for action in env.actions or ():
        read = parse(format_response("so", [action], protocol), protocol, env.actions)
        if read.actions != [action]:
            yield (
                f"the action {action!r} is read as {read.actions or read.invalid}: names need letters, differ in more"
                f" than case, and hold neither tags nor {ACTION_SEP}."
            )
    turns, valid = 0, 0
    for seed in range(SAMPLE):
        episode, rng = Episode(subject.make(), protocol, seed), np.random.default_rng(seed)
        while not episode.done:
            turn = episode.step(format_response("so", [some_action(episode.env, subject.players, rng)], protocol))
            turns, valid = turns + 1, valid + turn.valid
    if not valid and (subject.players or env.actions is not None):
        yield f"none of {turns} well-formed answers was valid: every turn is penalised, and nothing can be learnt."


def scripted_policies(subject: Subject) -> Iterator[str]:
    """The expert and the players play what can be played, and asking them changes nothing."""
    for seed in range(SAMPLE):
        queried, alone = subject.at(seed), subject.at(seed)
        rng = np.random.default_rng(seed)
        for _ in range(4):
            names = player_names(queried)
            if names != subject.players:
                yield f"players() names {names} in one state and {subject.players} in another."
                return
            for name in names:
                action = next_action(queried, name)
                if queried.actions is not None and action not in queried.actions:
                    yield f"{name} plays {action!r}, which is not in the list of actions."
                elif not isinstance(action, str) or not action.strip() or "</answer>" in action:
                    yield f"{name} plays {action!r}, which is not a text that can stand in an answer."
            queried.thought()
            _state(queried)
            action = some_action(alone, [], rng)
            results = [each.step(action)[:4] for each in (queried, alone)]
            if results[0] != results[1]:
                yield "asking for players, cues or the state key changed what came next: they must change nothing."
            if results[1][2] or results[1][3]:
                break
    if subject.make().has("expert"):
        for seed in range(SAMPLE):
            episode = play_scripted(subject.make(), "expert", subject.protocol, seed, "train")
            if episode.invalid_turns:
                yield f"the expert's action on seed {seed} is invalid."


def independent_copies(subject: Subject) -> Iterator[str]:
    """A copy is independent and plays on alike: demonstrations think ahead on it."""
    for seed in range(SAMPLE):
        env, other = subject.at(seed), subject.at(seed)
        copied, before = copy.deepcopy(env), env.observe()
        ahead = _walk(copied, subject.players, seed)
        kept = env.observe() == before
        if not kept or not ahead == _walk(env, subject.players, seed) == _walk(other, subject.players, seed):
            yield "copy.deepcopy() gives an environment that shares state with its original, or plays on otherwise."


def winning_expert(subject: Subject) -> Iterator[str]:
    """Without chance, and without a claim about the optimum, the expert wins every level within `max_turns`."""
    env = subject.make()
    if not env.has("expert") or env.has("optimal_success") or not env.deterministic:
        return
    protocol = protocol_for(env)
    for seed in range(subject.episodes):
        if not play_scripted(subject.make(), "expert", protocol, seed, subject.split).success:
            yield (
                f"the expert does not win the {subject.split} level of seed {seed} within max_turns="
                f"{protocol.max_turns}: raise max_turns, or define optimal_success where a level cannot be won."
            )


def claimed_optimum(subject: Subject) -> Iterator[str]:
    """Play does not contradict optimal_success: no player wins more often, and the expert not less often.

    The wins on levels with the chances p_i have the mean sum(p_i) and the variance sum(p_i (1 - p_i)); four standard
    deviations away is a contradiction. Where every chance is 0 or 1 that is any difference at all. An expert that
    knows no deadline may fall short of a chance within few turns, so chances in between are compared in long episodes.
    """
    if not subject.make().has("optimal_success"):
        return
    episodes = subject.episodes
    for limit in (subject.protocol, Protocol(max_turns=LONG, max_actions=LONG)):
        chances = [subject.at(seed, subject.split).optimal_success(limit.max_actions) for seed in range(episodes)]
        if any(not 0 <= chance <= 1 + 1e-9 for chance in chances):
            yield f"optimal_success({limit.max_actions}) gave {max(chances, key=abs):g}, which is not a probability."
            return
        expected, certain = sum(chances), all(chance in (0, 1) for chance in chances)
        noise = 4 * math.sqrt(sum(chance * (1 - chance) for chance in chances)) + 1e-6
        for player in subject.players:
            wins = sum(
                play_scripted(subject.make(), player, limit, seed, subject.split).success for seed in range(episodes)
            )
            text = f"{wins} of {episodes} levels in {limit.max_turns} turns; optimal_success adds up to {expected:.1f}"
            if wins > expected + noise:
                yield f"{player} wins {text}: the claimed optimum is too low."
            elif player == "expert" and wins < expected - noise and (certain or limit.max_turns == LONG):
                yield f"the expert wins {text}: either it does not play its best, or the optimum is too high."


def hostile_text(subject: Subject) -> Iterator[str]:
    """Whatever a model writes is read in time, runs no code, and wins nothing (played in a process of its own)."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "executed"
        try:
            done = _elsewhere(subject, "--hostile", str(marker), timeout=PATIENCE)
            events, ended = done.stdout, f"ended its process with exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            events, ended = (
                output.decode() if isinstance(output, bytes) else output,
                f"was not read within {PATIENCE} seconds",
            )
        last = "the first"
        for event in (json.loads(line) for line in events.splitlines() if line.startswith('{"')):
            last = event.get("text", last)
            if "broken" in event:
                yield event["broken"]
        if '{"done": true}' not in events:
            yield f"the hostile text {last} {ended}."
        if marker.exists():
            yield "it executed the text of an answer: parse answers, never eval() them."


def same_in_every_process(subject: Subject) -> Iterator[str]:
    """Another process with another PYTHONHASHSEED sees the same levels, observations and demonstrations."""
    done = _elsewhere(subject, "--digest")
    if done.stdout.split()[-1:] != [env_digest(subject)]:  # what comes before it, the environment printed
        yield (
            "a second process with another PYTHONHASHSEED sees other levels: draw() and begin() must not depend on"
            f" hash(), the order of a set, the time or global generators. {done.stderr[-300:]}".rstrip()
        )


def _elsewhere(subject: Subject, *flags: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `posttrain env check` with one of its hidden flags in another process."""
    root = str(Path(__file__).parents[1])
    options = [f"{key}={json.dumps(value)}" for key, value in subject.options.items()]
    turns = str(subject.protocol.max_turns)
    return subprocess.run(
        [sys.executable, "-P", "-m", "envs.check", subject.name, *options, "--turns", turns, *flags],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def env_digest(subject: Subject, seeds: int = 20) -> str:
    """Return a fingerprint of the levels, observations, noise and demonstrations of an environment."""
    parts, players = [], subject.players
    for split, seed in itertools.product(SPLITS, range(seeds)):
        env = subject.at(seed, split)
        parts += [env.observe(), env.level_key()]
        parts += [str(step) for step in _walk(env, players, seed)]
        if players:
            mix = {player: 1 / len(players) for player in players}
            parts += [m["content"] for m in demonstrate(subject.make(), subject.protocol, seed, split, mix)]
    return hashlib.sha256("\x00".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


PROMISES: tuple[Callable[[Subject], Iterator[str]], ...] = (
    gymnasiums_api,
    distinct_levels,
    disjoint_splits,
    pure_resets,
    steps_that_say_all,
    play_in_the_protocol,
    scripted_policies,
    independent_copies,
    winning_expert,
    claimed_optimum,
    same_in_every_process,
    hostile_text,
)
