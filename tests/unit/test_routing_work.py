"""The `work` policy's published vectors: two instances, a slow and a fast one, and the requests that cross over."""

import random

import pytest

from weighbridge.core.instance import InstanceSpec, Rates
from weighbridge.core.request import Request
from weighbridge.routing.fleet import Fleet
from weighbridge.routing.policies.work import Work
from weighbridge.routing.policy import Choice, Option, View

SLOW = Rates(prefill_tokens_per_s=73, decode_tokens_per_s=45)
FAST = Rates(prefill_tokens_per_s=2551, decode_tokens_per_s=293)


def request(name: str, prompt_tokens: int = 516, max_tokens: int = 128) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def busy_fleet(*, queued: int, produced: list[int], cached_when_queued: int = 496) -> Fleet:
    """A slow idle instance and a fast one with `len(produced)` decoding requests and `queued` untouched ones."""
    fleet = Fleet()
    fleet.up(InstanceSpec(name="cpu", rates=SLOW), 1)
    gpu = fleet.up(InstanceSpec(name="gpu", rates=FAST), 1)
    for number, output_tokens in enumerate(produced):
        running = request(f"active{number}")
        fleet.charge(running, gpu, cached_tokens=496, expected_output_tokens=128, now_s=0.0)
        fleet.first_token(running.id, 0.1)
        fleet.progress(running.id, output_tokens)
    for number in range(queued):
        fleet.charge(
            request(f"queued{number}"),
            gpu,
            cached_tokens=cached_when_queued,
            expected_output_tokens=128,
            now_s=0.2,
        )
    return fleet


def choose(fleet: Fleet) -> Choice:
    new = request("new")
    options = [Option(i, cached_tokens=496, prefill_tokens=20, decode_tokens=128) for i in fleet]
    return Work().choose(View(new, options, fleet, 0.3, random.Random(0), True))


def test_idle_slow_instance_scores_3_118_seconds() -> None:
    choice = choose(busy_fleet(queued=0, produced=[]))
    assert choice.scores[0] == pytest.approx(3.1184170471841703, abs=1e-12)
    assert choice.terms[0] == pytest.approx({"prefill_s": 20 / 73, "decode_s": 128 / 45})


def test_request_7_stays_on_the_fast_instance_although_its_slots_are_full() -> None:
    # four active with 496 output tokens left between them, two queued: prefill 60, decode 880
    choice = choose(busy_fleet(queued=2, produced=[4, 4, 4, 4]))
    assert choice.scores[1] == pytest.approx(3.0269331574447818, abs=1e-12)
    assert choice.index == 1


def test_request_8_goes_to_the_slow_instance() -> None:
    # request 7 is queued now and eight more tokens have been generated: prefill 80, decode 1000
    choice = choose(busy_fleet(queued=3, produced=[6, 6, 6, 6]))
    assert choice.scores[1] == pytest.approx(3.4443295341584577, abs=1e-12)
    assert choice.index == 0


def test_a_queued_request_keeps_the_cache_estimate_of_its_routing() -> None:
    """Losing it charges the two queued prompts in full and flips request 7 to the slow instance."""
    lost = choose(busy_fleet(queued=2, produced=[4, 4, 4, 4], cached_when_queued=0))
    assert lost.scores[1] == pytest.approx((1032 + 20) / 2551 + 880 / 293, abs=1e-12)
    assert lost.scores[1] == pytest.approx(3.415800268381669, abs=1e-12)
    assert lost.index == 0
    kept = choose(busy_fleet(queued=2, produced=[4, 4, 4, 4]))
    assert kept.index == 1


def test_without_rates_it_compares_tokens_and_says_so() -> None:
    fleet = busy_fleet(queued=2, produced=[4, 4, 4, 4])
    fleet.up(InstanceSpec(name="cpu"), 1)
    choice = choose(fleet)
    assert choice.index == 0
    assert list(choice.scores) == [148.0, 60.0 + 880.0]
    assert "no calibrated rates" in choice.note
    assert not choice.terms
