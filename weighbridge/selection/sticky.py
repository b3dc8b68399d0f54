"""Which model served a session last. Bounded: the session unused for longest is forgotten first."""

from __future__ import annotations

from collections import OrderedDict


class Sessions:
    """At most `capacity` sessions; 0 remembers none."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._models: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def get(self, session: str) -> str:
        """The last model, or the empty string; counts as a use."""
        model = self._models.get(session, "")
        if model:
            self._models.move_to_end(session)
        return model

    def put(self, session: str, model: str) -> None:
        if not session or self.capacity == 0:
            return
        self._models[session] = model
        self._models.move_to_end(session)
        if len(self._models) > self.capacity:
            self._models.popitem(last=False)
