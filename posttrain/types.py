"""Which types do the packages exchange?  The few plain ones that every layer may use; nothing here imports torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # OWNER/NAME of a model or a data set of the Hub
Record = dict[str, Any]  # a row of transcripts.jsonl (one answer, pair or episode), or a part of results.json


class UserError(Exception):
    """Something the user can fix: one paragraph with what is wrong, where, and what to write instead.

    Every script prints it without a traceback and exits with code 2.
    """


def one_line(error: BaseException) -> str:
    """Return an exception as part of a sentence: "OSError: No such file"; a terminal obeys nothing in it."""
    try:
        words = " ".join(str(error).split())[:300]
    except Exception:  # somebody's exception may raise anything
        words = "(without words: its __str__ raised)"
    return f"{type(error).__name__}: {for_terminal(words)}"


def for_terminal(text: str) -> str:
    """Return a text that a terminal shows and does not obey: all but line feeds that cannot be printed is escaped."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def markdown_text(value: object) -> str:
    """Return one line that Markdown shows as it is."""
    plain = " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("`", "\\`").replace("[", "\\[")


def short_name(model: str) -> str:
    """Return a model's name in one word: runs/mine/phase3/final -> phase3, owner/SmolLM2-135M -> SmolLM2-135M."""
    parts = [part for part in PurePath(model).parts if part not in ("final", ".", "..", "/")]
    return parts[-1] if parts else "model"


class Words(NamedTuple):
    """What messages call the tasks of environments, and what a model does with them."""

    level: str
    levels: str
    won: str
    plays: str
    episodes: str
    samples: str  # several tries at one task


OF_GAMES = Words("level", "levels", "won", "plays", "episodes", "episodes of a level")
OF_PROMPTS = Words("prompt", "prompts", "solved", "answers", "answers", "answers to a prompt")


def words_of(environments: Iterable[str]) -> Words:
    """Return the words for environments of these names: those of questions and answers where all are `prompts`."""
    return OF_PROMPTS if set(environments) == {"prompts"} else OF_GAMES


def value_at(section: Any, path: str) -> Any:
    """Return the value at a dotted path: value_at({"a": {"b": 1}}, "a.b") -> 1; None where a key is missing."""
    for key in path.split("."):
        section = section.get(key) if isinstance(section, dict) else None
    return section


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for one place in a run, e.g. `derive_seed(run_seed, "rollout", step, group, sample)`.

    Seeds are computed from the place, not drawn from a generator: the same place gets the same seed in any process and
    after any resume.

    Args:
        *parts: numbers and names of the place.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, whatever a checkpoint's generation_config says.

    `temperature=0` is greedy. `top_k=0` and `top_p=1` switch those filters off; `repetition_penalty=1` likewise.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Completion:
    """One sampled answer: Completion(ids=[17, 4, 2], logprobs=[-0.1, -1.2, -0.3], finished=True).

    `ids` are exactly the sampled tokens, the stop token included; `logprobs` are natural logs under the sampling
    distribution before top-k, top-p and penalty (at the temperature used); `finished` is False when the budget ran out
    first. `version` numbers the weights that wrote it, where these change while episodes are played.
    """

    ids: list[int]
    logprobs: list[float]
    finished: bool
    version: int = 0


@dataclass
class Segment:
    """One context as the model saw it, and the turns that were sampled in it.

    Example, a prompt P of 3 tokens, an answer of 2, the reply of 2, a forced opening tag F, an answer of 1:
        ids           [p, p, p, a, a, e, e, f, a]
        mask          [0, 0, 0, 1, 1, 0, 0, 0, 1]   True exactly on tokens sampled here, the stop token included
        logprobs      [0, 0, 0, x, x, 0, 0, 0, x]   the sampler's natural logs, 0 elsewhere
        first_turn    0                             the oldest turn of the episode that is in context
        turns         [0, 1]                        numbers of the turns sampled here
        turn_starts   [3, 7]                        where the text of each begins, a forced tag included
        turn_ends     [5, 9]                        index after the last sampled token of each
    A turn that was sampled in an earlier segment may be in context as well; its tokens are not sampled here.
    """

    ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_turn: int = 0
    turns: list[int] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = self.mask or [False] * len(self.ids)
        self.logprobs = self.logprobs or [0.0] * len(self.ids)
        assert len(self.ids) == len(self.mask) == len(self.logprobs)

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample.

        Args:
            ids: token ids of an observation, a header or a forced tag.
        """
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def write(self, turn: int, completion: Completion, opening: int = 0) -> None:
        """Append a sampled turn.

        Args:
            turn: number of the turn in the episode.
            completion: the sampled tokens.
            opening: number of tokens before it, of a forced tag, that belong to its text.
        """
        self.turns.append(turn)
        self.turn_starts.append(len(self.ids) - opening)
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.turn_ends.append(len(self.ids))

    @property
    def tokens(self) -> int:
        """Return the number of tokens that were sampled here."""
        return sum(self.mask)


@dataclass
class Trajectory:
    """One episode: the contexts in which its turns were sampled, and the environment's reply to each turn.

    Per turn: `turn_rewards` (from the environment), `turn_penalties` (for the format), `state_keys` (the exact state
    it was answered in) and `versions` (of the weights that wrote it). The turns of all segments, one after another, are
    the turns of the episode in order, so with the whole history in context there is one segment. An episode whose
    environment raised before its first turn has none.
    `terminated`: the environment ended. `truncated`: a limit ended it. `crashed`: the environment raised (never a
    zero reward).
    `out_of_context`: that limit was the context, into which the next prompt did not fit.
    `dropped_turns`: earlier turns that no longer fitted into the context.
    `calls`: of tools, those beyond the limit aside. `failed_calls`: those answered with an error. None without tools.
    `reward_parts`: what each of several reward functions gave. `unscored`: the environment, until these were called.
    `logged`, `extra`: what they recorded, about all episodes of a call and about this one.
    `seed` decides what was sampled, `level_seed` and `noise_seed` what the environment did.
    """

    segments: list[Segment] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_penalties: list[float] = field(default_factory=list)
    state_keys: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    env: str = ""
    level_key: str = ""
    level_seed: int = 0
    noise_seed: int | None = None
    seed: int = 0
    group: int = 0
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    out_of_context: bool = False
    crashed: str = ""
    invalid_turns: int = 0
    malformed_turns: int = 0
    unfinished_turns: int = 0
    dropped_turns: int = 0
    actions: list[str] = field(default_factory=list)
    effective_actions: int = 0
    failure: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: int | None = None
    failed_calls: int | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    unscored: Any = field(default=None, repr=False)

    @property
    def turns(self) -> int:
        return len(self.turn_rewards)

    @property
    def turn_scores(self) -> list[float]:
        """Return the reward of each turn, penalty included: the input of turn-level advantages."""
        return [reward + penalty for reward, penalty in zip(self.turn_rewards, self.turn_penalties, strict=True)]

    @property
    def reward(self) -> float:
        """Return the raw return of the episode, penalties included: the input of filters and advantages."""
        return sum(self.turn_rewards) + sum(self.turn_penalties)

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens in all turns."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def turn_tokens(self) -> list[int]:
        """Return the number of sampled tokens in each turn."""
        return [
            sum(segment.mask[start:end])
            for segment in self.segments
            for start, end in zip(segment.turn_starts, segment.turn_ends, strict=True)
        ]

    @property
    def sampled_ids(self) -> list[int]:
        """Return the sampled tokens of all turns, in the order of `turn_tokens`."""
        return [token for s in self.segments for token, on in zip(s.ids, s.mask, strict=True) if on]

    @property
    def sampled_logprobs(self) -> list[float]:
        """Return the sampler's log-probs of `sampled_ids`, in nats."""
        return [logprob for s in self.segments for logprob, on in zip(s.logprobs, s.mask, strict=True) if on]

    @property
    def context(self) -> int:
        """Return the tokens of the longest context, prompt and replies included."""
        return max((len(segment.ids) for segment in self.segments), default=0)
