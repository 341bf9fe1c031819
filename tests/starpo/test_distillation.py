"""Does distillation hold exactly what it says: the KL over all tokens, however rows are cut and shared out?"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_learner import config, policy
from test_phase3 import rows, settings, train, weights
from tiny_runs import python
from transformers import LlamaConfig, LlamaForCausalLM

from envs.math_judge import MathJudge
from posttrain import plan
from posttrain.config.data import DataSection
from posttrain.config.loading import load
from posttrain.config.starpo import StarPORun
from posttrain.data.loading import load_prompts
from posttrain.evaluation.figures import summarise
from posttrain.evaluation.scoring import Loaded, ScoresNotFinite, run_task
from posttrain.evaluation.tasks import build_tasks
from posttrain.evaluation.while_training import TrainingTasks, as_evaluation
from posttrain.models import output_layer
from posttrain.models.chat import Chat
from posttrain.models.convgpt import ConvGPTConfig, ConvGPTForCausalLM
from posttrain.plan.episodes import always, learning
from posttrain.runtime import checkpoint
from posttrain.starpo import distillation as distillation_module
from posttrain.starpo.distillation import Answered, Distillation
from posttrain.starpo.learner import Learner
from posttrain.starpo.monitoring.monitor import Monitor
from posttrain.starpo.run import make_learner
from posttrain.types import UserError

SOURCES = [{"kind": "prompts", "path": "unused"}]


def distilling(tuning: str = "full", checkpointing: bool = False, tokens: int | None = None, **keys: Any) -> StarPORun:
    given = config(tuning=tuning, num_iterations=2, minibatches=2).model_dump()
    given["distillation"] = {"sources": SOURCES, "batch_size": 6} | keys
    given["model"]["lora"] |= {"r": 4, "alpha": 8}
    given["trainer"] |= {"gradient_checkpointing": checkpointing, "micro_batch_tokens": tokens}
    return StarPORun.model_validate(given)


def answers(count: int = 10) -> list[Answered]:
    random = torch.Generator().manual_seed(2)

    def ids(most: int) -> list[int]:
        return torch.randint(1, 71, (int(torch.randint(1, most, (1,), generator=random)),), generator=random).tolist()

    return [Answered(ids(9), ids(7), held_out=n % 5 == 0) for n in range(count)]


def moved_away(cfg: StarPORun) -> Learner:
    """A policy that is no longer its teacher."""
    learner = make_learner(cfg, policy(), None)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.trainable[0]:
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
    return learner


def full_kl(model: Any, teacher: Any, batch: list[Answered]) -> torch.Tensor:
    """The mean over the answers' tokens, row by row, whole logits in float64."""
    parts = []
    for row in batch:
        span = slice(len(row.prompt_ids) - 1, len(row.ids) - 1)
        log_p, log_q = (net(torch.tensor([row.ids])).logits[0, span].log_softmax(-1) for net in (model, teacher))
        parts.append((log_q.exp() * (log_q - log_p)).sum(-1))
    return torch.cat(parts).mean()


def reference(learner: Learner, batch: list[Answered]) -> tuple[float, list[torch.Tensor]]:
    exact, teacher = copy.deepcopy(learner.model).double(), policy().double()
    for parameter, own in zip(exact.parameters(), learner.model.parameters(), strict=True):
        parameter.requires_grad_(own.requires_grad)
    value = full_kl(exact, teacher, batch)
    value.backward()
    return value.item(), [p.grad for p in exact.parameters() if p.grad is not None]


@pytest.mark.parametrize("tokens", [None, 1, 20])
@pytest.mark.parametrize(
    ("tuning", "checkpointing"), [("full", False), ("full", True), ("lora", False), ("lora", True)]
)
def test_the_gradient_is_that_of_the_whole_kl(
    tuning: str, checkpointing: bool, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "kl_tokens", lambda *_: 3)
    learner = moved_away(distilling(tuning, checkpointing, tokens, coef=0.7))
    learner.model.train()
    distillation = Distillation(learner, answers())
    batch = distillation.chosen(step=2, number=1)
    assert len(batch) == 6
    total, count = distillation.backward(step=2, number=1)
    value, gradients = reference(learner, batch)
    assert count == sum(len(row.completion_ids) for row in batch)
    assert total / count == pytest.approx(value, rel=1e-4) and value > 0.01
    own = [p.grad for p in learner.model.parameters() if p.grad is not None]
    assert len(own) == len(gradients) > 0
    largest = max(gradient.abs().max() for gradient in gradients)
    for found, wanted in zip(own, gradients, strict=True):
        assert (found - 0.7 * wanted).abs().max() < 1e-5 * largest
    assert learner.reference is None or all(p.grad is None for p in learner.reference.parameters())


