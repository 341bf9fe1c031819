"""Does a teacher teach?  The exact gradient of KL(policy || teacher), runs with and without it, and what is refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import updates
from test_learner import config, played, policy
from test_phase3 import LAKE, LIMITS, rows, settings, train, weights
from tiny_runs import python, tiny_base
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import envs
from envs.players import demonstrate
from envs.protocol import Protocol
from posttrain import plan
from posttrain.config.starpo import StarPORun
from posttrain.models import output_layer
from posttrain.models.chat import Chat
from posttrain.plan.devices import fleets
from posttrain.plan.episodes import always, learning
from posttrain.plan.seconds import Cost, update
from posttrain.plan.work import Episodes
from posttrain.starpo import run
from posttrain.starpo.learner import Learner
from posttrain.starpo.monitoring.alarms import watch
from posttrain.types import Trajectory, UserError

KEY = "update/teacher_kl"


def taught_by(tuning: str = "full", tokens: int | None = None, **keys: Any) -> StarPORun:
    """A config with a teacher. keys: of `distillation`, and sections."""
    algorithm = keys.pop("algorithm", {})
    given = config(tuning=tuning, **algorithm).model_dump()
    given["model"]["lora"] |= {"r": 4, "alpha": 8}
    given["trainer"] |= {"micro_batch_tokens": tokens} | keys.pop("trainer", {})
    given["rollout"] |= keys.pop("rollout", {})
    if keys.get("teacher", "unused"):
        given["distillation"] = {"teacher": "unused"} | keys
    return StarPORun.model_validate(given)


def teacher(vocabulary: int = 71) -> LlamaForCausalLM:
    """Another model than the policy, of another size."""
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(shape).double().requires_grad_(False).eval()


def learner_of(cfg: StarPORun, monkeypatch: pytest.MonkeyPatch, teaches: Any = None) -> Learner:
    """In float64, with gradients in `kept` instead of steps."""
    teaches = (teaches or teacher()) if cfg.distillation else None
    monkeypatch.setattr(run, "load_teacher", lambda cfg: teaches)
    learner = run.make_learner(cfg, policy().double(), None)  # type: ignore[arg-type]
    if cfg.model.tuning != "full":  # an adapter begins as nothing
        torch.manual_seed(3)
        for parameter in learner.trainable[0]:
            parameter.data = 0.1 * torch.randn_like(parameter, dtype=torch.float64)
    return learner


def gradients(learner: Learner, groups: list[list[Trajectory]]) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return what the first optimizer step of an update finds, and the figures of the update."""
    kept: list[list[torch.Tensor]] = []

    def keep() -> None:
        kept.append([p.grad.clone() for p in learner.trainable[0] if p.grad is not None])

    learner.optimizer.step = keep  # type: ignore[method-assign, assignment]
    figures = updates.learn(learner.cfg, learner, groups)
    return kept[0], figures


def brute_force(
    learner: Learner, groups: list[list[Trajectory]], teaches: Any, temperature: float = 1.0
) -> tuple[list[torch.Tensor], float]:
    """The gradient of the KL's mean, whole logits of one row after another; and that mean, weighted by token."""
    per_episode = learner.cfg.algorithm.aggregation == "sequence_mean"
    episodes = [t for group in groups for t in group]
    tokens = sum(t.tokens for t in episodes)
    loss, total = torch.zeros((), dtype=torch.float64), 0.0
    for t in episodes:
        for segment in t.segments:
            ids, on = torch.tensor([segment.ids]), torch.tensor(segment.mask)[1:]
            log_p, log_q = ((net(ids).logits[0, :-1][on, :71] / temperature).log_softmax(-1)
                            for net in (learner.model, teaches))  # fmt: skip
            kl = (log_p.exp() * (log_p - log_q)).sum()
            loss = loss + kl / (t.tokens * len(episodes) if per_episode else tokens)
            total += kl.item()
    return list(torch.autograd.grad(loss, learner.trainable[0])), total / tokens


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor], most: float = 1e-6) -> None:
    assert len(found) == len(wanted) > 0
    largest = max(each.abs().max() for each in wanted)
    assert largest > 0
    assert max((a - b).abs().max() for a, b in zip(found, wanted, strict=True)) < most * largest


