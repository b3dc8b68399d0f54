"""What stands before the body of a reply, and heads that an engine repeats from one reply to the next."""

from weighbridge.http.known_head import KnownHead


class ReplyHead:
    """Status and headers of a reply (lower-case names), with the length if it was declared.

    Replies may share a head, so nobody changes it. `notes` is for what a sink derives from headers other than
    Content-Length; heads that differ only there share it as well.
    """

    __slots__ = ("chunked", "headers", "length", "notes", "status")

    def __init__(
        self, status: int, headers: list[tuple[bytes, bytes]], notes: dict[object, bytes] | None = None
    ) -> None:
        self.status = status
        self.headers = headers
        self.length: int | None = None
        self.chunked = False
        self.notes: dict[object, bytes] = {} if notes is None else notes

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class KnownReply:
    """The head of a pool's last plain reply (200, to anything but HEAD) and what it said of its connection."""

    __slots__ = ("_known", "head", "idle_limit_s", "reusable")

    def __init__(self, head_bytes: bytes, head: ReplyHead, reusable: bool, idle_limit_s: float) -> None:
        self._known = KnownHead(head_bytes)
        self.head = head
        self.reusable = reusable
        self.idle_limit_s = idle_limit_s

    def find(self, data: bytes) -> int:
        """Where the body begins, if `data` begins with this head but for its Content-Length, which `head` then has;
        else 0."""
        known = self._known
        digits = known.digits
        if not known.find(data):
            return 0
        if known.digits != digits:
            old = self.head
            name = b"content-length"
            headers = [(key, known.digits if key == name else value) for key, value in old.headers]
            self.head = ReplyHead(old.status, headers, old.notes)
            self.head.length = known.length
        return known.start
