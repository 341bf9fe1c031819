"""What do the parts hand to each other?  The few plain types that every floor may use; nothing here imports torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


class UserError(Exception):
    """Something the user can mend: one paragraph with what is wrong, where, and what to write instead.

    Every script prints it without a traceback and exits with code 2.
    """


def address(*parts: int | str) -> int:
    """A 63-bit seed for one place in a run, e.g. `address(run_seed, "rollout", step, group, sample)`.

    Randomness is addressed, not consumed: the same place gets the same seed in any process and after any resume.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; nothing is ever inherited from a checkpoint's generation_config.

    `temperature=0` is greedy. `top_k=0` and `top_p=1` switch those filters off; `repetition_penalty=1` likewise.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Completion:
    """What the model wrote in one go: Completion(ids=[17, 4, 2], logprobs=[-0.1, -1.2, -0.3], finished=True).

    `ids` are exactly the sampled tokens, the stop token included; `logprobs` are natural logs under the sampling law
    before top-k, top-p and penalty (at the temperature used); `finished` is False when the budget ran out first.
    """

    ids: list[int]
    logprobs: list[float]
    finished: bool


@dataclass
class Trajectory:
    """One episode as the model saw it: token ids of the whole conversation and which of them the model sampled.

    Example, a prompt P of 3 tokens, an answer of 2, the world's reply of 2, an answer of 1:
        ids           [p, p, p, a, a, e, e, a]
        mask          [0, 0, 0, 1, 1, 0, 0, 1]      True exactly on sampled tokens, the stop token included
        logprobs      [0, 0, 0, x, x, 0, 0, x]      the sampler's natural logs, 0 elsewhere
        turn_ends     [5, 8]                        index after the last sampled token of each turn
        turn_rewards  [0.0, 1.0]                    what the world paid for each turn, penalties apart
        turn_penalties[-0.1, 0.0]                   format penalties
        state_keys    ["...", "..."]                the state each turn was answered in
    `terminated`: the world ended. `truncated`: a limit ended it. `crashed`: the world raised (never a zero reward).
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_penalties: list[float] = field(default_factory=list)
    state_keys: list[str] = field(default_factory=list)
    world: str = ""
    level_key: str = ""
    seed: int = 0
    group: int = 0
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    crashed: str = ""
    invalid_turns: int = 0
    unfinished_turns: int = 0
    actions: list[str] = field(default_factory=list)
    effective_actions: int = 0
    failure: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Raw return of the episode, penalties included: what filters and advantages start from."""
        return sum(self.turn_rewards) + sum(self.turn_penalties)
