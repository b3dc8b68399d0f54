"""OpenTelemetry traces (extra `otel`): one server span per request and below it one client span over all its tries.

The client span's id goes to the engine as `traceparent`, so that an engine which traces continues the same trace. Try
and decision are events and attributes. Names follow the GenAI conventions; they stand in this module alone. Neither
prompts nor texts nor keys are recorded.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from weighbridge.core.errors import ConfigError
from weighbridge.gateway.settings import TracingSettings
from weighbridge.gateway.usage_fields import Usage

if TYPE_CHECKING:
    from weighbridge.core.request import Request as RoutedRequest
    from weighbridge.gateway.flight import Flight
    from weighbridge.http import Request, Responder

OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "completions": "text_completion"}
MAX_LIVE = 100_000
TRACE_HEADERS = (b"traceparent", b"tracestate")


class Tracer:
    """Begins a trace when a request is accepted and ends it with the request."""

    def __init__(self, settings: TracingSettings, processor: Any = None) -> None:
        """`processor`: instead of the batching OTLP exporter. Raises ConfigError where the extra is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"tracing needs the extra otel ({error.name} is missing): pip install 'weighbridge[otel]'",
                path="$.tracing",
            ) from None
        self._provider: Any = TracerProvider(
            resource=Resource.create({"service.name": settings.service_name}),
            sampler=ParentBased(TraceIdRatioBased(settings.sample)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor or _exporting(settings))
        self._tracer = self._provider.get_tracer("weighbridge")
        self._propagator = TraceContextTextMapPropagator()
        self._within = set_span_in_context
        self._server, self._client = SpanKind.SERVER, SpanKind.CLIENT
        self._failed: Any = lambda why: Status(StatusCode.ERROR, why)
        self._live: dict[str, tuple[Any, Any]] = {}

    def begin(self, request: Request, routed: RoutedRequest, headers: bytes) -> bytes:
        """Begins the spans; returns the header lines for the engine, our `traceparent` in place of the client's."""
        if len(self._live) >= MAX_LIVE:
            return headers
        given = {n.decode(): v.decode() for n in TRACE_HEADERS if (v := request.header(n)) is not None and v.isascii()}
        now = time.time_ns()
        parent = self._propagator.extract(given)
        operation = OPERATIONS.get(routed.endpoint, routed.endpoint)
        common = {"gen_ai.operation.name": operation, "gen_ai.request.model": routed.model}
        server = self._tracer.start_span(
            f"POST {request.path}",
            context=parent,
            kind=self._server,
            start_time=now,
            attributes={
                **common,
                "http.request.method": "POST",
                "http.route": request.path,
                "client.address": request.peer,
                "weighbridge.request.id": routed.id,
                "weighbridge.tenant": routed.tenant,
                "weighbridge.tier": routed.tier,
            },
        )
        within = self._within(server)
        client = self._tracer.start_span(
            f"{operation} {routed.model}",
            context=within,
            kind=self._client,
            start_time=now,
            attributes={
                **common,
                "gen_ai.request.stream": routed.stream,
                "gen_ai.request.max_tokens": routed.max_tokens,
            },
        )
        self._live[routed.id] = (server, client)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._within(client))
        kept = [line for line in headers.split(b"\r\n") if line and line.partition(b":")[0] not in TRACE_HEADERS]
        ours = [f"{name}: {value}".encode("latin-1") for name, value in carrier.items()]
        return b"".join(line + b"\r\n" for line in (*kept, *ours))

    def attempt_failed(self, flight: Flight, reason: str) -> None:
        """One try on one engine went wrong."""
        spans = self._live.get(flight.id)
        if spans is not None and flight.endpoint is not None:
            attributes = {"weighbridge.instance": flight.endpoint.name, "error.type": reason}
            spans[1].add_event("attempt failed", attributes)

    def ended(self, flight: Flight, outcome: str, usage: Usage, output_tokens: int, ttft_s: float | None) -> None:
        """Ends the spans of a flight, with what was decided and what came of it."""
        server, client = self._live.pop(flight.id, (None, None))
        if server is None or client is None:
            return
        if client.is_recording():
            client.set_attributes(_attributes(flight, usage, output_tokens, ttft_s))
            server.set_attribute("weighbridge.outcome", outcome)
            if outcome not in ("ok", "cancelled"):
                for span in (client, server):
                    span.set_attribute("error.type", outcome)
                    span.set_status(self._failed(outcome))
        client.end()
        # the status is known once the callbacks of this turn are through
        asyncio.get_running_loop().call_soon(_end, server, flight.responder, time.time_ns())

    def close(self) -> None:
        """Ends what is live and exports the rest."""
        for server, client in self._live.values():
            client.end()
            server.end()
        self._live.clear()
        self._provider.shutdown()


def _end(server: Any, responder: Responder, end_ns: int) -> None:
    if responder.status:
        server.set_attribute("http.response.status_code", responder.status)
    server.end(end_ns)


def _attributes(flight: Flight, usage: Usage, output_tokens: int, ttft_s: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.time_to_first_chunk": ttft_s,
    }
    endpoint = flight.endpoint
    if endpoint is not None:
        found |= {
            "gen_ai.provider.name": endpoint.settings.kind,
            "server.address": endpoint.origin.host,
            "server.port": endpoint.origin.port,
            "weighbridge.instance": endpoint.name,
        }
    if flight.dispatched_s is not None:
        found["weighbridge.queued_s"] = flight.dispatched_s - flight.routed.arrival_s
    if flight.record is not None:
        decision = flight.record.decision
        chosen = next((c for c in decision.candidates if c.instance == decision.chosen), None)
        found |= {
            "weighbridge.policy": decision.policy,
            "weighbridge.attempt": decision.attempt,
            "weighbridge.candidates": len(decision.candidates),
            "weighbridge.expected_output_tokens": decision.expected_output_tokens,
        }
        if chosen is not None:
            found["weighbridge.cached_tokens"] = chosen.cached_tokens
            found |= {f"weighbridge.forecast.{name}": value for name, value in chosen.terms.items()}
    return {name: value for name, value in found.items() if value is not None}


def _exporting(settings: TracingSettings) -> Any:
    """Batches spans in a bounded queue and sends them from a thread; what does not fit is dropped."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing needs the extra otel ({error.name} is missing): pip install 'weighbridge[otel]'", path="$.tracing"
        ) from None
    exporter = OTLPSpanExporter(endpoint=settings.endpoint) if settings.endpoint else OTLPSpanExporter()
    return BatchSpanProcessor(exporter)