def with_trained_rows(kind: str) -> Learner:
    """An adapter that trains rows of tokens that the chat template added, moved away from the model under it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 71, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    net: Any
    if kind.startswith("convgpt"):
        shape = dict(hidden_size=256, intermediate_size=48, head_dim=8, initializer_range=0.2, pad_token_id=0)
        net = ConvGPTForCausalLM(ConvGPTConfig(**sizes, **shape, tie_word_embeddings=kind.endswith("tied")))  # type: ignore[arg-type]
    else:
        shape = dict(hidden_size=32, intermediate_size=48, initializer_range=0.2)
        net = LlamaForCausalLM(LlamaConfig(**sizes, **shape, tie_word_embeddings=kind.endswith("tied")))  # type: ignore[arg-type]
    added: Any = SimpleNamespace(added_tokens=4, tokenizer=range(71))
    learner = make_learner(distilling("lora"), net, added)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.trainable[0]:
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    assert any("trainable_tokens_delta" in name for name, _ in learner.model.named_parameters())
    return learner


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "convgpt", "convgpt-tied"])
def test_the_teacher_of_an_adapter_has_none_of_its_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the model under the adapter, whole logits at once: the KL, what is measured, and every gradient."""
    monkeypatch.setattr(output_layer, "kl_tokens", lambda *_: 3)
    learner = with_trained_rows(kind)
    distillation = Distillation(learner, answers())
    batch = distillation.chosen(step=2, number=1)

    def slow(rows: list[Answered]) -> torch.Tensor:
        total = torch.zeros(())
        for row in rows:
            ids, span = torch.tensor([row.ids]), slice(len(row.prompt_ids) - 1, len(row.ids) - 1)
            with torch.no_grad(), learner.model.disable_adapter():
                log_q = learner.model(ids).logits[0, span].log_softmax(-1)
            log_p = learner.model(ids).logits[0, span].log_softmax(-1)
            total = total + (log_q.exp() * (log_q - log_p)).sum()
        return total

    tokens = sum(len(row.completion_ids) for row in batch)
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(slow(batch) / tokens, trained)
    total, count = distillation.backward(step=2, number=1)
    assert count == tokens and total == pytest.approx(slow(batch).item(), rel=2e-6) and total / tokens > 0.01
    largest = max(gradient.abs().max() for gradient in wanted)
    for parameter, gradient in zip(trained, wanted, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - distillation.coef * gradient).abs().max() < 1e-5 * distillation.coef * largest
    held_out = [row for row in answers() if row.held_out]
    answered_tokens = sum(len(row.completion_ids) for row in held_out)
    assert distillation.measure() == pytest.approx(slow(held_out).item() / answered_tokens, rel=2e-6)


@pytest.mark.parametrize("changes", [{"logit_scale": 0.3}, {"final_logit_softcapping": 2.0}, {"bias": True}])
def test_the_kl_is_of_what_the_model_says_behind_scale_cap_and_bias(changes: dict[str, Any]) -> None:
    torch.manual_seed(5)
    models = [policy(), policy()]
    for net in models:
        if changes.pop("bias", False) or net.lm_head.bias is not None:
            net.lm_head.bias = torch.nn.Parameter(torch.randn(71))
        for key, value in changes.items():
            setattr(net.config, key, value)
    states = [torch.randn(9, 32, requires_grad=True), torch.randn(9, 32)]

    def said(net: Any, state_SD: torch.Tensor) -> torch.Tensor:
        logits = (state_SD @ net.lm_head.weight.T + (0 if net.lm_head.bias is None else net.lm_head.bias)).double()
        logits = logits * changes.get("logit_scale", 1.0)
        cap = changes.get("final_logit_softcapping")
        return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)

    log_q, log_p = said(models[1], states[1]), said(models[0], states[0])
    value = (log_q.exp() * (log_q - log_p)).sum()
    (wanted,) = torch.autograd.grad(value, states[0])
    found_S = output_layer.kl_backward(models[0], states[0], models[1], states[1], 1.0)
    assert found_S.shape == (9,) and found_S.sum().item() == pytest.approx(value.item(), rel=1e-5)
    assert states[0].grad is not None and torch.allclose(states[0].grad, wanted, atol=1e-6)


