"""Chat messages to a prompt, by the Jinja template that the model file carries, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from weighbridge.core.errors import ModelError, RequestError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """A compiled chat template. `takes_tools` tells whether the template reads tool definitions."""

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        """`source` None takes ChatML. Raises ModelError where the template does not compile."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = source or CHATML
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be used: {error}") from None
        self._marks = {"bos_token": bos, "eos_token": eos}
        self.takes_tools = "tools" in source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generate: bool = True,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation; with `generate` it ends where the assistant begins to speak.

        Raises:
            RequestError: the template refuses the messages (a role it does not know, a wrong order).
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=generate,
                **self._marks,
                **(options or {}),
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from None


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Check `messages` and bring every content to a string: null, missing and [] are empty, text parts are joined."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message", param="messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} must be an object with a role", param=where)
        entry = dict(message)
        if entry["role"] == "developer":
            entry["role"] = "system"
        entry["content"] = _read_content(message.get("content"), where)
        if entry.get("tool_calls") is None:
            entry.pop("tool_calls", None)
        else:
            entry["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in _listed(entry, where)]
        messages.append(entry)
    return messages


def _listed(entry: dict[str, Any], where: str) -> list[tuple[int, Any]]:
    if not isinstance(entry["tool_calls"], list):
        raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    return list(enumerate(entry["tool_calls"]))


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """A past tool call, its arguments as an object, which is how templates want them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise RequestError(f"{where}.function.arguments is not JSON", param=where) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _read_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            message = f"{where}.content holds a part of type {kind!r}; this model reads text only"
            raise RequestError(message, code="unsupported_content", param=f"{where}.content")
    return "".join(texts)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
