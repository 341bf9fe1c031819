"""Does every key of algorithm, protocol and rollout reach what it sets?  From overrides to a whole step of StarPO.

A case is one override, and what the run is told beside it. The step is compared with one written out in loops, which
must itself differ from the step without the override: a key that is ignored, or goes elsewhere, fails its case.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from tiny_runs import tiny_base
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from updates import learn

import train_phase3_starpo as phase3
from posttrain.config.loading import resolve
from posttrain.config.starpo import StarPORun
from posttrain.models.chat import Chat
from posttrain.rollout.engines.replay import ReplaySampler
from posttrain.rollout.episodes import most_turns
from posttrain.rollout.thoughts import thoughts
from posttrain.starpo.diagnostics import information
from posttrain.starpo.experience import Batch, Measured
from posttrain.starpo.monitoring.collapse import thoughts_and_prompts
from posttrain.starpo.run import make_learner
from posttrain.starpo.run_state import RunState
from posttrain.types import Completion, SamplingParams, Segment, Trajectory, UserError

BASE: dict[str, Any] = {
    "output_dir": "unused",
    "device": "cpu",
    "report_to": "none",
    "model": {"name_or_path": "unused"},
    "envs": [{"name": "sokoban", "options": {"size": 5, "observation": "neighbours"}}],
    "protocol": {"max_turns": 3, "max_actions": 6, "format_penalty": 0.0, "style": "compact"},
    "rollout": {"groups": 4, "num_generations": 4, "max_completion_length": 40, "max_context": 1024},
    "trainer": {"learning_rate": 0.3, "max_grad_norm": 1e9, "micro_batch_tokens": 128},
}
Numbers = Sequence[float] | np.ndarray
Flat = list[np.ndarray]  # for each episode an array over its sampled tokens


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StarPORun]:
    """The config of a user who writes BASE into a file and these overrides behind it."""
    file = tmp_path_factory.mktemp("wiring") / "run.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return lambda *overrides: resolve(StarPORun, file, list(overrides))


def case(key: str, *beside: str, **more: Any) -> Any:
    """The override that is tried, and those that stand with it in either run."""
    return pytest.param(key, beside, *more.values(), id=" ".join([key, *beside]).replace("algorithm.", ""))


def reaches(key: str, found: np.ndarray, expected: np.ndarray, without: np.ndarray) -> None:
    def far(a: np.ndarray, b: np.ndarray) -> float:
        return math.inf if a.shape != b.shape else float(np.abs(a - b).max() / np.abs(expected).max())

    assert far(expected, without) > 1e-3, f"{key} makes no difference to these episodes: a case that shows nothing"
    assert far(found, without) > 1e-4, f"{key} is ignored: the step is the one without it"
    assert far(found, expected) < 2e-4, f"{key} does not do what it says: {far(found, expected):.1e} from the reference"


# ---------------------------------------------------------------------------------------------------------- episodes


@lru_cache
def newborn() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, initializer_range=0.3,
        )
    )  # fmt: skip


def policy(nudge: int = 0, double: bool = False) -> LlamaForCausalLM:
    """The model a run begins with; or, nudged, what may have become of it later."""
    model = copy.deepcopy(newborn())
    return move(model.double() if double else model, nudge)


@torch.no_grad()
def move(model: Any, seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if seed else ():
        parameter += 0.1 * torch.randn(parameter.shape, generator=random).to(parameter)
    return model


REWARDS = [[1.0, 0.2, 0.0, 0.6], [0.3, 0.3, 0.9, 0.1], [2.0, 0.0, 0.0, 1.5], [0.5, 0.5, 0.5, 0.5]]


@lru_cache
def played() -> list[list[Trajectory]]:
    """Four groups of ragged episodes, the last with equal rewards; one of each has more contexts, one is cut short.

    Their log-probs are what the nudged policy says, give or take: it has moved since it sampled them.
    """
    random, model = np.random.default_rng(1), policy(nudge=1)
    groups = []
    for group, rewards in enumerate(REWARDS):
        samples = []
        for member, reward in enumerate(rewards):
            turns, segments = 1 + (group + member) % 3, []
            for turn in range(turns):
                if turn == 0 or member == 3:
                    segments.append(Segment(random.integers(1, 23, 3).tolist(), first_turn=turn))
                said = random.integers(1, 23, int(random.integers(2, 5))).tolist()
                segments[-1].write(turn, Completion(said, [0.0] * len(said), True))
                segments[-1].read(random.integers(1, 23, 2).tolist())
            for segment in segments:
                with torch.no_grad():
                    now = model(torch.tensor([segment.ids])).logits[0].log_softmax(-1).numpy()
                for i, on in enumerate(segment.mask):
                    segment.logprobs[i] = float(now[i - 1, segment.ids[i]] + random.normal() * 0.4) if on else 0.0
            paid = np.zeros(turns)
            paid[-1] = reward - 0.1 * (turns - 1)
            paid[:-1] += 0.15
            samples.append(
                Trajectory(
                    segments=segments,
                    turn_rewards=paid.tolist(),
                    turn_penalties=[-0.05] * (turns - 1) + [0.0],
                    state_keys=[f"{(turn + member) % 3}" for turn in range(turns)],
                    group=group,
                    truncated=member == 1,
                )
            )
        groups.append(samples)
    return groups


# -------------------------------------------------------------------------------------------------- a step, in loops


def compared(values: Sequence[float], peers: Sequence[Any], std: bool = True) -> list[float]:
    """Each value among those that have its peer: less their mean, over their deviation."""
    out = []
    for value, peer in zip(values, peers, strict=True):
        own = [v for v, p in zip(values, peers, strict=True) if p == peer]
        deviation = float(np.std(own, ddof=1)) if len(own) > 1 else 0.0
        out.append((value - float(np.mean(own))) / (deviation + 1e-4 if std else 1.0) if len(own) > 1 else 0.0)
    return out


def later(rewards: Numbers, gamma: float) -> list[float]:
    out, ahead = [], 0.0
    for reward in reversed(rewards):
        out.insert(0, ahead := reward + gamma * ahead)
    return out


def gae(pay: Numbers, values: Numbers, gamma: float, lam: float) -> list[float]:
    following = [*values[1:], 0.0]
    errors = [r + gamma * after - v for r, after, v in zip(pay, following, values, strict=True)]
    return later(errors, gamma * lam)


def worth(
    cfg: StarPORun, episodes: list[Trajectory], weights: list[float], trains: list[bool],
    values: Flat | None,
) -> tuple[Flat, Flat | None]:  # fmt: skip
    """The advantage of every sampled token, and what the critic should have said."""
    a = cfg.algorithm
    group = [t.group for t in episodes]
    turn_of = [np.repeat(np.arange(t.turns), t.turn_tokens) for t in episodes]
    if a.advantage in ("gae", "bilevel_gae"):
        assert values is not None
        out, returns = [], []
        if not a.turn_rewards:
            episodes = [
                dataclasses.replace(t, turn_rewards=[0.0] * (t.turns - 1) + [t.reward], turn_penalties=[0.0] * t.turns)
                for t in episodes
            ]
        for t, turns, value in zip(episodes, turn_of, values, strict=True):
            pay, ends = np.zeros(t.tokens), [int(np.flatnonzero(turns == n)[-1]) for n in range(t.turns)]
            pay[ends] += t.turn_scores
            if a.advantage == "gae":
                found = np.array(gae(pay, value, a.gamma, a.lam))
            else:
                pay[ends] = np.array(gae(pay[ends], value[ends], a.gamma_high, a.lam)) + value[ends]
                inside = [turns == n for n in range(t.turns)]
                found = np.concatenate([gae(pay[on], value[on], a.gamma, a.lam) for on in inside])
            out.append(found)
            returns.append(found + value)
        trained = np.concatenate([found for found, on in zip(out, trains, strict=True) if on])
        return [(found - trained.mean()) / math.sqrt(trained.var(ddof=1) + 1e-8) for found in out], returns

    total = [t.reward for t in episodes]
    places = [(b, n) for b, t in enumerate(episodes) for n in range(t.turns)]
    if a.advantage == "gigpo":
        ahead = [r for t in episodes for r in later(t.turn_scores, a.gamma_high)]
        peers = [(group[b], episodes[b].state_keys[n]) for b, n in places]
        whole = compared(total, group, a.advantage_std)
        step = compared(ahead, peers, a.advantage_std)
        of_turn = [whole[b] + a.step_weight * s for (b, _), s in zip(places, step, strict=True)]
        starts = np.cumsum([0, *(t.turns for t in episodes)])
        out = [np.array(of_turn)[starts[b] + turns] for b, turns in enumerate(turn_of)]
    elif a.advantage.startswith("reinforce_pp"):
        scores = compared(total, group, std=False) if a.advantage == "reinforce_pp_baseline" else total
        out = [np.full(t.tokens, score) for t, score in zip(episodes, scores, strict=True)]
        every = np.concatenate([each for each, on in zip(out, trains, strict=True) if on])
        out = [(each - every.mean()) / math.sqrt(every.var(ddof=1) + 1e-8) for each in out]
    else:
        samples = [[r for r, g in zip(total, group, strict=True) if g == own] for own in group]
        if a.advantage == "rloo":
            of = [r - (sum(own) - r) / (len(own) - 1) for r, own in zip(total, samples, strict=True)]
        else:
            of = {
                "grpo": compared(total, group, a.advantage_std),
                "brpo": compared(total, ["all"] * len(total), a.advantage_std),
                "arpo": total,
            }[a.advantage]
        out = [np.full(t.tokens, value) for t, value in zip(episodes, of, strict=True)]
    return [value * weights[g] for value, g in zip(out, group, strict=True)], None


def push(cfg: StarPORun, advantage: float, ratio: float) -> float:
    """The derivative of one token's policy loss by its log-prob; `ratio` is its own or its context's."""
    a = cfg.algorithm
    if a.loss_type == "cispo":
        return -min(ratio, a.epsilon_high) * advantage
    stopped = ratio > 1 + a.epsilon_high if advantage > 0 else ratio < 1 - a.epsilon
    stopped = stopped or (a.delta is not None and advantage < 0 and ratio > a.delta)
    return 0.0 if stopped else -ratio * advantage


def asked(model: Any, episodes: list[Trajectory], temperature: float) -> list[tuple[torch.Tensor, ...]]:
    """Of every episode, with gradient, for each sampled token: its log-prob, the entropy there, the state before it."""
    rows = [segment.ids for t in episodes for segment in t.segments]
    padded = torch.tensor([ids + [0] * (max(map(len, rows)) - len(ids)) for ids in rows])  # behind, where nobody looks
    states = iter(model.model(padded).last_hidden_state)
    out = []
    for t in episodes:
        state = torch.cat([next(states)[[i - 1 for i, on in enumerate(segment.mask) if on]] for segment in t.segments])
        table = (model.lm_head(state).double() / temperature).log_softmax(-1)
        logprobs = table[range(t.tokens), t.sampled_ids]
        out.append((logprobs, -(table.exp() * table).sum(-1), state.float()))
    return out


def stepped(cfg: StarPORun, double: bool = False, step: int = 1, parts: Any = None) -> np.ndarray:
    """All weights after a step written out in loops: the policy's, then the critic's head."""
    a = cfg.algorithm
    start, model = policy(double=double), policy(nudge=1, double=double)
    groups = played()
    scored = phase3.score_and_filter(cfg, groups)  # has tests of its own
    chosen = [(g, n) for g in scored.kept for n in range(len(groups[g])) if scored.members[g][n]]
    episodes = [groups[g][n] for g, n in chosen]
    trains = [scored.trains[g][n] for g, n in chosen]
    heat = cfg.rollout.temperature

    def now(of: Any) -> Flat:
        with torch.no_grad():
            return [logprobs.numpy() for logprobs, _, _ in asked(of, episodes, heat)]

    head = critic_head() if a.critical else None
    trunk = start if a.critical and a.critic.kind == "separate" else model
    recorded = [np.array(t.sampled_logprobs) for t in episodes]
    old = now(model) if double else recorded
    reference = now(start) if a.beta > 0 else None
    values = None
    if head is not None:
        with torch.no_grad():
            values = [head(state)[:, 0].double().numpy() for _, _, state in asked(trunk, episodes, heat)]
    gains, targets = worth(cfg, episodes, scored.weights, trains, values)

    for part in parts or [scored.kept] * a.num_iterations:
        own = [b for b, t in enumerate(episodes) if t.group in part and trains[b]]
        lengths = {b: episodes[b].tokens for b in own}
        objective: Any = 0.0
        looks = asked(model, [episodes[b] for b in own], heat)
        judges = looks if trunk is model else asked(trunk, [episodes[b] for b in own], heat)
        for b, (new, entropy, _), (_, _, state) in zip(own, looks, judges, strict=True):
            t = episodes[b]
            gap = new.detach().numpy() - old[b]
            if a.loss_type == "gspo":
                contexts = np.repeat(np.arange(len(t.segments)), [segment.tokens for segment in t.segments])
                gap = np.array([gap[contexts == n].mean() for n in contexts])
            most = a.importance_sampling_clip_max
            trust = np.ones_like(gap) if most is None else np.minimum(np.exp(old[b] - recorded[b]), most)
            weight = {
                "token_mean": 1 / sum(lengths.values()),
                "sequence_mean": 1 / (len(own) * lengths[b]),
                "dr_grpo": 1 / (len(own) * cfg.rollout.max_completion_length * most_turns(cfg.envs, cfg.protocol)),
            }[a.aggregation]
            pushes = np.zeros(t.tokens)
            for i, x in enumerate(new.tolist()):
                pushes[i] = trust[i] * push(cfg, gains[b][i], math.exp(gap[i]))
                if reference is not None:
                    pushes[i] += a.beta * (1 - math.exp(reference[b][i] - x))  # the slope of k3
            objective = objective + weight * ((torch.tensor(pushes) * new).sum() - a.entropy_coef * entropy.sum())
            if head is not None:
                assert values is not None and targets is not None
                value = head(state)[:, 0]
                slopes = []
                for v, before, target in zip(value.tolist(), values[b], targets[b], strict=True):
                    near = v if a.critic.clip is None else np.clip(v, before - a.critic.clip, before + a.critic.clip)
                    slopes.append(v - target if abs(v - target) >= abs(near - target) - 1e-9 else 0.0)
                objective = objective + 0.5 * weight * (torch.tensor(slopes) * value).sum()
        objective.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        for g in grads:
            g *= min(1.0, cfg.trainer.max_grad_norm / norm)
        warming = head is not None and step <= a.critic.warmup_steps
        critics = [*head.parameters(), *(trunk.parameters() if trunk is not model else ())] if head else []
        with torch.no_grad():
            for rate, parameters in (
                (0.0 if warming else cfg.learning_rate, list(model.parameters())),
                (a.critic.learning_rate, critics),
            ):
                for p in parameters:
                    if p.grad is not None:
                        p -= rate * p.grad
                    p.grad = None
    return weights_of(model, head)


def critic_head() -> torch.nn.Linear:
    head = torch.nn.Linear(16, 1)
    with torch.no_grad():
        head.weight.copy_(0.2 * torch.randn(1, 16, generator=torch.Generator().manual_seed(3)))
        head.bias.zero_()
    return head


def weights_of(model: Any, head: torch.nn.Linear | None) -> np.ndarray:
    """What the step changed, so that small changes count."""
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()
    moved = parameters - torch.nn.utils.parameters_to_vector(policy(nudge=1).parameters()).detach().double()
    if head is None:
        return moved.numpy()
    before = torch.nn.utils.parameters_to_vector(critic_head().parameters()).detach()
    after = torch.nn.utils.parameters_to_vector(head.parameters()).detach()
    return torch.cat([moved, (after - before).double()]).numpy()


def learned(cfg: StarPORun, double: bool = False) -> np.ndarray:
    """The same weights after the functions of the script, by plain gradient descent in place of AdamW."""
    learner = make_learner(cfg, policy(double=double), None)  # type: ignore[arg-type]
    move(learner.policy, 1)
    head = learner.critic.head if learner.critic else None
    if head is not None:
        head.load_state_dict(critic_head().state_dict())
    groups = played()
    scored = phase3.score_and_filter(cfg, groups)
    idle = min(cfg.algorithm.minibatches, len(scored.kept))
    learner.optimizer = Waiting([{"params": group} for group in learner.trainable if group], idle)
    more = cfg.algorithm.model_copy(update={"num_iterations": cfg.algorithm.num_iterations + 1})
    learn(cfg.model_copy(update={"algorithm": more}), learner, groups, scored=scored)
    return weights_of(learner.policy, head)


class Waiting(torch.optim.SGD):
    """Does nothing in its first steps, which an update takes to be on-policy: the ratio is not 1 in those behind."""

    def __init__(self, parameters: Any, idle: int) -> None:
        super().__init__(parameters)
        self.idle = idle

    def step(self, closure: Any = None) -> Any:
        self.idle -= 1
        return super().step(closure) if self.idle < 0 else None


# ------------------------------------------------------------------------------------------------------ the whole step

GAE = "algorithm.advantage=gae"
TWICE = "algorithm.num_iterations=2"
GSPO = ("algorithm.epsilon=0.05", "algorithm.epsilon_high=0.05", "algorithm.aggregation=sequence_mean")
FAST = "algorithm.critic.learning_rate=0.3"


@lru_cache
def without(told: Callable[..., StarPORun], beside: tuple[str, ...], double: bool = False) -> np.ndarray:
    return stepped(told(*beside), double)


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        case("algorithm.advantage=rloo"),
        case(GAE),
        case("algorithm.loss_type=gspo", *GSPO),
        case("algorithm.loss_type=cispo", "algorithm.epsilon_high=1.1"),
        case("algorithm.epsilon=0.05"),
        case("algorithm.epsilon_high=0.05"),
        case("algorithm.epsilon=0.0001", *GSPO, "algorithm.loss_type=gspo", "rollout.temperature=1.1"),
        case("algorithm.epsilon_high=0.0001", *GSPO, "algorithm.loss_type=gspo", "rollout.temperature=1.1"),
        case("algorithm.epsilon_high=1.4", "algorithm.epsilon_high=1.1", "algorithm.loss_type=cispo"),
        case("algorithm.delta=1.3"),
        case("algorithm.aggregation=sequence_mean"),
        case("algorithm.aggregation=dr_grpo"),
        case("protocol.max_turns=5", "algorithm.aggregation=dr_grpo"),
        case("rollout.max_completion_length=50", "algorithm.aggregation=dr_grpo"),
        case("rollout.temperature=0.7"),
        case("algorithm.beta=0.3"),
        case("algorithm.entropy_coef=0.1"),
        case("algorithm.num_iterations=2"),
        case("trainer.max_grad_norm=0.01"),
        case("algorithm.mask_truncated_completions=true"),
        case("algorithm.filter.strategy=soft"),
        case("algorithm.filter.keep_zero=true"),
        case("algorithm.mask_truncated_completions=true", GAE),
        case("algorithm.critic.learning_rate=0.1", GAE),
        case("algorithm.critic.clip=0.01", GAE, FAST, TWICE),
        case("algorithm.critic.clip=null", GAE, FAST, TWICE, "algorithm.critic.clip=0.01"),
        case("algorithm.critic.warmup_steps=1", GAE, FAST),
        case("algorithm.critic.kind=separate", GAE, FAST, TWICE),
    ],
)
def test_a_key_reaches_the_update(told: Callable[..., StarPORun], key: str, beside: tuple[str, ...]) -> None:
    cfg = told(*beside, key)
    reaches(key, learned(cfg), stepped(cfg), without(told, beside))


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        case("algorithm.importance_sampling_clip_max=2.0", "algorithm.importance_sampling_clip_max=null"),
        case("algorithm.importance_sampling_clip_max=1.1", "algorithm.importance_sampling_clip_max=3.0"),
    ],
)
def test_importance_weights_reach_the_update(told: Callable[..., StarPORun], key: str, beside: tuple[str, ...]) -> None:
    """In double precision the learner does not take the sampler's log-probs for its own."""
    cfg = told(*beside, key)
    reaches(key, learned(cfg, double=True), stepped(cfg, double=True), without(told, beside, double=True))


