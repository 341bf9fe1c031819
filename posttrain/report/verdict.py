"""Is one model better than another?  Better, worse or cannot tell, by the items that both answered.

report.html and comparison.html compare every common figure of the headline table on common items. The intervals are
paired and hold simultaneously at 95 % (Bonferroni), also for few items: an interval excludes zero only if an exact test
rejects zero (`metrics.paired_interval`). If it includes zero, the page says how many items would show a difference of
this size, or of 5 points if both are equal: a normal approximation with 80 % power. A change that is shown as 0.0 is
neither better nor worse.

A figure of several kinds of problems can hide a change of one kind, success can hide fewer failures, and accuracy a
smaller margin; under another sampling setting there may be a change. So if the verdict on the whole is “cannot tell”,
the parts that changed are named, each at 95 % separately.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from posttrain import metrics
from posttrain.metrics import Interval
from posttrain.report.tables import Column, Results, columns, from_to, less_is_better, points_span, setting_of
from posttrain.types import Record, UserError, derive_seed

POWER = 0.8
UNSEEN = 0.05  # the difference to look for if none was seen
DECIDES = ("max_new_tokens", "max_completion_length", "max_context", "context", "context_turns", "protocol")
MARGIN = "margin"  # of preferences, in nats
MOST_EXAMPLES = 4  # of a figure
ROUNDS = 10_000  # of the random subsets: simultaneous intervals have thin tails


Pairs = list[tuple[Record, Record]]  # rows of two models on common items


class Model(NamedTuple):
    """A checkpoint of an evaluated run: Model("runs/a", "seed1:phase3", "phase3", results, rows)."""

    folder: Path
    title: str
    checkpoint: str
    results: Results
    rows: Sequence[Record]


class Part(NamedTuple):
    """A kind of item within a figure, another sampling setting, or another side: failures, equal length, margin.

    Part("unseen operands", (0.45, 0.375), Interval(-0.075, -0.118, -0.031), "accuracy")
    """

    title: str
    values: tuple[float, float]
    change: Interval
    metric: str

    @property
    def with_values(self) -> str:
        """Return `unseen operands (45 % → 38 %)`."""
        before, after = self.values
        if self.metric == MARGIN:
            digits = 1 if f"{before:.1f}" != f"{after:.1f}" else 2
            return f"{self.title} ({before:.{digits}f} → {after:.{digits}f} nats)"
        return f"{self.title} ({from_to(before, after)})"

    @property
    def with_change(self) -> str:
        """Return `unseen operands -7.5 (-11.8 to -3.1)`."""
        if self.metric == MARGIN:
            value, low, high = (f"{each:+.1f}" for each in self.change)
            return f"{self.title} {value} ({low} to {high}) nats"
        return f"{self.title} {points_span(self.change)}"


class Comparison(NamedTuple):
    """One figure of two models: how `after` differs from `before` on n common items.

    needed: items that would show a difference of this size, or of UNSEEN if both are equal; 0 if every item is equal.
    examples: the pairs of rows that differ most. parts: the change by kind of item, if there are several kinds, of the
    other sides, and under the other sampling settings.
    """

    column: Column
    values: tuple[Interval, Interval]
    change: Interval
    n: int
    needed: int
    examples: list[tuple[Record, Record]]
    parts: list[Part]

    @property
    def verdict(self) -> str:
        """Return better, worse or cannot tell; if only parts changed, `better in part`, `worse in part` or mixed."""
        if (whole := _kind(self.change, self.column.metric)) != "cannot tell":
            return whole
        kinds = {_kind(part.change, part.metric) for part in self.parts} - {"cannot tell"}
        return "mixed" if len(kinds) > 1 else f"{kinds.pop()} in part" if kinds else whole

    @property
    def changed_parts(self) -> dict[str, list[Part]]:
        """Return the parts that are better and those that are worse, if the whole cannot tell."""
        if _kind(self.change, self.column.metric) != "cannot tell":
            return {"better": [], "worse": []}
        kinds = [(part, _kind(part.change, part.metric)) for part in self.parts]
        return {word: [part for part, kind in kinds if kind == word] for word in ("better", "worse")}


def _kind(change: Interval, metric: str) -> str:
    shown_as_zero = round(change.value if metric == MARGIN else 100 * change.value, 1) == 0  # of nats, or points
    if change.low <= 0 <= change.high or shown_as_zero:
        return "cannot tell"
    return "better" if (change.value > 0) != less_is_better(metric) else "worse"


def compare_models(before: Model, after: Model) -> list[Comparison]:
    """Compare every figure of both models on common items with equal sampling; UserError without any."""
    if comparisons := _in_common(before, after, MOST_EXAMPLES):
        return comparisons
    raise UserError(
        f"{before.title} and {after.title} have no figure in common that was measured on the same prompts and"
        " levels with the same sampling. Evaluate both with evaluate_model.py and the same suites, settings and seed."
    )


def steps(
    folder: Path, results: Results, rows: Sequence[Record], merged: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[tuple[str, str], list[Comparison]]:
    """Compare each checkpoint of a run with the one before it: {("phase1", "phase2"): [...], ...}.

    merged: as `training_log.merged_of` returns it. These are compared with the models that they were merged of, and the
    others with the last one before them that was not merged.
    """
    models = {name: Model(folder, name, name, results, rows) for name in results["checkpoints"]}
    trained = [name for name in models if name not in merged]
    before = {new: [old] for old, new in itertools.pairwise(trained)} | dict(merged)
    return {(old, new): _in_common(models[old], models[new], 0) for new in models for old in before.get(new, ())}


def _in_common(before: Model, after: Model, most_examples: int) -> list[Comparison]:
    columns_after = {(c.suite, c.part): c for c in columns(after.results)}
    shared = [
        (c, columns_after[c.suite, c.part]) for c in columns(before.results) if (c.suite, c.part) in columns_after
    ]
    same = [c for c, d in shared if c.setting == d.setting and _conditions(before, c) == _conditions(after, c)]
    common = [(column, pairs) for column in same if (pairs := common_rows(before, after, column))]
    return [
        compare_rows(column, pairs, 0.025 / len(common), most_examples, _other_settings(before, after, column))
        for column, pairs in common
    ]


def not_compared(before: Model, after: Model, comparisons: Sequence[Comparison]) -> list[str]:
    """Return titles of the figures that both have, but on other items or with other sampling."""
    theirs = {(c.suite, c.part) for c in columns(after.results)} - {
        (each.column.suite, each.column.part) for each in comparisons
    }
    return [column.title for column in columns(before.results) if (column.suite, column.part) in theirs]


def overall(comparisons: Sequence[Comparison]) -> tuple[str, str]:
    """Return a verdict, as `Comparison.verdict` does, and a sentence with the figures."""
    names: dict[str, list[str]] = {
        kind: [c.column.title for c in comparisons if c.verdict == kind] for kind in ("better", "worse", "cannot tell")
    }
    for each in comparisons:
        for kind, parts in each.changed_parts.items():
            names[kind] += [f"{each.column.title}: {part.title}" for part in parts]
    if names["better"] and names["worse"]:
        word = "mixed"
    else:
        word = next((kind for kind in ("better", "worse") if names[kind]), "cannot tell")
        word += "" if any(each.verdict == word for each in comparisons) else " in part"
    return word, "; ".join(f"{kind} in {', '.join(titles)}" for kind, titles in names.items() if titles)


def _conditions(model: Model, column: Column) -> list[Any]:
    """Return the settings, besides model and item, that influence an answer or an episode."""
    config = model.results["config"]
    suite = config["suites"][column.suite]
    setting = [each for each in config["settings"] if each["name"] == column.setting]
    options = [each["options"] for each in suite.get("envs", []) if (each["label"] or each["name"]) == column.part]
    return [setting, options, [suite.get(key) for key in DECIDES]]


def common_rows(before: Model, after: Model, column: Column) -> Pairs:
    """Return the rows of both models on common items, without crashed ones."""
    old, new = (_items(model, column) for model in (before, after))
    return [(old[item], new[item]) for item in old if item in new]


def _items(model: Model, column: Column) -> dict[str, Record]:
    """Return item -> row, for a figure under its setting."""
    rows = {}
    for row in model.rows:
        part = row["source"] if column.suite == "math" else row["part"]
        where = (row["checkpoint"], row["suite"], part, row["setting"])
        if where == (model.checkpoint, column.suite, column.part, column.setting) and not row.get("crashed"):
            prompt = row.get("messages", [])[:2] if column.suite == "envs" else row.get("messages")
            facts = [row["index"], row["part"], row.get("seed"), row.get("level"), prompt, row.get("chosen")]
            rows[json.dumps(facts)] = row
    return rows


def _other_settings(before: Model, after: Model, column: Column) -> dict[str, Pairs]:
    """Return the rows of both models on common items under each other sampling setting of the figure's suite."""
    names = [each["name"] for each in before.results["config"]["settings"] if each["name"] != column.setting]
    others = [replace(column, setting=name) for name in names]
    same = [each for each in others if _conditions(before, each) == _conditions(after, each)]
    return {each.setting: pairs for each in same if (pairs := common_rows(before, after, each))}


