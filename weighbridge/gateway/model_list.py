"""The rows of `/v1/models`: what the instances that are up serve, and the names that stand for a choice."""

from __future__ import annotations

from collections.abc import Iterable

from weighbridge.gateway.auth import Principal
from weighbridge.gateway.endpoint import Endpoint

Row = dict[str, object]


def model_rows(endpoints: Iterable[Endpoint], principal: Principal, aliases: Iterable[str]) -> dict[str, Row]:
    """One row per id that this key may use; the context is the smallest, which every instance can hold."""
    rows: dict[str, Row] = {}
    for alias in aliases:
        if not principal.models or alias in principal.models:
            rows[alias] = {"id": alias, "object": "model", "created": 0, "owned_by": "weighbridge"}
    for endpoint in endpoints:
        if not endpoint.up:
            continue
        context = endpoint.spec.limits.max_context
        for name in endpoint.models:
            if principal.models and name not in principal.models:
                continue
            row = rows.setdefault(
                name, {"id": name, "object": "model", "created": 0, "owned_by": "weighbridge", "max_model_len": None}
            )
            known = row["max_model_len"]
            if context is not None:
                row["max_model_len"] = context if not isinstance(known, int) else min(known, context)
    return rows