@pytest.mark.parametrize("tokens", [None, 1, 20])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"tuning": "lora"},
        {"trainer": {"gradient_checkpointing": True}},
        {"rollout": {"temperature": 0.7}},
        {"algorithm": {"aggregation": "sequence_mean"}},
        {"vocabulary": 80},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_whole_reverse_kl(
    tokens: int | None, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "kl_tokens", lambda *_: 3)
    case = dict(case)
    teaches = teacher(case.pop("vocabulary", 71))  # rows of a layer that stand for no token are not compared
    learner = learner_of(taught_by(tokens=tokens, teacher_coef=0.7, reward=False, **case), monkeypatch, teaches)
    groups = played(policy())
    temperature = learner.cfg.rollout.temperature
    wanted, kl = brute_force(learner, groups, teaches, temperature)
    found, figures = gradients(learner, groups)
    equal(found, [0.7 * each for each in wanted])
    assert figures[KEY] == pytest.approx(kl, rel=1e-6) and kl > 0.1
    assert figures["policy/loss"] == 0 and figures["advantage/max"] == 0
    assert learner.teacher is teaches and all(p.grad is None for p in teaches.parameters())


class Conversions(TorchDispatchMode):
    """Counts how often a float32 tensor of a shape is copied to another precision."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].shape == self.shape and args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [False, True])
def test_an_output_layer_is_converted_once_and_not_for_each_tile(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it for every few tokens takes their time, and leaves memory in pieces."""
    net, teaches = teacher().float(), teacher().float()
    net.requires_grad_(trained)
    states_SD, weights_S = torch.randn(30, 48, generator=torch.Generator().manual_seed(0)), torch.rand(30)
    found: list[Any] = []
    for tokens in (4, 30):
        monkeypatch.setattr(output_layer, "kl_tokens", lambda *_, tokens=tokens: tokens)
        hidden_SD = states_SD.bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), Conversions((71, 48)) as conversions:
            kl_S, loss = output_layer.reverse_kl(net, hidden_SD, teaches, states_SD, weights_S)
        loss.backward()
        assert 0 < conversions.count <= 2
        found.append((kl_S, hidden_SD.grad))
    (few, few_gradient), (all_at_once, gradient) = found
    torch.testing.assert_close(few, all_at_once)
    torch.testing.assert_close(few_gradient, gradient)


