"""Hold, order, gate, place by forecast: the policy this router is made for.

Among instances with room it takes the one with the best expected hits: the chance that the request meets its bounds
there, less the hits it takes from those running. Seconds (its own and those it costs others) only break near-ties. It
lets a request wait while its best net hits are below `gate` of what an idle instance would give it, and late requests
go only where they cost others nearly nothing.

Affinity is a price in the same score: prompt tokens that a warmer option would not have to compute count as the
requests whose prompts the fleet could compute instead, times the share of its prefill capacity that is in use.
"""

from __future__ import annotations

from weighbridge.routing.forecast import Asked, Forecast, chance, forecast_on, tpot_bound
from weighbridge.routing.policy import Choice, Option, View, least

LATE_LOSS = 0.1
SLACK_S = 0.1
MOST_INTERFERENCE = 0.7


class Calibrated:
    """Best expected hits by forecast, with a gate."""

    holds = True
    shortlist = True

    def __init__(self, gate: float = 0.6, error: float = 0.2, seconds: float = 0.02) -> None:
        if not 0.0 <= gate < 1.0 or error <= 0.0:
            raise ValueError("gate must be in [0, 1) and error above 0")
        self.gate = gate
        self.error = error
        self.seconds = seconds

    def choose(self, view: View) -> Choice:
        """Pick the option with the best net hits, or wait."""
        options = view.options
        offered = view.fleet.offered
        interference = min(offered.share(view.now_s), MOST_INTERFERENCE)
        asked = Asked(view, options[0].decode_tokens, self.error, interference)
        warmest, price = 0, 0.0
        if view.request.prefix_hashes:
            warmest = min(option.prefill_tokens for option in options)
            price = offered.displaced(view.now_s) * interference
        made: list[Forecast] = []
        scores: list[float] = []
        output, weight = options[0].decode_tokens, self.seconds
        for option in options:
            cost = option.instance.cost
            if cost is None:
                return self._by_tokens(view)
            each = forecast_on(option, cost, asked)
            seconds = each.ttft_s + output * each.tpot_s + each.delay_s
            if each.kv_over_tokens > 0:
                seconds += each.kv_over_tokens * cost.prefill_s * (option.instance.decoding + 1)
            made.append(each)
            score = weight * seconds - each.hit + each.loss
            scores.append(score + price * (option.prefill_tokens - warmest) if price else score)
        best = least(scores, view.rng)
        if view.may_hold and options[best].instance.charges:
            each = made[best]
            tight = view.deadline_s - view.now_s < each.ttft_s
            if self._waits(view, options[best], each, tight):
                return Choice(None, tight=tight)
        return Choice(best, scores, [_terms(each) for each in made] if view.explain else ())

    def _waits(self, view: View, option: Option, made: Forecast, tight: bool) -> bool:
        cost = option.instance.cost
        if cost is None or not cost.seen:
            return False
        if made.kv_over_tokens > 0:
            return True
        if tight:
            return made.loss > LATE_LOSS
        if view.deadline_s - view.now_s > made.ttft_s + SLACK_S:
            return made.hit - made.loss < self.gate * self._alone(view, option)
        return False

    def _alone(self, view: View, option: Option) -> float:
        """Chance to meet the TPOT bound with the instance to itself: waiting can bring no more than that."""
        cost, bound = option.instance.cost, tpot_bound(view.tier, option.decode_tokens)
        if cost is None or bound is None or view.leg == "prefill":
            return 1.0
        alone = cost.decode_step_s(1, view.request.prompt_tokens + 0.5 * option.decode_tokens)
        return chance(bound - alone, self.error * bound)

    def _by_tokens(self, view: View) -> Choice:
        scores = [
            float(option.instance.kv_tokens + option.instance.prefill_tokens + option.prefill_tokens)
            for option in view.options
        ]
        return Choice(least(scores, view.rng), scores, note="an instance has no profile: compared by tokens")


def _terms(made: Forecast) -> dict[str, float]:
    transfer = {"transfer_s": made.transfer_s} if made.transfer_s else {}
    return {
        "wait_s": made.wait_s,
        **transfer,
        "prefill_s": made.prefill_s,
        "tpot_s": made.tpot_s,
        "delay_to_others_s": made.delay_s,
        "hit": made.hit,
    }
