"""Where and how a report was made: enough to repeat it, nothing secret."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import weighbridge

_PACKAGES = ("uvloop", "httptools", "msgspec", "numpy")


def provenance(**settings: Any) -> dict[str, Any]:
    """Versions, machine, commit (where the package lies in a git checkout) and the run's settings."""
    return {
        "weighbridge": weighbridge.__version__,
        "commit": commit(),
        "python": sys.version.split()[0],
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "machine": machine(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    model = platform.processor()
    memory = 0
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        pass
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """The checkout's commit with `+` when it has changes; empty outside a checkout."""
    folder = Path(weighbridge.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return ""
    try:
        found = _git(folder, "rev-parse", "--short", "HEAD")
        return found + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()  # noqa: S603 - fixed words
