"""The fleet of a simulation as a file: what `weighbridge simulate --fleet FLEET.yaml` reads.

instances:
  - {name: fast, count: 4, preset: rtx-pro-6000}
  - {name: slow, count: 4, preset: rtx-pro-6000, slowdown: 2}
link: {latency_s: 0.005, bandwidth: 1.0e10}
faults: [{at_s: 60, kind: fail, instance: fast0}]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import StepTerms
from weighbridge.cost.profile import Profile
from weighbridge.scheduling.mixing import Mixing
from weighbridge.scheduling.order import Discipline
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fleet import RTX_4090, RTX_PRO_6000, Fault, Link, SimulatedFleet, SimulatedInstance, scaled

PRESETS = {"rtx-pro-6000": RTX_PRO_6000, "rtx-4090": RTX_4090}


class LinkFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV transfer into each decode instance."""

    latency_s: float = 0.005
    bytes_per_token: int = 131_072
    bandwidth: float = 10e9

    def build(self) -> Link:
        """The link it describes."""
        return Link(self.latency_s, self.bytes_per_token, self.bandwidth)


class InstanceGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal instances named NAME0, NAME1, ... Costs come from `profile` (a file), `step` or `preset`.

    `slowdown` multiplies the true costs; `believed_slowdown` what the router is told (None: the truth, 0: nothing).
    Limits that are not given come from the profile, else from the scheduler's defaults; `link` is KV's way into decode
    instances that have another than the fleet's, and the router is told of it.
    """

    name: str
    count: int = 1
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    profile: str | None = None
    step: StepTerms | None = None
    preset: str | None = None
    slowdown: float = 1.0
    believed_slowdown: float | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None
    token_budget: int | None = None
    max_sequences: int | None = None
    prefix_caching: bool = False
    discipline: Discipline = "fcfs"
    mixing: Mixing = "mixed"
    preempt_priority: bool = False
    noise: float = 0.0
    bend: float = 0.0
    link: LinkFile | None = None


class FaultFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `sim.fleet.Fault`."""

    at_s: float
    kind: Literal["slow", "fail", "start"]
    instance: str
    factor: float = 1.0


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    instances: tuple[InstanceGroup, ...]
    link: LinkFile = LinkFile()
    faults: tuple[FaultFile, ...] = ()
    cold_start_s: float = 20.0
    detect_s: float = 0.5


def build_fleet(file: FleetFile, read_profile: Callable[[str], Profile]) -> SimulatedFleet:
    """The fleet that a file describes. Raises `ConfigError` with the place of what cannot be."""
    instances: list[SimulatedInstance] = []
    for place, group in enumerate(file.instances):
        instances += _group(group, f"$.instances[{place}]", read_profile)
    names = {instance.name for instance in instances}
    if not instances:
        raise ConfigError("a fleet needs at least one instance", path="$.instances")
    if len(names) < len(instances):
        raise ConfigError("two instances have the same name; name the groups apart", path="$.instances")
    roles = {instance.role for instance in instances}
    if "mixed" not in roles and roles != {"prefill", "decode"}:
        raise ConfigError("a fleet without mixed instances needs prefill and decode instances", path="$.instances")
    for place, fault in enumerate(file.faults):
        if fault.instance not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(
                f"no instance is called {fault.instance!r}; they are {known}", path=f"$.faults[{place}].instance"
            )
    return SimulatedFleet(
        tuple(instances),
        file.link.build(),
        tuple(Fault(f.at_s, f.kind, f.instance, f.factor) for f in file.faults),
        cold_start_s=file.cold_start_s,
        detect_s=file.detect_s,
    )


def _group(group: InstanceGroup, path: str, read_profile: Callable[[str], Profile]) -> list[SimulatedInstance]:
    profile = read_profile(group.profile) if group.profile else None
    if group.count < 1 or group.slowdown <= 0:
        raise ConfigError("count must be at least 1 and slowdown above 0", path=path)
    if sum(source is not None for source in (group.profile, group.step, group.preset)) != 1:
        raise ConfigError("give exactly one of profile, step or preset", path=path)
    if profile is not None:
        terms = profile.step
        if terms is None:
            raise ConfigError(f"{group.profile} holds no step-time model; calibrate again", path=f"{path}.profile")
    elif group.preset is not None:
        if group.preset not in PRESETS:
            raise ConfigError(f"no preset {group.preset!r}; there are {', '.join(PRESETS)}", path=f"{path}.preset")
        terms = PRESETS[group.preset]
    else:
        assert group.step is not None
        terms = group.step
    limits = profile.limits if profile is not None else None
    defaults = SchedulerConfig()
    try:
        scheduler = SchedulerConfig(
            token_budget=group.token_budget or (limits and limits.token_budget) or defaults.token_budget,
            max_sequences=group.max_sequences or (limits and limits.max_sequences) or defaults.max_sequences,
            block_tokens=group.block_tokens or (limits.block_size if limits else defaults.block_tokens),
            blocks=group.kv_blocks or (limits and limits.kv_blocks) or defaults.blocks,
            prefix_caching=group.prefix_caching,
            discipline=group.discipline,
            mixing=group.mixing,
            preempt_priority=group.preempt_priority,
        )
    except ValueError as error:
        raise ConfigError(str(error), path=path) from None
    believed = None
    if group.believed_slowdown:
        believed = scaled(terms, group.believed_slowdown)
    elif group.slowdown != 1.0:
        believed = scaled(terms, group.slowdown)
    one = SimulatedInstance(
        name=group.name,
        terms=scaled(terms, group.slowdown),
        scheduler=scheduler,
        role=group.role,
        believed=believed,
        knows_costs=group.believed_slowdown != 0,
        error=profile.error if profile is not None and profile.error is not None else 0.1,
        disturbance=Disturbance(group.noise, group.bend),
        pool=group.role if group.role != "mixed" else "default",
        priorities=group.discipline == "priority",
        link=group.link.build() if group.link is not None else None,
    )
    return [replace(one, name=f"{group.name}{k}") for k in range(group.count)]
