"""The engine on the real model without HTTP: prefix reuse, preemption, failures, bounded queues."""

from __future__ import annotations

import dataclasses
import gc
import time

import numpy as np
import pytest

from tests.support.engines import GREEDY, LocalEngine, local_engine
from weighbridge.engine.libllama import Library
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.runner import DecodeFailed, LlamaRunner, Rows, RunnerOptions
from weighbridge.engine.sampling import SamplingParams

pytestmark = pytest.mark.engine
SMALL = RunnerOptions(slots=2, context_tokens=512, threads=1)
PLAIN = EngineOptions(runner=SMALL, prefix_caching=False, max_step_s=60.0)
STORY = "Once upon a time there was a little fox who lived in a deep green forest near a river. " * 8


def words(count: int, start: int = 600) -> list[int]:
    return [start + i for i in range(count)]


def test_identical_cold_requests_prefill_once(model: LlamaModel) -> None:
    options = EngineOptions(runner=dataclasses.replace(SMALL, slots=4), max_step_s=60.0)
    with local_engine(model, options) as engine:
        tokens = model.tokenize(STORY)
        runs = [engine.run(tokens, 4) for _ in range(4)]
        stats = [run.wait().last.stats for run in runs]
        cached = sorted(stat.cached_tokens for stat in stats if stat is not None)
        assert cached == [0, *[len(tokens) - 1] * 3]
        assert engine.engine.counters.prefill_tokens == len(tokens) + 3
        assert engine.engine.counters.prefix_hits == 3 * (len(tokens) - 1)
        assert engine.engine.scheduler.kv_usage == 0


def test_a_copied_prefix_gives_the_same_logits(model: LlamaModel) -> None:
    runner = LlamaRunner(model, SMALL)
    tokens = model.tokenize(STORY)[:192]
    own = runner.prefill([Rows(0, tokens[:128], 0, False)])
    own = runner.prefill([Rows(0, tokens[128:], 128, True)]).copy()
    runner.copy(0, 1, 128)
    copied = runner.prefill([Rows(1, tokens[128:], 128, True)])
    np.testing.assert_array_equal(own, copied)
    runner.close()


def test_the_kv_of_a_slot_moves_between_contexts_bit_exact(model: LlamaModel) -> None:
    first, second = LlamaRunner(model, SMALL), LlamaRunner(model, SMALL)
    tokens = model.tokenize(STORY)[:128]
    first.prefill([Rows(0, tokens, 0, False)])
    data = first.save(0)
    second.restore(1, data)
    assert second.length(1) == 128
    np.testing.assert_array_equal(first.decode([0], [600], [128]), second.decode([1], [600], [128]))
    for bad in (data[:100], np.zeros(50, np.uint8), data[:-7]):
        with pytest.raises(DecodeFailed):
            second.restore(0, bad)
    first.close()
    second.close()


def test_the_library_may_log_after_another_library_object_is_gone(model: LlamaModel) -> None:
    """The C library holds one log callback per process, whoever set it last; a freed one crashed the process."""
    other = Library(model.library.path)
    del other
    gc.collect()
    garbage = [bytearray(200) for _ in range(1000)]
    runner = LlamaRunner(model, SMALL)
    runner.prefill([Rows(0, words(64), 0, False)])
    data = runner.save(0)
    for bad in (data[:100], data[:-7]):
        with pytest.raises(DecodeFailed):
            runner.restore(1, bad)
    assert len(garbage) == 1000
    runner.close()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_work_ends_with_the_same_text(model: LlamaModel, preemption: str) -> None:
    """One slot, so that batch shapes are equal with and without the interruption."""
    options = dataclasses.replace(PLAIN, runner=dataclasses.replace(SMALL, slots=1), preemption=preemption)
    with local_engine(model, options) as engine:
        alone = engine.run("The quick brown", 40, ignore_eos=True).wait()
        batch = engine.run("The quick brown", 40, ignore_eos=True, priority=10)
        while len(batch.outputs) < 10:
            time.sleep(0.002)
        steps = engine.engine.counters.steps
        urgent = engine.run("Hi", 3, ignore_eos=True, priority=0).wait()
        assert engine.engine.counters.steps - steps <= 8
        assert not batch.done.is_set()
        batch.wait()
        assert batch.last.stats is not None and urgent.last.stats is not None
        assert batch.last.stats.preemptions == 1
        assert urgent.last.stats.preemptions == 0
        if preemption == "swap":
            assert batch.tokens == alone.tokens
            assert engine.engine.counters.swaps == 1
        else:  # the recompute prefills what was decoded: another batch shape than the decodes had
            before = sum(when < urgent.times_s[0] for when in batch.times_s)
            assert batch.tokens[:before] == alone.tokens[:before]
            prompt = model.tokenize("The quick brown") + batch.tokens[:before]
            fresh = engine.run(prompt, 40 - before, ignore_eos=True).wait()  # whose prompt is computed in that shape
            assert batch.tokens[before:] == fresh.tokens
            assert engine.engine.counters.swaps == 0
        assert len(batch.tokens) == 40


