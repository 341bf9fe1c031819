"""What must an environment be?  A `gymnasium.Env` whose observations and actions are text: a file or package here.

Required are six methods of a subclass of `TextEnv`: `draw`, `key_of`, `begin`, `step`, `observe` and `rules`.
Everything else is optional; `CAPABILITIES` says what each part switches on. examples/minimal_env.py is a whole one.
`copy.deepcopy` of an environment is independent of it and plays on alike: demonstrations plan on a copy.
Nothing here imports torch or the training package.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import string
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import gymnasium
import numpy as np

if TYPE_CHECKING:
    from envs.tools import Tool

T = TypeVar("T")
SPLITS = ("train", "validation", "test")
DRAWS = 2_000  # candidates looked at before a level is declared not to be found
OBSERVATIONS = ("grid", "coordinates", "both", "neighbours")
CAPABILITIES = {
    "state_key": "GiGPO compares turns taken in equal states (without it: under equal observations)",
    "expert": "demonstrations, and the expert beside the model in an evaluation",
    "optimal_success": "the optimum beside the model in an evaluation",
    "players": "demonstrations, and scripted policies beside the model (without it: random play in a list of actions)",
    "cues": "what demonstrations think (without it: nothing)",
    "render": "pictures in transcripts and reports (without it: text alone)",
}


def split_by_hash(level_key: str) -> str:
    """Return which split a level belongs to, decided by the level itself: 80 % train, 10 % validation, 10 % test.

    A level can therefore never be in two splits, whatever seeds produced it.
    """
    bucket = int.from_bytes(hashlib.sha256(level_key.encode()).digest()[:4], "big") % 10
    return SPLITS[max(0, bucket - 7)]


def known(what: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`.

    Args:
        what: what the name stands for, for the message, as "split".
        name: to check.
        choices: allowed names.

    Raises:
        ValueError: it is not one of them; the message lists the choices and guesses which one was meant.
    """
    choices = list(choices)
    if name in choices:
        return name
    close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    raise ValueError(f'There is no {what} "{name}".{guess} Known: {", ".join(choices)}.')


def canonical(rows: Sequence[str]) -> str:
    """Return one text for a grid, its rotations and mirror images: no test level is a training level turned round."""
    turned, images = list(rows), []
    for _ in range(4):
        images += ["\n".join(turned), "\n".join(row[::-1] for row in turned)]
        turned = ["".join(column) for column in zip(*turned[::-1], strict=True)]
    return min(images)


class LateReward(NamedTuple):
    """The rewards of an episode, computed after it: LateReward(0.9, True, {"math": 1.0}, "", {"share": 0.5}, {})."""

    reward: float
    success: bool
    parts: dict[str, float]  # what each reward function gave
    failure: str
    logged: dict[str, float]  # numbers that the functions recorded about all episodes of a call
    extra: dict[str, Any]  # what they recorded about this one


class NoLevel(ValueError):
    """These options leave a split without levels."""


@lru_cache(maxsize=1 << 16)
def draw_level(env: type[TextEnv], config: Hashable, seed: int, split: str) -> Any:
    """Return the level of one seed: the first candidate in `split`.

    It is pure (no draw depends on an earlier one), hence cached: the samples of a group share the cost of their level.

    Raises:
        NoLevel: no candidate is in the split.
    """
    drawn = 0
    for level in islice(env.draw(config, np.random.default_rng([seed, 0])), DRAWS):
        if level is not None and env.split_of(level) in (split, None):
            return level
        drawn += 1
    raise NoLevel(f'{env.name}: no level for the split "{split}" in {drawn:,} draws')


class AnyText(gymnasium.spaces.Text):
    """Every text of up to `max_length` characters, whatever the alphabet. Samples are short and printable."""

    def __init__(self, max_length: int, min_length: int = 1) -> None:
        super().__init__(max_length, min_length=min_length, charset=string.printable)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(max(1, self.min_length), min(64, self.max_length) + 1))
        return super().sample(mask or (length, None) if probability is None else None, probability)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"AnyText({self.max_length}, min_length={self.min_length})"


