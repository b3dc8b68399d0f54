"""What relays and the Router's process tell each other, and how it is framed. Pure.

A frame is four bytes of length (big-endian) and a msgpack list of messages; a message is a list that begins with its
tag. Both ends are of one version, started by one supervisor, so there is no negotiation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.events import (
    FirstToken,
    PrefillFinished,
    RequestAdopted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.request import Request
from weighbridge.gateway.adapters import Facts
from weighbridge.gateway.kv.prompt import Prompt
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.relays.tally import Change
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings

MAX_FRAME_BYTES = 64 * 1024 * 1024
MOST_MESSAGES = 512  # in one frame; what a pass has beyond them goes into further frames
HEAD_BYTES = 4

Course = FirstToken | TokensProgressed | PrefillFinished
End = RequestFinished | RequestFailed | RequestCancelled


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# up: from a relay to the Router


class Hello(_Message, frozen=True, tag="h"):
    """The first message of a connection: which relay this is."""

    relay: int
    pid: int


class Arrived(_Message, frozen=True, tag="a"):
    """A request came in. `key`: SHA-256 of its API key where that key has a quota. `explain`: it wants the decision."""

    request: Request
    key: str = ""
    explain: bool = False


class Went(_Message, frozen=True, tag="g"):
    """A running request went on."""

    event: Course


class Ended(_Message, frozen=True, tag="e"):
    """An attempt, or the request with it, has ended. `outcome`: how it went, where it had been dispatched."""

    event: End
    outcome: Outcome | None = None


class Runs(_Message, frozen=True, tag="r"):
    """A request that goes on from before this connection. An `Ended` may follow at once."""

    event: RequestAdopted
    explain: bool = False


class Sign(_Message, frozen=True, tag="s"):
    """What a real request saw of an engine's health."""

    instance: str
    reason: str
    connecting: bool = False


class Answered(_Message, frozen=True, tag="k"):
    """An engine whose KV events are followed answered this prompt."""

    instance: str
    prompt: Prompt


class Tally(_Message, frozen=True, tag="c"):
    """What a relay has counted since it last told, and how it is now."""

    changes: list[Change]
    refusals: int = 0
    retries: int = 0
    retries_refused: int = 0
    lines_dropped: int = 0
    ends_forgotten: int = 0
    lag_s: float = 0.0
    connections: int = 0


Up = Hello | Arrived | Went | Ended | Runs | Sign | Answered | Tally

# down: from the Router to a relay


class Welcome(_Message, frozen=True, tag="w"):
    """The answer to `Hello`, and again after every reload."""

    settings: GatewaySettings


class Engine(msgspec.Struct, frozen=True, array_like=True):
    """One engine of the fleet as a relay needs to know it."""

    settings: InstanceSettings
    facts: Facts | None
    up: bool
    generation: int
    ranks: tuple[tuple[str, str], ...] = ()


class Roster(_Message, frozen=True, tag="f"):
    """All engines; comes before any action that names a new one."""

    engines: tuple[Engine, ...]


class Act(_Message, frozen=True, tag="d"):
    """The Router's order for one request."""

    action: Dispatch | Reject


class Stop(_Message, frozen=True, tag="x"):
    """Attempt number `attempt` of a request is to be given up."""

    request_id: str
    attempt: int
    reason: str


class Refused(_Message, frozen=True, tag="q"):
    """A request is not taken in, for a fault of its own: OpenAI's error fields."""

    request_id: str
    status: int
    message: str
    kind: str
    code: str | None
    retry_after_s: float | None


class Taken(_Message, frozen=True, tag="t"):
    """The request's id is in use on another relay; it needs a new one."""

    request_id: str


class Beat(_Message, frozen=True, tag="b"):
    """The Router's process is alive."""


Down = Welcome | Roster | Act | Stop | Refused | Taken | Beat
Side = Literal["up", "down"]

_encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(list[Up]).decode
decode_down = msgspec.msgpack.Decoder(list[Down]).decode


def frames(messages: Sequence[Up] | Sequence[Down]) -> bytes:
    """The messages in as few frames as their number allows."""
    if len(messages) <= MOST_MESSAGES:
        body = _encode(messages)
        return len(body).to_bytes(HEAD_BYTES, "big") + body
    return b"".join(frames(messages[n : n + MOST_MESSAGES]) for n in range(0, len(messages), MOST_MESSAGES))


class Splitter:
    """Cuts what a socket delivers into the bodies of frames, wherever it was cut before.

    What comes of a frame in many reads is put together once, when it is whole.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now. Raises ValueError for a frame that is too large."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._wanted:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        start, size = 0, len(data)
        wanted = HEAD_BYTES
        while size - start >= HEAD_BYTES:
            length = int.from_bytes(data[start : start + HEAD_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are taken")
            end = start + HEAD_BYTES + length
            if end > size:
                wanted += length
                break
            yield data[start + HEAD_BYTES : end]
            start = end
        if start < size:
            self._parts.append(data[start:])
            self._size, self._wanted = size - start, wanted
