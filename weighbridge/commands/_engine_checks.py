"""What `doctor` finds when it looks at one configured engine: is it there, is it what it is said to be, what does it
not tell. Each finding comes with what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from weighbridge.gateway.adapters.recognise import TELLING, recognised
from weighbridge.gateway.kv.discovery import path_for, sources_of
from weighbridge.gateway.kv_address import AUTO
from weighbridge.gateway.pairs import bootstrap_url, told_ranks
from weighbridge.http import ExchangeFailed, HttpClient
from weighbridge.http.client import Reply

if TYPE_CHECKING:
    from weighbridge.gateway.endpoint import Endpoint

Row = tuple[str, str, str]
"""Level, message, remedy."""
PROBE_S = 3.0
LOAD_REMEDIES = {
    "vllm": "start it without --disable-log-stats; until then it is routed by our own counts alone",
    "llamacpp": "start it with --slots or --metrics; until then it is routed by our own counts alone",
    "tgi": "see that /metrics is reachable; until then it is routed by our own counts alone",
    "sglang": "update it: it needs /v1/loads or /get_load; until then it is routed by our own counts alone",
}


async def check_engine(endpoint: Endpoint, client: HttpClient) -> list[Row]:
    """Looks at one engine. It is only read from."""
    adapter = endpoint.adapter
    pages: dict[str, Reply] = {}
    failure = ""
    wanted = dict.fromkeys((adapter.health_path, *adapter.facts_paths, *adapter.report_paths, *TELLING))
    if endpoint.settings.kv_events == AUTO:
        wanted[path_for(endpoint.settings.kind)] = None
    for path in wanted:
        origin = endpoint.origin
        url = f"{origin.scheme}://{origin.authority}{origin.path(path)}"
        try:
            pages[path] = await client.request("GET", url, headers=endpoint.probe_headers(), timeout_s=PROBE_S)
        except (ExchangeFailed, OSError) as error:
            failure = str(error)
            if not pages:  # nobody there: no need to knock at every door
                return [("fail", f"{endpoint.settings.url}: {failure}", "start it, or mend `url`")]
    rows = list(judge(endpoint, pages))
    if endpoint.transfer == "mooncake" and endpoint.settings.role == "prefill":
        rows += await _bootstrap(endpoint, client)
    return rows


def judge(endpoint: Endpoint, pages: Mapping[str, Reply]) -> Iterator[Row]:
    """What the pages say. A page that could not be had is absent."""
    settings, adapter = endpoint.settings, endpoint.adapter
    health = pages.get(adapter.health_path)
    if health is None or health.status >= adapter.alive_below:
        told = "does not answer" if health is None else f"answers {health.status}"
        yield (
            "fail",
            f"{adapter.health_path} {told}: it gets no requests",
            _other_kind(endpoint, pages) or "see its log",
        )
        return
    refused = [path for path, reply in pages.items() if reply.status in (401, 403)]
    if refused:
        yield (
            "fail" if "/v1/models" in refused else "warn",
            f"{' and '.join(refused)}: {'wants an API key' if endpoint.key is None else 'refuses our API key'}",
            "set `api_key_env`" if endpoint.key is None else f"put its key into {settings.api_key_env}",
        )
    other = _other_kind(endpoint, pages)
    if other:
        yield "fail", f"it is configured as {settings.kind} and is something else", other
    yield from _models(endpoint, pages)
    if adapter.report_paths and adapter.report(pages) is None and not other:
        told = ", ".join(f"{p} {pages[p].status if p in pages else 'fails'}" for p in adapter.report_paths)
        yield "warn", f"it tells no load ({told})", LOAD_REMEDIES.get(settings.kind, "see its log")
    yield from _events(endpoint, pages)
    yield "ok", f"{settings.url} answers", ""


def _other_kind(endpoint: Endpoint, pages: Mapping[str, Reply]) -> str:
    """What to write instead, where the engine is plainly of another kind; `openai` fits any."""
    found, said = recognised(pages), endpoint.settings.kind
    # a plain OpenAI server may be any kind that tells little of itself, and the kind `openai` fits all of them
    return "" if found in (said, "openai") or said == "openai" else f"write `kind: {found}`"


def _models(endpoint: Endpoint, pages: Mapping[str, Reply]) -> Iterator[Row]:
    settings = endpoint.settings
    told = endpoint.adapter.facts(pages).models
    if not told and not settings.models:
        status = pages["/v1/models"].status if "/v1/models" in pages else "nothing"
        yield (
            "warn",
            f"it does not tell which models it serves (/v1/models: {status}): every request may be sent there",
            "list them in `models`",
        )
    needed = {settings.aliases.get(name, name) for name in settings.models}
    missing = sorted(needed - set(told)) if told else []
    if missing:
        yield (
            "fail",
            f"it does not serve {', '.join(missing)}; it tells {', '.join(told[:5])}",
            "mend `models`, or add an alias: `aliases: {name-of-clients: name-of-engine}`",
        )


def _events(endpoint: Endpoint, pages: Mapping[str, Reply]) -> Iterator[Row]:
    if endpoint.settings.kv_events != AUTO:
        return
    kind = endpoint.settings.kind
    path = path_for(kind)
    page = pages.get(path)
    if page is None or page.status != 200:
        status = "does not answer" if page is None else f"answers {page.status}"
        yield "fail", f"`kv_events: auto`, and {path} {status}", "give `kv_events` an address, or remove it"
        return
    sources, problem = sources_of(kind, page.json(), endpoint.origin.host)
    if not sources:
        yield "fail", f"`kv_events: auto`, and {problem}", "switch its KV events on, or remove `kv_events`"
    elif any(source.replay is None for source in sources):
        yield "warn", "its KV events cannot be replayed: what is missed stays unknown", "give it a replay_endpoint"


async def _bootstrap(endpoint: Endpoint, client: HttpClient) -> list[Row]:
    url = f"{bootstrap_url(endpoint)}/query"
    try:
        reply = await client.request("GET", url, timeout_s=PROBE_S)
        found = told_ranks(reply.json()) if reply.status == 200 else ()
    except (ExchangeFailed, OSError, ValueError):
        found = ()
    if found:
        return []
    return [("fail", f"its bootstrap server {url} tells no engine id", "set `bootstrap_port` and `bootstrap_host`")]
