"""The scheduler's promises one by one."""

from __future__ import annotations

import pytest

from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.scheduler import Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence

EMBEDDED = SchedulerConfig(
    mixing="split", token_budget=512, busy_prefill_tokens=128, prefill_rows=64, max_sequences=4, blocks=4 * 128
)


def step(scheduler: Scheduler, now_s: float = 0.0) -> Batch:
    batch = scheduler.schedule(now_s)
    assert batch is not None
    scheduler.complete(batch, now_s)
    return batch


def pieces(batch: Batch) -> list[tuple[object, int, int]]:
    return [(piece.seq.id, piece.start, piece.tokens) for piece in batch.prefills]


def test_counts_of_a_mixed_step_are_those_of_the_cost_model():
    scheduler = Scheduler(SchedulerConfig(token_budget=100))
    scheduler.add(Sequence("a", 40, 5))
    step(scheduler)
    scheduler.add(Sequence("b", 150, 5))
    batch = scheduler.schedule(1.0)
    assert batch is not None
    assert [seq.id for seq in batch.decodes] == ["a"]
    assert pieces(batch) == [("b", 0, 99)]
    assert (batch.decode_sequences, batch.kv_tokens, batch.prefill_tokens) == (1, 40, 99)
    assert batch.attended_tokens == sum(range(1, 100))
    scheduler.complete(batch, 1.1)
    batch = scheduler.schedule(1.1)
    assert batch is not None
    assert pieces(batch) == [("b", 99, 51)]
    assert batch.attended_tokens == sum(range(100, 151))
    assert batch.context_tokens == 41 + 99


def test_split_cuts_prompts_in_multiples_and_less_while_decoding():
    scheduler = Scheduler(EMBEDDED)
    scheduler.add(Sequence("a", 1000, 5))
    assert pieces(step(scheduler)) == [("a", 0, 512)]
    assert pieces(step(scheduler)) == [("a", 512, 488)]
    scheduler.add(Sequence("b", 200, 5))
    batch = step(scheduler)
    assert [seq.id for seq in batch.decodes] == ["a"]
    assert pieces(batch) == [("b", 0, 128)]
    assert pieces(step(scheduler)) == [("b", 128, 72)]
    assert {seq.id for seq in step(scheduler).decodes} == {"a", "b"}


def test_split_gives_the_rest_of_the_budget_to_the_next_prompt():
    scheduler = Scheduler(EMBEDDED)
    for name, prompt in (("a", 100), ("b", 700)):
        scheduler.add(Sequence(name, prompt, 5))
    assert pieces(step(scheduler)) == [("a", 0, 100), ("b", 0, 384)]


def test_prefill_beside_decodes_grows_with_the_prompts_of_a_burst_until_the_last_is_done():
    scheduler = Scheduler(EMBEDDED)
    scheduler.add(Sequence("decodes", 10, 50))
    step(scheduler)
    for name in ("a", "b", "c"):
        scheduler.add(Sequence(name, 500, 5))
    sizes = []
    while (batch := step(scheduler)).prefills:
        sizes.append(batch.prefill_tokens)
    assert sizes == [256, 244, 256, 244, 256, 244], "three came: three times 128, and at most half of 512"


def test_a_lone_prompt_beside_decodes_keeps_to_the_base_budget():
    scheduler = Scheduler(EMBEDDED)
    for name in ("a", "b"):
        scheduler.add(Sequence(name, 60, 50))
    step(scheduler)
    scheduler.add(Sequence("long", 1000, 5))
    assert max(step(scheduler).prefill_tokens for _ in range(8)) == 128


def test_the_last_tokens_of_a_prompt_go_along_in_a_burst_and_never_pass_the_step_budget():
    scheduler = Scheduler(EMBEDDED)
    for name, prompt in (("a", 524), ("b", 264), ("c", 268)):
        scheduler.add(Sequence(name, prompt, 50))
    assert pieces(step(scheduler)) == [("a", 0, 512)], "the step's own budget is a bound"
    assert pieces(step(scheduler)) == [("a", 512, 12), ("b", 0, 264), ("c", 0, 192)]
    assert pieces(step(scheduler)) == [("c", 192, 76)]
    scheduler.add(Sequence("d", 136, 50))
    assert pieces(step(scheduler)) == [("d", 0, 128)], "alone it is cut to the budget"


def test_shortest_prompt_overtakes_a_prefill_that_runs():
    scheduler = Scheduler(SchedulerConfig(**{**_fields(EMBEDDED), "discipline": "spf"}))
    scheduler.add(Sequence("long", 1000, 5))
    step(scheduler)
    scheduler.add(Sequence("short", 30, 5))
    assert pieces(step(scheduler))[0] == ("short", 0, 30)


