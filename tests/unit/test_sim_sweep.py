"""Sweeps: order, pairing, interruption, and the same runs through a Ray-like scheduler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.sim import fleet
from weighbridge.sim.runs import Generated, Result, Run
from weighbridge.sim.sweep import compare, run_all, spread
from weighbridge.workload import mixes


def runs() -> list[Run]:
    work = Generated(mixes.mixed_bursty(8.0), duration_s=10.0)
    return [Run(fleet.mixed(2), work, policy=p, seed=s) for p in ("round_robin", "least_tokens") for s in (1, 2)]


def figures(results: list[Result]) -> list[tuple[str, int, float, float]]:
    return [(r.policy, r.seed, r.summary.attainment, r.summary.ttft_s.mean) for r in results]


class InstantRay:
    """The part of Ray's interface that sweeps use; tasks run when they are waited for, last submitted first."""

    def __init__(self) -> None:
        self.address: Any = "unset"
        self.cancelled: list[Any] = []

    def init(self, address: Any = None, **_: Any) -> None:
        self.address = address

    def remote(self, function: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: _Task(function, arguments))

    def wait(self, tasks: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return tasks[-num_returns:], tasks[:-num_returns]

    def get(self, task: Any) -> Any:
        return task.function(*task.arguments)

    def cancel(self, task: Any) -> None:
        self.cancelled.append(task)


class _Task:
    def __init__(self, function: Any, arguments: Any) -> None:
        self.function, self.arguments = function, arguments


def test_ray_gives_what_this_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = InstantRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    seen: list[int] = []
    over_ray = run_all(runs(), ray=True, progress=lambda done, total: seen.append(done))
    assert ray.address == "10.0.0.1:6379"
    assert seen == [1, 2, 3, 4]
    assert figures(over_ray) == figures(run_all(runs(), jobs=1))


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'weighbridge\[ray\]'"):
        run_all(runs(), ray=True)


def test_an_interrupt_keeps_what_is_done() -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    assert len(run_all(runs(), jobs=1, progress=stop)) == 2


def test_comparison_pairs_by_seed() -> None:
    results = run_all(runs(), jobs=1)
    table = compare(results)
    attained = [r.summary.attainment for r in results]
    assert "difference" not in table["round_robin"]
    difference = table["least_tokens"]["difference"]
    assert difference.mean == pytest.approx((attained[2] - attained[0] + attained[3] - attained[1]) / 2)
    assert difference.count == 2


def test_spread() -> None:
    assert spread([1.0]).standard_error is None
    known = spread([1.0, 2.0, 3.0])
    assert known.mean == 2.0
    assert known.standard_error == pytest.approx((1.0 / 3) ** 0.5)
    assert run_all([]) == []
