"""A running gateway as a source: its admin API, and its event log where this machine can read the file.

The admin API says what is up and what each instance holds now; the event log says what happened to every request.
Without the log (another machine) the last decisions come from the admin API, and what needs every request is not shown.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from weighbridge.core.errors import UpstreamError
from weighbridge.core.event_log import Header
from weighbridge.core.instance import Limits, LoadReport, Rates, StepTerms
from weighbridge.core.metrics import percentile
from weighbridge.dashboard.decided import from_row
from weighbridge.dashboard.log_tail import LogTail
from weighbridge.dashboard.observer import Observer
from weighbridge.dashboard.snapshot import DecisionView, InstanceView, Level, Pair, Snapshot, State
from weighbridge.http import ExchangeFailed, HttpClient

TIMEOUT_S = 3.0
DECISIONS = 200
LEVELS: dict[str, Level] = {"profile": "profile", "online": "online", "tokens": "tokens", "requests": "requests"}
NO_LOG = "The event log is not readable from here, so attainment, tiers and goodput are not known."


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the router believes of an instance's costs now."""

    level: str = ""
    error: float | None = None
    rates: Rates | None = None
    step: StepTerms | None = None


class FleetRow(msgspec.Struct, kw_only=True):
    """One instance in the admin API's `/fleet`; fields this program does not know are ignored."""

    name: str
    kind: str = ""
    version: str = ""
    pool: str = "default"
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    models: tuple[str, ...] = ()
    health: str = "up"
    reason: str = ""
    calibrated: bool = False
    limits: Limits = Limits()
    rates: Rates | None = None
    cost: CostRow | None = None
    in_flight: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_tokens: int = 0
    report: LoadReport = LoadReport()
    report_age_s: float | None = None


class FleetAnswer(msgspec.Struct, kw_only=True):
    """The admin API's `/fleet`."""

    now_s: float
    policy: str = ""
    live_requests: int = 0
    held_requests: int = 0
    event_log: str | None = None
    instances: list[FleetRow] = []


class AdminSource:
    """Polls one gateway. `log` overrides the path that the gateway names; `window_s` None counts from the beginning."""

    def __init__(self, url: str, token: str = "", log: Path | None = None, window_s: float | None = 60.0) -> None:
        self.name = url
        self._url = url.rstrip("/")
        self._headers = (("authorization", f"Bearer {token}"),) if token else ()
        self._log = log
        self._client = HttpClient()
        self._tail = LogTail()
        self._observer = Observer(window_s)
        self._reason = ""

    async def poll(self) -> Snapshot:
        """One reading. Raises UpstreamError when the admin API does not answer as it should."""
        answer = self._fleet(await self._get("/fleet"))
        path = self._log or (Path(answer.event_log) if answer.event_log else None)
        if path is not None and self._follow(path):
            snapshot = self._observer.snapshot(self.name, answer.now_s)
            snapshot = replace(snapshot, log=str(path), skipped_decisions=snapshot.skipped_decisions)
        else:
            rows = await self._get(f"/decisions?last={DECISIONS}")
            snapshot = self._without_log(answer, rows)
        seen = {i.name: i for i in snapshot.instances}
        instances = tuple(merged(row, seen.get(row.name)) for row in answer.instances)
        return replace(snapshot, instances=instances, policy=answer.policy, queued=answer.held_requests)

    async def close(self) -> None:
        """Close connections and file."""
        self._tail.close()
        await self._client.close()

    async def _get(self, path: str) -> bytes:
        try:
            reply = await self._client.request("GET", self._url + path, headers=self._headers, timeout_s=TIMEOUT_S)
        except (ExchangeFailed, TimeoutError, OSError) as error:
            why = str(error) or "no answer in time"
            raise UpstreamError(f"{self._url} does not answer: {why}.") from None
        if reply.status == 401:
            raise UpstreamError(f"{self._url} wants a token; set WEIGHBRIDGE_ADMIN_TOKEN.")
        if reply.status != 200:
            raise UpstreamError(f"{self._url}{path} answers with status {reply.status}.")
        return reply.body

    def _fleet(self, body: bytes) -> FleetAnswer:
        try:
            return msgspec.json.decode(body, type=FleetAnswer)
        except msgspec.MsgspecError as error:
            raise UpstreamError(f"{self._url}/fleet is not an answer of this version's admin API ({error}).") from None

    def _follow(self, path: Path) -> bool:
        try:
            for item in self._tail.read(path):
                if isinstance(item, Header):
                    self._observer.begin(item)
                else:
                    self._observer.feed(item)
        except OSError:
            return False
        return True

    def _without_log(self, answer: FleetAnswer, body: bytes) -> Snapshot:
        bars = {row.name: row.cost.error for row in answer.instances if row.cost is not None}
        try:
            rows: list[dict[str, Any]] = msgspec.json.decode(body)["decisions"]
            decisions = tuple(from_row(row, bars.get) for row in rows)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise UpstreamError(f"{self._url}/decisions is not an answer of this version ({error}).") from None
        first = sorted(d.ttft_s + d.queued_s for d in decisions if d.ttft_s is not None)
        by_name: dict[str, deque[Pair]] = {}
        for d in reversed(decisions):
            if d.ttft_s is not None and d.forecast_ttft_s:
                by_name.setdefault(d.chosen, deque(maxlen=100)).append(Pair(d.forecast_ttft_s, d.ttft_s))
        snapshot = Snapshot(
            at_s=answer.now_s, source=self.name, note=NO_LOG, decisions=decisions,
            ttft_p99_s=percentile(first, 99) if first else None, ttft_tier=f"last {len(decisions)} decisions",
            forecast_error=_median_error(decisions),
            instances=tuple(InstanceView(name=name, pairs=tuple(pairs)) for name, pairs in by_name.items()),
        )  # fmt: skip
        return self._observer.with_history(snapshot)


