"""The instances alone: request k goes to instance k modulo n, without a router. Measures the simulator's own speed."""

from __future__ import annotations

from collections.abc import Iterable

from weighbridge.core.metrics import RequestRecord
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.instance import SimInstance, Stepping, make_instance
from weighbridge.sim.job import FIRST_TOKEN, Job
from weighbridge.workload.trace import TraceRequest


def run_fixed(
    fleet: SimulatedFleet, requests: Iterable[TraceRequest], stepping: Stepping = "auto"
) -> tuple[list[RequestRecord], list[SimInstance]]:
    """Simulate requests in arrival order on instances that do not influence each other."""
    instances: list[SimInstance] = [
        make_instance(one.name, one.scheduler, CostRunner(one.terms, disturbance=one.disturbance), stepping)
        for one in fleet.instances
    ]
    records: list[RequestRecord] = []
    count = len(instances)
    for number, request in enumerate(requests):
        if request.failed:
            continue
        now = request.arrival_s
        instance = instances[number % count]
        if instance.wake_s < now:
            advance_until(instance, now)
        record = RequestRecord(
            id=f"r{number}",
            scheduled_s=now,
            status="unfinished",
            prompt_tokens=request.prompt_tokens,
            tier=request.tier or "standard",
            instance=instance.name,
        )
        records.append(record)
        job = Job(record.id, request.prompt_tokens, request.output_tokens, record, hashes=request.blocks)
        if not instance.add(job, now):
            record.status, record.error = "failed", "the request does not fit the engine"
    for instance in instances:
        advance_until(instance, float("inf"))
    return records, instances


def advance_until(instance: SimInstance, until_s: float) -> None:
    """Run an instance up to, and without, the step that ends at `until_s`; fills in the records of its jobs."""
    wake = instance.wake_s
    while wake < until_s:
        for kind, job in instance.advance(wake):
            record: RequestRecord = job.owner
            if kind is FIRST_TOKEN:
                record.first_token_s = wake
            else:
                record.status = "ok"
                record.last_token_s = wake
                record.output_tokens = job.output_tokens
                record.preemptions = job.preemptions
                record.cached_tokens = job.cached_tokens
        wake = instance.wake_s
