"""The ledger: what every instance owes, charged at dispatch and released on every way a request can end.

All counters are integers, so that after every end they are exactly what they were before. A charge carries the
generation of the instance it was made on: when an instance restarts, its old charges are forgotten with it and their
late ends touch nothing.

A disaggregated request has up to two charges: its current one, and a `source`, the KV that its prefill instance keeps
until the decode instance has it (seen as the first token) or the request ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from weighbridge.core.instance import InstanceSpec, LoadReport
from weighbridge.core.request import Request, Tier
from weighbridge.routing.cost import Cost, cost_of
from weighbridge.routing.places import Places
from weighbridge.routing.prefix_index import PrefixIndex, index_blocks
from weighbridge.routing.shared_kv import SharedKv
from weighbridge.routing.standing import Standing
from weighbridge.routing.sums import Group, Offered, PrefixCredit


class Charge:
    """What one running request costs its instance. `prefill_left` keeps the cache estimate made when it was routed."""

    __slots__ = (
        "cached_tokens", "decode_left", "dispatched_s", "expected_output_tokens", "first_token_s",
        "found_no_queue", "generation", "group", "hashes", "id", "instance", "kv_tokens", "number",
        "output_tokens", "pausable", "prefill_left", "priority", "prompt_tokens", "request", "shares",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        instance: Instance,
        *,
        cached_tokens: int,
        prefill_tokens: int,
        expected_output_tokens: int,
        now_s: float,
    ) -> None:
        self.request = request
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.hashes = request.prefix_hashes
        self.instance = instance
        self.generation = instance.generation
        self.cached_tokens = cached_tokens
        self.prefill_left = prefill_tokens
        self.expected_output_tokens = expected_output_tokens
        self.decode_left = expected_output_tokens
        self.kv_tokens = self.prompt_tokens
        self.output_tokens = 0
        self.dispatched_s = now_s
        self.first_token_s: float | None = None
        self.group: Group | None = None
        self.priority = 0
        """Of its tier; lower is more urgent."""
        self.number = 0
        """The instance's count of dispatches when this one was made."""
        self.pausable = True
        """Whether it has not been preempted yet; once is enough for any request."""
        self.shares = False
        """Whether its prompt's blocks are booked as shared with others there."""
        self.found_no_queue = not instance.prefilling
        """Whether no prompt was ahead of this one when it was sent."""

    @property
    def live(self) -> bool:
        """Whether the instance still is the one that was charged."""
        return self.generation == self.instance.generation


