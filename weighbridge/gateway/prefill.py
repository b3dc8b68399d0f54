"""The prefill leg of a disaggregated request: runs the prompt on one engine and keeps what its KV is known by.

The protocols are in `pairs`. Where both legs start at once the prefill leg's reply is read and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from weighbridge.gateway.endpoint import Endpoint
from weighbridge.http import BadReply, Exchange, ExchangeFailed, ReplyHead

log = logging.getLogger("weighbridge.gateway")
LEASE_S = 25.0
"""Oldest transfer parameters that are used: engines free the KV after 30 s by default, and then serve other data."""
MAX_REPLY_BYTES = 8 << 20


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class PrefillLeg:
    """Sink of the prefill engine's reply.

    Tells `done(params)` or `failed(error, head, body)` once (an error, or what the engine refused with); nothing after
    `cancel`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        payload: bytes,
        done: Callable[[bytes | None], None],
        failed: Callable[[ExchangeFailed | None, ReplyHead | None, bytes], None],
    ) -> None:
        self.endpoint = endpoint
        self._done = done
        self._failed = failed
        self._head: ReplyHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        endpoint.running += 1
        self._exchange: Exchange | None = endpoint.open().send(payload, self)

    def cancel(self) -> None:
        """Gives the leg up; the engine sees its connection close."""
        exchange = self._release()
        if exchange is not None:
            exchange.cancel()

    def on_head(self, head: ReplyHead) -> None:
        """The reply begins."""
        self._head = head

    def on_data(self, data: bytes) -> None:
        """Kept until it is whole."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > MAX_REPLY_BYTES:
            self.cancel()
            self._failed(BadReply("the prefill reply is too large", reply_begun=True), None, b"")

    def on_end(self) -> None:
        """The prompt is computed, or the engine refused."""
        self._release()
        assert self._head is not None
        body = b"".join(self._pieces)
        if self._head.status != 200:
            self._failed(None, self._head, body)
            return
        try:
            params = bytes(msgspec.json.decode(body, type=_Reply).kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._failed(BadReply("the prefill reply is not JSON", reply_begun=True), None, b"")
            return
        self._done(None if params == b"null" else params)

    def on_fail(self, error: ExchangeFailed) -> None:
        """The connection broke."""
        self._release()
        self._failed(error, None, b"")

    def _release(self) -> Exchange | None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self.endpoint.running -= 1
        return exchange


class _Ignored:
    """Sink of a reply that nobody waits for."""

    def on_head(self, head: ReplyHead) -> None:
        """Nothing to note."""

    def on_data(self, data: bytes) -> None:
        """Dropped."""

    def on_end(self) -> None:
        """Done."""

    def on_fail(self, error: ExchangeFailed) -> None:
        """The lease ends by itself."""


def give_up_kv(endpoint: Endpoint, params: bytes) -> None:
    """Tells a prefill engine that nobody will collect a KV, where it can be told; else its lease runs out.

    It is a kindness on the way to a request's end: nothing that goes wrong with it may stop that.
    """
    pool = endpoint.pool
    if pool is None or pool.closed:
        return
    try:
        path = endpoint.adapter.kv_lease(msgspec.json.decode(params))
        if path is not None:
            pool.send(endpoint.plain_request("DELETE", path), _Ignored())
    except Exception:  # parameters are the engine's own words, whatever they are
        log.exception("%s cannot be told to free a KV", endpoint.name)
