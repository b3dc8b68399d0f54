"""What is sent when: an absolute schedule, fixed and seeded before the run begins."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from weighbridge.core.errors import ConfigError
from weighbridge.workload.arrivals import Arrivals, Gamma, Poisson, parse_arrivals
from weighbridge.workload.lengths import parse_lengths
from weighbridge.workload.mixes import MIXES, classes
from weighbridge.workload.prefixes import PrefixLevel, PrefixTree
from weighbridge.workload.readers import read_trace
from weighbridge.workload.streams import Streams
from weighbridge.workload.synthetic import RequestClass, Synthetic
from weighbridge.workload.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the schedule: when (seconds from the start), how long, for whom.

    `blocks` are content numbers of the leading blocks of `block_tokens` tokens: equal numbers become equal text.
    """

    id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    tier: str = ""
    tenant: str = ""
    kind: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    warmup: bool = False


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a recorded trace becomes a schedule.

    `from_s` and `for_s` cut a piece out of it, in the trace's own seconds. Times are then multiplied by `time_scale`,
    or stretched to `rate`; token counts are multiplied by `length_scale` and capped.
    """

    path: Path
    from_s: float = 0.0
    for_s: float | None = None
    time_scale: float = 1.0
    rate: float | None = None
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """How a schedule is drawn: arrivals, lengths or a named mix, shared prefixes. Give `count` or `duration_s`.

    `rate` may be infinite: everything is due at time 0. `burstiness` is the shape of gamma gaps (1 = Poisson, less =
    burstier), as in vLLM's bench. `ramp` is `linear` or `exponential`, from `ramp_from` to `ramp_to` requests per
    second over the duration. `prefix` is `FANOUTxTOKENS`, levels separated by commas.
    """

    rate: float
    duration_s: float | None = None
    count: int | None = None
    burstiness: float = 1.0
    arrivals: str = ""
    input: str = "500"
    output: str = "150"
    mix: str = ""
    heterogeneity: float = 1.0
    prefix: str = ""
    tier: str = ""
    ramp: str = ""
    ramp_from: float = 0.0
    ramp_to: float = 0.0


def from_trace(options: TraceOptions, seed: int = 0) -> list[Planned]:
    """The schedule of a trace. Raises `TraceError`, or `ConfigError` where the options leave nothing of it.

    A request that the recorded system never answered is sent and asks for one token.
    """
    _positive("--time-scale", options.time_scale)
    _positive("--length-scale", options.length_scale)
    end = math.inf if options.for_s is None else options.from_s + options.for_s
    kept = [r for r in read_trace(options.path, seed=seed).requests if options.from_s <= r.arrival_s < end]
    kept = kept[: options.count]
    if not kept:
        raise ConfigError("no request of the trace lies in the piece asked for", source="--trace-for")
    scale = options.time_scale
    if options.rate is not None:
        _positive("--rate", options.rate)
        span = kept[-1].arrival_s - options.from_s
        scale = len(kept) / options.rate / span if span > 0 else 1.0
    return [_from_request(k, r, (r.arrival_s - options.from_s) * scale, options) for k, r in enumerate(kept)]


def _from_request(index: int, r: TraceRequest, at_s: float, options: TraceOptions) -> Planned:
    scale = options.length_scale
    prompt = min(max(1, round(r.prompt_tokens * scale)), options.max_prompt_tokens or r.prompt_tokens)
    output = min(max(1, round(r.output_tokens * scale)), options.max_output_tokens or max(1, r.output_tokens))
    block = max(1, round(r.block_tokens * scale)) if r.block_tokens else 0
    return Planned(f"r{index:06d}", at_s, prompt, output, r.tier, r.tenant, r.kind, r.blocks, block)


def drawn(options: DrawOptions, seed: int = 0) -> list[Planned]:
    """A schedule drawn by seed. Raises `ConfigError` that names the flag."""
    if options.count is None and options.duration_s is None:
        raise ConfigError("give --duration SECONDS or --num-prompts N")
    if options.duration_s is not None and math.isinf(options.rate) and not options.ramp:
        if options.count is None:
            raise ConfigError("an infinite rate needs --num-prompts; --duration has no meaning with it")
        options = replace(options, duration_s=None)
    for flag, value in (("--duration", options.duration_s), ("--num-prompts", options.count)):
        if value is not None:
            _positive(flag, value)
    tree = _prefix_tree(options.prefix) if options.prefix else None
    workload = Synthetic(_arrivals(options), _classes(options), tree)
    requests = workload.generate(seed, count=options.count, duration_s=options.duration_s)
    plan = [
        Planned(
            f"r{k:06d}",
            r.arrival_s,
            r.prompt_tokens,
            r.output_tokens,
            r.tier,
            r.tenant,
            r.kind,
            r.blocks,
            r.block_tokens,
        )
        for k, r in enumerate(requests)
    ]
    if not plan:
        raise ConfigError("the schedule is empty: no arrival falls within the duration; raise --rate or --duration")
    return plan


def with_warmup(plan: Iterable[Planned], warmup_s: float) -> list[Planned]:
    """The plan with everything due before `warmup_s` marked as warm-up."""
    return [replace(p, warmup=True) if p.at_s < warmup_s else p for p in plan]


def _classes(options: DrawOptions) -> tuple[RequestClass, ...]:
    if options.mix:
        if options.mix not in MIXES:
            raise ConfigError(f"unknown mix '{options.mix}'; use one of {', '.join(MIXES)}", source="--mix")
        return classes(options.mix, options.heterogeneity)
    prompt = parse_lengths(options.input, "--input")
    output = parse_lengths(options.output, "--output")
    return (RequestClass("", 1.0, prompt, output, options.tier),)


def _arrivals(options: DrawOptions) -> Arrivals:
    if options.ramp:
        return Ramp(options.ramp, options.ramp_from, options.ramp_to, options.duration_s or 0.0)
    if math.isinf(options.rate):
        return AtOnce()
    _positive("--rate", options.rate)
    if options.arrivals:
        return parse_arrivals(options.arrivals, options.rate)
    _positive("--burstiness", options.burstiness)
    if options.burstiness == 1.0:
        return Poisson(options.rate)
    return Gamma(options.rate, 1.0 / math.sqrt(options.burstiness))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Every request at time 0."""

    rate: float = math.inf

    def times(self, rng: random.Random) -> Iterator[float]:
        """Zero for ever."""
        return itertools.repeat(0.0)


