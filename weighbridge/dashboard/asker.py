"""Asks child processes what another policy would have chosen for a request; answers are kept."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from weighbridge.dashboard.html import Html, h
from weighbridge.routing.replay import Wish

KEPT = 200
WALL_S = 90.0


class Asker:
    """One question at a time; the answer is a Wish, or the reason why there is none."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str, str], Wish | str] = OrderedDict()
        self._lock = asyncio.Lock()

    def known(self, log: str, request_id: str, policy: str) -> Wish | str | None:
        """An answer that was given before."""
        return self._answers.get((log, request_id, policy))

    async def ask(self, log: Path, request_id: str, policy: str) -> Wish | str:
        """The answer, computed if it is not known."""
        key = (str(log), request_id, policy)
        async with self._lock:
            if key not in self._answers:
                self._answers[key] = await self._run(key)
                while len(self._answers) > KEPT:
                    self._answers.popitem(last=False)
        return self._answers[key]

    async def _run(self, arguments: tuple[str, str, str]) -> Wish | str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weighbridge.dashboard.ask_job", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(WALL_S):
                out, _ = await process.communicate()
        except TimeoutError:
            return f"it took longer than {WALL_S:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if out.startswith(b"E "):
            return out[2:].decode("utf-8", "replace").strip()
        try:
            return msgspec.json.decode(out, type=Wish)
        except msgspec.MsgspecError:
            return "the child process ended without an answer"


def shown(answer: Wish | str, policy: str) -> Html:
    """The answer in words."""
    if isinstance(answer, str):
        return h("p.verdict", f"{policy} was asked, but there is no answer: {answer}.")
    if answer.wished == answer.recorded:
        text = f"would have chosen {answer.wished} as well"
    elif answer.wished == "held back":
        text = f"would have held the request back instead of sending it to {answer.recorded}"
    else:
        text = f"would have chosen {answer.wished} instead of {answer.recorded}"
    scores = sorted(answer.scores.items(), key=lambda item: item[1])[:6]
    listed = (
        h("span.dim", " Its scores, lowest best: ", ", ".join(f"{n} {v:.4g}" for n, v in scores), ".")
        if scores
        else None
    )
    caveat = h("span.dim", " Asked on the fleet as it stood then; how it would have fared is a what-if.")
    return h("p.verdict", h("b", answer.policy), f" {text}.", listed, caveat)