def test_nothing_waits_for_a_gpu_between_two_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are read behind the last one."""
    called = list[str]()
    for name in ("kl_backward", "floats"):
        kept = getattr(distillation_module, name)
        monkeypatch.setattr(
            distillation_module, name, lambda *given, name=name, kept=kept: called.append(name) or kept(*given)
        )
    Distillation(moved_away(distilling(tokens=16)), answers()).backward(1, 0)
    assert called.count("kl_backward") > 1 and called == sorted(called, reverse=True)


def test_every_row_is_read_once_before_any_comes_again() -> None:
    distillation = Distillation(moved_away(distilling(batch_size=3)), answers(20))
    taken = [row for step in (1, 2) for number in range(4) for row in distillation.chosen(step, number)]
    trained = [row for row in answers(20) if not row.held_out]
    assert len(trained) == 16 and len(taken) == 24
    assert sorted(taken[:16]) == sorted(trained) and len({row.ids.__repr__() for row in taken[16:]}) == 8
    assert taken[:16] != trained
    again = Distillation(moved_away(distilling(batch_size=3)), answers(20))
    assert again.chosen(2, 3) == taken[21:24], "chosen by step and minibatch, not consumed"


def test_held_out_rows_are_measured_and_not_trained() -> None:
    learner = moved_away(distilling())
    distillation = Distillation(learner, answers())
    held_out = [row for row in answers() if row.held_out]
    assert distillation.measure() == pytest.approx(reference(learner, held_out)[0], rel=1e-4)
    assert all(p.grad is None for p in learner.model.parameters())
    assert Distillation(make_learner(distilling(), policy(), None), answers()).measure() == 0  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- whole runs


def old_prompts(folder: Path) -> dict[str, Any]:
    """A section of the config, and the file that it names."""
    file = folder / "prompts.jsonl"
    asked = [{"prompt": f"What is {n} and {n + 1}?"} for n in range(20)]
    asked += [{"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return {
        "sources": [{"kind": "prompts", "path": str(file)}],
        "decontaminate": False,
        "batch_size": 4,
        "max_new_tokens": 12,
        "eval_rows": 4,
    }


SUITES = {
    "math": {"n": 4, "max_new_tokens": 8},
    "recall": {"n": 5, "max_new_tokens": 8},
    "repetition": {"n": 3, "max_new_tokens": 24},
    "preferences": {"n": 9},
}


def with_suites(file: Path, player: Path, **sections: Any) -> Path:
    evaluation = {"every": 2, "episodes": 8, "final_episodes": 8, "temperature": 1.0, "suites": SUITES, "budget": None}
    return settings(file, player, evaluation=evaluation, **sections)


@pytest.fixture(scope="module")
def whole(player: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    file = with_suites(folder / "run.yaml", player, distillation=old_prompts(folder), trainer={"max_steps": 3})
    train(file)
    return folder


def suite_figures(run: Path) -> dict[int, dict[str, float]]:
    """The figures of the former phases' suites, by step."""
    return {
        row["step"]: {key: row[key] for key in row if key.split("/")[1:2] and key.split("/")[1] in SUITES}
        for row in rows(run)
        if "evaluation/recall/accuracy" in row
    }


def kls(run: Path, key: str) -> Iterator[float]:
    yield from (row[key] for row in rows(run) if key in row)


@pytest.mark.thorough
def test_a_run_answers_old_prompts_first_and_stays_near_its_teacher(whole: Path, player: Path) -> None:
    run = whole / "run"
    lines = (run / "distillation" / "rows.jsonl").read_text().splitlines()
    table = [json.loads(line) for line in lines]
    assert len(table) == 40 and sum(row["held_out"] for row in table) == 4
    assert all(0 < len(row["completion_ids"]) <= 12 and row["prompt_ids"] for row in table)
    trained, held_out = list(kls(run, "distillation/kl")), list(kls(run, "evaluation/distillation_kl"))
    assert len(trained) == 3 and held_out[0] == 0 < held_out[-1]

    file = settings(
        whole / "free.yaml", player, distillation=old_prompts(whole) | {"coef": 0}, trainer={"max_steps": 3}
    )
    train(file, f"output_dir={whole / 'free'}")
    assert not list(kls(whole / "free", "distillation/kl"))
    assert list(kls(whole / "free", "evaluation/distillation_kl"))[-1] > held_out[-1]


