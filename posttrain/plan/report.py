"""What does `--plan` print?  For each device the batch that fits, the time and the price, or why the run does not fit.

Only the model's config is loaded, nothing is written, and no GPU is used.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.config import DPORun, StarPORun
from posttrain.plan import devices, episodes, known_models, rows, seconds
from posttrain.plan.devices import Fleet
from posttrain.plan.episodes import Place
from posttrain.plan.parts import lines_of_parts, peak_bytes
from posttrain.plan.seconds import LEARNING, PLAYING, Factors, Range, Seconds
from posttrain.plan.shape import Shape
from posttrain.plan.work import DataRows, Episodes
from posttrain.runtime import hardware, launcher
from posttrain.types import UserError

HELD = 2**29  # bytes that a process holds before it loads a model: the CUDA context, or Python and its libraries
COLUMNS = {  # of the table, and their parts
    "model": (
        *("weights", "reference model", "teacher", "critic"),
        *("fused weights", "gathered weights", "bfloat16 weights"),
    ),
    "optimizer": ("optimizer", "square roots"),
    "gradients": ("gradients", "buckets of DDP"),
    "activations": ("activations", "shared prefixes", "the layer at work", "states"),
    "rollout": ("KV cache", "reading and sampling", "CUDA graphs", "vLLM"),
}


class Planned(NamedTuple):
    """A run on some devices: its memory, the batch that fits, and the time."""

    fleet: Fleet
    sharded: bool
    parts: dict[str, dict[str, int]]  # bytes by part
    memory: float  # bytes of a device
    settings: str  # the largest batch that fits, in words
    seconds: Seconds | None  # None if nothing fits
    problem: str = ""  # why the run does not fit with its own settings
    servers: int = 0  # that play rollouts, a device each

    @property
    def hours(self) -> Range | None:
        if self.seconds is None:
            return None
        low, high = Range.of(self.seconds.work, self.fleet.device)
        return Range(low / 3600, high / 3600)

    @property
    def dollars(self) -> Range | None:
        price = self.fleet.device.price
        if self.hours is None or price is None:
            return None
        hourly = price * (self.fleet.count + self.servers)
        return Range(self.hours.low * hourly, self.hours.high * hourly)


def print_plan(cfg: Any, option: str, file: str) -> None:
    """Print the plan of a run of any phase.

    Args:
        option: the value of `--plan`.
        file: the config file of the run.

    Raises:
        UserError: the option is wrong; or it names one device, and the run does not fit there with its own settings.
    """
    fleets = devices.fleets(option)
    _check_facts(option, fleets[0].known, cfg)
    of_model = known_models.config_of(cfg.model, Path(file))
    shape = Shape.of(of_model, cfg.model)
    if isinstance(cfg, StarPORun) and cfg.teacher:
        taught_by = known_models.config_of(cfg.teacher, Path(file), "distillation.teacher")
        shape = shape._replace(teacher=Shape.of(taught_by, cfg.teacher))
    planned = [plan(shape, cfg, fleet) for fleet in fleets]
    print(f"{_head(shape, cfg, fleets[0])}\n\n{table(planned, cfg)}\n")
    print(_assumptions(cfg, fleets))
    if len(fleets) == 1:
        (one,) = planned
        print(f"\n{_by_part(one)}")
        if one.problem:
            raise UserError(one.problem)


def _check_facts(option: str, known: Mapping[str, float], cfg: Any) -> None:
    """Raise UserError for a number that this phase does not have, or that is too large."""
    own, other = (Episodes, DataRows) if isinstance(cfg, StarPORun) else (DataRows, Episodes)
    if strange := sorted(known.keys() & set(other._fields) - set(own._fields)):
        words = ", ".join(key for key in devices.OF_WORK if key in own._fields)
        raise UserError(f"--plan {option}: `{strange[0]}` is not a number of this phase, which has {words}.")
    if own is DataRows and known.get("tokens", 0) > (longest := DataRows.longest(cfg)):
        raise UserError(f"--plan {option}: no row is longer than {longest} tokens: raise data.max_length as well.")


def plan(shape: Shape, cfg: Any, fleet: Fleet) -> Planned:
    """Return the plan of a run on some devices: a copy of the model on each, or FSDP2 if that does not fit."""
    cfg = with_device_defaults(cfg, fleet)
    make = _of_episodes if isinstance(cfg, StarPORun) else _of_rows
    whole = make(shape, cfg, fleet, _place(cfg, fleet, sharded=False))
    if fleet.count > 1 and isinstance(cfg, StarPORun):
        servers = cfg.rollout.servers
        why = launcher.ONE_PROCESS if cfg.rollout.engine == "vllm" else launcher.servers_for(fleet.count, servers)
        if why:
            return whole._replace(seconds=None, settings="cannot run", problem=_on(fleet, why))
    if not whole.problem or fleet.count == 1:
        return whole
    if why := launcher.not_sharded(cfg):
        return whole._replace(problem=f"{whole.problem} {why}")
    shared = make(shape, cfg, fleet, _place(cfg, fleet, sharded=True))
    return whole if shared.problem and whole.seconds is not None else shared


def with_device_defaults(cfg: Any, fleet: Fleet) -> Any:
    """Return the config with the device's defaults: bfloat16 and compiled layers."""
    cuda = fleet.device.cuda
    update: dict[str, Any] = {}
    if hardware.trainer_field(cfg, "bf16") is None and not hardware.trainer_field(cfg, "fp16"):
        update["bf16"] = cuda or hardware.has_bf16(torch.device("cpu"))
    if hardware.trainer_field(cfg, "torch_compile") is None:
        update["torch_compile"] = hardware.compiles(cfg, "cuda" if cuda else "cpu")
    return hardware.with_trainer(cfg, **update)


