"""Every experiment at the size of a test: what it must show, shows."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from weighbridge.core.errors import WeighbridgeError
from weighbridge.sim.experiments import registry
from weighbridge.sim.experiments.base import Options, Outcome, outcome_dict
from weighbridge.sim.experiments.pictures import draw
from weighbridge.sim.experiments.provisioning import needed
from weighbridge.sim.experiments.saturation import saturated_rate

QUICK = Options(quick=True, jobs=1)


def quick(name: str, **changes: object) -> Outcome:
    return registry.experiment(name).run(msgspec_free(QUICK, **changes))


def msgspec_free(options: Options, **changes: object) -> Options:
    from dataclasses import replace

    return replace(options, **changes)  # type: ignore[arg-type]


def test_two_backends_reproduce_the_crossover_and_the_gains() -> None:
    data = quick("two-backends").data
    eight, many = data["cases"]["8"], data["cases"]["48"]
    assert eight["mixed"]["cpu_indices"] == [8]
    assert many["mixed"]["cpu_requests"] == 6
    assert eight["mixed"]["completion_s"] < 0.92 * eight["all_gpu"]["completion_s"]
    assert many["mixed"]["completion_s"] < 0.90 * many["all_gpu"]["completion_s"]
    assert data["cold"]["8"]["cpu_requests"] == 0
    assert data["handicap"]["prefill"] == pytest.approx(34.9, abs=0.1)
    assert data["handicap"]["decode"] == pytest.approx(6.5, abs=0.05)
    by_hit_rate = [row["cpu_requests"] for row in data["by_hit_rate"].values()]
    assert by_hit_rate[0] < by_hit_rate[-1]


def test_stability_finds_the_predicted_knee_and_little_holds() -> None:
    data = quick("stability").data
    below, above = data["growth"]["fcfs"]
    assert below < 0.03 < above
    assert data["ttft_s"]["fcfs"][1] > 10 * data["ttft_s"]["fcfs"][0]
    assert max(data["little_gap"].values()) < 1e-9


def test_only_mixers_that_conserve_work_sustain_the_load() -> None:
    data = quick("mixing").data
    growth = {mixer: slopes[-1] for mixer, slopes in data["growth"].items()}
    assert growth["mixed"] < 0.05
    assert growth["request_level"] > 0.1
    assert growth["decode_first"] > 0.1
    assert all(loss["request_level"] > 0.25 for loss in data["loss"].values())
    assert data["decodes_alone_fill"] == 0.015625


def test_scenario_b_is_forty_times_a_for_the_same_count() -> None:
    data = quick("scenario-ab").data
    a, b = data["A"], data["B"]
    assert b["tokens"] / a["tokens"] == 40
    assert a["decode_tokens_per_step"] == pytest.approx(10, abs=0.2)
    assert a["budget_used"] < 0.02
    assert (b["most_running"], b["most_waiting"]) == (6, 4)
    assert data["spread"]["least_tokens"]["p99_over_p50"] < data["spread"]["round_robin"]["p99_over_p50"] / 2


def test_priorities_keep_interactive_at_overload() -> None:
    arms = quick("tiers").data["arms"]
    assert arms["fcfs"]["attainment"]["interactive"] < 0.5
    assert arms["priority"]["attainment"]["interactive"] > 0.95
    assert arms["priority, preempt by swap"]["attainment"]["interactive"] > 0.95


def test_calibrate_then_route_compares_at_measured_saturation() -> None:
    outcome = quick("calibrate-then-route")
    assert set(outcome.by_trace) == {"bursts", "spikes", "gamma"}
    assert all(rate > 3 for rate in outcome.data["saturated_rate"].values())
    assert outcome.attainment["calibrated"] > outcome.attainment["round_robin"]
    json = outcome_dict(outcome)
    assert json["by_trace"]["bursts"]["round_robin"] == pytest.approx(outcome.by_trace["bursts"]["round_robin"].mean)


def test_width_and_heterogeneity_report_gain_by_parameter() -> None:
    width = quick("width")
    assert set(width.data["gain"]) == {"2", "3"}
    alike = quick("heterogeneity").data["gain"]
    assert alike["0.0"] <= alike["1.0"] + 0.02


def test_scarcity_compares_blind_and_greedy() -> None:
    outcome = quick("scarcity")
    row = outcome.by_trace["1P+2D/mixed"]
    assert row["calibrated"].mean > row["round_robin"].mean
    assert set(outcome.data["stale"]["kv_free"]) == {"0.05", "1.0"}


def test_provisioning_reads_instances_off_the_curve() -> None:
    assert needed([5, 6, 7], [0.8, 0.9, 1.0], 0.95) == pytest.approx(6.5)
    assert needed([5, 6], [0.99, 1.0], 0.95) == 5
    assert needed([5, 6], [0.1, 0.2], 0.95) is None
    outcome = quick("provisioning")
    assert "bursts" in outcome.data["instances_needed"]


def test_prefix_caches_reuse_shared_tokens_only() -> None:
    data = quick("prefix").data
    assert (
        data["detail"]["shared/prefix_affinity"]["reused_share"] > data["detail"]["shared/round_robin"]["reused_share"]
    )
    assert data["detail"]["unrelated/calibrated"]["reused_share"] == 0.0
    small, large = data["pressure"]["least_tokens"]
    assert small < large
    assert min(data["pressure"]["calibrated"]) > large, "who keeps a prefix where it is needs less cache for it"


def test_transfer_parts_sum_to_ttft_and_bandwidth_matters() -> None:
    parts = quick("transfer").data["ttft_parts"]
    for row in parts.values():
        total = sum(value for name, value in row.items() if name != "ttft")
        assert total == pytest.approx(row["ttft"], rel=1e-9)
    assert parts["1 GB/s"]["wait for the link"] > 10 * parts["10 GB/s"]["wait for the link"]


def test_saturation_is_found_by_bisection() -> None:
    from weighbridge.sim.experiments.width import make_run

    def make(rate: float, seed: int):
        return make_run(1, rate, 40.0, "round_robin", seed)

    rate = saturated_rate(make, [1, 2], QUICK, start=1.0)
    around = [
        sum(r.summary.attainment for r in QUICK.run([make(rate * k, s) for s in (1, 2)])) / 2 for k in (0.8, 1.25)
    ]
    assert around[0] > 0.835 > around[1]


def test_every_outcome_has_a_picture_and_json(tmp_path: Path) -> None:
    outcome = quick("scenario-ab")
    draw(outcome, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert msgspec.json.decode(msgspec.json.encode(outcome_dict(outcome)))["experiment"] == "scenario-ab"


def test_names_are_known_or_refused() -> None:
    assert all(registry.experiment(name).name == name for name in registry.MODULES)
    with pytest.raises(WeighbridgeError, match="two-backends"):
        registry.experiment("nothing")


def test_seeds_never_overlap_those_of_tuning() -> None:
    seeds = Options().seed_list()
    assert len(seeds) == 5
    assert not set(seeds) & set(range(1, 30))
    assert all(b == a + 1 for a, b in itertools.pairwise(seeds))
