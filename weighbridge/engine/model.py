"""A loaded model: vocabulary, text to tokens and back, metadata. Shared by all contexts of a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.core.errors import ModelError
from weighbridge.engine.gguf import ModelFile, available_memory_bytes, read_model_file
from weighbridge.engine.libllama import Library


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to load a model. `gpu_layers` is how many layers go to a GPU (-1 all of them, 0 none, the CPU).

    `device` is the index of the device they go to; None leaves it to the library, which takes all that it has.
    """

    path: Path
    gpu_layers: int = 0
    context_tokens: int = 0  # KV tokens that will be allocated, for the memory check
    kv_value_bytes: float = 2.0
    device: int | None = None


class LlamaModel:
    """Weights and vocabulary. Reading the vocabulary is safe from any thread; `close` is not."""

    def __init__(
        self, library: Library, options: ModelOptions, progress: Callable[[float], None] | None = None
    ) -> None:
        """Check the file, then load it; `progress` hears fractions from 0 to 1.

        Raises:
            ModelError: bad file, unsupported architecture, or not enough memory; the message says which.
        """
        self.library = library
        self.file = read_model_file(options.path)
        if options.gpu_layers == 0:
            check_memory(self.file, options)
        ffi, lib = library.ffi, library.lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = options.gpu_layers
        if options.device is not None:
            chosen = ffi.new("ggml_backend_dev_t[]", [lib.ggml_backend_dev_get(options.device), ffi.NULL])
            params.devices = chosen

        @ffi.callback("llama_progress_callback")  # type: ignore[untyped-decorator, unused-ignore]
        def on_progress(fraction: float, _: Any) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        params.progress_callback = on_progress
        library.take_log()
        self._model = lib.llama_model_load_from_file(str(options.path).encode(), params)
        if self._model == ffi.NULL:
            raise ModelError(_load_failure(self.file, library.take_log()))
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.vocab_tokens: int = lib.llama_vocab_n_tokens(self._vocab)
        self.trained_context_tokens: int = lib.llama_model_n_ctx_train(self._model)
        self.embedding_values: int = lib.llama_model_n_embd(self._model)
        self.parameters: int = lib.llama_model_n_params(self._model)
        self.bos: int = lib.llama_vocab_bos(self._vocab)
        self.eos: int = lib.llama_vocab_eos(self._vocab)
        self._pieces: list[bytes | None] = [None] * self.vocab_tokens
        self._ends: frozenset[int] = frozenset(
            token for token in range(self.vocab_tokens) if lib.llama_vocab_is_eog(self._vocab, token)
        )

    @property
    def handle(self) -> Any:
        """The library's model, for making contexts."""
        return self._model

    @property
    def vocab(self) -> Any:
        """The library's vocabulary, for grammars."""
        return self._vocab

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self._ends

    @property
    def trimmable(self) -> bool:
        """Whether the tail of a sequence's KV can be cut off: not with recurrent state or sliding windows."""
        lib = self.library.lib
        return not (
            lib.llama_model_is_recurrent(self._model)
            or lib.llama_model_is_hybrid(self._model)
            or lib.llama_model_n_swa(self._model) > 0
        )

    def describe(self) -> str:
        """Architecture, size and quantisation in the library's words, such as `llama 135M Q4_1`."""
        buffer = self.library.ffi.new("char[]", 256)
        self.library.lib.llama_model_desc(self._model, buffer, 256)
        return self.library.text(buffer)

    def chat_template(self) -> str | None:
        """The Jinja source of the file's default chat template."""
        text = self.library.text(self.library.lib.llama_model_chat_template(self._model, self.library.ffi.NULL))
        return text or None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; `parse_special` reads control tokens such as `<|im_end|>` as what they are."""
        data = text.encode("utf-8", errors="surrogatepass")
        size = len(data) + 8
        buffer = self.library.ffi.new("llama_token[]", size)
        count = self.library.lib.llama_tokenize(self._vocab, data, len(data), buffer, size, add_special, parse_special)
        if count < 0:
            raise ModelError(f"the text cannot be tokenized ({count})")
        return list(buffer[0:count])

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for; control tokens as written, such as `<|im_end|>`."""
        known = self._pieces[token]
        if known is None:
            ffi = self.library.ffi
            size = 64
            while True:
                buffer = ffi.new("char[]", size)
                count = self.library.lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
                if count >= 0:
                    break
                size = -count
            known = bytes(ffi.buffer(buffer, count))
            self._pieces[token] = known
        return known

    def is_control(self, token: int) -> bool:
        """Whether a token stands for a mark rather than text."""
        return bool(self.library.lib.llama_vocab_is_control(self._vocab, token))

    def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Free the weights; every context must be closed before."""
        if self._model != self.library.ffi.NULL:
            self.library.lib.llama_model_free(self._model)
            self._model = self.library.ffi.NULL


def check_memory(file: ModelFile, options: ModelOptions) -> None:
    """Refuse a model that with its KV cache needs more memory than is available, before anything is allocated."""
    free = available_memory_bytes()
    kv = file.kv_bytes(options.context_tokens, options.kv_value_bytes)
    if free is not None and file.size_bytes + kv > free:
        raise ModelError(
            f"model {file.path} needs {_gib(file.size_bytes)} and {_gib(kv)} of KV cache for "
            f"{options.context_tokens} tokens, and {_gib(free)} are free; lower --context or --slots, or take a "
            "smaller model"
        )


def _load_failure(file: ModelFile, log: list[str]) -> str:
    for line in log:
        if "unknown model architecture" in line:
            return f"model {file.path}: architecture {file.architecture!r} is not supported by this libllama"
    reason = next((line for line in log if "error" in line.lower()), log[-1] if log else "no reason given")
    return f"model {file.path} cannot be loaded: {reason}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