class OneOf(gymnasium.spaces.Text):
    """The texts of a list: `Discrete`, with names for numbers."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        lengths = [len(text) for text in self.texts]
        super().__init__(max(lengths), min_length=min(lengths), charset=frozenset().union(*self.texts))

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        if mask is not None or probability is not None:
            raise ValueError("This space is sampled without mask or probability.")
        return self.texts[int(self.np_random.integers(len(self.texts)))]

    def contains(self, x: Any) -> bool:
        return x in self.texts

    def __repr__(self) -> str:
        return f"OneOf({', '.join(self.texts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneOf) and self.texts == other.texts


class TextEnv(gymnasium.Env[str, str], ABC):
    """An environment whose observation and action are text.

    `name` is what YAML files call it. `actions` is the list of all actions, or None where an action is free text. The
    list is an attribute of the class; where it depends on options or level, `__init__` or `begin` sets another on
    `self`.

    `reset(seed=s, options={"split": "train"})` is pure: the same seed and split give the same level in any process.
    `options["noise_seed"]` seeds the chance inside the episode (slips, scripted policies) apart from the level; it
    is the seed itself unless given, so the samples of a group share a level without sharing its noise.

    `step` takes ONE action. From a list it is the name as written there; free text is all that stands between
    `<answer>` and `</answer>`, white space included, and never blank. The environment judges it: what it cannot read is
    invalid, and changes nothing. It returns gymnasium's five values; `info` holds
        success              bool, the task is done
        action_is_valid      bool, the action could be read and is allowed; invalid ones cost the format penalty
        action_is_effective  bool, the action changed the state
        failure              str, why the task is lost ("hole"), empty while it is not
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 2}
    name: ClassVar[str]
    actions: tuple[str, ...] | None
    # More attributes of the class, any of which `__init__` may set on `self` where it depends on options.
    label: str = ""  # what figures call it where that is not its name, for a run that plays it twice
    style: str = "plain"  # of rules, observations and thoughts: sentences, or "compact"; an episode sets its protocol's
    action_word: str = "action"  # what its sentences call an action: "expression", "program"
    example_state: str = ""  # what its example is about, or small models copy the example: "If the arms were A and B"
    more_levels: str = "Choose options that allow more levels."  # what to do where a split has none
    harder: str = ""  # options that make its levels harder, for advice: "size: 6, slippery: true"
    easier: str = ""
    max_turns: int = 8  # turns of one action in which the expert wins every level: an episode's limit by default
    slow: bool = False  # `step` waits for a sandbox or a server: rollouts step such environments in threads
    can_be_late: ClassVar[bool] = False  # whether there is a `score`, for many episodes at once
    late: bool = False  # the last `step` gives no reward, as whoever plays calls `score` afterwards
    tools: Sequence[Tool] = ()  # what the model may call before it answers; whoever makes the environment sets them
    max_calls: int = 8  # of tools in an episode
    call_seconds: float = 10.0  # that a call may take
    deterministic: bool = True  # the next state follows from state and action alone: demonstrations may think ahead
    observable: bool = True  # the observation shows the whole state: demonstrations may tell what comes next

    observation_space: gymnasium.spaces.Text
    action_space: gymnasium.spaces.Text
    render_mode: str | None
    made_with: Mapping[str, Any] = MappingProxyType({})  # the options that `make` was given, for messages
    config: Any  # hashable; all that decides which levels there are, given to `draw`
    level: Any  # the current one
    symbols: Mapping[str, str] = MappingProxyType({})  # what stands for each kind of cell, where there is a grid
    noise: np.random.Generator  # chance inside the episode
    policy_rng: np.random.Generator  # the scripted policies' choices, apart from `noise`: asking them changes nothing

    def __init__(self, render_mode: str | None = None):
        if render_mode is not None:
            known("render mode", render_mode, self.metadata["render_modes"])
        self.render_mode = render_mode
        self.config = None
        self.observation_space = AnyText(1 << 16)
        self.action_space = AnyText(1 << 16) if self.actions is None else OneOf(self.actions)

    @property
    def title(self) -> str:
        """Return the name for figures."""
        return self.label or self.name

    @classmethod
    def has(cls, capability: str) -> bool:
        """Return whether the environment defines this part of `CAPABILITIES`. Use this, not hasattr."""
        known("capability", capability, CAPABILITIES)
        if capability == "render":  # declared as gymnasium has it; an override may be about text alone
            return "rgb_array" in cls.metadata["render_modes"]
        return getattr(cls, capability) is not getattr(TextEnv, capability)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the same seed and split give the same level in any process.

        Args:
            seed: of the level; None draws one.
            options: "split" (train, validation or test) and "noise_seed", the seed of chance inside the episode.

        Returns:
            The first observation and info.

        Raises:
            NoLevel: these options of the environment leave the split without levels.
        """
        super().reset(seed=seed)
        options = options or {}
        for key in options:
            known("reset option", key, ("split", "noise_seed"))
        if seed is None:
            seed = int(self.np_random.integers(1 << 62))
        noise_seed = options.get("noise_seed", seed)
        self.noise = np.random.default_rng([noise_seed, 1])
        self.policy_rng = np.random.default_rng([noise_seed, 2])
        split = known("split", options.get("split", "train"), SPLITS)
        try:
            self.level = draw_level(type(self), self.config, seed, split)
        except NoLevel as problem:
            settings = ", ".join(
                f"{option}: {json.dumps(value, default=str)}" for option, value in self.made_with.items()
            )
            with_options = f" with {settings}" if settings else ""
            raise NoLevel(f"{problem}{with_options}. {self.more_levels}") from None
        self.begin(self.level)
        if self.actions is not None and OneOf(self.actions) != self.action_space:  # `begin` set those of the level
            self.action_space = OneOf(self.actions)
        return self.observe(), {"success": False, "action_is_valid": True, "action_is_effective": False, "failure": ""}

    # -- required --------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def draw(cls, config: Any, rng: np.random.Generator) -> Iterator[Any]:
        """Yield candidate levels (hashable, never changed); None for a try without one.

        A split takes the first that is its own, of `DRAWS` at most: yield so many, or fewer with one of each split that
        has levels. So that no split has harder levels than another, candidates must not come in clusters (all starts of
        one room, say): the smallest split would choose among them, the largest not.
        """

    @classmethod
    @abstractmethod
    def key_of(cls, level: Any) -> str:
        """Return a text that is equal for two levels exactly when they are the same puzzle; it decides the split."""

    @abstractmethod
    def begin(self, level: Any) -> None:
        """Put the environment into the level's first state."""

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action.

        Args:
            action: one of `actions`, or free text.

        Returns:
            Observation, reward, terminated, truncated and info, as the class docstring says.
        """

    @abstractmethod
    def observe(self) -> str:
        """Return the current state as text."""

    @abstractmethod
    def rules(self) -> str:
        """Return the task, the legend of the symbols in use and the actions, for the system message."""

    # -- optional: CAPABILITIES says what each switches on -----------------------------------------------------------

    def state_key(self) -> str:
        """Return a text that is equal for two states exactly when the same actions lead to the same futures.

        GiGPO groups turns by it (its anchor states).
        """
        raise NotImplementedError(f"{self.name} has no state_key.")

    def expert(self) -> str:
        """Return the best next action from the current state."""
        raise NotImplementedError(f"{self.name} has no expert.")

    def optimal_success(self, horizon: int) -> float:
        """Return the probability that the best policy succeeds from the current state.

        Args:
            horizon: number of actions left.
        """
        raise NotImplementedError(f"{self.name} has no optimal_success.")

    def players(self) -> dict[str, str]:
        """Return the next action of each scripted policy from the current state: {"random": "Up", "safe": "Left"}.

        Phase 1 demonstrates the format and the rules with them, not the skill: none of them should be good.
        """
        return {} if self.actions is None else {"random": self.choose()}

    def cues(self) -> dict[str, tuple[str, ...]]:
        """Return what matters in the current state: named actions, as {"goal": ("Down",), "safe": ("Left",)}."""
        return {}

    def render(self) -> Any:
        """Return the state as text with `render_mode="ansi"`.

        An environment with pictures overrides this: it declares "rgb_array" in `metadata["render_modes"]` beside
        "ansi", returns an RGB frame (uint8, shape (height, width, 3)) in that mode, and `super().render()` in others.
        """
        return self.observe() if self.render_mode == "ansi" else None

    @classmethod
    def split_of(cls, level: Any) -> str | None:
        """Return which split a level belongs to. Overridden where a data set has its own splits.

        None where the levels are too few to hold any out: every split then has them all.
        """
        return split_by_hash(cls.key_of(level))

    def messages(self) -> list[dict[str, str]] | None:
        """Return the conversation before the first answer, where the environment writes it all itself.

        Its prompts then have no rules, limits and answer format added, and a whole answer is the action. None: they are
        written by wording.py.
        """
        return None

    def heard(self, messages: Sequence[dict[str, Any]]) -> None:
        """Take note of a turn that called tools, and of their answers, which do not change the state."""

    @classmethod
    def score(cls, envs: Sequence[TextEnv]) -> list[LateReward | Exception]:
        """Return the rewards of episodes that are over, for environments whose `late` may be set."""
        raise NotImplementedError(f"{cls.name} has no score.")

    # -- given ------------------------------------------------------------------------------------------------------

    def level_key(self) -> str:
        """Return `key_of` the current level."""
        return self.key_of(self.level)

    def canonical_action(self, action: str) -> str | None:
        """Return the action's own spelling, whatever the case; None for one that is not in the list."""
        return {listed.lower(): listed for listed in self.actions or ()}.get(action.strip().lower())

    def thought(self) -> str:
        """Return the cues as a demonstrator would think them: `goal Down safe Left Down`."""
        return " ".join(f"{cue} {' '.join(actions) or 'none'}" for cue, actions in self.cues().items())

    def thought_of(self, action: str) -> str:
        """Return the thought before this action: another than `thought()` where an action shows how it came about."""
        return self.thought()

    def example(self) -> tuple[str, tuple[str, ...]]:
        """Return a thought and actions that show in the system message how to answer; about no level in particular.

        Small models copy its action. So it should differ from level to level (`by_level`), to favour none.
        """
        return "I look at what is there and choose what brings me closer.", tuple((self.actions or ("...",))[:2])

    def by_level(self, choices: Sequence[T]) -> T:
        """Return one of these, the same for all episodes of a level; the first one before a level is opened."""
        key = self.level_key() if hasattr(self, "level") else ""
        return choices[zlib.crc32(key.encode("utf-8", "surrogatepass")) % len(choices)]

    def choose(self, actions: Sequence[str] = ()) -> str:
        """Return one of these actions by `policy_rng`; of all actions where it is empty."""
        choices = actions or self.actions or ()
        return choices[int(self.policy_rng.integers(len(choices)))]


