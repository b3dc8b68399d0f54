"""Method and path to handler: exact paths first, then prefixes; 404 and 405 in the common envelope."""

from collections.abc import Callable, Coroutine
from typing import Any

from weighbridge.http.request import Request
from weighbridge.http.responder import Responder

Handler = Callable[[Request, Responder], Coroutine[Any, Any, None] | None]


class Routes:
    """A table of handlers, itself a handler."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: list[tuple[str, dict[str, Handler]]] = []

    def get(self, path: str, handler: Handler) -> None:
        """Routes GET (and HEAD) of an exact path."""
        self.add("GET", path, handler)
        self.add("HEAD", path, handler)

    def post(self, path: str, handler: Handler) -> None:
        """Routes POST of an exact path."""
        self.add("POST", path, handler)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Routes one method of an exact path, or of all paths below a prefix that ends in `/*`."""
        if path.endswith("/*"):
            prefix = path[:-1]
            for known, methods in self._prefixes:
                if known == prefix:
                    methods[method] = handler
                    return
            self._prefixes.append((prefix, {method: handler}))
        else:
            self._exact.setdefault(path, {})[method] = handler

    def __call__(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | None:
        """Answers `request` with its handler, or with 404 or 405."""
        methods = self._exact.get(request.path) or self._by_prefix(request.path)
        if methods is None:
            responder.send_error(404, f"There is no {request.path} here.", code="unknown_url")
            return None
        handler = methods.get(request.method)
        if handler is None:
            allow = ", ".join(sorted(methods))
            message = f"{request.method} is not allowed on {request.path}; use {allow}."
            responder.send_error(405, message, code="method_not_allowed", headers=(("allow", allow),))
            return None
        return handler(request, responder)

    def _by_prefix(self, path: str) -> dict[str, Handler] | None:
        for prefix, methods in self._prefixes:
            if path.startswith(prefix):
                return methods
        return None
