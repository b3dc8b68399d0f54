"""`model: auto`: asks the selector which model answers, keeps the record, and takes feedback on it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import InputError, RequestError, ServiceError
from weighbridge.core.request import Request as RoutedRequest
from weighbridge.gateway.auth import Principal
from weighbridge.gateway.desk import Desk
from weighbridge.gateway.driver import Driver
from weighbridge.http import Request
from weighbridge.selection import feedback
from weighbridge.selection.cascade import CascadeRecord, CascadeSettings
from weighbridge.selection.decision import Constraints, Decision, LiveCost, Mode
from weighbridge.selection.features import FloatArray
from weighbridge.selection.opening import open_selector
from weighbridge.selection.settings import SelectionSettings
from weighbridge.selection.sticky import Sessions
from weighbridge.selection.text import routing_text

KEPT = 2000
MAX_EXPLAINED_BYTES = 8000
HEADER = b"x-weighbridge-"


class _Chat(msgspec.Struct):
    messages: list[Any] = []
    prompt: Any = None
    tools: list[Any] | None = None
    response_format: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class Selected(msgspec.Struct, frozen=True):
    """One answered `auto`: whose request it was, what was decided, and the text's sketch for feedback.

    Of a cascade: all its tries; the decision is what they were weighed by, with the model that answered in the end.
    """

    request_id: str
    tenant: str
    at_s: float
    decision: Decision
    sketch: FloatArray
    cascade: CascadeRecord | None = None


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    score: float


class ModelChoice:
    """Between reading a request and routing it. Memory is bounded: KEPT records, the sessions of the settings."""

    def __init__(self, settings: SelectionSettings, driver: Desk) -> None:
        """Raises ConfigError or CheckpointError when pool, checkpoint and settings do not fit together."""
        self.settings = settings
        self.aliases = frozenset(settings.aliases)
        self.offered = self.aliases | ({settings.cascade.alias} if settings.cascade is not None else set())
        self.selector = open_selector(settings)
        self.records: OrderedDict[str, Selected] = OrderedDict()
        self._sessions = Sessions(settings.sticky.sessions)
        assert isinstance(driver, Driver), "choosing a model needs the Router in this process"
        self._driver = driver
        self._headers = {name.lower() for rule in settings.rules for name in rule.match.headers}
        self._log = Path(settings.feedback_log) if settings.feedback_log else None
        if self._log is not None and self._log.exists():
            with self._log.open("rb") as stream:
                feedback.replay(self.selector, feedback.read(stream, str(self._log)))

    def allows(self, principal: Principal, model: str) -> bool:
        """Whether `model` is an alias of ours that this key may use."""
        return model in self.aliases and (not principal.models or model in principal.models)

    @property
    def cascade(self) -> CascadeSettings:
        """The configured cascade; only where `cascades` said yes."""
        assert self.settings.cascade is not None
        return self.settings.cascade

    def cascades(self, principal: Principal, model: str) -> bool:
        """Whether `model` asks for the cascade and this key may use it."""
        cascade = self.settings.cascade
        return cascade is not None and model == cascade.alias and (not principal.models or model in principal.models)

    def weigh_cascade(
        self, request: Request, principal: Principal, body: bytes, routed: RoutedRequest
    ) -> tuple[Selected, str]:
        """Forecast every model for a cascade's request, and the text that a judge is shown.

        Raises:
            RequestError: a bad header, or no model can serve it.
        """
        chat = msgspec.json.decode(body, type=_Chat)
        messages = chat.messages or [{"role": "user", "content": _prompt_text(chat.prompt)}]
        _, constraints = self._wishes(request, chat, principal, routed)
        constraints = msgspec.structs.replace(constraints, previous="")
        live = self._live(principal, routed)
        decision, sketch = self.selector.decide_with_sketch(messages, chat.tools or (), None, constraints, live)
        self.records.pop(routed.id, None)
        question = routing_text(messages, chat.tools or (), self.settings.text).text
        return Selected(routed.id, principal.tenant, routed.arrival_s, decision, sketch), question

    def keep_cascade(self, selected: Selected, model: str, record: CascadeRecord) -> None:
        """A cascade is over; feedback on it goes to the model that answered."""
        reason = f"cascade: {model} after {len(record.tries)} calls" if len(record.tries) > 1 else f"cascade: {model}"
        decision = msgspec.structs.replace(selected.decision, model=model, reason=reason)
        self._keep(msgspec.structs.replace(selected, decision=decision, cascade=record))

    def choose(self, request: Request, principal: Principal, body: bytes, routed: RoutedRequest) -> Decision:
        """Decide for one request; `routed` is the request as it would be routed, but for its model.

        Raises:
            RequestError: a bad header, or no model can serve it.
        """
        chat = msgspec.json.decode(body, type=_Chat)
        messages = chat.messages or [{"role": "user", "content": _prompt_text(chat.prompt)}]
        mode, constraints = self._wishes(request, chat, principal, routed)
        live = self._live(principal, routed)
        decision, sketch = self.selector.decide_with_sketch(messages, chat.tools or (), mode, constraints, live)
        self._keep(Selected(routed.id, principal.tenant, routed.arrival_s, decision, sketch))
        self._sessions.put(_session(principal, routed), decision.model)
        return decision

    def _live(self, principal: Principal, routed: RoutedRequest) -> dict[str, LiveCost]:
        """The router's own forecast for every model of the pool that this caller may use."""
        router, now = self._driver.router, self._driver.now()
        listed = set(principal.models) - self.offered
        out: dict[str, LiveCost] = {}
        for name in self.selector.pool.names:
            if listed and name not in listed:  # a key that names models besides the alias is given no others
                continue
            seen = router.outlook(msgspec.structs.replace(routed, model=name), now)
            out[name] = LiveCost(ttft_s=seen.ttft_s, tpot_s=seen.tpot_s or 0.0, healthy=seen.healthy)
        return out

    def _wishes(
        self, request: Request, chat: _Chat, principal: Principal, routed: RoutedRequest
    ) -> tuple[Mode | None, Constraints]:
        named = _word(request, "mode")
        if named and named not in set(Mode):
            raise RequestError(f"Unknown mode in x-weighbridge-mode; known: {', '.join(Mode)}.", code="unknown_mode")
        asked = chat.max_completion_tokens or chat.max_tokens
        kind = chat.response_format.get("type") if isinstance(chat.response_format, dict) else ""
        constraints = Constraints(
            model=_word(request, "model"),
            max_cost_usd=_number(request, "max-cost-usd"),
            min_quality=_number(request, "min-quality"),
            strong_share=_number(request, "strong-share"),
            max_latency_s=_number(request, "max-latency-s"),
            max_output_tokens=asked,
            region=_word(request, "region"),
            json_schema=kind == "json_schema",
            previous=self._sessions.get(_session(principal, routed)),
            headers={n: v.decode("latin-1") for n in self._headers if (v := request.header(n.encode())) is not None},
        )
        return Mode(named) if named else None, constraints

    def _keep(self, selected: Selected) -> None:
        self.records[selected.request_id] = selected
        if len(self.records) > KEPT:
            self.records.popitem(last=False)

    def header_lines(self, request_id: str, explained: bool) -> bytes:
        """Reply headers that name the chosen model, and the whole decision for a client that asked."""
        selected = self.records.get(request_id)
        if selected is None:
            return b""
        lines = b"x-weighbridge-model: %b\r\n" % selected.decision.model.encode("ascii", "replace")
        text = msgspec.json.encode(selected.decision) if explained else b""
        if text and len(text) <= MAX_EXPLAINED_BYTES and text.isascii():
            lines += b"x-weighbridge-selection: %b\r\n" % text
        return lines

    def feedback(self, body: bytes, principal: Principal) -> dict[str, object]:
        """Learn from `{"request_id": ..., "score": 0..1}` about a recent request of the same tenant.

        Raises:
            RequestError: not that form, a score out of range, or a request that is not remembered.
        """
        try:
            said = msgspec.json.decode(body, type=_Feedback)
        except msgspec.DecodeError as error:
            raise RequestError(f"Feedback is {{request_id, score}}: {error}.", code="invalid_feedback") from None
        selected = self.records.get(said.request_id)
        if selected is None or selected.tenant != principal.tenant:
            raise RequestError(
                "No recent request of that id was answered by choice of model.",
                status=404,
                param="request_id",
                code="request_not_found",
            )
        forecast = selected.decision.chosen().untaught
        try:
            record = feedback.make_feedback(
                self.selector,
                selected.sketch,
                selected.decision.model,
                said.score,
                forecast,
                selected.at_s,
                said.request_id,
            )
        except InputError as error:
            raise RequestError(f"{error}.", param="score", code="invalid_feedback") from None
        if self._log is not None:
            _append(self._log, feedback.encode(record))
        self.selector.learn(selected.sketch, record.model, record.score - forecast)
        return {"request_id": said.request_id, "model": record.model, "remembered": len(self.selector.neighbours)}


def _append(path: Path, line: bytes) -> None:
    try:
        with path.open("ab") as stream:
            stream.write(line)
    except OSError as error:
        raise ServiceError(f"feedback cannot be written to {path}: {error.strerror}") from None


def _session(principal: Principal, routed: RoutedRequest) -> str:
    return f"{principal.tenant}\0{routed.session}" if routed.session else ""


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(p for p in prompt if isinstance(p, str)) if isinstance(prompt, list) else ""


def _word(request: Request, name: str) -> str:
    value = request.header(HEADER + name.encode())
    return value.decode("latin-1").strip() if value else ""


def _number(request: Request, name: str) -> float | None:
    text = _word(request, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise RequestError(f"x-weighbridge-{name} must be a number of zero or more.", code="invalid_header")
    return value
