"""The ledger: what every instance owes, charged at dispatch and released on every way a request can end.

All counters are integers, so that after every end they are exactly what they were before. A charge carries the
generation of the instance it was made on: when an instance restarts, its old charges are forgotten with it and their
late ends touch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from weighbridge.core.instance import InstanceSpec, LoadReport
from weighbridge.core.request import Request
from weighbridge.routing.prefix_index import PrefixIndex

DEFAULT_INDEX_BLOCKS = 65_536


class Charge:
    """What one running request costs its instance. `prefill_left` keeps the cache estimate made when it was routed."""

    __slots__ = (
        "cached_tokens",
        "decode_left",
        "dispatched_s",
        "expected_output_tokens",
        "first_token_s",
        "generation",
        "instance",
        "kv_tokens",
        "output_tokens",
        "prefill_left",
        "request",
    )

    def __init__(
        self, request: Request, instance: Instance, *, cached_tokens: int, expected_output_tokens: int, now_s: float
    ) -> None:
        self.request = request
        self.instance = instance
        self.generation = instance.generation
        self.cached_tokens = cached_tokens
        self.prefill_left = request.prompt_tokens - cached_tokens
        self.expected_output_tokens = expected_output_tokens
        self.decode_left = expected_output_tokens
        self.kv_tokens = request.prompt_tokens
        self.output_tokens = 0
        self.dispatched_s = now_s
        self.first_token_s: float | None = None


class Instance:
    """One instance as the router knows it: its spec, its outstanding work by our own ledger, and its last report."""

    __slots__ = (
        "charges",
        "decode_tokens",
        "draining",
        "generation",
        "index",
        "kv_tokens",
        "last_dispatch_s",
        "name",
        "prefill_tokens",
        "prefix",
        "report",
        "report_s",
        "spec",
        "up",
    )

    def __init__(self, spec: InstanceSpec, generation: int, index: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index
        self.generation = generation
        self.up = True
        self.draining = False
        self.charges: dict[str, Charge] = {}
        self.prefill_tokens = 0
        """Prompt tokens sent and not yet computed: no first token seen, cached ones not counted."""
        self.decode_tokens = 0
        """Output tokens still expected from what runs here."""
        self.kv_tokens = 0
        """Prompt and output tokens whose KV this instance holds for running requests."""
        self.last_dispatch_s = float("-inf")
        self.report: LoadReport | None = None
        self.report_s = float("-inf")
        self.prefix = PrefixIndex(_index_blocks(spec))

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self.charges)

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(1 for charge in self.charges.values() if charge.first_token_s is None)

    def reset(self, spec: InstanceSpec, generation: int) -> None:
        """Start a new life: a restarted engine has an empty cache and none of its old requests."""
        self.spec, self.generation, self.up, self.draining = spec, generation, True, False
        self.charges.clear()
        self.prefill_tokens = self.decode_tokens = self.kv_tokens = 0
        self.report, self.report_s = None, float("-inf")
        self.prefix = PrefixIndex(_index_blocks(spec))


def _index_blocks(spec: InstanceSpec) -> int:
    if not spec.limits.prefix_caching:
        return 0
    capacity = spec.limits.kv_tokens
    return DEFAULT_INDEX_BLOCKS if capacity is None else max(capacity // 16, 1)


class Fleet:
    """All instances and every running request. Only the Router mutates it; policies read it."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.charges: dict[str, Charge] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances.values())

    def up(self, spec: InstanceSpec, generation: int) -> Instance:
        """An instance joined, came back or changed. The same generation keeps its charges; a newer one forgets them."""
        instance = self.instances.get(spec.name)
        if instance is None:
            instance = self.instances[spec.name] = Instance(spec, generation, len(self.instances))
        elif generation == instance.generation:
            instance.spec, instance.up, instance.draining = spec, True, False
        elif generation > instance.generation:
            instance.reset(spec, generation)
        return instance

    def down(self, name: str, *, drain: bool) -> Instance | None:
        """Take an instance out of choice; its charges stay until their requests end."""
        instance = self.instances.get(name)
        if instance is not None:
            instance.up, instance.draining = False, drain
        return instance

    def charge(
        self, request: Request, instance: Instance, *, cached_tokens: int, expected_output_tokens: int, now_s: float
    ) -> Charge:
        """Book a dispatch. A request is charged on at most one instance at a time."""
        if request.id in self.charges:
            raise ValueError(f"request {request.id} is charged already")
        charge = Charge(
            request,
            instance,
            cached_tokens=cached_tokens,
            expected_output_tokens=expected_output_tokens,
            now_s=now_s,
        )
        self.charges[request.id] = charge
        instance.charges[request.id] = charge
        instance.prefill_tokens += charge.prefill_left
        instance.decode_tokens += charge.decode_left
        instance.kv_tokens += charge.kv_tokens
        instance.last_dispatch_s = now_s
        if request.prefix_hashes:
            instance.prefix.insert(request.prefix_hashes)
        return charge

    def first_token(self, request_id: str, now_s: float) -> None:
        """The prompt is computed; its prefill is no longer owed."""
        charge = self.charges.get(request_id)
        if charge is None or charge.first_token_s is not None:
            return
        charge.first_token_s = now_s
        if self._live(charge):
            charge.instance.prefill_tokens -= charge.prefill_left
        charge.prefill_left = 0
        self.progress(request_id, 1)

    def progress(self, request_id: str, output_tokens: int) -> None:
        """`output_tokens` exist now. Reports never move backwards; more than expected leaves nothing owed."""
        charge = self.charges.get(request_id)
        if charge is None or output_tokens <= charge.output_tokens:
            return
        grown = output_tokens - charge.output_tokens
        paid = min(grown, charge.decode_left)
        charge.output_tokens = output_tokens
        charge.decode_left -= paid
        charge.kv_tokens += grown
        if self._live(charge):
            charge.instance.decode_tokens -= paid
            charge.instance.kv_tokens += grown

    def release(self, request_id: str) -> Charge | None:
        """End a charge; None if there was none. Touches no counter of a newer generation."""
        charge = self.charges.pop(request_id, None)
        if charge is None:
            return None
        if self._live(charge):
            instance = charge.instance
            instance.charges.pop(request_id, None)
            instance.prefill_tokens -= charge.prefill_left
            instance.decode_tokens -= charge.decode_left
            instance.kv_tokens -= charge.kv_tokens
        return charge

    @staticmethod
    def _live(charge: Charge) -> bool:
        return charge.generation == charge.instance.generation
