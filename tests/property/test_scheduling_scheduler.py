"""Every mixer and discipline: each sequence ends once with its full output, and all memory comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.scheduling.mixing import MIXERS
from weighbridge.scheduling.order import DISCIPLINES
from weighbridge.scheduling.scheduler import AddRefused, Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence, Status

A, BP, C, DK = 0.006, 6.0e-5, 3.0e-5, 1.2e-8  # step seconds: constant, per prefill token, sequence, context token


def run(scheduler: Scheduler, arrivals: list[Sequence], cancels: dict[int, int] | None = None) -> float:
    """Drive to the end: arrivals enter at step boundaries, as an engine's loop takes them."""
    now_s, nxt, step = 0.0, 0, 0
    emitted: dict[str | int, int] = {}
    finished: list[str | int] = []
    while nxt < len(arrivals) or not scheduler.idle:
        while nxt < len(arrivals) and arrivals[nxt].arrival_s <= now_s:
            scheduler.add(arrivals[nxt])
            nxt += 1
        batch = scheduler.schedule(now_s)
        if batch is None:
            assert nxt < len(arrivals), "nothing to do but not idle"
            now_s = arrivals[nxt].arrival_s
            continue
        assert batch.sequences > 0
        assert len({seq.id for seq in batch.decodes} | {p.seq.id for p in batch.prefills}) == batch.sequences
        for seq in scheduler.running:
            assert seq.blocks * scheduler.config.block_tokens >= seq.computed_tokens
        for seq_id in [i for i, at in (cancels or {}).items() if at == step]:
            scheduler.cancel(seq_id)
        now_s += A + BP * batch.prefill_tokens + C * batch.sequences + DK * batch.context_tokens
        done = scheduler.complete(batch, now_s)
        for seq in done.emitted:
            emitted[seq.id] = emitted.get(seq.id, 0) + 1
        finished += [seq.id for seq in done.finished]
        step += 1
        assert step < 20_000, "no progress"
    assert len(finished) == len(set(finished))
    for seq in arrivals:
        assert seq.status is Status.FINISHED
        if seq.finish_reason == "length":
            assert emitted[seq.id] == seq.output_tokens == seq.max_output_tokens
    assert scheduler.memory.used_blocks == 0
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    assert sorted(scheduler._free_slots) == list(range(scheduler.config.max_sequences))
    return now_s


sequences = st.lists(
    st.tuples(
        st.integers(1, 120),  # prompt
        st.integers(1, 40),  # output
        st.floats(0, 0.5),  # arrival
        st.integers(0, 2),  # priority
        st.sampled_from(["a", "b", "c"]),
    ),
    min_size=1,
    max_size=20,
)


def build(rows: list[tuple[int, int, float, int, str]]) -> list[Sequence]:
    rows = sorted(rows, key=lambda row: row[2])
    return [
        Sequence(i, prompt, output, at, priority=priority, tenant=tenant)
        for i, (prompt, output, at, priority, tenant) in enumerate(rows)
    ]


@settings(max_examples=150, deadline=None)
@given(
    rows=sequences,
    mixing=st.sampled_from(sorted(MIXERS)),
    discipline=st.sampled_from(DISCIPLINES),
    ageing_s=st.sampled_from([None, 0.1]),
    admission=st.sampled_from(["optimistic", "reserve"]),
    preemption=st.sampled_from(["recompute", "swap"]),
    preempt_priority=st.booleans(),
    blocks=st.integers(11, 40),
    max_sequences=st.integers(1, 6),
    token_budget=st.integers(8, 64),
    prefill_rows=st.sampled_from([1, 8]),
    cancels=st.dictionaries(st.integers(0, 19), st.integers(0, 30), max_size=5),
)
def test_every_sequence_ends_once_and_all_memory_comes_back(rows, cancels, **config):
    run(Scheduler(SchedulerConfig(busy_prefill_tokens=8, **config)), build(rows), cancels)


@dataclass
class NaiveRequest:
    """A request of the slow oracle: lists and sums instead of counters."""

    id: int
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    made: int = 0
    blocks: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    preempted: int = 0


