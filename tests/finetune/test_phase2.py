"""Does phase 2 start at ln 2 against its own policy, move the odds the right way, and refuse what fits no phase 1?"""

from __future__ import annotations

import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from tiny_phases import Phase, same_weights
from tiny_runs import python, rows_of
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler
from trl.trainer.dpo_config import DPOConfig

import train_phase2_dpo
from posttrain.config.dpo import DPORun
from posttrain.config.loading import resolve
from posttrain.config.trl_fields import DPO_LOSSES
from posttrain.finetune import training, trl_trainers
from posttrain.models import loading as models
from posttrain.models.chat import TEMPLATE_PATH, Chat
from posttrain.plan import preflight
from posttrain.runtime import checkpoint, trl_arguments
from posttrain.types import UserError


@pytest.fixture
def files(dpo: Phase) -> Phase:
    return dpo


def train(file: Path, *more: str) -> None:
    train_phase2_dpo.main(["--config", str(file), *more])


def test_the_reference_is_shown_in_lines_where_there_is_no_terminal(
    tmp_path: Path, files: Phase, capfd: pytest.CaptureFixture[str]
) -> None:
    train(files.config_in(tmp_path, max_steps=1))
    told = capfd.readouterr().err
    assert "it/s" not in told  # as a bar of tqdm says
    assert re.search(r"^Computing reference log probs for train dataset: \d+/(\d+) steps, ", told, re.MULTILINE)
    assert re.search(r"train dataset: (\d+)/\1 steps, 100 %", told)


def test_a_run_starts_at_ln_2_learns_and_saves(whole: Path, tiny_chat: Chat) -> None:
    losses = rows_of(whole)
    assert losses[1] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[12] < losses[1] - 0.05
    assert rows_of(whole, "eval_rewards/accuracies")[12] > 0.9
    assert rows_of(whole, "rewards/chosen")[12] > rows_of(whole, "rewards/rejected")[12]
    meta = checkpoint.verify(whole / "final")["meta"]
    (record,) = meta.pop("history")
    assert record["phase"] == "phase2" and {one["name"] for one in record["results"]} >= {"held-out rows: loss"}
    assert meta == {"phase": "phase2", "step": 12, "chat_template_sha256": tiny_chat.hash}


