"""Drives a cascade for one client request: the cheap model first, the next one where its answer fails the check.

Every try, a judge's included, is a flight of its own through the Router, with its own one end. Tries before the last
are held back whole; the last model's answer passes as it comes. The client's response ends once, here or by that last
flight.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from weighbridge.core.errors import RequestError
from weighbridge.gateway.answer import Answer, Unreadable, streamed_answer, whole_answer
from weighbridge.gateway.auth import Principal
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.held_reply import MAX_HELD_BYTES, HeldReply
from weighbridge.gateway.model_choice import ModelChoice
from weighbridge.gateway.refusal import send_request_error
from weighbridge.http import Request, Responder
from weighbridge.selection.cascade import CascadeRecord, Check, Try, check_answer, check_grade, judge_prompt

if TYPE_CHECKING:
    from weighbridge.gateway.flight import Flight
    from weighbridge.gateway.surface import Surface

JUDGE_PATH = "/v1/chat/completions"
JUDGE_TOKENS = 16
MAX_LINE_BYTES = 8000
log = logging.getLogger("weighbridge.gateway")


class Cascade:
    """One client request on its way up the models."""

    def __init__(
        self,
        surface: Surface,
        choice: ModelChoice,
        responder: Responder,
        principal: Principal,
        parsed: ClientRequest,
        request_id: str,
    ) -> None:
        """Raises RequestError for an endpoint whose answers cannot be checked."""
        if parsed.endpoint not in ("chat", "completions"):
            raise RequestError(
                f"`{parsed.model}` checks answers of /v1/chat/completions and /v1/completions only; name a model here.",
                param="model",
                code="unsupported_endpoint",
            )
        self._surface, self._choice, self._responder = surface, choice, responder
        self._principal, self._parsed, self._id = principal, parsed, request_id
        self._settings = choice.cascade
        self._tries: list[Try] = []
        self._held: HeldReply | None = None
        self._flight: Flight | None = None
        self._answer: HeldReply | None = None
        self._waiting: asyncio.Handle | None = None
        self._done = False

    def begin(self) -> None:
        """Decide the order and start the first try. Raises RequestError when no model of the cascade can serve."""
        request = self._responder.request
        routed = self._surface.routed(request, self._principal, self._parsed, self._id)
        self._at_s = routed.arrival_s
        selected, self._question = self._choice.weigh_cascade(request, self._principal, self._parsed.body, routed)
        self._selected = selected
        self._order = [m for m in self._settings.models if self._expected(m) is not None]
        if not self._order:
            reasons = "; ".join(f"{c.model}: {c.excluded}" for c in selected.decision.candidates if c.excluded)
            raise RequestError(f"No model of the cascade can serve this request ({reasons}).", code="no_candidate")
        responder = self._responder
        responder.on_disconnect, responder.on_pause, responder.on_resume = self._gone, self._pause, self._resume
        self._ask(self._order[0])

    # tries

    def _ask(self, model: str) -> None:
        """One try. Raises RequestError only before anything was sent (a key's quota, on the first try)."""
        last = model == self._order[-1]
        parsed = ClientRequest(self._parsed.endpoint, self._parsed.body, self._surface.settings.limits)
        parsed.set_model(model)
        self._model, self._checking = model, ""
        held = HeldReply(self._responder, self._over, self._edit if last else None)
        expected = self._expected(model) if self._selected.decision.known else None
        self._fly(held, parsed, self._responder.request.path, expected)

    def _ask_judge(self, answer: Answer) -> None:
        judge = self._settings.verifier.judge
        body = msgspec.json.encode(
            {
                "model": judge,
                "messages": [{"role": "user", "content": judge_prompt(self._question, "\n\n".join(answer.texts))}],
                "max_tokens": JUDGE_TOKENS,
                "temperature": 0,
            }
        )
        self._checking = judge
        parsed = ClientRequest("chat", body, self._surface.settings.limits)
        self._fly(HeldReply(self._responder, self._over), parsed, JUDGE_PATH, JUDGE_TOKENS)

    def _fly(self, held: HeldReply, parsed: ClientRequest, path: str, expected: int | None) -> None:
        surface, number = self._surface, len(self._tries) + 1
        name = self._id if number == 1 else f"{self._id}.{number}"
        while name in surface.driver.flights:
            name += "+"
        self._held, self._try_id, self._try_s = held, name, surface.driver.now()
        request: Request = self._responder.request
        flight = surface.flight(request, held, self._principal, parsed, name, path, expected, vetted=True)
        self._flight = flight
        surface.launch(flight)

    def _over(self, held: HeldReply) -> None:
        """A try's reply is complete. What follows waits until its flight has closed its books."""
        self._waiting = asyncio.get_running_loop().call_soon(self._next, held)

    def _next(self, held: HeldReply) -> None:
        self._waiting = None
        if self._done:
            return
        if held.overflow:
            held.leave()
        try:
            if held.passing:
                self._note(held, Check(held.status == 200 and not held.cut, f"HTTP {held.status}"), verified=False)
                self._finish()
            elif self._checking:
                self._graded(held)
            else:
                self._answered(held)
        except RequestError as error:  # the key's tokens are spent: the client must not be left waiting
            self._finish()
            send_request_error(self._responder, error, [("x-request-id", self._id)])
        except Exception:
            log.exception("cascade of %s", self._id)
            self._finish()
            self._responder.send_error(500, "The gateway failed to check an answer.", code="internal_error")

    def _answered(self, held: HeldReply) -> None:
        """An answer that was held back: check it, or ask the judge."""
        verifier = self._settings.verifier
        try:
            answer = _read(held)
        except Unreadable as error:
            self._note(held, Check(False, str(error)), verified=False)
            self._climb()
            return
        if answer.tools and not any(answer.texts):
            self._note(held, Check(True, "a tool call, which is not checked"), verified=False)
            self._accept(held)
        elif verifier.judge:
            self._note(held, Check(False, "not graded yet"))
            self._answer = held
            self._ask_judge(answer)
        else:
            checks = [check_answer(verifier, text) for text in answer.texts]
            found = next((check for check in checks if not check.passed), checks[0])
            self._note(held, found)
            self._accept(held) if found.passed else self._climb()

    def _graded(self, held: HeldReply) -> None:
        """The judge has spoken about the answer before."""
        try:
            grade = check_grade(self._settings.verifier, "".join(_read(held).texts))
        except Unreadable as error:
            grade = Check(False, f"the judge did not answer: {error}")
        self._note(held, Check(True, "judge"), verified=False)
        graded = self._tries[-2]
        self._tries[-2] = msgspec.structs.replace(graded, passed=grade.passed, reason=grade.reason or "graded well")
        answer, self._answer = self._answer, None
        assert answer is not None
        self._accept(answer) if grade.passed else self._climb()

    def _climb(self) -> None:
        self._ask(self._order[self._order.index(self._model) + 1])

    def _accept(self, held: HeldReply) -> None:
        lines = self._edit(held.lines)
        self._finish()
        held.deliver(lines)

    # the record and the headers

    def _note(self, held: HeldReply, check: Check, *, verified: bool = True) -> None:
        """What a finished try was and cost."""
        model = self._checking or self._model
        outcome = None if self._flight is None or self._flight.record is None else self._flight.record.outcome
        prompt = 0 if outcome is None else outcome.prompt_tokens or 0
        output = 0 if outcome is None else outcome.output_tokens
        self._tries.append(
            Try(
                request_id=self._try_id,
                model=model,
                instance="" if outcome is None else outcome.instance,
                judge=bool(self._checking),
                status=held.status,
                verified=verified,
                passed=check.passed,
                reason=check.reason if not (check.passed and held.passing) else "the last model is not checked",
                latency_s=round(self._surface.driver.now() - self._try_s, 6),
                prompt_tokens=prompt,
                output_tokens=output,
                cost_usd=round(self._choice.selector.pool.cost_usd(model, prompt, output), 10),
            )
        )

    def _record(self) -> CascadeRecord:
        return CascadeRecord(
            tries=tuple(self._tries),
            latency_s=round(self._surface.driver.now() - self._at_s, 6),
            cost_usd=round(sum(t.cost_usd for t in self._tries), 10),
        )

    def _edit(self, lines: bytes) -> bytes:
        """A try's header lines as the client gets them: its own request id, the model, and what it took so far."""
        own, ours = b"x-request-id: %b\r\n" % self._try_id.encode(), b"x-request-id: %b\r\n" % self._id.encode()
        record = self._record()
        asked = sum(not t.judge for t in self._tries) + (self._held is not None and self._held.passing)
        lines = lines.replace(own, ours)
        lines += b"x-weighbridge-model: %b\r\n" % self._model.encode("ascii", "replace")
        lines += b"x-weighbridge-attempts: %d\r\nx-weighbridge-cost-usd: %.8f\r\n" % (asked, record.cost_usd)
        if self._responder.request.header(b"x-weighbridge-explain") == b"1":
            text = msgspec.json.encode(record)
            if len(text) <= MAX_LINE_BYTES and text.isascii():
                lines += b"x-weighbridge-cascade: %b\r\n" % text
        return lines

    def _finish(self) -> None:
        """Keep the record; nothing more will be asked."""
        self._done = True
        self._choice.keep_cascade(self._selected, self._model, self._record())
        self._held = self._flight = self._answer = None  # they refer to this, and would all wait for the collector

    def _expected(self, model: str) -> int | None:
        """Output tokens forecast for a model that can serve, or None."""
        for candidate in self._selected.decision.candidates:
            if candidate.model == model:
                return None if candidate.excluded else candidate.output_tokens
        return None

    # the client

    def _gone(self) -> None:
        """The client disconnected: whatever runs is cancelled, and nothing is asked any more."""
        if self._done:
            return
        if self._waiting is not None:
            self._waiting.cancel()
        if self._held is not None:
            held = self._held
            held.leave()
            if held.disconnected:
                self._note(held, Check(False, "the client left"), verified=False)
        self._finish()

    def _pause(self) -> None:
        if self._held is not None and self._held.passing:
            self._held.pause()

    def _resume(self) -> None:
        if self._held is not None and self._held.passing:
            self._held.resume()


def _read(held: HeldReply) -> Answer:
    """The answer in a kept reply. Raises `Unreadable` with the reason."""
    if held.overflow:
        raise Unreadable(f"longer than {MAX_HELD_BYTES} bytes")
    if held.status != 200:
        raise Unreadable(f"HTTP {held.status}")
    if held.cut:
        raise Unreadable("the reply was cut off")
    return streamed_answer(held.body) if held.streamed else whole_answer(held.body)
