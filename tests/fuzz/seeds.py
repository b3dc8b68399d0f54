"""The first inputs of each target, written to `tests/fuzz/corpus`: `python -m tests.fuzz.seeds`."""

import hashlib
import json
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAMS = (
    CHUNK % b"a" + CHUNK % "🙂".encode() + USAGE + DONE,
    (CHUNK % b"a" + USAGE + DONE).replace(b"\n", b"\r\n"),
    (CHUNK % b"a" + USAGE + DONE).replace(b"\n", b"\r"),
    b"\xef\xbb\xbf: comment\n\nevent: ping\ndata\n\n" + CHUNK % b"[DONE]",
    b'data: {"error":{"message":"x"}}\n\n' + DONE,
    b'data: {"choices":[\ndata: ],"usage":{"prompt_tokens":1}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]',
)
BODIES = (
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}',
    b' {"messages" : [1], "model":"a\\u0062", "stream_options": {"include_usage": true} , "n":1}',
    b'{"messages":[{"content":"\\"}],\\"model\\":\\"x"}],"priority":5,"max_tokens":7}',
    '{"messages":["漢字🙂"],"":{"":[]},"model":null}'.encode(),
    b'{"model":"m","mod\\u0065l":"x","messages":[1]}',
)
REQUESTS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabcGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n0\r\nt: 1\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nx",
    b"GET / HTTP/1.1\r\nhost: a\r\n folded: x\r\n\r\n",
    b"GET http://b/ HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
)
REPLIES = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nokk",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\nkeep-alive: timeout=5\r\n\r\n0\r\n\r\n",
)
CUTS = (b"\x00", b"\x03\x40\x80\xc0", b"\x07\x01\x02\x04\x08\x7f\xfe\xff")


def main() -> None:
    wire = {"sse": STREAMS, "scanner": STREAMS, "head": REQUESTS, "reply": REPLIES}
    inputs = {name: [cut + data for data in seeds for cut in CUTS] for name, seeds in wire.items()}
    inputs["splice"] = [*BODIES, json.dumps({"messages": [1], "tools": [{"a": {"model": 1}}]}, indent=2).encode()]
    for name, each in inputs.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for data in each:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main()
