"""Child processes: a killed instance comes back on its port, bad options are one clear error, no orphan is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from weighbridge.core.errors import ModelError
from weighbridge.engine.instance import InstanceOptions
from weighbridge.engine.supervisor import Supervisor
from weighbridge.http import ClientLimits, HttpClient

pytestmark = pytest.mark.engine
OPTIONS = InstanceOptions(name="one", slots=1, context_tokens=256, threads=1, probe=False)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaped counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_instance_comes_back_on_its_port() -> None:
    async def run() -> None:
        states: list[bool] = []
        back = asyncio.Event()

        def on_state(name: str, up: bool, info: object) -> None:
            states.append(up)
            if states == [True, False, True]:
                back.set()

        supervisor = Supervisor([OPTIONS], on_state)
        (info,) = await supervisor.start()
        first = supervisor.pids()["one"]
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(back.wait(), 30)
        second = supervisor.pids()["one"]
        assert second != first
        client = HttpClient(ClientLimits())
        reply = await client.request("GET", f"http://127.0.0.1:{info.port}/health", timeout_s=5.0)
        assert reply.status == 200
        await client.close()
        await supervisor.stop()
        assert supervisor.pids() == {}
        assert gone(second)

    asyncio.run(run())


def test_an_instance_that_stands_still_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.engine.supervisor.SILENT_S", 1.0)

    async def run() -> None:
        states: list[bool] = []
        back = asyncio.Event()

        def on_state(name: str, up: bool, info: object) -> None:
            states.append(up)
            if len(states) > 1 and up:
                back.set()

        supervisor = Supervisor([OPTIONS], on_state)
        await supervisor.start()
        first = supervisor.pids()["one"]
        await asyncio.sleep(1.3)
        assert supervisor.pids()["one"] == first, "it answers"
        os.kill(first, signal.SIGSTOP)
        await asyncio.wait_for(back.wait(), 30)
        assert states == [True, False, True]
        assert gone(first)
        await supervisor.stop()

    asyncio.run(run())


def test_an_instance_that_cannot_start_says_why() -> None:
    options = InstanceOptions(name="bad", model="no-such-model", probe=False)
    with pytest.raises(ModelError, match="instance bad: model 'no-such-model' is neither"):
        asyncio.run(Supervisor([options]).start())


def test_no_child_outlives_its_parent() -> None:
    code = (
        "import asyncio, sys\n"
        "from weighbridge.engine.supervisor import Supervisor\n"
        "from weighbridge.engine.instance import InstanceOptions\n"
        "async def main():\n"
        "    s = Supervisor([InstanceOptions(slots=1, context_tokens=256, threads=1, probe=False)])\n"
        "    await s.start(); print(s.pids()['embedded-0'], flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_instances_share_one_process_and_its_weights() -> None:
    async def run() -> None:
        supervisor = Supervisor([OPTIONS, msgspec.structs.replace(OPTIONS, name="two")], one_process=True)
        infos = await supervisor.start()
        assert [info.name for info in infos] == ["one", "two"]
        assert len({info.port for info in infos}) == 2
        pids = supervisor.pids()
        assert pids["one"] == pids["two"]
        client = HttpClient(ClientLimits())
        body = b'{"prompt": "One, two,", "max_tokens": 3, "temperature": 0, "ignore_eos": true}'
        urls = [f"http://127.0.0.1:{info.port}/v1/completions" for info in infos]
        replies = await asyncio.gather(*(client.request("POST", url, body=body, timeout_s=30.0) for url in urls))
        texts = [reply.json()["choices"][0]["text"] for reply in replies]
        assert texts[0] == texts[1]
        await client.close()
        await supervisor.stop()
        assert gone(pids["one"])

    asyncio.run(run())
