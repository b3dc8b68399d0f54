"""One JSON Schema that says what several say together (`allOf`, and keywords beside `$ref`, `anyOf` and `oneOf`).

Only what merges without loss is merged; two that restrict the same thing in ways that do not combine are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Keywords that say something about a schema and restrict nothing. `format` is one of them unless a validator is told
# otherwise.
ANNOTATIONS = frozenset(
    (
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "format",
        "readOnly",
        "title",
        "writeOnly",
    )
)
_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


class MergeError(ValueError):
    """Why two schemas do not combine."""


def restricting(schema: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that are no mere annotations."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def merge(schemas: list[Any], resolve: Callable[[str], Any]) -> Any:
    """A schema of what fits all of them. `resolve` gives the schema that a reference names.

    Raises MergeError where they do not combine.
    """
    merged: dict[str, Any] = {}
    for schema in _flat(schemas, resolve, 0):
        if schema is False:
            return False
        for key, value in restricting(schema).items():
            merged[key] = _both(key, merged[key], value) if key in merged else value
    return merged


def _flat(schemas: list[Any], resolve: Callable[[str], Any], depth: int) -> list[Any]:
    """The schemas with `allOf` and references taken apart."""
    if depth > 16:
        raise MergeError("is combined of more than 16 levels, or of itself")
    found: list[Any] = []
    for schema in schemas:
        if isinstance(schema, bool):
            found += [] if schema else [False]
            continue
        if not isinstance(schema, dict):
            raise MergeError("holds something that is not a schema")
        rest = dict(schema)
        parts = rest.pop("allOf", [])
        if not isinstance(parts, list):
            raise MergeError("has allOf without a list of schemas")
        if isinstance(rest.get("$ref"), str):
            parts = [*parts, resolve(rest.pop("$ref"))]
        found += [rest, *_flat(parts, resolve, depth + 1)]
    return found


def _both(key: str, one: Any, other: Any) -> Any:
    if one == other:
        return one
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        return one | {
            name: {"allOf": [one[name], entry]} if name in one and one[name] != entry else entry
            for name, entry in other.items()
        }
    if key == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(name for name in other if name not in one)]
    if key in ("items", "additionalProperties") and isinstance(one, dict) and isinstance(other, dict):
        return {"allOf": [one, other]}
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        return [value for value in one if value in other]
    if key in _HIGHEST + _LOWEST and isinstance(one, int | float) and isinstance(other, int | float):
        return max(one, other) if key in _HIGHEST else min(one, other)
    if key == "type":
        kinds = [kind for kind in _kinds(one) if kind in _kinds(other)]
        if "integer" in (*_kinds(one), *_kinds(other)) and "number" in (*_kinds(one), *_kinds(other)):
            kinds = [*kinds, "integer"] if "integer" not in kinds else kinds
        if kinds:
            return kinds[0] if len(kinds) == 1 else kinds
        raise MergeError(f"combines the types {one!r} and {other!r}, which have nothing in common")
    raise MergeError(f"combines two different {key!r}, which generation cannot keep to")


def _kinds(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
