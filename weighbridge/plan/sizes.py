"""Byte sizes as people write and read them: binary units, two decimals, whole bytes inside."""

from __future__ import annotations

import re
from fractions import Fraction

from weighbridge.core.errors import ConfigError

_UNITS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, field: str) -> int:
    """`24GiB`, `80 GB`, `1.5GiB` or plain bytes, rounded down to whole bytes; GiB is 2^30, GB is 10^9.

    Raises `ConfigError` that names `field`.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"'{text}' is not a size; write for example 24GiB, 80GB or a number of bytes", source=field)
    return int(Fraction(match.group(1).replace(",", "").replace("_", "")) * _UNITS[unit])


def format_bytes(count: int) -> str:
    """Two decimals of the largest binary unit that keeps the number at 1 or more: `4.00 GiB`, `128.00 KiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
