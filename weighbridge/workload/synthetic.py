"""Synthetic workloads: an arrival process, a mix of request classes, optional prefixes and tenants."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge.workload.arrivals import Arrivals
from weighbridge.workload.lengths import Lengths, Lognormal
from weighbridge.workload.prefixes import Conversation, PrefixTree, extend, mix64
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One kind of work in a mix: its share, its lengths and its tier with that tier's latency bounds (None = none)."""

    kind: str
    weight: float
    prompt: Lengths
    output: Lengths
    tier: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests drawn independently of each other; `tenants` are (name, weight) pairs.

    With `prefixes`, the shared tokens come before the drawn prompt tokens.
    """

    arrivals: Arrivals
    classes: tuple[RequestClass, ...]
    prefixes: PrefixTree | None = None
    tenants: tuple[tuple[str, float], ...] = ()

    def generate(
        self, seed: int, *, count: int | None = None, duration_s: float | None = None
    ) -> Iterator[TraceRequest]:
        """Requests in arrival order, until `count` or `duration_s` (one of them must be given) is reached.

        Arrivals, class, prompt length, output length, prefix and tenant each draw from a stream of their own.
        """
        if count is None and duration_s is None:
            raise ValueError("give a count or a duration")
        streams = Streams(seed)
        times = self.arrivals.times(streams.get("arrivals"))
        if count is not None:
            times = itertools.islice(times, count)
        if duration_s is not None:
            times = itertools.takewhile(lambda at: at <= duration_s, times)
        if len(self.classes) == 1 and self.prefixes is None and not self.tenants:
            return self._plain(times, streams)
        return self._mixed(times, streams)

    def _plain(self, times: Iterator[float], streams: Streams) -> Iterator[TraceRequest]:
        only = self.classes[0]
        prompts, outputs = streams.get("prompt"), streams.get("output")
        draw_prompt, draw_output = only.prompt.draw, only.output.draw
        for at in times:
            yield TraceRequest(at, draw_prompt(prompts), draw_output(outputs), only.kind, only.tier)

    def _mixed(self, times: Iterator[float], streams: Streams) -> Iterator[TraceRequest]:
        kinds, prompts, outputs = streams.get("class"), streams.get("prompt"), streams.get("output")
        prefixes, tenants = streams.get("prefix"), streams.get("tenant")
        class_weights = list(itertools.accumulate(c.weight for c in self.classes))
        tenant_names = [name for name, _ in self.tenants]
        tenant_weights = list(itertools.accumulate(weight for _, weight in self.tenants))
        tree = self.prefixes
        for k, at in enumerate(times):
            chosen = kinds.choices(self.classes, cum_weights=class_weights)[0]
            prompt, output = chosen.prompt.draw(prompts), chosen.output.draw(outputs)
            tenant = tenants.choices(tenant_names, cum_weights=tenant_weights)[0] if tenant_names else ""
            blocks: tuple[int, ...] = ()
            size = 0
            if tree is not None:
                size = tree.block_tokens
                prompt += tree.tokens
                shared = tree.draw(prefixes)
                blocks = extend(shared, prompt // size - len(shared), mix64(k + 1))
            yield TraceRequest(at, prompt, output, chosen.kind, chosen.tier, tenant, "", blocks, size)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Multi-turn sessions: each turn sends the whole history (prompts and answers) and a new user message.

    Sessions start by `starts`; the number of turns is geometric with mean `turns`; turns are `think_s` apart on
    average, counted from the turn before (open loop: a slow answer does not delay the next turn).
    """

    starts: Arrivals
    message: Lengths
    output: Lengths
    turns: float = 4.0
    think_s: float = 20.0
    system_tokens: int = 0
    block_tokens: int = 16
    max_prompt_tokens: int = 8_000
    tier: str = ""

    def generate(self, seed: int, *, duration_s: float) -> Iterator[TraceRequest]:
        """Requests of all sessions that start within `duration_s`, merged in arrival order up to that time."""
        streams = Streams(seed)
        messages, outputs = streams.get("prompt"), streams.get("output")
        turns, thinking = streams.get("turns"), streams.get("think")
        starts = enumerate(itertools.takewhile(lambda t: t <= duration_s, self.starts.times(streams.get("arrivals"))))
        pending: list[tuple[float, int, Conversation]] = []
        upcoming = next(starts, None)
        while upcoming is not None or pending:
            if upcoming is not None and (not pending or upcoming[1] <= pending[0][0]):
                index, at = upcoming
                history = Conversation(mix64(index + 1), self.block_tokens)
                if self.system_tokens:
                    history.tokens = self.system_tokens
                    history.blocks = extend((), self.system_tokens // self.block_tokens, 1)
                upcoming = next(starts, None)
            else:
                at, index, history = heapq.heappop(pending)
            if at > duration_s:
                continue
            blocks = history.grow(self.message.draw(messages))
            output = self.output.draw(outputs)
            yield TraceRequest(
                at, history.tokens, output, "turn", self.tier, "", f"s{index}", blocks, self.block_tokens
            )
            history.grow(output)
            if history.tokens < self.max_prompt_tokens and turns.random() > 1.0 / self.turns:
                heapq.heappush(pending, (at + thinking.expovariate(1.0 / self.think_s), index, history))


def with_heterogeneity(classes: tuple[RequestClass, ...], degree: float) -> tuple[RequestClass, ...]:
    """The mix with its spread of prompt length, output length and latency bounds scaled by `degree`.

    0 makes every request alike, 1 leaves the mix as it is, more exaggerates it. Spreads are scaled on a logarithmic
    scale; mean prompt and output tokens of the whole mix stay what they were, so the load does not change.
    Needs lognormal classes.
    """
    if degree < 0:
        raise ValueError("the degree of heterogeneity is 0 or more")
    total = sum(c.weight for c in classes)

    def spread(pick: str) -> list[Lognormal]:
        lengths = [getattr(c, pick) for c in classes]
        if not all(isinstance(length, Lognormal) for length in lengths):
            raise ValueError("only lognormal lengths can be made more or less heterogeneous")
        overall = sum(c.weight * length.mean for c, length in zip(classes, lengths, strict=True)) / total
        means = [overall ** (1.0 - degree) * length.mean**degree for length in lengths]
        scaled = sum(c.weight * m for c, m in zip(classes, means, strict=True)) / total
        return [
            Lognormal(m * overall / scaled, length.sigma * degree, length.low, length.high)
            for m, length in zip(means, lengths, strict=True)
        ]

    def bounds(pick: str) -> list[float | None]:
        values = [getattr(c, pick) for c in classes]
        known = [(c.weight, v) for c, v in zip(classes, values, strict=True) if v is not None]
        if not known:
            return values
        middle = math.exp(sum(w * math.log(v) for w, v in known) / sum(w for w, _ in known))
        return [None if v is None else middle ** (1.0 - degree) * v**degree for v in values]

    prompts, outputs, ttfts, tpots = spread("prompt"), spread("output"), bounds("ttft_slo_s"), bounds("tpot_slo_s")
    return tuple(
        RequestClass(c.kind, c.weight, prompts[k], outputs[k], c.tier, ttfts[k], tpots[k])
        for k, c in enumerate(classes)
    )
