"""Starting and stopping `weighbridge serve`: taken ports, bad configuration, Ctrl-C, no process left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.support.served import ROOT, serve

MODEL = "smollm2-135m-instruct"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weighbridge.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_one_clear_line(tmp_path: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = "--admin-port" if flag == "--port" else "--port"
        port = str(taken.getsockname()[1])
        done = run("serve", flag, port, other, "0", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line == f"weighbridge: 127.0.0.1:{port} is taken by another program; choose another with {flag}"


def test_a_bad_file_is_one_clear_line_for_check_and_serve(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("instances:\n  - name: a\n    url: ftp://x\n")
    for command in (
        ["config", "check", str(file)],
        ["serve", "--config", str(file)],
        ["doctor", "--config", str(file)],
    ):
        done = run(*command)
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith(f"weighbridge: {file}:3: $.instances[0].url: 'ftp://x' is not a URL of an engine")
    as_json = run("config", "check", str(file), "--json")
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["ok"] is False


def test_an_unknown_policy_names_the_known_ones() -> None:
    done = run("serve", "--policy", "fastest")
    assert done.returncode == 2
    assert "unknown policy 'fastest'; known: " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_doctor_names_what_fails_and_its_remedy(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("instances:\n  - {name: a, url: 'http://127.0.0.1:9', api_key_env: NO_SUCH_KEY}\nhost: 0.0.0.0\n")
    done = run("doctor", "--config", str(file), "--data-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    failing = [f["message"] for f in findings if f["level"] == "fail"]
    assert any("NO_SUCH_KEY is not set" in m for m in failing)
    assert any("http://127.0.0.1:9" in m for m in failing)
    assert any("anyone who reaches 0.0.0.0" in f["message"] for f in findings if f["level"] == "warn")
    assert all(f["remedy"] for f in findings if f["level"] != "ok")


@pytest.mark.engine
def test_ctrl_c_lets_a_stream_end_and_leaves_no_process(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        pids = [i["pid"] for i in served.instances]
        ended: list[str] = []
        first = threading.Event()

        def stream() -> None:
            with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, timeout=60) as api:
                chunks = api.completions.create(
                    model=MODEL, prompt="Once", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
                )
                for chunk in chunks:
                    first.set()
                    ended.extend(c.finish_reason for c in chunk.choices if c.finish_reason)

        thread = threading.Thread(target=stream)
        thread.start()
        assert first.wait(30)
        assert served.stop() == 0
        thread.join(30)
        assert ended == ["length"], "the running stream was cut although it could drain"
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "an engine outlived its gateway"
        time.sleep(0.05)


@pytest.mark.engine
def test_engines_die_with_a_killed_gateway(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        pids = [i["pid"] for i in served.instances]
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "an engine outlived its killed gateway"
            time.sleep(0.05)
