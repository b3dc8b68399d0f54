"""What other users of the machine can see of a running gateway's processes."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, and those have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # it has just ended
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def assert_private(pid: int, *secrets: str) -> None:
    """No command line shows a secret, and nobody else can reach the sockets by which the processes talk."""
    pids = descendants(pid)
    assert len(pids) > 1
    inodes = set()
    for one in pids:
        told = Path(f"/proc/{one}/cmdline").read_bytes().decode()
        assert not any(secret in told for secret in secrets), told
        for descriptor in Path(f"/proc/{one}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    sockets = [Path(fields[7]) for fields in lines if len(fields) == 8 and fields[6] in inodes]
    assert sockets, "they talk by sockets with names"
    for socket in sockets:
        status = socket.parent.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.getuid()), socket
