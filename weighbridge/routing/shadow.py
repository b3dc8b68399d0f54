"""Shadow policies: asked about every placement of live traffic, never obeyed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from weighbridge.core.decision import ShadowChoice
from weighbridge.core.errors import PolicyError
from weighbridge.routing.forecast import forecast
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Choice, Policy, View, breach

ERROR = 0.2


class Shadows:
    """Named policies with generators of their own, so that asking them moves no other draw."""

    __slots__ = ("_policies", "failures")

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._policies: list[tuple[str, Policy, random.Random]] = [
            (name, make_policy(name), random.Random(f"{seed}/{name}")) for name in names
        ]
        self.failures: dict[str, int] = dict.fromkeys(names, 0)
        """How often each raised or broke the policy contract."""

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
            try:
                answers.append(_answer(name, policy.choose(own), view, chosen))
            except Exception as error:  # nobody obeys it, so nobody may suffer from it
                self.failures[name] += 1
                answers.append(ShadowChoice(policy=name, instance="", note=f"{type(error).__name__}: {error}"))
        return tuple(answers)


def _answer(name: str, choice: Choice, view: View, chosen: int) -> ShadowChoice:
    broken = breach(choice, view.options, may_hold=False)
    if broken:
        raise PolicyError(broken)
    index = choice.index
    assert index is not None, "may_hold is False"
    return ShadowChoice(
        policy=name,
        instance=view.options[index].instance.name,
        ttft_s=_ttft_s(view, index),
        chosen_ttft_s=_ttft_s(view, chosen),
    )


def _ttft_s(view: View, index: int) -> float | None:
    option = view.options[index]
    cost = option.instance.cost
    return None if cost is None else forecast(option, view, cost, ERROR, 0.0).ttft_s
