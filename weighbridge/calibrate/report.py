"""A picture of a calibration: forecast against observed, residuals by prompt length and by concurrency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weighbridge.calibrate.build import Calibration
from weighbridge.core.errors import ConfigError, InputError

_PANELS = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))


def require_matplotlib() -> None:
    """Raises ConfigError, before anything is measured, where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--report needs matplotlib: pip install 'weighbridge[report]'") from None


def draw(calibration: Calibration, path: Path) -> None:
    """Write the picture; the format follows the file's suffix. Raises InputError naming the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 8), layout="constrained")
    for axis, (metric, name) in zip(axes[0], _PANELS, strict=True):
        _scatter(axis, calibration, metric, name)
    _by(axes[1][0], calibration, "ttft_s", "prompt tokens", "TTFT")
    _by(axes[1][1], calibration, "tpot_s", "requests at once", "TPOT")
    _by(axes[1][2], calibration, "e2e_s", "output tokens", "E2E")
    p = calibration.profile.provenance
    figure.suptitle(f"{p.model} on {p.engine} {p.engine_version}: forecast against observed ({p.method})")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the picture cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _points(calibration: Calibration, metric: str, fitted: bool) -> list[tuple[float, float, int]]:
    """(observed, forecast, index) of the requests that were, or were not, fitted."""
    found = []
    for index, (r, was) in enumerate(zip(calibration.replayed, calibration.fitted, strict=True)):
        observed, forecast = getattr(r.request, metric), getattr(r, metric)
        if was == fitted and observed is not None and forecast is not None and observed > 0 and forecast > 0:
            found.append((observed, forecast, index))
    return found


def _scatter(axis: Any, calibration: Calibration, metric: str, name: str) -> None:
    both = []
    for fitted, colour, label in ((True, "#9aa5b1", "fitted"), (False, "#c2410c", "held out")):
        points = _points(calibration, metric, fitted)
        both += points
        axis.scatter(
            [o for o, _, _ in points], [f for _, f, _ in points], s=14, alpha=0.7, color=colour, label=label, zorder=2
        )
    if both:
        low, high = min(min(o, f) for o, f, _ in both), max(max(o, f) for o, f, _ in both)
        axis.plot([low, high], [low, high], color="#1f2937", linewidth=1, zorder=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        _plain_ticks(axis)
    axis.set_title(name)
    axis.set_xlabel("observed, s")
    axis.set_ylabel("forecast, s")
    axis.legend(frameon=False)


def _plain_ticks(axis: Any) -> None:
    """0.1, 0.2, 0.5, 1 ...: labels that do not run into each other where a metric spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_formatter(NullFormatter())


def _by(axis: Any, calibration: Calibration, metric: str, over: str, name: str) -> None:
    from matplotlib.ticker import FuncFormatter

    for fitted, colour in ((True, "#9aa5b1"), (False, "#c2410c")):
        points = _points(calibration, metric, fitted)
        x = [_size(calibration, index, over) for _, _, index in points]
        axis.scatter(x, [100 * (o / f - 1) for o, f, _ in points], s=14, alpha=0.7, color=colour)
    axis.axhline(0.0, color="#1f2937", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_title(f"{name}: residual by {over}")
    axis.set_xlabel(over)
    axis.set_ylabel("observed / forecast - 1, %")


def _size(calibration: Calibration, index: int, over: str) -> float:
    request = calibration.replayed[index].request
    if over == "prompt tokens":
        return request.prompt_tokens
    if over == "output tokens":
        return request.output_tokens
    return sum(
        1
        for other in calibration.replayed
        if other.request.arrival_s < request.last_token_s and other.request.last_token_s > request.first_token_s
    )
