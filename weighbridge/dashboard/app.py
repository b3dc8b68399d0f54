"""The listener: pages, their live streams, the style sheet and the script. Everything else is pure."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable
from importlib.resources import files

import msgspec

from weighbridge.dashboard.asking import Questions
from weighbridge.dashboard.guard import HEADERS, Guard
from weighbridge.dashboard.html import h
from weighbridge.dashboard.hub import Hub, Page
from weighbridge.dashboard.jobs import Jobs
from weighbridge.dashboard.pages import capacity, fleet, tiers
from weighbridge.dashboard.pages import reports as reports_page
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.reports import Library, Report
from weighbridge.dashboard.view import View, layout, message
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits

MAX_VIEWERS = 50
SLOW_TICKS = 10
"""A viewer that has read nothing for this many ticks is cut off; its browser comes back by itself."""
QUIET_S = 15.0
_STATIC = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
LIMITS = ServerLimits(max_body_bytes=256 * 1024, max_connections=256, max_buffered_bytes=8 << 20)

Handler = Callable[[Request, Responder], None]


class Dashboard:
    """All routes over one hub."""

    def __init__(self, hub: Hub, guard: Guard, jobs: Jobs | None = None, library: Library | None = None) -> None:
        self.hub = hub
        self.guard = guard
        self.questions = Questions(hub, jobs or Jobs())
        self.library = library or Library()
        self.pages: dict[str, Page] = {
            "/": fleet.page,
            "/decisions": self.questions.decisions,
            "/tiers": tiers.page,
            "/whatif": self.questions.whatif,
            "/capacity": capacity.page,
        }
        self._static = {name: files("weighbridge.dashboard").joinpath("static", name).read_bytes() for name in _STATIC}
        self._packed = {name: gzip.compress(data, 9) for name, data in self._static.items()}
        self._version = hashlib.sha256(b"".join(self._static.values())).hexdigest()[:10]
        self._poller: asyncio.Task[None] | None = None
        self.server = HttpServer(self.routes(), LIMITS)

    def routes(self) -> Routes:
        """Every address there is."""
        routes = Routes()
        for path in self.pages:
            routes.get(path, self._guarded(self._page))
        routes.get("/decisions", self._decisions)
        routes.get("/decisions.json", self._guarded(self._decision_json))
        routes.get("/reports", self._reports)
        routes.get("/reports.json", self._report_json)
        routes.get("/whatif.json", self._guarded(self._whatif_json))
        routes.post("/whatif", self._guarded(self._whatif))
        routes.get("/healthz", lambda request, responder: responder.send(200, b"ok\n", content_type="text/plain"))
        for name in _STATIC:
            routes.get(f"/static/{name}", self._file)
        routes.get("/login", self._login_page)
        routes.post("/login", self._login)
        routes.get("/favicon.ico", self._file)
        routes.get("/live", self._live)
        routes.get("/*", self._missing)
        return routes

    async def start(self, host: str, port: int) -> None:
        """Read the source once and listen. Raises OSError when the address is taken."""
        await self.hub.poll()
        await self.server.start(host, port)
        self._poller = asyncio.create_task(self.hub.run())

    async def stop(self) -> None:
        """End everything that was started."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        await self.questions.close()
        await self.server.stop()
        await self.hub.source.close()

    # answering

    def _guarded(self, handler: Handler) -> Handler:
        def checked(request: Request, responder: Responder) -> None:
            if self._admitted(request, responder):
                handler(request, responder)

        return checked

    def _admitted(self, request: Request, responder: Responder) -> bool:
        if not self.guard.host_allowed(request):
            text = "This address is not known here. Open the dashboard by the address it printed when it started."
            self._html(request, responder, message("Wrong address", text), 421)
        elif not self.guard.signed_in(request):
            responder.send(303, b"", headers=(("location", "/login"), *HEADERS))
        elif request.method == "POST" and not self.guard.same_origin(request):
            self._html(request, responder, message("Refused", "This form was sent from another site."), 403)
        else:
            return True
        return False

    def _html(self, request: Request, responder: Responder, view: View, status: int = 200, live: str = "") -> None:
        body = layout(request.path, view, live, self._version)
        self._send(request, responder, status, body, "text/html; charset=utf-8")

    def _send(self, request: Request, responder: Responder, status: int, body: bytes, kind: str) -> None:
        headers: tuple[tuple[str, str], ...] = HEADERS
        if len(body) > 1400 and b"gzip" in (request.header(b"accept-encoding") or b""):
            body = gzip.compress(body, 1)
            headers = (*HEADERS, ("content-encoding", "gzip"), ("vary", "accept-encoding"))
        responder.send(status, body, content_type=kind, headers=headers)

    def _query(self, request: Request, responder: Responder) -> Query | None:
        try:
            return Query.parse(request.query)
        except ValueError:
            self._html(
                request, responder, message("Too many fields", "This address has more fields than a page has."), 400
            )
            return None

    def _page(self, request: Request, responder: Responder) -> None:
        query = self._query(request, responder)
        if query is None:
            return
        view = self.hub.view(self.pages[request.path], request.path, query)
        live = query.url("/live", _p=request.path, _t=str(self.hub.tick)) if view.live else ""
        self._html(request, responder, view, live=live)

    async def _decisions(self, request: Request, responder: Responder) -> None:
        if not self._admitted(request, responder):
            return
        query = self._query(request, responder)
        if query is not None:
            if "ask" in query:
                await self.questions.prepare(query)
            self._page(request, responder)

    async def _reports(self, request: Request, responder: Responder) -> None:
        query = self._query(request, responder) if self._admitted(request, responder) else None
        if query is None:
            return
        listed = await asyncio.to_thread(self.library.reports, self.questions.logs())
        wanted = query.all("id")[: reports_page.MOST_COMPARED]
        chosen = [await asyncio.to_thread(self.library.full, r) for r in listed if r.id in wanted]
        self._html(request, responder, reports_page.page(query, listed, chosen))

    async def _report_json(self, request: Request, responder: Responder) -> None:
        query = self._query(request, responder) if self._admitted(request, responder) else None
        if query is None:
            return
        listed: list[Report] = await asyncio.to_thread(self.library.reports, [])
        found = next((r for r in listed if r.id == query.get("id")), None)
        if found is None:
            responder.send_error(404, "There is no such report.", headers=HEADERS)
            return
        try:
            body = await asyncio.to_thread(found.path.read_bytes)
        except OSError:
            responder.send_error(404, "The report is gone.", headers=HEADERS)
            return
        self._send(request, responder, 200, body, "application/json")

    def _whatif(self, request: Request, responder: Responder) -> None:
        try:
            form = Query.parse(request.body.decode("utf-8", "replace"))
        except ValueError:
            self._html(
                request, responder, message("Too many fields", "This form has more fields than it can have."), 400
            )
            return
        responder.send(303, b"", headers=(("location", self.questions.start(form)), *HEADERS))

    def _whatif_json(self, request: Request, responder: Responder) -> None:
        query = self._query(request, responder)
        if query is None:
            return
        body = self.questions.report(query)
        if body is None:
            responder.send_error(404, "There is no such answer.", headers=HEADERS)
            return
        self._send(request, responder, 200, body, "application/json")

    def _decision_json(self, request: Request, responder: Responder) -> None:
        query = self._query(request, responder)
        if query is None:
            return
        decision = self.hub.snapshot.decision(query.get("id"))
        if decision is None:
            responder.send_error(404, "This decision is not kept here.", headers=HEADERS)
            return
        body = msgspec.json.format(msgspec.json.encode(decision), indent=2)
        self._send(request, responder, 200, body, "application/json")

    def _missing(self, request: Request, responder: Responder) -> None:
        text = "There is no such page. The pages are listed above."
        self._html(request, responder, message("Not found", text), 404)

    def _file(self, request: Request, responder: Responder) -> None:
        name = request.path.rpartition("/")[2].replace("favicon.ico", "icon.svg")
        body, headers = self._static[name], [(k, v) for k, v in HEADERS if k != "cache-control"]
        headers += [("cache-control", "public, max-age=31536000, immutable"), ("vary", "accept-encoding")]
        if b"gzip" in (request.header(b"accept-encoding") or b""):
            body = self._packed[name]
            headers.append(("content-encoding", "gzip"))
        responder.send(200, body, content_type=_STATIC[name], headers=headers)

    # signing in

    def _login_page(self, request: Request, responder: Responder, wrong: bool = False) -> None:
        if not self.guard.host_allowed(request):
            self._admitted(request, responder)
            return
        form = h(
            "form.form",
            h("label", "Token",
              h("input", type="password", name="token", required=True, autocomplete="current-password")),
            h("button.go", "Sign in", type="submit"),
            method="post", action="/login",
        )  # fmt: skip
        note = h("p.invalid", "✕ That is not the token.", role="alert") if wrong else None
        intro = h("p", "The token is the one the dashboard was started with (WEIGHBRIDGE_DASHBOARD_TOKEN).")
        view = View("Sign in", h("section.panel.message", h("h1", "Sign in"), intro, note, form))
        self._html(request, responder, view, 403 if wrong else 200)

    def _login(self, request: Request, responder: Responder) -> None:
        if not self.guard.host_allowed(request) or not self.guard.same_origin(request):
            self._html(request, responder, message("Refused", "This form was sent from another site."), 403)
            return
        try:
            token = Query.parse(request.body.decode("utf-8", "replace")).get("token")
        except ValueError:
            token = ""
        cookie = self.guard.sign_in(token, request.header(b"x-forwarded-proto") == b"https")
        if cookie is None:
            self._login_page(request, responder, wrong=True)
        else:
            responder.send(303, b"", headers=(("location", "/"), ("set-cookie", cookie), *HEADERS))

    # the stream

    async def _live(self, request: Request, responder: Responder) -> None:
        if not self._admitted(request, responder):
            return
        query = self._query(request, responder)
        if query is None:
            return
        page = self.pages.get(query.get("_p"))
        if page is None:
            responder.send_error(404, "There is no such page to follow.", headers=HEADERS)
            return
        if self.hub.viewers >= MAX_VIEWERS:
            responder.send_error(503, f"{MAX_VIEWERS} viewers are connected already.", headers=HEADERS)
            return
        self.hub.viewers += 1
        try:
            await self._follow(responder, page, query)
        finally:
            self.hub.viewers -= 1

    async def _follow(self, responder: Responder, page: Page, query: Query) -> None:
        path, text = query.get("_p"), query.get("_t")
        seen = int(text) if text.isdigit() and len(text) < 16 else -1
        query = query.without("_p", "_t")
        responder.start_sse(tuple((k, v) for k, v in HEADERS if k != "cache-control"))
        slow = 0
        while not responder.disconnected:
            if responder.paused:
                slow += 1
                if slow > SLOW_TICKS:
                    responder.abort()
                    return
            else:
                slow = 0
                if seen != self.hub.tick:
                    responder.write(self.hub.delta(page, path, query, seen))
                    seen = self.hub.tick
            if not await self.hub.next_tick(QUIET_S) and not responder.paused:
                responder.write(b": quiet\n\n")
