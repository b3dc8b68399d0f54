"""An instance that runs the engine's own scheduler step by step, with a `CostRunner` in place of the model.

It models every scheduler configuration and is the oracle of `FastForwardInstance`. With `jump`, stretches of steps in
which every running sequence only decodes are taken at once: the same steps, booked together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weighbridge.core.instance import LoadReport
from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.scheduler import AddRefused, Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence, Status
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.job import FINISHED, FIRST_TOKEN, Job, Outcome, StepSpan
from weighbridge.sim.stretch import Stretch, Throughput


class StepwiseInstance:
    """One simulated engine. `wake_s` is when its running step (or jump) ends; inf when it does nothing."""

    __slots__ = (
        "_batch", "_jobs", "_preempts", "_slowdown", "_stretch", "_throughput", "_tokens_out", "config", "jump", "name",
        "on_step", "preemptions", "runner", "scheduler", "steps_run", "version", "wake_s",
    )  # fmt: skip

    def __init__(self, name: str, config: SchedulerConfig, runner: CostRunner, *, jump: bool = False) -> None:
        self.name, self.config, self.runner = name, config, runner
        self.jump = jump and runner.disturbance.none
        self.preemptions = 0
        self.steps_run = 0
        self.version = 0
        self.on_step: Callable[[StepwiseInstance, StepSpan], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.wake_s = math.inf
        self._jobs: dict[str | int, Job] = {}
        self._batch: Batch | None = None
        self._stretch = Stretch()
        self._slowdown: float | None = None
        self._preempts: list[tuple[Job, str]] = []
        self._tokens_out = 0
        self._throughput = Throughput()

    # -- what the driver calls --

    def add(self, job: Job, now_s: float) -> bool:
        """Queue a job; False when the scheduler refuses it. May bring `wake_s` forward (see `version`)."""
        seq = Sequence(
            job.id,
            job.prompt_tokens,
            job.output_tokens,
            now_s,
            priority=job.priority,
            tenant=job.tenant,
            block_hashes=job.hashes or None,
        )
        # KV that was transferred in is restored like KV that was swapped out.
        seq.swapped_tokens = job.ready_tokens
        try:
            self.scheduler.add(seq)
        except AddRefused:
            return False
        self._jobs[job.id] = job
        if self._batch is None:
            self._start(now_s)
        else:
            self._cut(now_s)
        return True

    def advance(self, now_s: float) -> list[Outcome]:
        """The step or jump that ends at `wake_s` (= `now_s`) is done; starts the next one."""
        batch = self._batch
        assert batch is not None
        stretch = self._stretch
        if stretch.steps > 1:
            self._book_extra_steps(batch, stretch.steps - 1)
        if self.on_step is not None:
            span = StepSpan(
                stretch.start_s, now_s, stretch.steps, batch.decode_sequences, batch.prefill_tokens, batch.kv_tokens,
                len(self.scheduler.waiting),
            )  # fmt: skip
            self.on_step(self, span)
        self.steps_run += stretch.steps
        completion = self.scheduler.complete(batch, now_s)
        self._batch = None
        self._tokens_out += len(completion.emitted)
        outcomes: list[Outcome] = []
        for seq in completion.emitted:
            job = self._jobs[seq.id]
            if job.first_token_s is None:
                job.first_token_s = now_s
                if not job.cancelled:
                    outcomes.append((FIRST_TOKEN, job))
        for seq in completion.finished:
            job = self._jobs.pop(seq.id)
            job.preemptions = seq.preemptions
            job.cached_tokens = seq.cached_tokens
            job.generated = seq.output_tokens
            if job.keeps_blocks and not job.cancelled:
                memory = self.scheduler.memory
                job.blocks = min(-(-seq.computed_tokens // self.config.block_tokens), memory.free_blocks)
                memory.free_blocks -= job.blocks
            if not job.cancelled:
                outcomes.append((FINISHED, job))
        self._start(now_s)
        return outcomes

    def cancel(self, job: Job, now_s: float) -> None:
        """End a job at the next step boundary (at once when it waits). It brings no further outcome."""
        job.cancelled = True
        seq = self.scheduler.find(job.id)
        if seq is None:
            return
        self._cut(now_s)
        self.scheduler.cancel(job.id)
        if seq.status is Status.FINISHED:
            self._jobs.pop(job.id, None)

    def preempt(self, job: Job, mode: str, now_s: float) -> None:
        """At the next step boundary, put a running job back into the queue: its KV swapped out or dropped (`mode`)."""
        self._preempts.append((job, mode))
        self._cut(now_s)

    def slow_down(self, factor: float, now_s: float) -> None:
        """From the next step on, every step takes `factor` times the profile's seconds."""
        self._slowdown = factor
        self._cut(now_s)

    def crash(self) -> list[Job]:
        """Lose everything; the jobs that were here."""
        lost = list(self._jobs.values())
        self._reset()
        self.version += 1
        return lost

    def end_lease(self, blocks: int, now_s: float) -> None:
        """Give back blocks of a job that finished and kept them."""
        self.scheduler.memory.free_blocks += blocks
        if self._batch is None:
            self._start(now_s)
        else:
            self._cut(now_s)

    def progress(self, now_s: float) -> list[tuple[str, int]]:
        """Ids of decoding jobs with their tokens generated until now."""
        extra = self._stretch.done(now_s) if self._stretch.steps > 1 else 0
        jobs = self._jobs
        return [
            (job.id, seq.output_tokens + extra)
            for seq in self.scheduler.running
            if seq.output_tokens and not (job := jobs[seq.id]).cancelled
        ]

    def report(self, now_s: float) -> LoadReport:
        """The engine's own gauges at this moment (at the last step boundary, as engines report)."""
        scheduler = self.scheduler
        waiting_tokens = sum(seq.total_tokens - seq.swapped_tokens for seq in scheduler.waiting)
        waiting_tokens += sum(seq.remaining_tokens for seq in scheduler.running if not seq.decoding)
        return LoadReport(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_usage,
            waiting_tokens=waiting_tokens,
            generation_tokens_per_s=self._throughput.update(self.generated(now_s), now_s),
        )

    def generated(self, now_s: float) -> int:
        """Output tokens since the start, until now."""
        if self._batch is None:
            return self._tokens_out
        return self._tokens_out + len(self._batch.decodes) * self._stretch.done(now_s)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.scheduler.idle

    @property
    def used_blocks(self) -> int:
        """Blocks that running sequences hold at the start of the running step."""
        return self.scheduler.memory.used_blocks

    # -- steps --

    def _start(self, now_s: float) -> None:
        self.version += 1
        if self._slowdown is not None:
            self.runner.slowdown, self._slowdown = self._slowdown, None
        if self._preempts:
            self._preempt_asked()
        batch = self.scheduler.schedule(now_s)
        if batch is None and not self.scheduler.running and len(self.scheduler.waiting):
            # Preempted down to nothing (leases hold the memory): the queue may be tried at once.
            batch = self.scheduler.schedule(now_s)
        self._batch = batch
        if batch is None:
            self._stretch.steps = 0
            self.wake_s = math.inf
            return
        if batch.preempted:
            self.preemptions += len(batch.preempted)
        stretch = self._stretch
        stretch.start_s = now_s
        stretch.first_s = self.runner.seconds(batch)
        if self.config.swap_s_per_token and (batch.preempted or batch.restored):
            moved = sum(p.tokens for p in batch.preempted) + sum(seq.computed_tokens for seq in batch.restored)
            stretch.first_s += self.config.swap_s_per_token * moved
        stretch.steps = self._jump_length(batch) if self.jump else 1
        if stretch.steps > 1:
            sequences = len(batch.decodes)
            terms = self.runner.terms
            stretch.growth_s = self.runner.slowdown * sequences * (terms.kv_s + terms.scan_s * sequences)
        self.wake_s = stretch.end(stretch.steps)

    def _preempt_asked(self) -> None:
        for job, mode in self._preempts:
            seq = self.scheduler.find(job.id)
            if seq is None or seq.status is not Status.RUNNING:
                continue
            computed = seq.computed_tokens
            self.scheduler.preempt(seq, Batch([], [], [], []))
            seq.swapped_tokens = computed if mode == "swap" else 0
            self.preemptions += 1
        self._preempts = []

    def _jump_length(self, batch: Batch) -> int:
        """Steps that will hold exactly these decodes: until one ends, memory runs short, or the queue may move."""
        scheduler = self.scheduler
        if batch.prefills or batch.preempted or batch.restored or len(batch.decodes) != len(scheduler.running):
            return 1
        if len(scheduler.waiting) and self.config.preempt_priority:
            return 1
        size = self.config.block_tokens
        steps = min(seq.max_output_tokens - seq.output_tokens for seq in batch.decodes)
        free = scheduler.memory.free_blocks
        if len(batch.decodes) * (steps // size + 1) > free:
            low, high = 1, steps
            while low < high:
                middle = (low + high + 1) // 2
                need = sum(-(-(seq.computed_tokens + middle) // size) - seq.blocks for seq in batch.decodes)
                low, high = (middle, high) if need <= free else (low, middle - 1)
            steps = low
        return steps

    def _book_extra_steps(self, batch: Batch, steps: int) -> None:
        memory = self.scheduler.memory
        size = self.config.block_tokens
        for seq in batch.decodes:
            tokens = seq.computed_tokens + steps + 1
            if tokens > seq.blocks * size or seq.block_hashes is not None:
                grown = memory.grow(seq, tokens)
                assert grown, "a jump was longer than memory allows"
            seq.computed_tokens += steps
            seq.output_tokens += steps
            seq.total_tokens += steps
            seq.steps += steps
        self._tokens_out += steps * len(batch.decodes)

    def _cut(self, now_s: float) -> None:
        """Shorten the running jump to the next boundary at or after `now_s`."""
        if self._stretch.cut(now_s):
            self.wake_s = self._stretch.end(self._stretch.steps)
            self.version += 1
