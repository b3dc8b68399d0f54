"""What an engine tells of itself over HTTP before it is measured: its kind, model, limits, load and start.

Every kind is read from its own pages; what an engine does not tell stays None, and the caller asks or assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from weighbridge.core.errors import ConfigError, UpstreamError
from weighbridge.core.instance import Limits
from weighbridge.http.client import HttpClient, Reply
from weighbridge.http.errors import ExchangeFailed

Kind = Literal["vllm", "sglang", "llamacpp", "tgi", "openai", "embedded"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang", "llamacpp", "tgi", "openai", "embedded")
TOKEN_PROMPTS = frozenset({"vllm", "sglang", "llamacpp", "embedded"})
"""Kinds whose completions take token ids, so that a prompt's length is exact."""

_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's own count of its requests; None where it does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it has any request, as far as it tells."""
        return bool(self.running) or bool(self.waiting)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to measure. `started_s` changes when it restarts; `device` is where it says that it runs."""

    url: str
    model: str
    kind: Kind
    version: str = ""
    limits: Limits = Limits()
    device: str = ""
    quantisation: str = ""
    started_s: float | None = None
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
    models = await _get(client, root, "/v1/models", headers)
    if models.status in (401, 403):
        raise UpstreamError(f"{root}: refused with HTTP {models.status}; name a variable that holds a key by --key-env")
    listed = _listed(models)
    pages = {path: await _page(client, root, path, headers) for path in ("/metrics", "/props", "/info", "/version")}
    found = kind or _guess(pages, listed)
    if found == "sglang":
        for path in ("/get_server_info", "/server_info"):
            pages[path] = await _page(client, root, path, headers)
    if models.status != 200 and found not in ("tgi",):
        raise UpstreamError(f"{root}: /v1/models answered HTTP {models.status}; this is no OpenAI-compatible engine")
    name = _choose(root, listed, model)
    entry = next((m for m in listed if m.get("id") == name), {})
    known = _READERS[found](pages, entry)
    return Endpoint(
        url=root,
        model=name,
        kind=found,
        version=known.get("version") or _version(pages),
        limits=known["limits"],
        device=known.get("device", ""),
        quantisation=known.get("quantisation", ""),
        started_s=_gauge(pages.get("/metrics"), ("process_start_time_seconds",)),
        headers=headers,
    )


async def read_load(client: HttpClient, endpoint: Endpoint) -> tuple[Load, float | None]:
    """Its load and its start time now; empty where it has no metrics page."""
    page = await _page(client, endpoint.url, "/metrics", endpoint.headers)
    return load_of(page), _gauge(page, ("process_start_time_seconds",))


async def read_counter(client: HttpClient, endpoint: Endpoint, names: tuple[str, ...]) -> float | None:
    """The first of these metrics that the engine's page has, summed over labels; None where it has none."""
    return _gauge(await _page(client, endpoint.url, "/metrics", endpoint.headers), names)


def load_of(page: Reply | None) -> Load:
    """The load that a metrics page tells."""
    running, waiting = _gauge(page, _RUNNING), _gauge(page, _WAITING)
    return Load(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        kv_usage=_gauge(page, _KV),
    )


async def _get(client: HttpClient, root: str, path: str, headers: tuple[tuple[str, str], ...]) -> Reply:
    try:
        return await client.request("GET", root + path, headers=headers, timeout_s=10.0)
    except ExchangeFailed as error:
        raise UpstreamError(f"{root}: {error}; is the engine running, and is this its address?") from None


async def _page(client: HttpClient, root: str, path: str, headers: tuple[tuple[str, str], ...]) -> Reply | None:
    """A page that an engine may not have; None then."""
    try:
        reply = await client.request("GET", root + path, headers=headers, timeout_s=10.0)
    except ExchangeFailed:
        return None
    return reply if reply.status == 200 else None


def _json(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {}
    try:
        value = reply.json()
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _listed(reply: Reply) -> list[dict[str, Any]]:
    data = _json(reply if reply.status == 200 else None).get("data")
    return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)] if isinstance(data, list) else []


def _choose(root: str, listed: list[dict[str, Any]], model: str | None) -> str:
    names = [str(m["id"]) for m in listed]
    if model is None:
        if len(names) == 1:
            return names[0]
        told = f"it serves {', '.join(names[:8])}" if names else "it lists none"
        raise UpstreamError(f"{root}: name the model by --model; {told}")
    if names and model not in names:
        raise UpstreamError(f"{root}: does not serve {model!r}; it serves {', '.join(names[:8])}")
    return model


