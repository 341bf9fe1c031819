"""Which figures follow from the rows of an evaluation?  Rates with intervals by checkpoint, and paired differences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from posttrain import metrics
from posttrain.config import EvaluateRun
from posttrain.evaluation.tasks import headline
from posttrain.types import Record, derive_seed

# The metrics compared between two checkpoints, item by item. `equal_length`: seq_rep_4 with both answers of an item cut
# to the shorter one.
COMPARED = {
    "math": ("accuracy", "last_number", "tokens"),
    "repetition": ("equal_length", "seq_rep_4", "seq_rep_4_first", "longest_repeat", "never_stops", "tokens"),
    "recall": ("accuracy",),
    "instructions": ("accuracy", "tokens"),
    "preferences": ("accuracy", "margin"),
    "envs": ("success", "failed", "return"),
}


def summarise(cfg: EvaluateRun, rows: list[Record], by_checkpoint: dict[str, list[Record]]) -> dict[str, Any]:
    """Return a checkpoint's part of results.json.

    {"math": {"gsm8k": {"accuracy": 0.7, "n": 200, "low": ..., "settings": ...}}, "recall": {"accuracy": ...}, ...}

    Args:
        rows: of the checkpoint.
        by_checkpoint: the rows of all checkpoints, for the comparison with the reference of `suites.preferences`.
    """
    by_suite: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for row in rows:
        by_suite.setdefault(row["suite"], {}).setdefault((row["setting"], row["part"]), []).append(row)
    summary: dict[str, Any] = {}
    for suite, by_part in by_suite.items():
        settings: dict[str, dict[str, list[Record]]] = {}
        for (setting, part), part_rows in by_part.items():
            settings.setdefault(setting, {})[part] = part_rows
        if suite == "envs":
            summary[suite] = {
                env: _with_settings(cfg, suite, {s: env_figures(by[env]) for s, by in settings.items()})
                for env in dict.fromkeys(part for _, part in by_part)
            }
        elif suite == "math":  # by source: different sources are never counted together
            sources: dict[str, dict[str, dict[str, list[Record]]]] = {}
            for setting, parts in settings.items():
                for part, part_rows in parts.items():
                    sources.setdefault(part_rows[0]["source"], {}).setdefault(setting, {})[part] = part_rows
            summary[suite] = {
                source: _with_settings(cfg, suite, {s: _math_figures(by) for s, by in by_setting.items()})
                for source, by_setting in sources.items()
            }
        elif suite == "recall":
            summary[suite] = _with_settings(cfg, suite, {s: _answer_figures(by[""]) for s, by in settings.items()})
        elif suite == "instructions":
            figures = {s: _instruction_figures(by[""]) for s, by in settings.items()}
            summary[suite] = _with_settings(cfg, suite, figures)
        elif suite == "repetition":
            figures = {s: _repetition_figures(cfg, by[""]) for s, by in settings.items()}
            summary[suite] = _with_settings(cfg, suite, figures)
        else:
            summary[suite] = _preference_figures(cfg, settings[""][""], by_checkpoint)
    return summary


def _with_settings(cfg: EvaluateRun, suite: str, settings: dict[str, Record]) -> Record:
    chosen = headline(cfg, suite)
    return settings[chosen] | {"setting": chosen, "settings": settings}


def _share(rows: Sequence[Record]) -> Record:
    right = sum(bool(row["accuracy"]) for row in rows)
    low, high = metrics.wilson(right, len(rows))
    return {"accuracy": right / len(rows), "n": len(rows), "low": low, "high": high}


def _answer_figures(rows: Sequence[Record]) -> Record:
    means = {metric: fmean(float(row[metric]) for row in rows) for metric in ("tokens", "never_stops")}
    return _share(rows) | means


def _instruction_figures(rows: Sequence[Record]) -> Record:
    """Return IFEval's strict and loose accuracies, and how many prompts were left out by which instruction."""
    unchecked = Counter(name for row in rows for names in row["left_out"].values() for name in set(names))
    figures = _answer_figures(rows) | {"loose_accuracy": fmean(bool(row["loose"]) for row in rows)}
    for name, column in (("instruction_accuracy", "followed"), ("loose_instruction_accuracy", "followed_loosely")):
        figures[name] = fmean(followed for row in rows for followed in row[column])
    left_out = sum(len(row["left_out"]) for row in rows)
    return figures | {"left_out": left_out, "not_checked": dict(sorted(unchecked.items()))}


def _math_figures(parts: dict[str, list[Record]]) -> Record:
    together = [row for rows in parts.values() for row in rows]
    total = _answer_figures(together)
    total |= {name: fmean(float(row[name]) for row in together) for name in ("boxed", "last_number")}
    return total | {"parts": {part: _answer_figures(rows) for part, rows in parts.items()}}