def test_minibatches_are_steps_on_parts_of_the_groups(told: Callable[..., StarPORun]) -> None:
    """Three groups are kept: one step on two of them and one on the third, in an order that the seed decides."""
    cfg = told("algorithm.minibatches=2")
    found = learned(cfg)
    kept = phase3.score_and_filter(cfg, played()).kept
    ways = [stepped(cfg, parts=[order[:2], order[2:]]) for order in permutations(kept)]
    closest = min(ways, key=lambda way: np.abs(found - way).max())
    reaches("algorithm.minibatches", found, closest, without(told, ()))


# -------------------------------------------------------------------------------------------------------- advantages

EPISODE = "rloo brpo arpo reinforce_pp reinforce_pp_baseline".split()


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        *(case(f"algorithm.advantage={name}") for name in [*EPISODE, "gigpo", "gae"]),
        case("algorithm.advantage=bilevel_gae", GAE),
        *(case("algorithm.advantage_std=false", f"algorithm.advantage={name}") for name in "grpo brpo gigpo".split()),
        case("algorithm.gamma=0.7", "algorithm.advantage=gae"),
        case("algorithm.step_weight=0.3", "algorithm.advantage=gigpo"),
        case("algorithm.gamma_high=0.5", "algorithm.advantage=gigpo"),
        *(
            case(f"algorithm.{key}", f"algorithm.advantage={name}")
            for name in ("gae", "bilevel_gae")
            for key in ("gamma=0.7", "lam=0.6", "turn_rewards=false")
        ),
        case("algorithm.gamma_high=0.5", "algorithm.advantage=bilevel_gae"),
    ],
)
def test_a_key_reaches_the_advantages(told: Callable[..., StarPORun], key: str, beside: tuple[str, ...]) -> None:
    """Of a batch in which one episode of each group is not trained on, and the groups have weights."""
    episodes = [t for group in played() for t in group]
    trains = [number % 4 != 2 for number in range(len(episodes))]
    random = np.random.default_rng(2)
    old = [np.array(t.sampled_logprobs) for t in episodes]
    reference = [x - random.normal(0.1, 0.5, len(x)) for x in old]
    values = [random.normal(0.3, 0.5, len(x)) for x in old]
    ends = np.cumsum([len(x) for x in old])[:-1]

    def results(*both: Flat | None) -> np.ndarray:
        """What the trained tokens are worth, and their returns where there is a critic."""
        return np.concatenate([x for part in both if part for x, on in zip(part, trains, strict=True) if on])

    def expected(*overrides: str) -> np.ndarray:
        cfg = told(*overrides)
        shares = [1.0] * 4 if cfg.algorithm.critical else weights
        return results(*worth(cfg, episodes, shares, trains, values))

    weights, cfg = [1.0, 0.5, 0.75, 0.25], told(*beside, key)
    measured = Measured(*(torch.tensor(np.concatenate(part)) for part in (reference, values)))
    found = phase3.advantages(cfg, Batch.of(episodes), measured, weights, torch.tensor(trains))
    arrays = [None if part is None else np.split(part.numpy(), ends) for part in found]
    reaches(key, results(*arrays), expected(*beside, key), expected(*beside))


