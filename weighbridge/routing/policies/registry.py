"""Policies by name: ours below, third parties' through the entry-point group `weighbridge.policies`.

Adding one of ours is one file and one line here. A third party's distribution declares

    [project.entry-points."weighbridge.policies"]
    my_policy = "my_package.my_module:MyPolicy"

or is named as `my_package.my_module:MyPolicy` directly.
A policy's options are its constructor's keyword arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from math import isnan
from typing import Any

from weighbridge.core.errors import PolicyError
from weighbridge.routing.policies.affinity_gate import AffinityGate
from weighbridge.routing.policies.block_cost import BlockCost
from weighbridge.routing.policies.calibrated import Calibrated
from weighbridge.routing.policies.drain_time import DrainTime
from weighbridge.routing.policies.kv_free import KvFree
from weighbridge.routing.policies.least_requests import LeastRequests
from weighbridge.routing.policies.least_tokens import LeastTokens
from weighbridge.routing.policies.length_threshold import LengthThreshold
from weighbridge.routing.policies.paper_score import PaperScore
from weighbridge.routing.policies.power_of_two import PowerOfTwo
from weighbridge.routing.policies.prefix_affinity import PrefixAffinity
from weighbridge.routing.policies.prompt_length import PromptLength
from weighbridge.routing.policies.random_choice import Random
from weighbridge.routing.policies.round_robin import RoundRobin
from weighbridge.routing.policies.speed_requests import SpeedRequests
from weighbridge.routing.policies.work import Work
from weighbridge.routing.policy import Policy

GROUP = "weighbridge.policies"

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "affinity_gate": AffinityGate,
    "block_cost": BlockCost,
    "calibrated": Calibrated,
    "drain_time": DrainTime,
    "kv_free": KvFree,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "length_threshold": LengthThreshold,
    "paper_score": PaperScore,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "prompt_length": PromptLength,
    "random": Random,
    "round_robin": RoundRobin,
    "speed_requests": SpeedRequests,
    "work": Work,
}


def policy_names() -> list[str]:
    """All names that `make_policy` accepts, sorted."""
    return sorted({*POLICIES, *(point.name for point in entry_points(group=GROUP))})


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy.

    Raises:
        PolicyError: unknown name (the message lists the known ones), one that cannot be loaded, or an option that its
            constructor refuses.
    """
    factory = POLICIES.get(name) or (_by_path(name) if ":" in name else _third_party(name))
    if factory is None:
        raise PolicyError(
            f"unknown policy {name!r}; known: {', '.join(policy_names())}; or give your own as 'module:Class'"
        )
    given = dict(options or {})
    known = _parameters(factory)
    if known is not None:
        _check_options(name, given, known)
    try:
        policy = factory(**given)
    except Exception as error:
        raise PolicyError(f"policy {name!r}: {error}{_listed(known)}", option="*") from None
    if not callable(getattr(policy, "choose", None)):
        raise PolicyError(f"policy {name!r} has no method `choose(view)`; see weighbridge.routing.policy.Policy")
    return policy


def _parameters(factory: Callable[..., Policy]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in callables tell nothing
        return None


def _listed(known: Mapping[str, inspect.Parameter] | None) -> str:
    return "" if known is None else f"; its options are: {', '.join(known) or 'none'}"


def _check_options(name: str, given: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """An unknown option, or one of another kind than its default, is refused by its name, before the policy trips
    over it."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option, value in given.items():
        if option not in known and not takes_all:
            raise PolicyError(f"policy {name!r} has no option {option!r}{_listed(known)}", option=option)
        default = known[option].default if option in known else None
        if isinstance(default, bool):
            fits, wanted = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            fits, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif isinstance(default, float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            fits, wanted = number and not isnan(value), "a number"
        elif isinstance(default, str):
            fits, wanted = isinstance(value, str), "a word"
        else:
            continue
        if not fits:
            raise PolicyError(f"policy {name!r}: {option} must be {wanted}, not {value!r}", option=option)


def _by_path(name: str) -> Callable[..., Policy]:
    """`package.module:Class`, importable from where the program runs."""
    module, _, attribute = name.partition(":")
    try:
        loaded: Callable[..., Policy] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(f"policy {name!r} cannot be loaded: {error}; is it on the Python path?") from None
    except Exception as error:  # whatever its module does when it is imported
        raise PolicyError(f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}; mend it") from None
    return _callable(name, loaded)


def _third_party(name: str) -> Callable[..., Policy] | None:
    for point in entry_points(group=GROUP, name=name):
        try:
            loaded: Callable[..., Policy] = point.load()
        except Exception as error:
            raise PolicyError(
                f"policy {name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}; "
                "mend or uninstall its distribution"
            ) from None
        return _callable(name, loaded)
    return None


def _callable(name: str, loaded: Callable[..., Policy]) -> Callable[..., Policy]:
    if not callable(loaded):
        raise PolicyError(f"policy {name!r} is no class; name one that has a method `choose(view)`")
    return loaded
