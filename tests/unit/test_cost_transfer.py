"""Transfer terms from measured transfers."""

from __future__ import annotations

import random

import pytest

from weighbridge.core.errors import InputError
from weighbridge.cost.transfer import fit_transfer


def test_latency_and_bandwidth_are_found_and_the_first_transfer_is_left_out() -> None:
    rng = random.Random(1)
    samples = [(1_000_000, 3.0)]
    sizes = (100_000, 1_000_000, 10_000_000, 50_000_000) * 5
    samples += [(size, (0.004 + size / 2e9) * rng.lognormvariate(0.0, 0.03)) for size in sizes]
    terms = fit_transfer(samples)
    assert terms.latency_s == pytest.approx(0.004, rel=0.05)
    assert terms.bytes_per_s == pytest.approx(2e9, rel=0.05)
    assert terms.error < 0.06
    assert terms.count == 20
    assert terms.seconds(2_000_000_000) == pytest.approx(1.004, rel=0.05)


def test_a_link_that_never_showed_its_bandwidth_has_none() -> None:
    terms = fit_transfer([(1, 0.01), (1000, 0.01), (2000, 0.01), (3000, 0.01)])
    assert terms.latency_s == pytest.approx(0.01)
    assert terms.bytes_per_s > 1e9


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 0.1), (2, 0.1)], "cannot tell latency"),
        ([(1, 0.1)] * 5, "of 1 sizes"),
        ([(1, 0.1), (1, 0.0), (2, 0.1), (2, 0.1)], "no time"),
    ],
)
def test_what_identifies_nothing_is_refused(samples: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_transfer(samples)
