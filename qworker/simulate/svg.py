"""Plots as inline SVG, without a library: bars, and lines over linear axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#6b7280", "#dc2626", "#0891b2")


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``dots`` marks its points."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def lines(curves: Sequence[Line], *, x: str, y: str, steps: bool = False) -> str:
    """Curves over common axes that begin at 0 for y."""
    points = [point for curve in curves for point in curve.points]
    low, high = min((p[0] for p in points), default=0.0), max((p[0] for p in points), default=1.0)
    xs, ys = _Scale(low, high), _Scale(0.0, max((p[1] for p in points), default=1.0))
    parts = [_axes(xs, ys, x, y)]
    for i, curve in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        parts.append(
            f'<path d="{_path(curve.points, xs, ys, steps=steps)}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        )
        if curve.dots:
            parts += [
                f'<circle cx="{xs.x(a):.1f}" cy="{ys.y(b):.1f}" r="3.5" fill="{color}"/>' for a, b in curve.points
            ]
    parts += _legend([curve.name for curve in curves])
    return _svg("".join(parts), y)


def bars(values: Sequence[tuple[str, float]], *, y: str) -> str:
    """One bar a name."""
    ys = _Scale(0.0, max((value for _, value in values), default=1.0))
    parts = [_grid(ys), _title(y)]
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    for i, (name, value) in enumerate(values):
        left, top = LEFT + room * (i + 0.15), ys.y(value)
        middle, color = left + room * 0.35, COLORS[i % len(COLORS)]
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{room * 0.7:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
            f'fill="{color}"/>'
            f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle">{short(value)}</text>'
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg("".join(parts), y)


def short(value: float) -> str:
    """A number in at most six characters or so."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor * 10:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.4g}"


class _Scale:
    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high if high > low else low + 1.0

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM - 8)

    def ticks(self) -> list[float]:
        rough = (self.high - self.low) / 5
        power = 10.0 ** floor(log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first = ceil(self.low / step)
        return [step * i for i in range(first, floor(self.high / step) + 1)]


def _axes(xs: _Scale, ys: _Scale, x: str, y: str) -> str:
    marks = "".join(
        f'<text x="{xs.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        for tick in xs.ticks()
    )
    name = f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    return _grid(ys) + marks + name + _title(y)


def _grid(ys: _Scale) -> str:
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{ys.y(tick):.1f}" y2="{ys.y(tick):.1f}" stroke="#8884"/>'
        f'<text x="{LEFT - 6}" y="{ys.y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        for tick in ys.ticks()
    )


def _title(y: str) -> str:
    return f'<text x="{LEFT}" y="{TOP - 3}">{escape(y)}</text>'


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    for i, name in enumerate(names):
        top = TOP + 12 + 15 * i
        parts.append(
            f'<rect x="{LEFT + 10}" y="{top - 8}" width="9" height="9" fill="{COLORS[i % len(COLORS)]}"/>'
            f'<text x="{LEFT + 24}" y="{top}">{escape(name)}</text>'
        )
    return parts


def _path(points: Sequence[tuple[float, float]], xs: _Scale, ys: _Scale, *, steps: bool) -> str:
    out: list[str] = []
    for a, b in points:
        if not out:
            out.append(f"M{xs.x(a):.1f},{ys.y(b):.1f}")
        elif steps:
            out.append(f"H{xs.x(a):.1f}V{ys.y(b):.1f}")
        else:
            out.append(f"L{xs.x(a):.1f},{ys.y(b):.1f}")
    return "".join(out)


def _svg(body: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">{body}</svg>'
