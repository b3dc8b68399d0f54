"""Latency layers of a decision, each apart: encode and scores, the whole model choice, the instance choice, the answer.

Each prompt size runs in a process of its own, because only the first decision of a process is cold. Every timed call
gets fresh text. Layers are never added up and never stand for one another.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from weighbridge.bench.provenance import machine
from weighbridge.bench.run import RunOptions, measure
from weighbridge.bench.schedule import DrawOptions
from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.errors import ServiceError
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived, RequestFinished
from weighbridge.core.instance import InstanceSpec, Limits, Rates, StepTerms
from weighbridge.core.metrics import percentile
from weighbridge.core.request import Request
from weighbridge.routing.router import Router, RouterSettings

SIZES = (15, 256, 1024, 8192)
WARM_UP = 5
INSTANCES = 8
REQUESTS = 10
BUDGET = 2048


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one layer; `cold_ms` is its first call in a fresh process."""

    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    min_ms: float
    max_ms: float
    cold_ms: float


class SizeLayers(msgspec.Struct, frozen=True, kw_only=True):
    """All layers at one prompt size. `load_ms` reads pool and checkpoint and sets the encoder up."""

    tokens: int
    chars: int
    load_ms: float
    encode_scores: Layer
    decide: Layer
    instance: Layer


def layers(tokens: int, iterations: int, pool: str, checkpoint: str, policy: str) -> SizeLayers:
    """Time one size in this process, which must not have decided anything before."""
    from weighbridge.selection.opening import open_selector
    from weighbridge.selection.settings import SelectionSettings
    from weighbridge.selection.text import routing_text
    from weighbridge.selection.timing import bench_text

    begun = time.perf_counter()
    selector = open_selector(SelectionSettings(pool=pool, checkpoint=checkpoint, gate=False))
    load = time.perf_counter() - begun
    rng = random.Random(tokens)

    def fresh() -> list[dict[str, str]]:
        return [{"role": "user", "content": bench_text(tokens, rng.randrange(1 << 40))}]

    def encode() -> Callable[[], object]:
        text = routing_text(fresh(), (), selector.settings.text)

        def call() -> object:
            features = selector.encoder.encode(text.text)
            return selector.forecast(text, features, features.sketch())

        return call

    def decide() -> Callable[[], object]:
        messages = fresh()
        return lambda: selector.decide(messages)

    whole = _timed(decide, iterations)
    return SizeLayers(
        tokens=tokens,
        chars=len(fresh()[0]["content"]),
        load_ms=1e3 * load,
        decide=whole,
        encode_scores=_timed(encode, iterations),
        instance=_timed(_instance_calls(policy, tokens), iterations),
    )


def _timed(prepare: Callable[[], Callable[[], object]], iterations: int) -> Layer:
    """`prepare` makes a fresh call; only the call is timed. The first is the cold one, five more warm up."""
    call = prepare()
    begun = time.perf_counter()
    call()
    cold = time.perf_counter() - begun
    for _ in range(WARM_UP):
        prepare()()
    values = []
    for _ in range(iterations):
        call = prepare()
        begun = time.perf_counter()
        call()
        values.append(1e3 * (time.perf_counter() - begun))
    values.sort()
    p50, p95, p99 = (percentile(values, q) for q in (50.0, 95.0, 99.0))
    return Layer(
        count=iterations, p50_ms=p50, p95_ms=p95, p99_ms=p99, min_ms=values[0], max_ms=values[-1], cold_ms=1e3 * cold
    )


def _instance_calls(policy: str, tokens: int) -> Callable[[], Callable[[], object]]:
    """Arrivals at a router with eight calibrated instances of which each decodes a few requests.

    No prompt is still being computed, so that every timed request is placed: holding one would cost next to nothing.
    """
    router = Router(RouterSettings(policy=policy))
    limits = Limits(token_budget=BUDGET, max_sequences=256, kv_blocks=max(6000, tokens))
    step = StepTerms(base_s=0.011, prefill_s=4e-5, sequence_s=3e-5, kv_s=8e-8)
    rates = Rates(prefill_tokens_per_s=20_000.0, decode_tokens_per_s=80.0)
    for k in range(INSTANCES):
        spec = InstanceSpec(name=f"i{k}", limits=limits, rates=rates, step=step, error=0.1)
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    computing_s = step.base_s * math.ceil(tokens / BUDGET) + step.prefill_s * tokens
    number = 0

    def arrive() -> Request:
        nonlocal number
        number += 1
        return Request(id=f"r{number}", arrival_s=float(number), prompt_tokens=tokens, max_tokens=128)

    for _ in range(4 * INSTANCES):
        request = arrive()
        router.handle(RequestArrived(request=request), request.arrival_s)
        router.handle(FirstToken(request_id=request.id), request.arrival_s + computing_s)
    answered: list[list[Action]] = []

    def prepare() -> Callable[[], object]:
        if answered:
            if not any(isinstance(action, Dispatch) for action in answered.pop()):
                raise ServiceError(f"policy {policy} did not place a request of {tokens} tokens: nothing was timed")
            router.handle(FirstToken(request_id=f"r{number}"), number + computing_s)
            router.handle(RequestFinished(request_id=f"r{number}", output_tokens=1), number + computing_s)
        request = arrive()
        event = RequestArrived(request=request)
        return lambda: answered.append(router.handle(event, request.arrival_s))

    return prepare


