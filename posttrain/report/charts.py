"""What does a line chart consist of?  Ticks, thinned lines and moving averages, which parts.html.j2 draws as SVG.

charts.js adds the values under the pointer and the zoom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from posttrain.types import Record

Line = list[tuple[float, float]]  # (step, value), ...

SIZES = {"WIDTH": 340, "HEIGHT": 190, "LEFT": 42, "RIGHT": 10, "TOP": 12, "BOTTOM": 24}  # of a chart and its margins
MANY = 30  # points from which on a line is drawn faintly, with its moving average on top


class Chart(NamedTuple):
    """A line chart: Chart("Loss", 0, 90, [0, 1, 2], [("training", [(0, 1.9), ...], None)], [], "What ...")."""

    title: str
    first: float  # step
    span: float  # steps
    ticks: list[float]  # of the axis of values
    lines: list[tuple[str, Line, Line | None]]  # label, line, moving average of a long one
    alarms: Sequence[Record]  # marked at their steps
    about: str  # a sentence: what the values are and which way is good

    def down(self, value: float) -> float:
        """Return how far below the top a value lies, as a share of the height."""
        return (self.ticks[-1] - value) / (self.ticks[-1] - self.ticks[0])

    def points(self, line: Line) -> str:
        """Return the points of a polyline: steps to the right, thousandths of the axis downwards."""
        return " ".join(f"{x:g},{1000 * self.down(y):.1f}" for x, y in line)


def chart(title: str, series: dict[str, Line], alarms: Sequence[Record] = (), about: str = "") -> Chart | None:
    """Return a chart of the lines with at least two points; None without any."""
    series = {label: line for label, line in series.items() if len(line) > 1}
    if not series:
        return None
    xs = [x for line in series.values() for x, _ in line]
    ys = [y for line in series.values() for _, y in line]
    thin = {label: thinned(line, 300) for label, line in series.items()}
    lines = [(label, line, smooth(line) if len(line) > MANY else None) for label, line in thin.items()]
    return Chart(title, min(xs), (max(xs) - min(xs)) or 1, ticks(min(ys), max(ys)), lines, alarms, about)


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers, evenly spaced, that enclose an interval."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * n, 12) for n in range(first, last + 1)]


def thinned(line: Line, most: int) -> Line:
    """Return every n-th point and the last one."""
    stride = math.ceil(len(line) / most)
    return line[::stride] if (len(line) - 1) % stride == 0 else [*line[::stride], line[-1]]


def smooth(line: Line) -> Line:
    """Return means over a centred window of a tenth of the line."""
    reach, values = max(1, len(line) // 20), [y for _, y in line]
    windows = (values[max(0, n - reach) : n + reach + 1] for n in range(len(line)))
    return [(x, sum(window) / len(window)) for (x, _), window in zip(line, windows, strict=True)]