def compare_rows(
    column: Column, pairs: Pairs, tail: float, most: int, others: Mapping[str, Pairs] = MappingProxyType({})
) -> Comparison:
    """Compare two models by a figure of their rows.

    Args:
        column: the figure.
        pairs: rows of both models on common items.
        tail: chance in each tail of the interval.
        most: examples.
        others: rows under the other sampling settings.
    """
    differences = [float(new[column.metric]) - float(old[column.metric]) for old, new in pairs]
    old, new = _values(column.suite, pairs, column.metric)
    seed = derive_seed("comparison", column.suite, column.part)
    change = metrics.paired_interval(old, new, seed, ROUNDS, tail)
    return Comparison(
        column=column,
        values=(_figure(column, old), _figure(column, new)),
        change=change,
        n=len(old),
        needed=_needed([b - a for a, b in zip(old, new, strict=True)], change.value, tail),
        examples=_examples(pairs, differences, most),
        parts=_parts(column, pairs, others, seed),
    )


def _values(suite: str, pairs: Pairs, metric: str) -> tuple[list[float], list[float]]:
    """Return a metric of both models; a level of an environment counts once, however often it is played."""
    old, new = ([float(pair[side][metric]) for pair in pairs] for side in (0, 1))
    if suite != "envs":
        return old, new
    levels = [pair[0].get("level", number) for number, pair in enumerate(pairs)]
    return metrics.means_of_levels(old, levels), metrics.means_of_levels(new, levels)


