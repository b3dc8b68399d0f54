"""JSON Schema to a GBNF grammar, so that a model can only write JSON that fits.

Covered: types and lists of types, enum, const, properties with required ones, maps (additionalProperties), items and
prefixItems with bounds, string lengths and patterns, bounds of whole numbers, anyOf, oneOf and allOf, local references.
Properties come in the order of the schema; others are not written. `oneOf` is read as `anyOf`. A keyword that restricts
values and cannot be kept to is refused rather than ignored.
"""

from __future__ import annotations

import json
import math
from typing import Any

from weighbridge.core.errors import RequestError
from weighbridge.engine.number_range import integer_range
from weighbridge.engine.pattern import PatternError, pattern_expression
from weighbridge.engine.schema_merge import MergeError, merge, restricting

_REFUSED = (
    "$dynamicRef",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "contains",
    "uniqueItems",
    "multipleOf",
    "minProperties",
    "maxProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BASE = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    "char": r'[^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\""',
    "integer": r'"-"? ("0" | [1-9] [0-9]{0,15})',
    "nonnegative": r'("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,3})?',
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
            if schema.get(keyword, False) is not False:
                raise self._refuse(f"uses {keyword!r}, which generation cannot keep to")
        plain = restricting(schema)
        if "$ref" in plain and len(plain) == 1:
            return self._reference(schema["$ref"], depth)
        if "$ref" in plain or "allOf" in plain:
            return self.rule(self._merged([schema]), depth + 1)
        if "const" in schema or "enum" in schema:
            return self._values(schema)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in plain.items() if key != keyword}
                options = [self._merged([rest, option]) if rest else option for option in self._listed(schema, keyword)]
                return self._add(" | ".join(self.rule(option, depth + 1) for option in options))
        return self._typed(schema, depth)

    def _merged(self, schemas: list[Any]) -> Any:
        try:
            merged = merge(schemas, self._resolve)
        except MergeError as error:
            raise self._refuse(str(error)) from None
        if merged is False:
            raise self._refuse("allows nothing (false)")
        return merged

    def _values(self, schema: dict[str, Any]) -> str:
        """`const` and `enum`, as far as they are of the schema's type."""
        values = [schema["const"]] if "const" in schema else self._listed(schema, "enum")
        if (
            "const" in schema
            and "enum" in schema
            and not any(_same(schema["const"], value) for value in schema["enum"])
        ):
            values = []
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        values = [value for value in values if not kinds or any(_is(value, kind) for kind in kinds)]
        for keyword in ("pattern", "minLength", "maxLength", *_BOUNDS):
            if keyword in schema:
                raise self._refuse(f"has {keyword!r} beside its values, which generation cannot keep to")
        if not values:
            raise self._refuse("has no value of its own type")
        return self._add(" | ".join(_literal(json.dumps(value, ensure_ascii=False)) for value in values))

    def _typed(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._add(" | ".join(self._typed({**schema, "type": one}, depth) for one in kind))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema, depth)
        if kind == "string" or (kind is None and {"pattern", "minLength", "maxLength"} & schema.keys()):
            return self._string(schema)
        if kind == "integer" or (kind == "number" and any(key in schema for key in _BOUNDS)):
            return self._number(schema, str(kind))
        if kind in ("number", "boolean", "null"):
            return str(kind)
        if kind is None:
            if any(key in schema for key in (*_BOUNDS, "required", "additionalProperties")):
                raise self._refuse("has bounds or properties without a type")
            return "value"
        raise self._refuse(f"names an unknown type {kind!r}")

    def _number(self, schema: dict[str, Any], kind: str) -> str:
        if not any(key in schema for key in _BOUNDS):
            return kind
        for key in _BOUNDS:
            value = schema.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self._refuse(f"has {key} that is not a number")
        if kind == "number":
            if {key: schema[key] for key in _BOUNDS if key in schema} == {"minimum": 0}:
                return "nonnegative"
            raise self._refuse("bounds a number that is not whole, of which generation can keep only minimum 0")
        lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
        highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        try:
            return self._add(integer_range(max(lows, default=None), min(highs, default=None)))
        except ValueError as error:
            raise self._refuse(f"bounds an integer so that {error}") from None

    def _string(self, schema: dict[str, Any]) -> str:
        low, high = self._bounds(schema, "minLength", "maxLength")
        if "pattern" in schema:
            if low or high is not None:
                raise self._refuse("has a pattern and a length; put the length into the pattern, as in ^.{1,9}$")
            if not isinstance(schema["pattern"], str):
                raise self._refuse("has a pattern that is not a text")
            try:
                return self._add(f'"\\"" ({pattern_expression(schema["pattern"])}) "\\""')
            except PatternError as error:
                raise self._refuse(f"has a pattern that {error}") from None
        if low == 0 and high is None:
            return "string"
        return self._add(f'"\\"" char{_times(low, high)} "\\""')

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        low, high = self._bounds(schema, "minItems", "maxItems")
        first = [self.rule(entry, depth + 1) for entry in schema.get("prefixItems", [])]
        if first:
            if low > len(first) or (high is not None and high < len(first)):
                raise self._refuse("has prefixItems and another number of items than they are")
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
            return self._map(schema, depth)
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

    def _map(self, schema: dict[str, Any], depth: int) -> str:
        """An object whose keys are not named."""
        if schema.get("required"):
            raise self._refuse(f"requires {schema['required'][0]!r}, which is not among its properties")
        values = schema.get("additionalProperties", True)
        if values is True or values == {}:
            return "object"
        if values is False:
            return self._add('"{" ws "}"')
        pair = self._add(f'string ":" ws {self.rule(values, depth + 1)}')
        return self._add(f'"{{" ws ({pair} ("," ws {pair})*)? ws "}}"')

    def _reference(self, target: Any, depth: int) -> str:
        if not isinstance(target, str) or target not in self._references:
            schema = self._resolve(target)
            name = f"ref{len(self._references)}"
            self._references[target] = name
            self.rules[name] = self.rule(schema, depth + 1)
        return self._references[target]

    def _resolve(self, target: Any) -> Any:
        """The schema that a reference names."""
        if not isinstance(target, str) or not target.startswith("#"):
            raise self._refuse(f"refers to {target!r}; only references within the schema work")
        schema = self._root
        for part in target[1:].strip("/").split("/") if target != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(schema, dict) or part not in schema:
                raise self._refuse(f"refers to {target!r}, which is not there")
            schema = schema[part]
        return schema

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


def _is(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a schema's type."""
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    names = {str: "string", list: "array", dict: "object"}
    return bool(kind == next((name for form, name in names.items() if isinstance(value, form)), None))


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values, to which true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
