"""SLO bounds as people write them."""

from __future__ import annotations

import pytest

from weighbridge.bench.slo import tiers_of
from weighbridge.core.errors import ConfigError


def test_a_bound_for_all_replaces_the_defaults() -> None:
    tiers = tiers_of(["ttft=0.5,tpot=50ms"])
    assert all((t.ttft_s, t.tpot_s, t.e2e_s) == (0.5, 0.05, None) for t in tiers.values())


def test_a_tier_adds_to_what_holds_for_it() -> None:
    tiers = tiers_of(["e2e=8", "interactive:ttft=0.2", "gold:ttft=0.1s"])
    assert (tiers["interactive"].ttft_s, tiers["interactive"].e2e_s) == (0.2, 8.0)
    assert (tiers["gold"].ttft_s, tiers["gold"].e2e_s) == (0.1, 8.0)
    assert tiers["batch"].ttft_s is None


def test_without_bounds_the_default_tiers_and_the_mix_have_their_own() -> None:
    assert tiers_of([])["interactive"].ttft_s == 0.5
    assert tiers_of([], mix="mixed")["document"].ttft_s == 2.0


def test_goodput_is_in_milliseconds_as_in_vllm() -> None:
    assert tiers_of([], goodput=["ttft:500", "e2el:2000"])["standard"].ttft_s == 0.5
    assert tiers_of([], goodput=["e2el:2000"])["standard"].e2e_s == 2.0


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "speed=1", "ttft=-1", "ttft=0"])
def test_nonsense_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        tiers_of([text])
