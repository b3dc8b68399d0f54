"""The admin listener: health, metrics, the fleet as the Router sees it, decisions. It changes nothing by GET."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from weighbridge.core.errors import ConfigError, ProfileError, WeighbridgeError
from weighbridge.core.instance import LoadReport
from weighbridge.cost.online import OnlineCost
from weighbridge.gateway.auth import bearer
from weighbridge.gateway.kv.metrics import kv_metrics
from weighbridge.gateway.openapi import admin_document
from weighbridge.gateway.relays.hub import Totals
from weighbridge.gateway.router_metrics import router_metrics, router_rows
from weighbridge.gateway.settings import InstanceSettings
from weighbridge.gateway.stats import gauge
from weighbridge.http import Request, Responder, Routes
from weighbridge.routing.policies.registry import policy_names

if TYPE_CHECKING:
    from weighbridge.gateway.gateway import Gateway

OPEN = frozenset({"/healthz", "/readyz"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_DECISIONS = 2000
LEDGER = ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")


class Admin:
    """Routes of the admin listener, guarded by Host, Origin and (off loopback) a token."""

    def __init__(self, gateway: Gateway, token: str | None) -> None:
        self._gateway = gateway
        self._token = token.encode() if token else None
        self._hosts = LOCAL_NAMES | {h.lower() for h in gateway.settings.hosts} | {gateway.settings.admin_host.lower()}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.routes = Routes()
        self.routes.get("/healthz", lambda request, responder: responder.send(200, b"ok", content_type="text/plain"))
        self.routes.get("/readyz", self.ready)
        self.routes.get("/metrics", self._metrics)
        self.routes.get("/fleet", self._fleet)
        self.routes.get("/decisions", self._decisions)
        self.routes.get("/selections", self._selections)
        self.routes.get("/policies", self._policies)
        self.routes.post("/instances/drain", self._drain)
        self.routes.post("/instances/undrain", self._undrain)
        self.routes.post("/instances", self._add)
        self.routes.post("/instances/remove", self._remove)
        self.routes.post("/reload", self._reload)
        self.routes.get("/openapi.json", self._document)

    def __call__(self, request: Request, responder: Responder) -> Any:
        """Checks, then answers."""
        if request.path not in OPEN:
            refusal = self._refusal(request)
            if refusal is not None:
                responder.send_error(*refusal)
                return None
        return self.routes(request, responder)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        host = (request.header(b"host") or b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self._hosts and host not in self._hosts:
            return 421, "This listener does not answer to that host name."
        origin = request.header(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            return 403, "Requests from other sites are refused."
        if self._token is not None and not hmac.compare_digest(bearer(request), self._token):
            return 401, "The admin token is missing or not valid."
        return None

    def ready(self, request: Request, responder: Responder) -> None:
        """200 while requests can be answered; 503 while draining or without an engine."""
        gateway = self._gateway
        if gateway.draining:
            responder.send(503, b"draining", content_type="text/plain")
        elif any(e.up for e in gateway.driver.endpoints.values()):
            responder.send(200, b"ready", content_type="text/plain")
        else:
            responder.send(503, b"no instance is up", content_type="text/plain")

    def _metrics(self, request: Request, responder: Responder) -> None:
        responder.send(200, generate_latest(self._registry), content_type="text/plain; version=0.0.4; charset=utf-8")

    def _policies(self, request: Request, responder: Responder) -> None:
        settings = self._gateway.settings.router
        body = {"active": settings.policy, "options": settings.policy_options, "known": policy_names()}
        responder.send_json(200, body)

    def _fleet(self, request: Request, responder: Responder) -> None:
        responder.send_json(200, self.fleet())

    def _decisions(self, request: Request, responder: Responder) -> None:
        last = _last(request, responder)
        if not last:
            return
        records = list(self._gateway.driver.decisions)[-last:]
        rows = [{**msgspec.structs.asdict(r.decision), "outcome": r.outcome} for r in reversed(records)]
        responder.send_json(200, {"decisions": rows})

    def _selections(self, request: Request, responder: Responder) -> None:
        """Which model answered `model: auto`, and why; the newest first."""
        last = _last(request, responder)
        if not last:
            return
        choice = self._gateway.surface.choice
        records = [] if choice is None else list(choice.records.values())[-last:]
        rows = [
            {"request_id": r.request_id, "at_s": r.at_s, "decision": r.decision}
            | ({} if r.cascade is None else {"cascade": r.cascade})
            for r in reversed(records)
        ]
        responder.send_json(200, {"selections": rows})

    async def _add(self, request: Request, responder: Responder) -> None:
        """Adds the instance whose settings are the body; it takes requests after its first good probe."""
        try:
            settings = msgspec.json.decode(request.body, type=InstanceSettings)
            await self._gateway.add_instance(settings)
        except (msgspec.DecodeError, ConfigError, ProfileError) as error:
            responder.send_error(400, str(error))
            return
        responder.send_json(201, {"instance": settings.name})

    async def _remove(self, request: Request, responder: Responder) -> None:
        """Drains an instance (bounded by `drain_s`) and forgets it."""
        name = request.param("name") or ""
        try:
            ended = await self._gateway.remove_instance(name)
        except KeyError:
            responder.send_error(404, "There is no instance of that name.", param="name")
            return
        responder.send_json(200, {"instance": name, "all_ended": ended})

    async def _reload(self, request: Request, responder: Responder) -> None:
        """Reads the configuration file again, as SIGHUP does."""
        if self._gateway.on_reload is None:
            responder.send_error(409, "This gateway was started without a configuration file.")
            return
        try:
            responder.send_json(200, {"changes": await self._gateway.on_reload()})
        except WeighbridgeError as error:
            responder.send_error(400, f"Not reloaded, the old settings stay: {error}")

    def _document(self, request: Request, responder: Responder) -> None:
        responder.send_json(200, admin_document(token=self._token is not None))

    def _drain(self, request: Request, responder: Responder) -> None:
        self._switch(request, responder, draining=True)

    def _undrain(self, request: Request, responder: Responder) -> None:
        self._switch(request, responder, draining=False)

    def _switch(self, request: Request, responder: Responder, *, draining: bool) -> None:
        endpoint = self._gateway.driver.endpoints.get(request.param("name") or "")
        if endpoint is None:
            responder.send_error(404, "There is no instance of that name.", param="name")
            return
        (self._gateway.health.drain if draining else self._gateway.health.undrain)(endpoint)
        responder.send_json(200, {"instance": endpoint.name, "draining": endpoint.draining})

    def fleet(self) -> dict[str, Any]:
        """Every instance: configuration, ledger counters, health, last report and its age in seconds."""
        gateway = self._gateway
        driver = gateway.driver
        now = driver.now()
        rows = []
        for endpoint in driver.endpoints.values():
            instance = driver.router.fleet.instances.get(endpoint.name)
            ledger = {name: getattr(instance, name) if instance else 0 for name in LEDGER}
            rows.append(
                {
                    "name": endpoint.name,
                    "kind": endpoint.settings.kind,
                    "pool": endpoint.settings.pool,
                    "role": endpoint.settings.role,
                    "models": endpoint.models,
                    "health": gateway.health.describe(endpoint),
                    "reason": endpoint.reason,
                    "generation": endpoint.generation,
                    "version": endpoint.facts.version if endpoint.facts else "",
                    "limits": endpoint.spec.limits,
                    "calibrated": endpoint.profile is not None,
                    "rates": endpoint.spec.rates,
                    "cost": _cost(driver.refinement.cost(endpoint.name)),
                    "up": endpoint.up,
                    **ledger,
                    "report": endpoint.report or LoadReport(),
                    "report_age_s": None if endpoint.report_s is None else now - endpoint.report_s,
                    "kv_events": gateway.kv.describe(endpoint.name),
                }
            )
        return {
            "now_s": now,
            "policy": gateway.settings.router.policy,
            "live_requests": driver.router.live_requests,
            "held_requests": driver.router.held_requests,
            "draining": gateway.draining,
            **router_rows(driver.router),
            "event_log": str(gateway.writer.path) if gateway.writer else None,
            "discovery_errors": gateway.discovery.errors,
            "instances": rows,
        }

    def collect(self) -> Iterator[Metric]:
        """Prometheus families."""
        gateway = self._gateway
        yield from gateway.stats.collect()
        yield from gateway.surface.forecasts.collect()
        yield from self._instance_gauges()
        yield from kv_metrics(gateway.kv)
        yield from self._process_gauges()
        yield from router_metrics(gateway.driver.router)

    def _instance_gauges(self) -> Iterator[Metric]:
        gateway = self._gateway
        endpoints = list(gateway.driver.endpoints.values())
        fleet = gateway.driver.router.fleet.instances
        one = ("instance",)
        yield gauge("weighbridge_instance_up", "1 if requests are sent there.", one, _rows(endpoints, lambda e: e.up))
        text = "0 closed, 1 open (ejected), 2 half-open: the next request that fails ejects it again."
        yield gauge("weighbridge_instance_breaker_state", text, one, _rows(endpoints, gateway.health.breaker))
        yield gauge("weighbridge_instance_generation", "Lives seen.", one, _rows(endpoints, lambda e: e.generation))
        for name, text in (
            ("in_flight", "Requests sent and not ended."),
            ("prefill_tokens", "Prompt tokens sent and not computed."),
            ("decode_tokens", "Output tokens still expected."),
            ("kv_tokens", "Tokens whose KV is held for running requests."),
        ):
            rows = [((i.name,), float(getattr(i, name))) for i in fleet.values()]
            yield gauge(f"weighbridge_instance_{name}", text, one, rows)
        now = gateway.driver.now()
        ages = [((e.name,), now - e.report_s) for e in endpoints if e.report_s is not None]
        yield gauge("weighbridge_instance_report_age_seconds", "Age of the last load report.", one, ages)
        costs = [(name, cost) for name in fleet if (cost := gateway.driver.refinement.cost(name)) is not None]
        online = [((name,), float(cost.level == "online")) for name, cost in costs]
        yield gauge("weighbridge_instance_drifted", "1 if it left its profile and is forecast online.", one, online)
        drifts = [((name,), float(cost.drifts)) for name, cost in costs]
        yield gauge("weighbridge_instance_drifts", "Lasting changes of speed noticed.", one, drifts)

    def _process_gauges(self) -> Iterator[Metric]:
        gateway = self._gateway
        router = gateway.driver.router
        hub = gateway.hub
        told = Totals() if hub is None else hub.totals
        if hub is not None:
            yield from hub.collect()
        refused = [((), float(gateway.server.refusals + told.refusals))]
        yield gauge(
            "weighbridge_http_refused", "Requests refused before they were read, 401 and malformed.", (), refused
        )
        budget = gateway.surface.budget
        spent = [((), float(budget.spent + told.retries))]
        denied = [((), float(budget.refused + told.retries_refused))]
        yield gauge("weighbridge_retries", "Tries beyond the first that were allowed.", (), spent)
        yield gauge("weighbridge_retries_refused", "Tries refused by the retry budget.", (), denied)
        guard = gateway.guard
        lag = [((), guard.lag_s)]
        yield gauge("weighbridge_event_loop_lag_seconds", "How late the event loop is, smoothed.", (), lag)
        live = [((), float(router.live_requests))]
        yield gauge("weighbridge_requests_live", "Requests that have arrived and not ended.", (), live)
        held = [((), float(router.held_requests))]
        yield gauge("weighbridge_requests_held", "Requests that wait in the router.", (), held)
        loads = router.stability(gateway.driver.now())
        rows = [
            ((what,), load) for what, load in (("tokens", loads.token_load), ("kv", loads.kv_load)) if load is not None
        ]
        text = "Offered load as a share of what the instances that are up can sustain; head-room is 1 less this."
        yield gauge("weighbridge_fleet_load_ratio", text, ("what",), rows)
        if gateway.writer is not None:
            dropped = [((), float(gateway.writer.dropped))]
            yield gauge("weighbridge_event_log_dropped", "Log entries dropped because the disk is slow.", (), dropped)
        access = gateway.surface.access
        if access is not None or (hub is not None and gateway.settings.access_log is not None):
            dropped = [((), float(told.lines_dropped if access is None else access.writer.dropped))]
            yield gauge("weighbridge_access_log_dropped", "Log lines dropped because the disk is slow.", (), dropped)


def _last(request: Request, responder: Responder) -> int:
    """How many rows were asked for; 0 where that is wrong and has been answered."""
    text = request.param("last")
    if text is None:
        return 100
    once = sum(part.partition("=")[0] == "last" for part in request.query.split("&")) == 1
    if once and len(text) < 9 and text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_DECISIONS:
        return int(text)
    responder.send_error(400, f"`last` must be a number from 1 to {MAX_DECISIONS}.", param="last")
    return 0


def _cost(cost: OnlineCost | None) -> dict[str, Any] | None:
    """How an instance is forecast now: by its profile or, after a drift, by what it did since."""
    if cost is None:
        return None
    return {"level": cost.level, "drifts": cost.drifts, "error": cost.error, "rates": cost.rates, "step": cost.step}


def _rows(endpoints: list[Any], value: Any) -> list[tuple[tuple[str, ...], float]]:
    return [((e.name,), float(value(e))) for e in endpoints]
