"""Does the policy still reason about what it reads?  RAGEN-2's diagnostics (arXiv 2604.06268)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from posttrain import parallel, runlog
from posttrain.chat import Chat
from posttrain.config import StarPORun
from posttrain.cross_score import Pairs, ReasonedTurn, cross_scores, first_turn_pairs, trajectory_pairs
from posttrain.experience import BatchRow, Experience
from posttrain.learner import POLICY, Learner
from posttrain.policy import microbatches
from posttrain.prefixes import Prefixes
from posttrain.rollout import thoughts
from posttrain.run_state import ScopeState
from posttrain.starpo import diagnostics, losses
from posttrain.types import Trajectory

SCOPES = {"first_turn": first_turn_pairs, "trajectory": trajectory_pairs}


def thoughts_and_prompts(
    cfg: StarPORun,
    learner: Learner,
    chat: Chat,
    groups: list[list[Trajectory]],
    step: int,
    state: dict[str, ScopeState],
    say: Callable[[str], None],
) -> dict[str, float]:
    """Does a thought still depend on its prompt?  Cross scores over first turns and over turns of whole episodes.

    `state` carries each scope's running scale, first values and regime, which is said when it changes. Processes share
    out the reasonings.
    """
    began = time.perf_counter()
    said = [thoughts(chat, t) for group in groups for t in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    episodes = [
        [
            ReasonedTurn(thought.prompt_ids, thought.ids, number) if thought else ReasonedTurn([], [], number)
            for thought in found
        ]
        for number, found in zip(numbers, said, strict=True)
    ]
    lengths = [len(turn.reasoning) for turns in episodes for turn in turns]
    row: dict[str, float] = {"rollout/thought_tokens": sum(lengths) / max(1, len(lengths))}
    for scope, choose in SCOPES.items():
        pairs: Pairs = choose(episodes, cfg.diagnostics.pairs, cfg.seed, "diagnostics", step)
        if len(pairs.prompts) < 2:
            continue
        own = list(parallel.mine(len(pairs.reasonings)))
        with learner.autocast():
            scores = cross_scores(
                learner.policy, pairs.prompts, [pairs.reasonings[i] for i in own], temperature=cfg.rollout.temperature
            )
        before = state.get(scope)
        scores_RN = torch.tensor(parallel.gather(scores.tolist()))
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
            size, words = f"{len(pairs.reasonings)} x {len(pairs.prompts)}", scope.replace("_", " ")
            seconds = time.perf_counter() - began
            say(f"step {step}: thoughts are {regime} ({words}; {size} thoughts and prompts, {seconds:.1f} s so far)")
        state[scope] = {"first": first, "scale": scale, "regime": regime}
        row |= {f"collapse/{scope}/{key}": value for key, value in figures.items()}
    return row | {"seconds/collapse": time.perf_counter() - began}


def gradients_by_std(
    learner: Learner, experience: Experience, std: list[float], settings: losses.Settings
) -> dict[str, float]:
    """The gradient norms of the policy loss, the entropy and the KL for each quantile of the std of rewards; no update.

    std: of each group. Each norm is of a mean over the tokens of its bucket (RAGEN-2, arXiv 2604.06268, section 3). On
    one process: the others wait.
    """
    began, batch = time.perf_counter(), experience.batch
    row: dict[str, float] = {}
    if runlog.is_main_process():
        bucket_G = diagnostics.buckets(torch.tensor(std))
        for bucket in range(int(bucket_G.max()) + 1):
            counts_B = bucket_G[batch.group_B] == bucket
            rows = [each for each in batch.rows if counts_B[each.episode]]
            if not rows:
                continue
            parts = _loss_parts(learner, experience, rows, settings)
            for loss, norm in diagnostics.gradient_norms(parts, learner.trainable[POLICY]).items():
                row[f"gradients/{bucket}/{loss}"] = norm
            own = [each for each, here in zip(std, bucket_G.tolist(), strict=True) if here == bucket]
            row[f"gradients/{bucket}/in_group_std"] = sum(own) / len(own)
        row["seconds/gradients"] = time.perf_counter() - began
    return parallel.gather([row])[0] if parallel.size() > 1 else row


def _loss_parts(
    learner: Learner, experience: Experience, rows: list[BatchRow], settings: losses.Settings
) -> Iterator[dict[str, torch.Tensor]]:
    """Policy loss, entropy and, with a reference, KL of these rows: for each micro-batch its share of the means.

    Before the policy has moved: the old log-probs are today's.
    """
    count = sum(row.tokens.stop - row.tokens.start for row in rows)
    learner.model.train()
    for chosen in microbatches([len(row.ids) for row in rows], learner.cfg.trainer.micro_batch_tokens or math.inf):
        forward = learner.forward([rows[i] for i in chosen], Prefixes(learner.policy, []))
        ones_S = torch.ones_like(forward.logprobs_S)
        tokens = losses.Tokens(
            logprobs_S=forward.logprobs_S,
            old_S=forward.logprobs_S.detach(),
            advantages_S=forward.take(experience.advantages_S).float(),
            weights_S=ones_S,
            importance_weights_S=ones_S,
            entropy_S=forward.entropy_S,
            contexts_S=forward.take(experience.batch.context_S),
        )
        found = {
            "task": losses.policy_loss(tokens, settings)[0].sum() / count,
            "entropy": -forward.entropy_S.sum() / count,
        }
        if (reference_S := experience.measured.reference_S) is not None:
            found["kl"] = losses.kl(forward.logprobs_S, forward.take(reference_S)).sum() / count
        yield found