def _guess(pages: Mapping[str, Reply | None], listed: list[dict[str, Any]]) -> Kind:
    metrics = (page.body if (page := pages.get("/metrics")) is not None else b"")[:400_000]
    if any(m.get("owned_by") == "weighbridge" for m in listed) or b"weighbridge_engine_" in metrics:
        return "embedded"
    if b"vllm:" in metrics:
        return "vllm"
    if b"sglang:" in metrics or any(m.get("owned_by") == "sglang" for m in listed):
        return "sglang"
    if "total_slots" in _json(pages.get("/props")):
        return "llamacpp"
    if "max_batch_total_tokens" in _json(pages.get("/info")) or b"tgi_" in metrics:
        return "tgi"
    return "openai"


def _version(pages: Mapping[str, Reply | None]) -> str:
    return str(_json(pages.get("/version")).get("version", ""))


def _vllm(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    labels = _labels(pages.get("/metrics"), "vllm:cache_config_info")
    limits = Limits(
        block_size=_int(labels.get("block_size")) or 16,
        kv_blocks=_int(labels.get("num_gpu_blocks")),
        max_context=_int(entry.get("max_model_len")),
        prefix_caching=labels.get("enable_prefix_caching", "True") == "True",
    )
    return {"limits": limits}


def _embedded(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    limits: Limits = _vllm(pages, entry)["limits"]
    slots = _int(entry.get("max_num_seqs"))
    described = str(entry.get("description") or "").split()
    return {
        "limits": msgspec.structs.replace(limits, token_budget=512, max_sequences=slots),
        "device": str(entry.get("device") or ""),
        "quantisation": described[-1] if described else "",
    }


def _sglang(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    info = _json(pages.get("/get_server_info")) or _json(pages.get("/server_info"))
    internal = info.get("internal_states")
    state = internal[0] if isinstance(internal, list) and internal and isinstance(internal[0], dict) else {}
    page_size = _int(info.get("page_size")) or 1
    capacity = _int(info.get("max_total_num_tokens")) or _int(state.get("max_total_num_tokens"))
    limits = Limits(
        token_budget=_int(info.get("chunked_prefill_size")),
        max_sequences=_int(info.get("max_running_requests")) or _int(state.get("max_running_requests")),
        block_size=page_size,
        kv_blocks=capacity // page_size if capacity else None,
        max_context=_int(info.get("context_length")) or _int(entry.get("max_model_len")),
        prefix_caching=not info.get("disable_radix_cache", False),
    )
    return {
        "limits": limits,
        "version": str(info.get("version", "")),
        "quantisation": str(info.get("quantization") or ""),
    }


def _llamacpp(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    props = _json(pages.get("/props"))
    slots = _int(props.get("total_slots"))
    settings = props.get("default_generation_settings")
    context = _int(settings.get("n_ctx")) if isinstance(settings, dict) else None
    meta = entry.get("meta")
    context = context or (_int(meta.get("n_ctx")) if isinstance(meta, dict) else None)
    limits = Limits(
        token_budget=2048,
        max_sequences=slots,
        block_size=1,
        kv_blocks=slots * context if slots and context else None,
        max_context=context,
    )
    return {"limits": limits, "version": str(props.get("build_info", ""))}


def _tgi(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    info = _json(pages.get("/info"))
    limits = Limits(
        token_budget=_int(info.get("max_batch_prefill_tokens")),
        max_sequences=_int(info.get("max_concurrent_requests")),
        block_size=1,
        kv_blocks=_int(info.get("max_batch_total_tokens")),
        max_context=_int(info.get("max_total_tokens")),
    )
    return {
        "limits": limits,
        "version": str(info.get("version", "")),
        "device": str(info.get("model_device_type") or ""),
    }


def _openai(pages: Mapping[str, Reply | None], entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"limits": Limits(max_context=_int(entry.get("max_model_len")) or _int(entry.get("context_length")))}


_READERS = {
    "vllm": _vllm,
    "embedded": _embedded,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
    "tgi": _tgi,
    "openai": _openai,
}


def _int(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def _families(page: Reply | None) -> Any:
    if page is None:
        return []
    try:
        return list(text_string_to_metric_families(page.body.decode(errors="replace")))
    except ValueError:
        return []


def _gauge(page: Reply | None, names: tuple[str, ...]) -> float | None:
    """The sum over labels of the first of `names` that the page has."""
    values = {name: [s.value for family in _families(page) for s in family.samples if s.name == name] for name in names}
    return next((float(sum(found)) for found in values.values() if found), None)


def _labels(page: Reply | None, name: str) -> dict[str, str]:
    return next((dict(s.labels) for family in _families(page) for s in family.samples if s.name == name), {})
