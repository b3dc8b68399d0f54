"""Pictures of a training or evaluation run, as PNG bytes, and the one HTML page that holds them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import InputError
from weighbridge.selection.evaluate import Result, ShareCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = NDArray[np.float64]
_OURS, _OTHERS, _GUIDE = "#c2410c", "#475569", "#94a3b8"


def _figure(width: float = 7.2) -> Figure:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise InputError("a report with pictures needs the extra: pip install 'weighbridge[report]'") from None
    return Canvas(figsize=(width, 4.6), dpi=120, layout="constrained")


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def score_against_cost(ours: Sequence[tuple[str, Result]], others: Mapping[str, Result], title: str) -> bytes:
    """Every way of choosing as a point; ours joined as a line, by what a good answer is worth."""
    figure = _figure(10.0)
    axes = figure.subplots()
    axes.plot(
        [r.cost_usd for _, r in ours],
        [r.avg_score for _, r in ours],
        "o-",
        color=_OURS,
        label="this selector",
        zorder=3,
    )
    for name, result in ours:
        axes.annotate(name, (result.cost_usd, result.avg_score), (4, 5), textcoords="offset points", fontsize=7)
    for number, (name, result) in enumerate(others.items(), 1):
        # names would run over each other where points lie close: numbers here, names beside the picture
        label = f"{number}  {name}: {result.avg_score:.2f} at ${result.cost_usd:.2f}"
        axes.plot([result.cost_usd], [result.avg_score], "s", color=_OTHERS, markersize=4, label=label)
        place = (result.cost_usd, result.avg_score)
        axes.annotate(str(number), place, (4, -9), textcoords="offset points", fontsize=7, color=_OTHERS)
    axes.set(xlabel="cost of all cases, USD", ylabel="mean score, points", title=title)
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    return _png(figure)


def reliability(chances: Matrix, labels: Matrix, title: str) -> bytes:
    """Predicted chance against the mean outcome, in ten bins, with the number of cases in each."""
    figure = _figure()
    axes = figure.subplots()
    known = ~(np.isnan(chances) | np.isnan(labels))
    p, y = chances[known], labels[known]
    bins = np.minimum((p * 10).astype(int), 9)
    used = np.unique(bins)
    x, outcome = [p[bins == b].mean() for b in used], [y[bins == b].mean() for b in used]
    axes.plot([0, 1], [0, 1], "--", color=_GUIDE, linewidth=1)
    axes.plot(x, outcome, "o-", color=_OURS)
    for b, px, py in zip(used, x, outcome, strict=True):
        axes.annotate(str(int((bins == b).sum())), (px, py), (5, -9), textcoords="offset points", fontsize=7)
    axes.set(xlabel="predicted chance", ylabel="mean outcome", title=title, xlim=(0, 1), ylim=(0, 1))
    return _png(figure)


def share_curves(curves: Mapping[str, ShareCurve], title: str) -> bytes:
    """Share of strong calls against the share of the strong model's lead that is recovered."""
    figure = _figure()
    axes = figure.subplots()
    axes.plot([0, 100], [0, 1], "--", color=_GUIDE, linewidth=1, label="random order")
    for (name, curve), color in zip(curves.items(), (_OURS, _OTHERS, "#0f766e", "#7c3aed"), strict=False):
        axes.plot(100 * curve.share, curve.recovered, color=color, label=f"{name} (APGR {curve.apgr:.3f})")
    axes.set(xlabel="calls to the strong model, %", ylabel="lead recovered", title=title, xlim=(0, 100))
    axes.legend(loc="lower right", frameon=False)
    return _png(figure)


def page(title: str, facts: Mapping[str, object], pictures: Sequence[tuple[str, bytes]]) -> str:
    """One self-contained HTML page: a table of facts, then the pictures with their captions."""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    figures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in pictures
    )
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
        "table{border-collapse:collapse}th,td{text-align:left;padding:.2rem .8rem;border-bottom:1px solid #e2e8f0;"
        "vertical-align:top}img{max-width:100%}figcaption{color:#475569}"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{style}</style><h1>{html.escape(title)}</h1><table>{rows}</table>{figures}</html>\n"