def test_beside_the_reward_both_gradients_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, teaches = played(policy()), teacher()
    alone, _ = gradients(learner_of(taught_by(teacher=None), monkeypatch), groups)
    learner = learner_of(taught_by(teacher_coef=0.7), monkeypatch, teaches)
    wanted, _ = brute_force(learner, groups, teaches)
    both, figures = gradients(learner, groups)
    equal(both, [a + 0.7 * b for a, b in zip(alone, wanted, strict=True)])
    assert figures["advantage/max"] > 0.5


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_with_a_weight_of_0_a_teacher_only_measures(advantage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    cases: list[dict[str, Any]] = [{"teacher": None}, {"teacher_coef": 0.0}]
    for keys in cases:
        learner = learner_of(taught_by(algorithm={"advantage": advantage}, **keys), monkeypatch)
        found.append(gradients(learner, played(policy())))
    (without, figures), (measured, other) = found
    assert all(torch.equal(a, b) for a, b in zip(without, measured, strict=True))
    assert other.pop(KEY) > 0.1 and other == figures


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def expert(player: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The player after it has read how an expert plays: the same tokens, more skill."""
    model: Any = AutoModelForCausalLM.from_pretrained(player)
    chat = Chat.load(AutoTokenizer.from_pretrained(player), None)
    protocol, options = Protocol(**LIMITS), LAKE["options"]
    lakes = [envs.make("frozen_lake", **options) for _ in range(256)]
    told = chat.encode_batch([demonstrate(env, protocol, n, "train", {"expert": 1.0}) for n, env in enumerate(lakes)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        batch = [told[(step * 4 + n) % len(told)] for n in range(4)]
        width = max(len(row.ids) for row in batch)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
        on = torch.tensor([row.mask + [False] * (width - len(row.ids)) for row in batch])
        model(input_ids=ids, labels=ids.masked_fill(~on, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("expert")
    model.save_pretrained(folder)
    chat.save(folder)
    return folder


@pytest.fixture(scope="module")
def lessons(player: Path, expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps beside the reward."""
    file = settings(
        tmp_path_factory.mktemp("lessons") / "run.yaml",
        player,
        distillation={"teacher": str(expert), "teacher_coef": 0.5},
        trainer={"max_steps": 3},
    )
    train(file)
    return file


@pytest.mark.thorough
def test_a_tiny_policy_learns_from_a_tiny_teacher_without_rewards(player: Path, expert: Path, tmp_path: Path) -> None:
    file = settings(
        tmp_path / "run.yaml",
        player,
        distillation={"teacher": str(expert), "reward": False},
        rollout={"groups": 64, "num_generations": 1},  # nothing to compare
        algorithm={"minibatches": 4},
        trainer={"max_steps": 8, "learning_rate": 4e-3, "adam_beta2": 0.99},
        evaluation={"every": 8, "episodes": 128},
        checkpoint={"every": 100},
        transcripts={"every": 100},
        diagnostics={"every": 0},
    )
    train(file)
    table = rows(tmp_path / "run")
    kl = [row[KEY] for row in table if KEY in row]
    assert len(kl) == 8 and kl[-1] < 0.2 * kl[0], kl
    assert all(row["rollout/kept_groups"] == 64 for row in table if "rollout/kept_groups" in row)
    success = [row["evaluation/success"] for row in table if "evaluation/success" in row]
    assert success[-1] > success[0] + 0.2, success


@pytest.mark.thorough
def test_a_weight_of_0_changes_no_run(player: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"trainer": {"max_steps": 2}, "algorithm": {"num_iterations": 1, "minibatches": 1}}
    file = settings(tmp_path / "run.yaml", player, **sections)
    train(file, f"output_dir={tmp_path / 'without'}")
    sections["distillation"] = {"teacher": str(player), "teacher_coef": 0.0}
    train(settings(file, player, **sections))
    measured = rows(tmp_path / "run")
    kl = [row.pop(KEY) for row in measured if KEY in row]
    assert measured == rows(tmp_path / "without")
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[1] > 1e-4, "the policy begins as its teacher"
    for name, tensor in weights(tmp_path / "run" / "checkpoint-2").items():
        assert torch.equal(tensor, weights(tmp_path / "without" / "checkpoint-2")[name]), name


@pytest.mark.thorough
def test_a_resumed_run_is_taught_the_same(lessons: Path, tmp_path: Path) -> None:
    whole, again = lessons.with_name("run"), tmp_path / "run"
    shutil.copytree(whole, again)
    for later in ("checkpoint-2", "checkpoint-3", "final"):
        shutil.rmtree(again / later)
    saved = again / "run_config.yaml"
    saved.write_text(saved.read_text().replace(str(whole), str(again)))
    train(lessons, f"output_dir={again}", "--resume")
    assert rows(again) == rows(whole) and sum(KEY in row for row in rows(again)) == 3
    for name, tensor in weights(whole / "checkpoint-3").items():
        assert torch.equal(tensor, weights(again / "checkpoint-3")[name]), name
    assert "teacher expert" in (again / "final" / "README.md").read_text()


def test_another_tokenizer_or_no_model_is_refused_before_anything_is_trained(
    player: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    stranger = tiny_base(tmp_path / "stranger", copy.deepcopy(tiny_tokenizer))
    file = settings(tmp_path / "run.yaml", player, distillation={"teacher": str(stranger)})
    done = python("train_phase3_starpo.py", "--config", str(file))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"distillation.teacher={stranger} has another tokenizer than {player}: " in done.stderr
    for name, words in (("gone", "does not exist"), ("", "is not a checkpoint")):
        with pytest.raises(UserError, match=rf"distillation\.teacher={tmp_path / name}.* {words}"):
            train(file, f"distillation.teacher={tmp_path / name}")
    assert not (tmp_path / "run").exists()


def test_a_control_token_of_the_teacher_alone_is_another_tokenizer(player: Path, tmp_path: Path) -> None:
    shutil.copytree(player, tmp_path / "teacher")
    (tmp_path / "teacher" / "manifest.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    ordinary = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 2)
    tokenizer.add_special_tokens({"additional_special_tokens": [ordinary]})
    tokenizer.save_pretrained(tmp_path / "teacher")
    file = settings(tmp_path / "run.yaml", player, distillation={"teacher": str(tmp_path / "teacher")})
    with pytest.raises(UserError, match=f"{ordinary}' is a control token for one of them alone"):
        train(file)


def test_a_teacher_without_rows_for_all_tokens_is_refused(player: Path, tmp_path: Path) -> None:
    shutil.copytree(player, tmp_path / "teacher")
    (tmp_path / "teacher" / "manifest.json").unlink()
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    rows = len(AutoTokenizer.from_pretrained(tmp_path / "teacher")) - 1
    weights.resize_token_embeddings(rows)
    weights.save_pretrained(tmp_path / "teacher")
    file = settings(tmp_path / "run.yaml", player, distillation={"teacher": str(tmp_path / "teacher")})
    with pytest.raises(UserError, match=f"teacher has {rows} rows of embeddings for a tokenizer of {rows + 1} tokens"):
        train(file)


def test_a_broken_teacher_is_refused_by_its_own_key(player: Path, tmp_path: Path) -> None:
    broken: Any = AutoModelForCausalLM.from_pretrained(player)
    torch.nn.init.constant_(broken.get_input_embeddings().weight, torch.nan)
    broken.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(player).save_pretrained(tmp_path / "teacher")
    cfg = taught_by(teacher=str(tmp_path / "teacher"))
    with pytest.raises(UserError, match=r"not finite numbers.*\(distillation\.teacher=\.\.\.\)"):
        run.load_teacher(cfg)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"distillation": {}}, "nothing is distilled"),
        ({"distillation": {"reward": False}}, "nothing is distilled"),
        ({"reward": False, "teacher_coef": 0.0}, "leaves the learning to a teacher"),
        ({"reward": False, "algorithm": {"filter": {"strategy": "top_k"}}}, "every group teaches"),
        ({"reward": False, "algorithm": {"preset": "starpo-s", "filter": {"strategy": "min_p"}}}, "algorithm.filter"),
        ({"reward": False, "rollout": {"refill": 4}}, "write `rollout.refill: 0`"),
        ({"reward": False, "algorithm": {"advantage": "gae"}}, "trains a critic.*write `algorithm.advantage: grpo`"),
        ({"reward": False, "algorithm": {"advantage": "examples.own_advantage:group_relative"}}, "leave it out"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(keys: dict[str, Any], words: str) -> None:
    if "distillation" in keys:
        given = config().model_dump() | keys
        with pytest.raises(ValueError, match=words):
            StarPORun.model_validate(given)
        return
    with pytest.raises(ValueError, match=words):
        taught_by(**keys)


def test_without_reward_all_groups_are_kept_whatever_the_preset_says() -> None:
    cfg = taught_by(reward=False, algorithm={"preset": "starpo-s", "filter": {"strategy": "none", "value": 0.25}})
    assert cfg.algorithm.filter.strategy == "none" and cfg.algorithm.filter.keep_zero
    assert StarPORun.model_validate(cfg.model_dump()) == cfg


def test_equal_rewards_raise_no_alarm_where_they_teach_nothing() -> None:
    def names(cfg: StarPORun) -> set[str]:
        state: Any = {}
        found = set[str]()
        for step in range(1, 80):
            row = {"rollout/in_group_std": 0.4 if step < 30 else 1e-3, "rollout/success": 0.4}
            alarms, state = watch(state, step, row, cfg=cfg)
            found |= {alarm.name for alarm in alarms}
        return found

    assert "variance_gone" in names(taught_by())
    assert not names(taught_by(reward=False))


def test_the_plan_counts_the_teacher_and_its_passes() -> None:
    shape = plan.Shape(
        parameters=10**6, blocks=10**5, top=10**5, adapter=10**3, layers=2, hidden=8, query=8, key_value=8,
        intermediate=8, behind=0, embedding=8, vocabulary=10**5, states=8, tied=True, cache=8,
    )  # fmt: skip
    taught = shape._replace(teacher=shape._replace(parameters=3 * 10**6, intermediate=10**6))
    exact, half = taught_by(trainer={"bf16": False}), taught_by(trainer={"bf16": True})
    assert exact.teacher and half.teacher and (exact.teacher.dtype, half.teacher.dtype) == ("float32", "bfloat16")
    assert always(taught, exact)["teacher"] == 4 * 3 * 10**6 and always(taught, half)["teacher"] == 2 * 3 * 10**6
    assert always(taught, half, shards=4)["teacher"] == 3 * 10**6, "sharded weights have the policy's precision"
    assert always(taught, exact)["reference model"] == 0 == always(shape, exact)["teacher"]
    reading = [learning(each, exact, 512, cuda=False)["the layer at work"] for each in (shape, taught)]
    assert reading[1] > reading[0]
    work, (fleet,) = Episodes.of(exact, {}), fleets("A10G")
    numbers = plan.Numbers.of(exact)
    times = [update(Cost(each, numbers, fleet), exact, work, 2048) for each in (shape, taught)]
    assert times[1] > 1.1 * times[0]
