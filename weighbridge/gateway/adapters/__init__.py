"""One file per kind of engine: what it tells of itself and what may be sent to it. Data and pure functions only."""

from collections.abc import Mapping

from weighbridge.core.errors import ConfigError
from weighbridge.gateway.adapters import embedded, llamacpp, openai, sglang, tgi, transformers, vllm
from weighbridge.gateway.adapters.adapter import Adapter, Facts, Report

_MODULES = (embedded, llamacpp, openai, sglang, tgi, transformers, vllm)
ADAPTERS: Mapping[str, Adapter] = {module.ADAPTER.kind: module.ADAPTER for module in _MODULES}


def adapter_for(kind: str, *, source: str = "", path: str = "") -> Adapter:
    """The adapter of an engine kind. Raises ConfigError naming the known ones."""
    adapter = ADAPTERS.get(kind)
    if adapter is None:
        raise ConfigError(f"unknown kind {kind!r}; known: {', '.join(sorted(ADAPTERS))}", source=source, path=path)
    return adapter


__all__ = ["ADAPTERS", "Adapter", "Facts", "Report", "adapter_for"]
