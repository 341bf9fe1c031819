"""How much memory will phase 1 or 2 take, and which batch fits?  TRL's trainers, as the scripts set them up.

Both read a batch of rows without padding masks, ask TRL's chunked output layer about labels alone, and step once the
gradients of all micro-batches are there. The reference of phase 2 is the policy before its first step, a second model
only where it is sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import TrainingArguments

from posttrain.config import DPORun, ModelSection
from posttrain.models import VOCABULARY_CHUNK, model_files
from posttrain.plan import parts
from posttrain.plan.episodes import Place
from posttrain.plan.parts import FLOAT, MARGIN, Numbers, OfAToken, Parts, gib, listed, most
from posttrain.plan.shape import Shape
from posttrain.runtime import hardware

COLUMNS = {"cuda": 32768, "cpu": VOCABULARY_CHUNK["cpu"]}  # of the logits at a time: TRL's, and what training.py sets
OPTIMIZER = "adamw_torch_fused"  # of transformers where none is written


class RowSettings(NamedTuple):
    """What decides memory and time of a run of phase 1 or 2, whatever stands in TRL's fields.

    Settings(pairs=False, rows=16, accumulated=4, longest=2048, evaluated=8, epochs=3, ...)
    """

    pairs: bool  # phase 2, which reads two rows of each
    rows: int  # of a micro-batch; in phase 2 pairs
    accumulated: int
    longest: int  # tokens of a row
    evaluated: int  # rows of a batch of an evaluation
    held_out: int
    epochs: float
    max_steps: int
    eval_steps: float | None  # optimizer steps between two evaluations; None once an epoch, inf never
    optim: str

    @classmethod
    def of(cls, cfg: Any) -> RowSettings:
        trainer = cfg.trainer
        strategy, every = trainer.get("eval_strategy", "no"), trainer.get("eval_steps")
        when = {"no": float("inf"), "epoch": None}
        return cls(
            pairs=isinstance(cfg, DPORun),
            rows=trainer.get("per_device_train_batch_size", 8),
            accumulated=trainer.get("gradient_accumulation_steps", 1),
            longest=cfg.data.max_length,
            evaluated=trainer.get("per_device_eval_batch_size", 8),
            held_out=cfg.data.eval_rows or 0,
            epochs=trainer.get("num_train_epochs", 3),
            max_steps=trainer.get("max_steps", -1),
            eval_steps=when.get(strategy, every or trainer.get("logging_steps", 500)),
            optim=str(trainer.get("optim", OPTIMIZER)),
        )

    @property
    def batch(self) -> int:
        """Rows of an optimizer step, over all devices."""
        return self.rows * self.accumulated

    def tokens(self, rows: int) -> int:
        """Of a micro-batch whose rows are all as long as they may be."""
        return rows * (1 + self.pairs) * self.longest

    def share(self, processes: int) -> int:
        """Rows of an optimizer step that one of so many devices reads; the batch stays where it can be divided."""
        return max(1, self.batch // processes)


def divisors(share: int, most: int) -> list[int]:
    """Of a device's share of the batch, as sizes of a micro-batch: divisors(12, 5) is [1, 2, 3, 4]"""
    return [count for count in range(1, min(share, most) + 1) if share % count == 0]


def rows_trained(shape: Shape, model: ModelSection) -> list[tuple[int, int]]:
    """Numbers that the optimizer moves, and bytes of each."""
    return [(shape.parameters if model.tuning == "full" else shape.adapter, FLOAT)]


