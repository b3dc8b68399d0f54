"""A policy with a bug that can be switched on: named in settings as `tests.support.failing_policy:Failing`."""

from __future__ import annotations

from typing import ClassVar

from weighbridge.core.errors import LogError
from weighbridge.routing.policies.least_requests import LeastRequests
from weighbridge.routing.policy import Choice, View

NAME = "tests.support.failing_policy:Failing"


class Failing(LeastRequests):
    """While `broken` is set it raises what the Router does not take for a policy's own failure."""

    broken: ClassVar[bool] = False

    def choose(self, view: View) -> Choice:
        if Failing.broken:
            raise LogError("a bug")
        return super().choose(view)
