"""Deadlines and bounds of the server and the client. All times in seconds, all sizes in bytes."""

import msgspec


class ServerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one listener; every wait for a peer has a deadline and every buffer a cap."""

    head_s: float = 10.0  # first byte of a request to the end of its head
    body_s: float = 60.0  # end of the head to the end of the body
    idle_s: float = 75.0  # between two requests on one connection
    write_s: float = 60.0  # a reader that takes nothing for this long is cut
    max_head_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    max_buffered_bytes: int = 512 * 1024 * 1024  # request bodies held by all connections together
    max_connections: int = 20_000
    max_pipelined: int = 16
    write_buffer_bytes: int = 128 * 1024  # above this the source of a stream is paused


class ClientLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the connections to one origin."""

    connect_s: float = 5.0
    head_s: float = 600.0  # request sent to first byte of the reply: a long prefill is silent
    read_s: float = 300.0  # between two reads of a reply
    idle_s: float = 4.0  # shorter than the shortest common server idle timeout (uvicorn: 5 s)
    resend_s: float = 0.25  # a re-used connection that dies this soon, without a byte, had been closed before
    max_head_bytes: int = 64 * 1024
    max_idle: int = 1024
    read_buffer_bytes: int = 256 * 1024  # unread reply bytes of one `stream` before its socket is paused
