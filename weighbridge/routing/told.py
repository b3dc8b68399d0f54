"""What engines say of themselves: load reports and KV events. What an earlier life of an instance said is ignored."""

from __future__ import annotations

from weighbridge.core.actions import Action
from weighbridge.core.events import BlocksRemoved, BlocksStored, InstanceReported
from weighbridge.routing.fleet import Fleet


class Told:
    """Writes it into the ledger's instances."""

    __slots__ = ("_fleet",)

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def reported(self, event: InstanceReported, now_s: float) -> list[Action]:
        """A load report, unless a newer one is known."""
        instance = self._fleet.instances.get(event.instance)
        if instance is not None and instance.generation == event.generation and event.sampled_s > instance.report_s:
            instance.report, instance.report_s = event.report, event.sampled_s
            instance.sent_since_report_tokens = 0
        return []

    def blocks_stored(self, event: BlocksStored, now_s: float) -> list[Action]:
        """It holds these blocks now."""
        instance = self._fleet.instances.get(event.instance)
        if instance is not None and instance.generation == event.generation:
            self._fleet.prefix_version += 1
            instance.prefix.stored(event.hashes)
        return []

    def blocks_removed(self, event: BlocksRemoved, now_s: float) -> list[Action]:
        """It holds these, or any, no more."""
        instance = self._fleet.instances.get(event.instance)
        if instance is not None and instance.generation == event.generation:
            self._fleet.prefix_version += 1
            if event.all:
                instance.prefix.clear()
            else:
                instance.prefix.removed(event.hashes)
        return []
