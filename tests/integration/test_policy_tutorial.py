"""The tutorial's policy: the page shows the file, and the file runs, by path and by entry point."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from weighbridge.routing.policies import registry
from weighbridge.routing.policies.registry import make_policy, policy_names
from weighbridge.sim.lab import REGIMES
from weighbridge.sim.runs import run

ROOT = Path(__file__).resolve().parents[2]
NAME = "examples.shortest_wait:ShortestWait"


def test_the_page_shows_the_file_and_it_is_forty_lines_of_code() -> None:
    text = (ROOT / "examples/shortest_wait.py").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorial/write-a-policy.md").read_text(), re.S)
    assert shown == text
    assert len(text.splitlines()) <= 48
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(('"""', "from", "#"))]
    assert len(code) <= 40


def test_it_runs_in_the_simulator() -> None:
    one = REGIMES["3/mixed"].run(NAME, 1, load=0.5)
    result = run(one)
    assert result.summary.by_status.get("unfinished", 0) == 0
    assert result.summary.attainment > 0.9


def test_it_loads_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("shortest_wait", NAME, registry.GROUP)

    def points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        assert group == registry.GROUP
        return [point] if name in (None, "shortest_wait") else []

    monkeypatch.setattr(registry, "entry_points", points)
    assert "shortest_wait" in policy_names()
    made = make_policy("shortest_wait", {"patience": 0.25})
    assert type(made).__name__ == "ShortestWait"
    with pytest.raises(registry.PolicyError, match="patience must be above 0"):
        make_policy("shortest_wait", {"patience": 2.0})


def test_a_path_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(registry.PolicyError, match=r"no_such_module:Nothing.*cannot be loaded"):
        make_policy("no_such_module:Nothing")