def test_lowest_free_slot_is_handed_out_first():
    scheduler = Scheduler(EMBEDDED)
    seqs = [Sequence(i, 10, 1 if i == 1 else 9) for i in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    step(scheduler)
    assert [seq.slot for seq in seqs] == [0, -1, 2, 3]
    late = Sequence("late", 10, 5)
    scheduler.add(late)
    step(scheduler)
    assert late.slot == 1


def test_interactive_work_takes_the_place_of_batch_work_and_equals_never_do():
    scheduler = Scheduler(
        SchedulerConfig(
            **{**_fields(EMBEDDED), "discipline": "priority", "preempt_priority": True, "preemption": "swap"}
        )
    )
    work = [Sequence(i, 64, 50, float(i), priority=10) for i in range(5)]
    for seq in work:
        scheduler.add(seq)
    for _ in range(5):
        assert not step(scheduler).preempted
    scheduler.add(Sequence("now", 20, 2, 9.0, priority=0))
    batch = step(scheduler, 9.0)
    assert [(p.seq.id, p.tokens) for p in batch.preempted] == [(3, 68)]
    assert pieces(batch) == [("now", 0, 20)]
    assert work[3].swapped_tokens == 68
    step(scheduler)
    batch = step(scheduler)
    assert [seq.id for seq in batch.restored] == [3]
    assert work[3].computed_tokens == 69
    assert work[3].preemptions == 1


def test_a_sequence_loses_its_place_a_bounded_number_of_times():
    scheduler = Scheduler(
        SchedulerConfig(
            max_sequences=1,
            blocks=100,
            discipline="priority",
            preempt_priority=True,
            max_preemptions=2,
            token_budget=64,
        )
    )
    low = Sequence("low", 10, 100, priority=5)
    scheduler.add(low)
    step(scheduler)
    for i in range(5):
        scheduler.add(Sequence(i, 10, 1, float(i)))
        step(scheduler)
        step(scheduler)
    assert low.preemptions == 2


def test_ageing_lets_old_batch_work_start_before_fresh_interactive_work():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1, blocks=100, discipline="priority", ageing_s=10.0))
    scheduler.add(Sequence("first", 10, 1))
    scheduler.add(Sequence("old", 10, 1, 0.0, priority=2))
    scheduler.add(Sequence("fresh", 10, 1, 15.0, priority=0))
    scheduler.add(Sequence("fresher", 10, 1, 25.0, priority=0))
    order = [pieces(step(scheduler))[0][0] for _ in range(4)]
    assert order == ["first", "fresh", "old", "fresher"]


def test_fair_queueing_serves_tenants_by_tokens():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1, blocks=1000, discipline="fair"))
    for i in range(4):
        scheduler.add(Sequence(f"big{i}", 300, 1, tenant="big"))
    for i in range(4):
        scheduler.add(Sequence(f"small{i}", 100, 1, tenant="small"))
    order = [pieces(step(scheduler))[0][0] for _ in range(8)]
    assert order[:5] == ["big0", "small0", "small1", "small2", "big1"]


def test_cancel_before_during_and_after():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1))
    for name in ("a", "b"):
        scheduler.add(Sequence(name, 30, 5))
    scheduler.cancel("b")
    batch = scheduler.schedule(0.0)
    assert batch is not None
    cancelled = scheduler.cancel("a")
    done = scheduler.complete(batch, 1.0)
    assert done.finished == [cancelled]
    assert not done.emitted
    assert scheduler.idle
    assert scheduler.kv_usage == 0
    assert scheduler.cancel("a") is None


def test_reserve_admits_only_what_fits_to_the_end():
    scheduler = Scheduler(SchedulerConfig(blocks=10, admission="reserve"))
    for name in ("a", "b"):
        scheduler.add(Sequence(name, 16, 64))
    step(scheduler)
    assert [seq.id for seq in scheduler.running] == ["a", "b"]
    scheduler.add(Sequence("c", 16, 1))
    for _ in range(62):
        step(scheduler)
        assert len(scheduler.running) == 2
    assert scheduler.preemptions == 0


def test_bad_settings_name_the_field():
    with pytest.raises(ValueError, match="mixing must be one of"):
        SchedulerConfig(mixing="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="busy_prefill_tokens"):
        SchedulerConfig(prefill_rows=64, busy_prefill_tokens=32)
    with pytest.raises(ValueError, match="blocks"):
        SchedulerConfig(blocks=0)


def _fields(config: SchedulerConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