def test_logits_after_a_recompute_are_those_of_the_decodes_within_rounding(model: LlamaModel) -> None:
    """Teacher-forced: the same tokens decoded one by one, and prefilled at once as a recompute does."""
    runner = LlamaRunner(model, SMALL)
    tokens = model.tokenize(STORY)[:80]
    runner.prefill([Rows(0, tokens[:64], 0, False)])
    decoded = np.concatenate([runner.decode([0], [token], [64 + i]).copy() for i, token in enumerate(tokens[64:])])
    runner.trim(0, 0)
    recomputed = runner.score(0, tokens, 0)[64:]
    off = np.abs(decoded - recomputed)
    assert off.max() < 0.3 * decoded.std(), "rounding, not another computation"
    assert off.mean() < 0.05 * decoded.std()
    runner.close()


def test_a_seed_makes_sampling_repeatable_and_logprobs_fit(model: LlamaModel) -> None:
    with local_engine(model, dataclasses.replace(PLAIN, runner=dataclasses.replace(SMALL, slots=1))) as engine:
        sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=11, logprobs=3)
        first, second = (engine.run("The", 12, sampling=sampling).wait() for _ in range(2))
        assert first.tokens == second.tokens
        for output in first.outputs:
            (entry,) = output.logprobs
            assert entry.token == output.tokens[0]
            assert entry.logprob <= entry.top[0][1]


def test_a_failing_pass_ends_its_own_requests_and_serving_goes_on(model: LlamaModel) -> None:
    with local_engine(model, PLAIN) as engine:
        first = engine.run("One two three", 400, ignore_eos=True)
        while len(first.outputs) < 3:
            time.sleep(0.002)
        good, calls = engine.engine.runner.prefill, []

        def fail_once(pieces):
            engine.engine.runner.prefill = good
            calls.append(pieces)
            raise DecodeFailed("out of memory")

        engine.engine.runner.prefill = fail_once
        second = engine.run("Four five", 5).wait()
        assert (second.last.finish_reason, second.last.error) == ("error", "out of memory")
        assert calls
        assert engine.run("Six", 3, ignore_eos=True).wait().last.finish_reason == "length"
        assert not first.done.is_set()
        assert engine.engine.healthy
        engine.engine.cancel(first.id)
        assert first.wait().last.finish_reason == "cancelled"
        assert engine.engine.counters.failures == 1
        wait_idle(engine)


def test_the_queue_is_bounded(model: LlamaModel) -> None:
    with local_engine(model, dataclasses.replace(PLAIN, max_waiting=2)) as engine:
        busy = [engine.run(words(8), 300, ignore_eos=True) for _ in range(2)]
        while not all(run.outputs for run in busy):
            time.sleep(0.002)
        queued = [engine.run(words(8), 5) for _ in range(2)]
        refused = engine.run(words(8), 5).wait()
        assert refused.last.finish_reason == "overloaded"
        for run in busy:
            engine.engine.cancel(run.id)
        assert all(run.wait().last.finish_reason in ("stop", "length") for run in queued)


def test_stop_ends_everything_that_runs(model: LlamaModel) -> None:
    with local_engine(model, PLAIN) as engine:
        runs = [engine.run("One two three", 400, ignore_eos=True, sampling=GREEDY) for _ in range(3)]
        while not runs[0].outputs:
            time.sleep(0.002)
    assert all(run.last.finish_reason == "cancelled" for run in runs)


def test_a_grammar_is_kept_to(model: LlamaModel) -> None:
    with local_engine(model, PLAIN) as engine:
        grammar = 'root ::= "{" [0-9]+ "}"'
        run = engine.run("Give me a number:", 12, grammar=grammar).wait()
        assert run.text.startswith("{")
        assert run.text.strip("{}").isdigit()
        bad = engine.run("x", 3, grammar="root ::= (").wait()
        assert bad.last.finish_reason == "error"
        assert "grammar" in (bad.last.error or "")


def wait_idle(engine: LocalEngine) -> None:
    deadline = time.monotonic() + 10
    while not engine.engine.idle:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert engine.engine.scheduler.kv_usage == 0
