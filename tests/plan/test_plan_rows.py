"""Does the plan say what phases 1 and 2 take?  Against the tensors of TRL's trainers with small models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_plan import Alive, network, total
from test_plan_report import SHAPE, run_of
from transformers import AutoConfig
from trl.trainer import utils as trl_utils
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from posttrain import plan
from posttrain.config.dpo import DPORun
from posttrain.config.sft import SFTRun
from posttrain.config.shared import ModelSection
from posttrain.finetune import training, trl_trainers
from posttrain.plan import parts, rows
from posttrain.plan.episodes import Place
from posttrain.plan.known_models import PUBLISHED
from posttrain.plan.shape import Shape
from posttrain.rollout import whole_rows
from posttrain.rollout.engines import graphs as graph_engine

ROWS, LONGEST = 4, 128


def trainer_of(kind: Any, folder: Path, tokenizer: Any, name: str, bf16: bool, checkpointing: bool) -> Any:
    """As the scripts set it up on a CPU; every row is as long as it may be, with labels everywhere but at its head."""
    model = network(name)
    model.resize_token_embeddings(max(300, len(tokenizer)))
    torch.manual_seed(0)
    ids = torch.randint(5, len(tokenizer), (2 * ROWS, LONGEST)).tolist()
    fixed: dict[str, Any] = dict(
        output_dir=str(folder), max_length=LONGEST, report_to="none", use_cpu=True, bf16=bf16, disable_tqdm=True,
        per_device_train_batch_size=ROWS, gradient_checkpointing=checkpointing, dataloader_pin_memory=False,
    )  # fmt: skip
    training.save_work(model, torch.device("cpu"))
    if kind is SFTRun:
        data = Dataset.from_dict({"input_ids": ids, "assistant_masks": [[0] * 4 + [1] * (LONGEST - 4)] * len(ids)})
        return SFTTrainer(model, SFTConfig(**fixed), train_dataset=data, processing_class=tokenizer)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    parts = zip(columns, (slice(0, 4), slice(4, None), slice(4, None)), strict=True)
    data = Dataset.from_dict({column: [row[part] for row in ids] for column, part in parts})
    args = DPOConfig(precompute_ref_log_probs=True, precompute_ref_batch_size=1, **fixed)
    return trl_trainers.TokenTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("kind", "name", "bf16", "checkpointing"),
    [
        (SFTRun, "llama", False, False),
        (SFTRun, "qwen3", False, True),
        (DPORun, "llama", True, False),
        (DPORun, "convgpt-tied", False, False),
    ],
)
def test_the_peak_of_a_micro_batch(
    kind: Any, name: str, bf16: bool, checkpointing: bool, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: Any
) -> None:
    """All tensors of TRL's training step, and what the optimizer holds: at most a quarter below the plan."""
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)  # labels alone, as the scripts say
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", rows.COLUMNS["cuda"])
    trainer = trainer_of(kind, tmp_path, tiny_tokenizer, name, bf16, checkpointing)
    assert rows.COLUMNS["cpu"] == trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE  # as training.save_work has set it
    if name != "llama":  # else the buffer for logits is most of all
        monkeypatch.setitem(rows.COLUMNS, "cpu", 256)
        monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    settings: Any = dict(per_device_train_batch_size=ROWS, bf16=bf16, gradient_checkpointing=checkpointing)
    cfg = run_of(kind, max_length=LONGEST, **settings)
    found = rows.rows_memory(Shape.of(trainer.model.config, cfg.model), cfg, Place(1 << 40, cuda=False), ROWS)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model = trainer.accelerator.prepare_model(trainer.model)  # autocast, as `train` does
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # as transformers' loop counts them
    batches = iter(trainer.get_train_dataloader())
    trainer.model.train()
    trainer.training_step(trainer.model, next(batches))
    trainer.optimizer.step()
    held = [tensor for state in trainer.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    assert found["always"]["optimizer"] == total(held)
    assert found["always"]["weights"] == total(trainer.model.parameters())
    assert found["stepping"]["gradients"] == total(p.grad for p in trainer.model.parameters())
    trainer.model.zero_grad()
    batch = next(batches)
    with Alive([*trainer.model.parameters(), *held]) as alive:
        trainer.training_step(trainer.model, batch)
    planned = max(sum(found[phase].values()) for phase in ("learning", "end of the backward pass"))
    assert 0.75 * planned <= alive.peak <= planned
    assert plan.peak_bytes(found) >= found["always"]["weights"] + planned


def chosen(memory: float, cuda: bool = True, **trainer: Any) -> tuple[bool, int, int]:
    """What the plan chooses for ConvGPT's shape on a device with so many GiB: recomputed, rows, accumulated."""
    given: Any = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "gradient_checkpointing": None}
    cfg = run_of(max_length=1024, bf16=True, **given | {"auto_find_batch_size": True} | trainer)
    found = rows.choose_rows(SHAPE, cfg, Place(round(memory * 2**30), 0, cuda=cuda))
    assert set(found) <= {*rows.BY_MEMORY}
    return found["gradient_checkpointing"], found.get("per_device_train_batch_size", 0), len(found)


