"""The fleets and workloads on which policies are compared, by name, with the rate at which each is near saturation.

Every rate was found by bisection so that round robin attains about 0.82 to 0.85 of the SLOs there (`saturation`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.sim import fleet as fleets
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Generated, Recorded, Run, Workload
from weighbridge.workload import mixes
from weighbridge.workload.synthetic import RequestClass

AZURE_BINS = (300, 1_000, 2_500)


@dataclass(frozen=True, slots=True)
class Regime:
    """A fleet, a mix and its near-saturated rate (requests per second)."""

    name: str
    fleet: SimulatedFleet
    mix: str
    rate: float
    duration_s: float = 300.0

    def run(self, policy: str, seed: int, *, load: float = 1.0, **changes: Any) -> Run:
        """One run at `load` times the rate; `changes` are further fields of `Run`."""
        one = Run(
            fleet=self.fleet,
            workload=Generated(mixes.mixed_bursty(self.rate * load, self.mix), duration_s=self.duration_s),
            policy=policy,
            seed=seed,
            tiers=tiers_of(mixes.classes(self.mix)),
            skip=0.05,
            label=self.name,
        )
        return replace(one, **changes)


def tiers_of(classes: tuple[RequestClass, ...]) -> tuple[Tier, ...]:
    """A tier per request class with its latency bounds, all of one priority; the default tiers follow."""
    bound = sorted(classes, key=lambda c: c.ttft_slo_s or 1e9)
    own = tuple(Tier(name=c.tier, priority=0, ttft_s=c.ttft_slo_s, tpot_s=c.tpot_slo_s) for c in bound if c.tier)
    names = {tier.name for tier in own}
    return own + tuple(tier for tier in DEFAULT_TIERS if tier.name not in names)


_PRO, _4090 = fleets.RTX_PRO_6000, fleets.RTX_4090
REGIMES: dict[str, Regime] = {
    r.name: r
    for r in (
        Regime("8/mixed", fleets.mixed(8), "mixed", 53.0),
        Regime("4+4/mixed", fleets.two_speeds(4, 4), "mixed", 24.1),
        Regime("2P+4D/mixed", fleets.disaggregated(2, 4), "mixed", 22.3),
        Regime("2P+4D-small/reasoning", fleets.disaggregated(2, 4, blocks=2_000), "reasoning-heavy", 15.7),
        Regime("3/mixed", fleets.mixed(3), "mixed", 19.1),
        Regime("1P+2D/mixed", fleets.disaggregated(1, 2), "mixed", 10.4),
        Regime("1P+2D-small/reasoning", fleets.disaggregated(1, 2, blocks=2_000), "reasoning-heavy", 7.9),
        Regime("8-4090/mixed", fleets.mixed(8, _4090, blocks=2_588), "mixed", 19.1),
        Regime("8/chat", fleets.mixed(8), "chat", 214.0, 50.0),
    )
}

AZURE_TIER = Tier(name="azure", priority=0, ttft_s=1.0, tpot_s=0.045)


def azure_workload(path: str, rate: float, length: int = 5_000) -> Workload:
    """A slice of an Azure trace stretched to a rate; all of tier `azure`, kinds by prompt length."""
    return Recorded(path, rate=rate, length=length, tier=AZURE_TIER.name, kind_bins=AZURE_BINS)


def azure_run(
    path: str, rate: float, policy: str, seed: int, *, label: str, length: int = 5_000, **changes: Any
) -> Run:
    """Eight instances on a slice of an Azure trace (67 requests/s saturates conversation, 10.6 code)."""
    one = Run(
        fleet=fleets.mixed(8),
        workload=azure_workload(path, rate, length),
        policy=policy,
        seed=seed,
        tiers=(AZURE_TIER, *DEFAULT_TIERS),
        skip=0.05,
        label=label,
    )
    return replace(one, **changes)


def late_reports(poll_s: float, delay_s: float = 0.0, loss: float = 0.0) -> SimulationSettings:
    """Settings of a router that sees its engines late."""
    return SimulationSettings(poll_s=poll_s, report_delay_s=delay_s, report_loss=loss)