def _place(cfg: Any, fleet: Fleet, sharded: bool) -> Place:
    memory = round(fleet.device.memory * 1e9)
    if not fleet.device.cuda:  # the processes of a machine share its memory
        memory //= fleet.each
    vllm = 0
    if isinstance(cfg, StarPORun) and cfg.rollout.engine == "vllm":
        vllm = round(memory * cfg.rollout.vllm_gpu_memory_utilization)
    return Place(memory - HELD, HELD, vllm, fleet.device.cuda, fleet.count, sharded)


def _of_episodes(shape: Shape, cfg: StarPORun, fleet: Fleet, place: Place) -> Planned:
    work, memory = Episodes.of(cfg, fleet.known), float(place.held + place.free)
    problem = ""
    try:
        fitting = episodes.choose(shape, cfg, place)
        problem = " ".join(fitting.warnings)
    except UserError as error:
        problem = str(error)
    if problem:  # with its own settings; try others
        rollout, trainer = cfg.rollout.model_copy(update={"slots": None}), {"micro_batch_tokens": None}
        trainer = cfg.trainer.model_copy(update=trainer)
        try:
            fitting = episodes.choose(shape, cfg.model_copy(update={"rollout": rollout, "trainer": trainer}), place)
        except UserError as error:
            always = {"held already": place.held, "vLLM": place.vllm} | episodes.always(shape, cfg, place.shards)
            return Planned(fleet, place.sharded, {"always": always}, memory, "", None, _on(fleet, str(error)))
        problem += f" The largest that fit are rollout.slots={fitting.slots} and"
        problem += f" trainer.micro_batch_tokens={fitting.micro_batch_tokens}."
    batch = f"{fitting.slots} slots, {fitting.micro_batch_tokens} tokens"
    batch += ", recomputed" if fitting.gradient_checkpointing else ""
    players = len(cfg.rollout.servers) or fleet.count
    batch += f", {work.groups} of {players} play" if work.groups < players else ""
    times = seconds.of_episodes(shape, cfg, fleet, work, fitting, place.shards)
    problem, servers = _on(fleet, problem) if problem else "", len(cfg.rollout.servers)
    return Planned(fleet, place.sharded, fitting.parts, memory, batch, times, problem, servers)


