"""A client's request body, read once: what routing, limits and accounting need; the bytes themselves stay untouched."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from weighbridge.core.errors import RequestError
from weighbridge.gateway.estimate import inline_data
from weighbridge.gateway.nesting import check_nesting, too_deep
from weighbridge.gateway.request_fields import COMMON, RequestFields
from weighbridge.gateway.settings import RequestLimits
from weighbridge.gateway.splice import LARGE_BYTES, repeated_keys, replace_value

_decode: Final = msgspec.json.Decoder(RequestFields).decode
_FIELDS = RequestFields.__struct_fields__
_QUOTED = tuple(b'"%b"' % name.encode() for name in _FIELDS)
_NOTHING_RARE = (UNSET,) * (len(_FIELDS) - COMMON)
PRIVATE_KEYS = ("priority", "cache_salt")
"""Fields that engines obey and in which the gateway has the last word: they jump queues or share caches."""
FORBIDDEN_KEYS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that name addresses to the engines: no client may set them."""
MAX_TOKEN_ID = 2**31 - 1
"""Engines hold token ids in 32 bits."""
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}", re.DOTALL
)
_PROMPT_FIELD = {
    "chat": "messages",
    "completions": "prompt",
    "embeddings": "input",
    "responses": "input",
    "messages": "messages",
}


class ClientRequest:
    """What a body says. `text` is the prompt's bytes in the order an engine renders them (tools before turns)."""

    __slots__ = (
        "body",
        "endpoint",
        "exact_tokens",
        "has_usage_option",
        "max_tokens",
        "media",
        "model",
        "n",
        "private",
        "service_tier",
        "stream",
        "text",
        "text_bytes",
        "uses_completion_limit",
        "wants_usage",
    )

    def __init__(self, endpoint: str, body: bytes, limits: RequestLimits) -> None:
        """Raises RequestError (400, naming the field)."""
        parsed = _parse(body, limits)
        values = msgspec.structs.astuple(parsed)
        self.endpoint = endpoint
        self.body = body
        self.model = parsed.model or ""
        self.stream = bool(parsed.stream)
        options = parsed.stream_options
        self.has_usage_option = options is not UNSET
        self.wants_usage = bool(options and options.get("include_usage"))
        self.uses_completion_limit = parsed.max_completion_tokens is not UNSET
        self.exact_tokens: int | None = None
        self.n = 1
        self.service_tier: str | None = None
        self.private: tuple[str, ...] = ()
        rare = values[COMMON:] != _NOTHING_RARE
        if rare:
            self._take_rare(parsed, limits)
        self.max_tokens = _max_tokens(parsed, limits)
        field = _PROMPT_FIELD.get(endpoint)
        raw = getattr(parsed, field) if field else UNSET
        if field and raw is UNSET:
            raise RequestError(f"The field `{field}` is missing.", param=field, code="missing_required_parameter")
        prompt = b"" if raw is UNSET else bytes(raw)
        own = _without(body, b'"%b":' % field.encode(), prompt) if field else body
        _check_repeated(body, own, values if rare else values[:COMMON])
        if endpoint == "completions":
            prompt = self._completion_prompt(prompt, limits)
        elif endpoint in ("chat", "messages") and not prompt.startswith(b"["):
            raise RequestError("`messages` must be a list.", param="messages", code="invalid_type")
        if (
            not prompt.startswith(b"[{")
            and endpoint in ("chat", "messages", "embeddings")
            and _EMPTY_LIST.match(prompt)
        ):
            raise RequestError(f"`{field}` must not be empty.", param=field, code="empty_array")
        self.text = prompt
        if rare:
            heads = [bytes(h) for h in (parsed.tools, parsed.system, parsed.instructions) if h is not UNSET]
            self.text = b"".join((*heads, prompt))
        media_bytes, self.media = inline_data(self.text)
        self.text_bytes = len(self.text) - media_bytes

    def _take_rare(self, parsed: RequestFields, limits: RequestLimits) -> None:
        """Fields that most bodies do not have."""
        for name in FORBIDDEN_KEYS:
            if getattr(parsed, name) is not UNSET:
                raise RequestError(f"`{name}` is set by the gateway alone.", param=name, code="unsupported_parameter")
        self.service_tier = parsed.service_tier or None
        self.n = _whole("n", parsed.n) if parsed.n else 1
        self.private = tuple(name for name in PRIVATE_KEYS if getattr(parsed, name) is not UNSET)
        _check_caps(parsed, limits)

    def set_model(self, model: str) -> None:
        """Another model than the client wrote; every other byte of the body stays."""
        self.body = replace_value(self.body, "model", msgspec.json.encode(model))
        self.model = model

    def _completion_prompt(self, raw: bytes, limits: RequestLimits) -> bytes:
        """The first prompt's bytes; token ids are counted exactly."""
        if raw[:1] == b'"':
            return raw[1:-1]
        bad = RequestError(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.",
            param="prompt",
            code="invalid_type",
        )
        try:
            shape: Any = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):  # numbers beyond any machine's are no JSON error before
            raise bad from None
        if not isinstance(shape, list) or not shape:
            raise bad
        if len(shape) > limits.max_prompts and not isinstance(shape[0], int):
            raise RequestError(f"At most {limits.max_prompts} prompts in one request.", param="prompt")
        if all(isinstance(p, str) for p in shape):
            self.n *= len(shape)
            return b"".join(p.encode() for p in shape)
        if _is_ids(shape):
            _check_ids(shape)
            self.exact_tokens = len(shape)
            return raw
        if all(isinstance(p, list) and p and _is_ids(p) for p in shape):
            self.n *= len(shape)
            for ids in shape:
                _check_ids(ids)
            self.exact_tokens = sum(len(p) for p in shape)
            return raw
        raise bad


