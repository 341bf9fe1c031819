"""Does an update move what it should, by as much, however it is cut into micro-batches?  Every estimator and loss."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import updates
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import train_phase3_starpo as phase3
from posttrain.config.starpo import StarPORun
from posttrain.models.forward import Prefixes, token_logprobs
from posttrain.models.loading import peft_config
from posttrain.starpo.experience import Batch, BatchRow, Measured
from posttrain.starpo.learner import Learner
from posttrain.starpo.run import make_learner
from posttrain.types import Completion, Segment, Trajectory, UserError

CRITICAL = {"gae", "bilevel_gae"}
SEQUENCES = {"aggregation": "sequence_mean"}
EPISODE = ["grpo", "rloo", "brpo", "arpo", "reinforce_pp", "reinforce_pp_baseline"]


def config(**algorithm: Any) -> StarPORun:
    tuning = algorithm.pop("tuning", "full")
    return StarPORun.model_validate(
        {
            "output_dir": "unused",
            "model": {"name_or_path": "unused", "tuning": tuning},
            "envs": ["frozen_lake"],
            "protocol": {"format_penalty": 0.0},
            "trainer": {"learning_rate": 1e-2, "max_grad_norm": 1e9},
            "algorithm": algorithm,
        }
    )


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=71, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2,
        )
    )  # fmt: skip


def played(model: LlamaForCausalLM, groups: int = 3, members: int = 4) -> list[list[Trajectory]]:
    """Ragged episodes of one to three turns with the model's own log-probs; the last of a group has two contexts."""
    random = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(1, 71, (count,), generator=random).tolist()

    out = []
    for group in range(groups):
        prompt, samples = ids(5), []
        for member in range(members):
            segment, segments = Segment(list(prompt)), []
            turns = 1 + (group + member) % 3
            for turn in range(turns):
                if turn and member == members - 1:
                    segments.append(segment)
                    segment = Segment(list(prompt), first_turn=turn)
                said = ids(2 + (member + turn) % 3)
                segment.write(turn, Completion(said, [0.0] * len(said), True))
                segment.read(ids(3))
            segments.append(segment)
            for segment in segments:
                with torch.no_grad():
                    values = iter(token_logprobs(model, [segment.ids], [segment.mask])[0].tolist())
                segment.logprobs = [next(values) if on else 0.0 for on in segment.mask]
            samples.append(
                Trajectory(
                    segments=segments,
                    turn_rewards=[0.0] * (turns - 1) + [float((group + member) % 2)],
                    turn_penalties=[0.0] * turns,
                    state_keys=[f"{turn}" for turn in range(turns)],
                    group=group,
                    env="frozen_lake",
                )
            )
        out.append(samples)
    return out


def learn(
    cfg: StarPORun, model: Any, groups: list[list[Trajectory]], learner: Learner | None = None, step: int = 1
) -> tuple[Learner, dict[str, float]]:
    learner = learner or make_learner(cfg, model, None)  # type: ignore[arg-type]
    return learner, updates.learn(cfg, learner, groups, step)


def moved(
    cfg: StarPORun, rearrange: Callable[[list[list[Trajectory]]], Any] = lambda groups: groups, exact: bool = True
) -> torch.Tensor:
    """What one update changes in the weights; plain gradient descent in a stride far above rounding: the gradient.

    exact: the sampler's log-probs are the learner's; otherwise the learner looks for itself, as in bfloat16.
    """
    cfg = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"learning_rate": 1e3})})
    model = policy()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learner = make_learner(cfg, model, None)  # type: ignore[arg-type]
    learner.optimizer = torch.optim.SGD([{"params": group} for group in learner.trainable if group], lr=1e3)
    learner.exact = exact
    learn(cfg, model, rearrange(played(policy())), learner)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_sampler_gap_is_a_mean_over_tokens(tokens: int) -> None:
    """However the tokens are cut into micro-batches; one token in bfloat16's tail hardly moves it."""
    cfg = config()
    cfg = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"micro_batch_tokens": tokens})})
    model = policy()
    groups = played(model)
    segment = groups[0][0].segments[0]
    segment.logprobs[segment.mask.index(True)] += 0.5
    _, row = learn(cfg, model, groups)
    count = sum(t.tokens for group in groups for t in group)
    assert row["policy/sampler_gap"] == pytest.approx(0.5 / count, rel=1e-2)


