"""A simulated engine against recorded runs of a real one: fitted on the first 100 requests, judged on the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from weighbridge.calibrate.from_run import calibrate_run
from weighbridge.calibrate.recorded import read_run
from weighbridge.core.request import Tier
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.simulation import Simulation
from weighbridge.workload.trace import TraceRequest

LOGS = Path(__file__).resolve().parents[2].parent / "shared" / "vllm-logs"
pytestmark = pytest.mark.skipif(not LOGS.exists(), reason="recorded vLLM runs are not beside the checkout")


@pytest.mark.parametrize("run", ["RTXPRO6000_Qwen3-32B", "RTXPRO6000_Llama-3.1-8B"])
def test_a_simulated_fleet_of_one_predicts_a_recorded_run(run: str) -> None:
    recorded, limits, told = read_run(LOGS / f"{run}.requests.jsonl", LOGS / f"{run}.meta.json")
    report, profile, _ = calibrate_run(recorded, limits, told, source=run, fit_first=100)
    assert not report.identifiable  # a saturated run has no small batches, and the fit says so
    assert profile.step is not None
    assert limits.token_budget is not None
    assert limits.max_sequences is not None
    config = SchedulerConfig(
        token_budget=limits.token_budget,
        max_sequences=limits.max_sequences,
        blocks=limits.kv_blocks or 1_000_000,
        admission="prompt",
    )
    fleet = SimulatedFleet((SimulatedInstance("i0", profile.step, config),))
    router = Router(RouterSettings(record_decisions=False, tiers=(Tier(name="standard", priority=0),)))
    simulation = Simulation(router, fleet, SimulationSettings(max_tokens=None))
    order = sorted(recorded, key=lambda r: r.arrival_s)
    records = simulation.run(TraceRequest(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in order)
    errors: dict[str, list[float]] = {"ttft_s": [], "tpot_s": [], "e2e_s": []}
    for real, simulated in list(zip(order, records, strict=True))[100:]:
        for metric, values in errors.items():
            observed = getattr(real, metric)
            if observed:
                values.append(abs(getattr(simulated, metric) / observed - 1.0))
    means = {metric: sum(values) / len(values) for metric, values in errors.items()}
    assert means["e2e_s"] <= 0.03
    assert means["tpot_s"] <= 0.06
    assert means["ttft_s"] <= 0.07
