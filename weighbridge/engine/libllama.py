"""The C API of llama.cpp through cffi, without a compiler: declarations, loading and a check that they fit.

Struct layouts of llama.cpp move between builds. Each layout known here is tried against the library's own default
parameters, field by field; a library that fits none is refused, because a wrong layout corrupts memory silently.
cffi releases the GIL around every call. Nothing here is thread-safe beyond what llama.cpp promises: a model may be
shared, a context belongs to one thread at a time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

from weighbridge.core.errors import ModelError
from weighbridge.engine.devices import Device

WHEEL_VERSION = "2026.10.11549"

_COMMON = """
typedef int32_t llama_pos; typedef int32_t llama_token; typedef int32_t llama_seq_id;
typedef void *llama_memory_t; typedef void *ggml_backend_dev_t;
struct llama_model; struct llama_context; struct llama_vocab; struct llama_sampler; struct llama_adapter_lora;
typedef bool (*llama_progress_callback)(float progress, void *user_data);
typedef bool (*ggml_abort_callback)(void *data);
typedef void (*ggml_log_callback)(int level, const char *text, void *user_data);
struct llama_model_params {
    ggml_backend_dev_t *devices; const void *tensor_buft_overrides;
    int32_t n_gpu_layers; int split_mode; int load_mode; int lazy_mode; int32_t main_gpu; const float *tensor_split;
    llama_progress_callback progress_callback; void *progress_callback_user_data; const void *kv_overrides;
    bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch;
    int ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_orig_ctx; float defrag_thold;
    void *cb_eval; void *cb_eval_user_data;
    int type_k, type_v;
    %(after_types)s
    ggml_abort_callback abort_callback; void *abort_callback_data;
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers; size_t n_samplers; struct llama_context *ctx_other;
};
typedef struct llama_batch {
    int32_t n_tokens; llama_token *token; float *embd; llama_pos *pos; int32_t *n_seq_id; llama_seq_id **seq_id;
    int8_t *logits;
} llama_batch;
typedef struct { llama_token id; float logit; float p; } llama_token_data;
typedef struct { llama_token_data *data; size_t size; int64_t selected; bool sorted; } llama_token_data_array;

void llama_backend_init(void);
void llama_log_set(ggml_log_callback log_callback, void *user_data);
const char *llama_print_system_info(void);
bool llama_supports_gpu_offload(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_model *llama_model_load_from_file(const char *path_model, struct llama_model_params params);
void llama_model_free(struct llama_model *model);
const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model);
const char *llama_model_chat_template(const struct llama_model *model, const char *name);
int32_t llama_model_meta_val_str(const struct llama_model *model, const char *key, char *buf, size_t buf_size);
int32_t llama_model_desc(const struct llama_model *model, char *buf, size_t buf_size);
uint64_t llama_model_size(const struct llama_model *model);
uint64_t llama_model_n_params(const struct llama_model *model);
int32_t llama_model_n_ctx_train(const struct llama_model *model);
int32_t llama_model_n_embd(const struct llama_model *model);
int32_t llama_model_n_layer(const struct llama_model *model);
bool llama_model_has_encoder(const struct llama_model *model);
bool llama_model_is_recurrent(const struct llama_model *model);
bool llama_model_is_hybrid(const struct llama_model *model);
int32_t llama_model_n_swa(const struct llama_model *model);
int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab);
llama_token llama_vocab_bos(const struct llama_vocab *vocab);
llama_token llama_vocab_eos(const struct llama_vocab *vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab *vocab);
bool llama_vocab_is_eog(const struct llama_vocab *vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab *vocab, llama_token token);
int32_t llama_tokenize(const struct llama_vocab *vocab, const char *text, int32_t text_len, llama_token *tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab *vocab, llama_token token, char *buf, int32_t length,
                             int32_t lstrip, bool special);
struct llama_context *llama_init_from_model(struct llama_model *model, struct llama_context_params params);
void llama_free(struct llama_context *ctx);
uint32_t llama_n_ctx(const struct llama_context *ctx);
llama_memory_t llama_get_memory(const struct llama_context *ctx);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
void llama_memory_clear(llama_memory_t mem, bool data);
int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch);
void llama_synchronize(struct llama_context *ctx);
float *llama_get_logits(struct llama_context *ctx);
float *llama_get_embeddings_seq(struct llama_context *ctx, llama_seq_id seq_id);
size_t llama_state_seq_get_size(struct llama_context *ctx, llama_seq_id seq_id);
size_t llama_state_seq_get_data(struct llama_context *ctx, uint8_t *dst, size_t size, llama_seq_id seq_id);
size_t llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *src, size_t size, llama_seq_id dest_seq_id);
struct llama_sampler *llama_sampler_init_grammar(const struct llama_vocab *vocab, const char *grammar_str,
                                                 const char *grammar_root);
void llama_sampler_apply(struct llama_sampler *smpl, llama_token_data_array *cur_p);
void llama_sampler_accept(struct llama_sampler *smpl, llama_token token);
void llama_sampler_free(struct llama_sampler *smpl);
struct llama_adapter_lora *llama_adapter_lora_init(struct llama_model *model, const char *path_lora);
void llama_adapter_lora_free(struct llama_adapter_lora *adapter);
int32_t llama_set_adapters_lora(struct llama_context *ctx, struct llama_adapter_lora **adapters, size_t n_adapters,
                                float *scales);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char *ggml_backend_dev_name(ggml_backend_dev_t device);
