"""What do phases 1 and 2 put around TRL's trainers?  Progress, sealed checkpoints, an orderly stop, the export.

TRL trains. This module shows progress, resumes a killed run where it stopped, and seals checkpoints with checksums.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainerState
from transformers.modeling_outputs import BaseModelOutputWithPast

from posttrain import files, models
from posttrain.config import TrainingRun, command, find_config, read_yaml, reference_name
from posttrain.data import SOURCES
from posttrain.finetune import suites
from posttrain.metrics import wilson
from posttrain.models import VOCABULARY_CHUNK, Chat, model_card, no_bars, pads_on_the_right
from posttrain.runtime import (
    COUNTS,
    FIGURES,
    checkpoint,
    compat,
    dashboards,
    hardware,
    launcher,
    parallel,
    run_identity,
    runlog,
    sharding,
)
from posttrain.types import UserError


def show_reference_progress() -> None:
    """Show the progress of the reference's log-probs with this project's progress bar in place of TRL's."""

    def shown(iterable: Any, desc: str, disable: bool = False) -> Iterator[Any]:
        with runlog.Progress(total=len(iterable), title=desc) as progress:
            for done, batch in enumerate(iterable, 1):
                yield batch
                progress.update(done)

    compat.replace_reference_bar(shown)


def read_without_padding_masks(net: Any, checked: bool = False) -> None:
    """Make the decoder read a batch that is padded on the right without an attention mask.

    A token attends only to itself and earlier tokens, so no real token sees the padding behind it, and padding has no
    label. Loss and gradients are the same (a test compares). transformers would make a mask of rows x T x T from the
    padding; without one, sdpa uses its flash kernels and shares the keys and values of grouped queries. TRL's trainers
    count tokens by the attention mask, so it is dropped only here.

    checked: whether batches that are trained on are known to be padded on the right: a look at one waits for the GPU.
    """
    if not getattr(net.config.get_text_config(), "is_causal", True):
        return

    def without_mask(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        generates = kwargs.get("use_cache", True) or kwargs.get("past_key_values") is not None
        if args or generates or ids is None:
            return None
        if not (checked and torch.is_grad_enabled()) and not pads_on_the_right(mask, ids.shape[1]):
            return None
        return args, kwargs | {"attention_mask": None}

    net.base_model.register_forward_pre_hook(without_mask, with_kwargs=True)


def load_model(cfg: TrainingRun) -> tuple[PreTrainedModel, Chat]:
    """Load the model to train and its chat: into the CPU's memory where each device will get a shard of it."""
    place = "cpu" if launcher.sharding() != "none" else cfg.device
    return models.load(cfg.model, device=place, chat_template=cfg.chat.template)


def save_work(net: PreTrainedModel, device: torch.device) -> None:
    """Skip what a device need not compute for prompts and padding."""
    if device.type != "cpu":
        read_without_padding_masks(net, checked=True)
        return
    compat.score_trained_positions_only()
    compat.score_few_columns(VOCABULARY_CHUNK["cpu"])
    if launcher.sharding() == "none":  # else processes would gather layers for different numbers of slices
        read_in_slices(net)


def reference_in_shards(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return the reference model for DPOTrainer: a copy of the policy under FSDP2, None (the policy itself) otherwise.

    DPOTrainer computes the reference's log-probs before it shards the policy, and shards the copy.
    """
    return copy.deepcopy(net).requires_grad_(False) if launcher.sharding() == "fsdp2" else None


def read_in_slices(net: Any) -> None:
    """Make the decoder read the rows of a padded batch in slices of similar length, without the padding behind them.

    Where rows differ in length, half of a batch or more is padding, which a CPU computes like everything else. In a
    slice no row is shorter than three quarters of the longest: little padding, and few slices where lengths are
    similar. Loss and gradients are the same: no row sees another one. It replaces the decoder's `forward`.
    """
    decoder = net.base_model
    whole = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs.keys() != {"input_ids", "attention_mask", "use_cache"} or kwargs["use_cache"]:
            return whole(*args, **kwargs)  # packed rows, or generation
        ids_BT, mask_BT = kwargs["input_ids"], kwargs["attention_mask"]
        assert (mask_BT[:, 1:] <= mask_BT[:, :-1]).all(), "padding is on the right"
        lengths, order = mask_BT.sum(1).sort(descending=True)
        hidden, start = [], 0
        while start < len(order):
            longest = int(lengths[start])
            stop = int((lengths >= 0.75 * longest).sum())
            rows = order[start:stop]
            read = whole(input_ids=ids_BT[rows, :longest], attention_mask=mask_BT[rows, :longest], use_cache=False)
            hidden.append(functional.pad(read.last_hidden_state, (0, 0, 0, ids_BT.shape[1] - longest)))
            start = stop
        return BaseModelOutputWithPast(last_hidden_state=torch.cat(hidden)[order.argsort()])

    decoder.forward = forward


class NotFinite(UserError):
    """A loss, a gradient or a weight is inf or nan in optimizer step `step`.

    Checkpoints of `updates` updates or more are not trusted.
    """

    def __init__(self, step: int, what: str, updates: int) -> None:
        super().__init__(
            f"The run stopped at step {step}: {what} is not a finite number. Lower trainer.learning_rate, look at the "
            "rows of this step, or compute in float32 (trainer.bf16=false, trainer.fp16=false)."
        )
        self.updates = updates


class Outcome(NamedTuple):
    """The result of training: the figures of the held-out rows, and the error that ended it early, if any."""

    figures: dict[str, float]
    failure: UserError | None = None


def fit(
    trainer: Trainer,
    title: str,
    cfg: Any,
    *,
    resume: bool,
    deterministic: bool = False,
    check_first: Callable[[dict[str, Any]], None] | None = None,
    tasks: suites.SuiteTasks | None = None,
) -> Outcome:
    """Train to the end and measure the held-out rows. A signal saves a checkpoint and ends the process here.

    Args:
        title: name of the phase for the progress bar.
        cfg: SFTRun or DPORun.
        resume: start from the newest intact checkpoint.
        deterministic: use deterministic kernels; see `plan.can_be_deterministic`.
        check_first: called with the figures of the first step; may raise.
        tasks: `evaluation.TrainingTasks` of this run, measured while it trains.

    Returns:
        The outcome; that of the last healthy checkpoint, with the error, where a loss or gradient was not finite.

    Raises:
        UserError: training diverged before the first healthy checkpoint.
    """
    output_dir = Path(cfg.output_dir)
    settings = cfg.model_dump(mode="json")
    say = print if runlog.is_main_process() else lambda _: None
    newest = checkpoint.latest_good(output_dir, say=say) if resume else None
    if resume:
        say(f"Resuming from {newest}." if newest else "No whole checkpoint yet: starting from the beginning.")
    if runlog.is_main_process():
        run_identity.remember_run(output_dir, settings, resume)
    boards = dashboards.open_dashboards(cfg, settings, resume=resume, named=dashboards.as_transformers)
    models.adapters_in_float32(trainer.model)
    say(f"{title}: {models.describe_training(cfg, trainer.model, trainer.args.device)}")
    with runlog.StopSignals() as stop, no_bars(), hardware.deterministic(deterministic):
        begun = run_identity.begun_processes(cfg, trainer.args)
        if begun != trainer.args.world_size:
            rows: Any = trainer.train_dataset
            say(run_identity.share_out_in_words(trainer.args, begun, len(rows)))
        counts = {"processes": begun, "sharding": launcher.sharding()}

        measuring: suites.SuiteCallback | None = None

        def counted() -> dict[str, Any]:
            kept = {"suites": measuring.kept()} if measuring else {}
            return {"num_tokens": compat.trained_tokens(trainer), **counts, **kept}

        reporter = Reporter(title, output_dir, boards, stop, counted, check_first)
        remedy = f"Remove {newest}: --resume then takes an older checkpoint."
        before = files.read_json(newest / COUNTS, remedy) if newest else {}
        trainer.remove_callback(PrinterCallback)
        compat.write_no_model_card(trainer)
        trainer.add_callback(reporter)
        if tasks is not None:
            measuring = suites.SuiteCallback(tasks, cfg, before.get("suites", {}), reporter.report, reporter.say)
            trainer.add_callback(measuring)
        try:
            if newest is not None and _is_last(newest):
                _take_up_finished(trainer, newest, reporter)
            else:
                if newest is not None:
                    compat.set_trained_tokens(trainer, before["num_tokens"])
                with checkpoint.full_disk_in_words(output_dir):
                    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if reporter.stopped:
                say(f"Stopped after step {trainer.state.global_step}. Go on with the same command and --resume.")
                stop.leave()
            with stop.at_once("the closing evaluation"):
                return Outcome(_held_out_figures(trainer))
        except NotFinite as problem:
            boards.alert("not finite", str(problem), trainer.state.global_step, error=True)
            trainer.remove_callback(reporter)  # metrics.jsonl has its steps in order
            return _last_healthy(trainer, output_dir, problem)
        finally:
            reporter.close()


def _last_healthy(trainer: Trainer, output_dir: Path, problem: NotFinite) -> Outcome:
    """Load the newest checkpoint before the broken weights whose loss on the held-out rows is finite."""
    for step, folder in reversed(checkpoint.numbered(output_dir)):
        if step >= problem.updates or not checkpoint.is_whole(folder):
            continue
        compat.load_checkpoint_weights(trainer, folder)
        trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        figures = trainer.evaluate() if trainer.eval_dataset is not None else {}
        if math.isfinite(figures.get("eval_loss", 0.0)):
            handed = f"{output_dir / 'final'} was made from {folder.name}, the last healthy checkpoint."
            return Outcome(figures, UserError(f"{problem} {handed}"))
    raise UserError(f"{problem} There is no healthy checkpoint before it, so nothing is saved.") from problem


def _is_last(folder: Path) -> bool:
    """Return whether this is the checkpoint of a run's last step."""
    state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    return state.global_step >= state.max_steps


def _take_up_finished(trainer: Trainer, folder: Path, reporter: Reporter) -> None:
    """Load weights and figures of a run that was killed after its last step; transformers would do one more step."""
    compat.load_checkpoint_weights(trainer, folder)
    trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    reporter.on_train_begin(trainer.args, trainer.state, trainer.control)
    rows = runlog.read_metrics(reporter.output_dir / "metrics.jsonl")
    trainer.state.log_history += [row for row in rows if row["step"] == trainer.state.global_step]


def _held_out_figures(trainer: Trainer) -> dict[str, float]:
    """Return the figures of the held-out rows after the last step; measure them unless that step has done so."""
    if trainer.eval_dataset is None:
        return {}
    measured = [row for row in trainer.state.log_history if "eval_loss" in row]
    if measured and measured[-1]["step"] == trainer.state.global_step:
        return measured[-1]
    return trainer.evaluate()


def export_model(
    trainer: Trainer,
    chat: Chat,
    cfg: Any,
    outcome: Outcome,
    *,
    rows: Path,
    phase: str,
    next_phase: str,
    config_file: str,
) -> None:
    """Write `<output_dir>/final` and print the command of the next phase.

    Args:
        rows: folder of the prepared rows, whose sources the model card names.
        phase: name of this phase for the model card, as "phase1".
        next_phase: name of the next phase's config, as "phase2_dpo".
        config_file: the config of this run; the next phase's is looked for beside it.

    Raises:
        UserError: training failed; the last healthy checkpoint has been saved.
    """
    parallel.barrier()
    kind = launcher.sharding()
    net = trainer.model if kind == "none" else models.whole_again(trainer.model, cfg, chat)
    if not runlog.is_main_process():
        return
    final, step, figures = Path(cfg.output_dir) / "final", trainer.state.global_step, outcome.figures
    settings = cfg.model_dump(mode="json")
    history = [*model_card.history(cfg.model.name_or_path), _record(phase, settings, step, figures, rows)]
    models.save(final, net, chat, settings, source=cfg.model, history=history, phase=phase, step=step)
    if outcome.failure is not None:
        raise outcome.failure
    shown = ", ".join(f"{name.removeprefix('eval_')} {figures[name]:.4g}" for name in FIGURES if name in figures)
    print(f"{phase} is done after {step} steps. Held-out rows: {shown or 'none, see data.eval_rows'}.")
    print(f"Saved: {final}  (curves: {final.with_name('metrics.jsonl')})")
    print(f"Next: {next_command(next_phase, Path(config_file), final, hardware.resolve_device(cfg.device).type)}")


def next_command(phase: str, config_file: Path, final: Path, device: str) -> str:
    """Return the command of the next phase: with the config file beside this run's, on the same device."""
    file, shown = config_file.with_name(f"{phase}.yaml"), ""
    if file.is_file():
        shown = f" --config {shlex.quote(str(file))}"
    elif (beside := reference_name(config_file)) and (name := reference_name(Path(beside).with_name(phase))):
        shown = f" --config {name}"
    try:
        written = read_yaml(find_config(file if shown else phase)).get("device", "auto")
    except UserError:  # missing or broken: the next phase reports it better
        written = "auto"
    there = "" if written in ("auto", device) else f" device={device}"
    if phase == "phase2_dpo" and not shown:  # the reference config would load pairs from the Hub
        there += " data.sources=[PAIRS.jsonl]  (PAIRS.jsonl: your own pairs of answers)"
    return f"{command(f'train_{phase}')}{shown} model.name_or_path={shlex.quote(str(final))}{there}"


def _record(phase: str, settings: dict[str, Any], step: int, figures: dict[str, float], rows: Path) -> dict[str, Any]:
    """Return this run's record for the model card: its sources, and its figures on the held-out rows."""
    sources = json.loads((rows / SOURCES).read_text(encoding="utf-8"))
    reported = [row for row in runlog.read_metrics(rows.with_name("metrics.jsonl")) if row["step"] == step]
    held_out = sum(source["held_out"] for source in sources)
    results = []
    if "eval_loss" in figures:
        results.append(model_card.CardResult("held-out rows: loss", figures["eval_loss"], held_out))
    if (share := figures.get("eval_rewards/accuracies")) is not None:
        low, high = wilson(round(share * held_out), held_out)
        results.append(model_card.CardResult("held-out pairs: the chosen answer wins", share, held_out, low, high))
    results += [result for row in reported for result in model_card.suite_results(row)]
    return model_card.phase_record(phase, settings, step, data=sources, results=results)


def gradients_are_finite(net: torch.nn.Module) -> bool:
    """Return whether all gradients are finite; clipping by an infinite norm gives nan. DeepSpeed hides them."""
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return math.isfinite(sharding.number(torch.nn.utils.get_total_norm(gradients)))


class Reporter(TrainerCallback):
    """The callback that reports (bar, metrics.jsonl, dashboards), seals checkpoints, and saves and stops on a signal.

    `check_first` is called with the figures of the first step and may raise.
    """

    metrics: runlog.MetricsFile
    progress: runlog.Progress | None = None
    logged = 0  # the last step that was logged

    def __init__(
        self,
        title: str,
        output_dir: Path,
        boards: dashboards.Dashboards,
        stop: runlog.StopSignals,
        counts: Callable[[], dict[str, Any]],
        check_first: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.title, self.output_dir, self.boards, self.stop = title, output_dir, boards, stop
        self.counts, self.check_first = counts, check_first
        self.stopped, self.logged_at = False, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.logged = state.global_step
        self.metrics = runlog.MetricsFile(self.output_dir / "metrics.jsonl", after_step=state.global_step or None)
        self.boards.catch_up(state.global_step or None)
        self.progress = runlog.Progress(state.max_steps, self.title, start=state.global_step)
        self.logged_at = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        # float16 scales its loss until gradients fit, and skips the steps in which they do not
        if not args.fp16 and not gradients_are_finite(model):
            raise NotFinite(state.global_step + 1, "the gradient", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._show(state.global_step)
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            control.should_log = True  # as transformers evaluates and saves there
        if parallel.total(float(self.stop.requested), args.device) > 0:  # a signal may reach only some processes
            self.stopped = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped and state.epoch % 1:  # the epoch has not ended: transformers calls this whenever it stops
            control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        row = dict(logs or {})
        if "train_runtime" in row:  # transformers' closing summary, with nothing new
            return
        if self.check_first is not None and state.global_step == 1 and "loss" in row:
            self.check_first(row)
        shown = {name: row[name] for name in ("loss", "eval_loss", "rewards/accuracies") if name in row}
        self._show(state.global_step, **shown)
        now = time.perf_counter()
        row["seconds"], self.logged_at = now - self.logged_at, now
        self.metrics.write(row, state.global_step)
        self.boards.log(row, state.global_step)
        if not math.isfinite(row.get("loss", 0.0)):  # a mean over all steps since the last one that was logged
            raise NotFinite(state.global_step, "the loss", self.logged)
        if not math.isfinite(row.get("eval_loss", 0.0)):
            raise NotFinite(state.global_step, "the loss of the held-out rows", state.global_step)
        self.logged = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if broken := models.parameters_not_finite(model):
            raise NotFinite(state.global_step, f"a weight ({broken})", state.global_step)
        parallel.barrier()  # every process has written its random state by now
        if runlog.is_main_process():
            folder = self.output_dir / f"checkpoint-{state.global_step}"
            (folder / COUNTS).write_text(json.dumps(self.counts()))
            checkpoint.seal(folder, step=state.global_step)

    def report(self, figures: dict[str, float], step: int) -> None:
        """Write the figures of an evaluation as a row of their own; its time is not that of the steps around it."""
        self.logged_at += figures.get("seconds/evaluation", 0.0)
        self.metrics.write(figures, step)
        self.boards.log(figures, step)
        names = ("accuracy", "seq_rep_4")
        shown = {key.split("/", 1)[1]: value for key, value in figures.items() if key.rpartition("/")[2] in names}
        self._show(step, **{name.removesuffix("/accuracy"): value for name, value in shown.items()})

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        assert self.progress is not None
        self.progress.say(text)

    def close(self) -> None:
        """Close the bar and the dashboards, also after an error."""
        if self.progress is not None:
            self.progress.close()
        self.boards.finish()

    def _show(self, step: int, **figures: float) -> None:
        assert self.progress is not None
        self.progress.update(step, **figures)
