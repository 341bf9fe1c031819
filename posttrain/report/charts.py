"""How are numbers drawn without a library?  Interval bars and line charts, as SVG in the colours of page.css."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from posttrain.report.tables import Figure

Line = list[tuple[float, float]]  # (step, value), ...

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 12, 24
MANY = 30  # points from which on a line is drawn faintly, with its moving average on top
_SVG = '<svg class="bar" viewBox="{box}" preserveAspectRatio="none" aria-hidden="true">'


def bar(figure: Figure, colour: str) -> str:
    """A track from 0 to 100 % with the interval as a band and the value as a mark."""
    low, high, value = (100 * min(1.0, max(0.0, x)) for x in (figure.low, figure.high, figure.value))
    return (
        _SVG.format(box="-2 0 104 8") + '<rect x="0" y="3" width="100" height="2" rx="1" class="track"/>'
        f'<rect x="{low:.1f}" y="2" width="{max(0.8, high - low):.1f}" height="4" rx="2" fill="{colour}" opacity=".4"/>'
        f'<rect x="{value - 0.8:.1f}" y="0.5" width="1.6" height="7" rx=".8" fill="{colour}"/></svg>'
    )


def forest(figure: Figure, reach: float, kind: str) -> str:
    """A difference and its interval on a scale from -reach to reach, zero in the middle."""
    low, high, value = (50 + 48 * x / reach for x in (figure.low, figure.high, figure.value))
    band = f'x="{low:.2f}" y="2" width="{max(0.8, high - low):.2f}" height="4" rx="2"'
    return (
        _SVG.format(box="0 0 100 8") + '<rect x="0" y="3.5" width="100" height="1" class="track"/>'
        f'<rect x="49.8" y="0" width=".4" height="8" class="zero"/><rect {band} class="{kind}" opacity=".45"/>'
        f'<rect x="{value - 0.6:.2f}" y="0.5" width="1.2" height="7" class="{kind}"/></svg>'
    )


def lines(title: str, series: dict[str, Line]) -> str:
    """A small line chart with its legend; a line of fewer than two points is left out, so is a chart without lines."""
    series = {label: line for label, line in series.items() if len(line) > 1}
    if not series:
        return ""
    xs = [x for line in series.values() for x, _ in line]
    ys = [y for line in series.values() for _, y in line]
    steps = ticks(min(ys), max(ys))

    def at(x: float, y: float) -> str:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        up = (y - steps[0]) / (steps[-1] - steps[0])
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * across:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - up):.1f}"

    drawn = _frame(min(xs), max(xs), [(step, float(at(min(xs), step).split(",")[1])) for step in steps])
    legend = ""
    for number, (label, line) in enumerate(series.items()):
        look, line = f"l{number % 4}", thinned(line, 300)
        if len(line) > MANY:
            drawn += f'<polyline points="{" ".join(at(*point) for point in line)}" class="line {look}" opacity=".28"/>'
            line = smooth(line)
        x, y = at(*line[-1]).split(",")
        drawn += f'<polyline points="{" ".join(at(*point) for point in line)}" class="line {look}"/>'
        drawn += f'<circle cx="{x}" cy="{y}" r="2.6" class="dot {look}"/>'
        legend += f'<span class="key {look}">{html.escape(label)} <b>{line[-1][1]:.3g}</b></span>'
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">{drawn}</svg><div class="legend">{legend}</div></figure>'
    )


def _frame(first: float, last: float, steps: Sequence[tuple[float, float]]) -> str:
    """Grid lines with their values at (value, height), and the first and last step below."""
    drawn = ""
    for value, y in steps:
        drawn += f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
        drawn += f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>'
    drawn += f'<text x="{LEFT}" y="{HEIGHT - 7}">step {first:g}</text>'
    return drawn + f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{last:g}</text>'


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
