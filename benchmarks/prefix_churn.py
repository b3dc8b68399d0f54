"""Ten million prefix blocks pass through the index of eight instances: is memory flat, and what does a look-up cost?

python benchmarks/prefix_churn.py
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weighbridge.routing.prefix_index import PrefixIndex, match_all

INSTANCES, CAPACITY, PROMPT, TOTAL = 8, 6_000, 128, 10_000_000


def main() -> None:
    holders: dict[int, int] = {}
    indexes = [PrefixIndex(CAPACITY, holders, place) for place in range(INSTANCES)]
    print("| blocks inserted | entries in the table | peak RSS MB | us per insert of 128 blocks | us per look-up |")
    print("|---|---|---|---|---|")
    done, mark = 0, 1_000_000
    spent = looked = 0.0
    prompts = 0
    while done < TOTAL:
        hashes = tuple(hash((prompts, n)) for n in range(PROMPT))
        start = time.perf_counter()
        indexes[prompts % INSTANCES].insert(hashes)
        middle = time.perf_counter()
        match_all(holders, hashes, (1 << INSTANCES) - 1)
        looked += time.perf_counter() - middle
        spent += middle - start
        prompts += 1
        done += PROMPT
        if done >= mark:
            rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            insert_us, look_us = 1e6 * spent / prompts, 1e6 * looked / prompts
            print(f"| {done:,} | {len(holders):,} | {rss_mb:.0f} | {insert_us:.0f} | {look_us:.1f} |")
            mark *= 10 if mark < 1_000_000 else 3
            mark = min(mark, TOTAL)


if __name__ == "__main__":
    main()
