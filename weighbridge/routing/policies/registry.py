"""Policies by name: ours below, third parties' through the entry-point group `weighbridge.policies`.

Adding one of ours is one file and one line here. A third party's distribution declares

    [project.entry-points."weighbridge.policies"]
    my_policy = "my_package.my_module:MyPolicy"

A policy's options are its constructor's keyword arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from weighbridge.core.errors import PolicyError
from weighbridge.routing.policies.least_requests import LeastRequests
from weighbridge.routing.policies.least_tokens import LeastTokens
from weighbridge.routing.policies.round_robin import RoundRobin
from weighbridge.routing.policies.work import Work
from weighbridge.routing.policy import Policy

GROUP = "weighbridge.policies"

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "round_robin": RoundRobin,
    "work": Work,
}


def policy_names() -> list[str]:
    """All names that `make_policy` accepts, sorted."""
    return sorted({*POLICIES, *(point.name for point in entry_points(group=GROUP))})


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy.

    Raises:
        PolicyError: unknown name (the message lists the known ones), or an option that its constructor refuses.
    """
    factory = POLICIES.get(name) or _third_party(name)
    if factory is None:
        raise PolicyError(f"unknown policy {name!r}; known: {', '.join(policy_names())}")
    try:
        policy = factory(**(options or {}))
    except (TypeError, ValueError) as error:
        parameters = ", ".join(inspect.signature(factory).parameters) or "none"
        raise PolicyError(f"policy {name!r}: {error}; its options are: {parameters}") from None
    return policy


def _third_party(name: str) -> Callable[..., Policy] | None:
    for point in entry_points(group=GROUP, name=name):
        loaded: Callable[..., Policy] = point.load()
        return loaded
    return None
