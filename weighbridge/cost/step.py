"""Step time of an instance in seconds, and its closed form over a run of decode steps.

    t = base + prefill*P + attend*A + sequence*S + kv*K + scan*T*C

P prefill tokens in the step, A sum over prefill tokens of the context each attends to, S decoding sequences,
K KV tokens that decoding reads, T = P + S, C used cells of a unified cache. All coefficients are >= 0 seconds.
An engine whose step time bends in S (kernels for small batches, captured graph sizes) has a piecewise linear curve in
place of sequence*S.
"""

from __future__ import annotations

from weighbridge.core.instance import Rates, StepTerms

COEFFICIENTS = ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s", "scan_s")


def sequence_seconds(terms: StepTerms, sequences: float) -> float:
    """Seconds that `sequences` decoding sequences add to a step: sequence*S, or the curve through (0, 0) and the knots.

    Beyond the last knot the curve goes on with the slope of its last piece.
    """
    if not terms.sequence_knots:
        return terms.sequence_s * sequences
    left_count = left_s = 0.0
    slope = 0.0
    for count, seconds in terms.sequence_knots:
        slope = (seconds - left_s) / (count - left_count)
        if sequences <= count:
            break
        left_count, left_s = count, seconds
    return left_s + slope * (sequences - left_count)


def step_seconds(
    terms: StepTerms,
    *,
    prefill_tokens: int = 0,
    attended_tokens: int = 0,
    sequences: int = 0,
    kv_tokens: int = 0,
    used_cells: int = 0,
) -> float:
    """Seconds of one step that holds the given work."""
    return (
        terms.base_s
        + terms.prefill_s * prefill_tokens
        + terms.attend_s * attended_tokens
        + sequence_seconds(terms, sequences)
        + terms.kv_s * kv_tokens
        + terms.scan_s * (prefill_tokens + sequences) * used_cells
    )


def decode_run_seconds(terms: StepTerms, *, sequences: int, kv_tokens: int, steps: int) -> float:
    """Seconds of `steps` pure decode steps in a row: KV grows by `sequences` tokens each step (scan term excluded).

    Closed form of sum_{j=0}^{k-1} (base + sequence*S + kv*(K + j*S)).
    """
    first = terms.base_s + sequence_seconds(terms, sequences) + terms.kv_s * kv_tokens
    return steps * first + terms.kv_s * sequences * (steps * (steps - 1) // 2)


def attended_tokens(start: int, count: int) -> int:
    """Context that `count` prefill tokens attend to when `start` tokens come before them, each including itself."""
    return count * start + count * (count + 1) // 2


def rates_of(terms: StepTerms, *, token_budget: int = 512, batch: int = 1, context_tokens: int = 256) -> Rates:
    """The two-rate view: prefill at a full budget, decode of one sequence among `batch` at the given context."""
    prefill = step_seconds(terms, prefill_tokens=token_budget, attended_tokens=attended_tokens(0, token_budget))
    decode = step_seconds(terms, sequences=batch, kv_tokens=batch * context_tokens)
    return Rates(prefill_tokens_per_s=token_budget / prefill, decode_tokens_per_s=batch / decode)
