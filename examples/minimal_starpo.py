"""StarPO in one page: GRPO with PPO's clip in FrozenLake, on one CPU or GPU.  What is the least that learns to act?

    python examples/minimal_starpo.py runs/quickstart/phase1/final

MODEL is a folder (or Hub name) of a chat model that writes `<think>...</think><answer>Right || Down</answer>`, such as
phase 1 of the quickstart leaves. Every step plays GROUPS levels SAMPLES times each, compares the samples of a group,
and moves the policy by the clipped policy gradient on exactly the tokens that it sampled. The functions are those of
train_phase3_starpo.py, which adds other estimators and losses, a critic, checkpoints, several processes and alarms.

Shapes, as suffixes: B episodes, S sampled tokens of all episodes one after another.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
from envs.protocol import Protocol
from posttrain import models
from posttrain.config import ModelSection
from posttrain.models import Chat, token_logprobs
from posttrain.plan import without_noise
from posttrain.rollout import Context, Sampler, open_sampler, play, set_up
from posttrain.starpo import grpo, ppo_clip
from posttrain.types import SamplingParams, Trajectory, derive_seed

ENV, OPTIONS = "frozen_lake", {"size": 4}  # any environment of envs/, with its options
PROTOCOL = Protocol(max_turns=5, format_penalty=-0.1)
GROUPS, SAMPLES = 16, 8
EPOCHS, MINIBATCHES = 2, 2
EPSILON, EPSILON_HIGH = 0.2, 0.28  # the ratio of probabilities counts from 0.8 to 1.28
LEARNING_RATE, MAX_GRAD_NORM = 6e-4, 1.0  # for the quickstart's tiny model; 1e-6 is usual for a real one
ROWS = 32  # contexts in a forward pass: fewer take less memory and change nothing else


def play_levels(sampler: Sampler, chat: Chat, split: str, places: list[tuple[int, int]], seed: int) -> list[Trajectory]:
    """An episode for each (group, sample): those of a group share the level, and nothing else."""
    episodes = []
    for group, sample in places:
        level_seed, noise_seed = derive_seed(seed, "level", group), derive_seed(seed, "noise", group, sample)
        episodes.append(set_up(envs.make(ENV, **OPTIONS), PROTOCOL, level_seed, split, noise_seed))
    seeds = [derive_seed(seed, "sample", *place) for place in places]
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    trajectories = play(sampler, chat, episodes, params, seeds, context=Context(max_tokens=1024))
    for trajectory, (group, _) in zip(trajectories, places, strict=True):
        trajectory.group = group
    return trajectories


def advantages(episodes: list[Trajectory]) -> tuple[list[Trajectory], torch.Tensor]:
    """The episodes of groups whose rewards differ, and what each was worth, (B,); the others teach nothing."""
    group_B = torch.tensor([t.group for t in episodes])
    advantage_B = grpo(torch.tensor([t.reward for t in episodes], dtype=torch.float64), group_B)
    kept = [i for i, t in enumerate(episodes) if advantage_B[group_B == t.group].any()]
    return [episodes[i] for i in kept], advantage_B[kept].float()


def backward(model: Any, episodes: list[Trajectory], advantage_B: torch.Tensor) -> float:
    """Gradients of the mean over all sampled tokens of the clipped loss, left in `.grad`; returns the share clipped."""
    rows = [(t, segment, advantage_B[i]) for i, t in enumerate(episodes) for segment in t.segments]
    tokens, clipped = sum(segment.tokens for _, segment, _ in rows), 0
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        ids, masks = [segment.ids for _, segment, _ in some], [segment.mask for _, segment, _ in some]
        new_S, _ = token_logprobs(model, ids, masks)
        old = [p for _, segment, _ in some for p, on in zip(segment.logprobs, segment.mask, strict=True) if on]
        old_S = torch.tensor(old, device=new_S.device)
        advantage_S = torch.cat([worth.expand(segment.tokens) for _, segment, worth in some]).to(new_S.device)
        loss_S, clipped_S = ppo_clip(new_S.float(), old_S, advantage_S, EPSILON, EPSILON_HIGH)
        (loss_S.sum() / tokens).backward()
        clipped += int(clipped_S.sum())
    return clipped / tokens


def update(model: Any, optimizer: torch.optim.AdamW, episodes: list[Trajectory], advantage_B: torch.Tensor) -> float:
    """EPOCHS x MINIBATCHES optimizer steps, each on whole groups; returns the share of tokens that were clipped."""
    model.train()
    shares = []
    groups = sorted({t.group for t in episodes})
    for _ in range(EPOCHS):
        for part in (groups[n::MINIBATCHES] for n in range(MINIBATCHES)):
            chosen = [i for i, t in enumerate(episodes) if t.group in part]
            if chosen:
                shares.append(backward(model, [episodes[i] for i in chosen], advantage_B[chosen]))
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return sum(shares) / max(1, len(shares))


def success(episodes: list[Trajectory]) -> float:
    return sum(t.success for t in episodes) / len(episodes)


def train(model: Any, chat: Chat, steps: int, levels: int = 128, seed: int = 0) -> tuple[float, float]:
    """Returns the share of held-out levels that were won before the first step and after the last one."""
    without_noise(model)  # sampler and learner are the same policy: no dropout
    sampler = open_sampler(model, chat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    held_out = [(level, 0) for level in range(levels)]
    before = success(play_levels(sampler, chat, "validation", held_out, seed))
    print(f"{before:.1%} of {levels} held-out levels won before the first step")
    for step in range(1, steps + 1):
        began, places = time.perf_counter(), [(group, sample) for group in range(GROUPS) for sample in range(SAMPLES)]
        episodes = play_levels(sampler, chat, "train", places, derive_seed(seed, step))
        kept, advantage_B = advantages(episodes)
        clipped = update(model, optimizer, kept, advantage_B) if kept else 0.0
        print(
            f"step {step}: success {success(episodes):.1%}, {len(kept) // SAMPLES} of {GROUPS} groups kept,"
            f" {clipped:.1%} of tokens clipped, {time.perf_counter() - began:.1f} s"
        )
    after = success(play_levels(sampler, chat, "validation", held_out, seed))
    print(f"{after:.1%} of {levels} held-out levels won after step {steps}")
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a chat model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="folder for the trained model")
    given = parser.parse_args()
    torch.manual_seed(0)
    model, chat = models.load(ModelSection(name_or_path=given.model), device=given.device, chat_template=None)
    train(model, chat, given.steps)
    if given.out:
        model.save_pretrained(given.out)
        chat.save(Path(given.out))


if __name__ == "__main__":
    main()
