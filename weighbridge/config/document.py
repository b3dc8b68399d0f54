"""A YAML file as a checked value: unknown keys, duplicate keys and wrong types are refused with file, line and path.

`${NAME}` in a string is replaced by the environment variable NAME, `${NAME:-default}` falls back to a default, and
`$${` is a literal `${`. A variable that is not set and has no default is an error, not an empty string.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
import yaml

from weighbridge.core.errors import ConfigError

T = TypeVar("T")

_VARIABLE = re.compile(r"\$(\$\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_PATTERNS = {
    "^[0-9a-f]{64}$": '64 hexadecimal digits in small letters, as `printf %s "$KEY" | sha256sum` prints them',
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "a name: at most 64 letters, digits, `.`, `_` and `-`, the first no mark",
}
MAX_BYTES = 1 << 20


class Document:
    """A parsed YAML file that remembers where everything stood."""

    def __init__(self, text: str, name: str, environment: Mapping[str, str]) -> None:
        """Parse `text`.

        Raises:
            ConfigError: not YAML, a duplicate key, or an environment variable that is not set.
        """
        self.name = name
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.value = {} if self._root is None else _build(self._root, "$", name, environment)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
            raise ConfigError(f"not valid YAML: {error.problem or error}", source=where) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"not valid YAML: {error}", source=name) from None

    @classmethod
    def read(cls, path: Path, environment: Mapping[str, str]) -> Document:
        """Read and parse a file of at most 1 MiB."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
        if len(data) > MAX_BYTES:
            raise ConfigError(f"is {len(data)} bytes, more than a configuration file can be", source=str(path))
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8 text (byte {error.start})", source=str(path)) from None
        return cls(text, str(path), environment)

    def to(self, type_: type[T]) -> T:
        """Convert to `type_`, whose structs should forbid unknown fields.

        Raises:
            ConfigError: with file, line and path of the first thing that does not fit.
        """
        try:
            return msgspec.convert(self.value, type_)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `")
            path = path.rstrip("`") or "$"
            unknown = _UNKNOWN.search(message)
            if unknown:
                message += _expected(unknown.group(1), known_keys(type_, path))
            for pattern, words in _PATTERNS.items():
                message = message.replace(f"`str` matching regex {pattern!r}", words)
            raise self.error(message, self._named(type_, path)) from None

    def _named(self, type_: Any, path: str) -> str:
        """`path` with the keys of dictionaries, which the decoder leaves out: it writes `[...]` for them."""
        while "[...]" in path:
            before, _, after = path.partition("[...]")
            value = copy.deepcopy(self.value)
            holder = value
            for key, index in _STEP.findall(before):
                holder = holder[key] if key else holder[int(index)]
            if not isinstance(holder, dict):
                break
            for key, own in list(holder.items()):
                holder.clear()
                holder[key] = own
                try:
                    msgspec.convert(value, type_)
                except msgspec.ValidationError:
                    break
            path = f"{before}.{key}{after}"
        return path

    def error(self, message: str, path: str) -> ConfigError:
        """An error about the value at `path`, such as `$.instances[0].url`."""
        node = self._root
        for key, index in _STEP.findall(path):
            step = _child(node, key, index)
            if step is None:
                break
            node = step
        unknown = _UNKNOWN.search(message)
        if unknown and isinstance(node, yaml.MappingNode):
            node = next((k for k, _ in node.value if k.value == unknown.group(1)), node)
        where = self.name if node is None else f"{self.name}:{node.start_mark.line + 1}"
        return ConfigError(_humanise(message), source=where, path=path)


def known_keys(type_: Any, path: str) -> list[str]:
    """The keys that `type_` allows at `path`, sorted; empty where that is no struct."""
    info = _struct(msgspec.inspect.type_info(type_))
    for key, _ in _STEP.findall(path):
        if key and isinstance(info, msgspec.inspect.StructType):
            field = next((f for f in info.fields if f.encode_name == key), None)
            info = None if field is None else _struct(field.type)
        if info is None:
            return []
    return sorted(f.encode_name for f in info.fields) if isinstance(info, msgspec.inspect.StructType) else []


def _struct(info: msgspec.inspect.Type) -> msgspec.inspect.Type | None:
    """The struct inside optional, list, tuple and dict types; what else it is otherwise."""
    if isinstance(info, msgspec.inspect.UnionType):
        return next((found for t in info.types if isinstance(found := _struct(t), msgspec.inspect.StructType)), None)
    if isinstance(info, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        return _struct(info.item_type)
    if isinstance(info, msgspec.inspect.DictType):
        return _struct(info.value_type)
    return info


def _expected(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; known: {', '.join(known)}" if known else ""


def _child(node: Any, key: str, index: str) -> Any:
    if key and isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    if index.isdigit() and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
        return node.value[int(index)]
    return None


def _humanise(message: str) -> str:
    message = message.replace("Object contains unknown field", "unknown key")
    message = message.replace("Object missing required field", "missing key")
    return message[:1].lower() + message[1:] if message.startswith(("Expected", "Invalid")) else message


def _build(node: Any, path: str, name: str, environment: Mapping[str, str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            where = f"{name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("a key must be a plain word", source=where, path=path)
            if key in result:
                raise ConfigError(f"key {key!r} stands twice; keep one", source=where, path=path)
            result[key] = _build(value_node, f"{path}.{key}", name, environment)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, f"{path}[{i}]", name, environment) for i, child in enumerate(node.value)]
    value = yaml.constructor.SafeConstructor().construct_object(node, deep=True)  # a loader would be a cycle
    if isinstance(value, str) and "${" in value:
        return _substitute(value, f"{name}:{node.start_mark.line + 1}", path, environment)
    return value


def _substitute(text: str, source: str, path: str, environment: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match.group(1):
            return "${"
        variable, default = match.group(2), match.group(3)
        found = environment.get(variable, default)
        if found is None:
            raise ConfigError(
                f"environment variable {variable} is not set; set it or write ${{{variable}:-default}}",
                source=source,
                path=path,
            )
        return found

    return _VARIABLE.sub(replace, text)
