"""How many rows, tokens and turns will a run see?  What its config says, and typical lengths where it says nothing.

Every number can be written over: `--plan all:rows=56000,tokens=400` or `--plan A10G:new=30,turns=5`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from envs.episode import Episode
from envs.protocol import format_response
from posttrain.config import DPORun, Source, StarPORun
from posttrain.rollout import RAISED, most_turns, new_episode
from posttrain.types import Trajectory

CHARACTERS = (
    3.5  # of a token, in prose with numbers: SmolLM2's tokenizer makes 170 tokens of GSM8K's 522 and a template
)
OF_STATES = 2.5  # of a token, in rules and states of environments, which are full of signs

# Rows where a source keeps all of them, and tokens of a row (of a pair: both answers, and the prompt twice).
# OpenMathInstruct: a question of 60 tokens and its solution. Capybara: "over 1,000 tokens", its card. UltraFeedback:
# two answers of 300 tokens and a short prompt. GSM8K and what is generated here: counted. `messages` and `preferences`
# are files, whose bytes are counted where they exist.
TYPICAL = {
    "openmathinstruct": (1_000_000, 250),
    "gsm8k": (6949, 190),
    "capybara": (16_000, 1000),
    "demonstrations": (2000, 300),
    "messages": (10_000, 400),
    "ultrafeedback": (58_000, 800),
    "preferences": (10_000, 800),
    "prompts": (10_000, 60),
}
EMBEDDED = {"openmathinstruct": 80, "capybara": 130, "demonstrations": 270, "ultrafeedback": 142, "prompts": 20}


class DataRows(NamedTuple):
    """The data of phase 1 or 2: Rows(rows=56000, tokens=400, trained=0.6, padding=0.08)

    rows: conversations, or pairs, of which both answers are read behind the prompt.
    """

    rows: float
    tokens: float  # of a row on average; of a pair, both halves
    trained: float = 0.6  # share of the tokens that have a label: answers are longer than questions
    padding: float = 0.08  # tokens of padding for each real one, in batches of similar length

    @classmethod
    def of(cls, cfg: Any, known: Mapping[str, float]) -> DataRows:
        found = [_source(source) for source in cfg.data.sources]
        rows = sum(count for count, _ in found)
        tokens = min(cls.longest(cfg), sum(count * each for count, each in found) / max(1.0, rows))
        # chosen and rejected are padded to the longer one
        assumed = cls(rows, tokens, padding=0.22 if isinstance(cfg, DPORun) else 0.08)
        return assumed._replace(**{key: value for key, value in known.items() if key in cls._fields})

    @staticmethod
    def longest(cfg: Any) -> int:
        """Tokens that a row may have; a pair has two."""
        return cfg.data.max_length * (1 + isinstance(cfg, DPORun))


def _source(source: Source) -> tuple[float, float]:
    """Rows that are seen in an epoch, and their tokens."""
    rows, tokens = TYPICAL[source.kind]
    if source.path == "embedded":
        tokens = EMBEDDED.get(source.kind, tokens)
    file = Path(source.path)
    if file.is_file() and file.suffix == ".jsonl":
        with file.open("rb") as lines:
            rows = sum(1 for _ in lines)
        tokens = file.stat().st_size / max(1, rows) / CHARACTERS
    return min(rows, source.rows or rows) * source.weight, tokens


class Episodes(NamedTuple):
    """One iteration of phase 3: Episodes(groups=8, samples=16, turns=5, prompt=250, new=64, reply=60, kept=0.25)"""

    groups: int
    samples: int  # conversations that share a prompt, which is read once
    turns: float
    prompt: float
    new: float  # tokens sampled in a turn
    reply: float  # tokens of the environment's answer to it
    kept: float = 1.0  # share of the groups that is trained on
    longest: float = float("inf")  # tokens that a context may have

    @property
    def context(self) -> float:
        """Tokens of a whole conversation."""
        return min(self.longest, self.prompt + self.turns * self.new + max(0.0, self.turns - 1) * self.reply)

    @classmethod
    def of(cls, cfg: StarPORun, known: Mapping[str, float]) -> Episodes:
        """Every turn that an episode may have, and every answer as long as it may be."""
        texts = [_texts(cfg, number) for number in range(len(cfg.envs))]
        prompt, reply = (sum(text[part] for text in texts) / len(texts) / OF_STATES for part in (0, 1))
        groups = cfg.rollout.groups
        assumed = cls(
            groups=groups,
            samples=cfg.rollout.num_generations,
            turns=most_turns(cfg.envs, cfg.protocol),
            prompt=prompt,
            new=cfg.rollout.max_completion_length,
            reply=reply,
            kept=cfg.algorithm.filter.most(groups, len(cfg.envs)) / groups,
            longest=cfg.rollout.max_context,
        )
        return assumed._replace(**{key: value for key, value in known.items() if key in cls._fields})


def _texts(cfg: StarPORun, number: int) -> tuple[float, float]:
    """Characters of the first prompt of an environment, and of its reply to an action."""
    episode = new_episode(cfg.envs[number], cfg.protocol, 0, "train", 0)
    if isinstance(episode, Trajectory):  # it raised; the run will say so
        return 1000.0, 200.0
    prompt = sum(len(message["content"]) for message in episode.messages)
    return float(prompt), _reply(episode, prompt / 4)


def _reply(episode: Episode, otherwise: float) -> float:
    listed = list(episode.env.actions or ["1"])
    try:
        turn = episode.step(format_response("x", [random.Random(0).choice(listed)], episode.protocol))
    except RAISED:
        return otherwise
    return float(len(turn.user)) if turn.user else otherwise