def test_the_suites_of_former_phases_are_scored_as_the_evaluator_scores_them(
    whole: Path, player: Path, tmp_path: Path
) -> None:
    found = suite_figures(whole / "run")
    assert list(found) == [0, 2, 3]
    cfg, _ = load(StarPORun, "configs/phase3_starpo.yaml", ["--config", str(whole / "run.yaml")])
    evaluation, loaded = as_evaluation(cfg), Loaded(MathJudge())
    tasks = build_tasks(evaluation)
    measured = [row for task in tasks for row in run_task(evaluation, "policy", task, lambda _: None, loaded)]
    summary = summarise(evaluation, measured, {})
    summary["math/embedded"] = summary.pop("math")["embedded"]
    wanted = {
        f"evaluation/{suite}/{key}": summary[suite][key]
        for suite in summary
        for key in ("seq_rep_4" if suite == "repetition" else "accuracy", "n", "low", "high")
    }
    assert found[0] == pytest.approx(wanted, abs=1e-6)
    assert found[0]["evaluation/recall/high"] > 0 and found[3] != found[0]
    for suite in ("math/embedded", "recall", "preferences"):
        moved = found[3][f"evaluation/{suite}/accuracy"] - found[0][f"evaluation/{suite}/accuracy"]
        assert found[3][f"evaluation/{suite}/change"] == pytest.approx(moved)

    wide = {"suites": {"recall": {"n": 1, "max_new_tokens": 511}}}
    with pytest.raises(UserError, match=r"evaluation\.suites\.recall has a prompt of \d+ tokens"):
        train(settings(tmp_path / "run.yaml", player, evaluation=wide))


