"""Draws a `Curve` as inline SVG: dots for measurements, ticks for failures, a step line for the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from markupsafe import Markup, escape

from kronsched.report.curves import Curve

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44
T = TypeVar("T")
MAX_DOTS = 1500
"""More dots than this are thinned evenly; the best-so-far line always keeps every step."""


def draw(curve: Curve) -> Markup:
    """The figure as safe markup; a line of text when nothing was measured."""
    if not curve.measured:
        return Markup("<p>No candidate was measured successfully.</p>")
    ys = [y for _, y in curve.measured] + ([curve.floor_us] if curve.floor_us else [])
    xs = [x for x, _ in curve.measured] + list(curve.failed)
    x_axis = _Axis(0.0, max(xs), LEFT, WIDTH - RIGHT, log=False)
    log = max(ys) > 10 * min(ys)
    low, high = (min(ys) / 1.2, max(ys) * 1.2) if log else (0.0, max(ys) * 1.05)
    y_axis = _Axis(low, high, HEIGHT - BOTTOM, TOP, log=log)
    parts = [_grid(x_axis, y_axis, curve.x_label)]
    if curve.floor_us:
        y = y_axis.at(curve.floor_us)
        parts.append(f'<line class="floor" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="floor" x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">roofline</text>')
    base = HEIGHT - BOTTOM
    parts += [f'<path class="failed" d="M{x_axis.at(x):.1f} {base}v-7"/>' for x in _thin(curve.failed)]
    parts += [f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.2"/>' for x, y in _thin(curve.measured)]
    parts.append(f'<path class="best" d="{_steps(curve, x_axis, y_axis)}"/>')
    title = escape(f"Best time so far against {curve.x_label}")
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>')  # numbers only


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self.low, self.high, self.start, self.end, self.log = low, max(high, low + 1e-12), start, end, log

    def at(self, value: float) -> float:
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [m * 10.0**d for d in decades for m in (1, 2, 5)]
            found = found if len(found) <= 15 else [10.0**d for d in decades[:: len(decades) // 10 + 1]]
            return [v for v in found if self.low <= v <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(step * m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> str:
    base, parts = HEIGHT - BOTTOM, []
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_axis.ticks():
        parts.append(f'<text x="{x_axis.at(value):.1f}" y="{base + 16}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text transform="translate(14 {(TOP + base) / 2:.0f}) rotate(-90)" text-anchor="middle">µs a call</text>')
    return "".join(parts)


def _steps(curve: Curve, x_axis: _Axis, y_axis: _Axis) -> str:
    (x, y), *rest = curve.best
    return f"M{x_axis.at(x):.1f} {y_axis.at(y):.1f}" + "".join(f"H{x_axis.at(x):.1f}V{y_axis.at(y):.1f}" for x, y in rest)


def _thin(points: Sequence[T]) -> list[T]:
    if len(points) <= MAX_DOTS:
        return list(points)
    return [points[i * len(points) // MAX_DOTS] for i in range(MAX_DOTS)]
