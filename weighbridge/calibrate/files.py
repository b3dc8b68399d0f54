"""Read inputs and write profiles so that a reader never sees half a file."""

from __future__ import annotations

import os
from pathlib import Path

from weighbridge.core.errors import InputError
from weighbridge.cost.profile import Profile, decode_profile, encode_profile


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises InputError naming the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def read_profile(path: Path) -> Profile:
    """Raises InputError when it cannot be read, ProfileError when it is not a usable profile."""
    return decode_profile(read_bytes(path), str(path))


def write_profile(path: Path, profile: Profile) -> None:
    """Raises InputError naming the file; a profile that was there before stays then."""
    write_bytes(path, encode_profile(profile))


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside the target and rename over it. Raises InputError naming the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