def _repetition_figures(cfg: EvaluateRun, rows: Sequence[Record]) -> Record:
    assert cfg.suites.repetition is not None
    finished = [not row["never_stops"] for row in rows]
    figures = metrics.repetition([row["ids"] for row in rows], finished, cfg.suites.repetition.equal_length)
    seed = derive_seed(cfg.seed, "bootstrap")
    interval = metrics.bootstrap_mean([row["seq_rep_4"] for row in rows], seed, cfg.bootstrap_samples)
    return figures | {"n": len(rows), "low": interval.low, "high": interval.high}


def _preference_figures(cfg: EvaluateRun, rows: Sequence[Record], by_checkpoint: dict[str, list[Record]]) -> Record:
    """Return the accuracy, and DPO's reward accuracy: how often log(pi / pi_ref) is higher for the chosen answer."""
    assert cfg.suites.preferences is not None
    figures = _share(rows) | {
        name: fmean(row[name] for row in rows) for name in ("chosen_logprob", "rejected_logprob", "margin")
    }
    reference = cfg.suites.preferences.reference
    if reference in by_checkpoint and reference != rows[0]["checkpoint"]:
        before = [row for row in by_checkpoint[reference] if row["suite"] == "preferences"]
        rewarded = [{"accuracy": row["margin"] > old["margin"]} for row, old in zip(rows, before, strict=True)]
        share = _share(rewarded)
        figures |= {"reward_accuracy": share["accuracy"], "reward_low": share["low"], "reward_high": share["high"]}
        figures["reference"] = reference
    return figures


def env_figures(rows: Sequence[Record]) -> Record:
    """Return the figures of the episodes of one environment, played by a model or a scripted policy."""
    from posttrain.starpo import Summary, aggregate  # loads torch, which --help does without

    won, levels = [bool(row["success"]) for row in rows], [row["level"] for row in rows]
    low, high = metrics.wilson_of_levels(won, levels)
    figures: Record = {"success": fmean(won), "low": low, "high": high}
    figures |= {"episodes": len(rows), "levels": len(set(levels))}
    means = aggregate([Summary.of_record(row) for row in rows])
    figures |= {
        "return": means["reward"],
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        "turns": means["turns"],
    }
    if "invalid_turns" in rows[0]:  # played by a model
        figures |= {
            "penalties": fmean(row["penalties"] for row in rows),
            "invalid_turns": means["invalid_turns"],
            "unfinished_turns": means["unfinished_turns"],
            "crashed": means["crashed"],
        }
    return figures


def compare(cfg: EvaluateRun, rows: dict[str, list[Record]]) -> list[Record]:
    """Return paired differences: of each checkpoint to the one before it and to the first.

    {"from": "phase1", "to": "phase2", "suite": "repetition", "part": "", "setting": "chat", "metric": "equal_length",
     "before": 0.21, "after": 0.11, "value": -0.1, "low": -0.13, "high": -0.07, "n": 100}
    In math, `part` is a source or a part of a source.
    """
    names = list(rows)
    pairs = list(dict.fromkeys([*itertools.pairwise(names), *((names[0], name) for name in names[1:])]))
    by_task: dict[str, dict[tuple[str, str, str], list[Record]]] = {name: {} for name in names}
    for name in names:
        for row in rows[name]:
            for part in dict.fromkeys((row["source"], row["part"]) if row["suite"] == "math" else (row["part"],)):
                by_task[name].setdefault((row["suite"], part, row["setting"]), []).append(row)
    seed, differences = derive_seed(cfg.seed, "bootstrap"), []
    for old, new in pairs:
        for (suite, part, setting), before in by_task[old].items():
            if (suite, part, setting) not in by_task[new]:  # endpoints do not get all tasks
                continue
            after = by_task[new][suite, part, setting]
            for metric in COMPARED[suite]:
                left, right = _values(metric, before, after)
                interval = metrics.paired_interval(left, right, seed, cfg.bootstrap_samples)
                where = {"from": old, "to": new, "suite": suite, "part": part, "setting": setting, "metric": metric}
                figures = {"before": fmean(left), "after": fmean(right), **interval._asdict(), "n": len(left)}
                differences.append(where | figures)
    return differences


def _values(metric: str, before: Sequence[Record], after: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return a metric of both checkpoints, item by item; for environments the mean of each level."""
    if metric == "equal_length":
        cut = metrics.at_equal_length([row["ids"] for row in before], [row["ids"] for row in after])
        return [metrics.seq_rep_n(ids) for ids in cut[0]], [metrics.seq_rep_n(ids) for ids in cut[1]]
    left, right = ([float(row[metric]) for row in rows] for rows in (before, after))
    if before[0]["suite"] == "envs":
        levels = [row["level"] for row in before]
        return metrics.means_of_levels(left, levels), metrics.means_of_levels(right, levels)
    return left, right
