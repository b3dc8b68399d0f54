"""Either side of a KV transfer is killed while the bytes are on their way: two processes, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weighbridge.engine.instance import InstanceOptions

pytestmark = pytest.mark.engine
PROMPT = [600 + i % 700 for i in range(240)]  # 5.5 MB of KV: more than the buffers of two sockets hold unread
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
PASSED = 256 << 10


class Child:
    """An instance in a process of its own."""

    def __init__(self, name: str) -> None:
        options = InstanceOptions(name=name, slots=2, context_tokens=256, threads=1, probe=False, kv_lease_s=1.0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weighbridge.engine.child", msgspec.json.encode([options]).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.port = 0

    def wait_ready(self) -> Child:
        assert self.process.stdout is not None
        while not self.port:
            self.port = json.loads(self.process.stdout.readline()).get("ready", {}).get("port", 0)
        self.post({"prompt": [1, 2], "max_tokens": 1})  # all that is made at first use is there
        self.files = len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        self.threads = len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))
        return self

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as reply:
            result: dict[str, Any] = json.loads(reply.read())
            return result

    def gauges(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
                 "weighbridge_engine_kv_leases", "weighbridge_engine_kv_leased_bytes")  # fmt: skip
        found = {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] != "#"}
        return {name: found[name] for name in names}

    def wait_clean(self) -> None:
        """No request, slot, block, lease, byte, file or thread more than before."""
        deadline = time.monotonic() + 10
        while True:
            left = {name: value for name, value in self.gauges().items() if value}
            left["files"] = len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())) - self.files
            left["threads"] = len(list(Path(f"/proc/{self.process.pid}/task").iterdir())) - self.threads
            if not any(value > 0 for value in left.values()):
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def pair() -> Iterator[tuple[Child, Child]]:
    children = Child("p"), Child("d")
    try:
        yield children[0].wait_ready(), children[1].wait_ready()
    finally:
        for child in children:
            child.kill()


class SlowWire:
    """Carries one exchange to a port, and stops in the middle of the reply until one of the ends is gone."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.midway = threading.Event()
        self.cut = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()

    def _run(self, port: int) -> None:
        near, _ = self._socket.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            far.sendall(near.recv(65536))
            passed = 0
            while passed < PASSED:
                data = far.recv(65536)
                near.sendall(data)
                passed += len(data)
            self.midway.set()
            self.cut.wait(20)

    def close(self) -> None:
        self.cut.set()
        self._thread.join(5)
        self._socket.close()


def decode_over(wire: SlowWire, decoder: Child, params: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """The second leg in a thread, begun, with its reply or error."""
    box: list[Any] = []

    def ask() -> None:
        asked = {**params, "remote_host": "127.0.0.1", "remote_port": wire.port}
        try:
            box.append(decoder.post({**BODY, "max_tokens": 3, "kv_transfer_params": asked}))
        except (urllib.error.URLError, OSError) as error:
            box.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, box


def first_leg(prefiller: Child) -> dict[str, Any]:
    reply = prefiller.post({**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    params: dict[str, Any] = reply["kv_transfer_params"]
    return params


def test_the_prefill_side_dies_and_the_decode_side_computes_the_prompt(pair: tuple[Child, Child]) -> None:
    prefiller, decoder = pair
    wire = SlowWire(prefiller.port)
    thread, box = decode_over(wire, decoder, first_leg(prefiller))
    assert wire.midway.wait(10)
    prefiller.kill()
    wire.close()
    thread.join(30)
    assert box[0]["usage"]["completion_tokens"] == 3
    assert (box[0]["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
    decoder.wait_clean()
    assert decoder.post({**BODY, "max_tokens": 2})["usage"]["completion_tokens"] == 2


def test_the_decode_side_dies_and_the_prefill_side_frees_the_lease(pair: tuple[Child, Child]) -> None:
    prefiller, decoder = pair
    params = first_leg(prefiller)
    assert prefiller.gauges()["weighbridge_engine_kv_leases"] == 1
    wire = SlowWire(prefiller.port)
    thread, box = decode_over(wire, decoder, params)
    assert wire.midway.wait(10)
    decoder.kill()
    wire.close()
    thread.join(30)
    assert isinstance(box[0], OSError)
    prefiller.wait_clean()
    assert first_leg(prefiller)["remote_num_tokens"] == len(PROMPT)
    prefiller.wait_clean()
