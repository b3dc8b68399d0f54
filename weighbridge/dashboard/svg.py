"""The pictures: small SVGs from numbers. Geometry only (a strict CSP allows no inline style); the stylesheet
colours them.

Every picture has a text alternative, so a screen reader hears the number instead of seeing the bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge.dashboard.html import Html, h
from weighbridge.dashboard.snapshot import TERMS

STRIP_RANGE = 0.40
"""Error strips all span -40 % to +40 %, so that rows can be compared; what lies beyond is drawn as an arrow."""


def n(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def spark(values: Sequence[float], label: str, floor: float | None = None) -> Html:
    """A line of recent values without axes."""
    box = {"viewBox": "0 0 100 26", "preserveAspectRatio": "none", "role": "img", "aria_label": label}
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return h("svg.spark", **box)
    low = min(known) if floor is None else min(floor, *known)
    high = max(known)
    span = (high - low) or 1.0
    step = 100 / (len(known) - 1)
    points = " ".join(f"{n(i * step)},{n(24 - 22 * (v - low) / span)}" for i, v in enumerate(known))
    return h(
        "svg.spark",
        h("polygon.area", points=f"0,26 {points} 100,26"),
        h("polyline.line", points=points),
        **box,
    )


def bar(share: float | None, label: str, tick: float | None = None, judgement: str = "") -> Html:
    """A meter from 0 to 1; `tick` marks a second value, such as the predicted peak."""
    fill = 0.0 if share is None else max(0.0, min(1.0, share))
    parts = [h("rect.track", width="100", height="10"), h("rect.fill", width=n(100 * fill), height="10")]
    if tick is not None:
        parts.append(h("rect.tick", x=n(max(0.0, min(98.0, 100 * tick - 1))), width="2", height="10"))
    return h(
        "svg.bar", *parts, class_=judgement or None,
        viewBox="0 0 100 10", preserveAspectRatio="none", role="img", aria_label=label,
    )  # fmt: skip


def strip(low: float, median: float, high: float, band: float | None, label: str) -> Html:
    """Forecast error from its 10th to 90th percentile over the error bar's band."""

    def x(value: float) -> float:
        return 55 + 50 * max(-1.0, min(1.0, value / STRIP_RANGE))

    parts: list[Html] = []
    if band is not None:
        parts.append(h("rect.band", x=n(x(-band)), y="1", width=n(x(band) - x(-band)), height="14"))
    parts += [
        h("line.zero", x1="55", x2="55", y1="1", y2="15"),
        h("line.whisk", x1=n(x(low)), x2=n(x(high)), y1="8", y2="8"),
        h("circle.dot", cx=n(x(median)), cy="8", r="3.4"),
    ]
    if high > STRIP_RANGE:
        parts.append(h("path.arrow", d="M105 4 L110 8 L105 12 Z"))
    if low < -STRIP_RANGE:
        parts.append(h("path.arrow", d="M5 4 L0 8 L5 12 Z"))
    outside = band is not None and abs(median) > band
    return h("svg.strip", *parts, class_="out" if outside else None, viewBox="0 0 110 16", role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class StackScale:
    """Seconds that the full width of a stack stands for."""

    full_s: float

    def x(self, value_s: float) -> float:
        """Position in 0..100."""
        return max(0.0, min(100.0, 100 * value_s / self.full_s)) if self.full_s > 0 else 0.0


def term_class(term: str, index: int) -> str:
    """Colour class of a cost term: the five known ones keep theirs everywhere, others take the rest in order."""
    return f"t-{term}" if term in TERMS else f"t-x{index % 3}"


def stack(
    terms: Sequence[tuple[str, float]],
    scale: StackScale,
    label: str,
    *,
    error_s: float | None = None,
    observed_s: float | None = None,
) -> Html:
    """Stacked cost terms in seconds, the total's error bar, and a diamond where the observed time lies."""
    parts: list[Html] = [h("rect.track", y="4", width="100%", height="12")]
    at = 0.0
    for index, (term, value) in enumerate(terms):
        if value <= 0:
            continue
        left, right = scale.x(at), scale.x(at + value)
        at += value
        parts.append(
            h(f"rect.{term_class(term, index)}", x=f"{n(left)}%", y="4", width=f"{n(right - left)}%", height="12")
        )
    if error_s:
        low, high = f"{n(scale.x(at - error_s))}%", f"{n(scale.x(at + error_s))}%"
        parts += [
            h("line.err", x1=low, x2=high, y1="10", y2="10"),
            h("line.err", x1=low, x2=low, y1="6", y2="14"),
            h("line.err", x1=high, x2=high, y1="6", y2="14"),
        ]
    if observed_s is not None:
        x = f"{n(scale.x(observed_s))}%"
        parts.append(h("svg", h("path.obs", d="M0 -6 L5 0 L0 6 L-5 0 Z"), x=x, y="10", overflow="visible"))
    return h("svg.stack", *parts, height="20", role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. `y` of None or NaN breaks the line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = "s0"


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis range and how its numbers are written."""

    low: float
    high: float
    unit: str = ""
    marks: tuple[tuple[float, str], ...] = ()


_W, _H, _L, _R, _T, _B = 640, 240, 56, 12, 12, 26


def nice_axis(high: float, unit: str, low: float = 0.0) -> Axis:
    """An axis from `low` to a round number over `high`, with four to six marks."""
    if not math.isfinite(high) or high <= low:
        high = low + 1.0
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step))) + (1 if step / power == 2.5 else 0)
    marks = tuple((k * step, f"{k * step:,.{digits}f}".replace("-", "−")) for k in range(first, last + 1))
    return Axis(first * step, last * step, unit, marks)


def _x(axis: Axis, value: float) -> float:
    return _L + (_W - _L - _R) * (value - axis.low) / ((axis.high - axis.low) or 1)


def _y(axis: Axis, value: float) -> float:
    return _H - _B - (_H - _T - _B) * (value - axis.low) / ((axis.high - axis.low) or 1)


def _frame(x: Axis, y: Axis) -> list[Html]:
    parts: list[Html] = []
    for value, text in y.marks:
        at = n(_y(y, value))
        parts.append(h("line.grid", x1=_L, x2=_W - _R, y1=at, y2=at))
        top = f" {y.unit}" if y.unit and value >= y.high else ""
        parts.append(h("text.ax", text + top, x=_L - 6, y=n(_y(y, value) + 4), text_anchor="end"))
    for value, text in x.marks:
        anchor = "end" if value >= x.high else "start" if value <= x.low else "middle"
        last = f" {x.unit}" if x.unit and anchor == "end" and text[-1].isdigit() else ""
        parts.append(h("text.ax", text + last, x=n(_x(x, value)), y=_H - 6, text_anchor=anchor))
    return parts


def chart(
    lines: Sequence[Line], x: Axis, y: Axis, label: str,
    *, band: Sequence[tuple[float, float, float]] = (), markers: Sequence[tuple[float, str]] = (),
) -> Html:  # fmt: skip
    """Lines over a grid. `band` is (x, low, high) drawn behind; `markers` are vertical lines (x, text).

    The lines' values ride along as data attributes for the crosshair; without script the picture is complete.
    """
    parts = _frame(x, y)
    if len(band) > 1:
        top = [f"{n(_x(x, a))},{n(_y(y, min(hi, y.high)))}" for a, _, hi in band]
        bottom = [f"{n(_x(x, a))},{n(_y(y, max(lo, y.low)))}" for a, lo, _ in reversed(band)]
        parts.append(h("polygon.eband", points=" ".join(top + bottom)))
    for value, text in markers:
        at = n(_x(x, value))
        parts.append(h("line.mark", x1=at, x2=at, y1=_T, y2=_H - _B))
        parts.append(h("text.ax", text, x=n(_x(x, value) + 4), y=_T + 20))
    for line in lines:
        points = [(a, b) for a, b in zip(line.xs, line.ys, strict=True) if math.isfinite(b)]
        path = "".join(
            f"{'M' if i == 0 else 'L'}{n(_x(x, a))} {n(_y(y, min(b, y.high)))}" for i, (a, b) in enumerate(points)
        )
        data = ";".join(f"{n(_x(x, a))},{a:.4g},{b:.4g}" for a, b in points)
        parts.append(h(f"path.line.{line.kind}", d=path, data_name=line.name, data_points=data))
    parts.append(h("line.cross", x1="0", x2="0", y1=_T, y2=_H - _B))
    return h(
        "svg.chart", *parts, viewBox=f"0 0 {_W} {_H}", role="img", aria_label=label,
        data_unit=y.unit, data_xunit=x.unit,
    )  # fmt: skip


def scatter(points: Sequence[tuple[float, float, bool]], axis: Axis, label: str) -> Html:
    """Forecast (x) against observed (y) on equal axes with the diagonal; True marks a point outside its error bar."""
    parts = _frame(axis, axis)
    parts.append(
        h("line.diag", x1=n(_x(axis, axis.low)), y1=n(_y(axis, axis.low)), x2=n(_x(axis, axis.high)),
          y2=n(_y(axis, axis.high)))
    )  # fmt: skip
    for forecast, observed, outside in points:
        x, y = _x(axis, min(forecast, axis.high)), _y(axis, min(observed, axis.high))
        if outside:
            parts.append(h("path.pt.out", d=f"M{n(x)} {n(y - 4)}l4 4l-4 4l-4 -4Z"))
        else:
            parts.append(h("circle.pt", cx=n(x), cy=n(y), r="2.4"))
    return h("svg.chart.scatter", *parts, viewBox=f"0 0 {_W} {_H}", role="img", aria_label=label)


def cdf(name: str, values: Sequence[float], kind: str, points: int = 120) -> Line:
    """The empirical distribution as a line of at most `points` points; shares on the y axis."""
    ordered = sorted(v for v in values if math.isfinite(v))
    total = len(values)
    if not ordered:
        return Line(name, (), (), kind)
    picks = sorted({round(i * (len(ordered) - 1) / max(1, min(points, len(ordered)) - 1)) for i in range(points)})
    picks = [p for p in picks if p < len(ordered)]
    return Line(name, [ordered[p] for p in picks], [(p + 1) / total for p in picks], kind)