# ------------------------------------------------------------------------------------------------------------ judging


class Kept(NamedTuple):
    """What `judge` should find, written by hand; trained: members of each kept group whose tokens count."""

    kept: list[int]
    trained: str = "0123 0123 0123"
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)


FILTERS: dict[str, Kept] = {  # deviations: 0.41, 0, 1.10 and 0.39
    "keep_zero=true": Kept([2, 0, 3, 1], "0123 0123 0123 0123"),
    "strategy=top_k largest=false": Kept([3, 0], "0123 0123"),
    "metric=reward": Kept([2, 0, 3, 1], "0123 0123 0123 0123"),
    "metric=length": Kept([1, 3, 2, 0], "0123 0123 0123 0123"),
    "metric=entropy": Kept([3, 2, 0, 1], "0123 0123 0123 0123"),
    "metric=entropy_variance": Kept([0, 3], "0123 0123"),
    "strategy=top_k": Kept([2, 0], "0123 0123"),
    "strategy=top_k value=0.25": Kept([2], "0123"),
    "strategy=top_k_abs value=2": Kept([2, 0], "0123 0123"),
    "strategy=top_p value=0.7": Kept([2, 0], "0123 0123"),
    "strategy=top_p value=0.7 metric=reward_variance": Kept([2], "0123"),  # variances: 0.17, 0, 1.21 and 0.15
    "strategy=top_p_softmax value=0.6": Kept([2, 0], "0123 0123"),
    "strategy=min_p value=0.36": Kept([2, 0], "0123 0123"),
    "strategy=soft": Kept([2, 0, 3], weights=(0.374, 0.0, 1.0, 0.352)),
}