def _median_error(decisions: tuple[DecisionView, ...]) -> float | None:
    known = sorted(abs(d.deviation) for d in decisions if d.deviation is not None)
    return percentile(known, 50) if known else None


def merged(row: FleetRow, seen: InstanceView | None) -> InstanceView:
    """An instance from the admin API, with what the event log told of its requests."""
    states: dict[str, State] = {"up": "up", "draining": "draining", "starting": "starting"}
    capacity = row.limits.kv_tokens
    report = row.report
    used = report.kv_usage if report.kv_usage is not None else (row.kv_tokens / capacity if capacity else None)
    peak = (row.kv_tokens + row.decode_tokens) / capacity if capacity else None
    known = seen or InstanceView(name=row.name)
    cost = row.cost or CostRow()
    rates = cost.rates or row.rates or known.rates
    level: Level = "profile" if row.calibrated or known.step else "online" if rates else "tokens"
    level = LEVELS.get(cost.level, level)
    waiting = known.waiting if seen else 0
    return replace(
        known, name=row.name, pool=row.pool, engine=" ".join(x for x in (row.kind, row.version) if x), role=row.role,
        models=row.models, state=states.get(row.health, "down"),
        reason=row.reason or (row.health if row.health not in states else ""), level=level,
        running=max(0, row.in_flight - waiting), waiting=waiting, max_sequences=row.limits.max_sequences, kv_used=used,
        kv_peak=None if peak is None else max(peak, used or 0.0), age_s=row.report_age_s, limits=row.limits,
        rates=rates, step=cost.step or known.step, error_bar=cost.error or known.error_bar,
    )  # fmt: skip


class LogSource:
    """A finished event log as a source: everything in it, as it stood at its end."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._snapshot: Snapshot | None = None

    async def poll(self) -> Snapshot:
        """The whole log, read once. Raises LogError or OSError."""
        if self._snapshot is None:
            observer, tail = Observer(window_s=None), LogTail(keep_up=False)
            try:
                for item in tail.read_all(self._path):
                    if isinstance(item, Header):
                        observer.begin(item)
                    else:
                        observer.feed(item)
            finally:
                tail.close()
            self._snapshot = replace(observer.snapshot(self.name), log=str(self._path))
        return self._snapshot

    async def close(self) -> None:
        """Nothing is held."""
