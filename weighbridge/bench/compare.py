"""Arms side by side on equal schedules: policies over one fleet, or several servers. Order random, runs repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weighbridge.bench.gateways import gateway
from weighbridge.bench.paired import figures, paired
from weighbridge.bench.run import RunOptions, measure
from weighbridge.bench.schedule import seeds_of
from weighbridge.core.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing that is compared; `open` gives its URL for the length of one run, `headers` go with every request."""

    name: str
    open: Callable[[], AbstractContextManager[str]]
    headers: tuple[str, ...] = ()


def policy_arms(names: Sequence[str], config: Path | None) -> list[Arm]:
    """A gateway per policy, started afresh for every run, over the fleet of one configuration.

    Every request asks where it went, so that the reports show each instance's share.
    """
    return _distinct([Arm(name, partial(gateway, config, name), ("x-weighbridge-explain=1",)) for name in names])


def server_arms(texts: Sequence[str]) -> list[Arm]:
    """Servers that run already, as `URL` or `NAME=URL`."""
    arms = []
    for text in texts:
        name, sign, url = text.partition("=")
        if not sign or name.startswith("http"):
            name, url = text, text
        arms.append(Arm(name, partial(_as_it_is, url)))
    return _distinct(arms)


@contextmanager
def _as_it_is(url: str) -> Iterator[str]:
    yield url


def _distinct(arms: list[Arm]) -> list[Arm]:
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms or more: --policy a,b, or --target twice")
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("two arms have the same name; write NAME=URL", source="--target")
    return arms


def compare(arms: Sequence[Arm], options: RunOptions, repeats: int, folder: Path, say: Say) -> dict[str, Any]:
    """Run every arm `repeats` times and compare.

    The k-th runs of all arms share a schedule (seed), in an order drawn anew each time. Every run has prompt texts of
    its own, so that no arm finds in a cache what another left there. An interrupt ends the comparison, not one run of
    it; what was measured stays in `folder`.
    """
    if repeats < 1:
        raise ConfigError(f"must be at least 1, not {repeats}", source="--repeats")
    rng = random.Random(f"{options.seed}/order")
    reports: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    order: list[str] = []
    for repeat, seed in enumerate(seeds_of(options.seed, repeats)):
        for arm in rng.sample(list(arms), len(arms)):
            say(f"{arm.name}, repeat {repeat + 1} of {repeats}")
            with arm.open() as url:
                out = folder / f"{_plain(arm.name)}-{repeat}"
                measured = measure(replace(options, url=url, seed=seed, out=out, headers=options.headers + arm.headers))
            if measured.result.stopped:
                raise KeyboardInterrupt
            reports[arm.name].append(measured.report)
            order.append(arm.name)
    rows = {name: [figures(report) for report in found] for name, found in reports.items()}
    verdicts = {name: [report["verdict"] for report in found] for name, found in reports.items()}
    first = next(iter(reports.values()))[0]
    return {
        "format": "weighbridge.comparison",
        "version": 1,
        "arms": list(reports),
        "repeats": repeats,
        "order": order,
        "verdicts": verdicts,
        "table": paired(rows),
        "runs": rows,
        "shares": {name: _mean_shares(found) for name, found in reports.items()},
        "folder": str(folder),
        "provenance": first["provenance"],
    }


def _mean_shares(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean share of the requests that each instance served; empty where the server does not tell."""
    names = sorted({name for report in reports for name in report["share_by_instance"]})
    return {n: sum(r["share_by_instance"].get(n, 0.0) for r in reports) / len(reports) for n in names}


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


_SHOWN = (
    "attainment", "goodput_per_s", "shed_rate", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s",
    "tpot_p99_s", "e2e_p50_s", "e2e_p99_s",
)  # fmt: skip


def print_comparison(found: dict[str, Any], console: Any) -> None:
    """A row for each figure; per arm its mean and noise, and the interval of its difference to the first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("mean +- sd over the repeats")
    for arm in found["arms"]:
        table.add_column(arm, justify="right")
        if arm != found["arms"][0]:
            table.add_column("difference, 95 %", justify="right", style="dim")
    for name in _SHOWN:
        cells = []
        for arm in found["arms"]:
            entry = found["table"][arm]
            cells.append(_cell(entry[name], name))
            if "difference" in entry:
                cells.append(_difference(entry["difference"][name], name))
        table.add_row(name.removesuffix("_per_s").removesuffix("_s").replace("_", " "), *cells)
    console.print(table)
    for arm, shares in found["shares"].items():
        if shares:
            console.print(f"{arm}: " + "  ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()))
    console.print("* the interval does not hold 0; differences are paired by schedule", style="dim")
    invalid = sum(word != "VALID" for words in found["verdicts"].values() for word in words)
    if invalid:
        console.print(f"{invalid} of the runs were INVALID (the generator was late)", style="red")
    if found["repeats"] < 3:
        console.print("note: with fewer than 3 repeats the intervals say little", style="dim")


def _cell(value: dict[str, Any], name: str) -> str:
    if value["mean"] is None:
        return "-"
    noise = f" +-{_scaled(value['sd'], name)}" if value["sd"] is not None else ""
    return f"{_scaled(value['mean'], name)}{noise}"


def _difference(value: dict[str, Any], name: str) -> str:
    if value["low"] is None:
        return "-"
    mark = "*" if value["decided"] else ""
    return f"{_scaled(value['low'], name, '+')} to {_scaled(value['high'], name, '+')}{mark}"


def _scaled(value: float, name: str, sign: str = "") -> str:
    if name in ("attainment", "shed_rate"):
        return f"{100 * value:{sign}.1f}%"
    return f"{1e3 * value:{sign}.1f}ms" if name.startswith(("ttft", "tpot", "e2e")) else f"{value:{sign}.2f}"