def _work(home: Connection, tokens: int, iterations: int, pool: str, checkpoint: str, policy: str) -> None:
    home.send_bytes(msgspec.json.encode(layers(tokens, iterations, pool, checkpoint, policy)))
    home.close()


def bench_decide(
    *,
    sizes: tuple[int, ...] = SIZES,
    iterations: int = 200,
    pool: str = "",
    checkpoint: str = "",
    policy: str = "calibrated",
    target: RunOptions | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All layers at all sizes. First token and full answer are measured only where a `target` is given.

    Raises `ServiceError` when a size's process dies.
    """
    from weighbridge.bench.provenance import provenance
    from weighbridge.selection.opening import open_selector
    from weighbridge.selection.settings import SelectionSettings

    context = multiprocessing.get_context("spawn")
    rows = []
    for tokens in sizes:
        say(f"{tokens} tokens")
        home, away = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(away, tokens, iterations, pool, checkpoint, policy))
        worker.start()
        away.close()
        try:
            row = msgspec.json.decode(home.recv_bytes())
        except EOFError:
            raise ServiceError(f"the process that timed {tokens} tokens died") from None
        finally:
            worker.join()
        answer = _answer(target, tokens) if target is not None else None
        rows.append(
            {**row, "first_token": answer and answer["first_token"], "full_answer": answer and answer["full_answer"]}
        )
    selector = open_selector(SelectionSettings(pool=pool, checkpoint=checkpoint, gate=False))
    return {
        "format": "weighbridge.layers",
        "version": 1,
        "sizes": rows,
        "layers": {
            "encode_scores": "routing text to scores of all candidates; no session text is built, nothing is ranked",
            "decide": "select.decide: session text, features, quality, cost, filters, ranking; no generation",
            "instance": f"Router.handle(arrival), policy {policy}, {INSTANCES} busy instances",
            "first_token": "client: scheduled arrival to first token"
            + ("" if target else "; not measured (give --url)"),
            "full_answer": "client: scheduled arrival to last token"
            + ("" if target else "; not measured (give --url)"),
        },
        "iterations": iterations,
        "warm_up": WARM_UP,
        "device": _device(),
        "candidates": len(selector.pool.models),
        "selector": msgspec.to_builtins(selector.provenance),
        "provenance": provenance(policy=policy, pool=pool, checkpoint=checkpoint, url=target.url if target else ""),
    }


def _device() -> dict[str, Any]:
    """The device the loaded model really runs on: hashed features and one matrix product, in numpy on the processor."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "library default"
    return {"actual": "cpu", "library": "numpy", "threads": threads, "machine": machine()["cpu"]}


def _answer(target: RunOptions, tokens: int) -> dict[str, Any]:
    """First token and full answer of prompts of one size, one at a time."""
    plan = DrawOptions(rate=math.inf, count=REQUESTS, input=str(tokens), output="32")
    out = (target.out / f"answers-{tokens}") if target.out is not None else None
    report = measure(replace(target, plan=plan, max_concurrency=1, out=out)).report
    names = {"first_token": "ttft_s", "full_answer": "e2e_s"}
    return {
        layer: {**{f"{q}_ms": _ms(report[metric].get(q)) for q in ("p50", "p95", "p99", "min", "max")},
                "count": report[metric]["count"]}
        for layer, metric in names.items()
    }  # fmt: skip


def _ms(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else 1e3 * value


def print_layers(found: dict[str, Any], console: Any) -> None:
    """A row for each size and layer."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "layer", "p50", "p95", "p99", "min", "max", "cold"):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    for row in found["sizes"]:
        for layer in ("encode_scores", "decide", "instance", "first_token", "full_answer"):
            values = row[layer]
            if values is None:
                continue
            cells = [f"{values[f'{q}_ms']:.3f}" for q in ("p50", "p95", "p99", "min", "max")]
            cold = f"{values['cold_ms']:.3f}" if "cold_ms" in values else "-"
            table.add_row(str(row["tokens"]), layer.replace("_", " "), *cells, cold)
    console.print(table)
    console.print(
        f"milliseconds; {found['candidates']} candidates, {found['iterations']} iterations after {found['warm_up']} to "
        f"warm up, fresh text each; one process per size on {found['device']['actual']} ({found['device']['machine']})",
        style="dim", soft_wrap=True,
    )  # fmt: skip
