"""The OpenAI surface: reads a request, checks who asks, and sends it on its flight."""

from __future__ import annotations

import random
from urllib.parse import unquote

import msgspec

from weighbridge.core.errors import RequestError
from weighbridge.core.events import RequestArrived
from weighbridge.core.request import Request as RoutedRequest
from weighbridge.gateway.access_log import AccessLog
from weighbridge.gateway.auth import REFUSED, Authorizer, Principal
from weighbridge.gateway.body import plain_body
from weighbridge.gateway.budget import RetryBudget
from weighbridge.gateway.cascade import Cascade
from weighbridge.gateway.client_request import ClientRequest, overload_choices
from weighbridge.gateway.desk import Desk
from weighbridge.gateway.estimate import TokenEstimator
from weighbridge.gateway.flight import Flight
from weighbridge.gateway.forecasts import Forecasts
from weighbridge.gateway.loop_guard import LoopGuard
from weighbridge.gateway.model_choice import ModelChoice
from weighbridge.gateway.model_list import model_rows
from weighbridge.gateway.openapi import client_document
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.prefix_hashes import PrefixHasher
from weighbridge.gateway.quota import Quotas, Salts
from weighbridge.gateway.records import Signals
from weighbridge.gateway.refusal import send_reject, send_request_error
from weighbridge.gateway.request_ids import RequestIds
from weighbridge.gateway.settings import GatewaySettings
from weighbridge.gateway.stats import Stats
from weighbridge.gateway.tokenizer_file import read_tokenizer
from weighbridge.gateway.tracing import Tracer
from weighbridge.gateway.usage_fields import Usage
from weighbridge.http import Request, Responder, Routes

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
GENERATING = frozenset({"chat", "completions", "responses", "messages"})
# Client headers that go on to the engine; no other ever does.
FORWARDED = frozenset({b"traceparent", b"tracestate", b"openai-beta", b"anthropic-version", b"anthropic-beta"})