def test_the_reference_is_the_policy_and_not_what_its_name_says(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model in memory differs from the folder it was loaded from; the first loss is ln 2 all the same."""
    load = models.load

    def changed(*args: Any, **more: Any) -> Any:
        net, chat = load(*args, **more)
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        return net, chat

    monkeypatch.setattr(models, "load", changed)
    train(files.config_in(tmp_path, max_steps=1))
    assert rows_of(tmp_path / "run")[1] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("bf16", [False, True])
def test_a_wrong_reference_stops_the_run(
    tmp_path: Path, files: Phase, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """The policy changes between the reference pass and the first step."""
    fit = training.fit
    monkeypatch.setattr(preflight, "_check_libraries", lambda cfg: None)  # a CPU that only imitates bfloat16 will do

    def changed(trainer: Any, *args: Any, **more: Any) -> Any:
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        return fit(trainer, *args, **more)

    monkeypatch.setattr(training, "fit", changed)
    with pytest.raises(UserError, match=r"ln 2.*reference log-probs"):
        train(files.config_in(tmp_path, bf16=bf16))
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(
    ("figures", "losses", "weights", "margin", "passes"),
    [
        ({"loss": 0.6931}, ["sigmoid"], [1.0], 1e-3, True),
        ({"loss": 0.6945}, ["sigmoid"], [1.0], 1e-3, False),
        ({"loss": 0.6945}, ["sigmoid"], [1.0], 1e-2, True),
        ({"loss": 0.7200}, ["sigmoid"], [1.0], 1e-2, False),
        ({"loss": 0.3466}, ["sigmoid"], [0.5], 1e-3, True),
        ({"loss": 1.4}, ["sigmoid", "sft"], [1.0, 1.0], 1e-3, True),  # ln 2 + a likelihood: only the rewards tell
        ({"loss": 1.4, "rewards/chosen": 0.02}, ["sigmoid", "sft"], [1.0, 1.0], 1e-3, False),
        ({"loss": 0.6931, "rewards/rejected": -0.02}, ["sigmoid"], [1.0], 1e-3, False),
        ({"loss": math.nan}, ["sigmoid"], [1.0], 1e-3, False),
        ({"loss": 1.4, "rewards/chosen": math.nan}, ["sigmoid", "sft"], [1.0, 1.0], 1e-1, False),
        ({"loss": 1.4, "rewards/rejected": math.inf}, ["sigmoid", "sft"], [1.0, 1.0], 1e-1, False),
    ],
)
def test_the_check_of_the_first_step(
    figures: dict[str, float], losses: list[str], weights: list[float], margin: float, passes: bool
) -> None:
    row = {"rewards/chosen": 0.0, "rewards/rejected": 0.0, **figures}
    if passes:
        train_phase2_dpo.check_reference(row, losses, weights, margin)
    else:
        with pytest.raises(UserError, match="reference"):
            train_phase2_dpo.check_reference(row, losses, weights, margin)


def dpo_settings(**more: Any) -> SimpleNamespace:
    """What of a DPOConfig decides how far rounding moves the first rewards; by default that of the reference run."""
    precision = dict(bf16=True, fp16=False, tf32=None)
    batch = dict(per_device_train_batch_size=2, gradient_accumulation_steps=8, world_size=1)
    return SimpleNamespace(**(precision | batch | dict(beta=0.1) | more))


def test_the_margin_is_what_rounding_explains() -> None:
    """Log-probs off by .58 nats over 300 tokens in bfloat16 pass, a reward of .06 does not, nor 1e-3 in float32."""
    draw = random.Random(0)
    answers = [100, 500, 300] * 20
    margin = train_phase2_dpo.reference_margin(dpo_settings(), torch.float32, answers)

    def reward() -> float:
        """The mean over the 16 pairs of the first step, the reference being the policy."""
        return sum(0.1 * draw.gauss(0, 0.58 * (draw.choice(answers) / 300) ** 0.5) for _ in range(16)) / 16

    off, before = 0, 0
    for _ in range(5000):
        row = {"rewards/chosen": reward(), "rewards/rejected": reward()}
        row["loss"] = math.log(1 + math.exp(row["rewards/rejected"] - row["rewards/chosen"]))
        before += max(map(abs, (row["rewards/chosen"], row["rewards/rejected"]))) > 0.01
        try:
            train_phase2_dpo.check_reference(row, ["sigmoid"], [1.0], margin)
        except UserError:
            off += 1
    assert off <= 5 and before > 2500  # a margin of .01 was a coin toss
    wrong = {"loss": math.log(2), "rewards/chosen": -0.06, "rewards/rejected": 0.0}
    with pytest.raises(UserError, match=r"rewards/chosen -0.06"):
        train_phase2_dpo.check_reference(wrong, ["sigmoid"], [1.0], margin)


def test_the_margin_follows_precision_beta_length_and_batch() -> None:
    def margin(tokens: int = 300, dtype: torch.dtype = torch.float32, **more: Any) -> float:
        return train_phase2_dpo.reference_margin(dpo_settings(**more), dtype, [tokens] * 4)

    assert margin() == pytest.approx(4 * 0.1 * 0.58 / 4)
    assert margin(tokens=1200) == pytest.approx(2 * margin())
    assert margin(beta=0.2) == pytest.approx(2 * margin())
    assert margin(world_size=4) == pytest.approx(margin() / 2)
    assert margin(bf16=False, dtype=torch.bfloat16) == margin()  # an adapter on half-precision weights
    assert margin(bf16=False, fp16=True) == margin(bf16=False, tf32=True) == pytest.approx(margin() / 8)
    assert margin(bf16=False) == margin(bf16=False, tokens=2000, beta=0.5) == 1e-3  # float32: as tight as can be


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Chat) -> SimpleNamespace:
    """Eight pairs of ragged length, the policy some way from its reference, in TRL's trainer and in ours."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tiny_chat.tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.2,
    )  # fmt: skip
    draw = random.Random(0)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{name: draw.choices(range(3, 500), k=draw.randint(1, 12)) for name in names} for _ in range(8)]
    args = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("pairs")), use_cpu=True, report_to="none", bf16=False, max_length=None,
        precompute_ref_log_probs=True, use_weighting=True, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    made = []
    for kind in (trl_trainers.TokenTrainer, trl_trainers.PairTrainer):
        torch.manual_seed(0)
        net = LlamaForCausalLM(shape)
        trainer: Any = kind(
            model=net, args=args, train_dataset=Dataset.from_list(pairs), processing_class=tiny_chat.tokenizer
        )
        with torch.no_grad():
            for weight in net.parameters():
                weight += 0.03 * torch.randn_like(weight)
        made.append(trainer)
    return SimpleNamespace(theirs=made[0], ours=made[1])


