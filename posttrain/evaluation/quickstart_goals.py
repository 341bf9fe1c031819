"""Did the quickstart reach its goals?  Each goal with what was measured."""

from __future__ import annotations

from posttrain.report import Results, figure_of, percent, points, points_span, readable
from posttrain.types import Record

KEPT = ("math", "recall", "preferences")  # not trained in phase 3, and not to be forgotten there


def goals(results: Results) -> list[Record]:
    """Return the quickstart's goals with what was measured: [{"phase", "goal", "measured", "reached"}, ...].

    They compare the headline figures of the checkpoints base, phase1, phase2 and phase3, in math those of the embedded
    questions. A goal whose figures were not measured is left out.
    """
    entries = results["checkpoints"]
    base, one, two, three = (entries.get(name, {}) for name in ("base", "phase1", "phase2", "phase3"))
    sums = {name: entry["math"]["embedded"] for name, entry in entries.items() if "embedded" in entry.get("math", {})}
    rows: list[Record] = []

    def goal(phase: str, text: str, measured: str, reached: bool) -> None:
        rows.append({"phase": phase, "goal": text, "measured": measured, "reached": bool(reached)})

    def difference(old: str, new: str, suite: str, metric: str) -> Record | None:
        setting = entries[new][suite].get("setting", "")
        where = {"from": old, "to": new, "suite": suite, "part": "", "setting": setting, "metric": metric}
        return next((d for d in results["differences"] if where.items() <= d.items()), None)

    if {"base", "phase1"} <= sums.keys():
        gained = sums["phase1"]["accuracy"] - sums["base"]["accuracy"]
        parts = ", ".join(
            f"{part.replace('_', ' ')} {points(figures['accuracy'] - sums['base']['parts'][part]['accuracy'])}"
            for part, figures in sums["phase1"]["parts"].items()
        )
        goal("phase1", "math at least 30 points above base", f"{points(gained)} ({parts})", gained >= 0.30)
    if "recall" in base and "recall" in one:
        gained = one["recall"]["accuracy"] - base["recall"]["accuracy"]
        goal("phase1", "recall at least 50 points above base", points(gained), gained >= 0.50)
    if "preferences" in two:
        accuracy = two["preferences"]["accuracy"]
        goal("phase2", "ranks at least 75 % of held-out pairs right", percent(accuracy), accuracy >= 0.75)
    if "repetition" in one and "repetition" in two:
        cut = difference("phase1", "phase2", "repetition", "equal_length")
        if cut is not None:
            text = points_span(figure_of(cut, "value"))
            goal("phase2", "repeats less than phase 1 at equal length, interval below 0", text, cut["high"] < 0)
        ratio = two["repetition"]["tokens"] / max(one["repetition"]["tokens"], 1e-9)
        goal("phase2", "answers at most 20 % shorter", f"{round(100 * (ratio - 1)):+d} %", ratio >= 0.8)
    if {"phase1", "phase2"} <= sums.keys():
        gained = sums["phase2"]["accuracy"] - sums["phase1"]["accuracy"]
        goal("phase2", "math at most 5 points lower", points(gained), gained >= -0.05)
    for env, after in three.get("envs", {}).items():
        before = two.get("envs", {}).get(env)
        if before is None:
            continue
        change = f"{percent(before['success'])} to {percent(after['success'])}"
        apart = f"before up to {100 * before['high']:.0f} %, after from {100 * after['low']:.0f} %"
        if env == "frozen_lake":
            reached = before["success"] < 0.45 and after["success"] >= 0.80
            goal("phase3", "Frozen lake to at least 80 % from less than 45 %", change, reached)
            falls = [entry["failures"].get("hole", 0) / entry["episodes"] for entry in (before, after)]
            text = f"{percent(falls[0])} to {percent(falls[1])} of episodes"
            goal("phase3", "Frozen lake: half the deaths in holes or fewer", text, 0 < falls[0] >= 2 * falls[1])
            scripted = {n: p for n, p in results["baselines"][env].items() if n not in ("expert", "optimum")}
            best = max(scripted, key=lambda name: scripted[name]["success"])
            text = f"{percent(after['success'])} against {percent(scripted[best]['success'])} ({best})"
            goal("phase3", "Frozen lake: beats every demonstrator", text, after["success"] > scripted[best]["success"])
        if env == "sokoban":
            goal("phase3", "Sokoban at least doubled", change, after["success"] >= 2 * before["success"] > 0)
            goal("phase3", "Sokoban to at least 45 %", change, after["success"] >= 0.45)
        title = f"{readable(env)}: intervals before and after do not overlap"
        goal("phase3", title, apart, after["low"] > before["high"])
    kept = {suite: _accuracy(three, suite) / _accuracy(two, suite) for suite in KEPT if _accuracy(two, suite)}
    if three and kept:
        average = sum(kept.values()) / len(kept)
        each = ", ".join(f"{suite} {percent(share)}" for suite, share in kept.items())
        names = ", ".join(kept)
        goal("phase3", f"{names}: at least 97 % of phase 2's, on average", percent(average), average >= 0.97)
        goal("phase3", f"{names}: at least 92 % of phase 2's, each", each, min(kept.values()) >= 0.92)
    both = "repetition" in two and "repetition" in three
    more = difference("phase2", "phase3", "repetition", "equal_length") if both else None
    if more is not None:
        text = points_span(figure_of(more, "value"))
        goal("phase3", "repeats no more than phase 2 at equal length, interval not above 0", text, more["low"] <= 0)
    return rows


def _accuracy(entry: Record, suite: str) -> float:
    """Return the headline accuracy; 0 where it was not measured."""
    figures = entry.get(suite, {})
    return figures.get("embedded", figures).get("accuracy", 0.0)
