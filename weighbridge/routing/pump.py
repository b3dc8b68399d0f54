"""What leaves the queue, and when: order, room, gate, release; refusals; preemption."""

from __future__ import annotations

from collections.abc import Callable

from weighbridge.core.actions import Action, Dispatch, Preempt, Reject
from weighbridge.core.request import Request
from weighbridge.routing.admission import Admission, retry_after_s
from weighbridge.routing.candidates import Pool
from weighbridge.routing.fleet import Charge, Instance
from weighbridge.routing.hold import HoldQueue
from weighbridge.routing.live import HANDING_OFF, HELD, RUNNING, Live
from weighbridge.routing.placing import Placing
from weighbridge.routing.sacrifice import sacrifice
from weighbridge.routing.settings import RouterSettings
from weighbridge.routing.turn import Turn, undisturbed

GATE_TRIES = 3
"""Requests declined by the policy per pass before the pass ends with everyone waiting."""
MOST_TRIES = 8
"""The same with those that would miss their own bound by now: they wait for leisure, and nobody for them."""
FASTER = 4.0
"""For a faster instance that is full a request may wait this many times longer than for a better moment."""
RETRY_S = 0.01
"""After a pass in which someone had to wait, the queue is left alone for this long."""
OVERLOAD_LOOK_S = 0.25
EXPIRE_LOOK_S = 1.0
MOST_IDLE = 32
"""Models whose empty queues are kept. Where engines take any name, clients can think of ever new ones."""
CLIP = 1.5
"""A clipped output budget is this many times the expected output."""