def steps_in_words(way: tuple[int, int], moves: Mapping[str, tuple[int, int]]) -> str:
    """Return a way of (down, right) cells as steps in each direction: `Left 1 Up 2`; `here` for (0, 0)."""
    ahead = {name: down * way[0] + right * way[1] for name, (down, right) in moves.items()}
    return " ".join(f"{name} {steps}" for name, steps in ahead.items() if steps > 0) or "here"


def with_symbols(defaults: Mapping[str, str], custom: Mapping[str, str] | None) -> dict[str, str]:
    """Return the default symbols of cells, replaced by the user's.

    Args:
        defaults: symbol of each kind of cell.
        custom: the user's, for some of them.

    Raises:
        ValueError: a symbol is not a single word, or two cells share one.
    """
    symbols = dict(defaults)
    for cell, symbol in (custom or {}).items():
        symbols[known("cell to give a symbol", cell, defaults)] = symbol
    for cell, symbol in symbols.items():
        if not symbol or any(c.isspace() or c in "<>" for c in symbol):
            raise ValueError(f'The symbol of "{cell}" is {symbol!r}: use one word without spaces or angle brackets.')
    if len(set(symbols.values())) < len(symbols):
        raise ValueError(f"Two cells share a symbol: {symbols}. Give each its own.")
    return symbols
