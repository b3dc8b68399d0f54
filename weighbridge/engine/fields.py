"""Typed reading of a request body: every refusal is a 400 that names the field."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from weighbridge.core.errors import RequestError

Body = dict[str, Any]


def decode_body(data: bytes) -> Body:
    """A JSON object. Raises RequestError (400) for anything else."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return body


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    """A finite number between two bounds, both allowed; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)
    return float(value)


def integer(body: Body, name: str, default: int | None, low: int, high: int | None = None) -> int | None:
    """A whole number of at least `low` (and at most `high`); null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number", param=name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bound}, not {value}", param=name)
    return value


def flag(body: Body, name: str, default: bool = False) -> bool:
    """A boolean; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", param=name)
    return value


def text(body: Body, name: str, default: str = "") -> str:
    """A string; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string", param=name)
    return value


def strings(body: Body, name: str, most: int) -> tuple[str, ...]:
    """A string or a list of at most `most` strings; empty ones are refused, null is none."""
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise RequestError(f"{name} must be a string or a list of strings that are not empty", param=name)
    if len(values) > most:
        raise RequestError(f"{name} may hold at most {most} strings, not {len(values)}", param=name)
    return tuple(values)


def mapping(body: Body, name: str) -> Body:
    """An object; null is empty."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object", param=name)
    return value