def rows_memory(shape: Shape, cfg: Any, place: Place, rows: int) -> dict[str, Parts]:
    """Bytes by part, at the worst moment of each phase: a micro-batch of so many rows, all as long as they may be.

    What is held always is exact, up to the 8 bits of small tensors; the rest is an estimate.
    """
    settings, numbers = RowSettings.of(cfg), Numbers.of(cfg, place.shards)
    counts, token = rows_trained(shape, cfg.model), OfAToken.of(shape, numbers)
    gradients = sum(count * each for count, each in counts)
    tokens, asked = settings.tokens(rows), settings.tokens(settings.evaluated) if settings.held_out else 0

    def tile(labels: int) -> int:
        return parts.output_tile(shape, numbers.computed, labels, COLUMNS["cuda" if place.cuda else "cpu"], place.cuda)

    copied = place.processes > 1 and not place.sharded
    of_output = FLOAT * shape.vocabulary * shape.states if numbers.full else 0
    # they are made while activations are freed; from the second micro-batch on they lie there from the beginning
    waiting = settings.share(place.processes) > rows or place.processes > 1
    roots = place.cuda and settings.optim == "adamw_torch"
    return {
        "always": {
            "held already": place.held,
            "weights": parts.weights(shape, numbers),
            # DPOTrainer shards a second model before it has sharded the first
            "reference model": parts.weights(shape, numbers)
            if settings.pairs and place.sharded and numbers.full
            else 0,
            "optimizer": parts.moments(counts, numbers),
            "buckets of DDP": gradients if copied else 0,  # it copies every gradient into one before it is summed
        },
        "learning": {
            "gradients": numbers.mine(gradients) if waiting else 0,
            "activations": token.activations(tokens),
            "the layer at work": max(tokens * token.at_work, tile(tokens)) + of_output,
            "gathered weights": parts.gathered(shape, numbers),
            "bfloat16 weights": parts.copies(shape, numbers, learns=True),
        },
        "end of the backward pass": {  # where the gradients of output layer and embedding are added up
            "gradients": numbers.mine(gradients),
            "the layer at work": 2 * of_output + tokens * token.at_work,
            "gathered weights": parts.gathered(shape, numbers),
        },
        "evaluating": {
            "states": asked * (token.before + FLOAT * 4 * shape.states),
            "the layer at work": max(asked * token.at_work, tile(asked)),
            "gathered weights": parts.gathered(shape, numbers),
            "bfloat16 weights": parts.copies(shape, numbers, learns=False),
        },
        "stepping": {
            "gradients": numbers.mine(gradients),
            "square roots": numbers.mine(gradients) if roots else 0,
        },
    }


def largest_batch(shape: Shape, cfg: Any, place: Place) -> int | None:
    """The most rows of a micro-batch that fit, of those that divide this device's share of the batch; None where not
    even one fits, the margin used up."""
    share = RowSettings.of(cfg).share(place.processes)
    budget = place.held + place.free * (1 - MARGIN)
    found = parts.largest(divisors(share, share), budget, lambda rows: most(rows_memory(shape, cfg, place, rows)))
    return 1 if found is None and fits(shape, cfg, place, 1) else found


def fits(shape: Shape, cfg: Any, place: Place, rows: int) -> bool:
    """Whether a micro-batch fits, the margin used up."""
    return most(rows_memory(shape, cfg, place, rows)) <= place.held + place.free


def warning(cfg: Any, args: TrainingArguments, place: Place, longest: int) -> str:
    """What a run that is about to load its model should be told; "" where its micro-batches fit.

    place: before the model is loaded. longest: tokens of the longest row that there really is.
    """
    trainer = cfg.trainer | {"bf16": args.bf16, "gradient_checkpointing": args.gradient_checkpointing}
    data = cfg.data.model_copy(update={"max_length": min(longest, cfg.data.max_length)})
    cfg = cfg.model_copy(update={"trainer": trainer, "data": data})
    shape, rows = Shape.of(model_files.load_config(cfg.model), cfg.model), args.per_device_train_batch_size
    if fits(shape, cfg, place, rows):
        return ""
    return f"Planned, not measured, and it may run out of memory. {rows_too_much(shape, cfg, place, 'this device')}"


def rows_too_much(shape: Shape, cfg: Any, place: Place, where: str) -> str:
    """The paragraph for a run that does not fit: what takes how much, and what to write instead."""
    settings, best = RowSettings.of(cfg), largest_batch(shape, cfg, place)
    found = rows_memory(shape, cfg, place, settings.rows)
    full, again = cfg.model.tuning == "full", hardware.trainer_field(cfg, "gradient_checkpointing")
    share = settings.share(place.processes)
    smaller = (
        f"trainer.per_device_train_batch_size={best} trainer.gradient_accumulation_steps={share // best}"
        if best is not None
        else ""
    )

    def one_fits(**model: str) -> bool:
        return fits(shape, cfg.model_copy(update={"model": cfg.model.model_copy(update=model)}), place, 1)

    shortest = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_length": 8})})
    remedies = {
        smaller: best is not None and best < settings.rows,
        "trainer.gradient_checkpointing=true": not again,
        "trainer.optim=adamw_8bit": full and "8bit" not in settings.optim and not place.sharded,
        "model.tuning=lora": full,
        "model.tuning=qlora": cfg.model.tuning == "lora" and place.cuda and one_fits(tuning="qlora"),
        "model.dtype=bfloat16": cfg.model.tuning == "lora" and best is None and one_fits(dtype="bfloat16"),
        f"a data.max_length below {settings.longest}": fits(shape, shortest, place, 1),
        "a smaller model": best is None,
    }
    return (
        f"This run does not fit on {where}: with trainer.per_device_train_batch_size={settings.rows} and rows of up to"
        f" {settings.longest} tokens it takes {gib(most(found))} GiB a device, and {gib(place.held + place.free)} GiB"
        f" are there. In GiB: {listed(found)}. What helps: {', '.join(key for key, on in remedies.items() if on)}."
    )
