"""Small vector pictures for reports: lines, steps and bars as SVG text, without any library.

Colours come from CSS variables of the page with fallbacks, so that one picture suits light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44
PALETTE = ("#2f6fde", "#d9622b", "#1f9d6b", "#9a4fd1", "#c9a11a", "#d4476f", "#4aa3b5", "#7d7d7d")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in order of x; `step` draws it as a staircase, `dots` marks the points."""

    name: str
    points: Sequence[tuple[float, float]]
    step: bool = False
    dots: bool = False


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    level: tuple[float, str] | None = None,
) -> str:
    """A line chart. `marks` are vertical rules with a label, `level` a horizontal one."""
    kept = [Series(s.name, [p for p in s.points if _drawable(p, log_x)], s.step, s.dots) for s in series]
    points = [p for s in kept for p in s.points]
    if not points:
        return _frame(title, [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>'])
    xs = [x for x, _ in points] + [x for x, _ in marks if not log_x or x > 0]
    low_x, high_x = min(xs), max(xs)
    ys = [y for _, y in points] + ([level[0]] if level else [])
    low_y, high_y = y_range or (min(0.0, *ys), max(ys) * 1.05 or 1.0)
    scale = _Scale(low_x, high_x, low_y, high_y, log_x)
    parts = _axes(scale, x_label, y_label)
    for at, label in marks:
        x = scale.x(at)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="rule"/>')
        parts.append(f'<text x="{x + 3:.1f}" y="{TOP + 10}" class="small">{escape(label)}</text>')
    if level is not None:
        y = scale.y(level[0])
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{y - 3:.1f}" class="small" text-anchor="end">{escape(level[1])}</text>'
        )
    for k, s in enumerate(kept):
        parts += _line(scale, s, PALETTE[k % len(PALETTE)])
    return _frame(title, parts + _legend([s.name for s in kept]))


def bars(title: str, y_label: str, values: Sequence[tuple[str, float]], *, percent: bool = False) -> str:
    """A bar for each named value (at most 24 are drawn)."""
    values = list(values)[:24]
    if not values:
        return _frame(title, [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>'])
    top = 1.0 if percent and max(v for _, v in values) > 0.5 else max(v for _, v in values) * 1.1 or 1.0
    scale = _Scale(0.0, float(len(values)), 0.0, top, False)
    parts = _axes(scale, "", y_label, x_ticks=False)
    width = (WIDTH - LEFT - RIGHT) / len(values)
    for k, (name, value) in enumerate(values):
        x, y = LEFT + k * width + width * 0.15, scale.y(value)
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.7:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            f'fill="{PALETTE[0]}"><title>{escape(name)}: {value:.4g}</title></rect>'
        )
        middle = x + width * 0.35
        shown = f"{100 * value:.0f} %" if percent else f"{value:.3g}"
        parts.append(f'<text x="{middle:.1f}" y="{y - 4:.1f}" class="small" text-anchor="middle">{shown}</text>')
        parts.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" class="small" text-anchor="middle">'
            f"{escape(name[:16])}</text>"
        )
    return _frame(title, parts)


def cdf_points(values: Sequence[float], most: int = 240) -> list[tuple[float, float]]:
    """(value, share of values up to it), thinned to about `most` points; the extremes are kept."""
    ordered = sorted(v for v in values if math.isfinite(v))
    count = len(values)
    if not ordered:
        return []
    picks = sorted({round(k * (len(ordered) - 1) / max(1, most - 1)) for k in range(most)})
    return [(ordered[k], (k + 1) / count) for k in picks]


class _Scale:
    """Data to picture coordinates."""

    def __init__(self, low_x: float, high_x: float, low_y: float, high_y: float, log_x: bool) -> None:
        self.log_x = log_x
        if log_x:
            low_x, high_x = math.log10(low_x), math.log10(high_x)
        self.low_x, self.span_x = low_x, (high_x - low_x) or 1.0
        self.low_y, self.span_y = low_y, (high_y - low_y) or 1.0

    def x(self, value: float) -> float:
        place = math.log10(value) if self.log_x else value
        return LEFT + (place - self.low_x) / self.span_x * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = min(1.2, max(-0.2, (value - self.low_y) / self.span_y))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        high = self.low_x + self.span_x
        if not self.log_x:
            return ticks(self.low_x, high)
        if self.span_x < 1.0:
            return [p for p in ticks(10.0**self.low_x, 10.0**high) if p > 0]
        decades = range(math.floor(self.low_x), math.ceil(high) + 1)
        steps = (1, 2, 5) if self.span_x < 2 else (1,)
        places = [m * 10.0**d for d in decades for m in steps]
        return [p for p in places if self.low_x - 1e-9 <= math.log10(p) <= high + 1e-9]

    def y_ticks(self) -> list[float]:
        return ticks(self.low_y, self.low_y + self.span_y)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two bounds."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _drawable(point: tuple[float, float], log_x: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and (not log_x or point[0] > 0)


def _axes(scale: _Scale, x_label: str, y_label: str, *, x_ticks: bool = True) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = []
    for value in scale.y_ticks():
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    if x_ticks:
        for value in scale.x_ticks():
            x = scale.x(value)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" class="axis"/>')
            parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{_short(value)}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" class="axis"/>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (TOP + base) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    return parts


def _line(scale: _Scale, series: Series, colour: str) -> list[str]:
    path = []
    previous = None
    for x, y in series.points:
        if previous is None:
            path.append(f"M{scale.x(x):.1f} {scale.y(y):.1f}")
        elif series.step:
            path.append(f"H{scale.x(x):.1f}V{scale.y(y):.1f}")
        else:
            path.append(f"L{scale.x(x):.1f} {scale.y(y):.1f}")
        previous = (x, y)
    parts = [f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
    if series.dots:
        parts += [
            f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(series.name)}: {x:.4g}, {y:.4g}</title></circle>"
            for x, y in series.points
        ]
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    x = float(WIDTH - RIGHT)
    for k in reversed(range(len(names))):
        if not names[k]:
            continue
        x -= 7.0 * len(names[k]) + 20
        colour = PALETTE[k % len(PALETTE)]
        parts.append(f'<rect x="{x:.1f}" y="{TOP - 16}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 13:.1f}" y="{TOP - 7}">{escape(names[k])}</text>')
    return parts


def _short(value: float) -> str:
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}"
    return f"{value:.6g}"


STYLE = (
    "text{font:12px system-ui,sans-serif;fill:var(--ink,#222)}.small{font-size:11px}"
    ".title{font-weight:600;font-size:13px}"
    ".grid{stroke:var(--grid,#e3e3e3)}.axis{stroke:var(--ink,#222)}.rule{stroke:var(--rule,#999);stroke-dasharray:4 3}"
)


def _frame(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<text x="{LEFT}" y="{TOP - 7}" class="title">{escape(title)}</text>{"".join(parts)}</svg>'
    )
