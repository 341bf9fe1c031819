"""How much memory does phase 1 or 2 take, and which batch fits?  For TRL's trainers as the scripts configure them.

Both compute logits only for labels, with TRL's chunked output layer, and step after the gradients of all
micro-batches. The reference of phase 2 is the policy before its first step; it is a second model only if the model is
sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import TrainingArguments

from posttrain.config import DPORun
from posttrain.models import VOCABULARY_CHUNK, model_files
from posttrain.plan import parts
from posttrain.plan.episodes import Place
from posttrain.plan.parts import FLOAT, MARGIN, Numbers, OfAToken, Parts, gib, peak_bytes, sentence_of_parts
from posttrain.plan.shape import Shape
from posttrain.runtime import hardware

# columns of the logits at a time: TRL's number, and the one that training.py sets
COLUMNS = {"cuda": 32768, "cpu": VOCABULARY_CHUNK["cpu"]}
OPTIMIZER = "adamw_torch_fused"  # the default of transformers
# Tokens of a micro-batch that the plan chooses: more make a device no faster; fewer leave a GPU waiting for launches,
# and then recomputing the activations of more is faster.
MOST_TOKENS = {"cuda": 32768, "cpu": 2048}
ENOUGH_TOKENS = {"cuda": 4096, "cpu": 1}
BY_MEMORY = ("gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps")


class RowSettings(NamedTuple):
    """The settings of phase 1 or 2 that decide memory and time, with TRL's defaults filled in.

    RowSettings(pairs=False, rows=16, accumulated=4, longest=2048, evaluated=8, epochs=3, ...)
    """

    pairs: bool  # phase 2: two rows for each pair
    rows: int  # of a micro-batch; in phase 2 pairs
    accumulated: int
    longest: int  # tokens of a row
    evaluated: int  # rows of a batch of an evaluation
    held_out: int
    epochs: float
    max_steps: int
    eval_steps: float | None  # optimizer steps between evaluations; None: once an epoch, inf: never
    optim: str

    @classmethod
    def of(cls, cfg: Any) -> RowSettings:
        """Return the settings of a config of phase 1 or 2."""
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
        """Return the rows of an optimizer step, over all devices."""
        return self.rows * self.accumulated

    def tokens(self, rows: int) -> int:
        """Return the tokens of a micro-batch whose rows all have the maximal length."""
        return rows * (1 + self.pairs) * self.longest

    def share(self, processes: int) -> int:
        """Return the rows of an optimizer step on one device. The batch stays the same if it can be divided evenly."""
        return max(1, self.batch // processes)


def divisors(share: int, most: int) -> list[int]:
    """Return the sizes of a micro-batch that divide a device's share of the batch: divisors(12, 5) is [1, 2, 3, 4]."""
    return [count for count in range(1, min(share, most) + 1) if share % count == 0]


def rows_memory(shape: Shape, cfg: Any, place: Place, rows: int) -> dict[str, Parts]:
    """Return the bytes of each part at the peak of each phase of a step, for `rows` rows of maximal length.

    "always" is exact (except for small tensors in 8 bits); the rest is an estimate.
    """
    settings, numbers = RowSettings.of(cfg), Numbers.of(cfg, place.shards)
    trained, token = parts.trained_parameters(shape, cfg.model.tuning), OfAToken.of(shape, numbers)
    gradients = FLOAT * trained
    tokens, evaluated = settings.tokens(rows), settings.tokens(settings.evaluated) if settings.held_out else 0

    def tile(labels: int) -> int:
        return parts.output_tile(shape, numbers.computed, labels, COLUMNS["cuda" if place.cuda else "cpu"], place.cuda)

    copied = place.processes > 1 and not place.sharded
    of_output = FLOAT * shape.vocabulary * shape.states if numbers.full else 0
    # those of the first micro-batch are made while activations are freed; a second one begins with all of them
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
            "optimizer": parts.moments(trained, numbers),
            "buckets of DDP": gradients if copied else 0,  # every gradient is copied into a bucket before it is summed
            "kernels": parts.kernels(numbers, place.cuda),
        },
        "learning": {
            "gradients": numbers.mine(gradients) if waiting else 0,
            "activations": token.activations(tokens),
            "the layer at work": max(tokens * token.at_work, tile(tokens)) + of_output,
            "gathered weights": parts.gathered_weights(shape, numbers),
            "bfloat16 weights": parts.copies(shape, numbers, kept=not numbers.recomputed),
        },
        "end of the backward pass": {  # the gradients of output layer and embedding are added
            "gradients": numbers.mine(gradients),
            "the layer at work": 2 * of_output + tokens * token.at_work,
            "gathered weights": parts.gathered_weights(shape, numbers),
        },
        "evaluating": {
            "states": evaluated * (token.before + FLOAT * 4 * shape.states),
            "the layer at work": max(evaluated * token.at_work, tile(evaluated)),
            "gathered weights": parts.gathered_weights(shape, numbers),
            "bfloat16 weights": parts.copies(shape, numbers, kept=False),
        },
        "stepping": {
            "gradients": numbers.mine(gradients),
            "square roots": numbers.mine(gradients) if roots else 0,
        },
    }


