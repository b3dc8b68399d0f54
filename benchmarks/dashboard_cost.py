"""What the dashboard costs the requests of a real `serve`: off, viewed, stopped (SIGSTOP) and killed.

    python benchmarks/dashboard_cost.py --states off,viewed,stopped,killed --duration 40

One fresh gateway with two embedded instances per state, the same seeded load; prints one line of JSON per state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.served import ROOT, Served, serve


def dashboard_pid(served: Served) -> int:
    """The child of `serve` that runs the dashboard."""
    children = subprocess.run(
        ["pgrep", "-P", str(served.process.pid), "-f", "weighbridge.cli dashboard"], capture_output=True, text=True
    )
    (pid,) = children.stdout.split()
    return int(pid)


@contextlib.contextmanager
def viewer(url: str) -> Iterator[None]:
    """One viewer that reloads the front page every second."""
    done = threading.Event()

    def view() -> None:
        while not done.wait(1.0):
            with urllib.request.urlopen(url + "/", timeout=10) as reply:
                reply.read()

    thread = threading.Thread(target=view)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure(state: str, duration: float) -> dict[str, object]:
    extra = [] if state == "off" else ["--dashboard", "--dashboard-port", "0"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        served = stack.enter_context(serve(Path(folder), *extra))
        if state == "viewed":
            stack.enter_context(viewer(served.ready["dashboard"]))
        elif state in ("stopped", "killed"):
            pid = dashboard_pid(served)
            os.kill(pid, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
            if state == "stopped":
                stack.callback(os.kill, pid, signal.SIGCONT)
        command = [sys.executable, "-m", "weighbridge.cli", "bench", "--url", served.url, "--json", "--rate", "1.5"]
        command += ["--duration", str(duration), "--input", "60", "--output", "20", "--seed", "3"]
        done = subprocess.run([*command, "--out", f"{folder}/bench"], cwd=ROOT, capture_output=True, text=True)
        report = json.loads(done.stdout)
    row: dict[str, object] = {"state": state, "verdict": report["verdict"], "by_status": report["by_status"]}
    for metric in ("ttft_s", "e2e_s"):
        row |= {f"{metric}_{q}": round(report[metric][q], 4) for q in ("p50", "p99")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", default="off,viewed,stopped,killed")
    parser.add_argument("--duration", type=float, default=40.0)
    arguments = parser.parse_args()
    for state in arguments.states.split(","):
        print(json.dumps(measure(state, arguments.duration)), flush=True)


if __name__ == "__main__":
    main()