@pytest.mark.parametrize("advantage", [*EPISODE, "gigpo", *sorted(CRITICAL)])
def test_every_estimator_starts_at_ratio_one_and_learns(advantage: str) -> None:
    cfg = config(advantage=advantage, beta=0.01)
    model = policy()
    groups = played(model)
    learner, row = learn(cfg, model, groups)
    assert row["policy/sampler_gap"] < 1e-4
    assert row["policy/kl_to_old"] == 0 == row["policy/clip_fraction"]  # before the first step: one policy
    assert row["policy/kl_to_reference"] < 1e-8
    assert 0 < row["policy/grad_norm"] < 1e3 and row["policy/skipped_steps"] == 0
    assert ("critic/loss" in row) == (advantage in CRITICAL)
    _, second = learn(cfg, model, groups, learner, step=2)
    assert second["policy/kl_to_reference"] > 1e-6
    _, twice = learn(config(advantage=advantage, beta=0.01, num_iterations=2), policy(), groups)
    assert twice["policy/loss"] < row["policy/loss"], "in the second epoch the surrogate has fallen"


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "ppo_clip", "delta": 3.0},
        {"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ],
    ids=lambda loss: loss["loss_type"],
)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_the_first_step_of_every_loss_is_the_policy_gradient(loss: dict[str, Any], aggregation: str) -> None:
    """At ratio 1 all losses have the gradient of -A log p, whatever becomes of them later."""
    if loss["loss_type"] == "gspo" and aggregation != "sequence_mean":
        with pytest.raises(ValueError, match="gspo is a mean over sequences"):
            config(aggregation=aggregation, **loss)
        return
    plain = moved(config(aggregation=aggregation))
    assert torch.allclose(moved(config(aggregation=aggregation, **loss)), plain, atol=1e-5 * plain.abs().max().item())


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_reading_shared_prefixes_once_changes_nothing(advantage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    honest = Prefixes.__init__
    monkeypatch.setattr(Prefixes, "__init__", lambda self, m, keys: (used.append(len(keys)), honest(self, m, keys))[1])
    shared = moved(config(advantage=advantage))
    assert max(used) == 3, "the members of each group share their prompt"
    used.clear()
    monkeypatch.setattr("posttrain.starpo.learner.can_share_prefixes", lambda model: False)
    whole = moved(config(advantage=advantage))
    assert max(used) == 0
    assert (shared - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("algorithm", [{"aggregation": "sequence_mean"}, {"advantage": "gae"}, {"advantage": "gigpo"}])
def test_cutting_and_order_change_nothing(algorithm: dict[str, Any]) -> None:
    cfg = config(**algorithm)
    whole = moved(cfg)
    cut = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"micro_batch_tokens": 20})})
    scale = whole.abs().max().item()
    assert torch.allclose(moved(cut), whole, atol=1e-6 * scale + 1e-7)
    turned = moved(cfg, lambda groups: [group[::-1] for group in groups])
    assert torch.allclose(turned, whole, atol=1e-6 * scale + 1e-7)


@pytest.mark.parametrize(
    ("algorithm", "exact"),
    [
        ({**SEQUENCES, "loss_type": "gspo", "epsilon": 1e-2, "epsilon_high": 2e-2}, True),
        ({"importance_sampling_clip_max": 1.1}, False),
    ],
)
def test_ratios_do_not_depend_on_micro_batches(algorithm: dict[str, Any], exact: bool) -> None:
    """The last episode of each group has two contexts, which a small budget reads in two micro-batches."""
    random = torch.Generator().manual_seed(2)

    def elsewhere(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        random.manual_seed(2)
        for segment in (segment for group in groups for t in group for segment in t.segments):
            noise = (0.3 * torch.randn(len(segment.ids), generator=random)).tolist()
            logprobs = zip(segment.logprobs, noise, segment.mask, strict=True)
            segment.logprobs = [p + n if on else 0.0 for p, n, on in logprobs]
        return groups

    cfg = config(**algorithm)
    whole = moved(cfg, elsewhere, exact)
    cut = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"micro_batch_tokens": 20})})
    assert whole.norm() > 0 and (moved(cut, elsewhere, exact) - whole).norm() <= 5e-6 * whole.norm()