def gradient(trainer: Any, size: int, losses: list[str], **values: Any) -> tuple[float, torch.Tensor]:
    """Of eight pairs, read `size` at a time, each micro-batch with an equal share."""
    Accelerator(cpu=True)  # every new config resets the state that all of them share
    rows, found = list(trainer.train_dataset), 0.0
    trainer.loss_types, trainer.loss_weights = losses, [1.0, 0.5][: len(losses)]
    for name, value in values.items():
        setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
    trainer.model.zero_grad()
    for start in range(0, 8, size):
        loss = trainer._compute_loss(trainer.model, trainer.data_collator(rows[start : start + size]), False)
        (loss * size / 8).backward()
        found += float(loss) * size / 8
    return found, torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


@pytest.mark.parametrize("weighting", [False, True])
@pytest.mark.parametrize("losses", [["sft"], ["sigmoid", "sft"], ["sft", "ipo"], ["sigmoid"], ["apo_zero", "robust"]])
def test_a_loss_does_not_depend_on_micro_batches(trainers: SimpleNamespace, losses: list[str], weighting: bool) -> None:
    whole, gradients = gradient(trainers.ours, 8, losses, use_weighting=weighting)
    for size in (1, 2, 4):
        value, others = gradient(trainers.ours, size, losses, use_weighting=weighting)
        assert value == pytest.approx(whole, rel=1e-5) and (others - gradients).norm() < 1e-5 * gradients.norm()
    if weighting and "sft" in losses:
        with pytest.raises(RuntimeError, match="single memory location"):  # TRL cannot
            gradient(trainers.theirs, 8, losses, use_weighting=True)
        return
    by_trl = [gradient(trainers.theirs, size, losses, use_weighting=weighting) for size in (1, 8)]
    if "sft" in losses:
        assert (by_trl[1][1] - by_trl[0][1]).norm() > 1e-2 * gradients.norm(), "TRL's does not depend on them any more"
        assert by_trl[0][0] == pytest.approx(whole, rel=1e-5), "each pair by itself"
    else:
        assert by_trl[1][0] == pytest.approx(whole, rel=1e-6)


def test_the_term_of_chosen_answers_is_the_mean_of_their_means(trainers: SimpleNamespace) -> None:
    net, losses = trainers.ours.model, []
    for row in trainers.ours.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["chosen_ids"]])
        logprobs = net(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-logprobs[len(row["prompt_ids"]) - 1 :].mean())
    slow = torch.stack(losses).mean()
    wanted = torch.cat([each.flatten() for each in torch.autograd.grad(slow, list(net.parameters()))])
    value, found = gradient(trainers.ours, 4, ["sft"], use_weighting=False)
    assert value == pytest.approx(slow.item(), rel=1e-5) and (found - wanted).norm() < 1e-5 * wanted.norm()


