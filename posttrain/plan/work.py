"""How many rows, tokens and turns does a run process?  By its config, and typical lengths where that does not say it.

Every number can be replaced: `--plan all:rows=56000,tokens=400` or `--plan A10G:new=30,turns=5`.
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
from posttrain.types import Trajectory, UserError

# Characters of a token in prose with numbers: SmolLM2's tokenizer makes 170 tokens of 522 in GSM8K and a template.
CHARACTERS = 3.5
OF_STATES = 2.5  # characters of a token in rules and states of environments, which have many symbols

# By kind of source: rows, if all are kept, and tokens of a row (of a pair: both answers, and the prompt twice).
# OpenMathInstruct: a question of 60 tokens and its solution. Capybara: "over 1,000 tokens" on its card. UltraFeedback:
# two answers of 300 tokens and a short prompt. GSM8K and generated rows: counted. `messages` and `preferences` are
# files, whose bytes are counted if they exist.
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
    """The data of phase 1 or 2: DataRows(rows=56000, tokens=400, trained=0.6, padding=0.08)

    rows: conversations, or pairs, of which both answers are read after the prompt.
    """

    rows: float
    tokens: float  # of a row on average, of a pair in both answers together
    trained: float = 0.6  # share of the tokens that have a label: answers are longer than questions
    padding: float = 0.08  # tokens of padding for each real one, in batches of similar length

    @classmethod
    def of(cls, cfg: Any, known: Mapping[str, float]) -> DataRows:
        """Return the expected data of a config. known: numbers that replace those that are assumed."""
        sources = [_source(source) for source in cfg.data.sources]
        rows = sum(count for count, _ in sources)
        tokens = min(cls.longest(cfg), sum(count * each for count, each in sources) / max(1.0, rows))
        # both answers are padded to the longer one
        assumed = cls(rows, tokens, padding=0.22 if isinstance(cfg, DPORun) else 0.08)
        return assumed._replace(**{key: value for key, value in known.items() if key in cls._fields})

    @staticmethod
    def longest(cfg: Any) -> int:
        """Return the most tokens of a row; a pair counts as two rows."""
        return cfg.data.max_length * (1 + isinstance(cfg, DPORun))


def _source(source: Source) -> tuple[float, float]:
    """Return the rows of a source in an epoch, and the tokens of a row."""
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
    samples: int  # conversations of a group, whose common prompt is read once
    turns: float
    prompt: float
    new: float  # tokens sampled in a turn
    reply: float  # tokens of the environment's answer to a turn
    kept: float = 1.0  # share of the groups that is trained on
    longest: float = float("inf")  # the most tokens of a context

    @property
    def context(self) -> float:
        """Return the tokens of a whole conversation."""
        return min(self.longest, self.prompt + self.turns * self.new + max(0.0, self.turns - 1) * self.reply)

    @classmethod
    def of(cls, cfg: StarPORun, known: Mapping[str, float]) -> Episodes:
        """Return the longest episodes of a config: all turns are played, with answers of maximal length.

        known: numbers that replace those that are assumed.
        """
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
    """Return the characters of an environment's first prompt, and of its reply to an action."""
    section = cfg.envs[number]
    try:
        episode = new_episode(section, cfg.protocol, 0, "train", 0)
    except (TypeError, ValueError) as problem:
        raise UserError(f"envs.{number} ({section.title}): {problem}") from problem
    if isinstance(episode, Trajectory):  # the environment raised, which the run will report
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
