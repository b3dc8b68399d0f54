"""From an OpenAI request body to what the engine computes: prompts, sampling, limits, output form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weighbridge.core.errors import RequestError
from weighbridge.engine import fields
from weighbridge.engine.chat import ChatTemplate, read_messages
from weighbridge.engine.fields import Body
from weighbridge.engine.grammar import Grammar
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.sampling import SamplingParams
from weighbridge.engine.structured import read_grammar
from weighbridge.engine.tools import Tools, read_tools
from weighbridge.engine.transfer import TransferAsked, read_transfer

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Call:
    """One API call: its prompts as token ids, `n` generations for each, and how to answer."""

    kind: Literal["chat", "completion"]
    prompts: list[list[int]]
    n: int
    max_tokens: int | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    include_stats: bool
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special: bool
    priority: int
    namespace: str
    echo: bool
    transfer: TransferAsked
    grammar: str | None
    tools: Tools | None


class RequestReader:
    """Reads bodies for one served model."""

    def __init__(
        self,
        model: LlamaModel,
        template: ChatTemplate,
        model_id: str,
        context_tokens: int,
        kv_hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._kv_hosts = kv_hosts
        self.model = model
        self.template = template
        self.model_id = model_id
        self.context_tokens = context_tokens

    def chat(self, body: Body) -> Call:
        """A `/v1/chat/completions` body."""
        tools = read_tools(body, self.template.takes_tools)
        return self._call("chat", body, [self.chat_tokens(body, tools)], tools)

    def chat_tokens(self, body: Body, tools: Tools | None, *, add_special: bool = False) -> list[int]:
        """The prompt that the template makes of messages and tools."""
        prompt = self.template.render(
            read_messages(body.get("messages")),
            tools=None if tools is None else tools.definitions,
            generate=fields.flag(body, "add_generation_prompt", True),
            options=fields.mapping(body, "chat_template_kwargs"),
        )
        return self.model.tokenize(prompt, add_special=add_special)

    def completion(self, body: Body) -> Call:
        """A `/v1/completions` body."""
        return self._call("completion", body, self.token_lists(body.get("prompt"), "prompt"))

    def check_model(self, body: Body) -> None:
        """Refuse another model's name with 404."""
        name = body.get("model")
        if name is not None and name != self.model_id:
            message = f"the model {name!r} is not served here; this instance serves {self.model_id!r}"
            raise RequestError(message, status=404, code="model_not_found", param="model")

    def token_lists(self, value: Any, name: str) -> list[list[int]]:
        """A string, a list of strings, a list of token ids, or a list of such lists, as lists of token ids."""
        if isinstance(value, str):
            return [self.model.tokenize(value)]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return [self.model.tokenize(item) for item in self._few(value, name)]
            if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
                return [self._ids(value, name)]
            if all(isinstance(item, list) and item for item in value):
                return [self._ids(item, name) for item in self._few(value, name)]
        raise RequestError(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            param=name,
        )

    def _few(self, value: list[Any], name: str) -> list[Any]:
        if len(value) > MAX_PROMPTS:
            raise RequestError(f"{name} may hold at most {MAX_PROMPTS} entries, not {len(value)}", param=name)
        return value

    def _ids(self, value: list[Any], name: str) -> list[int]:
        top = self.model.vocab_tokens
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < top:
                raise RequestError(f"{name} holds {item!r}, which is not a token id below {top}", param=name)
        return value

    def _call(
        self, kind: Literal["chat", "completion"], body: Body, prompts: list[list[int]], tools: Tools | None = None
    ) -> Call:
        stream_options = fields.mapping(body, "stream_options")
        stream = fields.flag(body, "stream")
        n = fields.integer(body, "n", 1, 1, MAX_CHOICES)
        assert n is not None
        transfer = read_transfer(body, self._kv_hosts)
        if (transfer.hold or transfer.remote is not None) and (n > 1 or len(prompts) > 1):
            message = "kv_transfer_params works with one prompt and one choice"
            raise RequestError(message, param="kv_transfer_params")
        return Call(
            kind=kind,
            prompts=[self._checked(prompt) for prompt in prompts],
            n=n,
            max_tokens=self._max_tokens(kind, body),
            sampling=self._sampling(kind, body),
            stream=stream,
            include_usage=fields.flag(stream_options, "include_usage"),
            include_stats=fields.flag(body, "include_stats"),
            stops=fields.strings(body, "stop", MAX_STOPS),
            stop_tokens=frozenset(self._stop_tokens(body)),
            ignore_eos=fields.flag(body, "ignore_eos"),
            include_stop=fields.flag(body, "include_stop_str_in_output"),
            skip_special=fields.flag(body, "skip_special_tokens", True),
            priority=fields.integer(body, "priority", 0, -(2**53), 2**53) or 0,
            namespace=fields.text(body, "cache_salt"),
            echo=fields.flag(body, "echo") if kind == "completion" else False,
            transfer=transfer,
            grammar=self._grammar(body, tools),
            tools=tools,
        )

    def _grammar(self, body: Body, tools: Tools | None) -> str | None:
        """The grammar to keep to; a bad one is refused here, before the request queues."""
        source = (tools.grammar() if tools is not None else None) or read_grammar(body)
        if source is not None:
            Grammar(self.model, source).close()
        return source

    def _checked(self, prompt: list[int]) -> list[int]:
        """A prompt that leaves room for at least one token. An empty one gets the begin mark."""
        if not prompt:
            if self.model.bos < 0:
                raise RequestError("the prompt is empty", param="prompt")
            prompt = [self.model.bos]
        if len(prompt) >= self.context_tokens:
            raise RequestError(
                f"this model's maximum context length is {self.context_tokens} tokens and the prompt has {len(prompt)} "
                "tokens, which leaves no room for output; shorten the prompt",
                code="context_length_exceeded",
                param="prompt",
            )
        return prompt

    def _max_tokens(self, kind: str, body: Body) -> int | None:
        """The output limit; the newer name wins, and what does not fit the context is cut there later."""
        old = fields.integer(body, "max_tokens", 16 if kind == "completion" else None, 1)
        return fields.integer(body, "max_completion_tokens", old, 1)

    def _stop_tokens(self, body: Body) -> list[int]:
        value = body.get("stop_token_ids")
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) and item >= 0 for item in value):
            raise RequestError("stop_token_ids must be a list of token ids", param="stop_token_ids")
        return value

    def _sampling(self, kind: str, body: Body) -> SamplingParams:
        seed = fields.integer(body, "seed", None, -(2**63), 2**64)
        return SamplingParams(
            temperature=fields.number(body, "temperature", 1.0, 0.0, 2.0),
            top_p=fields.number(body, "top_p", 1.0, 0.0, 1.0),
            top_k=max(0, fields.integer(body, "top_k", 0, -1, 2**31) or 0),
            min_p=fields.number(body, "min_p", 0.0, 0.0, 1.0),
            seed=None if seed is None else seed % 2**64,
            presence_penalty=fields.number(body, "presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=fields.number(body, "frequency_penalty", 0.0, -2.0, 2.0),
            repetition_penalty=fields.number(body, "repetition_penalty", 1.0, 0.01, 10.0),
            logit_bias=self._logit_bias(body),
            min_tokens=fields.integer(body, "min_tokens", 0, 0, self.context_tokens) or 0,
            logprobs=self._logprobs(kind, body),
        )

    def _logprobs(self, kind: str, body: Body) -> int | None:
        if kind == "completion":
            return fields.integer(body, "logprobs", None, 0, MAX_LOGPROBS)
        top = fields.integer(body, "top_logprobs", None, 0, MAX_LOGPROBS)
        if fields.flag(body, "logprobs"):
            return top or 0
        if top:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None

    def _logit_bias(self, body: Body) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in fields.mapping(body, "logit_bias").items():
            if not str(key).isdecimal() or int(key) >= self.model.vocab_tokens:
                raise RequestError(f"logit_bias names {key!r}, which is not a token id", param="logit_bias")
            bias[int(key)] = fields.number({"logit_bias": value}, "logit_bias", 0.0, -100.0, 100.0)
        return bias