@pytest.mark.parametrize("keys", FILTERS)
def test_a_key_reaches_the_filter(told: Callable[..., StarPORun], keys: str) -> None:
    rewards = [0.0, 0.4, 0.5, 1.0], [0.2] * 4, [0.0, 0.1, 1.9, 2.0], [0.1, 0.2, 0.1, 0.9]
    tokens, surprise, wobble = [1, 4, 2, 3], [1.0, 0.5, 2.0, 3.0], [0.5, 0.0, 0.0, 0.1]
    groups = [
        [
            Trajectory(
                segments=[
                    Segment(
                        [5] * (1 + tokens[g]), [False] + [True] * tokens[g],
                        [0.0] + [-surprise[g] - wobble[g] * (-1) ** n] * tokens[g], 0, [0], [1], [1 + tokens[g]],
                    )
                ],
                turn_rewards=[reward], turn_penalties=[0.0], group=g,
            )
            for n, reward in enumerate(rewards[g])
        ]
        for g in range(4)
    ]  # fmt: skip
    cfg = told(*(f"algorithm.filter.{key}" for key in keys.split()))

    def surprises(episodes: Sequence[Trajectory]) -> torch.Tensor:
        return torch.tensor([-sum(t.sampled_logprobs) / t.tokens for t in episodes], dtype=torch.float64)

    asked_for: Any = SimpleNamespace(mean_entropies=surprises)

    def seen(cfg: StarPORun) -> Kept:
        scored = phase3.score_and_filter(cfg, groups, asked_for if "entropy" in keys else None)
        trained = ["".join(str(n) for n, on in enumerate(scored.trains[g]) if on) for g in scored.kept]
        return Kept(scored.kept, " ".join(trained), tuple(round(weight, 3) for weight in scored.weights))

    assert seen(told()) == Kept([2, 0, 3]), "without a filter all groups are kept whose rewards differ"
    found, expected = seen(cfg), FILTERS[keys]
    assert found == expected, f"algorithm.filter: {keys} {'is ignored' if found == seen(told()) else 'is not followed'}"