class Instance:
    """One instance as the router knows it: its spec, its outstanding work by our own ledger, and its last report."""

    __slots__ = (
        "block_size",
        "changes",
        "charges",
        "cost",
        "decode_tokens",
        "decoding",
        "decoding_kv_tokens",
        "dispatches",
        "draining",
        "generation",
        "groups",
        "index",
        "kv_tokens",
        "last_dispatch_s",
        "last_first_token_s",
        "name",
        "prefill_tokens",
        "prefilled_tokens",
        "prefilling",
        "prefix",
        "prompt_tokens",
        "report",
        "report_s",
        "sent_since_report_tokens",
        "shared_kv",
        "spec",
        "standing",
        "up",
    )

    def __init__(self, spec: InstanceSpec, generation: int, index: int, holders: dict[int, int] | None = None) -> None:
        self.name = spec.name
        self.prefix = PrefixIndex(0, holders, index)
        self.index = index
        self.shared_kv = SharedKv()
        """What `kv_tokens` counts more than once: common prefixes of what runs here."""
        self.charges: dict[str, Charge] = {}
        self.prefilling: dict[str, Charge] = {}
        """Charges whose prompt is not computed yet, in order of dispatch."""
        self.changes = 0
        """Grows with everything that the ledger books here."""
        self.standing: Standing | None = None
        self.reset(spec, generation)

    def reset(self, spec: InstanceSpec, generation: int) -> None:
        """Start a new life: a restarted engine has an empty cache and none of its old requests."""
        self.spec, self.generation, self.up, self.draining = spec, generation, True, False
        self.block_size = spec.limits.block_size
        self.changes += 1
        self.charges.clear()
        self.prefilling.clear()
        self.groups: dict[str, Group] = {}
        """By tier, all requests here that decode or will: those of a prefill leg are not among them."""
        self.prefill_tokens = 0
        """Prompt tokens sent and not yet computed: no first token seen, cached ones not counted."""
        self.dispatches = 0
        """Dispatches in this life."""
        self.prefilled_tokens = 0
        """Uncached prompt tokens computed in this life."""
        self.decode_tokens = 0
        """Output tokens still expected from what runs here."""
        self.kv_tokens = 0
        """Prompt and output tokens whose KV this instance holds for running requests, sources included."""
        self.prompt_tokens = 0
        """Prompt tokens of all requests in flight, computed or not."""
        self.decoding = 0
        """Sequences that have given a first token and not ended."""
        self.decoding_kv_tokens = 0
        """KV tokens of those sequences."""
        self.last_dispatch_s = self.last_first_token_s = float("-inf")
        self.report: LoadReport | None = None
        self.report_s = float("-inf")
        self.sent_since_report_tokens = 0
        """Uncached prompt tokens sent since the last report."""
        self.shared_kv.clear()
        self.prefix.clear()
        self.prefix.precise = False
        self.prefix.capacity_blocks = index_blocks(spec.limits)
        self.cost: Cost | None = cost_of(spec)
        """What its work costs; None without a profile."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self.charges)

    @property
    def waiting(self) -> int:
        """Requests whose prompt is not computed yet."""
        return len(self.prefilling)

    @property
    def unique_kv_tokens(self) -> int:
        """Tokens of KV that its running requests occupy: common prefixes once, where it caches them."""
        return self.kv_tokens - self.shared_kv.tokens


class Fleet:
    """All instances and every running request. Only the Router mutates it; policies read it."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        """In order of their indexes."""
        self.leaving: set[str] = set()
        """Names of those that are gone and hold charges still."""
        self.places = Places()
        self.charges: dict[str, Charge] = {}
        self.sources: dict[str, Charge] = {}
        self.offered = Offered()
        self.prefix_holders: dict[int, int] = {}
        """Block hash to the instances that hold it, as bits by index."""
        self.prefix_version = 0
        """Grows whenever a prefix index may have changed, so that matches can be remembered until then."""
        self.prefix_credit = PrefixCredit()

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances.values())

    def up(self, spec: InstanceSpec, generation: int) -> Instance:
        """An instance joined, came back or changed. The same generation keeps its charges; a newer one forgets them."""
        self.prefix_version += 1
        instance = self.instances.get(spec.name)
        self.leaving.discard(spec.name)
        if instance is None:
            instance = Instance(spec, generation, self.places.take(), self.prefix_holders)
            self.instances[spec.name] = instance
            if instance.index + 1 < len(self.instances):  # in the place of one that is gone
                for each in sorted(self.instances.values(), key=lambda one: one.index):
                    self.instances[each.name] = self.instances.pop(each.name)
        elif generation == instance.generation:
            instance.spec, instance.up, instance.draining = spec, True, False
            instance.block_size = spec.limits.block_size
            instance.cost = cost_of(spec)
        elif generation > instance.generation:
            instance.reset(spec, generation)
        return instance

    def down(self, name: str, *, drain: bool) -> Instance | None:
        """Take an instance out of choice; its charges stay until their requests end."""
        instance = self.instances.get(name)
        if instance is not None:
            instance.up, instance.draining = False, drain
        return instance

    def gone(self, name: str) -> bool:
        """An instance, if it is known, is out for good: `sweep` forgets it once it holds no charges."""
        if self.down(name, drain=True) is not None:
            self.leaving.add(name)
        return name in self.leaving

    def sweep(self) -> list[Instance]:
        """Forget those that are gone and hold no charges; their places and prefix bits are free again."""
        swept = [each for name in self.leaving if not (each := self.instances[name]).charges]
        for instance in swept:
            self.leaving.discard(instance.name)
            del self.instances[instance.name]
            instance.prefix.clear()
            self.prefix_version += 1
            self.places.give_back(instance.index)
        return swept

    def charge(
        self,
        request: Request,
        instance: Instance,
        *,
        cached_tokens: int,
        expected_output_tokens: int,
        now_s: float,
        prefill: bool = True,
        tier: Tier | None = None,
    ) -> Charge:
        """Book a dispatch. Without `prefill` the prompt's KV comes from elsewhere and nothing of it is computed here.
        `tier` is the one it is served as, looked at for its name, bounds and priority.

        A request has one current charge at a time: raises ValueError if it has one already.
        """
        request_id = request.id
        if request_id in self.charges:
            raise ValueError(f"request {request_id} is charged already")
        fresh = request.prompt_tokens - cached_tokens if prefill else 0
        charge = Charge(
            request, instance, cached_tokens=cached_tokens, prefill_tokens=fresh,
            expected_output_tokens=expected_output_tokens, now_s=now_s,
        )  # fmt: skip
        if tier is not None:
            charge.priority = tier.priority
        self.charges[request_id] = charge
        self._book(charge, now_s, tier)
        return charge

    def _book(self, charge: Charge, now_s: float, tier: Tier | None) -> None:
        instance, hashes = charge.instance, charge.hashes
        instance.changes += 1
        instance.charges[charge.id] = charge
        if charge.prefill_left:
            instance.prefilling[charge.id] = charge
            instance.prefill_tokens += charge.prefill_left
            instance.sent_since_report_tokens += charge.prefill_left
        if charge.decode_left:
            # of a deferred request, or one whose tier is not defined, the tier it is served as
            name = charge.request.tier if tier is None else tier.name
            group = instance.groups.get(name)
            if group is None:
                group = instance.groups[name] = Group(tier)
            group.count += 1
            group.remaining += charge.decode_left
            charge.group = group
            instance.decode_tokens += charge.decode_left
        instance.kv_tokens += charge.kv_tokens
        instance.prompt_tokens += charge.prompt_tokens
        instance.last_dispatch_s = now_s
        instance.dispatches += 1
        charge.number = instance.dispatches
        if hashes:
            self.prefix_version += 1
            instance.prefix.insert(hashes)
            if instance.prefix.capacity_blocks:
                charge.shares = True
                instance.shared_kv.add(hashes, charge.request.prefix_block_tokens)

    def first_token(self, request_id: str, now_s: float, remaining: int | None = None) -> None:
        """The prompt is computed and the first token is out: no prefill is owed, no source is needed any more."""
        charge = self.charges.get(request_id)
        if charge is None or charge.first_token_s is not None:
            return
        if request_id in self.sources:
            self._drop(self.sources.pop(request_id))
        self._prefilled(charge, now_s)
        charge.first_token_s = now_s
        if charge.live:
            charge.instance.changes += 1
            charge.instance.decoding += 1
            charge.instance.decoding_kv_tokens += charge.kv_tokens
            if charge.group is not None:
                charge.group.decoding += 1
                charge.group.first_us += round(now_s * 1e6)
        self.progress(request_id, 1, remaining)

    def _prefilled(self, charge: Charge, now_s: float) -> None:
        if charge.live:
            instance = charge.instance
            instance.changes += 1
            instance.prefill_tokens -= charge.prefill_left
            instance.prefilled_tokens += charge.prefill_left
            instance.prefilling.pop(charge.id, None)
            instance.last_first_token_s = now_s
        charge.prefill_left = 0

    def prefilled(self, request_id: str, now_s: float) -> None:
        """The prefill leg ended: its instance owes no prompt, but keeps the KV."""
        source = self.sources.get(request_id) or self.charges.get(request_id)
        if source is not None:
            self._prefilled(source, now_s)

    def hand_off(self, request_id: str) -> None:
        """Make the prefill leg's charge the source, so that the decode leg can be charged."""
        charge = self.charges.pop(request_id, None)
        if charge is not None:
            self.sources[request_id] = charge

    def progress(self, request_id: str, output_tokens: int, remaining: int | None = None) -> None:
        """`output_tokens` exist now and `remaining` more are expected (None: what was expected minus what came).

        Reports never move backwards; more than expected leaves nothing owed.
        """
        charge = self.charges.get(request_id)
        if charge is None or output_tokens <= charge.output_tokens:
            return
        grown = output_tokens - charge.output_tokens
        left = max(charge.decode_left - grown, 0) if remaining is None else remaining
        paid = charge.decode_left - left
        charge.output_tokens = output_tokens
        charge.decode_left = left
        charge.kv_tokens += grown
        if charge.live:
            instance = charge.instance
            instance.changes += 1
            instance.decode_tokens -= paid
            instance.kv_tokens += grown
            if charge.group is not None:
                charge.group.remaining -= paid
                charge.group.generated += grown
            if charge.first_token_s is not None:
                instance.decoding_kv_tokens += grown

    def release(self, request_id: str) -> Charge | None:
        """End a request's charges; the current one is returned, else its source, else None."""
        source = self.sources.pop(request_id, None)
        if source is not None:
            self._drop(source)
        charge = self.charges.pop(request_id, None)
        if charge is not None:
            self._drop(charge)
        return charge or source

    def _drop(self, charge: Charge) -> None:
        if not charge.live:
            return
        instance = charge.instance
        instance.changes += 1
        instance.charges.pop(charge.id, None)
        if charge.prefill_left:
            instance.prefill_tokens -= charge.prefill_left
            instance.prefilling.pop(charge.id, None)
        instance.decode_tokens -= charge.decode_left
        instance.kv_tokens -= charge.kv_tokens
        instance.prompt_tokens -= charge.prompt_tokens
        if charge.shares:
            instance.shared_kv.remove(charge.hashes, charge.request.prefix_block_tokens)
        group = charge.group
        if group is not None:
            group.count -= 1
            group.remaining -= charge.decode_left
            group.generated -= charge.output_tokens
            if charge.first_token_s is not None:
                group.decoding -= 1
                group.first_us -= round(charge.first_token_s * 1e6)
        if charge.first_token_s is not None:
            instance.decoding -= 1
            instance.decoding_kv_tokens -= charge.kv_tokens
