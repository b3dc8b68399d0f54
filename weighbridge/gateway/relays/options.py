"""What the processes are started with: one JSON line on standard input."""

from __future__ import annotations

import msgspec

from weighbridge.gateway.settings import GatewaySettings


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a relay; everything else the Router's process tells. `salt`: hex, empty where no salts are wanted.

    `start_s` is the monotonic time at which the clock that all share shows 0.
    """

    number: int
    socket: str
    host: str
    port: int
    start_s: float
    salt: str = ""


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the Router's process. `wait_for`: instances that are to be up, within `ready_s`, when the fleet is told of."""

    settings: GatewaySettings
    socket: str
    start_s: float
    wait_for: list[str] = []
    ready_s: float = 10.0
