"""The prefix cache against slots that really hold tokens, and the radix tree against a scan of all holders."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from weighbridge.scheduling.prefix_cache import PrefixCache, PrefixCacheConfig, Saved
from weighbridge.scheduling.radix import RadixTree
from weighbridge.scheduling.scheduler import Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence

SLOTS = 3
runs = st.lists(st.integers(0, 2), max_size=8)


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "remove"]), st.integers(0, 5), runs, st.sampled_from(["a", "b"])),
        max_size=25,
    ),
    probe=runs,
)
def test_the_tree_equals_a_scan(steps: list[tuple[str, int, list[int], str]], probe: list[int]) -> None:
    tree = RadixTree()
    held: dict[int, tuple[str, list[int]]] = {}
    for action, holder, tokens, namespace in steps:
        if action == "insert":
            tree.insert(holder, tokens, namespace)
            held[holder] = (namespace, tokens)
        else:
            tree.remove(holder)
            held.pop(holder, None)
        for namespace in ("a", "b"):
            expected = {}
            for other, (space, content) in held.items():
                common = 0
                while common < min(len(content), len(probe)) and content[common] == probe[common]:
                    common += 1
                if space == namespace and common:
                    expected[other] = common
            assert tree.match(probe, namespace) == expected
        assert all(tree.content(other) == value for other, value in held.items())
        assert all(tree.length(other) == len(value[1]) for other, value in held.items())
    assert len(tree) == len(held)


class Slots:
    """What an engine's KV would hold."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = [[] for _ in range(SLOTS)]
        self.saved: dict[Saved, list[int]] = {}
        self.swapped: dict[object, list[int]] = {}

    def step(self, scheduler: Scheduler) -> bool:
        batch = scheduler.schedule(0.0)
        if batch is None:
            return False
        for seq, tokens, slot in batch.preempted:
            if tokens:
                self.swapped[seq.id] = self.slots[slot][:tokens]
        for placement in batch.placements:
            for saved in placement.drop:
                del self.saved[saved]
            if placement.save is not None:
                self.saved[placement.save] = list(self.slots[placement.slot])
            source = placement.source
            content: list[int] = []
            if source is not None:
                content = self.saved[source] if isinstance(source, Saved) else self.slots[source]
            self.slots[placement.slot] = content[: placement.tokens]
            assert len(self.slots[placement.slot]) == placement.tokens
        for seq in batch.restored:
            self.slots[seq.slot] = self.swapped.pop(seq.id)
        work = [(seq, seq.computed_tokens, 1) for seq in batch.decodes]
        for seq, start, count in [*work, *batch.prefills]:
            assert seq.tokens is not None
            assert self.slots[seq.slot] == seq.tokens[:start], "the KV under a sequence is its own"
            self.slots[seq.slot] += seq.tokens[start : start + count]
            if start + count == seq.total_tokens:
                seq.tokens.append(7 + len(seq.tokens))
        scheduler.complete(batch, 0.0)
        return True


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 1)),
        max_size=14,
    ),
    gaps=st.lists(st.integers(0, 4), min_size=14, max_size=14),
    saved_tokens=st.sampled_from([0, 20, 60]),
    cancel=st.integers(0, 20),
    preemption=st.sampled_from(["swap", "recompute"]),
    spaces=st.booleans(),
)
@example(  # one is swapped in and another starts with the same prefix in the same step
    rows=[*[([0], 1, 0)] * 7, ([0], 3, 0), ([1, 0], 1, 1), ([0], 2, 0), ([1], 1, 1), ([0], 1, 0)],
    gaps=[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 0],
    saved_tokens=0,
    cancel=0,
    preemption="swap",
    spaces=False,
)
def test_every_sequence_computes_on_its_own_prefix(rows, gaps, saved_tokens, cancel, preemption, spaces) -> None:
    cache = PrefixCache(PrefixCacheConfig(saved_tokens, min_copy_tokens=2, min_wait_tokens=4, min_save_tokens=4))
    config = SchedulerConfig(
        mixing="split",
        token_budget=16,
        busy_prefill_tokens=4,
        prefill_rows=4,
        max_sequences=SLOTS,
        blocks=1000,
        discipline="priority",
        preempt_priority=True,
        preemption=preemption,
    )
    scheduler = Scheduler(config, cache)
    slots = Slots()
    seqs = []
    for i, (chunks, output, priority) in enumerate(rows):
        tokens = [t for chunk in chunks for t in [chunk] * 5] + [i % 3]
        space = str(i % 2) if spaces else ""
        seq = Sequence(i, len(tokens), output, float(i), priority=priority, tokens=tokens, namespace=space)
        seqs.append(seq)
        scheduler.add(seq)
        for _ in range(gaps[i]):
            slots.step(scheduler)
        if i == cancel:
            scheduler.cancel(i // 2)
        assert cache.saved_tokens <= saved_tokens
        assert set(slots.saved) == set(cache._saved)
    for _ in range(10_000):
        if not slots.step(scheduler):
            break
    assert scheduler.idle
    assert not cache._running
    assert all(seq.finish_reason is not None for seq in seqs)
    assert sorted(scheduler._free_slots) == list(range(SLOTS))


def build(slots: int, **config: int) -> tuple[Scheduler, Slots]:
    assert slots == SLOTS
    cache = PrefixCache(PrefixCacheConfig(**config))
    scheduling = SchedulerConfig(
        mixing="split", token_budget=512, busy_prefill_tokens=128, prefill_rows=64, max_sequences=slots, blocks=1000
    )
    return Scheduler(scheduling, cache), Slots()


def test_simultaneous_cold_requests_prefill_their_prefix_once() -> None:
    scheduler, slots = build(SLOTS)
    prompt = list(range(1000, 1200))
    seqs = [Sequence(i, 200, 3, tokens=list(prompt)) for i in range(SLOTS)]
    for seq in seqs:
        scheduler.add(seq)
    computed = 0
    while True:
        before = sum(seq.computed_tokens for seq in seqs) - sum(seq.cached_tokens for seq in seqs)
        if not slots.step(scheduler):
            break
        computed = max(computed, before)
    assert sorted(seq.cached_tokens for seq in seqs) == [0, 199, 199]


def test_those_that_do_not_share_are_let_by() -> None:
    scheduler, slots = build(SLOTS)
    scheduler.add(Sequence("leader", 1400, 3, tokens=list(range(1400))))
    scheduler.add(Sequence("follower", 1400, 3, tokens=list(range(1400))))
    scheduler.add(Sequence("other", 10, 3, tokens=[5000 + i for i in range(10)]))
    slots.step(scheduler)
    assert [seq.id for seq in scheduler.running] == ["leader", "other"]


def test_a_follow_up_continues_in_place_and_a_sibling_copies() -> None:
    scheduler, slots = build(SLOTS)
    first = Sequence("first", 200, 20, tokens=list(range(200)))
    scheduler.add(first)
    while slots.step(scheduler):
        pass
    assert first.tokens is not None
    again = Sequence("again", 230, 3, tokens=first.tokens[:219] + list(range(3000, 3011)))
    sibling = Sequence("sibling", 190, 3, tokens=[*range(150), *range(4000, 4040)])
    scheduler.add(again)
    scheduler.add(sibling)
    slots.step(scheduler)
    assert (again.slot, again.cached_tokens) == (0, 219)
    assert (sibling.slot, sibling.cached_tokens) == (1, 150)


def test_a_slot_that_is_needed_is_saved_first_and_comes_back() -> None:
    scheduler, slots = build(SLOTS, saved_tokens=500)
    for i in range(4):
        scheduler.add(Sequence(i, 100, 1, tokens=list(range(i * 1000, i * 1000 + 100))))
        while slots.step(scheduler):
            pass
    assert list(slots.saved.values()) == [list(range(100))]
    back = Sequence("back", 100, 1, tokens=list(range(100)))
    scheduler.add(back)
    while slots.step(scheduler):
        pass
    assert back.cached_tokens == 99


def test_tenants_do_not_meet() -> None:
    scheduler, slots = build(SLOTS)
    for i, space in enumerate(["a", "b", "a"]):
        scheduler.add(Sequence(i, 100, 1, tokens=list(range(100)), namespace=space))
        while slots.step(scheduler):
            pass
    cache = scheduler.prefixes
    assert cache is not None
    assert cache.reusable(list(range(100)), "c") == 0
    assert cache.reusable(list(range(100)), "a") == 100


def test_a_follower_that_comes_late_waits_for_the_last_chunk_too() -> None:
    scheduler, slots = build(SLOTS)
    running = Sequence("busy", 10, 50, tokens=[7000 + i for i in range(10)])
    scheduler.add(running)
    slots.step(scheduler)
    leader = Sequence("leader", 200, 2, tokens=list(range(200)))
    scheduler.add(leader)
    slots.step(scheduler)
    assert leader.computed_tokens == 128
    follower = Sequence("follower", 200, 2, tokens=[*range(150), *range(8000, 8050)])
    scheduler.add(follower)
    while slots.step(scheduler):
        pass
    assert follower.cached_tokens == 150
