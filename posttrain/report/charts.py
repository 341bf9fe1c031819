"""How are numbers drawn without a library?  Interval bars and line charts, as SVG in the colours of page.css.

charts.js adds what moves: values under the pointer and zoom.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from posttrain.metrics import Interval
from posttrain.types import Record

Line = list[tuple[float, float]]  # (step, value), ...

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 12, 24
MANY = 30  # points from which on a line is drawn faintly, with its moving average on top
_SVG = '<svg class="bar" viewBox="{box}" preserveAspectRatio="none" aria-hidden="true">'


def bar(figure: Interval, colour: str) -> str:
    """A track from 0 to 100 % with the interval as a band and the value as a mark."""
    low, high, value = (100 * min(1.0, max(0.0, x)) for x in (figure.low, figure.high, figure.value))
    return (
        _SVG.format(box="-2 0 104 8") + '<rect x="0" y="3" width="100" height="2" rx="1" class="track"/>'
        f'<rect x="{low:.1f}" y="2" width="{max(0.8, high - low):.1f}" height="4" rx="2" fill="{colour}" opacity=".4"/>'
        f'<rect x="{value - 0.8:.1f}" y="0.5" width="1.6" height="7" rx=".8" fill="{colour}"/></svg>'
    )


def forest(figure: Interval, reach: float) -> str:
    """A difference and its interval on a scale from -reach to reach, zero in the middle."""
    low, high, value = (50 + 48 * x / reach for x in (figure.low, figure.high, figure.value))
    band = f'x="{low:.2f}" y="2" width="{max(0.8, high - low):.2f}" height="4" rx="2"'
    return (
        _SVG.format(box="0 0 100 8") + '<rect x="0" y="3.5" width="100" height="1" class="track"/>'
        f'<rect x="49.8" y="0" width=".4" height="8" class="zero"/><rect {band} class="flat" opacity=".45"/>'
        f'<rect x="{value - 0.6:.2f}" y="0.5" width="1.2" height="7" class="flat"/></svg>'
    )


def lines(title: str, series: dict[str, Line], alarms: Sequence[Record] = ()) -> str:
    """A line chart with its legend; a line of fewer than two points is left out, so is a chart without lines.

    What is drawn lies in an inner picture whose viewBox counts steps to the right and thousandths of the axis
    downwards, so that charts.js reads values from it and zooms by moving the viewBox. alarms: marked at their steps.
    """
    series = {label: line for label, line in series.items() if len(line) > 1}
    if not series:
        return ""
    xs = [x for line in series.values() for x, _ in line]
    ys = [y for line in series.values() for _, y in line]
    first, span, steps = min(xs), (max(xs) - min(xs)) or 1, ticks(min(ys), max(ys))
    low, high = steps[0], steps[-1]

    def at(point: tuple[float, float]) -> str:
        return f"{point[0]:g},{1000 * (high - point[1]) / (high - low):.1f}"

    drawn, legend = "", ""
    for alarm in alarms:
        words = html.escape(alarm["name"].replace("_", " "))
        drawn += f'<line class="alarm" x1="{alarm["step"]}" x2="{alarm["step"]}" y1="0" y2="1000"'
        drawn += f' data-alarm="{words}"><title>step {alarm["step"]}: {words}</title></line>'
    for number, (label, line) in enumerate(series.items()):
        look, line = f"l{number % 6}", thinned(line, 300)
        points = " ".join(map(at, line))
        if len(line) > MANY:
            drawn += f'<polyline points="{" ".join(map(at, smooth(line)))}" class="line {look}"/>'
        faint = " faint" if len(line) > MANY else ""
        drawn += f'<polyline points="{points}" class="line {look}{faint}" data-line="{number}"/>'
        legend += f'<span class="key {look}">{html.escape(label)} <b>{line[-1][1]:.3g}</b></span>'
    name = html.escape(title)
    plot = (
        f'<svg class="plot" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
        f' viewBox="{first:g} 0 {span:g} 1000" preserveAspectRatio="none">{drawn}</svg>'
    )
    scale = f'data-low="{low:g}" data-high="{high:g}"'
    return (
        f'<figure class="chart" {scale}><figcaption>{name}<output></output></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{name}">'
        f'{_frame(first, first + span, steps)}{plot}</svg><div class="legend">{legend}</div></figure>'
    )


def _frame(first: float, last: float, steps: Sequence[float]) -> str:
    """Grid lines with their values, and the first and last step below."""
    drawn, height = "", HEIGHT - TOP - BOTTOM
    for value in steps:
        y = TOP + height * (steps[-1] - value) / (steps[-1] - steps[0])
        drawn += f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        drawn += f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>'
    drawn += f'<text class="first" x="{LEFT}" y="{HEIGHT - 7}">step {first:g}</text>'
    return drawn + f'<text class="last" x="{WIDTH - RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{last:g}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers, evenly spaced, that enclose an interval."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * n, 12) for n in range(first, last + 1)]


def thinned(line: Line, most: int) -> Line:
    """Every n-th point and the last one."""
    stride = math.ceil(len(line) / most)
    return line[::stride] if (len(line) - 1) % stride == 0 else [*line[::stride], line[-1]]


def smooth(line: Line) -> Line:
    """Means over a centred window of a tenth of the line."""
    reach, values = max(1, len(line) // 20), [y for _, y in line]
    windows = (values[max(0, n - reach) : n + reach + 1] for n in range(len(line)))
    return [(x, sum(window) / len(window)) for (x, _), window in zip(line, windows, strict=True)]
