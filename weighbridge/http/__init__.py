"""HTTP/1.1 for every part that speaks it: a strict server, a pooled client and an SSE scanner on asyncio protocols.

Server (used by the gateway, the admin listener and the engine's OpenAI server)::

    routes = Routes()
    routes.get("/healthz", lambda request, responder: responder.send(200, b"ok", content_type="text/plain"))

    async def chat(request: Request, responder: Responder) -> None:   # a coroutine function works as well
        body = msgspec.json.decode(request.body)
        responder.start_sse()                        # status 200, text/event-stream, chunked
        for token in generate(body):
            responder.write(b"data: ...\\n\\n")      # never blocks; bytes leave at once
            await responder.drain()                  # waits while the client reads slowly
        responder.end()

    routes.post("/v1/chat/completions", chat)
    server = HttpServer(routes, ServerLimits())
    await server.start("127.0.0.1", 0)               # server.port is the bound port
    ...
    await server.drain(30.0)                         # no new connections; waits for running responses
    await server.stop()

- A handler is called as ``handler(request, responder)`` once the whole body has arrived. A coroutine function runs in
  a task that is cancelled when the client disconnects; a plain function may set ``responder.on_disconnect`` instead.
- ``Request``: ``method`` and ``path`` and ``query`` (str), ``headers`` (list of lower-case name and value, bytes),
  ``header(b"name")``, ``body`` (bytes, de-chunked), ``peer``, ``received_s`` (loop time).
- ``Responder``: ``send``, ``send_json``, ``send_error`` (OpenAI envelope), ``start`` / ``start_sse`` + ``write`` +
  ``end``, ``abort``; ``disconnected``, ``on_disconnect``, ``on_pause``, ``on_resume``, ``await drain()``.
- Every response ends exactly once; calls after a disconnect do nothing.
- The server answers malformed framing, oversize heads and bodies, and missed deadlines itself, in the same envelope.

Client (used by the gateway's relay, bench, calibrate and the tests)::

    client = HttpClient(ClientLimits())
    reply = await client.request("GET", "http://127.0.0.1:8000/v1/models", timeout_s=5.0)
    reply.status, reply.header(b"content-type"), reply.body, reply.json()
    async with client.stream("POST", url, body=payload) as stream:      # stream.status, stream.headers
        async for data in stream:                                         # de-chunked bytes as they arrive
            for event in parser.feed(data): ...                           # parser = SseParser()
    await client.close()

``Pool`` is the level below it: one origin, ``pool.send(request_bytes, sink)`` with callbacks and no task per request.
``SseParser`` decodes events as a browser would; ``SseScanner`` only counts and marks them, for the relay.
"""

from weighbridge.http.client import HttpClient, Reply, StreamReply
from weighbridge.http.client_connection import Exchange, Sink
from weighbridge.http.envelope import error_body
from weighbridge.http.errors import (
    BadReply,
    ConnectFailed,
    ConnectionCut,
    ExchangeFailed,
    ReplyTimeout,
)
from weighbridge.http.limits import ClientLimits, ServerLimits
from weighbridge.http.pool import Pool
from weighbridge.http.reply_head import ReplyHead
from weighbridge.http.request import Request
from weighbridge.http.responder import Responder
from weighbridge.http.routes import Routes
from weighbridge.http.server import HttpServer
from weighbridge.http.sse import SseScanner
from weighbridge.http.sse_parser import SseEvent, SseParser

__all__ = [
    "BadReply",
    "ClientLimits",
    "ConnectFailed",
    "ConnectionCut",
    "Exchange",
    "ExchangeFailed",
    "HttpClient",
    "HttpServer",
    "Pool",
    "Reply",
    "ReplyHead",
    "ReplyTimeout",
    "Request",
    "Responder",
    "Routes",
    "ServerLimits",
    "Sink",
    "SseEvent",
    "SseParser",
    "SseScanner",
    "StreamReply",
    "error_body",
]
