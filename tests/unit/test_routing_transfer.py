"""KV's way into a decode instance is a term of the forecast, weighed against the queue there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import InstanceSpec, StepTerms, Transfer
from weighbridge.core.request import Request
from weighbridge.cost.transfer import TransferTerms
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.settings import InstanceSettings
from weighbridge.http import ClientLimits
from weighbridge.routing.fleet import Fleet
from weighbridge.routing.forecast import forecast
from weighbridge.routing.policy import Option, View
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.transfer import make_run
from weighbridge.sim.fleet import Link, SimulatedFleet, SimulatedInstance
from weighbridge.sim.runs import run

STEP = StepTerms(base_s=0.01, prefill_s=1e-4)


def seconds(transfer: Transfer | None, leg: str, prompt: int) -> tuple[float, float]:
    """The forecast's transfer term and TTFT on an idle instance."""
    fleet = Fleet()
    fleet.up(InstanceSpec(name="d", role="decode", step=STEP, transfer=transfer), 1)
    instance = fleet.instances["d"]
    option = Option(instance, cached_tokens=0, prefill_tokens=0 if leg == "decode" else prompt, decode_tokens=10)
    request = Request(id="r", model="", arrival_s=0.0, prompt_tokens=prompt, max_tokens=10)
    view = View(request, [option], fleet, 0.0, random.Random(0), False, leg=leg)  # type: ignore[arg-type]
    assert instance.cost is not None
    made = forecast(option, view, instance.cost, 0.2, 0.0)
    return made.transfer_s, made.ttft_s


def test_it_is_latency_and_seconds_per_token_on_the_decode_leg_only() -> None:
    terms = Transfer(latency_s=0.005, seconds_per_token=1e-4)
    transfer, ttft = seconds(terms, "decode", 1000)
    assert transfer == pytest.approx(0.105)
    assert ttft == pytest.approx(0.105 + STEP.base_s)
    assert seconds(terms, "whole", 1000)[0] == 0.0
    assert seconds(None, "decode", 1000) == (0.0, pytest.approx(STEP.base_s))


def test_two_slow_links_of_four_cost_nothing_once_they_are_known() -> None:
    base = fleets.disaggregated(2, 4)

    def fleet(known: bool) -> SimulatedFleet:
        """Two decode instances behind 1 GB/s; a router that does not know of it thinks all links alike."""
        slow, fast = Link(bandwidth=1e9), Link()
        kind = SimulatedInstance if known else Unaware
        made = [
            kind(i.name, i.terms, i.scheduler, i.role, pool=i.pool, link=slow if i.name in ("d0", "d1") else fast)
            for i in base.instances
        ]
        return replace(base, instances=tuple(made))

    reached = {
        known: run(make_run(fleet(known), 30.0, "calibrated", 902)).summary.attainment for known in (True, False)
    }
    assert reached[True] > 0.97
    assert reached[False] < reached[True] - 0.03


class Unaware(SimulatedInstance):
    def spec(self) -> InstanceSpec:
        return msgspec.structs.replace(SimulatedInstance.spec(self), transfer=None)


def test_the_gateway_reads_what_calibrate_wrote(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    path.write_bytes(msgspec.json.encode(TransferTerms(latency_s=0.01, seconds_per_byte=1e-9, bytes_per_token=1e5)))
    settings = InstanceSettings(
        name="d", url="http://127.0.0.1:1", kind="vllm", role="decode", transfer_profile=str(path)
    )
    spec = Endpoint(settings, ClientLimits(), {}).spec
    assert spec.transfer == Transfer(latency_s=0.01, seconds_per_token=1e-4)
    path.write_bytes(msgspec.json.encode(TransferTerms(latency_s=0.01, seconds_per_byte=1e-9)))
    with pytest.raises(ConfigError, match="do not say `bytes_per_token`; measure the transfer again"):
        Endpoint(settings, ClientLimits(), {})
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"transfer\.json"):
        Endpoint(settings, ClientLimits(), {})
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Endpoint(settings, ClientLimits(), {})
