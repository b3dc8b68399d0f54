"""The two that join a queue by counting: requests in flight, and tokens in flight with credit for cached prefixes.

Both count what this router sent, from dispatch to the end of the request: a report that is late changes nothing.
"""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.core.instance import InstanceSpec
from weighbridge.core.request import Request
from weighbridge.routing.fleet import Fleet
from weighbridge.routing.policies.least_requests import LeastRequests
from weighbridge.routing.policies.least_tokens import LeastTokens
from weighbridge.routing.policy import Choice, Option, Policy, View

PROMPT = 500
Running = tuple[int, int]
"""Prompt tokens of a request in flight, and output tokens so far; 0 of them: its prompt is not done yet."""


def fleet_of(*instances: Sequence[Running]) -> Fleet:
    fleet = Fleet()
    for n, running in enumerate(instances):
        instance = fleet.up(InstanceSpec(name=f"i{n}"), 1)
        for k, (prompt, output) in enumerate(running):
            name = f"{n}/{k}"
            request = Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_tokens=400)
            # whatever is expected to be generated must not count: 10,000 where the least is chosen by hand below
            fleet.charge(request, instance, cached_tokens=0, expected_output_tokens=10_000, now_s=0.0)
            if output:
                fleet.first_token(name, 0.1)
                fleet.progress(name, output)
    return fleet


def choose(policy: Policy, fleet: Fleet, cached: Sequence[int] = (), seed: int = 0) -> Choice:
    new = Request(id="new", arrival_s=0.2, prompt_tokens=PROMPT, max_tokens=400)
    hits = [*cached, *[0] * len(fleet.instances)]
    options = [
        Option(i, cached_tokens=hit, prefill_tokens=PROMPT - hit, decode_tokens=100)
        for i, hit in zip(fleet, hits, strict=False)
    ]
    return policy.choose(View(new, options, fleet, 0.2, random.Random(seed), True))


def test_least_requests_counts_requests_however_large() -> None:
    choice = choose(LeastRequests(), fleet_of([(10, 1), (10, 1), (10, 0)], [(9_000, 300), (9_000, 0)]))
    assert choice.scores == [3.0, 2.0]
    assert choice.index == 1


def test_least_requests_counts_from_dispatch_to_the_end() -> None:
    """Load that is counted only once a stream has begun sends every long prompt to one instance."""
    fleet = fleet_of([], [])
    for n in range(6):
        at = choose(LeastRequests(), fleet, seed=n).index
        assert at is not None
        instance = list(fleet)[at]
        request = Request(id=f"r{n}", arrival_s=0.0, prompt_tokens=8_000, max_tokens=10)
        fleet.charge(request, instance, cached_tokens=0, expected_output_tokens=10, now_s=0.0)
    assert choose(LeastRequests(), fleet).scores == [3.0, 3.0]
    for n in range(6):
        fleet.release(f"r{n}")
    assert choose(LeastRequests(), fleet).scores == [0.0, 0.0]


def test_least_tokens_adds_prompts_what_they_generated_and_the_uncached_part_of_this_one() -> None:
    fleet = fleet_of([(1_000, 50), (200, 0)], [(700, 200)], [(1_200, 0)])
    # 1,000 + 50 + 200 + 500; 700 + 200 + 500; 1,200 + 500 of which 304 are cached there
    choice = choose(LeastTokens(), fleet, cached=(0, 0, 304))
    assert choice.scores == [1_750.0, 1_400.0, 1_396.0]
    assert choice.index == 2


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 300)), max_size=5), min_size=1, max_size=6
    ),
    st.lists(st.integers(0, PROMPT - 1), min_size=6, max_size=6),
    st.integers(0, 99),
)  # fmt: skip
def test_both_take_one_with_the_least_of_sums_made_from_scratch(
    instances: list[list[Running]], cached: list[int], seed: int
) -> None:
    fleet = fleet_of(*instances)
    requests = [float(len(running)) for running in instances]
    tokens = [float(sum(map(sum, r)) + PROMPT - hit) for r, hit in zip(instances, cached, strict=False)]
    for policy, expected in ((LeastRequests(), requests), (LeastTokens(), tokens)):
        choice = choose(policy, fleet, cached, seed)
        assert choice.scores == expected
        assert choice.index is not None
        assert expected[choice.index] == min(expected)


def test_ties_are_broken_by_chance_so_that_none_is_favoured() -> None:
    fleet = fleet_of([(10, 1)], [(10, 1)], [(10, 1)])
    for policy in (LeastRequests(), LeastTokens()):
        assert {choose(policy, fleet, seed=seed).index for seed in range(40)} == {0, 1, 2}