@dataclass
class NaiveEngine:
    """The obvious loop: one budget, running first, FCFS, preempt the last and recompute."""

    budget: int
    slots: int
    blocks: int
    wait: list[NaiveRequest] = field(default_factory=list)
    run: list[NaiveRequest] = field(default_factory=list)

    def free(self) -> int:
        return self.blocks - sum(r.blocks for r in self.run)

    def plan(self) -> list[tuple[NaiveRequest, int]]:
        plan: list[tuple[NaiveRequest, int]] = []
        evicted = False
        for request in list(self.run):
            left = self.budget - sum(n for _, n in plan)
            if left == 0 or request not in self.run:
                break
            n = min(request.prompt + request.made - request.computed, left)
            need = (request.computed + n + 15) // 16
            while need - request.blocks > self.free():
                victim = self.run[-1]
                self.run.remove(victim)
                victim.blocks = victim.computed = 0
                victim.preempted += 1
                self.wait.insert(0, victim)
                evicted = True
                if victim is request:
                    return plan
            request.blocks = max(need, request.blocks)
            plan.append((request, n))
        while self.wait and not evicted and len(self.run) < self.slots:
            left = self.budget - sum(n for _, n in plan)
            n = min(self.wait[0].prompt + self.wait[0].made, left)
            need = (n + 15) // 16
            if n == 0 or need > self.free():
                break
            request = self.wait.pop(0)
            request.blocks = need
            self.run.append(request)
            plan.append((request, n))
        return plan


def naive(requests: list[NaiveRequest], engine: NaiveEngine) -> None:
    now_s, todo = 0.0, list(requests)
    while todo or engine.wait or engine.run:
        while todo and todo[0].arrival_s <= now_s:
            engine.wait.append(todo.pop(0))
        plan = engine.plan()
        if not plan:
            now_s = todo[0].arrival_s
            continue
        prefill = sum(n for r, n in plan if n > 1 or r.computed < r.prompt)
        context = sum(r.computed for r, _ in plan)
        now_s += A + BP * prefill + C * len(plan) + DK * context
        for request, n in plan:
            request.computed += n
            if request.computed == request.prompt + request.made:
                request.made += 1
                if request.first_s < 0:
                    request.first_s = now_s
                if request.made == request.output:
                    request.end_s = now_s
                    request.blocks = 0
        engine.run = [r for r in engine.run if r.end_s < 0]


@settings(max_examples=100, deadline=None)
@given(rows=sequences, blocks=st.integers(11, 60), slots=st.integers(1, 8), budget=st.integers(4, 80))
def test_mixed_equals_the_obvious_loop(rows, blocks, slots, budget):
    seqs = build(rows)
    requests = [NaiveRequest(int(s.id), s.arrival_s, s.prompt_tokens, s.max_output_tokens) for s in seqs]
    naive(requests, NaiveEngine(budget, slots, blocks))
    run(Scheduler(SchedulerConfig(token_budget=budget, max_sequences=slots, blocks=blocks)), seqs)
    for seq, request in zip(seqs, requests, strict=True):
        assert (seq.first_token_s, seq.finished_s) == (request.first_s, request.end_s)
        assert seq.preemptions == request.preempted


@settings(max_examples=60, deadline=None)
@given(
    rows=sequences,
    blocks=st.integers(11, 40),
    mixing=st.sampled_from(sorted(MIXERS)),
    families=st.lists(st.integers(0, 2), min_size=20, max_size=20),
)
def test_shared_prefixes_leave_no_block_behind(rows, blocks, mixing, families):
    seqs = build(rows)
    for seq, family in zip(seqs, families, strict=False):
        seq.block_hashes = [family * 1000 + i for i in range((seq.prompt_tokens + seq.max_output_tokens) // 16)]
    scheduler = Scheduler(
        SchedulerConfig(token_budget=64, max_sequences=4, blocks=blocks, prefix_caching=True, mixing=mixing)
    )
    run(scheduler, seqs)
    assert not scheduler.memory._refs
    assert scheduler.memory.cached_blocks <= blocks


def test_a_sequence_that_can_never_fit_is_refused():
    scheduler = Scheduler(SchedulerConfig(blocks=4, max_waiting=1))
    try:
        scheduler.add(Sequence("long", 60, 5))
    except AddRefused as refused:
        assert refused.reason == "too_long"
    else:
        raise AssertionError("taken")
    scheduler.add(Sequence("a", 4, 5))
    try:
        scheduler.add(Sequence("b", 4, 5))
    except AddRefused as refused:
        assert refused.reason == "queue_full"
    else:
        raise AssertionError("taken")
