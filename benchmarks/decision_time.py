"""Time of a decision, enqueue to dispatch, for fleets of 8, 64 and 1,000 instances, and with 100,000 requests held.

    python benchmarks/decision_time.py [--policy calibrated]

Every instance runs 30 requests of a mixed workload. *Arrival*: the router is handed a request that finds room and
sends it, sometimes with held ones. *From the queue*: a first token frees room and the router sends one of those held.
Times are per request sent. Run it on an idle machine: these are wall times of tens of microseconds. Decision records
are off, as in production under load; so is correction, which would learn from the made-up times of this script that
equal instances differ. The garbage collector runs as rarely as in the gateway.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived, RequestFinished
from weighbridge.core.instance import InstanceSpec, Limits
from weighbridge.core.request import Request, Tier
from weighbridge.gateway.process import tune_collector
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings
from weighbridge.sim.fleet import RTX_PRO_6000

TIERS = (
    Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.04),
    Tier(name="document", priority=0, ttft_s=2.0, tpot_s=0.06),
    Tier(name="reasoning", priority=0, ttft_s=1.0, tpot_s=0.05),
    Tier(name="batch", priority=20),
)
RUNNING = 30


def request(name: str, rng: random.Random, now_s: float, tier: str | None = None) -> Request:
    chosen = tier or rng.choices([t.name for t in TIERS[:3]], (0.6, 0.25, 0.15))[0]
    prompt = min(int(rng.lognormvariate(5.5, 1.0)) + 8, 8_000)
    return Request(id=name, arrival_s=now_s, prompt_tokens=prompt, max_tokens=4_096, tier=chosen)


def fleet(policy: str, count: int, running: int, rng: random.Random) -> Router:
    settings = RouterSettings(policy=policy, record_decisions=False, tiers=TIERS, reject_hopeless=False, correct=False)
    router = Router(settings)
    for n in range(count):
        limits = Limits(token_budget=2_048, max_sequences=256, kv_blocks=6_000)
        spec = InstanceSpec(name=f"i{n}", step=RTX_PRO_6000, limits=limits, error=0.1)
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    for n, instance in enumerate(i for i in list(router.fleet) for _ in range(running)):
        asked = request(f"old{n}", rng, 0.0)
        tier = router.tiers[asked.tier]
        router.fleet.charge(asked, instance, cached_tokens=0, expected_output_tokens=200, now_s=0.0, tier=tier)
        router.fleet.first_token(asked.id, 0.01, 190)
    return router


def arrivals(policy: str, count: int, samples: int) -> list[float]:
    rng = random.Random(7)
    router = fleet(policy, count, RUNNING, rng)
    running, times, now = list(router.fleet.charges), [], 0.5
    for n in range(samples):
        # a rate at which the fleet keeps up, so that most arrivals find room
        now += 0.2 / count
        event = RequestArrived(request=request(f"new{n}", rng, now))
        start = time.perf_counter_ns()
        actions = router.handle(event, now)
        spent = time.perf_counter_ns() - start
        sent = [a.request_id for a in actions if isinstance(a, Dispatch)]
        if event.request.id in sent:
            times.append(spent / 1e3 / len(sent))
        for name in sent:
            router.handle(FirstToken(request_id=name), now)
            running.append(name)
            ended = running.pop(rng.randrange(len(running)))
            router.handle(RequestFinished(request_id=ended, output_tokens=150), now)
    return times


def from_queue(policy: str, count: int, held: int, samples: int) -> list[float]:
    rng = random.Random(7)
    router = fleet(policy, count, 2, rng)
    now = 0.5
    waiting: list[str] = []
    n = 0
    while router.held_requests < held:
        n += 1
        actions = router.handle(RequestArrived(request=request(f"held{n}", rng, now, "batch")), now)
        waiting += [a.request_id for a in actions if isinstance(a, Dispatch)]
    times = []
    for _ in range(samples):
        if not waiting:
            break
        now += 0.02
        name = waiting.pop(0)
        start = time.perf_counter_ns()
        actions = router.handle(FirstToken(request_id=name), now)
        spent = time.perf_counter_ns() - start
        sent = [a.request_id for a in actions if isinstance(a, Dispatch)]
        if sent:
            times.append(spent / 1e3 / len(sent))
        waiting += sent
        more = [*router.handle(RequestFinished(request_id=name, output_tokens=100), now)]
        waiting += [a.request_id for a in more if isinstance(a, Dispatch)]
    return times


def line(label: str, times: list[float]) -> None:
    times.sort()
    mean = sum(times) / len(times)
    print(
        f"| {label} | {len(times)} | {mean:.0f} | {times[len(times) // 2]:.0f} | {times[int(len(times) * 0.99)]:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="calibrated")
    policy = parser.parse_args().policy
    tune_collector()
    print(f"| {policy} | decisions | mean us | p50 us | p99 us |\n|---|---|---|---|---|")
    for count, samples in ((8, 4_000), (64, 2_000), (1_000, 400)):
        line(f"arrival, {count} instances", arrivals(policy, count, samples))
    for held in (100, 100_000):
        line(f"from the queue, 8 instances, {held} held", from_queue(policy, 8, held, 2_000))


if __name__ == "__main__":
    main()