def _parts(column: Column, pairs: Pairs, others: Mapping[str, Pairs], seed: int) -> list[Part]:
    """Return the figure by kind of item if there are several kinds, its other sides, and its other settings."""
    by_kind: dict[str, Pairs] = {}
    for pair in pairs:
        by_kind.setdefault(pair[0].get("part", ""), []).append(pair)
    parts = [(kind.replace("_", " "), rows) for kind, rows in by_kind.items() if len(by_kind) > 1]
    settings = [(setting_of(name), rows) for name, rows in others.items()]
    kinds, asides = (
        [_part(title, column.metric, _values(column.suite, rows, column.metric), seed) for title, rows in titled]
        for titled in (parts, settings)
    )
    return kinds + _other_sides(column, pairs, seed) + asides


def _part(title: str, metric: str, values: tuple[list[float], list[float]], seed: int) -> Part:
    before, after = values
    return Part(title, (fmean(before), fmean(after)), metrics.paired_interval(before, after, seed, ROUNDS), metric)


def _other_sides(column: Column, pairs: Pairs, seed: int) -> list[Part]:
    """Return how often episodes ended in a failure, repetition at equal length, the margin, if the rows hold them."""
    rows = [row for pair in pairs for row in pair]
    if column.suite == "envs" and all("failed" in row for row in rows):
        if all(bool(row["failed"]) != bool(row[column.metric]) for row in rows):
            return []  # whatever is not solved has failed: the same figure again
        return [_part("ended in a failure", "failed", _values(column.suite, pairs, "failed"), seed)]
    if column.suite == "repetition" and all("ids" in row for row in rows):
        cut = metrics.at_equal_length([old["ids"] for old, _ in pairs], [new["ids"] for _, new in pairs])
        before, after = ([metrics.seq_rep_n(ids) for ids in side] for side in cut)
        return [_part("at equal length", "equal_length", (before, after), seed)]
    if column.suite == "preferences" and all(MARGIN in row for row in rows):
        return [_part("log-prob margin", MARGIN, _values(column.suite, pairs, MARGIN), seed)]
    return []


def _needed(differences: Sequence[float], value: float, tail: float) -> int:
    """Return how many items show this difference with power POWER, by Connor's formula for McNemar's test (1987).

    For means: of the sign-flip test. `min(changed) / aim`: an exact test has steps.
    """
    n, changed = len(differences), [abs(each) for each in differences if each]
    if not changed:
        return 0
    aim, square = abs(value) or UNSEEN, math.fsum(each * each for each in changed) / n
    unsure, sure = NormalDist().inv_cdf(1 - tail), NormalDist().inv_cdf(POWER)
    reach = unsure * math.sqrt(square) + sure * math.sqrt(max(0.0, square - aim * aim))
    items = (reach / aim) ** 2 + min(changed) / aim
    # with fewer changes no test rejects, even if all have one sign
    least = n / len(changed) * math.ceil(-math.log2(tail))
    return max(math.ceil(items), math.ceil(least), n + 1 if value else 0)


def _figure(column: Column, values: Sequence[float]) -> Interval:
    """Return a model's figure on the common items, with its interval as in the headline table."""
    if column.metric == "seq_rep_4":
        return metrics.bootstrap_mean(values, derive_seed("comparison", column.suite))
    return Interval(fmean(values), *metrics.wilson(sum(values), len(values)))


def _examples(
    pairs: Sequence[tuple[Record, Record]], differences: Sequence[float], most: int
) -> list[tuple[Record, Record]]:
    """Return the pairs that differ most, half of each sign if possible; of equal ones the first."""
    order = sorted(range(len(pairs)), key=lambda number: (-abs(differences[number]), number))
    up = [number for number in order if differences[number] > 0]
    down = [number for number in order if differences[number] < 0]
    chosen = up[: max(most // 2, most - len(down))] + down[: max(most // 2, most - len(up))]
    return [pairs[number] for number in chosen]
