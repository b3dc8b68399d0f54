"""Server-sent events decoded, as the WHATWG algorithm does."""

from dataclasses import dataclass

from weighbridge.http.sse import BOM, EVENT_END, LINE, Splitter


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event."""

    data: str
    event: str = "message"
    id: str = ""


class SseParser:
    """Decodes a stream of bytes into events, as a browser's EventSource would."""

    __slots__ = ("_last_id", "_splitter", "_started")

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._started = False
        self._last_id = ""

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events completed by `data`. Raises ValueError if one is absurdly long."""
        whole = self._splitter.feed(data)
        if whole and not self._started:
            self._started = True
            whole = whole.removeprefix(BOM)
        events = []
        for block in EVENT_END.split(whole):
            event = self._event(block)
            if event is not None:
                events.append(event)
        return events

    def _event(self, block: bytes) -> SseEvent | None:
        data: list[str] = []
        kind = ""
        for raw in LINE.split(block):
            if not raw or raw[:1] == b":":
                continue
            name, _, value = raw.decode("utf-8", "replace").partition(":")
            value = value[1:] if value[:1] == " " else value
            if name == "data":
                data.append(value)
            elif name == "event":
                kind = value
            elif name == "id" and "\0" not in value:
                self._last_id = value
        if not data:
            return None
        return SseEvent("\n".join(data), kind or "message", self._last_id)