TRIED: dict[str, Any] = {
    "label_smoothing": 0.2, "discopop_tau": 0.5, "ld_alpha": 0.3, "f_divergence_type": "forward_kl",
    "f_alpha_divergence_coef": 0.4,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "label_smoothing": 0.0, "discopop_tau": 0.05, "ld_alpha": None, "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 1.0, "use_weighting": False,
}  # fmt: skip


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_a_setting_that_has_no_effect_is_refused(
    trainers: SimpleNamespace, tmp_path: Path, files: Phase, loss: str
) -> None:
    """Tried in TRL's own trainer: what changes no loss is refused, what changes one is taken."""
    smooth = {"label_smoothing": 0.01} if loss == "exo_pair" else {}  # which takes no 0
    before, _ = gradient(trainers.theirs, 4, [loss], **PLAIN | smooth)
    for key, value in TRIED.items():
        extra = {"f_divergence_type": "alpha_divergence"} if key == "f_alpha_divergence_coef" else {}
        compares = loss in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
        if key.startswith("f_") and not compares:
            continue  # TRL refuses it
        changed, _ = gradient(trainers.theirs, 4, [loss], **PLAIN | smooth | extra | {key: value})
        given = {"loss_type": [loss], "per_device_train_batch_size": 2} | smooth | extra | {key: value}
        cfg = resolve(DPORun, files.config_in(tmp_path, **given))
        try:
            trl_arguments.arguments(DPOConfig, cfg, torch.device("cpu"))
            taken = True
        except UserError as problem:
            taken = False
            assert "would have no effect, for" in str(problem)
        assert taken == (changed != before), (key, changed, before)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"padding_free": True}, "padding_free=True would have no effect"),
        ({"f_alpha_divergence_coef": 0.5}, "belongs to f_divergence_type=alpha_divergence"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "write constant_with_warmup"),
        ({"liger_kernel_config": {"rope": True}}, "belongs to use_liger_kernel=true"),
        ({"loss_type": ["aot"], "per_device_train_batch_size": 1}, "there is nothing to sort"),
        ({"loss_type": ["robust"], "label_smoothing": 0.5}, r"needs less than 0\.5"),
    ],
)
def test_settings_that_do_nothing_together_are_refused(
    tmp_path: Path, files: Phase, trainer: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=rf"cannot be used together: .*{words}"):
        train(files.config_in(tmp_path, **trainer))


@pytest.mark.parametrize(
    ("key", "value"), [("label_smoothing", 0.1), ("label_smoothing_factor", 0.1), ("discopop_tau", 0.1)]
)
@pytest.mark.parametrize("several", [True, False])
def test_what_a_refusal_says_to_write_can_be_written(
    tmp_path: Path, files: Phase, key: str, value: float, several: bool
) -> None:
    """Also where the config has several losses with weights, as the quickstart's has."""
    mixed = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]} if several else {}
    file = files.config_in(tmp_path, **mixed)

    def accepted(key: str, *more: str) -> Any:
        cfg = resolve(DPORun, file, [f"trainer.{key}={value}", *more])
        return trl_arguments.arguments(DPOConfig, cfg, torch.device("cpu"))

    with pytest.raises(UserError) as told:
        accepted(key)
    advice = re.findall(r"trainer\.loss_\w+='\[[^']*\]'", str(told.value))
    assert len(advice) == 1 + several
    args = accepted(key.removesuffix("_factor"), *(each.replace("'", "") for each in advice))
    assert args.loss_type == ["discopop" if "discopop" in key else "robust"]


def test_weights_that_fit_no_losses_are_refused_with_what_to_write(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path, loss_type=["ipo"], loss_weights=[1.0, 1.0])
    with pytest.raises(UserError, match=r"write (trainer\.loss_weights='\[1\.0\]')") as told:
        train(file)
    [written] = re.findall(r"write (\S+'),", str(told.value))
    cfg = resolve(DPORun, file, [written.replace("'", "")])
    assert trl_arguments.arguments(DPOConfig, cfg, torch.device("cpu")).loss_weights == [1.0]


