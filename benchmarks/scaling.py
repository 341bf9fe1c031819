"""How does the cost of an iteration grow with turns, conversations, the size of the model and its vocabulary?

Rollout and update of phase 3 on scripted lengths, one of the four varied at a time; the exponent is the slope of a line
through the points on two logarithmic scales.
    python benchmarks/scaling.py [--turns 2 4 8 16] [--plot scaling.png] [--json FILE]
    python benchmarks/scaling.py --redraw FILE --plot scaling.png    # from what --json has written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _measure
import iteration

from posttrain.report.tables import COLOURS

GROUP, LAYERS = 8, 4
PARTS = ("rollout", "update")


class Point(NamedTuple):
    """What is played, and by what: a Llama of four layers."""

    turns: int = 4
    conversations: int = 32
    width: int = 128
    vocabulary: int = 512


SWEEPS: dict[str, list[int]] = {
    "turns": [2, 4, 8, 16],
    "conversations": [16, 32, 64, 128],
    "width": [64, 128, 256, 512],
    "vocabulary": [512, 4096, 16384, 65536],
}


def shape(point: Point) -> dict[str, Any]:
    width = dict(hidden_size=point.width, intermediate_size=3 * point.width, num_hidden_layers=LAYERS)
    return _measure.TINY | width | dict(vocab_size=point.vocabulary, tie_word_embeddings=True)


def prepared(point: Point, new_tokens: int) -> tuple[Callable[[int], iteration.Iteration], int]:
    """Its iterations, and the parameters of its model."""
    model = _measure.model_of("llama", shape(point))
    cfg = iteration.config(point.conversations // GROUP, GROUP, point.turns, new_tokens)
    return iteration.ours(cfg, model, _measure.words(point.vocabulary)), model.num_parameters()


def exponent(xs: Sequence[float], seconds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The slope through the medians of each point's repeats, and the least and greatest slope of a single repeat."""

    def slope(ys: Sequence[float]) -> float:
        return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])

    single = [slope(repeat) for repeat in zip(*seconds, strict=True)]
    return slope([median(each) for each in seconds]), min(single), max(single)


def markdown(results: dict[str, Any]) -> str:
    points, fits = [], []
    for sweep in results["sweeps"]:
        for place, x in enumerate(sweep["xs"]):
            cells = [f"{median(sweep[part][place]):.2f}" for part in PARTS]
            points.append([sweep["axis"], f"{x:,}", *cells])
        cells = ["**{:.2f}** ({:.2f} to {:.2f})".format(*sweep["exponents"][part]) for part in PARTS]
        fits.append([sweep["axis"], f"{sweep['xs'][0]:,} to {sweep['xs'][-1]:,}", *cells])
    base = f"{results['new_tokens']} tokens a turn; unless varied: {results['base']}; medians of {results['repeats']}"
    return (
        f"{_measure.told(results)}\n{base}.\n\n{_measure.table(['', 'value', 'rollout s', 'update s'], points)}\n\n"
        f"{_measure.table(['cost grows with', 'from', 'rollout: exponent', 'update: exponent'], fits)}"
    )


def plot(results: dict[str, Any], file: Path) -> None:
    """One panel for each of the four: medians, and the fitted lines with their exponents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results["sweeps"]), figsize=(11.8, 3.2), sharey=True)
    for axis, sweep in zip(axes, results["sweeps"], strict=True):
        xs = np.array(sweep["xs"], dtype=float)
        for part, colour in zip(PARTS, COLOURS[1:], strict=False):
            middle = [median(each) for each in sweep[part]]
            slope = sweep["exponents"][part][0]
            level = np.mean(np.log(middle)) - slope * np.mean(np.log(xs))
            axis.plot(xs, middle, "o", color=colour, markersize=5)
            axis.plot(xs, np.exp(level) * xs**slope, color=colour, label=f"{part}: {slope:.2f}")
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(xs, [f"{x / 1e6:.1f}M" if x > 1e5 else f"{x:.0f}" for x in xs], fontsize=8)
        axis.xaxis.minorticks_off()
        axis.set_title(sweep["axis"], fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, title="exponent", title_fontsize=8)
    axes[0].set_ylabel("seconds", fontsize=9)
    told = "commit {commit:.7}, seed {seed}, {machine}, {threads} thread(s)".format(**results)
    figure.supxlabel(told, fontsize=7, color="0.4")
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = _measure.parser(__doc__)
    for axis, values in SWEEPS.items():
        parser.add_argument(
            f"--{axis}", type=int, nargs="+", default=values, help=f"otherwise {getattr(Point(), axis)}"
        )
    parser.add_argument("--new-tokens", type=int, default=16, help="sampled in a turn")
    parser.add_argument("--plot", type=Path, help="also draw it into this file")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="measure nothing; take the figures of this JSON")
    given = parser.parse_args()
    if given.redraw:
        if given.plot is None:
            parser.error("--redraw: name the file to draw into with --plot")
        return plot(json.loads(given.redraw.read_text(encoding="utf-8")), given.plot)
    if any(value % GROUP for value in given.conversations):
        parser.error(f"--conversations: groups have {GROUP} members")
    if any(len(getattr(given, axis)) < 2 for axis in SWEEPS):
        parser.error("a slope takes two values or more of each")
    _measure.threads()

    wanted = {axis: [Point()._replace(**{axis: value}) for value in getattr(given, axis)] for axis in SWEEPS}
    made = {point: prepared(point, given.new_tokens) for points in wanted.values() for point in points}
    found: dict[Point, list[iteration.Iteration]] = {point: [] for point in made}
    for step in range(1, given.repeats + 2):  # the first is not counted
        for point in sorted(made, reverse=step % 2 == 1):
            found[point].append(made[point][0](step))

    sweeps = []
    for axis, points in wanted.items():
        xs = [made[point][1] if axis == "width" else getattr(point, axis) for point in points]
        sweep: dict[str, Any] = {"axis": "parameters" if axis == "width" else axis, "xs": xs}
        sweep |= {part: [[getattr(each, part) for each in found[point][1:]] for point in points] for part in PARTS}
        sweeps.append(sweep | {"exponents": {part: exponent(xs, sweep[part]) for part in PARTS}})
    results = _measure.surroundings() | {
        "seed": iteration.config(1, GROUP, 1, given.new_tokens).seed,
        "repeats": given.repeats,
        "new_tokens": given.new_tokens,
        "base": ", ".join(f"{axis} {value}" for axis, value in Point()._asdict().items()),
        "sweeps": sweeps,
    }
    if given.plot:
        plot(results, given.plot)
    _measure.publish(results, markdown(results), given.json)


if __name__ == "__main__":
    main()
