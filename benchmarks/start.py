"""Seconds from `weighbridge serve` to ready, with and without kept profiles, and what is left after Ctrl-C.

python benchmarks/start.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.served import serve


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {"first_start_s": [], "later_start_s": [], "stop_s": []}
    left = 0
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            for row in ("first_start_s", "later_start_s"):
                begun = time.monotonic()
                with serve(Path(folder)) as served:
                    rows[row].append(round(time.monotonic() - begun, 2))
                    pids = [i["pid"] for i in served.instances]
                    begun = time.monotonic()
                    assert served.stop() == 0
                    rows["stop_s"].append(round(time.monotonic() - begun, 2))
                left += sum(alive(pid) for pid in pids)
    print(json.dumps({**rows, "processes_left": left}))


if __name__ == "__main__":
    main()
