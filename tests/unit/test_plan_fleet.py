"""The search for the smallest fleet, on a small synthetic trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from weighbridge.plan.fleet import Device, Reordered, Slot, best_case, make_fleet, search, stable_size
from weighbridge.plan.fleet_report import FleetFlags, answer, make_question, picture
from weighbridge.plan.search import _cheaper
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import RTX_PRO_6000


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen minutes at one request per second, 2,000 tokens in and 40 out."""
    path = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    rows = [{"arrival_s": float(k), "prompt_tokens": 2000, "output_tokens": 40} for k in range(900)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def flags(trace: Path, **changes: object) -> FleetFlags:
    values = {
        "trace": trace, "profiles": ("rtx-pro-6000",), "slo": "ttft=1.0,tpot=0.05", "policies": "least_tokens",
        "requests": 240, "seeds": 1, "jobs": 1,
    }  # fmt: skip
    return FleetFlags(**{**values, **changes})  # type: ignore[arg-type]


def test_the_answer_holds_on_fresh_seeds_and_one_fewer_does_not(trace: Path) -> None:
    # one instance does at most 1 / (2000 * 40 us + 39 * 30 us + ...) ~ 12 requests/s; at 30/s three are needed
    found = answer(flags(trace, rate=30.0)).to_json()["policies"]["least_tokens"]
    assert found["instances"] >= 3
    assert found["fresh_seeds"]["holds"] is True
    assert found["fresh_seeds"]["one_fewer"]["holds"] is False
    assert found["attainment"]["mean"] >= 0.95
    tried = {row["instances"]: row["attainment"] for row in found["tried"]}
    assert tried[found["instances"] - 1] < 0.95


def test_growth_and_prices(trace: Path) -> None:
    found = answer(flags(trace, rate=12.0, growth="1,3", prices=(2.5,))).to_json()
    now, later = (row["policies"]["least_tokens"] for row in found["growth"])
    assert later["instances"] > now["instances"]
    assert now["price_per_hour"] == 2.5 * now["instances"]
    tokens_per_hour = 3600 * now["output_tokens_per_s"]
    assert now["price_per_million_output_tokens"] == pytest.approx(1e6 * now["price_per_hour"] / tokens_per_hour)


def test_what_no_fleet_can_hold_is_said_at_once(trace: Path) -> None:
    # 2,000 tokens take 91 ms of prefill even alone
    found = answer(flags(trace, slo="ttft=0.05")).to_json()["policies"]["least_tokens"]
    assert found["instances"] is None
    assert "only 0.0 % of the requests meet the SLO" in found["note"]
    assert found["tried"] == []


def test_prefill_and_decode_on_instances_of_their_own(trace: Path) -> None:
    found = answer(flags(trace, rate=20.0, split=True)).to_json()["policies"]["least_tokens"]
    assert set(found["composition"]) == {"rtx-pro-6000/prefill", "rtx-pro-6000/decode"}
    assert found["instances"] == sum(found["composition"].values())


def test_a_cheaper_mix_of_two_kinds_is_considered() -> None:
    # alone: 4 at price 3 = 12, or 9 at price 1.4 = 12.6; mixed ones below 12 with 90 % of the capacity, cheapest first
    options = _cheaper([4, 9], [3.0, 1.4], below=12.0)
    costs = [3.0 * a + 1.4 * b for a, b in options]
    assert costs == sorted(costs)
    assert all(cost < 12.0 for cost in costs)
    assert all(a / 4 + b / 9 >= 0.9 and a and b for a, b in options)
    assert (3, 1) not in options
    assert (2, 4) in options


def test_time_that_runs_out_is_told(trace: Path) -> None:
    question = make_question(flags(trace, rate=30.0, seconds=0.0))
    answers, _ = search(question)
    assert "stopped after 0 s" in answers[0].note
    assert answers[0].best is None


def test_seeds_reorder_the_same_requests(trace: Path) -> None:
    workload = Reordered(str(trace), rate=5.0, count=10_000)
    one, two = list(workload.requests(1)), list(workload.requests(2))
    assert len(one) == len(two) == 900
    assert one != list(Reordered(str(trace), rate=10.0, count=10_000).requests(1))
    assert one[-1].arrival_s == pytest.approx(900 / 5.0, rel=0.01)
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(one))


def test_bounds_and_fleets(trace: Path) -> None:
    device = Device("gpu", RTX_PRO_6000, SchedulerConfig())
    question = make_question(flags(trace, rate=30.0))
    assert stable_size(question, Slot(device)) == 3
    assert best_case(question) == 1.0
    fleet = make_fleet((Slot(device, "prefill"), Slot(device, "decode")), (1, 2))
    assert [i.role for i in fleet.instances] == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profiles": ()}, "--profile"),
        ({"policies": "nonsense"}, "nonsense"),
        ({"attainment": 1.5}, "--attainment"),
        ({"prices": (1.0, 2.0)}, "--price"),
        ({"growth": "soon"}, "--growth"),
        ({"rate": -1.0}, "--rate"),
    ],
)
def test_bad_flags_are_named(trace: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        answer(flags(trace, **changes))


def test_the_picture_shows_the_target(trace: Path) -> None:
    found = answer(flags(trace, rate=12.0))
    assert "target 0.95" in picture(found)