class Surface:
    """The client-facing routes."""

    def __init__(
        self,
        settings: GatewaySettings,
        driver: Desk,
        health: Signals,
        stats: Stats,
        salt_key: bytes | None,
        guard: LoopGuard,
    ) -> None:
        """`salt_key`: secret from which tenants' cache salts are made, or None to leave `cache_salt` alone."""
        self.settings = settings
        self.driver = driver
        self.health = health
        self.stats = stats
        self.guard = guard
        self.forecasts = Forecasts()
        self.access: AccessLog | None = None
        self.tracer: Tracer | None = None
        self.auth = Authorizer(settings)
        self.choice = None if settings.selection is None else ModelChoice(settings.selection, driver)
        self.estimator = TokenEstimator({m: read_tokenizer(path) for m, path in settings.tokenizers.items()})
        self._hasher = PrefixHasher(settings.prefix_block_bytes, settings.max_prefix_blocks)
        self.rng = random.Random(settings.router.seed)
        self.budget = RetryBudget(settings.retry_share)
        self.quotas = Quotas()
        self.salts = Salts(salt_key) if salt_key is not None else None
        self._offered: set[str] = set()
        self.ids = RequestIds()
        self.routes = Routes()
        for path in ENDPOINTS:
            self.routes.post(path, self.complete)
        if self.choice is not None:
            self.routes.post("/v1/feedback", self.feedback)
        self.routes.get("/v1/models", self.models)
        self.routes.get("/v1/models/*", self.model)
        self.routes.get("/openapi.json", self._document)
        self.routes.get("/healthz", self._alive)
        self.routes.get("/health", self._alive)

    def apply(self, settings: GatewaySettings) -> None:
        """Takes over reloaded keys and caps; what keys have spent is kept."""
        self.settings = settings
        self.auth = Authorizer(settings)
        self.quotas.apply(settings.keys, self.driver.now())
        self._hasher = PrefixHasher(settings.prefix_block_bytes, settings.max_prefix_blocks)
        self._offered.clear()

    # before the body

    def admit(self, request: Request) -> tuple[int, str] | None:
        """Refuses a caller without a valid key before reading its body."""
        known: Principal | None = request.context  # of a request with the very same head on this connection
        if known is not None and known.issuer is self.auth.mark:
            return None
        principal = self.auth.principal(request)
        if principal is None:
            self.stats.requests.add((ENDPOINTS.get(request.path, ""), "", "", "refused_401"))
            if self.access is not None:
                self.access.stopped(request, 401)
            return 401, REFUSED
        request.context = request.head.context = principal
        return None

    # completions

    def complete(self, request: Request, responder: Responder) -> None:
        """Any endpoint that makes an engine generate."""
        request_id = self.ids.of(request, self.driver.flights)
        if self.guard.shedding:
            self._shed(request, responder, request_id)
            return
        try:
            principal, parsed = self._read(request)
            if self.choice is not None and self.choice.cascades(principal, parsed.model):
                Cascade(self, self.choice, responder, principal, parsed, request_id).begin()
                return
            flight = self.flight(request, responder, principal, parsed, request_id, request.path)
        except RequestError as error:
            self.stats.requests.add((ENDPOINTS[request.path], "", "", f"refused_{error.status}"))
            send_request_error(responder, error, self.id_header(request_id))
            self._log_refused(request, responder, request_id)
            return
        self.launch(flight)

    def launch(self, flight: Flight) -> None:
        """Enter a flight in the books and tell the Router of it."""
        self.driver.flights[flight.id] = flight
        self.driver.feed_soon(RequestArrived(request=flight.routed))

    def _shed(self, request: Request, responder: Responder, request_id: str) -> None:
        """The gateway itself is too busy: what already runs must not suffer."""
        self.guard.sheds += 1
        self.stats.requests.add((ENDPOINTS[request.path], "", "", "rejected_gateway_busy"))
        send_reject(responder, 503, "gateway_busy", 1.0, self.rng, self.id_header(request_id))
        self._log_refused(request, responder, request_id)

    def _log_refused(self, request: Request, responder: Responder, request_id: str) -> None:
        if self.access is not None:
            self.access.refused(request, responder, request_id, request.context.tenant if request.context else "")

    def _read(self, request: Request) -> tuple[Principal, ClientRequest]:
        principal = request.context or self.auth.principal(request)
        if principal is None:
            raise RequestError(REFUSED, status=401, type="authentication_error", code="invalid_api_key")
        endpoint = ENDPOINTS[request.path]
        body = plain_body(request, self.settings.server.max_body_bytes)
        return principal, ClientRequest(endpoint, body, self.settings.limits)

    def flight(
        self,
        request: Request,
        responder: Responder,
        principal: Principal,
        parsed: ClientRequest,
        request_id: str,
        path: str,
        expected_output_tokens: int | None = None,
        *,
        vetted: bool = False,
    ) -> Flight:
        """A request ready for `launch`: checked, its model chosen where it asks for that, its tokens charged.

        `vetted`: the model was chosen before, and whether the key may use it is settled.

        Raises:
            RequestError: it may not be served; nothing was charged.
        """
        choice = self.choice if self.choice is not None and self.choice.allows(principal, parsed.model) else None
        if choice is None and not vetted:
            self._check_model(principal, parsed.model)
        self._check_endpoint(parsed.endpoint, path)
        passed = [b"%b: %b\r\n" % pair for pair in request.headers if pair[0] in FORWARDED]
        headers = b"".join(passed) if passed else b""
        routed = self.routed(request, principal, parsed, request_id)
        if expected_output_tokens is not None:
            routed = msgspec.structs.replace(routed, expected_output_tokens=expected_output_tokens)
        if choice is not None:
            decision = choice.choose(request, principal, parsed.body, routed)
            parsed.set_model(decision.model)
            routed = msgspec.structs.replace(
                self.routed(request, principal, parsed, request_id),
                arrival_s=routed.arrival_s,
                expected_output_tokens=decision.expected_output_tokens if decision.known else None,
            )
        self.quotas.charge(principal, routed, self.driver.now())
        self.budget.deposit()
        if self.tracer is not None:
            headers = self.tracer.begin(request, routed, headers)
        salt = self.salts.salt(principal.tenant) if self.salts is not None else None
        return Flight(self, responder, parsed, routed, path, headers, salt)

    def _check_endpoint(self, endpoint: str, path: str) -> None:
        """404 where no engine of the fleet offers an endpoint: engines' other paths are never reachable."""
        if endpoint in self._offered:
            return
        if any(endpoint in e.adapter.endpoints for e in self.driver.endpoints.values()):
            self._offered.add(endpoint)
        else:
            raise RequestError(f"No engine here offers {path}.", status=404, code="unknown_url")

    def _check_model(self, principal: Principal, model: str) -> None:
        """404 for a model nobody serves or that this key may not use: the answer must not tell them apart."""
        if principal.models:
            if model in principal.models and self._served(model):
                return
        elif not model or self._served(model):
            return
        raise RequestError(
            f"The model `{model[:128]}` does not exist or you do not have access to it.",
            status=404,
            param="model",
            code="model_not_found",
        )

    def _served(self, model: str) -> bool:
        """Whether an engine, up or not, is known to serve it; one that has not told yet may."""
        for endpoint in self.driver.endpoints.values():  # noqa: SIM110 - a generator costs more than the loop
            if model in endpoint.models or not endpoint.models:
                return True
        return False

    def routed(self, request: Request, principal: Principal, parsed: ClientRequest, request_id: str) -> RoutedRequest:
        """The request as the Router sees it."""
        session = request.header(b"x-session-id")
        return RoutedRequest(
            id=request_id,
            arrival_s=self.driver.now(),
            prompt_tokens=self.estimator.count(parsed),
            max_tokens=parsed.max_tokens * parsed.n if parsed.endpoint in GENERATING else 1,
            model=parsed.model,
            tenant=principal.tenant,
            tier=self.auth.tier(principal, request, parsed.service_tier),
            endpoint=parsed.endpoint,
            session=session.decode("latin-1")[:128] if session else "",
            stream=parsed.stream,
            prefix_hashes=self._hasher.hashes(principal.tenant, parsed.model, parsed.text),
            prefix_block_tokens=self.estimator.tokens(parsed.model, self.settings.prefix_block_bytes),
            allow=overload_choices(request.header(b"x-weighbridge-allow")),
        )

    @staticmethod
    def id_header(request_id: str) -> list[tuple[str, str]]:
        """The header that names a request."""
        return [("x-request-id", request_id)]

    # what flights report

    def explain(self, flight: Flight) -> bytes:
        """Header lines with the decision, for a client that asked with `x-weighbridge-explain: 1`."""
        asked = flight.responder.request.header(b"x-weighbridge-explain") == b"1"
        model = b"" if self.choice is None else self.choice.header_lines(flight.id, asked)
        if flight.record is None or not asked:
            return model
        text = msgspec.json.encode(flight.record.decision)
        if len(text) > 8000 or not text.isascii():
            return model + b"x-weighbridge-instance: %b\r\n" % flight.record.chosen.encode("ascii", "replace")
        return model + b"x-weighbridge-decision: %b\r\n" % text

    def learn(self, flight: Flight, usage: Usage) -> None:
        """An engine counted a prompt: the estimate of the next ones gets better."""
        parsed = flight.client_request
        if usage.prompt_tokens and parsed.exact_tokens is None and not parsed.media:
            self.stats.estimate.observe((parsed.model,), flight.routed.prompt_tokens / usage.prompt_tokens)
            self.estimator.counted(parsed, usage.prompt_tokens)

    def attempt_failed(self, flight: Flight, reason: str) -> None:
        """One try on one engine went wrong; the request may live on."""
        assert flight.endpoint is not None
        name = flight.endpoint.name
        self.stats.attempts.add((name, reason))
        if self.tracer is not None:
            self.tracer.attempt_failed(flight, reason)
        if flight.record is not None:
            e2e_s = self.driver.now() - flight.routed.arrival_s
            flight.record.outcome = Outcome(outcome=f"attempt failed: {reason}", instance=name, e2e_s=e2e_s)

    def ended(self, flight: Flight, outcome: str, detail: str, usage: Usage, output_tokens: int) -> None:
        """A flight has ended: the one place where it leaves the books."""
        self.driver.flights.pop(flight.id, None)  # whatever went wrong before, what follows must happen
        stats = self.stats
        routed = flight.routed
        self.quotas.settle(flight.id, (usage.prompt_tokens or routed.prompt_tokens) + output_tokens)
        model = routed.model
        now = self.driver.now()
        instance = flight.endpoint.name if flight.endpoint else ""
        label = outcome if outcome != "rejected" else f"rejected_{detail}"
        stats.requests.add((routed.endpoint, model, instance, label))
        e2e_s = now - routed.arrival_s
        ttft_s = None if flight.first_token_s is None else flight.first_token_s - routed.arrival_s
        if flight.dispatched_s is not None:
            stats.queued.observe((routed.tier, "dispatched"), flight.dispatched_s - routed.arrival_s)
        else:
            stats.queued.observe((routed.tier, outcome), e2e_s)
        if outcome == "ok":
            kept = stats.finished(model, instance)
            kept.duration.observe(e2e_s)
            kept.output_tokens.observe(output_tokens)
            kept.input_tokens.observe(usage.prompt_tokens or routed.prompt_tokens)
            if ttft_s is not None and routed.stream:
                kept.ttft.observe(ttft_s)
            elif ttft_s is not None:
                stats.ttft.observe((model, instance, "false"), ttft_s)
            if usage.cached_tokens:
                stats.cached_tokens.add((model,), usage.cached_tokens)
        if flight.record is not None:
            flight.record.outcome = Outcome(
                outcome=label if not detail or outcome == "rejected" else f"{label}: {detail}",
                instance=instance,
                e2e_s=e2e_s,
                ttft_s=ttft_s,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=output_tokens,
            )
            self.forecasts.note(flight.record)
        if self.access is not None:
            self.access.ended(flight, label, usage, output_tokens, ttft_s, e2e_s)
        if self.tracer is not None:
            self.tracer.ended(flight, label, usage, output_tokens, ttft_s)

    def feedback(self, request: Request, responder: Responder) -> None:
        """How good the answer to a recent `model: auto` request was."""
        principal = request.context or self.auth.principal(request)
        request_id = self.ids.of(request, self.driver.flights)
        try:
            if principal is None:
                raise RequestError(REFUSED, status=401, type="authentication_error", code="invalid_api_key")
            assert self.choice is not None
            responder.send_json(200, self.choice.feedback(request.body, principal), headers=self.id_header(request_id))
        except RequestError as error:
            send_request_error(responder, error, self.id_header(request_id))

    # models

    def models(self, request: Request, responder: Responder) -> None:
        """All models of healthy instances, one row per id."""
        principal = request.context or self.auth.principal(request)
        if principal is None:
            responder.send_error(401, REFUSED, code="invalid_api_key")
            return
        rows = list(self._rows(principal).values())
        responder.send_json(
            200, {"object": "list", "data": rows}, headers=self.id_header(self.ids.of(request, self.driver.flights))
        )

    def model(self, request: Request, responder: Responder) -> None:
        """One model; its id may hold slashes, plain or escaped."""
        principal = request.context or self.auth.principal(request)
        if principal is None:
            responder.send_error(401, REFUSED, code="invalid_api_key")
            return
        name = unquote(request.path.removeprefix("/v1/models/"))
        row = self._rows(principal).get(name)
        if row is None:
            responder.send_error(
                404, f"The model `{name[:128]}` does not exist.", param="model", code="model_not_found"
            )
        else:
            responder.send_json(200, row, headers=self.id_header(self.ids.of(request, self.driver.flights)))

    def _rows(self, principal: Principal) -> dict[str, dict[str, object]]:
        aliases = () if self.choice is None else sorted(self.choice.offered)
        return model_rows(self.driver.endpoints.values(), principal, aliases)

    def _document(self, request: Request, responder: Responder) -> None:
        """What this listener takes and answers, as an OpenAPI document."""
        known = {name for endpoint in self.driver.endpoints.values() for name in endpoint.adapter.endpoints}
        offered = [(path, name) for path, name in ENDPOINTS.items() if name in known]
        limits, keys = self.settings.limits, bool(self.settings.keys)
        document = client_document(offered, limits, keys=keys, feedback=self.choice is not None)
        responder.send_json(200, document)

    def _alive(self, request: Request, responder: Responder) -> None:
        responder.send(200, b"ok", content_type="text/plain")