def test_micro_batches_are_as_large_as_the_memory_allows() -> None:
    found = [chosen(memory)[:2] for memory in (4, 6, 16, 24, 40, 80)]
    for recomputed in (True, False):
        sizes = [rows for again, rows in found if again is recomputed]
        assert sizes == sorted(sizes) and len(set(sizes)) > 1
    assert found[0][0] is True and found[-1] == (False, 16)
    assert chosen(80, gradient_checkpointing=True)[0] is True
    assert chosen(0.1)[:2] == (True, 1)  # which the run then warns of
    assert chosen(80, cuda=False)[1] == 2, "more tokens make a CPU no faster"


def test_activations_are_recomputed_where_a_micro_batch_does_not_fit_without() -> None:
    own = {"auto_find_batch_size": False, "per_device_train_batch_size": 8}
    assert [chosen(memory, **own)[0] for memory in (8, 80)] == [True, False]
    assert chosen(8, **own)[2] == 1, "rows stay as they are given"


def test_a_step_keeps_its_rows() -> None:
    for memory in (4, 24, 80):
        cfg = run_of(max_length=1024, bf16=True, per_device_train_batch_size=3, gradient_accumulation_steps=4)
        cfg = cfg.model_copy(update={"trainer": cfg.trainer | {"auto_find_batch_size": True}})
        found = rows.choose_rows(SHAPE, cfg, Place(memory << 30, 0, cuda=True))
        assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 12


@pytest.mark.parametrize("name", ["mkurman/ConvGPT-0.2B-SYNTH-250B-EC", "Qwen/Qwen2.5-0.5B-Instruct"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_answers_fit_with_the_rows_that_graphs_have(name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """The cache has `whole_rows`, and graphs have a pool; where not even their fewest rows fit, steps are launched."""
    kind, sizes = PUBLISHED[name]
    section = ModelSection(name_or_path=name)
    model: Any = SimpleNamespace(config=AutoConfig.for_model(kind, **sizes), dtype=dtype, device=torch.device("cuda"))
    shape = Shape.of(AutoConfig.for_model(kind, **sizes), section)
    monkeypatch.setattr(Shape, "of", lambda *_: shape)  # takes a second
    found, emptied = dict[int, tuple[int, bool]](), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))  # else what is cached is not free
    for free in range(2, 79, 2):
        emptied.clear()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (bool(emptied) * free << 30, 80 << 30))
        found[free] = count, graphs = plan.rows_at_once(model, section, 2048, 512, 256)
        slots = whole_rows(count) if graphs else count
        held = parts.conversations(shape, dtype.itemsize, slots, 2048, 2048 - 512)
        pool = slots * shape.vocabulary * parts.SAMPLING if graphs else 0
        assert sum(held.values()) + pool <= (free << 30) * (1 - parts.MARGIN)
        assert graphs or count < graph_engine.FEWEST_ROWS
    assert found[2][0] >= 1 and found[78][0] > 100 and found[78][1]
    counts = [count for count, graphs in found.values() if graphs]
    assert counts == sorted(counts) and len(set(counts)) > 4
