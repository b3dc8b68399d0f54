"""A simulation's settings, and what it knows of one request between arrival and end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import Request
from weighbridge.sim.instance import Stepping
from weighbridge.sim.job import Job
from weighbridge.workload.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """How the router is fed. Times in seconds.

    Engines are polled every `poll_s` (None = never); a report arrives `report_delay_s` later or, with probability
    `report_loss`, not at all. Token counts of running requests arrive every `progress_s`, `Tick` every `tick_s`.
    `max_tokens` is the output budget clients ask for (an output ends there); None: they ask for exactly their output.
    A client without a first token after `patience_s` goes away. With `oracle_error` each request carries its true
    output length, times a lognormal error (0: exact; 1.5: typically off by a factor of 2.5), as its estimate.
    """

    seed: int = 0
    poll_s: float | None = 0.05
    report_delay_s: float = 0.0
    report_loss: float = 0.0
    progress_s: float | None = 0.25
    tick_s: float | None = 0.05
    max_tokens: int | None = 4096
    patience_s: float | None = None
    oracle_error: float | None = None
    stepping: Stepping = "auto"
    stall_s: float = 600.0


class Stages:
    """When one request passed which point, in seconds; the parts of a TTFT are the differences of neighbours."""

    __slots__ = ("arrived", "decode_added", "dispatched", "first_token", "prefilled", "transfer_started")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.dispatched = self.prefilled = self.transfer_started = self.decode_added = self.first_token = math.nan


class Live:
    """One request between arrival and end."""

    __slots__ = ("decode", "index", "job", "output_tokens", "prefill", "record", "request", "stages", "state")

    def __init__(self, request: Request, record: RequestRecord, output_tokens: int) -> None:
        self.request = request
        self.record = record
        self.output_tokens = output_tokens
        self.stages: Stages | None = None
        self.job: Job | None = None
        self.index = -1  # instance that the job is on
        self.prefill = -1  # P/D: where the KV is, or is being made
        self.decode = -1  # P/D: where it goes, -1 while open
        self.state: Literal["held", "prefill", "handoff", "transfer", "running"] = "held"


def arrived(trace: TraceRequest, name: str, settings: SimulationSettings, oracle: random.Random) -> Live:
    """A request of the trace as it comes in; its true output length stays in the result and out of its `Request`."""
    limit = settings.max_tokens
    output = trace.output_tokens if limit is None else min(trace.output_tokens, limit)
    tier = trace.tier or "standard"
    record = RequestRecord(
        id=name,
        scheduled_s=trace.arrival_s,
        status="unfinished",
        prompt_tokens=trace.prompt_tokens,
        tier=tier,
        tenant=trace.tenant,
    )
    expected = None
    if settings.oracle_error is not None:
        expected = max(1, round(output * math.exp(oracle.gauss(0.0, math.log1p(settings.oracle_error)))))
    request = Request(
        id=name,
        arrival_s=trace.arrival_s,
        prompt_tokens=trace.prompt_tokens,
        max_tokens=output if limit is None else limit,
        tenant=trace.tenant,
        tier=tier,
        endpoint=trace.kind or "chat",
        session=trace.session,
        prefix_hashes=trace.blocks,
        prefix_block_tokens=trace.block_tokens or 16,
        expected_output_tokens=expected,
    )
    return Live(request, record, output)
