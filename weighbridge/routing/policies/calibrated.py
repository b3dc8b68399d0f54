"""Hold, order, gate, place by forecast: the policy this router is made for.

Among instances with room it takes the one with the best expected hits: the chance that the request meets its bounds
there, less the hits it takes from those running. Seconds (its own and those it costs others) only break near-ties. It
lets a request wait while its best net hits are below `gate` of what an idle instance would give it: for half a second,
and longer only while somebody there would come near a bound and its TTFT stays within `tail` times what requests of
late would have had without the gate. Late requests go only where they cost others nearly nothing.

Affinity is a price in the same score: prompt tokens that a warmer option would not have to compute count as the
requests whose prompts the fleet could compute instead, times the share of its prefill capacity that is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from weighbridge.routing.backlog import Faster, alone_s, done_s
from weighbridge.routing.forecast import Asked, Forecast, Terms, chance, forecast_terms, fullest
from weighbridge.routing.policy import Choice, Option, View, least
from weighbridge.routing.recent import Recent

LATE_LOSS = 0.1
"""A request that misses its bound wherever it goes now waits while it would cost others more hits than this."""
SLACK_S = 0.1
"""With less than this to spare before its deadline a request goes, whatever the gate says."""
PATIENCE_S = 0.5
"""The gate looks for a better moment for this long, whoever is at stake and however long requests wait without it."""
REMEMBERED, LAST = 1000, 0.01
"""Of the last so many requests the gate knows what TTFT each would have had without it; all but this share of them had
at most the one that the others are measured by."""
MORE_HITS = 0.1
"""What a wait for a faster instance must win in hits, where hits alone count: forecasts differ a little for nothing."""
SOONER = 0.85
"""Of the time in which faster instances work off all that is held, as far as bounds go: some will go elsewhere."""
MOST_FULL = 8
"""So many full instances, those with the quickest steps, are forecast; the rate counts all."""
DOUBT, UNSEEN = 1.1, 1.25
"""On the seconds of a slower instance with room: a start there cannot be taken back, and its forecast errs by more
seconds than that of a faster one. More while nothing but its profile speaks for it."""
MOST_STRETCH = 12.0
"""A request that takes so many times longer on the instance with room than on a faster one waits for that, whatever
those behind it would gain: a little for each of them against minutes for it."""
MOST_INTERFERENCE = 0.7
"""Of the share of prefill capacity in use at most this counts: it stretches decode steps by 1 / (1 - share)."""
NO_FORECAST: Terms = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Calibrated:
    """Best expected hits by forecast, with a gate."""

    holds = True
    shortlist = True

    def __init__(
        self, gate: float = 0.6, error: float = 0.2, seconds: float = 0.02, near: float = 0.7, tail: float = 2.0
    ) -> None:
        """`gate`: share of an idle instance's hits below which a request waits. `error` of forecasts as a share of
        bounds, more where a profile says so. `seconds`: hits that a second is worth. `near`: how near to its bound on
        decoding, in errors, a tier must come for a request to be kept from it for longer than PATIENCE_S. `tail`: how
        many times the TTFT that it, or all but the last per cent of those of late, would have had without the gate the
        gate may make of it."""
        if not 0.0 <= gate < 1.0 or error <= 0.0 or seconds < 0.0 or near < 0.0 or tail < 1.0:
            raise ValueError("gate must be in [0, 1), error above 0, seconds and near at least 0 and tail at least 1")
        self.gate = gate
        self.error = error
        self.seconds = seconds
        self.near = near
        self.tail = tail
        self._ungated = Recent(REMEMBERED, LAST)

    def choose(self, view: View) -> Choice:
        """Pick the option with the best net hits, or wait."""
        options = view.options
        offered = view.fleet.offered
        interference = min(offered.share(view.now_s), MOST_INTERFERENCE)
        asked = Asked(view, options[0].decode_tokens, self.error, interference)
        warmest, price = 0, 0.0
        if view.request.prefix_hashes:
            warmest = _warmest(options)
            price = offered.displaced(view.now_s) * interference
        terms: list[dict[str, float]] = []
        scores: list[float] = []
        total, lowest, kept_at, kept = 0.0, inf, -1, NO_FORECAST
        output, weight = options[0].decode_tokens, self.seconds
        for option in options:
            cost = option.instance.cost
            if cost is None:
                return self._by_tokens(view)
            made = forecast_terms(option, cost, asked)
            wait, prefill, transfer, tpot, delay, hit, loss, kv_over = made
            seconds = wait + prefill + transfer + output * tpot + delay
            total += seconds + tpot + hit
            if view.explain:
                terms.append(_named(made))
            if kv_over > 0.0:
                seconds += kv_over * cost.prefill_s * (option.instance.decoding + 1)
            score = weight * seconds - hit + loss + price * (option.prefill_tokens - warmest)
            if score < lowest:
                lowest, kept_at, kept = score, len(scores), made
            scores.append(score)
            total += score
        best = least(scores, view.rng)
        if view.may_hold:
            cost = options[best].instance.cost
            if kept_at != best and cost is not None:  # a tie, and drawn for another
                kept = forecast_terms(options[best], cost, asked)
            held = self._hold(view, options[best], asked, kept)
            if held is not None:
                return held
        return Choice(best, scores, terms, lasting=total - total == 0.0)  # not so if one is not finite

    def _hold(self, view: View, option: Option, asked: Asked, kept: Terms) -> Choice | None:
        """The choice to wait instead of `option`, whose forecast is `kept`; None if it shall go there."""
        wait, prefill, transfer, tpot, delay, hit, loss, kv_over = kept
        made = Forecast(wait, prefill, transfer, tpot, delay, hit, loss, kv_over)
        if view.full and self._better_later(view, option, asked, made):
            return Choice(None)
        if option.instance.charges and not view.released:
            tight = view.deadline_s - view.now_s < made.ttft_s
            if self._waits(view, option, made, tight, asked):
                return Choice(None, tight=tight)
        if view.leg != "decode":
            self._ungated.add(view.no_room_s + made.ttft_s)
        return None

    def _better_later(self, view: View, option: Option, asked: Asked, made: Forecast) -> bool:
        """Whether this request is better kept for full instances that are faster than started on `option`, where it
        has room: they will have ended all that is held sooner than that one would be done with it, or its chance to
        meet its bounds is better there."""
        slow = option.instance.cost
        if slow is None or any(each.instance.cost is None for each in view.full):
            return False
        faster = Faster(view.full, asked.output)
        quickest = nsmallest(MOST_FULL, faster.steps)
        later_s = SOONER * view.held / faster.rate
        asked.slack_s -= later_s
        asked.left_s -= later_s
        here, there = made.loss - made.hit, 0.0
        if asked.tpot_s is not None:
            # with bounds on both TTFT and TPOT a hit is a hit, however fast: only hits are worth waiting for
            here -= MORE_HITS
        else:
            doubt = DOUBT if slow.seen else UNSEEN
            here += self.seconds * doubt * done_s(option, slow, asked.output, asked.context)
            there = self.seconds * faster.all_done_s(view.held)
            best = view.full[quickest[0][1]]
            if self._stretch(option, best, asked) > MOST_STRETCH:
                here = inf
        for _, n in quickest:
            each = view.full[n]
            cost = each.instance.cost
            if cost is not None:
                # what it costs others there is left out: who will run there then is not known
                then = Forecast(*forecast_terms(each, cost, asked))
                if there - then.hit < here:
                    return True
        return False

    def _stretch(self, option: Option, best: Option, asked: Asked) -> float:
        """How many times longer the request itself takes on `option` than on `best`, each with nothing else to do."""
        slow, fast = option.instance.cost, best.instance.cost
        assert slow is not None and fast is not None
        return alone_s(option, slow, asked.output, asked.context) / alone_s(best, fast, asked.output, asked.context)

    def _waits(self, view: View, option: Option, made: Forecast, tight: bool, asked: Asked) -> bool:
        cost = option.instance.cost
        if cost is None or not cost.seen:
            return False
        if made.kv_over_tokens > 0:
            return True
        if tight or asked.misses(made):
            return made.loss > LATE_LOSS
        slack_s = view.deadline_s - view.now_s
        if slack_s <= made.ttft_s + SLACK_S or made.hit - made.loss >= self.gate * self._alone(option, asked):
            return False
        waited_s = (view.tier.ttft_s or 0.0) - slack_s
        if asked.leg != "decode":
            ungated_s = max(view.no_room_s + made.ttft_s, self._ungated.value())
            if waited_s + made.ttft_s > max(self.tail * ungated_s, PATIENCE_S):
                return False
        if waited_s < PATIENCE_S:
            return True
        # it has had its time to find a better moment: more of it only if somebody there would come near its bound
        return fullest(option, cost, asked, made) > 1.0 - self.near * self.error

    def _alone(self, option: Option, asked: Asked) -> float:
        """Chance to meet the bound on decoding with the instance to itself: waiting can bring no more than that."""
        cost = option.instance.cost
        if cost is None or asked.leg == "prefill":
            return 1.0
        alone = cost.decode_step_s(1, asked.context + 0.5 * asked.output)
        if asked.tpot_s is not None:
            return chance(asked.tpot_s - alone, asked.width(cost) * self.error * asked.tpot_s)
        if asked.e2e_s is not None:
            return chance(asked.left_s - asked.output * alone, asked.width(cost) * self.error * asked.e2e_s)
        return 1.0

    def _by_tokens(self, view: View) -> Choice:
        scores = [
            float(option.instance.kv_tokens + option.instance.prefill_tokens + option.prefill_tokens)
            for option in view.options
        ]
        return Choice(least(scores, view.rng), scores, note="an instance has no profile: compared by tokens")


def _warmest(options: Sequence[Option]) -> int:
    """Fewest prompt tokens that any of them would have to compute."""
    fewest = options[0].prefill_tokens
    for option in options:
        if option.prefill_tokens < fewest:
            fewest = option.prefill_tokens
    return fewest


def _named(made: Terms) -> dict[str, float]:
    """What a decision's record shows of a forecast."""
    wait, prefill, transfer, tpot, delay, hit, _, _ = made
    named = {"wait_s": wait, "prefill_s": prefill, "tpot_s": tpot, "delay_to_others_s": delay, "hit": hit}
    if transfer:
        named["transfer_s"] = transfer
    return named
