"""Is the small example the big script in short?  The same gradient, and a policy that visibly learns."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_learner import config, played, policy
from test_phase3 import taught
from transformers import PreTrainedTokenizerFast
from updates import learn

from envs.protocol import Protocol
from posttrain.config.shared import ModelSection
from posttrain.models.loading import load
from posttrain.starpo.run import make_learner
from posttrain.types import Trajectory

FILE = Path(__file__).parents[2] / "examples" / "minimal_starpo.py"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_starpo", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder(torch.optim.SGD):
    """Moves nothing and remembers the gradient of every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(flat(self.param_groups[0]["params"]))


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in parameters])


def recorded() -> list[list[Trajectory]]:
    """Groups that a policy nearby has sampled; the rewards of the second one are all the same.

    A token of an episode that won has a ratio of 1.25: more than 1 + `epsilon`, less than 1 + `epsilon_high`.
    """
    random, groups = torch.Generator().manual_seed(3), played(policy())
    won = next(t for t in groups[0] if t.reward > 0).segments[0]
    for segment in (segment for group in groups for t in group for segment in t.segments):
        noise = (0.3 * torch.randn(len(segment.ids), generator=random)).tolist()
        if segment is won:
            noise[won.mask.index(True)] = -math.log(1.25)
        segment.logprobs = [
            p + n if on else 0.0 for p, n, on in zip(segment.logprobs, noise, segment.mask, strict=True)
        ]
    for t in groups[1]:
        t.turn_rewards = [0.0] * t.turns
    return groups


def test_its_gradient_is_that_of_the_script(minimal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the policy that sampled, where the clip leaves tokens out; in one micro-batch and in several."""
    groups, cfg = recorded(), config(num_iterations=2)
    learner = make_learner(cfg, policy(), None)  # type: ignore[arg-type]
    learner.optimizer = optimizer = Recorder(learner.trainable[0])
    row = learn(cfg, learner, groups)
    assert 0 < row["policy/clip_fraction"] < 0.5
    _, wanted = optimizer.seen  # the first step of an update takes itself to be on-policy

    episodes, advantage_B = minimal.advantages([t for group in groups for t in group])
    assert {t.group for t in episodes} == {0, 2}
    for rows in (100, 3):
        monkeypatch.setattr(minimal, "ROWS", rows)
        model = policy()
        clipped = minimal.backward(model, episodes, advantage_B)
        assert (flat(model.parameters()) - wanted).norm() < 1e-5 * wanted.norm()
        assert clipped == pytest.approx(2 * row["policy/clip_fraction"])  # in one of two epochs of the script
    monkeypatch.setattr(minimal, "EPSILON_HIGH", minimal.EPSILON)
    model = policy()
    minimal.backward(model, episodes, advantage_B)
    assert (flat(model.parameters()) - wanted).norm() > 1e-3 * wanted.norm()


def test_it_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.slow
def test_it_learns(
    minimal: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """On lakes of 3x3, from a player that knows the format and little else; seconds on a CPU."""
    monkeypatch.setattr(minimal, "OPTIONS", {"size": 3})
    monkeypatch.setattr(minimal, "PROTOCOL", Protocol(max_turns=3, max_actions=3))
    monkeypatch.setattr(minimal, "LEARNING_RATE", 1.5e-3)
    player = taught(tmp_path / "player" / "final", tiny_tokenizer, 250, layers=2)
    model, chat = load(ModelSection(name_or_path=str(player)), device="cpu", chat_template=None)
    before, after = minimal.train(model, chat, steps=15)
    assert after > before + 0.1, f"{before:.2f} before, {after:.2f} after"
