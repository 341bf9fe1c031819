"""Are the losses beside the policy's what they say: replayed rows, own answers, the environment's words, own wins?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_distillation import answers, distilling, full_kl, moved_away
from test_learner import config, moved, played, policy
from torch.nn import functional

from posttrain import observations
from posttrain.experience import Batch, BatchRow
from posttrain.observations import Wins, observed
from posttrain.rehearsal import DPO_BETA, OnPolicy, Pair, Replay, Row
from posttrain.starpo import advantages
from posttrain.starpo_run import prepare


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def logprobs(model: Any, row: Row) -> torch.Tensor:
    """Of the trained tokens of a row, whole logits."""
    said = model(torch.tensor([row.ids])).logits[0, :-1].log_softmax(-1)
    every = said.gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
    return every[torch.tensor(row.mask[1:])]


def test_the_policys_own_answers_are_pulled_by_the_reverse_kl() -> None:
    cfg = distilling(coef=0.7, batch_size=4)
    learner = moved_away(cfg)
    rehearsal = OnPolicy(learner, answers(), sampler=None)  # type: ignore[arg-type]
    rehearsal.fresh = [answers()[:4]]
    total, tokens = rehearsal.backward(step=1, number=0)
    exact, teacher = policy().double(), policy().double()
    exact.load_state_dict(learner.policy.state_dict())
    value = full_kl(teacher, exact, answers()[:4])  # the two change places
    (0.7 * value).backward()
    assert total / tokens == pytest.approx(value.item(), rel=1e-4) and value > 0.01
    assert (gradients(learner.policy) - gradients(exact)).abs().max() < 1e-5 * gradients(exact).abs().max()


@pytest.mark.parametrize("tokens", [None, 20])
def test_replayed_rows_have_the_losses_of_phases_1_and_2(tokens: int | None) -> None:
    cfg = distilling(coef=0.7, batch_size=4, tokens=tokens)
    learner = moved_away(cfg)
    rows = [Row(row.ids, row.mask) for row in answers()]
    pairs = [Pair(rows[n], rows[n + 1]) for n in range(0, 8, 2)]
    replay = Replay(learner, answers(), rows, pairs)
    replay.backward(step=3, number=1)
    exact, teacher = policy().double(), policy().double()
    exact.load_state_dict(learner.policy.state_dict())
    taught, compared = replay.drawn(rows, 4, 3, 1), replay.drawn(pairs, 2, 3, 1)
    loss = -torch.cat([logprobs(exact, row) for row in taught]).mean()
    margins = []
    for pair in compared:
        better, worse = ((logprobs(exact, row) - logprobs(teacher, row).detach()).sum() for row in pair)
        margins.append(DPO_BETA * (better - worse))
    loss = loss - functional.logsigmoid(torch.stack(margins)).mean()
    loss = loss - torch.cat([logprobs(exact, pair.chosen) for pair in compared]).mean()
    (0.7 * loss).backward()
    assert (gradients(learner.policy) - gradients(exact)).abs().max() < 1e-5 * gradients(exact).abs().max()


def test_constant_text_is_not_what_the_environment_says() -> None:
    def row(ids: list[int]) -> BatchRow:
        return BatchRow(0, ids, [False, True, False, False, False, False, False], slice(0, 1))

    first, second = row([1, 9, 5, 6, 7, 6, 3]), row([1, 9, 5, 6, 8, 6, 3])
    only_sevens = [False, False, False, False, True, False, False]
    assert observed([first, second]) == [only_sevens, only_sevens]
    assert observed([first]) == [[False] * 7]


@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_environments_words_add_their_cross_entropy(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds to the gradient is the gradient of the mean over all of them."""
    monkeypatch.setattr(observations, "BEFORE", 0)  # these words are random: no text is constant

    def step(coef: float) -> torch.Tensor:
        cfg = config(observation_coef=coef)
        return moved(cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"micro_batch_tokens": tokens})}))

    added = (step(0.3) - step(0.0)) / -1e3
    model = policy().double()
    rows = Batch.of([t for group in played(policy()) for t in group]).rows
    said = [logprobs(model, Row(row.ids, mask)) for row, mask in zip(rows, observed(rows), strict=True)]
    (-0.3 * torch.cat(said).mean()).backward()
    assert len(torch.cat(said)) > 5
    assert (added - gradients(model)).abs().max() < 1e-4 * gradients(model).abs().max()


def test_rare_wins_are_read_again_and_ever_less() -> None:
    cfg = config(wins_coef=0.5)
    learner = prepare(cfg, policy(), None)  # type: ignore[arg-type]
    wins, groups = Wins(learner), played(policy())
    for group in groups:
        for t in group:
            t.success = t.reward > 0
    groups[1][1].success = True
    assert [sum(t.success for t in group) for group in groups] == [2, 3, 2]
    wins.remember(groups)
    assert len(wins.rows) == sum(len(t.segments) for n in (0, 2) for t in groups[n] if t.success)
    found = []
    for step in (50, 100):
        wins.backward(step, 0)
        found.append(gradients(learner.policy))
        learner.optimizer.zero_grad()
    half, none = (1 - step / cfg.trainer.max_steps for step in (50, 100))
    assert none == 0.5 and half == 0.75, "200 steps"
    assert found[0].norm() > 0 and found[1].norm() > 0


def test_steps_with_the_same_history_count_more() -> None:
    group_B, episode_N = torch.zeros(3, dtype=torch.long), torch.tensor([0, 0, 1, 1, 2, 2])
    rewards_N, rewards_B = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
    states = ["a", "c", "a", "c", "b", "c"]
    found = advantages.hgpo(rewards_B, group_B, rewards_N, episode_N, states, gamma=1.0, std=False)
    episode = torch.tensor([1 / 3, 1 / 3, -2 / 3, -2 / 3, 1 / 3, 1 / 3])
    level_0, level_1 = torch.tensor([1 / 3, -2 / 3, 1 / 3]), torch.tensor([0.5, -0.5])
    last = torch.stack([level_0[0] + 5 * level_1[0], level_0[1] + 5 * level_1[1]]) / 6  # twice the same
    steps = torch.tensor([0.5, last[0], -0.5, last[1], 0.0, level_0[2]])
    torch.testing.assert_close(found, episode + steps)