class Pump:
    """Both queues: of requests that run nowhere, and of those between their legs."""

    def __init__(
        self,
        settings: RouterSettings,
        placing: Placing,
        admission: Admission,
        refuse: Callable[[Live, int, str, float], Reject],
    ) -> None:
        self._settings = settings
        self._placing = placing
        self._admission = admission
        self._refuse = refuse
        self._held: dict[str, HoldQueue] = {}
        self._handing_off: dict[str, HoldQueue] = {}
        self._looked_s = self._expired_s = float("-inf")
        self._ages = any(tier.max_wait_s is not None for tier in settings.tiers)
        self._last_tier = max(settings.tiers, key=lambda tier: tier.priority, default=None)

    def __len__(self) -> int:
        return sum(map(len, self._held.values())) + sum(map(len, self._handing_off.values()))

    def __bool__(self) -> bool:
        for queues in (self._held, self._handing_off):
            for queue in queues.values():
                if len(queue):
                    return True
        return False

    def held(self, model: str) -> HoldQueue | None:
        """What is held for a model."""
        return self._held.get(model)

    def arrive(self, live: Live, now_s: float) -> list[Action]:
        """Send a request that runs nowhere, or hold it; and send what else can be sent."""
        asked = False
        queue = self._queue(self._held, live.request)
        if not queue and (len(self._held) == 1 or not any(map(len, self._held.values()))):
            # nobody is before it: the queue would only be a detour
            sent, asked = self._at_once(live, now_s)
            if sent is not None:
                self._served(self._held, queue, live, sent, now_s)
                return [sent]
        actions = self.hold(live, now_s)
        if asked:
            queue.quiet_until_s = now_s + RETRY_S
        else:
            actions += self.run(now_s)
        return actions

    def _at_once(self, live: Live, now_s: float) -> tuple[Dispatch | None, bool]:
        """Offer a request to the policy, and whether that was possible: it has room and time left."""
        pool = self._placing.candidates.pool(live.model)
        self._look(pool, now_s)
        if now_s + pool.base_s + live.prefill_tokens * pool.seconds_per_token > live.deadline_s:
            return None, False
        if not self._admission.may_run(live):
            return None, False
        live.held_s = now_s
        cached = self._placing.candidates.cached(live.request)
        fitting = pool.room.fitting(live.prompt_tokens, self._reserve(live), cached)
        queue = self._queue(self._held, live.request)
        queue.found(bool(fitting), now_s)
        if not fitting:
            return None, False
        live.no_room_s = 0.0
        usable = self._placing.candidates.usable(live.request, pool, fitting, live.failed_on)
        return self._offer(live, pool, usable, now_s, cached, pool.without(fitting), 1), True

    def _look(self, pool: Pool, now_s: float) -> None:
        if now_s > pool.fresh_until_s:
            self._placing.candidates.refresh(pool, now_s)
        if now_s - self._looked_s > OVERLOAD_LOOK_S:
            self._looked_s = now_s
            self._admission.look(pool.entry)

    def hold(self, live: Live, now_s: float) -> list[Action]:
        """Queue a request that runs nowhere; if that is too much, shed the least urgent."""
        live.stage, live.held_s = HELD, now_s
        self._admission.hold(live)
        queue = self._queue(self._held, live.request)
        live.full_s = queue.full_s(now_s)
        queue.push(live)
        most = self._settings.max_held_tokens
        shed: list[Action] = []
        while most is not None and self._admission.held_total > most and sum(map(len, self._held.values())) > 1:
            victim = self._least_urgent()
            if victim is None:
                break
            shed.append(self._refuse(victim, 429, "queue_full", self.drain_s(victim.request)))
        return shed

    def _least_urgent(self) -> Live | None:
        found = [live for queue in self._held.values() if (live := queue.last()) is not None]
        return max(found, key=lambda live: (live.priority, live.held_s), default=None)

    def hand_off(self, live: Live, now_s: float) -> None:
        """Queue a request whose prompt is done and whose decode instance is to be chosen."""
        live.stage, live.held_s = HANDING_OFF, now_s
        self._queue(self._handing_off, live.request).push(live)

    def drop(self, live: Live) -> None:
        """Take a request out of whichever queue it is in."""
        if live.stage == HELD:
            self._held[live.model].remove(live.id)
            self._admission.hold(live, -1)
        elif live.stage == HANDING_OFF:
            self._handing_off[live.model].remove(live.id)
        live.stage = RUNNING

    def drain_s(self, request: Request) -> float:
        """Seconds until what is held now would be worked off: the Retry-After."""
        return retry_after_s(self._admission.look(self._placing.candidates.pool(request.model).entry))

    def run(self, now_s: float) -> list[Action]:
        """Send what can be sent now."""
        actions: list[Action] = []
        if now_s - self._expired_s > EXPIRE_LOOK_S:
            self._expired_s = now_s
            self._expire(now_s, actions)
        if self._handing_off:
            self._pass(self._handing_off, self._decode, now_s, actions)
        self._pass(self._held, self._entry, now_s, actions)
        return actions

    def _pass(
        self, queues: dict[str, HoldQueue], step: Callable[[Turn, float, list[Action]], bool], now_s: float,
        actions: list[Action],
    ) -> None:  # fmt: skip
        """Go through the queues of all models, the most urgent request of all first: models may share engines."""
        pool = self._placing.candidates.pool
        turns = [Turn(pool(model), queue) for model, queue in queues.items() if queue and queue.quiet_until_s <= now_s]
        if turns and len(queues) > 1:
            quiet: set[int] = set()
            for model, queue in queues.items():
                if queue and queue.quiet_until_s > now_s:
                    quiet |= pool(model).indexes
            turns = undisturbed(turns, frozenset(quiet))
        if queues is self._held:
            turns = [turn for turn in turns if self._opens(turn, now_s, actions)]
        while turns:
            turn = turns[0] if len(turns) == 1 else self._most_urgent(turns, now_s)
            if not step(turn, now_s, actions):
                turns.remove(turn)
                if turn.declined and not turn.full:
                    turn.queue.quiet_until_s = now_s + RETRY_S
                if turn.spent and turns:
                    turns = undisturbed(turns, turn.pool.indexes)  # like one queue, they wait together
            elif self._ages:
                for each in turns:
                    each.live = None  # whose turn it is to be aged has changed for all of them

    def _most_urgent(self, turns: list[Turn], now_s: float) -> Turn:
        """Whose next request goes first: one that has waited too long, else that of the most urgent tier."""
        best, least = turns[0], float("inf")
        for turn in turns:
            live = turn.live = turn.first(now_s)
            if live is None:
                return turn  # there is none: its pass ends
            rank = float("-inf") if turn.queue.ages(live, now_s) else live.priority
            if rank < least:
                best, least = turn, rank
        return best

    def _served(self, queues: dict[str, HoldQueue], queue: HoldQueue, live: Live, sent: Dispatch, now_s: float) -> None:
        """`live` was sent: of its engine's places one was used, for all who wait for one there."""
        queue.served(live, now_s)
        if len(queues) > 1:
            models = self._placing.fleet.instances[sent.instance].spec.models
            for model, other in queues.items():
                if other is not queue and (not models or model in models):
                    other.served(live, now_s)

    def _expire(self, now_s: float, actions: list[Action]) -> None:
        """No wait is without an end."""
        most = self._settings.max_held_s
        if most is None:
            return
        for queues in (self._handing_off, self._held):
            for model, queue in queues.items():
                while (live := queue.oldest()) is not None and now_s - live.held_s > most:
                    pool = self._placing.candidates.pool(model)
                    status = 429 if pool.entry else 503  # there is capacity and it is contended, or there is none
                    actions.append(self._refuse(live, status, "queue_timeout", self.drain_s(live.request)))

    def _queue(self, queues: dict[str, HoldQueue], request: Request) -> HoldQueue:
        queue = queues.get(request.model)
        if queue is None:
            if len(queues) > MOST_IDLE:
                for model in [model for model, each in queues.items() if not each]:
                    del queues[model]
            queue = queues[request.model] = HoldQueue(self._admission.fairness, self._settings.fair_tokens)
        return queue

    def _opens(self, turn: Turn, now_s: float, actions: list[Action]) -> bool:
        """Whether somebody may take what is held of a model; all of it is refused if not."""
        if not turn.pool.entry:
            actions.extend(self._refuse(live, 503, "no_instance", 1.0) for live in turn.queue)
            return False
        self._look(turn.pool, now_s)
        turn.pace = (turn.pool.seconds_per_token, turn.pool.base_s)
        sacrifice(turn.queue, turn.pool.entry, now_s)
        return True

    def _entry(self, turn: Turn, now_s: float, actions: list[Action]) -> bool:
        """Try the next one that runs nowhere; whether another may be tried after it."""
        pool, queue = turn.pool, turn.queue
        if turn.tries >= GATE_TRIES or len(turn.declined) >= MOST_TRIES:
            turn.spent = True
            return False
        live = turn.first(now_s)
        if live is None:
            return False
        if live.late and self._settings.reject_hopeless and live.tier.sheddable:
            self._give_up(live, queue, now_s, actions)
            return True
        sent = None
        if self._admission.may_run(live):
            cached = self._placing.candidates.cached(live.request)
            fitting = pool.room.fitting(live.prompt_tokens, self._reserve(live), cached)
            queue.found(bool(fitting), now_s)
            if not fitting:
                fitting = self._preempt(live, pool, actions)
                if not fitting:
                    turn.full = True
                    return False
            live.no_room_s = queue.full_s(now_s) - live.full_s
            usable = self._placing.candidates.usable(live.request, pool, fitting, live.failed_on)
            full = pool.without(fitting)
            held = queue.upto(live.priority) if full else 1
            sent = self._offer(live, pool, usable, now_s, cached, full, held)
        if sent is None:
            turn.declined.add(live.id)
            turn.tries += not live.tight
        else:
            self._served(self._held, queue, live, sent, now_s)
            actions.append(sent)
        return True

    def _offer(
        self, live: Live, pool: Pool, usable: list[Instance], now_s: float, cached: dict[int, int],
        full: list[Instance], held: int,
    ) -> Dispatch | None:  # fmt: skip
        if not usable:
            return None
        if self._admission.overloaded and "clip" in live.request.allow and live.max_tokens is None:
            clipped = round(CLIP * live.expected_output_tokens)
            if clipped < live.request.max_tokens:
                live.max_tokens = clipped
                self._admission.count(live.tier_name, "clipped")
        if full and now_s - live.held_s > FASTER * self._settings.release_after * live.bound_s:
            # it has waited for a faster one long enough: let it wait in an engine's own queue, if that is still better;
            # one at a time, so that the others can still go elsewhere
            usable = [*usable, *(i for i in full if not i.prefilling)]
            full = [i for i in full if i.prefilling]
        waited = (now_s - live.held_s) / (self._settings.release_after * live.bound_s)
        may_hold = waited <= 1.0 or bool(full)
        stage = live.stage
        try:
            sent = self._placing.start(
                live, pool, usable, now_s, may_hold=may_hold, cached=cached, full=full, held=held, released=waited > 1.0
            )
        finally:
            live.stage = stage  # until it is out of its queue
        if sent is not None:
            self.drop(live)
        return sent

    def _give_up(self, live: Live, queue: HoldQueue, now_s: float, actions: list[Action]) -> None:
        """It cannot make its deadline: defer it where the client allows that, else refuse it."""
        last = self._last_tier
        if "defer" in live.request.allow and last is not None and last.priority > live.priority:
            self._admission.count(live.tier_name, "deferred")
            since = live.held_s
            self.drop(live)
            live.defer(last, self._settings.default_ttft_s)
            actions += self.hold(live, since)  # which may be too much, and shed somebody
            return
        actions.append(self._refuse(live, 429, "cannot_meet_slo", self.drain_s(live.request)))

    def _reserve(self, live: Live) -> float:
        """Share of room that is left to more urgent tiers which may preempt, where engines cannot be made to."""
        return 1.0 - self._settings.headroom if self._placing.yields(live.tier) else 1.0

    def _preempt(self, live: Live, pool: Pool, actions: list[Action]) -> list[Instance]:
        """No room: have an engine pause the least urgent request it runs, if the tier may do that."""
        if not live.tier.may_preempt or live.late:
            return []
        best: tuple[int, float, Charge] | None = None
        for instance in pool.entry:
            if instance.spec.preemption and not instance.prefill_tokens:
                for charge in instance.charges.values():
                    key = (charge.priority, charge.dispatched_s)
                    if charge.priority > live.priority and charge.pausable and (best is None or key > best[:2]):
                        best = (*key, charge)
        if best is None:
            return []
        charge = best[2]
        charge.pausable = False
        modes = charge.instance.spec.preemption
        actions.append(
            Preempt(
                request_id=charge.request.id,
                instance=charge.instance.name,
                mode="swap" if "swap" in modes else "recompute",
            )
        )
        tiers = self._settings.tiers
        served_as = next((tier.name for tier in tiers if tier.priority == charge.priority), "other")
        self._admission.count(served_as, "preempted")
        return [charge.instance]

    def _decode(self, turn: Turn, now_s: float, actions: list[Action]) -> bool:
        """Try the next one between its legs; whether another may be tried after it."""
        pool, queue = turn.pool, turn.queue
        if not pool.decode:
            actions.extend(self._refuse(live, 503, "no_instance", 1.0) for live in queue)
            return False
        if len(turn.declined) >= GATE_TRIES:
            turn.spent = True
            return False
        live = turn.first(now_s)
        if live is None:
            return False
        fitting = pool.decode_room.fitting(live.prompt_tokens)
        if not fitting:
            turn.full = True
            return False
        usable = self._placing.candidates.usable(live.request, pool, fitting, live.failed_on)
        released = now_s - live.held_s > self._settings.release_after * live.bound_s
        sent = self._placing.start_decode(live, usable, now_s, may_hold=not released) if usable else None
        if sent is None:
            turn.declined.add(live.id)
        else:
            queue.remove(live.id)
            self._served(self._handing_off, queue, live, sent, now_s)
            actions.append(sent)
        return True
