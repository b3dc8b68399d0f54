"""Shadow policies: asked about every placement of live traffic, never obeyed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from weighbridge.core.decision import ShadowChoice
from weighbridge.routing.forecast import forecast
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Policy, View

ERROR = 0.2


class Shadows:
    """Named policies with generators of their own, so that asking them moves no other draw."""

    __slots__ = ("_policies",)

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._policies: list[tuple[str, Policy, random.Random]] = [
            (name, make_policy(name), random.Random(f"{seed}/{name}")) for name in names
        ]

    def __bool__(self) -> bool:
        return bool(self._policies)

    def ask(self, view: View, chosen: int) -> tuple[ShadowChoice, ...]:
        """What each would have chosen from the same options, and the TTFT forecast there and where it really goes."""
        answers = []
        for name, policy, rng in self._policies:
            own = View(
                view.request,
                view.options,
                view.fleet,
                view.now_s,
                rng,
                False,
                leg=view.leg,
                tier=view.tier,
                deadline_s=view.deadline_s,
            )
            index = policy.choose(own).index
            assert index is not None, "may_hold is False"
            answers.append(
                ShadowChoice(
                    policy=name,
                    instance=view.options[index].instance.name,
                    ttft_s=_ttft_s(view, index),
                    chosen_ttft_s=_ttft_s(view, chosen),
                )
            )
        return tuple(answers)


def _ttft_s(view: View, index: int) -> float | None:
    option = view.options[index]
    cost = option.instance.cost
    return None if cost is None else forecast(option, view, cost, ERROR, 0.0).ttft_s