def test_a_constant_rate_has_no_warmup() -> None:
    """transformers' own schedulers; where this fails, warmup_steps has an effect now."""
    for name, warms_up in (("constant", False), ("constant_with_warmup", True), ("linear", True), ("cosine", True)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=10)
        assert (optimizer.param_groups[0]["lr"] < 1) == warms_up


@pytest.mark.parametrize("key", ["ref_model_mixup_alpha", "ref_model_sync_steps", "sync_ref_model"])
def test_keys_of_a_moving_reference_are_refused(tmp_path: Path, files: Phase, key: str) -> None:
    with pytest.raises(UserError, match=f"trainer.{key}: .*takes the reference from the policy in memory"):
        train(files.config_in(tmp_path, **{key: 1}))


def test_a_mixed_loss_trains(tmp_path: Path, files: Phase) -> None:
    train(files.config_in(tmp_path, max_steps=2, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]))
    assert rows_of(tmp_path / "run")[1] > math.log(2) + 1


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", ["data-*.arrow", pytest.param("cache-*.arrow", marks=pytest.mark.slow)])
def test_damaged_pairs_or_reference_log_probs_are_made_again(
    tmp_path: Path, files: Phase, whole: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    """Their checksum is no checkpoint's: a changed byte would otherwise train on other numbers without a word."""
    file = files.config_in(tmp_path)
    train(file)
    pairs = tmp_path / "run" / "pairs"
    assert any("cache-" in name for name in checkpoint.verify(pairs)["files"])  # the reference log-probs
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "run" / "final")
    for arrow in (pairs / "train").glob(damaged):
        content = bytearray(arrow.read_bytes())
        content[len(content) // 2] ^= 64
        arrow.write_bytes(content)
    capsys.readouterr()
    train(file, "--resume")
    assert "prepared again" in capsys.readouterr().out
    checkpoint.verify(pairs)
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert same_weights(tmp_path / "run", whole)


def test_another_template_than_phase_1s_is_refused(tmp_path: Path, files: Phase) -> None:
    (tmp_path / "other.jinja").write_text(TEMPLATE_PATH.read_text() + "{# mine #}")
    with pytest.raises(UserError, match="another chat template"):
        train(files.config_in(tmp_path), f"chat.template={tmp_path}/other.jinja")
    assert not (tmp_path / "run").exists()


def test_an_unfinished_phase_1_is_refused(tmp_path: Path, files: Phase) -> None:
    (tmp_path / "phase1").mkdir()
    (tmp_path / "phase1" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no config.json.*--resume"):
        train(files.config_in(tmp_path), f"model.name_or_path={tmp_path}/phase1")
    with pytest.raises(UserError, match="previous phase"):
        train(files.config_in(tmp_path), f"model.name_or_path={tmp_path}/phase1/final")


@pytest.mark.slow
def test_two_processes(tmp_path: Path, files: Phase) -> None:
    file = files.config_in(tmp_path, max_steps=4)
    done = python("-m", "torch.distributed.run", "--nproc_per_node", "2", "train_phase2_dpo.py", "--config", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes" in done.stdout
    losses = rows_of(tmp_path / "run")
    assert losses[1] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[4] < losses[1]
    checkpoint.verify(tmp_path / "run" / "final")


@pytest.mark.parametrize("loss", ["aot", "bco_pair"])
def test_a_loss_that_depends_on_the_micro_batch_needs_one_of_a_given_size(
    tmp_path: Path, files: Phase, loss: str
) -> None:
    file = files.config_in(tmp_path, loss_type=[loss], auto_find_batch_size=True)
    with pytest.raises(UserError, match=rf"{loss} compares the pairs of a micro-batch.*auto_find_batch_size=false"):
        train(file)
