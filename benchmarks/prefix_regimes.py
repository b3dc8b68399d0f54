"""Workloads with shared prefixes, on eight instances with prefix caches: what holding must not lose.

Rates are such that the best baseline is just short of all, or a little beyond that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.prefix import TIER, Documents
from weighbridge.sim.runs import Generated, Recorded, Run, Workload
from weighbridge.workload.arrivals import Bursts
from weighbridge.workload.lengths import Lognormal
from weighbridge.workload.prefixes import PrefixLevel, PrefixTree
from weighbridge.workload.synthetic import Conversations, RequestClass, Synthetic

CHAT = RequestClass("chat", 1.0, Lognormal(150, 0.6), Lognormal(120, 0.6), "chat")
SECONDS = 20.0
TURNS = 6.0
MOONCAKE = "mooncake_conversation.jsonl.gz"
MOONCAKE_RATE = 13.0
MOONCAKE_TIER = Tier(name="mooncake", priority=0, ttft_s=5.0, tpot_s=0.1)


def _tree(*levels: tuple[int, int], rate: float) -> Workload:
    tree = PrefixTree(tuple(PrefixLevel(fanout, tokens) for fanout, tokens in levels))
    return Generated(Synthetic(Bursts(rate), (CHAT,), prefixes=tree), duration_s=SECONDS)


def _conversations(rate: float) -> Workload:
    """Turns that send their whole history; think time 8 s."""
    made = Conversations(
        Bursts(rate / TURNS), Lognormal(300, 0.8), Lognormal(120, 0.6), turns=TURNS, think_s=8.0, system_tokens=400,
        tier="chat",
    )  # fmt: skip
    return Generated(made, duration_s=SECONDS)


def _run(workload: Workload, blocks: int = 6_000) -> Callable[..., Run]:
    fleet = fleets.mixed(8, scheduler=SchedulerConfig(blocks=blocks, prefix_caching=True))
    return lambda policy, seed: Run(
        fleet=fleet, workload=workload, policy=policy, seed=seed, tiers=(TIER, *DEFAULT_TIERS), skip=0.05
    )


PREFIX_REGIMES: dict[str, Callable[..., Run]] = {
    "160 documents, 130/s": _run(Documents("shared", 130.0, SECONDS)),
    "160 documents, 170/s": _run(Documents("shared", 170.0, SECONDS)),
    "160 documents, 200/s": _run(Documents("shared", 200.0, SECONDS)),
    "160 documents, 110/s, 2,500 blocks": _run(Documents("shared", 110.0, SECONDS), 2_500),
    "160 documents, 70/s, 1,500 blocks": _run(Documents("shared", 70.0, SECONDS), 1_500),
    "8,000 documents, 75/s": _run(_tree((4, 400), (2_000, 1_400), rate=75.0)),
    "four hot prefixes, 260/s": _run(_tree((4, 2_000), rate=260.0)),
    "one prefix for all, 300/s": _run(_tree((1, 1_500), rate=300.0)),
    "growing conversations, 650/s": _run(_conversations(650.0)),
    "growing conversations, 250/s, 1,500 blocks": _run(_conversations(250.0), 1_500),
    "no shared prefix, 55/s": _run(Documents("unrelated", 55.0, SECONDS)),
}


def mooncake_run(traces: Path, policy: str, seed: int, load: float = 1.0, length: int = 800, count: int = 8) -> Run:
    """A slice of the Mooncake conversation trace: 8,000-token prompts, prefixes of earlier turns."""
    workload = Recorded(str(traces / MOONCAKE), rate=MOONCAKE_RATE * load, length=length, tier=MOONCAKE_TIER.name)
    fleet = fleets.mixed(count, scheduler=SchedulerConfig(prefix_caching=True))
    return Run(
        fleet=fleet, workload=workload, policy=policy, seed=seed, tiers=(MOONCAKE_TIER, *DEFAULT_TIERS), skip=0.05
    )
