"""A seeded fleet that does not exist: for `--demo`, for screenshots and for tests of every page.

Sixteen instances in two pools. One is overloaded, one has drifted, one has no profile and one drains, so that every
sentence and every picture of the dashboard has something to say. Equal seeds give equal snapshots, tick for tick.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from weighbridge.core.instance import Limits, Rates, StepTerms
from weighbridge.core.metrics import percentile
from weighbridge.dashboard.snapshot import (
    CandidateView,
    DecisionView,
    InstanceView,
    Latency,
    Level,
    Pair,
    Series,
    Snapshot,
    TenantView,
    TierView,
)

RING = 100
_ARRIVALS_PER_S = 12


@dataclass(frozen=True, slots=True)
class _Kind:
    engine: str
    count: int
    pool: str
    max_sequences: int
    kv_blocks: int
    prefill_s: float
    base_s: float
    sequence_s: float
    rate: float


_KINDS = {
    "h100": _Kind("vLLM", 4, "llama-70b", 64, 30_000, 0.000045, 0.0105, 0.00012, 9.0),
    "a100": _Kind("SGLang", 6, "llama-70b", 48, 16_250, 0.00009, 0.0155, 0.00022, 5.5),
    "l4": _Kind("vLLM", 4, "qwen-7b", 16, 3_750, 0.00031, 0.0310, 0.0006, 1.6),
    "cpu": _Kind("embedded", 2, "qwen-7b", 4, 500, 0.0021, 0.0520, 0.0040, 0.35),
}
_TIERS: tuple[tuple[str, int, tuple[tuple[str, float], ...], float], ...] = (
    ("interactive", 0, (("TTFT", 0.5),), 0.5),
    ("standard", 10, (("E2E", 10.0),), 0.4),
    ("batch", 20, (), 0.1),
)
_TENANTS = ("search", "support", "research", "reports")


@dataclass(slots=True)
class _Instance:
    name: str
    kind: _Kind
    level: Level
    phase: float
    error_bar: float
    bias: float = 0.0
    steady_load: float = 0.0
    draining: bool = False
    load: float = 0.5
    running: int = 0
    waiting: int = 0
    kv: float = 0.4
    kv_peak: float = 0.5
    age_s: float = 0.5
    pairs: deque[Pair] = field(default_factory=lambda: deque(maxlen=RING))


@dataclass(slots=True)
class _Tally:
    offered: deque[int] = field(default_factory=lambda: deque(maxlen=60))
    met: deque[int] = field(default_factory=lambda: deque(maxlen=60))
    shed: deque[int] = field(default_factory=lambda: deque(maxlen=60))
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=600))


class DemoSource:
    """A source like any other; `poll` moves it on by one second."""

    name = "demo"

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._second = 0
        self._number = 4200
        self._instances = list(self._build())
        self._decisions: deque[DecisionView] = deque(maxlen=120)
        self._tallies = {name: _Tally() for name, *_ in _TIERS}
        self._rings: dict[str, deque[float]] = {k: deque(maxlen=RING) for k in Series.__struct_fields__}
        for _ in range(RING):
            self.advance()

    async def poll(self) -> Snapshot:
        """One second later."""
        self.advance()
        return self.snapshot()

    async def close(self) -> None:
        """Nothing is held."""

    def _build(self) -> list[_Instance]:
        r = self._random
        found = []
        for prefix, kind in _KINDS.items():
            for k in range(kind.count):
                level: Level = "profile" if prefix != "cpu" else "online" if k == 0 else "tokens"
                bar = 0.06 + 0.08 * r.random()
                found.append(_Instance(f"{prefix}-{k}", kind, level, r.random() * 6, bar))
        by_name = {i.name: i for i in found}
        by_name["h100-2"].steady_load = 1.02
        by_name["a100-2"].level, by_name["a100-2"].bias = "online", 0.06
        by_name["a100-5"].draining = True
        by_name["l4-2"].bias, by_name["l4-2"].error_bar = 0.22, 0.07
        by_name["cpu-1"].bias, by_name["cpu-1"].error_bar = 0.12, 0.25
        return found

    def advance(self) -> None:
        """One second of the demo's own time."""
        self._second += 1
        for instance in self._instances:
            self._move(instance)
        arrivals = _ARRIVALS_PER_S + self._random.randrange(-3, 4)
        offered = {name: 0 for name, *_ in _TIERS}
        for _ in range(arrivals):
            offered[self._random.choices([t[0] for t in _TIERS], [t[3] for t in _TIERS])[0]] += 4
        for _ in range(2):
            self._settle()
            self._decisions.appendleft(self._decide())
        self._count(offered)

    def _move(self, i: _Instance) -> None:
        r = self._random
        wave = 0.64 + 0.18 * math.sin(self._second / 37 + i.phase) + r.gauss(0, 0.015)
        if i.steady_load:
            wave = i.steady_load + r.gauss(0, 0.006)
        i.load = max(0.03, min(1.04, wave * (0.35 if i.draining else 1.0)))
        i.running = max(0, min(i.kind.max_sequences, round(i.load * i.kind.max_sequences * 0.92 + r.gauss(0, 0.6))))
        i.waiting = max(0, round((i.load - 0.9) * 30)) if i.load > 0.9 else 0
        i.kv = max(0.02, min(0.99, i.load * 0.84 + r.gauss(0, 0.008)))
        i.kv_peak = min(1.04, i.kv + 0.06 + 0.05 * i.load)
        i.age_s = 0.1 + 0.9 * r.random()
        forecast = (i.kind.prefill_s * 2600 + i.waiting * 0.05 + 0.02) * (
            1 + 0.06 * math.sin(self._second / 9 + i.phase)
        )
        observed = forecast * (1 + i.bias + r.gauss(0, i.error_bar * 0.6))
        i.pairs.append(Pair(forecast, max(0.001, observed), forecast * i.error_bar))

    def _decide(self) -> DecisionView:
        r = self._random
        self._number += 1
        tier = r.choices([t[0] for t in _TIERS], [t[3] for t in _TIERS])[0]
        tokens_in, tokens_out = int(r.lognormvariate(7.0, 0.7)) + 8, int(r.lognormvariate(4.8, 0.5)) + 2
        pool = "llama-70b" if r.random() < 0.7 else "qwen-7b"
        blank = DecisionView(
            id=f"r{self._number}", at_s=float(self._second), tier=tier, tenant=r.choice(_TENANTS), model=pool,
            policy="calibrated", prompt_tokens=tokens_in, expected_output_tokens=tokens_out,
            length_estimate="median of tenant and length class",
        )  # fmt: skip
        if r.random() < 0.015:
            reason = "cannot_meet_slo" if tier == "interactive" else "queue_full"
            return replace(blank, outcome="rejected", reason=f"429 {reason}")
        made = [self._candidate(i, tokens_in, tokens_out) for i in self._instances if i.kind.pool == pool]
        usable = sorted((c for c in made if not c.excluded), key=lambda c: c.total_s or 0.0)
        best = usable[0]
        tied = [c for c in usable if (c.total_s or 0) - (best.total_s or 0) <= max(best.error_s or 0, c.error_s or 0)]
        names = {c.instance for c in tied} if len(tied) > 1 else set()
        chosen = r.choice(tied[:2])
        own = (chosen.total_s or 0) - dict(chosen.terms)["delay_to_others"]
        terms = dict(chosen.terms)
        note = f"{len(tied)} candidates equal within the error bar; a seeded draw chose" if len(tied) > 1 else ""
        return replace(
            blank,
            chosen=chosen.instance,
            queued_s=0.0 if r.random() < 0.7 else 0.2 * r.random(),
            note=note,
            candidates=tuple(replace(c, tie=c.instance in names) for c in (*usable, *(c for c in made if c.excluded))),
            forecast_s=own,
            forecast_ttft_s=terms["wait"] + terms["prefill"] + terms["transfer"],
            error_s=chosen.error_s,
        )

    def _candidate(self, i: _Instance, tokens_in: int, tokens_out: int) -> CandidateView:
        r, kind = self._random, i.kind
        cached = int(tokens_in * r.choice((0, 0, 0, 0.25, 0.9)) // 16 * 16)
        step = kind.base_s + kind.sequence_s * i.running
        fresh = tokens_in - cached
        terms = (
            ("wait", i.waiting * step * 3 + (0.02 if i.load > 0.85 else 0.004)),
            ("prefill", fresh * kind.prefill_s),
            ("transfer", 0.0 if r.random() < 0.85 else 0.02 + tokens_in * 0.00002),
            ("decode", tokens_out * step),
            ("delay_to_others", fresh * kind.prefill_s * i.running * 0.18),
        )
        total = sum(value for _, value in terms)
        reason = "draining" if i.draining else "KV would overflow" if i.kv_peak > 1.02 else ""
        return CandidateView(
            instance=i.name, terms=terms, total_s=total, error_s=total * i.error_bar, score=total,
            cached_tokens=cached, prefill_tokens=fresh, decode_tokens=tokens_out, excluded=reason,
            p_slo=max(0.02, min(0.995, 1.08 - total / 12)),
        )  # fmt: skip

    def _settle(self) -> None:
        """Requests whose time is over get their outcome."""
        by_name = {i.name: i for i in self._instances}
        for index, d in enumerate(self._decisions):
            if d.outcome != "running" or d.forecast_s is None or self._second - d.at_s < d.forecast_s:
                continue
            i = by_name[d.chosen]
            factor = max(0.3, 1 + i.bias + self._random.gauss(0, i.error_bar * 0.6))
            failed = self._random.random() < 0.01
            first = (d.forecast_ttft_s or 0.0) * factor
            self._decisions[index] = replace(
                d,
                outcome="failed" if failed else "ok",
                reason="connection reset by the engine" if failed else "",
                ttft_s=first,
                observed_s=None if failed else d.forecast_s * factor,
                output_tokens=max(1, round(d.expected_output_tokens * factor)),
            )
            self._tallies[d.tier].ttft.append(first)

    def _count(self, offered: dict[str, int]) -> None:
        r = self._random
        pressure = sum(i.waiting for i in self._instances)
        for name, *_ in _TIERS:
            tally, total = self._tallies[name], offered[name]
            shed = 1 if name != "interactive" and pressure > 6 and r.random() < 0.12 else 0
            missed = sum(r.random() < (0.012 + 0.0012 * pressure) for _ in range(total - shed))
            tally.offered.append(total)
            tally.shed.append(min(shed, total))
            tally.met.append(max(0, total - shed - missed))
        live = [i for i in self._instances if not i.draining]
        met, all_offered = (sum(sum(getattr(t, k)) for t in self._tallies.values()) for k in ("met", "offered"))
        rings = self._rings
        rings["attainment"].append(met / max(1, all_offered))
        rings["goodput"].append(met / min(60, self._second))
        rings["shed"].append(sum(sum(t.shed) for t in self._tallies.values()) / max(1, all_offered))
        rings["ttft"].append(0.30 + 0.008 * pressure + abs(r.gauss(0, 0.008)))
        rings["headroom"].append(1 - max(i.load for i in live))
        rings["error"].append(0.066 + r.gauss(0, 0.002))

    def snapshot(self) -> Snapshot:
        """The fleet now."""
        rings = {k: tuple(v) for k, v in self._rings.items()}
        return Snapshot(
            at_s=float(self._second),
            source="demo",
            policy="calibrated",
            instances=tuple(self._view(i) for i in self._instances),
            decisions=tuple(self._decisions),
            tiers=tuple(self._tier(index) for index in range(len(_TIERS))),
            goodput_per_s=rings["goodput"][-1],
            ttft_p99_s=rings["ttft"][-1],
            ttft_bound_s=0.5,
            ttft_tier="interactive",
            forecast_error=rings["error"][-1],
            error_bar=0.081,
            queued=sum(i.waiting for i in self._instances),
            series=Series(**rings),
        )

    def _view(self, i: _Instance) -> InstanceView:
        kind = i.kind
        step = StepTerms(base_s=kind.base_s, prefill_s=kind.prefill_s, sequence_s=kind.sequence_s, kv_s=2e-9)
        known = i.level == "profile"
        return InstanceView(
            name=i.name, pool=kind.pool, engine=kind.engine, models=(kind.pool,),
            state="draining" if i.draining else "up", level=i.level, running=i.running, waiting=i.waiting,
            max_sequences=kind.max_sequences, kv_used=i.kv, kv_peak=i.kv_peak, load=i.load, error_bar=i.error_bar,
            age_s=i.age_s, pairs=tuple(i.pairs),
            limits=Limits(token_budget=2048, max_sequences=kind.max_sequences, kv_blocks=kind.kv_blocks,
                          max_context=32_768),
            rates=Rates(prefill_tokens_per_s=1 / kind.prefill_s, decode_tokens_per_s=1 / kind.base_s),
            step=step if known else None, rate_per_s=kind.rate * i.load, prompt_tokens=1400.0, output_tokens=138.0,
        )  # fmt: skip

    def _tier(self, index: int) -> TierView:
        name, priority, bounds, _ = _TIERS[index]
        tally = self._tallies[name]
        ordered = sorted(tally.ttft) or [0.2]
        p50, p99 = percentile(ordered, 50), min(percentile(ordered, 99), self._rings["ttft"][-1] * (index + 1))
        shed = sum(tally.shed)
        waiting = sum(i.waiting for i in self._instances)
        queued = (waiting // 4, waiting - waiting // 4 - waiting // 3, waiting // 3)[index]
        tenants = tuple(
            TenantView(
                name=t, queued=queued // 2 if k == 0 else 0, served_tokens=(4 - k) * 9_000 * (3 - index) + 1_200 * k
            )
            for k, t in enumerate(_TENANTS)
        )
        return TierView(
            name=name, priority=priority, bounds=bounds, offered=sum(tally.offered), met=sum(tally.met),
            shed_429=shed, failed=index, cancelled=2 + index,
            reasons=((("cannot_meet_slo" if index == 0 else "queue_full"), shed),) if shed else (),
            queued=queued, queued_tokens=queued * 1400,
            ttft=Latency(p50, max(p50, p99)), tpot=Latency(0.016 + 0.003 * index, 0.031 + 0.006 * index),
            e2e=Latency(2.4 + index, 7.9 + 1.1 * index),
            retry_after_s=2.0 + index if shed else None, drain_s=1.7 + index if shed else None, tenants=tenants,
        )  # fmt: skip
