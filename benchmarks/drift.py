"""How soon a gateway notices that an instance has become slower, and when its forecasts are right again.

    python benchmarks/drift.py --profile full.profile.json --before 40 --after 120 --factor 2

One embedded engine (one thread, four slots) and a gateway in this process; Poisson traffic through the gateway. After
`--before` seconds the engine's throttle is set to `--factor`. Prints JSON: seconds until the instance left its profile,
and until both factors of its cost model are within 10 % of the new speed for good.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import time
from pathlib import Path

from weighbridge.calibrate.check import Traffic, forecast_capacity
from weighbridge.calibrate.endpoint import Endpoint
from weighbridge.calibrate.files import read_profile
from weighbridge.calibrate.probe import Probe, Prober
from weighbridge.cost.online import OnlineCost
from weighbridge.engine.instance import InstanceOptions, start_instance
from weighbridge.engine.runner import Throttle
from weighbridge.gateway.gateway import Gateway
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings
from weighbridge.http.client import HttpClient
from weighbridge.routing.settings import RouterSettings


async def drift(args: argparse.Namespace) -> dict[str, object]:
    profile = read_profile(args.profile)
    engine = await start_instance(InstanceOptions(slots=4, context_tokens=1024, threads=1, probe=False))
    url = f"http://127.0.0.1:{engine.info.port}"
    instance = InstanceSettings(name="a", url=url, kind="embedded", profile=str(args.profile))
    settings = GatewaySettings(
        port=0, admin_port=0, instances=(instance,), router=RouterSettings(policy="least_requests")
    )
    gateway = Gateway(settings)
    await gateway.start()
    client = HttpClient()
    rng = random.Random(args.seed)
    try:
        assert await gateway.wait_ready(30.0)
        endpoint = Endpoint(url=f"http://127.0.0.1:{gateway.port}", model=engine.info.model_id, kind="embedded")
        prober = Prober(client, endpoint, rng)
        sizes = Traffic().sizes(10_000, 1023, rng)
        rate = args.load * forecast_capacity(profile, sizes[:300])
        sender = asyncio.create_task(_send(prober, sizes, rate, rng, args.before + args.after))
        begun = time.monotonic()
        seen: list[tuple[float, str, float, float]] = []
        throttled = False
        while not sender.done():
            await asyncio.sleep(0.5)
            now = time.monotonic() - begun
            if not throttled and now >= args.before:
                runner = engine.server.engine.runner
                runner.options = dataclasses.replace(runner.options, throttle=Throttle(args.factor, args.factor))
                throttled = True
            cost = gateway.driver.refinement.cost("a")
            assert cost is not None
            seen.append((now, cost.level, *_factors(cost)))
        return {"rate_per_s": rate, "requests": await sender, "drifts": cost.drifts, **_judge(seen, args)}
    finally:
        await client.close()
        await gateway.stop()
        await engine.stop()


async def _send(prober: Prober, sizes: list[tuple[int, int]], rate: float, rng: random.Random, seconds: float) -> int:
    """Poisson arrivals; returns how many requests ended well."""
    begun = time.monotonic()
    tasks = []
    for prompt, output in sizes:
        await asyncio.sleep(rng.expovariate(rate))
        if time.monotonic() - begun > seconds:
            break
        tasks.append(asyncio.create_task(prober.send("drift", Probe(prompt, output))))
    return len(await asyncio.gather(*tasks))


def _factors(cost: OnlineCost) -> tuple[float, float]:
    return math.exp(cost.factors["prefill"].log), math.exp(cost.factors["decode"].log)


def _judge(seen: list[tuple[float, str, float, float]], args: argparse.Namespace) -> dict[str, object]:
    before = [row for row in seen if row[0] < args.before]
    after = [row for row in seen if row[0] >= args.before]
    base = before[-1][2:]
    noticed = next((row[0] - args.before for row in after if row[1] == "online"), None)
    wrong = [
        row[0] for row in after if any(abs(f / (args.factor * b) - 1) > 0.1 for f, b in zip(row[2:], base, strict=True))
    ]
    right = max(wrong) - args.before if wrong and max(wrong) < after[-1][0] else None
    return {
        "left_profile_before": any(row[1] == "online" for row in before),
        "noticed_s": noticed,
        "right_again_s": right,
        "factors_before": base,
        "factors_after": after[-1][2:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--before", type=float, default=40.0)
    parser.add_argument("--after", type=float, default=120.0)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--load", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(drift(args))))


if __name__ == "__main__":
    main()
