"""What another policy, fleet or load would have done with a recorded log: the question, the answer, and the work.

The log's requests, with the output lengths that really came, run through the simulator: first under the recorded
policy, so that the reader sees how far the simulated world is from the recorded one, then under each other policy on
the same requests and seeds. Differences are paired request by request with that first run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import InputError
from weighbridge.core.event_log import Header, LogReader
from weighbridge.core.events import InstanceUp, RequestArrived
from weighbridge.core.instance import InstanceSpec
from weighbridge.core.metrics import RequestRecord, Summary, percentile, summarise
from weighbridge.core.request import Request, Tier
from weighbridge.dashboard.observed import FALL_BACK_BUDGET, step_terms
from weighbridge.dashboard.observer import Observer
from weighbridge.routing.settings import RouterSettings
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.runs import Run, make_simulation
from weighbridge.workload.trace import TraceRequest

MOST_REQUESTS = 20_000
MOST_POLICIES = 5
STEP_NOISE = 0.1
QUANTILES = 101
CHANGED = 20

Report = Callable[[float, str], None]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`start_s` and `end_s` cut the log by arrival, counted from its first entry; `counts` says how many copies of an
    instance there shall be (0 removes it); `load` 2 means twice the arrival rate."""

    log: str
    policies: tuple[str, ...]
    start_s: float = 0.0
    end_s: float | None = None
    load: float = 1.0
    counts: dict[str, int] = {}
    seeds: int = 3


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `difference` is the change of attainment against the re-simulated recorded policy, with
    the half-width of its 95 % interval over requests; `seed_range` the spread of attainment over seeds."""

    label: str
    policy: str
    attainment: float
    by_tier: dict[str, float] = {}
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    e2e_p99_s: float | None = None
    shed: float = 0.0
    goodput_per_s: float = 0.0
    instance_s: float | None = None
    difference: float | None = None
    half_width: float | None = None
    seed_range: tuple[float, float] | None = None
    ttft_quantiles: tuple[float, ...] = ()
    share: dict[str, float] = {}


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """One request that fared differently: end-to-end seconds before and after (None: it did not end well)."""

    id: str
    tier: str
    prompt_tokens: int
    output_tokens: int
    was_on: str
    now_on: str
    before_s: float | None
    after_s: float | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the page shows. `fidelity` is the attainment difference between re-simulation and recording."""

    question: Question
    recorded_policy: str
    requests: int
    guessed_lengths: int
    span_s: float
    instances: int
    rows: tuple[Row, ...]
    fidelity: float
    fidelity_e2e: float | None
    changed: dict[str, tuple[Changed, ...]]
    first_difference: dict[str, str]


@dataclass(frozen=True, slots=True)
class Recording:
    """What a log holds, as far as it is needed here."""

    header: Header
    specs: dict[str, InstanceSpec]
    requests: list[Request]
    records: dict[str, RequestRecord]


def read_specs(path: Path, most_lines: int = 300) -> tuple[str, dict[str, InstanceSpec]]:
    """Policy and instances that a log's first lines name. Raises LogError or OSError."""
    specs: dict[str, InstanceSpec] = {}
    with path.open("rb") as stream:
        reader = LogReader(stream, path.name)
        for number, entry in enumerate(reader):
            if isinstance(entry.e, InstanceUp):
                specs[entry.e.spec.name] = entry.e.spec
            if number >= most_lines:
                break
    return str(reader.header.router.get("policy", "")), specs


def read_recording(path: Path, start_s: float, end_s: float | None) -> Recording:
    """Requests that arrived in the window and what became of them. Raises InputError for a window that is too large."""
    observer = Observer(window_s=None)
    specs: dict[str, InstanceSpec] = {}
    requests: list[Request] = []
    with path.open("rb") as stream:
        reader = LogReader(stream, path.name)
        observer.begin(reader.header)
        first: float | None = None
        for entry in reader:
            first = entry.t if first is None else first
            if isinstance(entry.e, InstanceUp):
                specs[entry.e.spec.name] = entry.e.spec
            elif isinstance(entry.e, RequestArrived):
                since = entry.t - first
                if since < start_s or (end_s is not None and since > end_s):
                    continue
                requests.append(entry.e.request)
                if len(requests) > MOST_REQUESTS:
                    raise InputError(f"the window holds more than {MOST_REQUESTS:,} requests; choose a shorter one")
            observer.feed(entry)
    if not requests:
        raise InputError("no request arrived in this window; choose another")
    return Recording(reader.header, specs, requests, {r.id: r for r in observer.records()})