def _of_rows(shape: Shape, cfg: Any, fleet: Fleet, place: Place) -> Planned:
    memory, share = float(place.held + place.free), rows.RowSettings.of(cfg).share(place.processes)
    cfg = hardware.with_trainer(cfg, **rows.choose_rows(shape, cfg, place, share))
    settings = rows.RowSettings.of(cfg)
    own, best = rows.divisors(share, settings.rows)[-1], rows.largest_batch(shape, cfg, place)
    problem = "" if rows.fits(shape, cfg, place, own) else rows.rows_do_not_fit(shape, cfg, place, fleet.name)
    size = own if not problem else best
    if size is None:
        return Planned(
            fleet, place.sharded, rows.rows_memory(shape, cfg, place, 1), memory, "1 does not fit", None, problem
        )
    data = DataRows.of(cfg, fleet.known)
    batch = f"{size} x {share // size}" + (f", at most {best}" if best is not None and best > size else "")
    batch += f", {share * place.processes} a step" if share * place.processes != settings.batch else ""
    times = seconds.of_rows(shape, cfg, fleet, data, size, place.shards)
    by_phase = rows.rows_memory(shape, cfg, place, size)
    return Planned(fleet, place.sharded, by_phase, memory, batch, times, problem)


def _on(fleet: Fleet, problem: str) -> str:
    return f"{fleet.name}: {problem}"


# ------------------------------------------------------------------------------------------------------------- in words


def table(planned: Sequence[Planned], cfg: Any) -> str:
    """Return the table: for each fleet the peak GiB by part, the largest batch that fits, likely seconds and hours."""
    names = next((list(one.seconds.parts) for one in planned if one.seconds), [])
    fits = "at a time" if isinstance(cfg, StarPORun) else "batch"
    head = ["", "weights", *COLUMNS, "peak", "of", fits, *(f"{name} s" for name in names), "hours", "$", "measured on"]
    lines = [head]
    for one in planned:
        sizes = _columns(one.parts)
        cells = [
            one.fleet.name,
            "sharded" if one.sharded else "copied",
            *(f"{sizes[name] / 2**30:.1f}" for name in COLUMNS),
        ]
        if one.seconds is None:
            lines.append(
                [
                    *cells,
                    "",
                    f"{one.memory / 2**30:.1f}",
                    one.settings or "does not fit",
                    *["" for _ in names],
                    "",
                    "",
                    "",
                ]
            )
            continue
        batch = one.settings + (" (not as written)" if one.problem else "")
        cells += [f"{peak_bytes(one.parts) / 2**30:.1f}", f"{one.memory / 2**30:.1f}", batch]
        device = one.fleet.device
        kinds = {name: PLAYING if name == "rollout" else LEARNING for name in one.seconds.parts}
        cells += [str(Range.of({kinds[name]: value}, device)) for name, value in one.seconds.parts.items()]
        known = "CPUs" if device.waits else device.name if device.measured else "not this card"
        lines.append([*cells, str(one.hours), str(one.dollars or "?"), known])
    width = [max(len(line[place]) for line in lines) for place in range(len(head))]
    left = {0, 1, len(COLUMNS) + 4, len(head) - 1}

    def row(line: list[str]) -> str:
        cells = enumerate(zip(line, width, strict=True))
        return "  ".join(cell.ljust(size) if at in left else cell.rjust(size) for at, (cell, size) in cells).rstrip()

    return "\n".join(map(row, lines))


