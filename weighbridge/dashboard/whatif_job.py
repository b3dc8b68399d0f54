"""The child process of a what-if: one question on standard input, progress and one answer on standard output.

It runs at low priority and under limits of memory and processor time, so that it can neither starve the gateway nor
outlive a mistake. Lines are `P share text`, then `A json` or `E message`.
"""

from __future__ import annotations

import os
import resource
import sys

MEMORY_BYTES = 4 << 30
CPU_S = 600


def main() -> int:
    """Exit status 0 with an answer, 1 with an error line."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import msgspec

    from weighbridge.core.errors import WeighbridgeError
    from weighbridge.dashboard.whatif import Question, answer

    def report(share: float, text: str) -> None:
        print(f"P {share:.3f} {text}", flush=True)

    try:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
        made = answer(question, report)
    except (WeighbridgeError, OSError, msgspec.MsgspecError) as error:
        print(f"E {str(error).replace(chr(10), ' ')}", flush=True)
        return 1
    except MemoryError:
        print(f"E it needs more than {MEMORY_BYTES >> 30} GiB; choose a shorter window", flush=True)
        return 1
    print(f"A {msgspec.json.encode(made).decode()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
