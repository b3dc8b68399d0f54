"""Draw an outcome's panels into one PNG (extra `report`)."""

from __future__ import annotations

from pathlib import Path

from weighbridge.core.errors import ConfigError
from weighbridge.sim.experiments.base import Outcome, Panel


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture. Raises `ConfigError` where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'weighbridge[report]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    count = len(outcome.panels)
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 3.9 * rows), squeeze=False)
    for k, panel in enumerate(outcome.panels):
        _draw_panel(axes[k // columns][k % columns], panel)
    for k in range(count, rows * columns):
        axes[k // columns][k % columns].axis("off")
    figure.suptitle(outcome.experiment + (" (quick size)" if outcome.quick else ""), fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axes: object, panel: Panel) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.bars:
        names = list(panel.bars)
        errors = [panel.errors.get(name, 0.0) for name in names]
        axes.barh(names, [panel.bars[name] for name in names], xerr=errors, color="#4878a8", ecolor="#333333")
        axes.invert_yaxis()
        low = min(panel.bars.values())
        if low > 0.5 and panel.log_x is False and max(panel.bars.values()) <= 1.0:
            axes.set_xlim(left=max(0.0, low - 0.1), right=1.005)
    styles = ["-", "--", "-.", ":"]
    markers = "osD^vPX*<>"
    for k, (name, (x, y)) in enumerate(panel.curves.items()):
        axes.plot(x, y, styles[k // 10 % 4], marker=markers[k % 10], markersize=4, label=name)
    if panel.curves:
        axes.legend(fontsize=7)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
