"""A running `serve` takes over a changed file: on SIGHUP, by watching it, by admin call; a bad one changes nothing."""

import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.served import Served, serve


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def reload(served: Served) -> tuple[int, str]:
    request = urllib.request.Request(served.admin + "/reload", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_changed_file_is_taken_over_while_serving(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    said = tmp_path / "stderr.txt"

    def write(*names: str, **more: object) -> None:
        value = {"instances": [{"name": n, "url": url, "kind": "openai"} for n in names], "port": 8080, **more}
        file.write_text(json.dumps(value))

    with engine() as url:
        write("one")
        with serve(tmp_path, "--config", str(file)) as served:
            assert set(served.fleet()) == {"one"}
            write("one", "two")
            served.process.send_signal(signal.SIGHUP)
            eventually(lambda: "two" in served.fleet())
            write("one", "two", oops=1)
            served.process.send_signal(signal.SIGHUP)
            eventually(lambda: "not reloaded, the old settings stay" in said.read_text())
            assert "did you mean" in said.read_text() or "unknown key" in said.read_text()
            assert set(served.fleet()) == {"one", "two"}
            status, text = reload(served)
            assert (status, "oops" in text) == (400, True)
            write("three", "two")
            assert reload(served) == (200, '{"changes":["added three","removed one"]}')
            write("three", "two", router={"policy": "random"})
            assert "restart" in reload(served)[1]
            assert 'weighbridge_config_reloads_total{result="refused"} 3.0' in served.get("/metrics")
            assert served.get("/healthz", admin=False) == "ok"


def test_a_watched_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    with engine() as url:
        row = "  - {name: %s, url: '" + url + "'}\n"
        file.write_text("watch_s: 0.1\ninstances:\n" + row % "one")
        with serve(tmp_path, "--config", str(file)) as served:
            fresh = tmp_path / "fresh.yaml"
            fresh.write_text("watch_s: 0.1\ninstances:\n" + row % "one" + row % "two")
            fresh.replace(file)
            eventually(lambda: set(served.fleet()) == {"one", "two"})
            assert "reloaded: added two" in (tmp_path / "stderr.txt").read_text()
