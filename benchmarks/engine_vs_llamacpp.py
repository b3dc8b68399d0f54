"""Our engine against llama.cpp's own server: same library, model, threads and workload, both over HTTP.

    python benchmarks/engine_vs_llamacpp.py --case 8:16:200:150 --runs 5

Both servers run at the same time, each pinned to a core of its own with its load generator, and swap cores every run,
so that noise hits both. A case is slots:requests:prompt tokens:shared tokens; each run has fresh random prompts.
`--ours-library` and `--ours-model` give our side another libllama or another file of the model, to compare with what
`pip install xllamacpp` serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from weighbridge.engine.model_store import DEFAULT_MODEL, resolve_model
from weighbridge.http import ClientLimits, HttpClient, SseParser

OUTPUT_TOKENS = 64


def serve_theirs(slots: int, context: int) -> None:
    """llama.cpp's server inside xllamacpp, per-sequence streams, until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(resolve_model(DEFAULT_MODEL)[0])
    params.n_ctx = slots * context
    params.n_parallel = slots
    params.n_batch = params.n_ubatch = 512
    params.kv_unified = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.port = 0
    params.verbosity = -1
    params.no_perf = True
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()


def serve_ours(slots: int, context: int, library: str | None, model: str | None) -> None:
    """Our engine, until standard input ends."""
    from weighbridge.engine.instance import InstanceOptions, start_instance

    async def run() -> None:
        options = InstanceOptions(
            model=model or DEFAULT_MODEL,
            model_id=DEFAULT_MODEL,
            slots=slots,
            context_tokens=context,
            threads=1,
            probe=False,
            library=library,
            max_waiting=1000,
        )
        instance = await start_instance(options)
        print(json.dumps({"url": f"http://127.0.0.1:{instance.info.port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        counters = instance.server.engine.counters
        outside = 1 - (counters.prefill_s + counters.decode_s) / max(counters.steps_s, 1e-9)
        print(json.dumps({"python_share": outside, "steps": counters.steps}), flush=True)
        await instance.stop()

    import uvloop

    uvloop.run(run())


def load(url: str, prompts: list[list[int]]) -> None:
    """Send all prompts at once; print each request's first-token time, the wall time and the tokens."""

    async def one(client: HttpClient, prompt: list[int], begun: float) -> tuple[float, int, int]:
        body = {
            "model": DEFAULT_MODEL,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, tokens, cached = 0.0, 0, 0
        parser = SseParser()
        async with client.stream("POST", url + "/v1/completions", body=json.dumps(body).encode()) as stream:
            assert stream.status == 200, stream.status
            async for data in stream:
                for event in parser.feed(data):
                    if event.data == "[DONE]":
                        continue
                    first = first or time.perf_counter() - begun
                    usage = json.loads(event.data).get("usage")
                    if usage:
                        tokens = usage["completion_tokens"]
                        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return first, tokens, cached

    async def run() -> None:
        client = HttpClient(ClientLimits())
        begun = time.perf_counter()
        rows = await asyncio.gather(*(one(client, prompt, begun) for prompt in prompts))
        wall = time.perf_counter() - begun
        await client.close()
        print(json.dumps({"wall": wall, "rows": rows}))

    asyncio.run(run())


def prompts_of(requests: int, length: int, shared: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1000, 40000) for _ in range(shared)]
    return [head + [rng.randrange(1000, 40000) for _ in range(length - shared)] for _ in range(requests)]


def pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spawn(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return process, json.loads(line)["url"]
    raise SystemExit(f"{arguments} did not start")


def measure(side: tuple[subprocess.Popen[str], str], core: int, prompts: list[list[int]]) -> subprocess.Popen[str]:
    pin(side[0].pid, core)
    loader = subprocess.Popen(
        [sys.executable, __file__, "load", side[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    os.sched_setaffinity(loader.pid, {core})
    assert loader.stdin is not None
    loader.stdin.write(json.dumps(prompts))
    loader.stdin.close()
    return loader


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare(case: str, runs: int, library: str, model: str, seed: int) -> dict[str, object]:
    slots, requests, length, shared = map(int, case.split(":"))
    context = 1024
    sides = {
        "ours": spawn("ours", str(slots), str(context), library, model),
        "theirs": spawn("theirs", str(slots), str(context)),
    }
    results: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    share = {}
    try:
        for run in range(runs):
            prompts = prompts_of(requests, length, shared, seed + run)
            cores = (0, 1) if run % 2 == 0 else (1, 0)
            before = {name: cpu_seconds(side[0].pid) for name, side in sides.items()}
            loaders = {
                name: measure(side, core, prompts) for (name, side), core in zip(sides.items(), cores, strict=True)
            }
            for name, loader in loaders.items():
                assert loader.stdout is not None
                reply = json.loads(loader.stdout.read())
                loader.wait()
                tokens = sum(row[1] for row in reply["rows"])
                assert tokens == requests * OUTPUT_TOKENS, (name, tokens)
                firsts = [row[0] for row in reply["rows"]]
                used = cpu_seconds(sides[name][0].pid) - before[name]
                results[name].append(
                    {
                        "tokens_per_s": tokens / reply["wall"],
                        "tokens_per_cpu_s": tokens / used,
                        "ttft_p50": percentile(firsts, 0.5),
                        "ttft_p95": percentile(firsts, 0.95),
                        "computed": requests * length - sum(row[2] for row in reply["rows"]),
                    }
                )
            print(
                case, run, json.dumps({name: rows[-1] for name, rows in results.items()}), file=sys.stderr, flush=True
            )
    finally:
        for name, (process, _) in sides.items():
            out, _ = process.communicate(timeout=60)
            for line in out.splitlines():
                if name == "ours" and line.startswith("{"):
                    share = json.loads(line)
    return {"case": case, "runs": results, "python": share}


def show(result: dict[str, object]) -> None:
    runs = result["runs"]
    assert isinstance(runs, dict)
    print(f"\ncase {result['case']} (slots:requests:prompt:shared), {len(runs['ours'])} runs, {result['python']}")
    for key in ("tokens_per_s", "tokens_per_cpu_s", "ttft_p50", "ttft_p95", "computed"):
        ours, theirs = ([run[key] for run in runs[side]] for side in ("ours", "theirs"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"  {key:17s} ours {statistics.median(ours):8.2f} [{min(ours):.2f}-{max(ours):.2f}]  "
            f"theirs {statistics.median(theirs):8.2f} [{min(theirs):.2f}-{max(theirs):.2f}]  "
            f"ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        )


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("ours", "theirs", "load"):
        kind, *rest = sys.argv[1:]
        if kind == "load":
            load(rest[0], json.loads(sys.stdin.read()))
        elif kind == "ours":
            serve_ours(int(rest[0]), int(rest[1]), rest[2] or None, rest[3] or None)
        else:
            serve_theirs(int(rest[0]), int(rest[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ours-library", default="")
    parser.add_argument("--ours-model", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = [
        compare(case, arguments.runs, arguments.ours_library, arguments.ours_model, arguments.seed)
        for case in arguments.case
    ]
    for result in results:
        show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