# ------------------------------------------------------------------------------------------------------------ playing


class Engine(ReplaySampler):
    """Writes `says(handle, turn)` in every turn, at log-prob -temperature, as far as the turn's room goes."""

    def __init__(self, chat: Chat, says: Callable[[int, int], str]) -> None:
        self.chat, self.says = chat, says
        self.turn: list[int] = []
        self.open_now = self.most_open = 0

    def open(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.turn += [0] * len(prompts)
        self.open_now += len(prompts)
        self.most_open = max(self.most_open, self.open_now)
        return list(range(len(self.turn) - len(prompts), len(self.turn)))

    def append(self, handle: int, ids: Sequence[int]) -> None:
        pass

    def close(self, handles: Sequence[int]) -> None:
        self.open_now -= len(handles)

    def sample(self, handles: Sequence[int], params: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        said = []
        for handle in handles:
            ids = [*self.chat.content_ids(self.says(handle, self.turn[handle])), self.chat.stop_id]
            self.turn[handle] += 1
            kept = ids[: params.max_new_tokens]
            said.append(Completion(kept, [-params.temperature] * len(kept), len(kept) == len(ids)))
        return said


Seen = Callable[[list[list[Trajectory]], Engine], Any]


def answer(text: str) -> str:
    return f"<think>so</think><answer>{text}</answer>"


def reads(text: str) -> Seen:
    """Whether the model reads a text before its first answer, and whether it reads compact words at all."""

    def seen(groups: list[list[Trajectory]], engine: Engine) -> list[bool]:
        segment = groups[0][0].segments[0]
        first, whole = (engine.chat.decode(segment.ids[:end]) for end in (segment.turn_starts[0], None))
        return [text in first, "Turns left" in whole]

    return seen


PENALTY = "protocol.format_penalty=-0.5"
LAST = ("rollout.context=last_k", "rollout.context_turns=1")
firsts: Seen = lambda groups, engine: [s.first_turn for s in groups[0][0].segments]  # noqa: E731
summed_up: Seen = lambda groups, e: ["Turn 1" in e.chat.decode(s.ids) for s in groups[0][0].segments]  # noqa: E731
fits: Seen = lambda groups, engine: max(t.context for t in groups[0]) <= 420  # noqa: E731
penalties: Seen = lambda groups, engine: groups[0][0].turn_penalties  # noqa: E731
actions: Seen = lambda groups, engine: groups[0][0].actions  # noqa: E731
invalid: Seen = lambda groups, engine: groups[0][0].invalid_turns  # noqa: E731


@pytest.mark.parametrize(
    ("key", "beside", "said", "seen", "expected"),
    [
        case("rollout.groups=3", said=answer("Up"), seen=lambda groups, engine: len(groups), expected=3),
        case("rollout.num_generations=2", said=answer("Up"), seen=lambda groups, engine: len(groups[1]), expected=2),
        case("rollout.slots=5", said=answer("Up"), seen=lambda groups, engine: engine.most_open, expected=5),
        case(
            "rollout.temperature=0.7", said=answer("Up"),
            seen=lambda groups, engine: set(groups[0][0].sampled_logprobs), expected={-0.7},
        ),
        case(
            "rollout.max_completion_length=5", said=answer("Up"),
            seen=lambda groups, engine: groups[0][0].turn_tokens, expected=[5, 5, 5],
        ),
        case("rollout.max_context=420", said=answer("Up"), seen=fits, expected=True),
        case("rollout.context_turns=2", *LAST, said=answer("Up"), seen=firsts, expected=[0, 0, 1]),
        case(
            "rollout.context=single_turn", "rollout.context=last_k", "rollout.context_turns=3", said=answer("Up"),
            seen=summed_up, expected=[False, True, True],
        ),
        case(
            "rollout.context=last_k", "rollout.context=single_turn", "rollout.context_turns=3", said=answer("Up"),
            seen=summed_up, expected=[False, False, False],
        ),
        case("protocol.max_turns=2", said=answer("Up"), seen=lambda groups, engine: groups[0][0].turns, expected=2),
        case("protocol.max_actions_per_turn=2", said=answer("Up || Down"), seen=actions, expected=["Up", "Down"] * 3),
        case("protocol.max_actions=2", said=answer("Up"), seen=actions, expected=["Up", "Up"]),
        case("protocol.think=false", said="<answer>Up</answer>", seen=invalid, expected=0),
        case("protocol.style=plain", said=answer("Up"), seen=reads("You have 3 turns left."), expected=[True, False]),
        case(
            "protocol={style: plain, preset: ragen, max_turns: 3}", said=answer("Up"), seen=reads("Strictly follow"),
            expected=[True, False],
        ),
        case(
            "protocol.system=You are {{ actions | length }}.", "protocol.style=plain", said=answer("Up"),
            seen=reads("You are 4."), expected=[True, False],
        ),
        case(
            "protocol.example=Say Up", "protocol.style=plain", said=answer("Up"), seen=reads("For example:\nSay Up"),
            expected=[True, False],
        ),
        case(
            "protocol.feedback=So {{ turn }}", "protocol.style=plain", said=answer("Up"), seen=reads("So 1"),
            expected=[True, False],
        ),
        case(PENALTY, said="no", seen=penalties, expected=[-0.5] * 3),
        case("protocol.force_think=true", said=answer("Up").removeprefix("<think>"), seen=invalid, expected=0),
    ],
)  # fmt: skip
def test_a_key_reaches_the_episodes(
    told: Callable[..., StarPORun], tiny_chat: Chat, key: str, beside: tuple[str, ...], said: str, seen: Seen,
    expected: Any,
) -> None:  # fmt: skip
    def play(cfg: StarPORun) -> Any:
        engine = Engine(tiny_chat, lambda handle, turn: said)
        return seen(phase3.rollout(cfg, engine, tiny_chat, 1), engine)

    found, before = play(told(*beside, key)), play(told(*beside))
    assert before != expected, f"{key} makes no difference here: a case that shows nothing"
    assert found == expected, f"{key} {'is ignored' if found == before else 'does something else'}"


def test_the_engine_is_the_one_asked_for(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Sliding windows cannot have slots: a run that asks for them is refused instead of being given another engine."""
    folder = tiny_base(tmp_path / "base", tiny_tokenizer)
    torch.manual_seed(0)
    MistralForCausalLM(
        MistralConfig(
            vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, sliding_window=4,
        )
    ).save_pretrained(folder)  # fmt: skip
    file = tmp_path / "run.yaml"
    short = {"evaluation": {"episodes": 1, "final_episodes": 1}, "trainer": {"max_steps": 1}}
    file.write_text(yaml.safe_dump({**BASE, **short, "model": {"name_or_path": str(folder)}}))
    with pytest.raises(UserError, match="engine=slots"):
        phase3.main(["--config", str(file), f"output_dir={tmp_path / 'run'}", "rollout.engine=slots"])


# ------------------------------------------------------------------------------------ critics, checkpoints, diagnostics


def test_diagnostics_ask_the_first_thought_under_every_first_prompt(
    told: Callable[..., StarPORun], tiny_chat: Chat
) -> None:
    """Each turn has a thought of its own; pairs, temperature and the order of turns reach the figures."""
    cfg = told("rollout.groups=2", "rollout.num_generations=3", "rollout.temperature=0.7")
    words = ["ice", "goal", "left and down", "the box", "apples", "wall", "up", "a hole", "tree"]
    engine = Engine(tiny_chat, lambda n, turn: f"<think>{words[n]} {words[-1 - turn]}</think><answer>Up</answer>")
    groups = phase3.rollout(cfg, engine, tiny_chat, 1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny_chat.tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, initializer_range=0.5,
        )
    )  # fmt: skip
    learner = make_learner(cfg, model, tiny_chat)

    def figures(turn: int) -> dict[str, float]:
        chosen = [[thoughts(tiny_chat, t)[turn] for t in group] for group in groups]
        own = [g for g, group in enumerate(chosen) for _ in group]
        prompts = [group[0].prompt_ids for group in chosen if group[0]]
        said = [thought.ids for group in chosen for thought in group if thought]
        scores = torch.zeros(len(said), len(prompts))
        for r, ids in enumerate(said):
            for n, prompt in enumerate(prompts):
                with torch.no_grad():
                    table = (model(torch.tensor([prompt + ids])).logits[0] / 0.7).log_softmax(-1)
                scores[r, n] = sum(table[len(prompt) + i - 1, token] for i, token in enumerate(ids))
        return information(scores, torch.tensor(own), torch.tensor([len(ids) for ids in said]))[0]

    found = thoughts_and_prompts(cfg, learner, tiny_chat, groups, 1, RunState(work=10**9), lambda text: None)
    expected, last = figures(0), figures(2)
    assert expected["conditional_entropy"] != pytest.approx(last["conditional_entropy"], rel=0.01)
    for name, value in expected.items():
        assert found[f"collapse/first_turn/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-3), name
    assert found["collapse/trajectory/retrieval_chance"] < 0.5
    fewer = told("rollout.groups=2", "rollout.num_generations=3", "diagnostics.pairs=2")
    found = thoughts_and_prompts(fewer, learner, tiny_chat, groups, 1, RunState(work=10**9), lambda text: None)
    assert found["collapse/trajectory/retrieval_chance"] == 0.5, "diagnostics.pairs is ignored"