class Ramp:
    """Poisson arrivals whose rate goes from `start` to `end` over `duration_s`, linearly or exponentially.

    A unit-rate process, warped by the inverse of the rate's integral; exact at every rate.
    """

    def __init__(self, kind: str, start: float, end: float, duration_s: float) -> None:
        if kind not in ("linear", "exponential"):
            raise ConfigError(f"'{kind}' is not linear or exponential", source="--ramp-up-strategy")
        _positive("--ramp-up-start-rps", start)
        _positive("--ramp-up-end-rps", end)
        if duration_s <= 0:
            raise ConfigError("a ramp needs --duration", source="--ramp-up-strategy")
        self.kind, self.start, self.end, self.duration_s = kind, start, end, duration_s

    @property
    def rate(self) -> float:
        """Mean over the ramp."""
        return self._total() / self.duration_s

    def _total(self) -> float:
        if self.kind == "linear" or self.start == self.end:
            return (self.start + self.end) / 2.0 * self.duration_s
        return self.duration_s * (self.end - self.start) / math.log(self.end / self.start)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times up to the end of the ramp, then for ever at `end`."""
        unit = Poisson(1.0).times(rng)
        total = self._total()
        for mass in unit:
            if mass > total:
                yield self.duration_s + (mass - total) / self.end
            elif self.kind == "linear" or self.start == self.end:
                slope = (self.end - self.start) / self.duration_s
                # start * t + slope * t^2 / 2 = mass, in the form that has no cancellation for small slopes
                yield 2.0 * mass / (self.start + math.sqrt(self.start * self.start + 2.0 * slope * mass))
            else:
                growth = math.log(self.end / self.start) / self.duration_s
                yield math.log1p(mass * growth / self.start) / growth


def _prefix_tree(text: str) -> PrefixTree:
    levels = []
    for part in text.split(","):
        fanout, _, tokens = part.strip().partition("x")
        if not (fanout.isdigit() and tokens.isdigit() and int(fanout) and int(tokens)):
            raise ConfigError(
                f"'{part}' is not FANOUTxTOKENS, such as 10x512 for ten prefixes of 512 tokens", source="--prefix"
            )
        levels.append(PrefixLevel(int(fanout), int(tokens)))
    return PrefixTree(tuple(levels))


def _positive(flag: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"must be a finite number above 0, not {value:g}", source=flag)


def shards(plan: list[Planned], count: int) -> list[list[Planned]]:
    """The plan dealt out to `count` processes, each in order of time."""
    return [plan[k::count] for k in range(count)]


def seeds_of(seed: int, count: int) -> list[int]:
    """Seeds of repeated runs, derived from one."""
    rng = Streams(seed).get("repeats")
    return [seed] + [rng.randrange(1 << 31) for _ in range(count - 1)]