def _columns(parts: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the bytes of each column: what is always held, and the most of the other parts at one time."""
    columns = {}
    for name, inside in COLUMNS.items():
        sizes = {phase: sum(size for part, size in each.items() if part in inside) for phase, each in parts.items()}
        columns[name] = sizes.pop("always") + max(sizes.values(), default=0)
    return columns


def _head(shape: Shape, cfg: Any, fleet: Fleet) -> str:
    what = f"{cfg.model.name_or_path}: {shape.parameters / 1e6:,.1f} M parameters, tuning {cfg.model.tuning}"
    what += f" ({shape.adapter / 1e6:,.1f} M in the adapter)" if shape.adapter else ""
    if shape.teacher:
        what += f", taught by {cfg.distillation.teacher} ({shape.teacher.parameters / 1e6:,.1f} M)"
    if isinstance(cfg, StarPORun):
        work = Episodes.of(cfg, fleet.known)
        length = (
            f"{cfg.trainer.max_steps} steps of {work.groups} groups x {work.samples} episodes: {work.turns:g} turns,"
            f" prompt {work.prompt:.0f}, {work.new:g} tokens a turn, reply {work.reply:.0f}, {work.kept:.0%} of the"
            " groups trained on. No turn ends early, so the times are upper limits."
        )
    else:
        data, settings = DataRows.of(cfg, fleet.known), rows.RowSettings.of(cfg)
        epochs = f"{settings.epochs:g} epoch{'s' if settings.epochs != 1 else ''}"
        steps = f"{settings.max_steps} steps" if settings.max_steps > 0 else epochs
        length = (
            f"{data.rows:,.0f} {'pairs' if settings.pairs else 'rows'} of {data.tokens:.0f} tokens,"
            f" {data.trained:.0%} of them with a label, {steps} in batches of {settings.batch}."
        )
    return _lines(f"Planned, not measured. {what}. {length}")


def _assumptions(cfg: Any, fleets: Sequence[Fleet]) -> str:
    """Return what the figures assume, in sentences."""
    factors = Factors(**{key: value for key, value in fleets[0].known.items() if key in Factors._fields})
    example = "new=30,turns=5" if isinstance(cfg, StarPORun) else "rows=20000,tokens=300"
    servers = len(cfg.rollout.servers) if isinstance(cfg, StarPORun) else 0
    playing = f"Servers play the rollouts ({servers}, one such device each, included in the price). " if servers else ""
    if isinstance(cfg, StarPORun) and not servers:
        playing = (
            "Rollouts read the history again in every turn (rollout.engine: replay). "
            if cfg.rollout.engine == "replay"
            else "Rollouts keep the KV cache; if the model cannot (posttrain check-model): rollout.engine=replay. "
        )
    also = "evaluations"
    also += ", the reference's log-probs" if isinstance(cfg, DPORun) else ""
    also += ", the answers to distil" if isinstance(cfg, StarPORun) and cfg.remembers else ""
    prices = f"{devices.PRICED}. " if any(fleet.price is not None for fleet in fleets) else ""
    device = fleets[0].device
    limits = f"{device.bandwidth:.1f} GB/s, {device.peak:.3f} TFLOP/s in bfloat16, {device.single:.3f} in float32"
    return _lines(
        f"{f'Measured here: {limits}. ' if device.waits else ''}"
        "GiB a device. Sharded: parameters, gradients and moments (FSDP2). Assumed: products reach"
        f" {factors.matmul:.0%} of the peak, other kernels {factors.stream:.0%} of the bandwidth, decoding"
        f" {factors.decode:.0%};"
        f" {device.operation * 1e6:.0f} microseconds to launch an operation. {_likely(device)} Hours are all steps and"
        f" {also}; loading, checkpoints and downloads are not counted. {playing}{prices}Replace what you know"
        f" better: --plan A10G:price=0.6,{example}"
    )


def _likely(device: devices.Device) -> str:
    kind, where = ("cpu", "on CPUs") if device.waits else ("gpu", "of an H100 and an H200")
    played, learned = ("{:g} to {:g}".format(*seconds.LIKELY[kind, work]) for work in (PLAYING, LEARNING))
    words = f"Ranges: rollouts took {played} times and updates {learned} times what is planned"
    if device.waits:
        return f"{words}, {where}."
    return (
        f"{words}, in single steps {where} with the kernels of then. Today's layers, which launch fewer, and whole runs"
        " are not yet measured on a GPU."
    )


def _lines(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _by_part(one: Planned) -> str:
    peak = peak_bytes(one.parts) if one.seconds is not None else None
    return "\n".join([f"memory of one {one.fleet.device.name}, GiB", *lines_of_parts(one.parts, peak)])
