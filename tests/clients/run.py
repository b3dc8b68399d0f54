"""Starts a gateway and runs clients through it: `python -m tests.clients.run PYTHON NODE_MODULES [CLIENT ...]`.

`PYTHON` is an interpreter that has the client packages, `NODE_MODULES` a folder below which npm has installed `openai`.
Chats, tools and embeddings go to the embedded engine; Anthropic's and the Responses API to an engine that replays
recordings of vLLM, because the embedded engine offers neither; retries to one that is full three times out of four.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support.gateway import whole
from tests.support.served import serve
from tests.support.upstream import Call, FakeUpstream

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "engines" / "vllm"
MODEL = "smollm2-135m-instruct"
CLIENTS = ("openai_python.py", "langchain_openai_client.py", "anthropic_python.py", "openai_node.mjs")
TEMPLATE = (  # the model's own knows no tools
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FULL = b'{"error":{"message":"full","type":"server_error","param":null,"code":null}}'


class Scripted:
    """Replays vLLM; models named flaky say 503 to all tries of the first request and then answer."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    async def __call__(self, call: Call) -> None:
        body = json.loads(call.body)
        if body["model"].startswith("flaky"):
            key = body["model"] + call.headers.get("user-agent", "")
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] % 4:
                await call.reply(503, FULL)
                return
        if call.path == "/v1/messages":
            await self._messages(call, bool(body.get("stream")))
        elif call.path == "/v1/responses":
            await call.reply(200, json.dumps(_recorded("responses")).encode())
        else:
            await call.reply(200, whole())

    async def _messages(self, call: Call, stream: bool) -> None:
        if not stream:
            await call.reply(200, json.dumps(_recorded("messages_anthropic")).encode())
            return
        wire = (DATA / "stream_messages_anthropic.sse").read_bytes()
        await call.sse_head()
        for start in range(0, len(wire), 100):
            await call.chunk(wire[start : start + 100])
        await call.last_chunk()


def _recorded(name: str) -> object:
    return json.loads((DATA / f"{name}.json").read_bytes())["json"]


def _models(client: str) -> list[str]:
    return [MODEL, f"flaky-{client.partition('.')[0]}", "scripted"]


def _config(upstream: FakeUpstream, template: Path) -> str:
    models = ["scripted", "flaky-messages", *(_models(c)[1] for c in CLIENTS)]
    instance = {"name": "scripted", "url": upstream.url, "kind": "vllm", "models": models}
    engine: dict[str, object] = {"name": "cpu", "threads": 1, "context_tokens": 1024, "slots": 4, "probe": False}
    engine["chat_template"] = str(template)
    return json.dumps({"engines": [engine], "instances": [instance], "router": {"policy": "least_requests"}})


async def _client(command: list[str], cwd: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=os.environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 180)
    return process.returncode or 0, out.decode()


async def main(python: str, node: Path, names: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        async with FakeUpstream(Scripted()) as upstream:
            file = Path(folder) / "fleet.yaml"
            template = Path(folder) / "tools.jinja"
            template.write_text(TEMPLATE)
            file.write_text(_config(upstream, template))
            context = serve(Path(folder), "--config", str(file))
            served = await asyncio.to_thread(context.__enter__)
            try:
                for name in names:
                    script = HERE / name
                    if name.endswith(".mjs"):  # node looks for packages beside the script
                        script = node / name
                        script.write_bytes((HERE / name).read_bytes())
                    begun = time.monotonic()
                    command = ["node" if name.endswith(".mjs") else python, str(script), served.url, *_models(name)]
                    status, out = await _client(command, node if name.endswith(".mjs") else HERE)
                    passed = [line[3:] for line in out.splitlines() if line.startswith("ok ")]
                    print(f"{name}: {', '.join(passed)} ({time.monotonic() - begun:.1f} s)")
                    if status:
                        failed += 1
                        print(f"FAILED: {out[-3000:]}")
                    assert "sk-clients-test" not in (Path(folder) / "stderr.txt").read_text()
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)
    return 1 if failed else 0


if __name__ == "__main__":
    chosen = sys.argv[3:] or list(CLIENTS)
    sys.exit(asyncio.run(main(sys.argv[1], Path(sys.argv[2]), chosen)))