const char *ggml_backend_dev_description(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t *free, size_t *total);
int ggml_backend_dev_type(ggml_backend_dev_t device);
void ggml_backend_load_all_from_path(const char *dir_path);
"""
# Fields that builds of one API generation have between type_v and abort_callback.
_LAYOUTS = {"moe_cache_size": "size_t moe_cache_size;", "plain": ""}

# What every layout must read from the library's own defaults; garbage here means that the layout is wrong.
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "n_samplers": 0,
}
_MODEL_DEFAULTS = {"n_gpu_layers": -1, "main_gpu": 0, "vocab_only": False, "check_tensors": False}
_POINTERS = ("cb_eval", "cb_eval_user_data", "abort_callback", "abort_callback_data", "samplers", "ctx_other")

# The C library keeps the last callback in a variable of the process and calls it from any context, also after the
# Library that set it is gone: a freed one would be a jump into garbage.
_LOG_CALLBACKS: list[Any] = []


class Library:
    """One loaded libllama: `ffi`, `lib`, and where it came from. Load once per process and share."""

    def __init__(self, path: Path | None = None) -> None:
        """Load `path` (a libllama, its ggml libraries beside it), or the one inside the xllamacpp wheel.

        Raises:
            ModelError: no library, it cannot be loaded, or its structs have a layout that is not known.
        """
        self.path = find_library() if path is None else path
        if not self.path.exists():
            raise ModelError(f"library {self.path}: no such file; leave `library` out to use the one of xllamacpp")
        self._logged: deque[str] = deque(maxlen=20)
        self._handles = _preload(self.path)
        self.ffi, self.lib, self.layout = self._open()
        log = self.ffi.callback("ggml_log_callback", self._on_log)
        _LOG_CALLBACKS.append(log)
        self.lib.llama_log_set(log, self.ffi.NULL)
        if self.lib.ggml_backend_dev_count() == 0:
            self.lib.ggml_backend_load_all_from_path(str(self.path.parent).encode())
        self.lib.llama_backend_init()

    def _open(self) -> tuple[Any, Any, str]:
        from cffi import FFI

        misfits = []
        for layout, fields in _LAYOUTS.items():
            ffi = FFI()
            ffi.cdef(_COMMON % {"after_types": fields})
            try:
                lib = ffi.dlopen(str(self.path))
                misfit = _misfit(ffi, lib)
            except (OSError, AttributeError) as error:
                raise ModelError(f"library {self.path} cannot be used: {error}") from None
            if misfit is None:
                return ffi, lib, layout
            misfits.append(f"{layout}: {misfit}")
        raise ModelError(
            f"library {self.path} is another build of llama.cpp than this program knows ({'; '.join(misfits)}); "
            f"install xllamacpp=={WHEEL_VERSION} or point `library` to a build of the same release"
        )

    def _on_log(self, level: int, text: Any, _: Any) -> None:
        if level >= 3:
            self._logged.append(self.ffi.string(text).decode(errors="replace").strip())

    def take_log(self) -> list[str]:
        """The warnings and errors that the library printed since the last call, oldest first, at most 20."""
        lines = list(self._logged)
        self._logged.clear()
        return lines

    @property
    def system_info(self) -> str:
        """The instruction sets that the CPU kernels were built for or chosen by, in the library's words."""
        return self.text(self.lib.llama_print_system_info())

    def devices(self) -> list[Device]:
        """Every compute device that the library found, in its order."""
        kinds = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}
        found = []
        for index in range(self.lib.ggml_backend_dev_count()):
            device = self.lib.ggml_backend_dev_get(index)
            kind = kinds.get(self.lib.ggml_backend_dev_type(device), "other")
            name = self.text(self.lib.ggml_backend_dev_name(device))
            found.append(Device(name, kind, self.text(self.lib.ggml_backend_dev_description(device))))
        return found

    def text(self, pointer: Any) -> str:
        """A C string as str; empty for NULL."""
        return "" if pointer == self.ffi.NULL else self.ffi.string(pointer).decode(errors="replace")


def find_library() -> Path:
    """The libllama inside the installed xllamacpp wheel. Raises ModelError where it is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ModelError("the embedded engine needs its extra: pip install 'weighbridge[engine]'")
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so")) or sorted(Path(spec.origin).parent.glob("*.pyd"))
    if not found:
        raise ModelError(f"no library inside the installed xllamacpp; install xllamacpp=={WHEEL_VERSION} again")
    return found[0]


def _preload(path: Path) -> list[Any]:
    """Load the ggml libraries that lie beside a libllama first, so that it finds them wherever it lies."""
    import ctypes

    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    handles = []
    for prefix in ("libggml-base", "libggml"):
        for candidate in sorted(path.parent.glob(f"{prefix}{suffix}")) + sorted(
            path.parent.glob(f"{prefix}.v*{suffix}")
        ):
            try:
                handles.append(ctypes.CDLL(str(candidate), mode=getattr(os, "RTLD_GLOBAL", 0)))
            except OSError as error:
                raise ModelError(f"library {candidate} cannot be loaded: {error}") from None
            break
    return handles


def _misfit(ffi: Any, lib: Any) -> str | None:
    """The first default that reads wrong under this layout, or None when all read right."""
    context = lib.llama_context_default_params()
    model = lib.llama_model_default_params()
    for params, expected in ((context, _CONTEXT_DEFAULTS), (model, _MODEL_DEFAULTS)):
        for name, value in expected.items():
            if getattr(params, name) != value:
                return f"{name} reads {getattr(params, name)}, expected {value}"
    for name in _POINTERS:
        if getattr(context, name) != ffi.NULL:
            return f"{name} is not NULL"
    return None
