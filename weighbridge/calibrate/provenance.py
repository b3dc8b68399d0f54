"""Where a profile's numbers come from: engine, model, device and this machine, as far as they can be known."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from urllib.parse import urlsplit

import weighbridge
from weighbridge.calibrate.endpoint import Endpoint
from weighbridge.cost.profile import Provenance

_LOCAL = ("127.0.0.1", "localhost", "::1")


def provenance_of(endpoint: Endpoint, *, method: str) -> Provenance:
    """Describe a measurement that has just ended. The hardware is known only where the engine runs on this machine."""
    local = (urlsplit(endpoint.url).hostname or "") in _LOCAL
    return Provenance(
        engine=endpoint.kind,
        engine_version=endpoint.version,
        model=endpoint.model,
        quantisation=endpoint.quantisation,
        device=endpoint.device,
        hardware=_hardware() if local else "",
        software={"weighbridge": weighbridge.__version__, "python": platform.python_version()},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        method=method,
    )


def _hardware() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, {platform.system()} {platform.release()}"