def test_policy_and_critic_are_clipped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the critic's loss, the policy's step is its own."""

    def step(coef: float) -> torch.Tensor:
        monkeypatch.setattr("posttrain.starpo.learner.VALUE_COEF", coef)
        settings = {"kind": "separate", "clip": None, "warmup_steps": 0}
        cfg = config(advantage="gae", critic=settings)
        return moved(cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"max_grad_norm": 0.1})}))

    assert torch.equal(step(1e-3), step(1e3))


def test_a_warming_critic_leaves_no_trace_in_the_policys_moments() -> None:
    cfg, model, learner = critic_run("shared", warmup_steps=1)
    learn(cfg, model, played(policy()), learner)
    known = learner.optimizer.state_dict()["state"].keys()
    assert known == set(range(len(learner.trainable[0]), len(learner.trainable[0]) + len(learner.trainable[1])))


def test_masked_and_unkept_episodes_give_no_gradient() -> None:
    cfg = config(filter={"strategy": "top_k_abs", "value": 1}, mask_truncated_completions=True)

    def shout(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        for t in groups[1]:
            t.turn_rewards[-1] *= 2  # the largest std
        for group in groups:
            group[2].truncated = group[3].truncated = True
        return groups

    scored = phase3.score_and_filter(cfg, shout(played(policy())))
    assert scored.kept == [1] and [sum(group) for group in scored.trains] == [2, 2, 2]

    def only(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        shout(groups)
        for number, group in enumerate(groups):
            for sample, t in enumerate(group):
                if number != 1 or not scored.trains[number][sample]:
                    for segment in t.segments:  # other tokens: nobody may look at them
                        segment.ids = [7] * len(segment.ids)
        return groups

    assert torch.equal(moved(cfg, only), moved(cfg, shout))


def test_entropies_are_those_of_the_distribution_sampled_from() -> None:
    """Of tokens drawn from one and the same distribution, -log p varies and the entropy does not."""
    model = policy()
    with torch.no_grad():
        model.model.embed_tokens.weight[:40] = model.model.embed_tokens.weight[0]  # tokens that the model takes for one
    groups = played(model)
    for group in groups[:2]:
        for segment in (segment for t in group for segment in t.segments):
            segment.ids = [token % 40 for token in segment.ids]
            values = iter(token_logprobs(model, [segment.ids], [segment.mask])[0].tolist())
            segment.logprobs = [next(values) if on else 0.0 for on in segment.mask]
    cfg = config(filter={"strategy": "top_k", "value": 0.4, "metric": "entropy_variance"})
    learner = make_learner(cfg, model, None)  # type: ignore[arg-type]
    batch = Batch.of([t for group in groups for t in group])
    found_S = learner.entropies(batch)
    with torch.no_grad():
        for row in batch.rows:
            table = (model(torch.tensor([row.ids])).logits[0].double()).log_softmax(-1)
            wanted = -(table.exp() * table).sum(-1)[[i - 1 for i, on in enumerate(row.mask) if on]]
            assert torch.allclose(found_S[row.tokens].double(), wanted, atol=1e-5)
    noise = [torch.tensor([-sum(t.sampled_logprobs) / t.tokens for t in group]).var() for group in groups]
    assert min(noise) > 1e-3, "-log p would rank all three groups"
    scored = phase3.score_and_filter(cfg, groups, learner)
    assert scored.kept == [2]


def test_soft_weights_scale_each_groups_advantages() -> None:
    groups = played(policy())
    for t in groups[2]:
        t.turn_rewards[-1] *= 4
    hard, soft = config(), config(filter={"strategy": "soft"})
    batch = Batch.of([t for group in groups for t in group])
    measured = make_learner(hard, policy(), None).measure(batch)  # type: ignore[arg-type]
    trains_B = torch.ones(len(batch.episodes), dtype=torch.bool)
    plain_S, _ = phase3.advantages(hard, batch, measured, [1.0] * 3, trains_B)
    weights = phase3.score_and_filter(soft, groups).weights
    assert weights[2] == 1 and weights[0] == pytest.approx(0.25)
    scaled_S, _ = phase3.advantages(soft, batch, measured, weights, trains_B)
    assert torch.allclose(scaled_S, plain_S * torch.tensor(weights)[batch.group_B][batch.episode_S])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "brpo"},
        {"advantage": "reinforce_pp"},
        {"advantage": "reinforce_pp_baseline"},
        {"advantage": "gae"},
        {"advantage": "bilevel_gae"},
    ],
    ids=lambda algorithm: algorithm["advantage"],
)
def test_statistics_of_a_batch_are_of_each_environment_alone(algorithm: dict[str, Any]) -> None:
    """Rewards ten times as large in one of two environments change the advantages of neither."""
    cfg = config(**algorithm)
    assert not cfg.algorithm.keeps_scale and config(advantage="arpo").algorithm.keeps_scale

    def found(scale: float) -> torch.Tensor:
        groups = played(policy())
        for group in groups[1:]:
            for t in group:
                t.env, t.turn_rewards = "sokoban", [scale * (reward - 0.1) for reward in t.turn_rewards]
        batch = Batch.of([t for group in groups for t in group])
        values_S = torch.linspace(0, 0.5, len(batch.turn_S)) * (1 + (scale - 1) * (batch.group_B[batch.episode_S] > 0))
        everyone = torch.ones(len(batch.episodes), dtype=torch.bool)
        return phase3.advantages(cfg, batch, Measured(None, values_S), [1.0] * 3, everyone)[0]

    assert torch.allclose(found(1.0), found(10.0), atol=1e-3)
    assert found(1.0).std() > 0.1


def test_a_token_that_the_reference_finds_far_likelier_does_not_cost_the_update() -> None:
    """exp(95) is more than float32 holds: the gradient was not finite, and the update of all tokens was left out."""
    cfg = config(beta=0.1)
    learner = make_learner(cfg, model := policy(), None)  # type: ignore[arg-type]
    honest = learner.measure

    def measure(batch: Batch) -> Measured:
        measured = honest(batch)
        assert measured.reference_S is not None
        measured.reference_S[0] = batch.sampler_S[0] + 95
        return measured

    learner.measure = measure  # type: ignore[method-assign]
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    _, row = learn(cfg, model, played(policy()), learner)
    assert row["policy/skipped_steps"] == 0 and 0 < row["policy/grad_norm"] < 1e3
    assert not torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), before)


# ------------------------------------------------------------------------------------------------------------- critics


class NoChat:
    added_tokens = 0


def critic_run(kind: str, **more: Any) -> tuple[StarPORun, Any, Learner]:
    cfg = config(advantage="gae", critic={"kind": kind, "learning_rate": 3e-2, "clip": None, **more})
    model = policy()
    return cfg, model, make_learner(cfg, model, NoChat())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_critics_learn_values_and_warm_up_alone(kind: str) -> None:
    cfg, model, learner = critic_run(kind, warmup_steps=15)
    groups = played(policy())
    rows, masks = [groups[0][0].segments[0].ids], [groups[0][0].segments[0].mask]
    before = token_logprobs(learner.policy, rows, masks)[0].detach()
    errors = [learn(cfg, model, groups, learner, step)[1]["critic/error"] for step in range(1, 16)]
    assert errors[-1] < 0.85 * errors[0]
    after = token_logprobs(learner.policy, rows, masks)[0].detach()
    assert torch.equal(before, after), "while the critic warms up, the policy stands still"
    learn(cfg, model, groups, learner, step=16)
    assert not torch.allclose(before, token_logprobs(learner.policy, rows, masks)[0], atol=1e-4)


def test_values_keep_the_precision_of_the_head_under_autocast() -> None:
    _, _, learner = critic_run("shared")
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight)
    states_SD = torch.randn(5, learner.critic.head.in_features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values_S = learner.critic.of(states_SD)
    assert values_S.dtype == torch.float32 and torch.equal(values_S, learner.critic.of(states_SD))


def test_a_critic_beside_trained_rows_of_the_embedding() -> None:
    """Where the chat had to add tokens, peft wraps embedding and output layer."""

    class Chat:
        added_tokens, tokenizer = 2, range(71)

    for kind in ("shared", "separate"):
        cfg = config(advantage="gae", tuning="lora", critic={"kind": kind})
        model = policy()
        learner = make_learner(cfg, model, Chat())  # type: ignore[arg-type]
        assert learn(cfg, model, played(policy()), learner)[1]["critic/loss"] > 0


def test_an_adapter_on_the_output_layer_is_refused() -> None:
    cfg = config(tuning="lora")
    lora = cfg.model.lora.model_copy(update={"target_modules": ["lm_head", "q_proj"]})
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"lora": lora})})
    with pytest.raises(UserError, match="lm_head"):
        make_learner(cfg, policy(), NoChat())  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
def test_the_first_minibatch_is_on_policy_to_the_bit_in_bfloat16(micro_batch_tokens: int) -> None:
    """Rows read together, or behind a shared prefix, round otherwise than the look before the update did."""
    cfg = config(**SEQUENCES, loss_type="gspo", epsilon=1e-7, epsilon_high=1e-7, minibatches=1)
    trainer = cfg.trainer.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    cfg = cfg.model_copy(update={"trainer": trainer})
    model = cast(Any, policy()).to(torch.bfloat16)
    learner, row = learn(cfg, model, played(model))
    assert learner.shares and not learner.exact
    assert row["policy/kl_to_old"] == 0 == row["policy/clip_fraction"] and row["policy/grad_norm"] > 0


@pytest.mark.parametrize(("minibatches", "num_iterations", "share"), [(1, 1, 0), (2, 1, 0.5), (4, 1, 0.75), (1, 2, 1)])
def test_what_later_optimizer_steps_train_on_is_measured_before_the_first(
    minibatches: int, num_iterations: int, share: float
) -> None:
    cfg = config(minibatches=minibatches, num_iterations=num_iterations, importance_sampling_clip_max=2.0)
    learner = make_learner(cfg, model := policy(), None)  # type: ignore[arg-type]
    learner.exact = False
    groups, before = played(model, groups=4), [p.detach().clone() for p in model.parameters()]
    for segment in (segment for group in groups for t in group for segment in t.segments):
        segment.logprobs = [x - 0.5 for x in segment.logprobs]  # the sampler finds every token less likely
    measured, honest = [], learner._head

    def head(net: Any, rows: list[BatchRow]) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        measured.extend(row.episode for row in rows)
        return honest(net, rows)

    learner._head = head  # type: ignore[method-assign]
    _, row = learn(cfg, model, groups, learner)
    assert len(set(measured)) == share * sum(map(len, groups))
    assert row["policy/importance_weight"] == pytest.approx(math.exp(0.5), rel=1e-4)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_is_saved_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    cfg, model, learner = critic_run(kind)
    groups = played(policy())
    learn(cfg, model, groups, learner)
    batch = Batch.of([t for group in groups for t in group])
    assert learner.critic is not None
    learner.critic.save(tmp_path)
    torch.save(learner.optimizer.state_dict(), tmp_path / "optimizer.pt")
    _, _, fresh = critic_run(kind)
    fresh.policy.load_state_dict(learner.policy.state_dict())
    assert fresh.critic is not None
    fresh.critic.load(tmp_path)
    fresh.load_optimizer(tmp_path)
    expected, found = learner.measure(batch).values_S, fresh.measure(batch).values_S
    assert expected is not None and found is not None and expected.abs().max() > 0
    assert torch.equal(found, expected)
    for a, b in zip(
        learner.optimizer.state_dict()["state"].values(), fresh.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_adapter_is_switched_off_for_the_reference() -> None:
    cfg = config(tuning="lora", beta=0.1)
    model = policy()
    learner = make_learner(cfg, model, NoChat())  # type: ignore[arg-type]
    assert learner.reference is None and peft_config is not None
    groups = played(policy())
    batch = Batch.of([t for group in groups for t in group])
    for step in (1, 2, 3):
        learn(cfg, model, groups, learner, step)
    reference_S = learner.measure(batch).reference_S
    assert reference_S is not None and torch.allclose(reference_S, batch.sampler_S, atol=1e-5)


class Waits(TorchDispatchMode):
    """Counts the operations for which Python would wait for a GPU: numbers from tensors.

    Not those that are on the CPU on a GPU, too, and transformers' own look at the positions of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._unique2.default  # how many distinct values there are
        if func is torch.ops.aten._local_scalar_dense.default:
            callers = [frame.name for frame in traceback.extract_stack()]
            self.count += not {"trained_states", "find_packed_sequence_indices"} & {*callers[-6:]}
        return func(*args, **(kwargs or {}))

    def cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor.to("cpu")


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"critic": {"kind": "separate"}, "advantage": "gae"},
        {"beta": 0.1},
        {"loss_type": "gspo", "aggregation": "sequence_mean", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ],
)
def test_nothing_waits_for_a_gpu_within_a_micro_batch(
    algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for tokens in (16, 4096):
        cfg = config(**algorithm)
        cfg = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"micro_batch_tokens": tokens})})
        model = policy()
        groups = played(model)
        with Waits() as waits, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", lambda tensor: waits.cpu(tensor))
            learn(cfg, model, groups)
        counts.append(waits.count)
    assert counts[0] == counts[1]
