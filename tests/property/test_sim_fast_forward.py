"""The jumping instances against the stepwise one: equal to a nanosecond over random loads and configurations."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.core.instance import StepTerms
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.fast_forward import FastForwardInstance
from weighbridge.sim.instance import SimInstance, make_instance
from weighbridge.sim.job import Job
from weighbridge.sim.stepwise import StepwiseInstance

# Odd numbers, so that no arrival falls on a step boundary by accident of round numbers.
TERMS = StepTerms(
    base_s=0.01103717, prefill_s=4.0173e-5, attend_s=3.117e-9, sequence_s=3.0071e-5, kv_s=8.0113e-8, scan_s=1.013e-10
)
# Small batches run on other kernels.
BENT = StepTerms(base_s=0.011017, prefill_s=4.01e-5, kv_s=8.01e-8, sequence_knots=((4.0, 0.00131), (9.0, 0.00571)))
Result = dict[str, tuple[float | None, float | None, int]]


def play(instance: SimInstance, jobs: list[tuple[float, Job]], actions: list[tuple[float, str, float]] = ()) -> Result:
    """Feed arrivals and actions (`slow`, `cancel`) in order of time; before steps that end at the same moment."""
    order = itertools.count()
    heap: list = [(at, 0, next(order), job) for at, job in jobs]
    heap += [(at, 0, next(order), (what, value)) for at, what, value in actions]
    heapq.heapify(heap)
    by_id = {job.id: job for _, job in jobs}
    finished: dict[str, float] = {}
    while heap or instance.wake_s < float("inf"):
        if heap and heap[0][0] <= instance.wake_s:
            at, _, _, what = heapq.heappop(heap)
            if isinstance(what, Job):
                assert instance.add(what, at)
            elif what[0] == "slow":
                instance.slow_down(what[1], at)
            else:
                instance.cancel(by_id[f"{int(what[1]):04d}"], at)
        else:
            now = instance.wake_s
            for kind, job in instance.advance(now):
                if kind == "finished":
                    finished[job.id] = now
    assert instance.idle
    assert instance.used_blocks == 0
    return {job.id: (job.first_token_s, finished.get(job.id), job.preemptions) for _, job in jobs}


def assert_equal(fast: Result, slow: Result) -> None:
    assert fast.keys() == slow.keys()
    for key, (first, end, preemptions) in slow.items():
        assert fast[key][2] == preemptions, key
        for got, expected in ((fast[key][0], first), (fast[key][1], end)):
            assert (got is None) == (expected is None), key
            if expected is not None and got is not None:
                assert abs(got - expected) < 1e-9, key


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[float, int, int, int, int]]:
    """(arrival, prompt, output, priority, ready) of some jobs, drawn through one seed so that they shrink well."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    count = draw(st.integers(1, 40))
    gap = draw(st.sampled_from([0.0, 0.003, 0.02, 0.2]))
    longest = draw(st.sampled_from([3, 40, 200]))
    now, rows = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0 / gap) if gap else 0.0
        prompt, output = rng.randint(1, 220), rng.randint(1, longest)
        rows.append((now, prompt, output, rng.randint(0, 3), prompt - 1 if rng.random() < 0.1 else 0))
    return rows


def jobs_of(rows: list[tuple[float, int, int, int, int]]) -> list[tuple[float, Job]]:
    return [
        (at, Job(f"{k:04d}", prompt, output, priority=priority, ready_tokens=ready))
        for k, (at, prompt, output, priority, ready) in enumerate(rows)
    ]


limits = st.fixed_dictionaries(
    {
        "token_budget": st.sampled_from([33, 64, 257, 2048]),
        "max_sequences": st.sampled_from([1, 4, 32]),
        "block_tokens": st.sampled_from([1, 4, 16]),
        "kv_tokens": st.sampled_from([432, 640, 2_000, 100_000]),
        "admission": st.sampled_from(["optimistic", "prompt"]),
    }
)


def config_of(values: dict[str, int], **more: object) -> SchedulerConfig:
    values = dict(values)
    blocks = values.pop("kv_tokens") // values["block_tokens"]
    return SchedulerConfig(blocks=blocks, **values, **more)  # type: ignore[arg-type]


@settings(max_examples=120, deadline=None)
@given(rows=loads(), values=limits, terms=st.sampled_from([TERMS, BENT]))
def test_fast_forward_equals_stepwise(rows: list, values: dict[str, int], terms: StepTerms) -> None:
    config = config_of(values)
    fast = FastForwardInstance("a", config, CostRunner(terms))
    slow = StepwiseInstance("b", config, CostRunner(terms))
    assert_equal(play(fast, jobs_of(rows)), play(slow, jobs_of(rows)))
    assert fast.steps_run == slow.steps_run
    assert fast.preemptions == slow.preemptions
    assert fast.generated(1e9) == slow.generated(1e9) == sum(row[2] for row in rows) + 0 * fast.preemptions