def trace_of(recording: Recording, load: float) -> tuple[list[TraceRequest], int]:
    """The requests as a workload, and how many had no recorded output length (the median was taken)."""
    lengths = [r.output_tokens for r in recording.records.values() if r.status == "ok" and r.output_tokens > 0]
    if not lengths:
        raise InputError("no request of this window ended well, so no output length is known")
    median = round(statistics.median(lengths))
    begin = recording.requests[0].arrival_s
    made, guessed = [], 0
    for request in recording.requests:
        record = recording.records.get(request.id)
        known = record is not None and record.status == "ok" and record.output_tokens > 0
        guessed += not known
        output = record.output_tokens if known and record is not None else min(median, request.max_tokens)
        made.append(
            TraceRequest(
                arrival_s=(request.arrival_s - begin) / load, prompt_tokens=request.prompt_tokens,
                output_tokens=max(1, output), kind=request.endpoint, tier=request.tier, tenant=request.tenant,
                session=request.session, blocks=request.prefix_hashes, block_tokens=request.prefix_block_tokens,
            )
        )  # fmt: skip
    return made, guessed


def fleet_of(specs: dict[str, InstanceSpec], counts: dict[str, int]) -> SimulatedFleet:
    """The recorded fleet with `counts` copies of some instances. Raises InputError where a cost model is missing."""
    made: list[SimulatedInstance] = []
    for spec in specs.values():
        copies = counts.get(spec.name, 1)
        if copies == 0:
            continue
        terms = step_terms(spec)
        if terms is None:
            raise InputError(
                f"{spec.name} has no cost model in this log, so it cannot be simulated: run `weighbridge calibrate "
                f"{spec.name} --config FILE` and record again, or set its count to 0"
            )
        limits = spec.limits
        config = SchedulerConfig(
            token_budget=limits.token_budget or FALL_BACK_BUDGET, max_sequences=limits.max_sequences or 256,
            block_tokens=limits.block_size, blocks=limits.kv_blocks or 6_000, prefix_caching=limits.prefix_caching,
        )  # fmt: skip
        made += [
            SimulatedInstance(
                spec.name if k == 0 else f"{spec.name}+{k}", terms, config, spec.role, error=spec.error,
                disturbance=Disturbance(noise=STEP_NOISE), pool=spec.pool, priorities=spec.takes_priority,
            )
            for k in range(copies)
        ]  # fmt: skip
    if not made:
        raise InputError("no instance is left; set a count above 0")
    return SimulatedFleet(tuple(made))


@dataclass(frozen=True, slots=True)
class _Requests:
    made: Sequence[TraceRequest]

    def requests(self, seed: int) -> Sequence[TraceRequest]:
        """The same for every seed."""
        return self.made