def test_suites_beyond_the_budget_are_postponed_and_change_nothing(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy of step 2 is the best here, and had no time for the suites: it is measured in the end."""
    monkeypatch.setattr(Monitor, "compare_with_best", lambda self, state, step, *_: (step in (0, 2), {}))
    suites = {"suites": {"recall": {"n": 4, "max_new_tokens": 8}, "math": {"n": 2, "max_new_tokens": 8}}}
    words = ["trainer.max_steps=3", "evaluation.every=1", "evaluation.episodes=2"]
    train(settings(tmp_path / "run.yaml", player), *words)
    train(
        settings(tmp_path / "run.yaml", player, evaluation=suites | {"budget": 1e-9}), *words,
        f"output_dir={tmp_path / 'few'}",
    )  # fmt: skip
    found = suite_figures(tmp_path / "few")
    assert list(found) == [0, 3]
    captured = capsys.readouterr()
    said = "step 1: the suites of former phases are postponed, next after the last step."
    assert (captured.out + captured.err).count("are postponed") == 1 and said in captured.out + captured.err
    without = [
        {key: value for key, value in row.items() if key.split("/")[1:2] != [] and key.split("/")[1] not in SUITES}
        for row in rows(tmp_path / "few")
    ]
    assert without == [{k: v for k, v in row.items() if "/" in k} for row in rows(tmp_path / "run")]
    closing = {key for row in rows(tmp_path / "few") for key in row if key.startswith("final/recall/")}
    assert closing == {f"final/recall/{key}" for key in ("accuracy", "n", "low", "high", "change", "change_error")}
    card = (tmp_path / "few" / "final" / "README.md").read_text()
    assert "recall, held-out prompts: right" in card and "math/embedded, held-out prompts: right" in card
    one, other = (weights(tmp_path / run / "checkpoint-3") for run in ("run", "few"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.thorough
def test_without_weight_or_section_the_run_is_the_same(whole: Path, player: Path, tmp_path: Path) -> None:
    """Measuring changes nothing; test_a_run_answers_old_prompts_first has made the run with coef 0."""
    train(settings(tmp_path / "run.yaml", player, trainer={"max_steps": 3}))
    measured = [{k: v for k, v in row.items() if k != "evaluation/distillation_kl"} for row in rows(whole / "free")]
    assert rows(tmp_path / "run") == measured
    for name, tensor in weights(tmp_path / "run" / "checkpoint-3").items():
        assert torch.equal(tensor, weights(whole / "free" / "checkpoint-3")[name]), name


@pytest.mark.thorough
def test_resuming_reads_the_same_rows(whole: Path, player: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    subprocess.run(["cp", "-r", *map(str, (whole / "run").glob("*")), str(run)], check=True)
    for later in ("checkpoint-2", "checkpoint-3", "final"):
        subprocess.run(["rm", "-r", str(run / later)], check=True)
    file = with_suites(tmp_path / "run.yaml", player, distillation=old_prompts(whole), trainer={"max_steps": 3})
    (run / "run_config.yaml").write_text((run / "run_config.yaml").read_text().replace(str(whole / "run"), str(run)))
    made = (run / "distillation" / "manifest.json").read_bytes()
    train(file, "--resume")
    assert (run / "distillation" / "manifest.json").read_bytes() == made
    for name, tensor in weights(whole / "run" / "checkpoint-3").items():
        assert torch.equal(tensor, weights(run / "checkpoint-3")[name]), name
    assert rows(run) == rows(whole / "run")
    card = (run / "final" / "README.md").read_text()
    assert "| phase3 | recall, held-out prompts: right | " in card
    told = [line.strip(" |").split(" | ") for line in card.splitlines() if "prompts alone" in line]
    assert told and all(cells[0] == "phase3" and int(cells[-1]) + int(cells[-2]) > 0 for cells in told)

    damaged = run / "distillation" / "rows.jsonl"
    damaged.write_text(damaged.read_text().replace("Say 1.", "Say 2."))
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        train(file, "--resume")


def test_where_nothing_can_be_held_out_no_kl_is_claimed(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = old_prompts(tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:2]))
    train(settings(tmp_path / "run.yaml", player, distillation=prompts, trainer={"max_steps": 1}))
    assert "2 prompts are too few to hold any out" in capsys.readouterr().err
    assert not list(kls(tmp_path / "run", "evaluation/distillation_kl"))
    assert len(list(kls(tmp_path / "run", "distillation/kl"))) == 1


@pytest.mark.slow
def test_an_adapter_is_distilled_from_the_model_under_it(player: Path, tmp_path: Path) -> None:
    adapter = {"tuning": "lora", "lora": {"r": 4, "alpha": 8}}
    file = settings(
        tmp_path / "run.yaml", player, model=adapter, distillation=old_prompts(tmp_path), trainer={"max_steps": 2}
    )
    train(file)
    held_out = list(kls(tmp_path / "run", "evaluation/distillation_kl"))
    assert held_out[0] == 0 < held_out[-1]
    assert checkpoint.verify(tmp_path / "run" / "final")


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_two_processes_distil_as_one(player: Path, tmp_path: Path, tuning: str) -> None:
    model = {"tuning": tuning, "lora": {"r": 4, "alpha": 8}}
    file = with_suites(
        tmp_path / "run.yaml", player, model=model, distillation=old_prompts(tmp_path), trainer={"max_steps": 2}
    )
    train(file, f"output_dir={tmp_path / 'one'}")
    done = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "train_phase3_starpo.py", "--config", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for key in ("distillation/kl", "evaluation/distillation_kl"):
        assert list(kls(tmp_path / "run", key)) == pytest.approx(list(kls(tmp_path / "one", key)), rel=1e-2, abs=1e-7)
    assert suite_figures(tmp_path / "run")[0] == suite_figures(tmp_path / "one")[0]
    for name, tensor in weights(tmp_path / "one" / "final").items():
        apart = (tensor - weights(tmp_path / "run" / "final")[name]).abs()
        assert apart.max() < 1e-4 and (apart > 1e-5).float().mean() < 1e-3, name


def test_answers_longer_than_the_context_are_refused(player: Path, tmp_path: Path) -> None:
    section = old_prompts(tmp_path) | {"max_new_tokens": 510}
    with pytest.raises(UserError, match=r"distillation\.max_new_tokens"):
        train(settings(tmp_path / "run.yaml", player, distillation=section))
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------- prompts and memory


def prompts_of(tmp_path: Path, chat: Chat, kind: str, table: list[dict[str, Any]], **keys: Any) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    sources = [{"kind": kind, "path": str(file)}]
    data = DataSection.model_validate({"sources": sources, "eval_rows": 1, "decontaminate": False} | keys)
    found = load_prompts(data, chat)
    return [chat.decode(ids) for part in (found.train, found.eval) for ids in part["prompt_ids"]]


def test_prompts_end_where_an_answer_begins(tmp_path: Path, tiny_chat: Chat) -> None:
    def said(number: int) -> list[dict[str, str]]:
        texts = [f"ask {number}", f"first {number}", "more", "second", "still more", "third"]
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]

    found = prompts_of(tmp_path, tiny_chat, "messages", [{"messages": said(n)} for n in range(30)])
    wanted = {tiny_chat.decode(tiny_chat.prompt(said(n)[:turn])) for n in range(30) for turn in (1, 3, 5)}
    assert len(found) == 30 and set(found) <= wanted
    lengths = [sum(f"{text}" in prompt for text in ("first", "second")) for prompt in found]
    assert set(lengths) == {0, 1, 2}, "not always the same turn"

    pairs = [
        {"chosen": said(n)[:2], "rejected": [*said(n)[:1], {"role": "assistant", "content": "no"}]} for n in range(4)
    ]
    found = prompts_of(tmp_path, tiny_chat, "preferences", pairs)
    assert sorted(found) == sorted(tiny_chat.decode(tiny_chat.prompt(said(n)[:1])) for n in range(4))


def test_prompts_alone_are_text_or_messages_that_end_with_the_user(tmp_path: Path, tiny_chat: Chat) -> None:
    user, other = {"role": "user", "content": "again"}, {"role": "assistant", "content": "yes"}
    good = [{"prompt": "once"}, {"prompt": [user]}, {"prompt": [{"role": "user", "content": "a"}, other, user]}]
    bad = [{"prompt": ""}, {"prompt": [user, other]}, {"prompt": "far " * 300}]
    found = prompts_of(tmp_path, tiny_chat, "prompts", good + bad, max_length=64)
    assert len(found) == 3 and not any("far" in prompt for prompt in found)
    with pytest.raises(UserError, match=r"line 1 of .*: column prompt should be text"):
        prompts_of(tmp_path, tiny_chat, "prompts", [{"prompt": 7}])


def test_a_large_vocabulary_is_read_once_for_many_tokens() -> None:
    assert output_layer.kl_tokens("cpu", 150_000) == output_layer.KL_TOKENS == 32
    assert output_layer.kl_tokens("cpu", 1_000) == 1048 and output_layer.kl_tokens("cuda", 150_000) == 223


def test_the_plan_counts_the_teacher_and_the_logits_of_both() -> None:
    shape = plan.Shape(
        parameters=10**6, blocks=10**5, top=10**5, adapter=10**3, layers=2, hidden=8, query=8, key_value=8,
        intermediate=8, behind=0, embedding=8, vocabulary=10**5, states=8, tied=True, cache=8,
    )  # fmt: skip
    without, full, lora = config(), distilling(), distilling("lora")
    assert always(shape, without)["reference model"] == 0
    assert always(shape, full)["reference model"] == 4 * 10**6
    assert always(shape, lora)["reference model"] == 0, "the adapter is switched off instead"
    layers = [learning(shape, cfg, 512, cuda=False)["the layer at work"] for cfg in (without, full)]
    in_flight = 2 * 4 * 10**5 * 8
    assert layers[1] == max(layers[0], 6 * 4 * 10**5 * output_layer.kl_tokens("cpu", 10**5) + in_flight)


def test_only_log_probs_that_are_not_finite_leave_a_suite_out(monkeypatch: pytest.MonkeyPatch) -> None:
    former: Any = object.__new__(TrainingTasks)
    former.config, former.tasks = None, [SimpleNamespace(items=[1], only=lambda mine: None)]
    problem: list[ValueError] = [ScoresNotFinite("nan"), ValueError("a mistake of the code")]

    def broken(*_: Any) -> None:
        raise problem.pop(0)

    monkeypatch.setattr(former, "_rows", broken, raising=False)
    nobody: Any = None
    assert former.measure(nobody, nobody, {}) == {}
    with pytest.raises(ValueError, match="a mistake of the code"):
        former.measure(nobody, nobody, {})
