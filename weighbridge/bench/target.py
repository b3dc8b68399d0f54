"""The server under test: its URL, what a request to it looks like, and what it tells before the run."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weighbridge.bench.prompts import Calibration, calibration_of, prompt_text, words_of
from weighbridge.bench.schedule import Planned
from weighbridge.core.errors import ConfigError, UpstreamError
from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient, Pool, Reply
from weighbridge.http.client import request_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PREFLIGHT_S = 60.0
CALIBRATION_WORDS = (16, 80)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they carry besides the prompt.

    `url` is the server's base (`http://host:port`), with or without `/v1`. `body` is merged into every request's JSON.
    `headers` are sent with every request; the API key is one of them and never printed. `salt` sets the texts of one
    run apart from another's.
    """

    url: str
    model: str = ""
    endpoint: str = CHAT
    stream: bool = True
    ignore_eos: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
    tier_header: str = "x-weighbridge-tier"
    tenant_header: str = ""
    insecure: bool = False
    salt: str = ""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host, port. Raises `ConfigError`."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"'{self.url}' is not an http or https address", source="--url")
        return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def path(self) -> str:
        """The base path before `/v1/...`."""
        base = urlsplit(self.url if "://" in self.url else f"http://{self.url}").path.rstrip("/")
        return base.removesuffix("/v1")

    @property
    def host(self) -> str:
        """The Host header."""
        scheme, host, port = self.origin
        host = f"[{host}]" if ":" in host else host
        return host if port == {"http": 80, "https": 443}[scheme] else f"{host}:{port}"

    def full_url(self, path: str) -> str:
        """An absolute URL below the base."""
        return f"{self.origin[0]}://{self.host}{self.path}{path}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context, None for plain http."""
        if self.origin[0] != "https":
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def pool(self, limits: ClientLimits) -> Pool:
        """A connection pool to the server; needs a running event loop."""
        _, host, port = self.origin
        return Pool(host, port, limits, self.tls())

    def payload(self, planned: Planned) -> bytes:
        """The whole HTTP request of one planned request."""
        text = prompt_text(planned, self.calibration, self.salt)
        headers = [("content-type", "application/json"), *self.headers, ("x-request-id", f"{self.salt}-{planned.id}")]
        if planned.tier and self.tier_header:
            headers.append((self.tier_header, planned.tier))
        if planned.tenant and self.tenant_header:
            headers.append((self.tenant_header, planned.tenant))
        body = msgspec.json.encode(self._body(text, planned.output_tokens))
        return request_bytes("POST", self.path + self.endpoint, self.host, headers, body)

    def _body(self, text: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        body["max_tokens"] = max_tokens
        body["temperature"] = 0
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        body.update(self.body)
        return body


async def preflight(target: Target) -> tuple[Target, list[str]]:
    """Reach the server, choose its model where none was given, and calibrate the prompt length.

    Returns the completed target and notes for the report. Raises `UpstreamError` with one clear line when the server
    cannot be reached or refuses even a tiny request.
    """
    notes: list[str] = []
    client = HttpClient(ClientLimits(), ssl_context=target.tls())
    try:
        if not target.model:
            target = replace(target, model=await _first_model(client, target))
        observed = []
        for words in CALIBRATION_WORDS:
            target, seen = await _probe(client, target, words, notes)
            observed.append((words, seen))
        told = all(seen for _, seen in observed)
        calibration = calibration_of(observed[0], observed[1]) if told else Calibration()
        if not calibration.measured:
            notes.append("the server reports no usage: prompt lengths assume one token per word")
        return replace(target, calibration=calibration), notes
    finally:
        await client.close()


async def _ask(client: HttpClient, target: Target, method: str, path: str, body: bytes = b"") -> Reply:
    headers = [*target.headers, ("content-type", "application/json")] if body else list(target.headers)
    try:
        return await client.request(method, target.full_url(path), body=body, headers=headers, timeout_s=PREFLIGHT_S)
    except ExchangeFailed as error:
        raise UpstreamError(f"{target.full_url('')}: {error}; is the server running, and is --url right?") from None


async def _first_model(client: HttpClient, target: Target) -> str:
    reply = await _ask(client, target, "GET", "/v1/models")
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise UpstreamError(
            f"{target.full_url('/v1/models')} answered {reply.status} and names no model; give --model"
        ) from None


async def _probe(client: HttpClient, target: Target, words: int, notes: list[str]) -> tuple[Target, int]:
    """Prompt tokens of a request of so many words, 0 where the server does not tell."""
    text = " ".join(words_of(f"{target.salt}/calibration/{words}", words))
    whole = replace(target, stream=False)
    reply = await _ask(client, whole, "POST", whole.endpoint, msgspec.json.encode(whole._body(text, 1)))
    if reply.status in (400, 422) and target.ignore_eos:
        strict = replace(whole, ignore_eos=False)
        second = await _ask(client, strict, "POST", strict.endpoint, msgspec.json.encode(strict._body(text, 1)))
        if second.status == 200:
            notes.append("the server refuses ignore_eos: output lengths are upper bounds")
            target, reply = replace(target, ignore_eos=False), second
    if reply.status != 200:
        raise UpstreamError(
            f"{target.full_url(target.endpoint)} refused a tiny request with HTTP {reply.status}: "
            f"{reply.body[:200].decode('utf-8', 'replace')}"
        )
    try:
        return target, int(reply.json()["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError):
        return target, 0
