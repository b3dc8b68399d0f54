"""The short text forms of distributions (`exp:500`), split and checked in one place."""

from __future__ import annotations

import math

from weighbridge.core.errors import ConfigError


def split_spec(text: str) -> tuple[str, list[str]]:
    """`"gamma:2"` becomes `("gamma", ["2"])`."""
    kind, *arguments = text.strip().split(":")
    return kind.strip().lower(), [argument.strip() for argument in arguments]


def number(field: str, text: str, argument: str, *, positive: bool = False) -> float:
    """A finite number out of a short form; the error names the field, the form and the bad part."""
    try:
        value = float(argument)
    except ValueError:
        raise ConfigError(f"{field}: '{argument}' in '{text}' is not a number") from None
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        wanted = "above 0" if positive else "0 or more"
        raise ConfigError(f"{field}: '{argument}' in '{text}' must be {wanted}")
    return value


def unknown_kind(field: str, text: str, forms: str) -> ConfigError:
    """The error for a form that nothing here reads."""
    return ConfigError(f"{field}: cannot read '{text}'; use {forms}")
