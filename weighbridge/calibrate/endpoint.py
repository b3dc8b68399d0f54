"""What an engine tells of itself over HTTP before it is measured: its kind, model, limits, load and start.

The pages are read by the gateway's adapters; what an engine does not tell stays None, and the caller asks or assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec

from weighbridge.core.errors import ConfigError, UpstreamError
from weighbridge.core.instance import Limits, LoadReport
from weighbridge.gateway.adapters import ADAPTERS, Adapter
from weighbridge.gateway.adapters.adapter import model_entries, model_ids, samples, total
from weighbridge.gateway.adapters.recognise import TELLING, recognised
from weighbridge.http.client import HttpClient, Reply
from weighbridge.http.errors import ExchangeFailed

Kind = Literal["vllm", "sglang", "llamacpp", "tgi", "transformers", "openai", "embedded"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang", "llamacpp", "tgi", "transformers", "openai", "embedded")
TOKEN_PROMPTS = frozenset({"vllm", "sglang", "llamacpp", "embedded"})
"""Kinds whose completions take token ids, so that a prompt's length is exact."""
_MODELS = "/v1/models"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to measure. `started_s` changes when it restarts; `device` is where it says that it runs.

    `scheduler` is how it says that it fills its steps, by the names of `SchedulerConfig`; empty where it does not tell.
    """

    url: str
    model: str
    kind: Kind
    version: str = ""
    limits: Limits = Limits()
    device: str = ""
    quantisation: str = ""
    started_s: float | None = None
    scheduler: Mapping[str, Any] = {}
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def token_prompts(self) -> bool:
        return self.kind in TOKEN_PROMPTS


def base_url(text: str) -> str:
    """The engine's root: no path, or what stands before `/v1`. Raises ConfigError."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not an http(s) URL such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


async def read_endpoint(
    client: HttpClient, url: str, *, model: str | None = None, kind: Kind | None = None, key: str | None = None
) -> Endpoint:
    """Ask the engine who it is.

    Raises:
        UpstreamError: no connection, a refused key, no OpenAI surface, or a model that it does not serve.
    """
    root = base_url(url)
    headers = (("authorization", f"Bearer {key}"),) if key else ()
    pages = {_MODELS: await _get(client, root, _MODELS, headers)}
    if pages[_MODELS].status in (401, 403):
        raise UpstreamError(
            f"{root}: refused with HTTP {pages[_MODELS].status}; name a variable that holds a key by --key-env"
        )
    await _read(client, root, headers, TELLING if kind is None else (), pages)
    found = kind or cast("Kind", recognised(pages))
    adapter = ADAPTERS[found]
    await _read(client, root, headers, (*adapter.facts_paths, *adapter.report_paths), pages)
    facts = adapter.facts(pages)
    report = adapter.report(pages)
    return Endpoint(
        url=root,
        model=_choose(root, facts.models or model_ids(model_entries(pages)), pages[_MODELS].status, model),
        kind=found,
        version=facts.version,
        limits=facts.limits,
        device=facts.device,
        quantisation=facts.quantisation,
        scheduler=facts.scheduler,
        started_s=None if report is None else report.started_s,
        headers=headers,
    )


async def read_load(client: HttpClient, endpoint: Endpoint) -> tuple[LoadReport, float | None]:
    """Its load and its start time now; empty where it does not tell."""
    adapter: Adapter = ADAPTERS[endpoint.kind]
    pages: dict[str, Reply] = {}
    await _read(client, endpoint.url, endpoint.headers, adapter.report_paths, pages)
    report = adapter.report(pages)
    return (LoadReport(), None) if report is None else (report.load, report.started_s)


def busy(load: LoadReport) -> bool:
    """Whether the engine has any request, as far as it tells."""
    return bool(load.running) or bool(load.waiting)


async def read_counter(client: HttpClient, endpoint: Endpoint, names: tuple[str, ...]) -> float | None:
    """The first of these metrics that the engine's page has, summed over labels; None where it has none."""
    pages: dict[str, Reply] = {}
    await _read(client, endpoint.url, endpoint.headers, ("/metrics",), pages)
    page = pages.get("/metrics")
    return None if page is None or page.status != 200 else total(samples(page.body, names), *names)


async def _get(client: HttpClient, root: str, path: str, headers: tuple[tuple[str, str], ...]) -> Reply:
    try:
        return await client.request("GET", root + path, headers=headers, timeout_s=10.0)
    except ExchangeFailed as error:
        raise UpstreamError(f"{root}: {error}; is the engine running, and is this its address?") from None


async def _read(
    client: HttpClient,
    root: str,
    headers: tuple[tuple[str, str], ...],
    paths: tuple[str, ...],
    pages: dict[str, Reply],
) -> None:
    """Add the pages that are not there yet; one that the engine cannot send is left out."""
    for path in paths:
        if path not in pages:
            try:
                pages[path] = await client.request("GET", root + path, headers=headers, timeout_s=10.0)
            except ExchangeFailed:
                continue


def _choose(root: str, names: tuple[str, ...], status: int, model: str | None) -> str:
    if model is None:
        if len(names) == 1:
            return names[0]
        told = f"it serves {', '.join(names[:8])}" if names else f"its /v1/models answered HTTP {status} and lists none"
        raise UpstreamError(f"{root}: name the model by --model; {told}")
    if names and model not in names:
        raise UpstreamError(f"{root}: does not serve {model!r}; it serves {', '.join(names[:8])}")
    return model
