"""What relay processes cost: CPU per request over all our processes, at the same offered load and without a limit.

    python benchmarks/gateway/relays.py RIG_DIR [--relays 0 1 2] [--repeat 5] [--seconds 3] [--compiled]

RIG_DIR holds the rig's `mock` and `post.lua`; `wrk` is on the path. All our processes share core 0, eight mock engines
and the load core 1. Offered load: 64 connections that each wait `--pause` milliseconds between an answer and the next
request; `--pause 0` offers all that is taken. The kinds alternate within each repetition; medians, least and most.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import ENGINES, ROOT, cpu_s, wait_ready

CONNECTIONS = 64


def pinned(core: str, words: list[str]) -> list[str]:
    """The command on one core; where none is named it stays on the one that all share."""
    return ["taskset", "-c", core, *words] if core else words


def settings(relays: int) -> dict[str, object]:
    """What the compared gateways run with: authentication, ledger, metrics, decisions and event log on."""
    limits = {"max_context": 8192, "kv_blocks": 4096}
    return {
        "relays": relays,
        "router": {"policy": "least_tokens"},
        "keys": [{"sha256": hashlib.sha256(b"sk-test").hexdigest(), "tenant": "t"}],
        "instances": [
            {"name": f"i{n}", "url": f"http://127.0.0.1:{p}", "kind": "vllm", "models": ["mock"], "limits": limits}
            for n, p in enumerate(ENGINES)
        ],
    }


class Served:
    """One `weighbridge serve` on core 0."""

    def __init__(self, relays: int, core: str, where: Path, folder: Path) -> None:
        folder.mkdir()
        file = folder / "fleet.yaml"
        file.write_text(json.dumps(settings(relays)))
        words = [sys.executable, "-m", "weighbridge.cli", "serve", "--json", "--no-dashboard", "--port", "0"]
        words += ["--admin-port", "0", "--config", str(file), "--data-dir", str(folder / "data")]
        self.process = subprocess.Popen(
            pinned(core, words),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(where)},
            text=True,
            cwd=where,
        )
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["url"].rsplit(":", 1)[1])

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its processes."""
        return cpu_s(self.process.pid)

    def stop(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def load(port: int, seconds: float, script: Path, core: str) -> dict[str, float]:
    """What wrk reports."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    words = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(script), url]
    out = subprocess.run(pinned(core, words), capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"\{.*\}", out)
    if not found:
        raise SystemExit(f"wrk said {out[-300:]!r}")
    row: dict[str, float] = json.loads(found[-1])
    return row


def spread(values: list[float], digits: int = 1) -> str:
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rig", type=lambda text: Path(text).resolve())
    parser.add_argument("--relays", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pause", type=int, default=40)
    parser.add_argument("--cores", nargs=2, default=["0", "1"], help="ours and the load's; '' '' leaves both alone")
    parser.add_argument("--compiled", action="store_true", help="run what scripts/compile.py made")
    given = parser.parse_args()
    where = ROOT / "build" / "compiled" if given.compiled else ROOT
    mock = subprocess.Popen(pinned(given.cores[1], [str(given.rig / "mock"), *ENGINES]))
    served: dict[int, Served] = {}
    rows: dict[int, list[dict[str, float]]] = {n: [] for n in given.relays}
    try:
        time.sleep(0.3)
        with tempfile.TemporaryDirectory(prefix="wb-relays-") as folder:
            script = Path(folder) / "paced.lua"
            pause = f"function delay() return {given.pause} end\n" if given.pause else ""
            script.write_text((given.rig / "post.lua").read_text() + pause)
            try:
                for relays in given.relays:
                    served[relays] = one = Served(relays, given.cores[0], where, Path(folder) / str(relays))
                    if not wait_ready(one.port, None):
                        raise SystemExit(f"{relays} relays: not ready")
                for one in served.values():
                    load(one.port, 1.0, script, given.cores[1])
                for _ in range(given.repeat):
                    for relays, one in served.items():
                        before = one.cpu_s
                        row = load(one.port, given.seconds, script, given.cores[1])
                        row["cpu_us"] = 1e6 * (one.cpu_s - before) / row["reqs"]
                        rows[relays].append(row)
            finally:
                for one in served.values():
                    one.stop()
    finally:
        mock.terminate()
        mock.wait()
    base = rows[given.relays[0]]
    for relays, mine in rows.items():
        ratio = [a["cpu_us"] / b["cpu_us"] for a, b in zip(mine, base, strict=True)]
        print(
            f"relays {relays}: CPU us a request {spread([r['cpu_us'] for r in mine])}, ratio {spread(ratio, 3)}, "
            f"requests/s {spread([r['rps'] for r in mine], 0)}, p50 us {spread([r['p50_us'] for r in mine], 0)}, "
            f"p99 us {spread([r['p99_us'] for r in mine], 0)}, errors {sum(int(r.get('errs', 0)) for r in mine)}"
        )


if __name__ == "__main__":
    main()
