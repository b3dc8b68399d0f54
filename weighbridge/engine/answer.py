"""The answer to one API call: gathers the outputs of its generations and writes them as OpenAI JSON or SSE frames."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from weighbridge.engine.engine import Engine
from weighbridge.engine.generation import FinalStats, GenerationRequest, Output
from weighbridge.engine.leases import Kv
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.requests import Call
from weighbridge.engine.sampling import TokenLogprob
from weighbridge.engine.tools import ToolCall, ToolParser
from weighbridge.engine.transfer import Pulled
from weighbridge.http import Responder, error_body

_encode = msgspec.json.encode
_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}


@dataclass(slots=True)
class Choice:
    """One generation of a call, as far as it is."""

    prompt: int
    text: list[str] = field(default_factory=list)
    offset: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    begun: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: FinalStats | None = None
    parser: ToolParser | None = None
    calls: list[ToolCall] = field(default_factory=list)


class Answer:
    """Runs a call on the engine and answers it exactly once; a client that leaves cancels it.

    Lives on the event loop. The status line is sent with the first output, so that a refusal keeps its own status.
    """

    def __init__(
        self,
        engine: Engine,
        call: Call,
        responder: Responder,
        model_id: str,
        on_end: Callable[[], None],
        lease: Callable[[Kv, int], dict[str, Any] | None],
    ) -> None:
        """`lease` takes KV that another instance will collect and returns what the reply says of it."""
        self._lease = lease
        self._transfer_params: dict[str, Any] | None = None
        self._engine = engine
        self._call = call
        self._responder = responder
        self._on_end = on_end
        self._choices = [
            Choice(prompt, parser=None if call.tools is None else ToolParser())
            for prompt in range(len(call.prompts))
            for _ in range(call.n)
        ]
        self._open = len(self._choices)
        self._id = ""
        self._model_id = model_id
        self._created = int(time.time())
        self._ended = False

    def begin(self, call_id: str, arrival_s: float, pulled: Pulled | None = None) -> None:
        """Submit every generation of the call, with KV that was pulled for it, if any."""
        self._id = call_id
        self._responder.on_disconnect = self.leave
        call = self._call
        for index, choice in enumerate(self._choices):
            prompt = call.prompts[choice.prompt]
            room = self._engine.context_tokens - len(prompt)
            sampling = call.sampling
            if sampling.seed is not None and index % call.n:  # the choices of one prompt must differ
                sampling = replace(sampling, seed=(sampling.seed + index % call.n) % 2**64)
            request = GenerationRequest(
                id=f"{call_id}-{index}",
                tokens=prompt,
                max_tokens=room if call.max_tokens is None else min(call.max_tokens, room),
                arrival_s=arrival_s,
                sampling=sampling,
                stops=call.stops,
                stop_tokens=call.stop_tokens,
                ignore_eos=call.ignore_eos,
                include_stop=call.include_stop,
                skip_special=call.skip_special,
                priority=call.priority,
                namespace=call.namespace,
                grammar=call.grammar,
                hold=call.transfer.hold,
                kv=None if pulled is None else pulled.data,
                kv_tokens=0 if pulled is None else min(pulled.tokens, len(prompt)),
                kv_s=0.0 if pulled is None else pulled.seconds,
            )
            self._engine.submit(request, partial(self._take, index))

    def _take(self, index: int, output: Output) -> None:
        if self._ended:
            return
        choice = self._choices[index]
        if output.finish_reason in ("error", "overloaded", "cancelled"):
            self._fail(output)
            return
        text = output.text
        calls: list[ToolCall] = []
        if choice.parser is not None:
            text, calls = choice.parser.feed(text)
            choice.calls += calls
            if output.finish_reason is not None:
                text += choice.parser.flush()
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        if choice.finish_reason == "stop" and choice.calls:
            choice.finish_reason = "tool_calls"
        choice.stats = output.stats
        if output.kv is not None:
            self._transfer_params = self._lease(output.kv, len(self._call.prompts[choice.prompt]))
        if self._call.stream:
            self._write_frame(index, choice, output, text, calls)
        else:
            choice.text.append(text)
            choice.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            self._open -= 1
            if self._open == 0:
                self._finish()

    def _finish(self) -> None:
        self._end()
        responder = self._responder
        if not self._call.stream:
            responder.send_json(200, self._whole())
            return
        tail = b""
        if self._call.include_usage or self._call.include_stats:
            frame = self._head(True) | {"choices": [], "usage": self._usage()} | self._stats()
            tail = b"data: " + _encode(frame) + b"\n\n"
        responder.end(tail + b"data: [DONE]\n\n")

    def _fail(self, output: Output) -> None:
        """One generation failed: the others of the call end too, and the client hears why."""
        self._cancel_all()
        self._end()
        status, code, kind = 500, "engine_error", "server_error"
        if output.finish_reason == "overloaded":
            status, code, kind = 429, "queue_full", "rate_limit_error"
        elif output.finish_reason == "cancelled":
            status, code, kind = 503, "shutting_down", "server_error"
        message = output.error or "the engine is shutting down"
        if self._responder.started:
            body = error_body(status, message, kind=kind, code=code)
            self._responder.end(b"data: " + body + b"\n\n")
        else:
            headers = (("retry-after", "1"),) if status in (429, 503) else ()
            self._responder.send_error(status, message, kind=kind, code=code, headers=headers)

    def leave(self) -> None:
        """The client has gone."""
        self._cancel_all()
        self._end()

    def _cancel_all(self) -> None:
        for index, choice in enumerate(self._choices):
            if choice.finish_reason is None:
                self._engine.cancel(f"{self._id}-{index}")

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end()

    # What is written.

    def _head(self, stream: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": _OBJECTS[self._call.kind, stream],
            "created": self._created,
            "model": self._model_id,
        }

    def _write_frame(self, index: int, choice: Choice, output: Output, text: str, calls: list[ToolCall]) -> None:
        """One frame per token, also while its text is not ready, so that a reader sees the engine at work."""
        responder = self._responder
        if not responder.started:
            responder.start_sse()
        if self._call.kind == "chat":
            delta: dict[str, Any] = {} if choice.begun else {"role": "assistant"}
            delta["content"] = text
            if calls:
                first = len(choice.calls) - len(calls)
                delta["tool_calls"] = [{"index": first + i, **_call_json(call)} for i, call in enumerate(calls)]
            entry: dict[str, Any] = {"index": index, "delta": delta}
        else:
            if self._call.echo and not choice.begun:
                text = self._prompt_text(choice) + text
            entry = {"index": index, "text": text}
        choice.begun = True
        entry["logprobs"] = self._logprobs(choice, output.logprobs, text) if output.logprobs else None
        entry["finish_reason"] = choice.finish_reason
        if output.finish_reason is not None:
            entry["stop_reason"] = output.stop_reason
        responder.write(b"data: " + _encode(self._head(True) | {"choices": [entry]}) + b"\n\n")

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            entry: dict[str, Any] = {"index": index}
            if self._call.kind == "chat":
                entry["message"] = {"role": "assistant", "content": text if text or not choice.calls else None}
                if choice.calls:
                    entry["message"]["tool_calls"] = [_call_json(call) for call in choice.calls]
            else:
                entry["text"] = self._prompt_text(choice) + text if self._call.echo else text
            entry["logprobs"] = self._logprobs(choice, tuple(choice.logprobs), text) if choice.logprobs else None
            entry["finish_reason"] = choice.finish_reason
            entry["stop_reason"] = choice.stop_reason
            choices.append(entry)
        body = self._head(False) | {"choices": choices, "usage": self._usage()} | self._stats()
        if self._call.transfer.hold:
            body["kv_transfer_params"] = self._transfer_params
        return body

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many generations it has."""
        prompt = sum(len(tokens) for tokens in self._call.prompts)
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        output = sum(entry.output_tokens for entry in stats)
        firsts = self._choices[:: self._call.n]
        cached = sum(choice.stats.cached_tokens for choice in firsts if choice.stats is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _stats(self) -> dict[str, Any]:
        if not self._call.include_stats:
            return {}
        return {"stats": [msgspec.to_builtins(choice.stats) for choice in self._choices]}

    def _prompt_text(self, choice: Choice) -> str:
        return self._engine.model.detokenize(self._call.prompts[choice.prompt])

    def _logprobs(self, choice: Choice, entries: tuple[TokenLogprob, ...], text: str) -> dict[str, Any]:
        model = self._engine.model
        if self._call.kind == "chat":
            return {"content": [_chat_logprob(model, entry) for entry in entries]}
        offsets = []
        for entry in entries:
            offsets.append(choice.offset)
            choice.offset += len(model.piece(entry.token).decode("utf-8", errors="replace"))
        return {
            "tokens": [_token_text(model, entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{_token_text(model, token): value for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprob(model: LlamaModel, entry: TokenLogprob) -> dict[str, Any]:
    return _one_logprob(model, entry.token, entry.logprob) | {
        "top_logprobs": [_one_logprob(model, token, value) for token, value in entry.top]
    }


def _one_logprob(model: LlamaModel, token: int, value: float) -> dict[str, Any]:
    return {"token": _token_text(model, token), "logprob": value, "bytes": list(model.piece(token))}


def _token_text(model: LlamaModel, token: int) -> str:
    return model.piece(token).decode("utf-8", errors="replace")