def _is_ids(values: list[Any]) -> bool:
    return all((type(v) is int or (type(v) is float and v.is_integer())) and v >= 0 for v in values)


def _check_ids(ids: list[float]) -> None:
    if max(ids) > MAX_TOKEN_ID:
        message = f"`prompt` holds a token id above {MAX_TOKEN_ID}, which no vocabulary has."
        raise RequestError(message, param="prompt", code="integer_above_max_value")


def _parse(body: bytes, limits: RequestLimits) -> RequestFields:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            message = f"The body is not UTF-8 text (byte {error.start})."
            raise RequestError(message, code="invalid_json") from None
    try:
        parsed = _decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".").split(".")[0].split("[")[0] or None
        where = f"`{field}`: " if field else "The body must be a JSON object. "
        raise RequestError(f"{where}{message}.", param=field, code="invalid_type") from None
    except RecursionError:
        raise too_deep(body, limits.max_depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        half = _HALF_PAIR.search(body)
        why = f"`{half[0].decode()}` is half of a surrogate pair and stands alone" if half else str(error)
        raise RequestError(f"The body is not valid JSON: {why}", code="invalid_json") from None
    if body.count(b"[") + body.count(b"{") > limits.max_depth:  # of few bodies, whatever their strings hold
        check_nesting(body, limits.max_depth)
    return parsed


def _without(body: bytes, key: bytes, value: bytes) -> bytes:
    """`body` without the value behind `key`, for a search for keys of the object itself.

    Quotes and a colon behind it make a text a key, at whatever depth, and what follows is its value: so cutting out
    bytes that are a whole value there never cuts a key of the object. Where they are not found: all of it.
    """
    start = body.find(key) + len(key)
    if body.startswith(b" ", start):
        start += 1
    if start > len(key) and body.startswith(value, start):
        return body[:start] + body[start + len(value) :]
    return body


def _check_repeated(body: bytes, own: bytes, values: tuple[Any, ...]) -> None:
    """One parse decides authorisation and routing: no key that it reads may stand twice.

    `own` holds all keys of the object itself, `values` those of the first fields, beyond which none is set.
    """
    # a key may be spelled with escapes: only a walk over all keys can tell; most bodies hold no backslash at all
    suspicious = len(body) > LARGE_BYTES or (b"\\" in own and b"\\u00" in own)
    if not suspicious:
        count, unset = own.count, UNSET
        for index, value in enumerate(values):
            if value is not unset and count(_QUOTED[index]) > 1:
                suspicious = True
                break
    if suspicious:
        names = [name for name, value in zip(_FIELDS, values, strict=False) if value is not UNSET]
        repeated = repeated_keys(body, names)
        if repeated is not None:
            raise RequestError(f"The key `{repeated}` stands twice.", param=repeated, code="duplicate_key")


def _whole(name: str, value: float) -> int:
    """JSON does not tell 5.0 from 5."""
    if type(value) is int:
        return value
    if not float(value).is_integer():
        raise RequestError(f"`{name}` must be a whole number.", param=name, code="invalid_type")
    return int(value)


def _max_tokens(parsed: RequestFields, limits: RequestLimits) -> int:
    """The output budget; the newer name wins where both are given."""
    budget = None
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        value = getattr(parsed, name)
        if value is None or value is UNSET:
            continue
        value = _whole(name, value)
        if value < 1:
            raise RequestError(f"`{name}` must be at least 1.", param=name, code="integer_below_min_value")
        if value > limits.max_tokens:
            message = f"`{name}` must be at most {limits.max_tokens}."
            raise RequestError(message, param=name, code="integer_above_max_value")
        budget = value
    return budget or limits.default_max_tokens


def _check_caps(parsed: RequestFields, limits: RequestLimits) -> None:
    for name in ("n", "best_of"):
        value = getattr(parsed, name)
        if value is not None and value is not UNSET and not 1 <= _whole(name, value) <= limits.max_n:
            raise RequestError(f"`{name}` must be between 1 and {limits.max_n}.", param=name)
    for name in ("stop", "stop_sequences"):
        _check_stop(name, getattr(parsed, name), limits)


def _check_stop(name: str, value: str | list[str] | UnsetType | None, limits: RequestLimits) -> None:
    """Engines look for every stop string after every token."""
    if value is None or value is UNSET:
        return
    words = [value] if isinstance(value, str) else value
    if len(words) > limits.max_stop:
        message = f"`{name}` must hold at most {limits.max_stop} strings."
        raise RequestError(message, param=name, code="array_above_max_length")
    if any(len(word) > limits.max_stop_chars for word in words):
        message = f"A string in `{name}` must have at most {limits.max_stop_chars} characters."
        raise RequestError(message, param=name, code="string_above_max_length")


def overload_choices(header: bytes | None) -> tuple[str, ...]:
    """What the client lets the router do under overload; words it does not know are ignored."""
    if header is None:
        return ()
    words = {word.strip().lower() for word in header.split(b",")}
    return tuple(name for name in ("clip", "defer") if name.encode() in words)
