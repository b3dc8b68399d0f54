"""What is known of an instance before any request runs on it, and what it reports of itself."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["mixed", "prefill", "decode"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Hard limits of one engine; None where the engine did not tell."""

    token_budget: int | None = None
    max_sequences: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    max_context: int | None = None
    prefix_caching: bool = True

    @property
    def kv_tokens(self) -> int | None:
        """KV capacity in tokens."""
        return None if self.kv_blocks is None else self.kv_blocks * self.block_size


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The two-rate view of a profile, in tokens per second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class StepTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Coefficients of the step-time model in seconds; see `weighbridge.cost.step` for the formula.

    `sequence_knots` holds (sequences, seconds) points of an engine whose step time bends in the number of decoding
    sequences; where there are any they replace `sequence_s * S`, and `sequence_s` is the mean slope up to the last.
    """

    base_s: float
    prefill_s: float
    attend_s: float = 0.0
    sequence_s: float = 0.0
    kv_s: float = 0.0
    scan_s: float = 0.0
    sequence_knots: tuple[tuple[float, float], ...] = ()


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Seconds for KV to come into an instance from one that computed the prompt: latency and so much a token."""

    latency_s: float = 0.0
    seconds_per_token: float = 0.0


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine with its own KV cache. `models` are the ids it answers to; `error` is the profile's relative error."""

    name: str
    models: tuple[str, ...] = ()
    pool: str = "default"
    kind: str = "openai"
    role: Role = "mixed"
    limits: Limits = Limits()
    rates: Rates | None = None
    step: StepTerms | None = None
    error: float | None = None
    takes_priority: bool = False
    """Whether the engine orders its own queue by a priority number."""
    transfer: Transfer | None = None
    """Of a decode instance: what handing KV over to it costs, where that was measured."""
    pairs_early: bool = False
    """Whether its prefill leg must start together with the decode leg, which is to be chosen at once."""
    preemption: tuple[str, ...] = ()
    """Which modes of `Preempt` the engine obeys: `swap`, `recompute`, or none."""
    warm_limit: int | None = None
    """Requests at once that it is given while it is new, as long as others can take the rest; None once it is warm."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine said of its own load. None where it does not tell; `kv_usage` is a fraction in [0, 1]."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    waiting_tokens: int | None = None
    generation_tokens_per_s: float | None = None
