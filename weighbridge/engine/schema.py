"""JSON Schema to a GBNF grammar, so that a model can only write JSON that fits.

Covered: types and lists of types, enum, const, properties with required ones, items and prefixItems with bounds,
string lengths, anyOf and oneOf, local references. Properties come in the order of the schema; others are not written.
A keyword that restricts values and cannot be kept to is refused rather than ignored.
"""

from __future__ import annotations

import json
from typing import Any

from weighbridge.core.errors import RequestError

_REFUSED = (
    "allOf",
    "not",
    "if",
    "pattern",
    "patternProperties",
    "propertyNames",
    "contains",
    "uniqueItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
)
_BASE = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    "char": r'[^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\""',
    "integer": r'"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": r'integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,3})?',
    "boolean": r'"true" | "false"',
    "null": r'"null"',
    "value": r"object | array | string | number | boolean | null",
    "object": r'"{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"',
    "array": r'"[" ws (value ("," ws value)*)? ws "]"',
}
_MAX_DEPTH = 32


def any_object() -> str:
    """A grammar of any JSON object."""
    return _write("object", dict(_BASE))


def schema_grammar(schema: Any, name: str = "schema") -> str:
    """A grammar of the JSON that fits a schema.

    Raises:
        RequestError: (400) the schema is not one, or uses a keyword that cannot be kept to.
    """
    converter = _Converter(schema, name)
    return _write(converter.rule(schema, 0), converter.rules)


def choice_grammar(choices: list[str]) -> str:
    """A grammar of exactly these texts."""
    return "root ::= " + " | ".join(_literal(choice) for choice in choices) + "\n"


def combine(source: str, prefix: str, suffix: str) -> str:
    """A grammar of a fixed text before and after what another grammar's root allows."""
    return source.replace("root ::=", "inner ::=", 1) + f"root ::= {_literal(prefix)} inner {_literal(suffix)}\n"


def _write(root: str, rules: dict[str, str]) -> str:
    return f"root ::= {root}\n" + "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


class _Converter:
    def __init__(self, schema: Any, name: str) -> None:
        self.rules = dict(_BASE)
        self._root = schema
        self._name = name
        self._references: dict[str, str] = {}

    def rule(self, schema: Any, depth: int) -> str:
        """The name of a rule, or an expression that needs no brackets, for a schema."""
        if depth > _MAX_DEPTH:
            raise self._refuse(f"is nested deeper than {_MAX_DEPTH}")
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise self._refuse("holds something that is not a schema")
        for keyword in _REFUSED:
            if keyword in schema:
                raise self._refuse(f"uses {keyword!r}, which generation cannot keep to")
        if "$ref" in schema:
            return self._reference(schema["$ref"], depth)
        if "const" in schema:
            return self._add(_literal(json.dumps(schema["const"], ensure_ascii=False)))
        if "enum" in schema:
            values = self._listed(schema, "enum")
            return self._add(" | ".join(_literal(json.dumps(value, ensure_ascii=False)) for value in values))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self.rule(option, depth + 1) for option in self._listed(schema, keyword)]
                return self._add(" | ".join(options))
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._add(" | ".join(self._typed({**schema, "type": one}, depth) for one in kind))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number", "boolean", "null"):
            return str(kind)
        if kind is None:
            return "value"
        raise self._refuse(f"names an unknown type {kind!r}")

    def _string(self, schema: dict[str, Any]) -> str:
        low, high = self._bounds(schema, "minLength", "maxLength")
        if low == 0 and high is None:
            return "string"
        return self._add(f'"\\"" char{_times(low, high)} "\\""')

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        low, high = self._bounds(schema, "minItems", "maxItems")
        first = [self.rule(entry, depth + 1) for entry in schema.get("prefixItems", [])]
        if first:
            return self._add('"[" ws ' + ' "," ws '.join(first) + ' ws "]"')
        item = self.rule(schema.get("items", True), depth + 1)
        if high == 0:
            return self._add('"[" ws "]"')
        more = f'("," ws {item}){_times(max(0, low - 1), None if high is None else high - 1)}'
        body = f"{item} {more}" if low else f"({item} {more})?"
        return self._add(f'"[" ws {body} ws "]"')

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        properties = schema.get("properties") or {}
        if not isinstance(properties, dict):
            raise self._refuse("has properties that are not an object")
        if not properties:
            return "object" if schema.get("additionalProperties", True) is not False else self._add('"{" ws "}"')
        required = set(schema.get("required") or [])
        if missing := required - set(properties):
            raise self._refuse(f"requires {sorted(missing)[0]!r}, which is not among its properties")
        pairs = [
            (self._add(f'{_literal(json.dumps(key, ensure_ascii=False))} ":" ws {self.rule(entry, depth + 1)}'), key)
            for key, entry in properties.items()
        ]
        # tails[i]: what may follow once something was written, from property i on
        tails = [""] * (len(pairs) + 1)
        for i in range(len(pairs) - 1, -1, -1):
            rule, key = pairs[i]
            own = f'"," ws {rule}' if key in required else f'("," ws {rule})?'
            tails[i] = self._add(f"{own} {tails[i + 1]}".strip())
        starts = []
        for i, (rule, key) in enumerate(pairs):
            starts.append(f"{rule} {tails[i + 1]}".strip())
            if key in required:
                break
        else:
            starts.append('""')
        return self._add('"{" ws (' + " | ".join(starts) + ') ws "}"')

    def _reference(self, target: Any, depth: int) -> str:
        if not isinstance(target, str) or not target.startswith("#"):
            raise self._refuse(f"refers to {target!r}; only references within the schema work")
        if target not in self._references:
            schema = self._root
            for part in target[1:].strip("/").split("/") if target != "#" else []:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(schema, dict) or part not in schema:
                    raise self._refuse(f"refers to {target!r}, which is not there")
                schema = schema[part]
            name = f"ref{len(self._references)}"
            self._references[target] = name
            self.rules[name] = self.rule(schema, depth + 1)
        return self._references[target]

    def _add(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name

    def _listed(self, schema: dict[str, Any], keyword: str) -> list[Any]:
        values = schema[keyword]
        if not isinstance(values, list) or not values:
            raise self._refuse(f"has {keyword} without a list of values")
        return values

    def _bounds(self, schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        for value in (least, most):
            if value is not None and (not isinstance(value, int) or not 0 <= value <= 1000):
                raise self._refuse(f"has {low} or {high} outside 0 to 1000")
        if most is not None and most < least:
            raise self._refuse(f"has {high} below {low}")
        return least, most

    def _refuse(self, why: str) -> RequestError:
        return RequestError(f"{self._name} {why}", code="invalid_schema", param=self._name)


def _times(low: int, high: int | None) -> str:
    if low == 0 and high is None:
        return "*"
    return f"{{{low},}}" if high is None else f"{{{low},{high}}}"
