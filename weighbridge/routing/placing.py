"""Asking the policy, charging the ledger and writing the dispatch: one leg of one request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weighbridge.core.actions import Dispatch, Leg
from weighbridge.core.decision import Decision
from weighbridge.core.errors import LogError
from weighbridge.core.request import Tier
from weighbridge.routing.candidates import Candidates, Pool, decision
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.lengths import Lengths
from weighbridge.routing.live import RUNNING, Live
from weighbridge.routing.policy import Choice, Policy, View, breach
from weighbridge.routing.room import shortlist
from weighbridge.routing.settings import RouterSettings
from weighbridge.routing.shadow import Shadows


class Placing:
    """Places requests by one policy. A placement that the policy would rather delay changes nothing."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, policy: Policy, rng: random.Random) -> None:
        self.settings = settings
        self.fleet = fleet
        self.policy = policy
        self.rng = rng
        self._preempting = min((t.priority for t in settings.tiers if t.may_preempt), default=10**9)
        self.candidates = Candidates(fleet, settings.room_kv, settings.decode_kv)
        estimate = settings.length_estimate
        self.lengths = Lengths(
            getattr(policy, "length_estimate", "median") if estimate == "auto" else estimate,
            noise=settings.length_noise,
            seed=settings.seed,
        )
        self.shadows = Shadows(settings.shadow, settings.seed)
        self.on_start: Callable[[Live], None] = lambda live: None
        """Told of every attempt that is sent."""
        self.shortlists = getattr(policy, "shortlist", False)
        self.holds = settings.dispatch == "hold" or (settings.dispatch == "auto" and getattr(policy, "holds", False))

    def yields(self, tier: Tier) -> bool:
        """Whether room is kept for more urgent tiers: some may preempt, and some engine cannot be made to."""
        return tier.priority > self._preempting

    def start(
        self, live: Live, pool: Pool, instances: list[Instance], now_s: float, *, may_hold: bool,
        cached: dict[int, int] | None = None, full: Sequence[Instance] = (), held: int = 1, released: bool = False,
    ) -> Dispatch | None:  # fmt: skip
        """Ask the policy for one of `instances` and send the request there; nothing if it would rather wait.
        `cached` is what `Candidates.cached` said, if that was asked already; the rest is as in `View`."""
        leg: Leg = "prefill" if instances[0].spec.role == "prefill" else "whole"
        choice, view = self._ask(
            live, instances, leg, now_s, may_hold=may_hold, cached=cached, full=full, held=held, released=released
        )
        live.tight = choice.tight
        if choice.index is None:
            return None
        option = view.options[choice.index]
        chosen = option.instance
        if chosen.spec.role == "prefill":
            if self._binds_early(chosen):
                return self._send_both(live, pool, view, choice, now_s)
            leg = "prefill"
        else:
            leg = "whole"
        action = self._send(live, view, choice, leg, None, live.attempts + 1)
        self.fleet.charge(
            live.request,
            chosen,
            cached_tokens=option.cached_tokens,
            expected_output_tokens=0 if leg == "prefill" else option.decode_tokens,
            now_s=now_s,
            tier=live.tier,
        )
        self._count(live)
        return action

    def _count(self, live: Live) -> None:
        """An attempt has its charge: only now is it counted elsewhere, so that what fails before leaves nothing."""
        live.stage = RUNNING
        live.attempts += 1
        self.on_start(live)

    def _send_both(self, live: Live, pool: Pool, view: View, choice: Choice, now_s: float) -> Dispatch | None:
        """Early binding: the decode instance is chosen together with the prefill instance."""
        assert choice.index is not None
        option = view.options[choice.index]
        prefill, cached = option.instance, option.cached_tokens
        self.fleet.charge(live.request, prefill, cached_tokens=cached, expected_output_tokens=0, now_s=now_s)
        self._count(live)
        self.fleet.hand_off(live.id)
        decode_choice, decode_view = self._ask(live, pool.decode, "decode", now_s, may_hold=False)
        assert decode_choice.index is not None
        chosen = decode_view.options[decode_choice.index]
        action = self._send(live, decode_view, decode_choice, "both", prefill.name, live.attempts)
        self.fleet.charge(
            live.request,
            chosen.instance,
            cached_tokens=0,
            expected_output_tokens=chosen.decode_tokens,
            now_s=now_s,
            prefill=False,
            tier=live.tier,
        )
        return action

    def start_decode(self, live: Live, instances: list[Instance], now_s: float, *, may_hold: bool) -> Dispatch | None:
        """Late binding: the prefill leg is done; choose who decodes."""
        choice, view = self._ask(live, instances, "decode", now_s, may_hold=may_hold)
        if choice.index is None:
            return None
        option = view.options[choice.index]
        source = self.fleet.sources[live.id]
        action = self._send(live, view, choice, "decode", source.instance.name, live.attempts)
        live.stage = RUNNING
        self.fleet.charge(
            live.request,
            option.instance,
            cached_tokens=0,
            expected_output_tokens=option.decode_tokens,
            now_s=now_s,
            prefill=False,
            tier=live.tier,
        )
        return action

    def _ask(
        self, live: Live, instances: list[Instance], leg: Leg, now_s: float, *, may_hold: bool,
        cached: dict[int, int] | None = None, full: Sequence[Instance] = (), held: int = 1, released: bool = False,
    ) -> tuple[Choice, View]:  # fmt: skip
        if cached is None:
            cached = self.candidates.cached(live.request)
        if self.shortlists:
            instances = shortlist(instances, cached)
        options = self.candidates.options(live.request, instances, leg, live.expected_output_tokens, cached)
        view = View(
            live.request,
            options,
            self.fleet,
            now_s,
            self.rng,
            self.settings.record_decisions,
            leg=leg,
            tier=live.tier,
            deadline_s=live.deadline_s,
            may_hold=may_hold,
            full=self.candidates.options(live.request, full, leg, live.expected_output_tokens, cached) if full else (),
            held=held,
            released=released,
            no_room_s=live.no_room_s,
        )
        try:
            choice = self.policy.choose(view)
            broken = breach(choice, options, may_hold=may_hold)
        except LogError:  # of a policy that repeats a log, which is not as it should be
            raise
        except Exception as error:  # a third party's policy must not take its request down with it
            broken = f"{type(error).__name__}: {error}"
        if broken:
            fewest = min(range(len(options)), key=lambda n: options[n].instance.in_flight)
            choice = Choice(fewest, note=f"policy {self.settings.policy} failed ({broken}); fewest requests instead")
        return choice, view

    def _send(
        self, live: Live, view: View, choice: Choice, leg: Leg, prefill_instance: str | None, attempt: int
    ) -> Dispatch:
        """The action of a choice; to be made before the charge, so that the decision shows what was seen."""
        assert choice.index is not None
        chosen = view.options[choice.index].instance
        record = None
        if self.settings.record_decisions:
            try:
                record = self._record(live, view, choice, attempt)
            except Exception as error:  # scores or terms of a third party's policy that are not what they should be
                note = f"what policy {self.settings.policy} says of its choice cannot be kept ({error!r})"
                record = self._record(live, view, Choice(choice.index, note=note), attempt)
        priority = None
        if chosen.spec.takes_priority:
            # within a tier the earliest deadline first; both fit a 64-bit integer
            priority = live.priority * 10**13 + round(live.due_s * 1000)
        return Dispatch(
            max_tokens=live.max_tokens,
            priority=priority,
            request_id=live.id,
            instance=chosen.name,
            attempt=attempt,
            leg=leg,
            prefill_instance=prefill_instance,
            decision=record,
        )

    def _record(self, live: Live, view: View, choice: Choice, attempt: int) -> Decision:
        assert choice.index is not None
        return decision(
            view,
            choice,
            self.fleet,
            policy=self.settings.policy,
            attempt=attempt,
            queued_s=view.now_s - live.held_s if self.holds else 0.0,
            length_estimate=self.lengths.name,
            failed_on=live.failed_on,
            shadows=self.shadows.ask(view, choice.index) if self.shadows else (),
        )

    def _binds_early(self, prefill: Instance) -> bool:
        binding = self.settings.binding
        return binding == "early" or (binding == "auto" and (prefill.spec.pairs_early or prefill.spec.kind == "sglang"))
