"""How sizes are tried: bracket and bisect one kind, a few splits for prefill and decode, mixed kinds by cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from weighbridge.cost.step import attended_tokens, step_seconds
from weighbridge.plan.fleet import CHECK_SEED, Answer, Bench, Composition, Trial, stable_size, usable

SPLITS = 3
PROMISING = 0.9
"""Mixed fleets are tried from this share of the capacity that the single-kind answers suggest."""


def find(bench: Bench, answer: Answer) -> None:
    """Fill in `answer` for its policy; what was tried stays there when time runs out."""
    slots = bench.question.slots
    if bench.question.disaggregated:
        _one_kind(bench, answer, lambda size: _splits(bench, size), least=2, start=_pair_start(bench))
    elif len(slots) == 1:
        start = stable_size(bench.question, slots[0])
        _one_kind(bench, answer, lambda size: [(size,)], least=1, start=start)
    else:
        _several_kinds(bench, answer)


def _one_kind(
    bench: Bench, answer: Answer, compositions: Callable[[int], list[Composition]], least: int, start: int
) -> None:
    """Smallest size that holds, by bracketing from `start` and bisecting; then the check on fresh seeds."""
    known: dict[int, Trial] = {}

    def holds(size: int) -> bool:
        if size not in known:
            found = bench.trials([(answer.policy, c) for c in compositions(size)])
            answer.tried += found
            known[size] = max(found, key=lambda t: t.attainment.mean)
        return bench.holds(known[size])

    most = bench.question.max_instances
    size = min(max(start, least), most)
    if holds(size):
        high, low = size, least - 1
        while high > least:
            step = max(least, high - max(1, high // 4))
            if not holds(step):
                low = step
                break
            high = step
    else:
        low = size
        while True:
            if low >= most:
                answer.note = f"{most} instances are not enough; raise --max-instances"
                return
            high = min(most, low + max(1, low // 3))
            if holds(high):
                break
            low = high
    while high - low > 1:
        middle = (high + low) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    answer.best = known[high]
    _check(bench, answer, holds, known, most)


def _check(bench: Bench, answer: Answer, holds: Callable[[int], bool], known: dict[int, Trial], most: int) -> None:
    """Simulate the answer and one instance fewer on fresh seeds; a size that fails there is given up for the next."""
    fresh = range(CHECK_SEED, CHECK_SEED + bench.question.seeds)
    while answer.best is not None:
        size = answer.best.size
        smaller = known.get(size - 1)
        wanted = [(answer.policy, answer.best.composition)]
        if smaller is not None:
            wanted.append((answer.policy, smaller.composition))
        found = bench.trials(wanted, fresh)
        answer.check, answer.one_fewer = found[0], found[1] if smaller is not None else None
        if bench.holds(found[0]) or size >= most:
            return
        holds(size + 1)
        answer.best = known[size + 1]


def _splits(bench: Bench, size: int) -> list[Composition]:
    """The few divisions of `size` into prefill and decode that come closest to the ratio of their work."""
    share = _prefill_share(bench)
    ideal = share * size
    options = sorted(range(1, size), key=lambda p: (abs(p - ideal), p))[:SPLITS]
    return [(p, size - p) for p in sorted(options)]


def _prefill_share(bench: Bench) -> float:
    """Prefill seconds over all seconds of work, on the slots' own costs (decode at a batch of 32)."""
    prefill, decode = bench.question.slots[0].device, bench.question.slots[1].device
    first = second = 0.0
    for r in usable(bench.question.workload.path):
        steps = -(-r.prompt_tokens // prefill.scheduler.token_budget)
        first += steps * prefill.terms.base_s + prefill.terms.prefill_s * r.prompt_tokens
        first += prefill.terms.attend_s * attended_tokens(0, r.prompt_tokens)
        context = r.prompt_tokens + r.output_tokens // 2
        second += r.output_tokens * step_seconds(decode.terms, sequences=32, kv_tokens=32 * context) / 32
    return min(0.95, max(0.05, first / (first + second)))


def _pair_start(bench: Bench) -> int:
    return 1 + max(stable_size(bench.question, slot) for slot in bench.question.slots)


def _several_kinds(bench: Bench, answer: Answer) -> None:
    """Cheapest composition of several kinds: each kind alone first, then mixed ones that cost less, cheapest first.

    Without prices, every instance costs 1.
    """
    slots = bench.question.slots
    prices = [slot.device.price_per_hour or 1.0 for slot in slots]
    alone: list[int | None] = []
    best: tuple[float, Trial] | None = None
    for k, slot in enumerate(slots):
        single = Answer(answer.policy)

        def of_kind(size: int, place: int = k) -> list[Composition]:
            return [tuple(size if j == place else 0 for j in range(len(slots)))]

        _one_kind(bench, single, of_kind, least=1, start=stable_size(bench.question, slot))
        answer.tried += single.tried
        alone.append(single.best.size if single.best is not None else None)
        if single.best is not None:
            cost = prices[k] * single.best.size
            if best is None or cost < best[0]:
                best = (cost, single.best)
                answer.best, answer.check, answer.one_fewer = single.best, single.check, single.one_fewer
    if best is None:
        answer.note = "no single kind is enough up to --max-instances"
        return
    for composition in _cheaper(alone, prices, best[0]):
        trial = bench.trial(answer.policy, composition)
        answer.tried.append(trial)
        if bench.holds(trial):
            fresh = range(CHECK_SEED, CHECK_SEED + bench.question.seeds)
            check = bench.trial(answer.policy, composition, fresh)
            if bench.holds(check):
                answer.best, answer.check, answer.one_fewer = trial, check, None
                return


def _cheaper(alone: Sequence[int | None], prices: Sequence[float], below: float) -> list[Composition]:
    """Mixed compositions cheaper than `below` with enough capacity by the single-kind answers, cheapest first."""
    ranges = [range(size + 1) if size is not None else range(1) for size in alone]
    found = []
    for composition in itertools.product(*ranges):
        if sum(count > 0 for count in composition) < 2:
            continue
        cost = sum(price * count for price, count in zip(prices, composition, strict=True))
        capacity = sum(count / size for count, size in zip(composition, alone, strict=True) if size)
        if cost < below - 1e-9 and capacity >= PROMISING:
            found.append((cost, -capacity, composition))
    return [composition for _, _, composition in sorted(found)]
