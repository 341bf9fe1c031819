"""Does the policy still reason about what it reads?  RAGEN-2's diagnostics (arXiv 2604.06268)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from posttrain.config import StarPORun
from posttrain.models import Chat
from posttrain.plan import can_share_prefixes
from posttrain.rollout import thoughts
from posttrain.runtime import floats, parallel
from posttrain.starpo import diagnostics
from posttrain.starpo.learner import Learner
from posttrain.starpo.monitoring.cross_score import (
    Pairs,
    ReasonedTurn,
    cross_scores,
    first_turn_pairs,
    trajectory_pairs,
)
from posttrain.starpo.run_state import RunState
from posttrain.types import Trajectory

SCOPES = {"first_turn": first_turn_pairs, "trajectory": trajectory_pairs}
SHARE = 0.05  # of a run's work that these diagnostics may take
FEWEST = 8  # thoughts of a sample


def work(cfg: StarPORun, row: Mapping[str, float]) -> int:
    """Return how many tokens the step of this row sent through the model, without prompts: a lower bound of its work.

    A sampled token counts once. Those of kept groups count once more for their log-probs and three times for each
    epoch, since a backward pass takes as long as two forward passes. Tokens, not seconds: a resumed run has the same.
    """
    kept = row["rollout/kept_groups"] / cfg.rollout.groups
    return round(row["rollout/tokens"] * (1 + kept * (1 + 3 * cfg.algorithm.num_iterations)))


def samples_within(
    cfg: StarPORun, episodes: Sequence[Sequence[ReasonedTurn]], step: int, state: RunState, shared: bool
) -> dict[str, tuple[int, int, Pairs]] | None:
    """Return the size of each scope's sample, the tokens to compute, and the sample; None if they are too many.

    The first sample is halved until it fits into SHARE of the work so far; later ones have the same size, so that their
    figures can be compared. shared: whether a prompt is computed once and not with each thought.
    """
    allowed = SHARE * state.work - sum(scope["tokens"] for scope in state.collapse.values())
    sizes = [scope["pairs"] for scope in state.collapse.values()][:1] or [cfg.diagnostics.pairs]
    while not state.collapse and sizes[-1] // 2 >= FEWEST:
        sizes.append(sizes[-1] // 2)
    for size in sizes:
        chosen: dict[str, tuple[int, int, Pairs]] = {}
        for scope, choose in SCOPES.items():
            pairs = choose(episodes, size, cfg.seed, "diagnostics", step)
            if len(pairs.prompts) >= 2:
                read = sum(map(len, pairs.prompts)) * (1 if shared else len(pairs.reasonings))
                chosen[scope] = (size, read + len(pairs.prompts) * sum(map(len, pairs.reasonings)), pairs)
        if sum(tokens for _, tokens, _ in chosen.values()) <= allowed:
            return chosen
    return None


def thoughts_and_prompts(
    cfg: StarPORun,
    learner: Learner,
    chat: Chat,
    groups: list[list[Trajectory]],
    step: int,
    state: RunState,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Return how much thoughts depend on their prompts: cross scores of first turns and of turns of whole episodes.

    `state.collapse` holds each scope's running scale, first values and regime; a change of the regime is reported.
    Each process scores a part of the thoughts. All of this takes at most SHARE of the run's work, or it is skipped.
    """
    began = time.perf_counter()
    thoughts_of_episodes = [thoughts(chat, t) for group in groups for t in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    episodes = [
        [
            ReasonedTurn(thought.prompt_ids, thought.ids, number) if thought else ReasonedTurn([], [], number)
            for thought in turns
        ]
        for number, turns in zip(numbers, thoughts_of_episodes, strict=True)
    ]
    lengths = [len(turn.reasoning) for turns in episodes for turn in turns]
    row: dict[str, float] = {"rollout/thought_tokens": sum(lengths) / max(1, len(lengths))}
    with learner.whole() as models:
        shared = can_share_prefixes(models.policy)
    chosen = samples_within(cfg, episodes, step, state, shared)
    if chosen is None and step == cfg.diagnostics.every:
        say(
            f"step {step}: whether thoughts depend on their prompts is not measured yet: it would take more than"
            f" {SHARE:.0%} of the run's work so far. Fewer `diagnostics.pairs` take less."
        )
    for scope, (size, tokens, pairs) in (chosen or {}).items():
        own = list(parallel.mine(len(pairs.reasonings)))
        with learner.sampling() as models:
            scores = cross_scores(
                models.policy, pairs.prompts, [pairs.reasonings[i] for i in own], temperature=cfg.rollout.temperature
            )
        before = state.collapse.get(scope)
        scores_RN = torch.tensor(parallel.gather([floats(row_N) for row_N in scores]))
        figures, scale = diagnostics.information(
            scores_RN,
            torch.tensor(pairs.own),
            torch.tensor([len(ids) for ids in pairs.reasonings]),
            torch.tensor(pairs.weights),
            before["scale"] if before else None,
        )
        now = [figures["conditional_entropy_token"], figures["mi_tempered"]]
        first = before["first"] if before else now
        regime = diagnostics.regime(*now, *first)
        if before is None or regime != before["regime"]:
            sizes, words = f"{len(pairs.reasonings)} x {len(pairs.prompts)}", scope.replace("_", " ")
            seconds = time.perf_counter() - began
            say(f"step {step}: thoughts are {regime} ({words}; {sizes} thoughts and prompts, {seconds:.1f} s so far)")
        tokens += before["tokens"] if before else 0
        state.collapse[scope] = {"pairs": size, "tokens": tokens, "first": first, "scale": scale, "regime": regime}
        row |= {f"collapse/{scope}/{key}": value for key, value in figures.items()}
    return row | {"seconds/collapse": time.perf_counter() - began}