def answer(question: Question, report: Report) -> Answer:
    """Do the work. `report` is called with the share done and what is being done.

    Raises WeighbridgeError for a question that has no answer, OSError for a log that cannot be read.
    """
    report(0.0, "reading the log")
    recording = read_recording(Path(question.log), question.start_s, question.end_s)
    requests, guessed = trace_of(recording, question.load)
    fleet = fleet_of(recording.specs, question.counts)
    settings = msgspec.convert(recording.header.router, RouterSettings)
    tiers = {t.name: t for t in settings.tiers}
    recorded = [recording.records[r.id] for r in recording.requests if r.id in recording.records]
    base = settings.policy
    names = [base, *(p for p in dict.fromkeys(question.policies) if p != base)]
    total = len(names) * question.seeds
    runs: dict[str, list[list[RequestRecord]]] = {}
    spans: dict[str, float] = {}
    for index, name in enumerate(names):
        for seed in range(1, question.seeds + 1):
            done = index * question.seeds + seed - 1
            text = f"{name}, seed {seed} of {question.seeds}"

            def moved(number: int, now_s: float, done: int = done, text: str = text) -> None:
                if number % max(1, len(requests) // 50) == 0:
                    report((done + number / len(requests)) / total, text)

            one = Run(
                fleet=fleet, workload=_Requests(requests), policy=name, seed=seed, tiers=settings.tiers,
                options=settings.policy_options if name == base else {}, router=_router(recording.header),
            )  # fmt: skip
            simulation = make_simulation(one, on_arrival=moved)
            records = simulation.run(requests)
            runs.setdefault(name, []).append(records)
            spans[name] = max(r.last_token_s or r.scheduled_s for r in records)
    rows = [_row("recorded", base, [recorded], tiers, None)]
    rows += [
        _row("re-simulated, same policy" if k == 0 else name, name, runs[name], tiers, runs[base] if k else None,
             len(fleet.instances) * spans[name])
        for k, name in enumerate(names)
    ]  # fmt: skip
    return Answer(
        question=question, recorded_policy=base, requests=len(requests), guessed_lengths=guessed,
        span_s=requests[-1].arrival_s, instances=len(fleet.instances), rows=tuple(rows),
        fidelity=rows[1].attainment - rows[0].attainment, fidelity_e2e=_fidelity(recorded, recording, runs[base][0]),
        changed={n: _changed(recording.requests, runs[base][0], runs[n][0]) for n in names[1:]},
        first_difference={n: _first_difference(recording.requests, runs[base][0], runs[n][0]) for n in names[1:]},
    )  # fmt: skip


def _router(header: Header) -> dict[str, Any]:
    """Recorded router settings that a run does not set itself."""
    own = ("policy", "policy_options", "seed", "tiers", "record_decisions")
    return {k: v for k, v in header.router.items() if k not in own}


def _hits(records: Sequence[RequestRecord], tiers: dict[str, Tier]) -> list[bool]:
    return [r.meets(tiers[r.tier]) if r.tier in tiers else r.status == "ok" for r in records]


def _row(
    label: str, policy: str, runs: list[list[RequestRecord]], tiers: dict[str, Tier],
    against: list[list[RequestRecord]] | None, instance_s: float | None = None,
) -> Row:  # fmt: skip
    summaries: list[Summary] = [summarise(records, tiers) for records in runs]
    difference = half = None
    if against is not None:
        pairs = [
            [int(b) - int(a) for a, b in zip(_hits(one, tiers), _hits(other, tiers), strict=True)]
            for one, other in zip(against, runs, strict=True)
        ]
        each = [statistics.fmean(values) for values in zip(*pairs, strict=True)]
        difference = statistics.fmean(each)
        half = 1.96 * statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    ttft = sorted(v for records in runs for r in records if (v := r.ttft_s) is not None)
    shares = [s.attainment for s in summaries]
    return Row(
        label=label, policy=policy, attainment=statistics.fmean(shares), by_tier=summaries[0].attainment_by_tier,
        ttft_p50_s=_known(percentile(ttft, 50)), ttft_p99_s=_known(percentile(ttft, 99)),
        e2e_p99_s=_known(statistics.fmean(s.e2e_s.p99 for s in summaries)),
        shed=statistics.fmean(s.shed_rate for s in summaries),
        goodput_per_s=statistics.fmean(s.goodput_per_s for s in summaries), instance_s=instance_s,
        difference=difference, half_width=half, seed_range=(min(shares), max(shares)) if len(shares) > 1 else None,
        ttft_quantiles=tuple(percentile(ttft, q) for q in range(QUANTILES)) if ttft else (),
        share=summaries[0].share_by_instance,
    )  # fmt: skip


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _fidelity(recorded: list[RequestRecord], recording: Recording, simulated: list[RequestRecord]) -> float | None:
    """Relative difference of the mean E2E time, over requests that ended well in both worlds."""
    place = {request.id: k for k, request in enumerate(recording.requests)}
    pairs = [(a, b) for r in recorded if (a := r.e2e_s) is not None and (b := simulated[place[r.id]].e2e_s) is not None]
    if not pairs:
        return None
    return sum(b for _, b in pairs) / sum(a for a, _ in pairs) - 1


def _changed(
    requests: Sequence[Request], before: Sequence[RequestRecord], after: Sequence[RequestRecord]
) -> tuple[Changed, ...]:
    def size(pair: tuple[Request, RequestRecord, RequestRecord]) -> float:
        _, a, b = pair
        if a.e2e_s is None or b.e2e_s is None:
            return math.inf if (a.e2e_s is None) != (b.e2e_s is None) else 0.0
        return abs(b.e2e_s - a.e2e_s)

    ranked = sorted(zip(requests, before, after, strict=True), key=size, reverse=True)[:CHANGED]
    return tuple(
        Changed(
            id=q.id, tier=q.tier, prompt_tokens=q.prompt_tokens, output_tokens=b.output_tokens or a.output_tokens,
            was_on=a.instance, now_on=b.instance, before_s=a.e2e_s, after_s=b.e2e_s,
        )
        for q, a, b in ranked
    )  # fmt: skip


def _first_difference(
    requests: Sequence[Request], before: Sequence[RequestRecord], after: Sequence[RequestRecord]
) -> str:
    for q, a, b in zip(requests, before, after, strict=True):
        if a.instance != b.instance:
            return f"{q.id} at {a.scheduled_s:.2f} s: {a.instance or 'nowhere'} became {b.instance or 'nowhere'}"
    return "none: every request went to the same instance"