def choose_rows(shape: Shape, cfg: Any, place: Place, share: int | None = None) -> dict[str, Any]:
    """Return the keys of `trainer` that depend on the memory, with their values.

    `gradient_checkpointing`, if the config leaves it open: off where a micro-batch fits without. With
    `auto_find_batch_size`, the rows of a micro-batch as well: the most that divide a step, which keeps its rows.

    share: rows of a step on one device; None takes those of the config.
    """
    settings, kind = RowSettings.of(cfg), "cuda" if place.cuda else "cpu"
    share, given = share or settings.batch, hardware.trainer_field(cfg, "gradient_checkpointing")
    searched = bool(hardware.trainer_field(cfg, "auto_find_batch_size"))
    sizes = divisors(share, share) if searched else [settings.rows]
    sizes = [rows for rows in sizes if settings.tokens(rows) <= MOST_TOKENS[kind]] or sizes[:1]
    budget = place.held + place.free * (1 - MARGIN)
    rows, recomputed = None, bool(given)
    for recomputed in (False, True) if given is None else (given,):
        tried = hardware.with_trainer(cfg, gradient_checkpointing=recomputed)
        rows = parts.largest(sizes, budget, lambda rows, cfg=tried: peak_bytes(rows_memory(shape, cfg, place, rows)))
        if rows is not None and (rows == sizes[-1] or settings.tokens(rows) >= ENOUGH_TOKENS[kind]):
            break
    if not searched:
        return {"gradient_checkpointing": recomputed}
    rows = rows or 1
    return dict(zip(BY_MEMORY, (recomputed, rows, share // rows), strict=True))


def largest_batch(shape: Shape, cfg: Any, place: Place) -> int | None:
    """Return the largest micro-batch that divides this device's share of the batch and fits, with the margin.

    1 if one row fits without the margin, None if it does not fit at all.
    """
    share = RowSettings.of(cfg).share(place.processes)
    budget = place.held + place.free * (1 - MARGIN)
    best = parts.largest(divisors(share, share), budget, lambda rows: peak_bytes(rows_memory(shape, cfg, place, rows)))
    return 1 if best is None and fits(shape, cfg, place, 1) else best


def fits(shape: Shape, cfg: Any, place: Place, rows: int) -> bool:
    """Return whether a micro-batch fits without the margin."""
    return peak_bytes(rows_memory(shape, cfg, place, rows)) <= place.held + place.free


def warning(cfg: Any, args: TrainingArguments, place: Place, longest: int) -> str:
    """Return a warning for a run that may run out of memory; "" if its micro-batches fit.

    Args:
        place: the memory before the model is loaded.
        longest: tokens of the longest row in the data.
    """
    trainer = cfg.trainer | {"bf16": args.bf16, "gradient_checkpointing": args.gradient_checkpointing}
    data = cfg.data.model_copy(update={"max_length": min(longest, cfg.data.max_length)})
    cfg = cfg.model_copy(update={"trainer": trainer, "data": data})
    shape, rows = Shape.of(model_files.load_config(cfg.model), cfg.model), args.per_device_train_batch_size
    if fits(shape, cfg, place, rows):
        return ""
    return f"Planned, not measured: it may run out of memory. {rows_do_not_fit(shape, cfg, place, 'this device')}"


def rows_do_not_fit(shape: Shape, cfg: Any, place: Place, where: str) -> str:
    """Return the message for a run that does not fit: the size of each part, and what to write instead."""
    settings, best = RowSettings.of(cfg), largest_batch(shape, cfg, place)
    by_phase = rows_memory(shape, cfg, place, settings.rows)
    full, recomputes = cfg.model.tuning == "full", hardware.trainer_field(cfg, "gradient_checkpointing")
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
        "trainer.gradient_checkpointing=true": not recomputes,
        "trainer.optim=adamw_8bit": full and "8bit" not in settings.optim and not place.sharded,
        "model.tuning=lora": full,
        "model.tuning=qlora": cfg.model.tuning == "lora" and place.cuda and one_fits(tuning="qlora"),
        "model.dtype=bfloat16": cfg.model.tuning == "lora" and best is None and one_fits(dtype="bfloat16"),
        f"a data.max_length below {settings.longest}": fits(shape, shortest, place, 1),
        "a smaller model": best is None,
    }
    return (
        f"This run does not fit on {where}: with trainer.per_device_train_batch_size={settings.rows} and rows of up to"
        f" {settings.longest} tokens it takes {gib(peak_bytes(by_phase))} GiB a device, and"
        f" {gib(place.held + place.free)} GiB are available. In GiB: {sentence_of_parts(by_phase)}. What helps:"
        f" {', '.join(key for key, on in remedies.items() if on)}."
    )
