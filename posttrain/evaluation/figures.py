"""What do the rows of an evaluation come to?  Shares with intervals for each checkpoint, and paired differences."""

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

# What is compared between two checkpoints, item by item. `equal_length` cuts each pair of answers to the shorter one.
COMPARED = {
    "math": ("accuracy", "last_number", "tokens"),
    "repetition": ("equal_length", "seq_rep_4", "seq_rep_4_first", "longest_repeat", "never_stops", "tokens"),
    "recall": ("accuracy",),
    "preferences": ("accuracy", "margin"),
    "envs": ("success", "failed", "return"),
}


def summarise(cfg: EvaluateRun, rows: list[Record], everybody: dict[str, list[Record]]) -> dict[str, Any]:
    """A checkpoint's part of results.json: {"math": {"accuracy": 0.7, "n": 200, "low": ..., "settings": ...}, ...}."""
    by_suite: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for row in rows:
        by_suite.setdefault(row["suite"], {}).setdefault((row["setting"], row["part"]), []).append(row)
    summary: dict[str, Any] = {}
    for suite, by_part in by_suite.items():
        settings: dict[str, Any] = {}
        for (setting, part), found in by_part.items():
            settings.setdefault(setting, {})[part] = found
        if suite == "envs":
            parts = {part for _, part in by_part}
            summary[suite] = {
                env: _with_settings(cfg, suite, {s: env_figures(by[env]) for s, by in settings.items()})
                for env in sorted(parts, key=[part for _, part in by_part].index)
            }
        elif suite == "math":  # by source: what is unlike is never counted together
            sources: dict[str, dict[str, dict[str, list[Record]]]] = {}
            for setting, parts in settings.items():
                for part, found in parts.items():
                    sources.setdefault(found[0]["source"], {}).setdefault(setting, {})[part] = found
            summary[suite] = {
                source: _with_settings(cfg, suite, {s: _math_figures(by) for s, by in by_setting.items()})
                for source, by_setting in sources.items()
            }
        elif suite == "recall":
            summary[suite] = _with_settings(cfg, suite, {s: _answer_figures(by[""]) for s, by in settings.items()})
        elif suite == "repetition":
            figures = {s: _repetition_figures(cfg, by[""]) for s, by in settings.items()}
            summary[suite] = _with_settings(cfg, suite, figures)
        else:
            summary[suite] = _preference_figures(cfg, settings[""][""], everybody)
    return summary


def _with_settings(cfg: EvaluateRun, suite: str, settings: dict[str, Record]) -> Record:
    chosen = headline(cfg, suite)
    return settings[chosen] | {"setting": chosen, "settings": settings}


def _share(rows: Sequence[Record], metric: str = "accuracy") -> Record:
    right = sum(bool(row[metric]) for row in rows)
    low, high = metrics.wilson(right, len(rows))
    return {metric: right / len(rows), "n": len(rows), "low": low, "high": high}


def _answer_figures(rows: Sequence[Record]) -> Record:
    means = {metric: fmean(float(row[metric]) for row in rows) for metric in ("tokens", "never_stops")}
    return _share(rows) | means


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


def _preference_figures(cfg: EvaluateRun, rows: Sequence[Record], everybody: dict[str, list[Record]]) -> Record:
    """Besides the accuracy: whose reward beta * log(pi / pi_ref) is higher, which needs no beta to compare."""
    assert cfg.suites.preferences is not None
    figures = _share(rows) | {
        name: fmean(row[name] for row in rows) for name in ("chosen_logprob", "rejected_logprob", "margin")
    }
    reference = cfg.suites.preferences.reference
    if reference in everybody and reference != rows[0]["checkpoint"]:
        before = [row for row in everybody[reference] if row["suite"] == "preferences"]
        rewarded = [{"accuracy": row["margin"] > old["margin"]} for row, old in zip(rows, before, strict=True)]
        share = _share(rewarded)
        figures |= {"reward_accuracy": share["accuracy"], "reward_low": share["low"], "reward_high": share["high"]}
        figures["reference"] = reference
    return figures


def env_figures(rows: Sequence[Record]) -> Record:
    from posttrain.starpo import Summary, aggregate  # loads torch, which --help does without

    won, levels = [bool(row["success"]) for row in rows], [row["level"] for row in rows]
    low, high = metrics.wilson_of_levels(won, levels)
    figures: Record = {"success": fmean(won), "low": low, "high": high}
    figures |= {"episodes": len(rows), "levels": len(set(levels))}
    found = aggregate([Summary.of_record(row) for row in rows])
    figures |= {
        "return": found["reward"],
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        "turns": found["turns"],
    }
    if "invalid_turns" in rows[0]:  # played by a model
        figures |= {
            "penalties": fmean(row["penalties"] for row in rows),
            "invalid_turns": found["invalid_turns"],
            "unfinished_turns": found["unfinished_turns"],
            "crashed": found["crashed"],
        }
    return figures


def compare(cfg: EvaluateRun, rows: dict[str, list[Record]]) -> list[Record]:
    """Paired differences, each checkpoint against the one before it and against the first.

    {"from": "phase1", "to": "phase2", "suite": "repetition", "part": "", "setting": "chat", "metric": "equal_length",
     "before": 0.21, "after": 0.11, "value": -0.1, "low": -0.13, "high": -0.07, "n": 100}
    In math, part is a source or one of the parts of a source.
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
            if (suite, part, setting) not in by_task[new]:  # an endpoint is not asked everything
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
    """One figure per item, from both checkpoints; one per level where levels are played several times."""
    if metric == "equal_length":
        cut = metrics.at_equal_length([row["ids"] for row in before], [row["ids"] for row in after])
        return [metrics.seq_rep_n(ids) for ids in cut[0]], [metrics.seq_rep_n(ids) for ids in cut[1]]
    left, right = ([float(row[metric]) for row in rows] for rows in (before, after))
    if before[0]["suite"] == "envs":
        levels = [row["level"] for row in before]
        return metrics.means_of_levels(left, levels), metrics.means_of_levels(right, levels)
    return left, right
