"""Prefill here, decode there: the two-step protocol, its leases, and every way in which it can end early."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import Listening, listening
from weighbridge.engine.instance import InstanceOptions

pytestmark = pytest.mark.engine
PROMPT = [600 + i % 700 for i in range(150)]
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}


@pytest.fixture(scope="module")
def prefiller() -> Iterator[Listening]:
    options = InstanceOptions(name="p", slots=2, context_tokens=256, threads=1, probe=False, kv_lease_s=1.0)
    with listening(options) as running:
        yield running


def first_leg(prefiller: Listening, prompt: list[int] = PROMPT) -> dict[str, Any]:
    body = {**BODY, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK}
    status, reply = prefiller.post("/v1/completions", body)
    assert status == 200
    params: dict[str, Any] = reply["kv_transfer_params"]
    return params


def leases(prefiller: Listening) -> tuple[int, int]:
    kept = prefiller.instance.server._kv.leases
    return len(kept), kept.bytes


def wait_for_no_lease(prefiller: Listening) -> None:
    deadline = time.monotonic() + 5
    while leases(prefiller) != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_text_is_that_of_one_instance(prefiller: Listening, listener: Listening) -> None:
    params = first_leg(prefiller)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_num_tokens"], params["remote_port"]) == (150, prefiller.instance.info.port)
    before = listener.engine.counters.transfer_bytes
    ask = {**BODY, "max_tokens": 12, "kv_transfer_params": params, "include_stats": True, "cache_salt": "moved"}
    status, moved = listener.post("/v1/completions", ask)
    assert status == 200
    assert moved["usage"]["prompt_tokens_details"]["cached_tokens"] == 149
    assert moved["stats"][0]["transfer_bytes"] == listener.engine.counters.transfer_bytes - before > 150 * 20_000
    assert moved["stats"][0]["transfer_s"] > 0
    assert leases(prefiller) == (0, 0)
    # the same shapes on one instance: the prompt is there already, and its last token is computed alone
    prefiller.post("/v1/completions", {**BODY, "max_tokens": 1})
    _, alone = prefiller.post("/v1/completions", {**BODY, "max_tokens": 12})
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 149
    assert moved["choices"] == alone["choices"]
    listener.wait_idle()
    assert not listener.engine._stepper._saved.keys() - listener.engine.scheduler.prefixes._saved.keys()


def test_a_lease_that_nobody_collects_ends(prefiller: Listening, listener: Listening) -> None:
    params = first_leg(prefiller)
    assert leases(prefiller)[0] == 1
    wait_for_no_lease(prefiller)
    _, reply = listener.post("/v1/completions", {**BODY, "max_tokens": 2, "kv_transfer_params": params})
    assert reply["usage"]["completion_tokens"] == 2, "computed here instead"
    assert listener.instance.server._kv.failures >= 1


def test_an_instance_that_is_gone_is_computed_around_or_reported(listener: Listening) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_request_id": "x",
        "remote_num_tokens": 150,
    }
    status, reply = listener.post("/v1/completions", {**BODY, "max_tokens": 2, "kv_transfer_params": params})
    assert (status, reply["usage"]["completion_tokens"]) == (200, 2)
    options = InstanceOptions(slots=1, context_tokens=256, threads=1, probe=False, kv_load_failure="fail")
    with listening(options) as strict:
        status, reply = strict.post("/v1/completions", {**BODY, "max_tokens": 2, "kv_transfer_params": params})
        assert (status, reply["error"]["code"]) == (503, "kv_load_failed")
        strict.wait_idle()


class OddServer:
    """Answers one GET with given bytes, or never."""

    def __init__(self, reply: bytes | None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.asked = threading.Event()
        self.cut = threading.Event()
        self._reply = reply
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(4096)
            self.asked.set()
            if self._reply is not None:
                with contextlib.suppress(ConnectionError):  # who has seen enough hangs up
                    connection.sendall(self._reply)
            elif connection.recv(1) == b"":
                self.cut.set()

    def params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "remote_request_id": "x",
            "remote_num_tokens": 150,
        }

    def close(self) -> None:
        self._socket.close()
        self._thread.join(5)


def test_kv_that_breaks_off_or_does_not_fit_is_computed_again(prefiller: Listening, listener: Listening) -> None:
    tag = listener.instance.server._kv._tag.encode()
    good = b"HTTP/1.1 200 OK\r\nx-weighbridge-kv-model: " + tag + b"\r\ncontent-length: %d\r\n\r\n%b"
    params = first_leg(prefiller, [9000 + i for i in range(150)])
    url = f"{prefiller.url}/kv/{params['remote_request_id']}"
    with urllib.request.urlopen(url) as reply:
        data = reply.read()
    for body in (
        good % (len(data), data[: len(data) // 2]),  # dies half-way
        good % (1000, data[:1000]),  # too short for what it claims
        good % (40, b"garbage!" * 5),
        good.replace(tag, b"other") % (len(data), data),
    ):
        server = OddServer(body)
        prompt = [9000 + i for i in range(149)] + [len(body) % 1000]
        ask = {**BODY, "prompt": prompt, "max_tokens": 2, "kv_transfer_params": server.params(), "cache_salt": "odd"}
        status, reply = listener.post("/v1/completions", ask)
        assert (status, reply["usage"]["completion_tokens"]) == (200, 2)
        server.close()
    listener.wait_idle()


def test_a_client_that_leaves_during_the_transfer_leaves_nothing(listener: Listening) -> None:
    server = OddServer(None)
    body = json.dumps({**BODY, "max_tokens": 5, "kv_transfer_params": server.params()}).encode()
    leaver = socket.create_connection(("127.0.0.1", listener.instance.info.port))
    leaver.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert server.asked.wait(5)
    leaver.close()
    assert server.cut.wait(5)
    listener.wait_idle()
    server.close()


def test_leases_end_on_request_and_strangers_are_refused(prefiller: Listening, listener: Listening) -> None:
    params = first_leg(prefiller)
    url = f"{prefiller.url}/kv/{params['remote_request_id']}"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as reply:
        assert reply.status == 204
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url)
    for change, words in (({"remote_host": "192.0.2.1"}, "may not be pulled"), ({"remote_port": "x"}, "needs")):
        ask = {**BODY, "max_tokens": 2, "kv_transfer_params": {**params, **change}}
        status, reply = listener.post("/v1/completions", ask)
        assert (status, reply["error"]["param"]) == (400, "kv_transfer_params")
        assert words in reply["error"]["message"]
    ask = {**BODY, "n": 2, "kv_transfer_params": ASK}
    assert listener.post("/v1/completions", ask)[0] == 400
