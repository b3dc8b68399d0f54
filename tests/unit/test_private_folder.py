"""A folder for sockets: closed to others, gone with its process, and what a killed process left is removed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from weighbridge.commands._private_folder import LOCK, PREFIX, UNLOCKED_S, PrivateFolder

LEAVE = """
import os, signal
from weighbridge.commands._private_folder import PrivateFolder
print(PrivateFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_for_one_user_and_removed_when_closed(temporary: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "router.sock").touch()
    folder.close()
    assert list(temporary.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_left_and_nothing_of_a_live_one(temporary: Path) -> None:
    alive = PrivateFolder()
    left = Path(subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False).stdout[:-1])
    assert left.is_dir()
    other = temporary / "somebody-elses"
    other.mkdir()
    (other / LOCK).touch()
    folder = PrivateFolder()
    assert not left.exists()
    assert other.is_dir()
    alive.close()
    folder.close()


def test_one_without_a_lock_is_left_alone_until_it_is_old(temporary: Path) -> None:
    young, old = temporary / f"{PREFIX}young", temporary / f"{PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    before = time.time() - UNLOCKED_S - 1.0
    os.utime(old, (before, before))
    PrivateFolder().close()
    assert young.is_dir()
    assert not old.exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (kept / LOCK).touch()
    (temporary / f"{PREFIX}link").symlink_to(kept)
    PrivateFolder().close()
    assert (kept / LOCK).exists()
