"""Whether the generator itself kept up: a run whose client was late says little about the server."""

from __future__ import annotations

import math

import msgspec

from weighbridge.bench.load import LoadResult
from weighbridge.core.metrics import Distribution, distribution

LAG_LIMIT_S = 0.005
LAG_SHARE = 0.01
JUMP_LIMIT_S = 0.5


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`valid` unless one of `reasons` holds. `warnings` are worth knowing but spoil nothing.

    `send_lag_s` is how late requests left the generator, `loop_lag_s` how late its event loop came round; the limit on
    the 99th percentile of the former is 5 ms, or 1 % of the median end-to-end time where that is more.
    """

    valid: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    send_lag_s: Distribution
    loop_lag_s: Distribution
    lag_limit_s: float
    cpu_share: float
    clock_jump_s: float

    @property
    def word(self) -> str:
        """VALID or INVALID."""
        return "VALID" if self.valid else "INVALID"


def judge(result: LoadResult, planned: int, *, processes: int = 1, max_lag_s: float | None = None) -> Verdict:
    """Judge a run of `planned` requests. Latency counts from the schedule, so lag makes a server look worse."""
    records = result.records
    lag = distribution(r.lag_s for r in records if r.sent_s is not None)
    loop_lag = distribution(result.loop_lags)
    e2e = distribution(v for r in records if (v := r.e2e_s) is not None)
    limit = max_lag_s if max_lag_s is not None else max(LAG_LIMIT_S, LAG_SHARE * (e2e.p50 if e2e.count else 0.0))
    cpu = result.cpu_s / result.wall_s / processes if result.wall_s > 0 else math.nan
    reasons, warnings = [], []
    if lag.count and lag.p99 > limit:
        reasons.append(
            f"the generator was late: send lag p99 {1e3 * lag.p99:.1f} ms exceeds {1e3 * limit:.1f} ms; "
            "lower the rate, or use more --processes on idle processors"
        )
    if len(records) < planned:
        reasons.append(f"only {len(records)} of {planned} scheduled requests were offered")
    if result.failure and "died" in result.failure:
        reasons.append(result.failure)
    elif result.failure:
        warnings.append(result.failure)
    if cpu > 0.9:
        warnings.append(f"the generator used {100 * cpu:.0f} % of a processor; use more --processes")
    if abs(result.clock_jump_s) > JUMP_LIMIT_S:
        warnings.append(
            f"the wall clock jumped by {result.clock_jump_s:+.1f} s; latencies are unaffected (monotonic clock)"
        )
    guessed = sum(r.status == "ok" and r.tokens_from == "frames" for r in records)
    if guessed:
        warnings.append(f"{guessed} replies had no usage: their output tokens are counted from frames")
    failed = sum(r.status == "failed" for r in records)
    if records and failed > 0.01 * len(records):
        warnings.append(f"{failed} of {len(records)} requests failed; percentiles of the rest alone mislead")
    return Verdict(
        valid=not reasons,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        send_lag_s=lag,
        loop_lag_s=loop_lag,
        lag_limit_s=limit,
        cpu_share=cpu,
        clock_jump_s=result.clock_jump_s,
    )
