"""Decoder of the chunked transfer coding, strict and without a copy where a read holds one whole chunk."""

MAX_SIZE_LINE = 256
MAX_TRAILER_BYTES = 8192
MOST_PARTED = 65_536
"""A read of at most so many bytes is first tried as whole chunks of a stream, of which it mostly consists."""


class ChunkedDecoder:
    """Turns reads into payload. `done` is set by the terminating chunk; `rest` then holds surplus bytes."""

    __slots__ = ("_carry", "_left", "_trailer", "done", "rest")

    def __init__(self) -> None:
        self._carry = b""
        self._left = 0  # payload bytes of the open chunk still to come
        self._trailer = -1  # bytes of trailer seen, once in it
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`. Raises ValueError on malformed framing."""
        pieces: list[bytes] = []
        position = 0
        if self._left:
            piece = data[: self._left]
            pieces.append(piece)
            position = len(piece)
            self._left -= position
            if self._left:
                return piece
            self._carry = b"\r\n?"  # expects the line break that ends the chunk
        if self._carry:
            if self._carry == b"\r\n?" or self._carry == b"\r\n?\r":
                data = self._carry[3:] + data[position:]
                position = 0
                if len(data) < 2:
                    self._check_break(data)
                    self._carry = b"\r\n?" + data
                    return pieces[0] if pieces else b""
                self._check_break(data[:2])
                position = 2
            else:
                data = self._carry + data
            self._carry = b""
        if self._trailer >= 0:
            self._end(data)
            return b""
        self._walk(data, position, pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _walk(self, data: bytes, position: int, pieces: list[bytes]) -> None:
        size_bytes = len(data)
        if size_bytes <= MOST_PARTED and not position:
            payload = _whole_chunks(data)
            if payload is not None:
                pieces.append(payload)
                return
        find = data.find
        starts = data.startswith
        known = _SIZES.get
        while position < size_bytes:
            line_end = find(b"\r\n", position)
            if line_end < 0:
                if size_bytes - position > MAX_SIZE_LINE:
                    raise ValueError("chunk size line is too long")
                self._carry = data[position:]
                return
            line = data[position:line_end]
            size = known(line) or _size(line)
            start = line_end + 2
            if not size:
                self._trailer = 0
                self._end(data[start:])
                return
            end = start + size
            if end + 2 <= size_bytes:
                if not starts(b"\r\n", end):
                    raise ValueError("chunk does not end with CRLF")
                pieces.append(data[start:end])
                position = end + 2
                continue
            if end <= size_bytes:
                pieces.append(data[start:end])
                self._check_break(data[end:])
                self._carry = b"\r\n?" + data[end:]
            else:
                if start < size_bytes:
                    pieces.append(data[start:])
                self._left = end - size_bytes
            return

    @staticmethod
    def _check_break(data: bytes) -> None:
        if not b"\r\n".startswith(data):
            raise ValueError("chunk does not end with CRLF")

    def _end(self, data: bytes) -> None:
        while True:
            line_end = data.find(b"\r\n")
            if line_end < 0:
                self._trailer += 0
                if len(data) > MAX_TRAILER_BYTES:
                    raise ValueError("trailer is too long")
                self._carry = data
                return
            if line_end == 0:
                self.done = True
                self.rest = data[2:]
                return
            self._trailer += line_end
            if self._trailer > MAX_TRAILER_BYTES:
                raise ValueError("trailer is too long")
            data = data[line_end + 2 :]


_SIZES: dict[bytes, int] = {b"%x" % n: n for n in range(1, 4096)}
"""The usual sizes; anything else is parsed and checked."""


_SIZE_LINES = [b"%x\r\n" % n for n in range(4096)]


def framed(data: bytes) -> bytes:
    """`data`, which is not empty, as one chunk."""
    size = len(data)
    return (_SIZE_LINES[size] if size < 4096 else b"%x\r\n" % size) + data + b"\r\n"


def _whole_chunks(data: bytes) -> bytes | None:
    """The payload of `data`, if it is nothing but whole chunks of usual sizes without a CRLF in them; else None."""
    parts = data.split(b"\r\n")
    if len(parts) == 3:
        return None if parts[2] or _SIZES.get(parts[0]) != len(parts[1]) else parts[1]
    payloads = parts[1::2]
    if parts[-1] or list(map(len, payloads)) != list(map(_SIZES.get, parts[:-1:2])):
        return None
    return b"".join(payloads)


def _size(line: bytes) -> int:
    """A chunk size; extensions are ignored, signs, spaces and underscores refused."""
    size = line.partition(b";")[0].rstrip(b" \t") if b";" in line else line
    if not size.isalnum() or len(size) > 15 or (size[1:2] in b"xX" and len(size) > 1):
        raise ValueError("malformed chunk size")
    return int(size, 16)
