"""The child process of one question about one decision: what would another policy have chosen?

Arguments: log, request id, policy. Prints the answer as JSON, or `E message`. Low priority, limited memory and time.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

MEMORY_BYTES = 2 << 30
CPU_S = 60


def main() -> int:
    """Exit status 0 with an answer, 1 with an error line."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import msgspec

    from weighbridge.core.errors import WeighbridgeError
    from weighbridge.core.event_log import LogReader
    from weighbridge.routing.replay import wish

    log, request_id, policy = sys.argv[1:4]
    try:
        with Path(log).open("rb") as stream:
            reader = LogReader(stream, Path(log).name)
            found = wish(reader.header, reader, policy, {}, request_id)
    except (WeighbridgeError, OSError, ValueError) as error:
        print(f"E {str(error).replace(chr(10), ' ')}")
        return 1
    if found is None:
        print("E the log holds no placement of this request")
        return 1
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
