"""What is simulated: instances with their true step costs and what the router believes of them, links, and faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weighbridge.core.instance import InstanceSpec, Limits, Rates, Role, StepTerms, Transfer
from weighbridge.cost.step import COEFFICIENTS, rates_of
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance

# Fits of recorded vLLM 0.19 runs with Llama-3.1-8B (see docs/experiments/truth.md); base, sequence and KV terms of a
# saturated run cannot be told apart, these lie between equally good fits.
RTX_PRO_6000 = StepTerms(base_s=0.011, prefill_s=4.0e-5, sequence_s=3.0e-5, kv_s=8.0e-8)
RTX_4090 = StepTerms(base_s=0.015, prefill_s=9.0e-5, sequence_s=3.0e-5, kv_s=1.2e-7)


def scaled(terms: StepTerms, factor: float) -> StepTerms:
    """Every coefficient times `factor`: 2 is half the speed."""
    values = {name: getattr(terms, name) * factor for name in COEFFICIENTS}
    knots = tuple((count, seconds * factor) for count, seconds in terms.sequence_knots)
    return StepTerms(**values, sequence_knots=knots)


@dataclass(frozen=True, slots=True)
class Link:
    """KV transfer into a decode instance: FIFO, `latency_s + bytes / bandwidth`."""

    latency_s: float = 0.005
    bytes_per_token: int = 131_072
    bandwidth: float = 10e9

    def seconds(self, tokens: int) -> float:
        """How long the link is busy with the KV of that many tokens (latency apart)."""
        return tokens * self.bytes_per_token / self.bandwidth

    @property
    def terms(self) -> Transfer:
        """As a calibration would have found it."""
        return Transfer(latency_s=self.latency_s, seconds_per_token=self.bytes_per_token / self.bandwidth)


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """One instance: its true costs and limits, and what the router is told (`believed`; None = the truth).

    `knows_costs` False tells the router neither step terms nor rates, as if it had never been calibrated.
    `rates` replaces the two-rate view that is derived from the step terms. `priorities` says that its scheduler orders
    by priority, and tells the router so. `preemption` names the modes in which it preempts a request when asked to.
    `link` is KV's way into it where that is not the fleet's, and is told to the router like its costs.
    """

    name: str
    terms: StepTerms
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    role: Role = "mixed"
    believed: StepTerms | None = None
    knows_costs: bool = True
    error: float | None = 0.1
    disturbance: Disturbance = field(default_factory=Disturbance)
    pool: str = "default"
    priorities: bool = False
    rates: Rates | None = None
    preemption: tuple[str, ...] = ()
    link: Link | None = None

    def spec(self) -> InstanceSpec:
        """What a calibrated gateway would know of it."""
        config = self.scheduler
        step = self.believed or self.terms
        return InstanceSpec(
            name=self.name,
            pool=self.pool,
            kind="simulated",
            role=self.role,
            limits=Limits(
                token_budget=config.token_budget,
                max_sequences=config.max_sequences,
                block_size=config.block_tokens,
                kv_blocks=config.blocks,
                prefix_caching=config.prefix_caching,
            ),
            rates=(self.rates or rates_of(step, token_budget=config.token_budget)) if self.knows_costs else None,
            step=step if self.knows_costs else None,
            error=self.error if self.knows_costs else None,
            takes_priority=self.priorities,
            preemption=self.preemption,
            transfer=self.link.terms if self.link is not None and self.knows_costs else None,
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to an instance at `at_s`.

    `slow`: its steps take `factor` times as long from now on. `fail`: it dies with all it holds; the router is told
    when the next health check would have noticed. `start`: it comes (back) up, empty, after `cold_start_s`.
    """

    at_s: float
    kind: Literal["slow", "fail", "start"]
    instance: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Instances, their links, and what happens to them. `absent` instances are not up at the beginning."""

    instances: tuple[SimulatedInstance, ...]
    link: Link = Link()
    faults: tuple[Fault, ...] = ()
    absent: frozenset[str] = field(default_factory=frozenset)
    cold_start_s: float = 20.0
    detect_s: float = 0.5

    def changed(self, **changes: Any) -> SimulatedFleet:
        """The fleet with the same changes made to every instance, such as `disturbance=Disturbance(noise=0.1)`."""
        return replace(self, instances=tuple(replace(i, **changes) for i in self.instances))


def mixed(
    count: int, terms: StepTerms = RTX_PRO_6000, *, blocks: int = 6_000, scheduler: SchedulerConfig | None = None
) -> SimulatedFleet:
    """`count` equal instances that prefill and decode."""
    config = scheduler or SchedulerConfig(blocks=blocks)
    return SimulatedFleet(tuple(SimulatedInstance(f"i{k}", terms, config) for k in range(count)))


def two_speeds(
    fast: int, slow: int, factor: float = 2.0, terms: StepTerms = RTX_PRO_6000, *, blocks: int = 6_000
) -> SimulatedFleet:
    """`fast` instances and `slow` ones whose steps take `factor` times as long."""
    config = SchedulerConfig(blocks=blocks)
    return SimulatedFleet(
        tuple(SimulatedInstance(f"fast{k}", terms, config) for k in range(fast))
        + tuple(SimulatedInstance(f"slow{k}", scaled(terms, factor), config) for k in range(slow))
    )


def disaggregated(
    prefill: int, decode: int, terms: StepTerms = RTX_PRO_6000, *, blocks: int = 6_000, link: Link | None = None
) -> SimulatedFleet:
    """Prefill instances that hand KV over to decode instances."""
    config = SchedulerConfig(blocks=blocks)
    return SimulatedFleet(
        tuple(SimulatedInstance(f"p{k}", terms, config, "prefill", pool="prefill") for k in range(prefill))
        + tuple(SimulatedInstance(f"d{k}", terms, config, "decode", pool="decode") for k in range(decode)),
        link=link or Link(),
    )
