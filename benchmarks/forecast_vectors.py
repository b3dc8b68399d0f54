"""The forecast as a loop over instances, as it is, and as numpy vectors: when would vectors be quicker?

    python benchmarks/forecast_vectors.py

The fleets of `decision_time.py`. The vectors are given ready-made, so that nothing is counted for keeping them up to
date with the ledger; both ways must give the same numbers to 1e-9. CPU time of one request's forecasts on all
instances, best of seven rounds.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.decision_time import RUNNING, TIERS, fleet, request
from weighbridge.routing.forecast import SHARPNESS, SURE, Asked, forecast_terms
from weighbridge.routing.policy import Option, View
from weighbridge.routing.router import Router

Array = NDArray[np.float64]
ERROR, INTERFERENCE = 0.2, 0.3


def options_of(router: Router, prompt: int) -> list[Option]:
    return [Option(i, cached_tokens=0, prefill_tokens=prompt, decode_tokens=180) for i in router.fleet]


def vectors(options: list[Option]) -> dict[str, Array]:
    """What the formula reads of each instance, as columns; `tiers` as (5, tiers, instances), of count 0 where none."""
    stands = [option.instance.standing for option in options]
    costs = [option.instance.cost for option in options]
    names = ("step_s", "wait_s", "room", "busy", "decoding", "left", "held", "kv")
    columns = {name: np.array([float(getattr(each, name)) for each in stands]) for name in names}
    for name in ("prefill_s", "sequence_s", "kv_s", "base_s", "capacity"):
        columns[name] = np.array([float(getattr(each, name)) for each in costs])
    columns["prompt"] = np.array([float(option.prefill_tokens) for option in options])
    columns["cached"] = np.array([float(option.cached_tokens) for option in options])
    most = max(len(each.tiers) for each in stands if each is not None)
    tiers = np.zeros((5, most, len(options)))
    for n, each in enumerate(stands):
        for place, sums in enumerate(each.tiers if each is not None else ()):
            tiers[:, place, n] = sums.count, sums.each, sums.decoding, sums.first, sums.remaining
    columns["tiers"] = tiers
    return columns


def logistic(z: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-z))


def forecast_vectors(c: dict[str, Array], asked: Asked) -> list[Array]:
    """`forecast_terms` for instances that compute no other prompt just now, in the order of its result."""
    td, busy, held, left = c["step_s"], c["busy"], c["held"], c["left"]
    prefill = c["prefill_s"] * c["prompt"] + np.ceil(c["prompt"] / c["room"]) * td
    stay = np.exp(-0.25 * asked.output / left)
    half = stay * stay
    overlap = left * (1.0 - half * half) / asked.output
    fresh = asked.context - c["cached"]
    share = np.clip((held + fresh - c["capacity"]) / held, 0.0, 0.99)
    wait = c["wait_s"] + np.minimum(-np.log1p(-share) * left * td, 60.0)
    horizon = 0.25 * asked.output
    grown = busy * horizon
    peak = np.maximum(stay * (held + grown) + horizon, half * (held + 2.0 * grown) + 2.0 * horizon)
    over = fresh + np.maximum(peak, half * half * (held + 4.0 * grown) + asked.output) - c["capacity"]
    own = asked.context + 0.5 * asked.output
    beside = 1.0 + busy * overlap
    tpot = (c["base_s"] + c["sequence_s"] * beside + c["kv_s"] * (own + c["kv"] * overlap)) * asked.stretch
    stall = c["prefill_s"] * c["prompt"]
    shared = overlap * asked.output * (c["sequence_s"] + c["kv_s"] * own)
    delay = c["decoding"] * stall + busy * shared
    count, each, decoding, first, remaining = c["tiers"]
    before = asked.sharp * (1.0 + first - decoding * asked.now_s - remaining * tpot)
    after = before - asked.sharp * (each * shared + decoding * stall)
    counts = (after < SURE) & (before > -SURE)
    loss = (np.where(counts, logistic(before) - logistic(after), 0.0) * count).sum(axis=0)
    assert asked.tpot_s is not None
    hit = logistic(SHARPNESS * (asked.tpot_s - tpot) / (asked.error * asked.tpot_s))
    hit *= logistic(np.minimum(SHARPNESS * (asked.slack_s - wait - prefill) / asked.ttft_s, 30.0))
    return [wait, prefill, np.zeros_like(wait), tpot, delay, hit, loss, over]


def best_us(work: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(7):
        begun = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - begun) / times)
    return 1e6 * best


def main() -> None:
    print("| instances | loop us | vectors us |\n|---|---|---|")
    for count in (8, 16, 32, 64, 256, 1_000):
        rng = random.Random(3)
        router = fleet("calibrated", count, RUNNING, rng)
        made = request("new", rng, 0.5, "document")
        options = options_of(router, made.prompt_tokens)
        view = View(made, options, router.fleet, 0.5, rng, False, tier=TIERS[1], deadline_s=2.5)
        asked = Asked(view, options[0].decode_tokens, ERROR, INTERFERENCE)

        def loop(options: list[Option] = options, asked: Asked = asked) -> list[tuple[float, ...]]:
            return [forecast_terms(o, o.instance.cost, asked) for o in options if o.instance.cost is not None]

        rows = loop()
        columns = vectors(options)
        for place, vector in enumerate(forecast_vectors(columns, asked)):
            exact = np.array([row[place] for row in rows])
            if place == 7:  # exact only above 0
                exact, vector = np.maximum(exact, 0.0), np.maximum(vector, 0.0)
            assert np.allclose(exact, vector, rtol=1e-9, atol=1e-9), (place, exact[:4], vector[:4])
        times = max(20, 8_000 // count)
        both = best_us(loop, times), best_us(lambda c=columns, a=asked: forecast_vectors(c, a), times)
        print(f"| {count} | {both[0]:.1f} | {both[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
