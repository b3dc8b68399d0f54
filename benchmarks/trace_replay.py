"""Replay a trace through `weighbridge serve`, once per policy, and check every promise on the way.

    python benchmarks/trace_replay.py --trace azure_conv.2023.csv.gz --seconds 600 --length-scale 0.125 \
        --time-scale 1.6 --policies work,least_tokens,round_robin --config fleet.yaml --out results/

For each policy a fresh gateway and fresh engines are started; `weighbridge bench` replays the trace open loop; then the
script fails unless every request ended exactly once, with the output length that was asked for, every counter of the
ledger is zero, both engines are idle and `weighbridge replay --check` finds the recorded log identical.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.served import ROOT, Served, engine_gauge, serve
from weighbridge.core.actions import Dispatch
from weighbridge.core.event_log import LogReader


def run_bench(served: Served, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "weighbridge.cli", "bench", "--url", served.url, "--json", "--out", str(out)]
    command += ["--trace", str(arguments.trace), "--trace-for", str(arguments.seconds)]
    command += ["--length-scale", str(arguments.length_scale), "--time-scale", str(arguments.time_scale)]
    command += ["--slo", arguments.slo, "--drain", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def promises(served: Served, records: list[dict[str, Any]]) -> dict[str, Any]:
    """What must hold after a run, measured; raises where it does not."""
    ids = [r["id"] for r in records]
    assert len(set(ids)) == len(ids), "a request ended twice"
    wrong = [r for r in records if r["status"] == "ok" and r["output_tokens"] != r["wanted_output_tokens"]]
    assert not wrong, f"{len(wrong)} requests have another output length than asked"
    fleet = served.wait_idle()
    counters = {
        n: [i[c] for c in ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")] for n, i in fleet.items()
    }
    assert all(set(values) == {0} for values in counters.values()), counters
    for instance in served.instances:
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            assert engine_gauge(instance["url"], gauge) == 0, f"{instance['name']} is not idle"
    return {"ended_once": len(ids), "lengths_as_asked": True, "counters": counters}


def parity(served: Served) -> dict[str, Any]:
    logs = [str(path) for path in served.logs()]
    command = [sys.executable, "-m", "weighbridge.cli", "replay", *logs, "--check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert result["identical"], result["parity"]["mismatches"][:3]
    return {k: result["parity"][k] for k in ("entries", "requests", "actions")}


def share(served: Served) -> dict[str, int]:
    """Dispatches per instance, from the event log."""
    counts: dict[str, int] = {}
    for path in served.logs():
        with path.open("rb") as stream:
            for entry in LogReader(stream, path.name):
                for action in entry.a:
                    if isinstance(action, Dispatch):
                        counts[action.instance] = counts.get(action.instance, 0) + 1
    return dict(sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--time-scale", type=float, default=1.6)
    parser.add_argument("--slo", default="ttft=1.0,tpot=0.05")
    parser.add_argument("--policies", default="work,least_tokens,round_robin")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for policy in arguments.policies.split(","):
        out = arguments.out / policy
        with tempfile.TemporaryDirectory() as folder:
            extra = ["--config", str(arguments.config)] if arguments.config else []
            with serve(Path(folder), "--policy", policy, *extra) as served:
                report = run_bench(served, arguments, out)
                records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
                kept = promises(served, records)
                fleet = served.fleet()
                assert served.stop() == 0
                kept["parity"] = parity(served)
                kept["dispatched"] = share(served)
        rows.append(
            {"policy": policy, "kept": kept, "report": report, "rates": {n: i["rates"] for n, i in fleet.items()}}
        )
        (arguments.out / "summary.json").write_text(json.dumps(rows, indent=1))
        print(policy, json.dumps(kept), flush=True)


if __name__ == "__main__":
    main()