@settings(max_examples=120, deadline=None)
@given(
    rows=loads(),
    values=limits,
    discipline=st.sampled_from(["fcfs", "priority", "spf", "sjf", "round_robin", "fair"]),
    mixing=st.sampled_from(["mixed", "split", "prefill_first", "decode_first", "request_level"]),
    preempt=st.booleans(),
    swap=st.booleans(),
)
def test_jumps_of_any_configuration_equal_its_steps(
    rows: list, values: dict[str, int], discipline: str, mixing: str, preempt: bool, swap: bool
) -> None:
    config = config_of(
        values,
        discipline=discipline,
        mixing=mixing,
        preempt_priority=preempt and discipline == "priority",
        preemption="swap" if swap else "recompute",
    )
    rows = [(at, prompt, output, priority, 0) for at, prompt, output, priority, _ in rows]
    fast = StepwiseInstance("a", config, CostRunner(TERMS), jump=True)
    slow = StepwiseInstance("b", config, CostRunner(TERMS))
    assert_equal(play(fast, jobs_of(rows)), play(slow, jobs_of(rows)))
    assert fast.steps_run == slow.steps_run


@settings(max_examples=60, deadline=None)
@given(rows=loads(), values=limits, seed=st.integers(0, 1000))
def test_cancels_and_slow_downs_fall_on_the_same_steps(rows: list, values: dict[str, int], seed: int) -> None:
    rng = random.Random(seed)
    end = rows[-1][0] + 1.0
    actions = [(rng.uniform(0, end), "slow", rng.choice([1.0, 2.5, 7.0])) for _ in range(3)]
    for k, row in enumerate(rows):
        if rng.random() < 0.3:
            actions.append((row[0] + rng.uniform(0.001, 1.0), "cancel", float(k)))
    config = config_of(values)
    fast = FastForwardInstance("a", config, CostRunner(TERMS))
    jump = StepwiseInstance("j", config, CostRunner(TERMS), jump=True)
    slow = StepwiseInstance("b", config, CostRunner(TERMS))
    expected = play(slow, jobs_of(rows), actions)
    assert_equal(play(jump, jobs_of(rows), actions), expected)
    ended = {key: value for key, value in play(fast, jobs_of(rows), actions).items() if value[1] is not None}
    assert_equal(ended, {key: value for key, value in expected.items() if value[1] is not None})


def test_gauges_in_the_middle_of_a_jump_are_those_of_the_steps() -> None:
    config = SchedulerConfig(blocks=400, token_budget=256, max_sequences=8)
    fast = FastForwardInstance("a", config, CostRunner(TERMS))
    slow = StepwiseInstance("b", config, CostRunner(TERMS))
    rng = random.Random(3)
    events = sorted(
        [(rng.uniform(0, 3), "job", k) for k in range(14)] + [(rng.uniform(0, 6), "look", k) for k in range(60)]
    )
    looks = 0
    for at, what, k in events:
        for instance in (fast, slow):
            while instance.wake_s < at:
                instance.advance(instance.wake_s)
        if what == "job":
            sizes = random.Random(k)
            prompt, output = sizes.randint(10, 400), sizes.randint(20, 200)
            fast.add(Job(f"{k:04d}", prompt, output), at)
            slow.add(Job(f"{k:04d}", prompt, output), at)
            continue
        assert dict(fast.progress(at)) == dict(slow.progress(at))
        assert fast.generated(at) == slow.generated(at)
        one, other = fast.report(at), slow.report(at)
        assert (one.running, one.waiting, one.waiting_tokens) == (other.running, other.waiting, other.waiting_tokens)
        looks += bool(one.running)
    assert looks > 20


def test_what_has_no_closed_form_is_refused_and_runs_stepwise() -> None:
    config = SchedulerConfig(discipline="priority")
    with pytest.raises(ValueError, match="closed form"):
        FastForwardInstance("a", config, CostRunner(TERMS))
    assert isinstance(make_instance("a", config, CostRunner(TERMS)), StepwiseInstance)
    assert isinstance(make_instance("a", SchedulerConfig(), CostRunner(TERMS)), FastForwardInstance)


def test_a_job_that_never_fits_is_refused() -> None:
    config = SchedulerConfig(blocks=10)
    for instance in (
        FastForwardInstance("a", config, CostRunner(TERMS)),
        StepwiseInstance("b", config, CostRunner(TERMS)),
    ):
        assert not instance.add(Job("x", 150, 20), 0.0)
        assert instance.idle
