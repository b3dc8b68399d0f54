"""Which instances could take a request, and what it would mean there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

from weighbridge.core.actions import Leg
from weighbridge.core.decision import Candidate, Decision, ShadowChoice
from weighbridge.core.instance import InstanceSpec
from weighbridge.core.request import Request
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.policy import Choice, Option, View
from weighbridge.routing.prefix_index import match_all
from weighbridge.routing.room import Room

REFRESH_S = 1.0
UNEVEN = 1.5
"""Ratio of decode steps from which instances of one pool are not taken for equal."""
NEEDS_PREFILL = frozenset({"sglang"})
"""Kinds whose decode instances answer nothing without a prefill instance."""
MOST_POOLS = 256
"""Pools that are kept, one per model name. Clients may think of ever new names where engines take any."""
NO_TERMS: dict[str, float] = {}


def computes_alone(spec: InstanceSpec) -> bool:
    """Whether an instance can compute a request from its prompt to its end without another."""
    return spec.role == "mixed" or (spec.role == "decode" and spec.kind not in NEEDS_PREFILL)


def can_serve(specs: Collection[InstanceSpec]) -> bool:
    """Whether these instances, all of one model, can answer a request: one alone, or a pair."""
    return any(map(computes_alone, specs)) or {"prefill", "decode"} <= {spec.role for spec in specs}


class Pool:
    """The instances that are up and serve one model, by what they may be asked for."""

    __slots__ = (
        "alone",
        "base_s",
        "decode",
        "decode_room",
        "entry",
        "fresh_until_s",
        "indexes",
        "max_context",
        "room",
        "seconds_per_token",
        "uneven",
        "warming",
    )

    def __init__(self, model: str, fleet: Fleet, entry_kv: float, decode_kv: float) -> None:
        serving = [i for i in fleet if i.up and _serves(i, model)]
        self.indexes = frozenset(i.index for i in serving)
        """Of all of them."""
        self.decode = [i for i in serving if i.spec.role == "decode"]
        self.entry = [i for i in serving if i.spec.role == "mixed" or (i.spec.role == "prefill" and self.decode)]
        """Where a request may start: mixed instances, and prefill instances if something can decode; where there is
        neither, decode instances of engines that compute a prompt themselves when nobody hands them its KV."""
        if not self.entry:
            self.entry = [i for i in self.decode if computes_alone(i.spec)]
        paired = any(i.spec.role == "prefill" for i in self.entry)
        self.alone = [i for i in serving if paired and computes_alone(i.spec)]
        """Of a pool with pairs: who needs none; of any other pool nobody."""
        contexts = [i.spec.limits.max_context for i in (*self.entry, *self.decode)]
        self.max_context = min((limit for limit in contexts if limit is not None), default=None)
        """The smallest context limit of all, so that most requests need no look at each one."""
        self.warming = any(i.spec.warm_limit is not None for i in (*self.entry, *self.decode))
        self.room = Room(self.entry, entry_kv)
        self.decode_room = Room(self.decode, decode_kv)
        self.seconds_per_token = self.base_s = 0.0
        """Prefill seconds per token and base of a step on the fastest instance; 0 where a profile is unconfirmed."""
        self.fresh_until_s = float("-inf")
        self.uneven = False
        """Whether some are so much slower that waiting for another may be better than starting there."""

    def refresh(self, now_s: float) -> None:
        """Look at the speeds again: they are corrected by live traffic."""
        self.fresh_until_s = now_s + REFRESH_S
        costs = [i.cost for i in self.entry if i.cost is not None]
        complete = bool(costs) and len(costs) == len(self.entry) and all(c.seen for c in costs)
        self.seconds_per_token = min(c.prefill_s for c in costs) if complete else 0.0
        self.base_s = min(c.base_s for c in costs) if complete else 0.0
        steps = [c.base_s + c.sequence_s for c in costs]
        self.uneven = len(costs) == len(self.entry) > 1 and max(steps) > UNEVEN * min(steps)
        self.room.refresh()

    def without(self, fitting: list[Instance]) -> list[Instance]:
        """Where a request may start, those in `fitting` left out; nothing where all are equally fast."""
        if not self.uneven or len(fitting) == len(self.entry):
            return []
        have = {instance.index for instance in fitting}
        return [instance for instance in self.entry if instance.index not in have]


class Candidates:
    """Pools by model, and one reusable Option per instance."""

    __slots__ = ("_decode_kv", "_entry_kv", "_everyone", "_fleet", "_match", "_matched", "_matched_version",
                 "_options", "_pools")  # fmt: skip

    def __init__(self, fleet: Fleet, entry_kv: float, decode_kv: float) -> None:
        self._fleet = fleet
        self._entry_kv, self._decode_kv = entry_kv, decode_kv
        self._everyone = 0
        self._pools: dict[str, Pool] = {}
        self._options: list[Option] = []
        self._matched: Request | None = None
        self._matched_version = -1
        self._match: dict[int, int] = {}

    def fleet_changed(self) -> None:
        """An instance came, went or changed: pools are built anew when next asked for."""
        self._pools.clear()
        self._measure()
        self._everyone = (1 << self._fleet.places.count) - 1
        for instance in self._fleet:
            index = instance.index
            if index == len(self._options):
                self._options.append(Option(instance, cached_tokens=0, prefill_tokens=0, decode_tokens=0))
            elif self._options[index].instance is not instance:  # it has the place of one that is gone
                self._options[index] = Option(instance, cached_tokens=0, prefill_tokens=0, decode_tokens=0)

    def refresh(self, pool: Pool, now_s: float) -> None:
        """Look at the speeds again: they are corrected by live traffic."""
        pool.refresh(now_s)
        self._measure()

    def _measure(self) -> None:
        self._fleet.offered.capacity_tokens_per_s = sum(
            1.0 / i.cost.prefill_s
            for i in self._fleet
            if i.up and i.spec.role != "decode" and i.cost is not None and i.cost.prefill_s > 0
        )

    def pool(self, model: str) -> Pool:
        """The pool of a model."""
        pool = self._pools.get(model)
        if pool is None:
            if len(self._pools) >= MOST_POOLS:
                del self._pools[next(iter(self._pools))]
            pool = self._pools[model] = Pool(model, self._fleet, self._entry_kv, self._decode_kv)
        return pool

    def usable(
        self, request: Request, pool: Pool, instances: list[Instance], failed_on: frozenset[str]
    ) -> list[Instance]:
        """Those of `instances` whose context holds the prompt and on which it has not failed before.

        Where no context holds it, those with the largest: the prompt's size may be an estimate, and only the engine
        can refuse it with the exact numbers.
        """
        if failed_on:
            # when every other instance is out as well, a second try on one that failed beats none
            instances = [i for i in instances if i.name not in failed_on] or instances
        if pool.warming:
            instances = [i for i in instances if not _warming(i)] or instances
        if pool.max_context is not None and request.prompt_tokens > pool.max_context:
            fitting = [i for i in instances if not _too_long(request, i)]
            return fitting or _largest_context(instances)
        return instances

    def cached(self, request: Request) -> dict[int, int]:
        """Prompt tokens that each instance is thought to hold, by index, for those that hold any."""
        if not request.prefix_hashes:
            return {}
        # asked at arrival, for room and for the placement itself: mostly nothing has changed in between
        if request is self._matched and self._matched_version == self._fleet.prefix_version:
            return self._match
        size = request.prefix_block_tokens
        depths = match_all(self._fleet.prefix_holders, request.prefix_hashes, self._everyone)
        self._match = {index: depth * size for index, depth in depths.items()}
        self._matched, self._matched_version = request, self._fleet.prefix_version
        return self._match

    def options(
        self, request: Request, instances: Sequence[Instance], leg: Leg, decode_tokens: int, cached: dict[int, int]
    ) -> list[Option]:
        """One Option per instance; valid until the next call."""
        options = []
        known, prompt = self._options, request.prompt_tokens
        if leg == "prefill":
            decode_tokens = 0
        for instance in instances:
            option = known[instance.index]
            hit = cached.get(instance.index, 0) if cached else 0
            if hit:
                # engines reuse whole blocks of their own size, and always compute the last prompt token: its logits
                # give the first output token
                hit -= hit % instance.block_size
                if hit >= prompt:
                    hit = prompt - 1
            option.cached_tokens = hit
            option.prefill_tokens = 0 if leg == "decode" else prompt - hit
            option.decode_tokens = decode_tokens
            options.append(option)
        return options


def decision(
    view: View, choice: Choice, fleet: Fleet, *, policy: str, attempt: int, queued_s: float, length_estimate: str,
    failed_on: frozenset[str],
    shadows: tuple[ShadowChoice, ...] = (),
) -> Decision:  # fmt: skip
    """The record of a placement: every instance of the fleet, chosen from or excluded with the reason."""
    assert choice.index is not None
    scores: Sequence[float | None] = choice.scores
    terms: Sequence[Any] = choice.terms
    if not scores:
        scores = [None] * len(view.options)
    elif not choice.lasting:  # another library's numbers, or such that JSON cannot hold
        scores = [float(score) if isfinite(score) else None for score in choice.scores]
    if terms and not choice.lasting:
        terms = [_finite(each) for each in terms]
    candidates = []
    for index, option in enumerate(view.options):
        instance = option.instance
        candidate = Candidate(
            instance=instance.name,
            cached_tokens=option.cached_tokens,
            prefill_tokens=instance.prefill_tokens + option.prefill_tokens,
            decode_tokens=instance.decode_tokens + option.decode_tokens,
            terms=terms[index] if terms else NO_TERMS,
            score=scores[index],
        )
        candidates.append(candidate)
    if len(view.options) < len(fleet.instances):
        seen = {option.instance.name for option in view.options}
        candidates += [
            Candidate(instance=i.name, excluded=_why_not(view.request, i, view.leg, failed_on))
            for i in fleet
            if i.name not in seen
        ]
    chosen = view.options[choice.index]
    return Decision(
        request_id=view.request.id,
        at_s=view.now_s,
        policy=policy,
        chosen=chosen.instance.name,
        candidates=tuple(candidates),
        attempt=attempt,
        queued_s=queued_s,
        length_estimate=length_estimate,
        expected_output_tokens=chosen.decode_tokens,
        note=choice.note if choice.lasting else str(choice.note),
        shadows=shadows,
    )


def _finite(terms: Mapping[str, float]) -> dict[str, float]:
    """A copy, since the policy may use its own again; without what JSON cannot hold."""
    return {str(name): float(value) for name, value in terms.items() if isfinite(value)}


def _serves(instance: Instance, model: str) -> bool:
    return not model or not instance.spec.models or model in instance.spec.models


def _largest_context(instances: list[Instance]) -> list[Instance]:
    largest = max((i.spec.limits.max_context or 0 for i in instances), default=0)
    return [i for i in instances if (i.spec.limits.max_context or 0) == largest]


def _warming(instance: Instance) -> bool:
    """Whether it is new and runs as much as it should for now."""
    limit = instance.spec.warm_limit
    return limit is not None and len(instance.charges) >= limit


def _too_long(request: Request, instance: Instance) -> bool:
    limit = instance.spec.limits.max_context
    return limit is not None and request.prompt_tokens > limit


def _why_not(request: Request, instance: Instance, leg: Leg, failed_on: frozenset[str]) -> str:
    """Reason an instance could not be chosen."""
    role = instance.spec.role
    if not instance.up:
        return "draining" if instance.draining else "down"
    if (leg == "decode") != (role == "decode"):
        return f"role {role}"
    if not _serves(instance, request.model):
        return "serves another model"
    if _too_long(request, instance):
        return f"prompt exceeds its context of {instance.spec.limits.max_context} tokens"
    if instance.name in failed_on:
        return "failed on it before"
    if _warming(instance):
        return "warming up"
    if role == "prefill":
        return "no decode instance is up" if leg != "decode" else f"role {role}"
    return "no room"
