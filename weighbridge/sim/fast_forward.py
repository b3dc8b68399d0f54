"""An instance that jumps over stretches of pure decoding in closed form, with work per event independent of the batch.

It behaves as `StepwiseInstance` with the scheduler's `mixed` batches, first come first served, recompute preemption and
no prefix cache, to rounding (a property test owns this). Decoding sequences are kept lazily: a sequence that entered at
step s with c computed tokens has c + (now_step - s) of them, so one counter moves them all; those that need a block in
some step are counted by phase (computed tokens modulo block size), and a heap knows which one ends next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from weighbridge.core.instance import LoadReport
from weighbridge.cost.step import sequence_seconds
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.job import FINISHED, FIRST_TOKEN, Job, Outcome, StepSpan
from weighbridge.sim.stretch import Stretch, Throughput, can_fast_forward


class FastForwardInstance:
    """One simulated engine. `wake_s` is when its running step or jump ends (inf when it does nothing)."""

    __slots__ = (
        "_cancels", "_ends", "_free", "_kv", "_partial", "_phase", "_plan", "_running", "_s", "_slowdown", "_step",
        "_stretch", "_throughput", "_tokens_out", "_waiting", "block_tokens", "blocks", "config", "name", "on_step",
        "preemptions", "runner", "steps_run", "version", "waiting_tokens", "wake_s",
    )  # fmt: skip

    def __init__(self, name: str, config: SchedulerConfig, runner: CostRunner) -> None:
        if not can_fast_forward(config, runner):
            raise ValueError("this scheduler configuration has no closed form; use a stepwise instance")
        self.name, self.config, self.runner = name, config, runner
        self.blocks, self.block_tokens = config.blocks, config.block_tokens
        self.wake_s = math.inf
        self.version = 0
        self.preemptions = 0
        self.steps_run = 0
        self.waiting_tokens = 0
        self.on_step: Callable[[FastForwardInstance, StepSpan], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._free = self.blocks
        self._step = 0  # steps of decoding since the start; the clock of the lazy state
        self._s = 0  # decoding sequences
        self._kv = 0  # their computed tokens
        self._phase = [0] * self.block_tokens  # decoding sequences by the step (mod block) in which they need a block
        self._ends: list[tuple[int, Job]] = []
        self._partial: Job | None = None
        self._plan: list[tuple[Job, int]] = []
        self._stretch = Stretch()
        self._cancels: list[Job] = []
        self._slowdown: float | None = None
        self._tokens_out = 0
        self._throughput = Throughput()

    # -- what the driver calls --

    def add(self, job: Job, now_s: float) -> bool:
        """Queue a job; False when it can never fit this engine. May bring `wake_s` forward (see `version`)."""
        need = -(-(job.prompt_tokens + job.output_tokens) // self.block_tokens)
        if need > self.blocks:
            return False
        self._waiting.append(job)
        self.waiting_tokens += job.prompt_tokens - job.ready_tokens
        if not self._stretch.steps:
            self._start(now_s)
        elif len(self._waiting) == 1 and len(self._running) < self.config.max_sequences:
            self._cut(now_s)
        return True

    def advance(self, now_s: float) -> list[Outcome]:
        """The step or jump that ends at `wake_s` (= `now_s`) is done; starts the next one."""
        outcomes: list[Outcome] = []
        self._finish(now_s, outcomes)
        self._start(now_s)
        return outcomes

    def cancel(self, job: Job, now_s: float) -> None:
        """End a job at the next step boundary (at once when it waits). It brings no further outcome."""
        job.cancelled = True
        if job in self._running:
            self._cancels.append(job)
            self._cut(now_s)
        elif job in self._waiting:
            was_head = self._waiting[0] is job
            self._waiting.remove(job)
            self.waiting_tokens -= job.total - job.ready_tokens
            if was_head and self._waiting:
                self._cut(now_s)

    def slow_down(self, factor: float, now_s: float) -> None:
        """From the next step on, every step takes `factor` times the profile's seconds."""
        self._slowdown = factor
        if self._stretch.steps:
            self._cut(now_s)

    def crash(self) -> list[Job]:
        """Lose everything; the jobs that were here."""
        lost = [*self._running, *self._waiting]
        self._reset()
        self.waiting_tokens = 0
        self.wake_s = math.inf
        self.version += 1
        return lost

    def end_lease(self, blocks: int, now_s: float) -> None:
        """Give back blocks of a job that finished and kept them."""
        self._free += blocks
        if not self._stretch.steps:
            self._start(now_s)
        elif self._waiting and not self._plan:
            self._cut(now_s)

    def progress(self, now_s: float) -> list[tuple[str, int]]:
        """Ids of decoding jobs with their tokens generated until now."""
        step = self._step + (0 if self._plan else self._stretch.done(now_s))
        return [
            (job.id, job.output_tokens - job.end_step + step)
            for job in self._running
            if job.end_step >= 0 and not job.cancelled
        ]

    def report(self, now_s: float) -> LoadReport:
        """The engine's own gauges at this moment."""
        done = 0 if self._plan else self._stretch.done(now_s)
        free = self._free - (self._need(done) if self._s and done else 0)
        partial = self._partial
        return LoadReport(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=1.0 - free / self.blocks,
            waiting_tokens=self.waiting_tokens + (partial.total - partial.computed if partial is not None else 0),
            generation_tokens_per_s=self._throughput.update(self._tokens_out + self._s * done, now_s),
        )

    def generated(self, now_s: float) -> int:
        """Output tokens since the start, until now."""
        return self._tokens_out + self._s * (0 if self._plan else self._stretch.done(now_s))

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self._running or self._waiting)

    @property
    def used_blocks(self) -> int:
        """Blocks that jobs hold."""
        return self.blocks - self._free

    # -- steps --

    def _start(self, now_s: float) -> None:
        """Plan the next step at a boundary: preempt, continue a cut prompt, admit; or a jump of pure decoding."""
        if self._slowdown is not None:
            self.runner.slowdown, self._slowdown = self._slowdown, None
        preempted = self._make_room()
        self._plan = plan = []  # sequences of this step that compute prompt tokens
        budget = self.config.token_budget - self._s
        room = self._free - self._phase[self._step % self.block_tokens]
        size = self.block_tokens
        job = self._partial
        if job is not None:
            count = min(job.total - job.computed, budget)
            more = -(-(job.computed + count) // size) - job.blocks
            if more > room:
                self._preempt(job)
                preempted = True
            else:
                self._free -= more
                room -= more
                job.blocks += more
                plan.append((job, count))
                budget -= count
        waiting = self._waiting
        if waiting and not preempted:
            running = self._running
            slots = self.config.max_sequences - len(running)
            whole = self.config.admission == "prompt"
            while waiting and budget > 0 and slots > 0:
                job = waiting[0]
                done = job.ready_tokens
                count = min(job.total - done, budget)
                more = -(-(done + count) // size)
                if more > room or (whole and not done and -(-job.total // size) > room):
                    break
                waiting.popleft()
                self.waiting_tokens -= job.total - done
                self._free -= more
                room -= more
                slots -= 1
                job.blocks = more
                job.computed = done
                job.ready_tokens = 0
                running[job] = None
                plan.append((job, count))
                budget -= count
                if done + count < job.total:
                    self._partial = job
        self._run(now_s, preempted)

    def _run(self, now_s: float, preempted: bool) -> None:
        terms, slowdown, stretch = self.runner.terms, self.runner.slowdown, self._stretch
        sequences, kv = self._s, self._kv
        self.version += 1
        stretch.start_s = now_s
        if self._plan:
            prefill = attended = 0
            context = kv
            for job, count in self._plan:
                done = job.computed
                context += done
                if done >= job.prompt_tokens and job.total - done == 1:
                    # The last token of a recompute is one that was generated: a decode like the others.
                    sequences += 1
                    kv += done
                else:
                    prefill += count
                    attended += count * done + count * (count + 1) // 2
            stretch.steps = 1
            stretch.first_s = slowdown * (
                terms.base_s
                + terms.prefill_s * prefill
                + terms.attend_s * attended
                + self._sequence_seconds(sequences)
                + terms.kv_s * kv
                + terms.scan_s * (prefill + sequences) * context
            )
            self.wake_s = now_s + stretch.first_s
        elif sequences:
            stretch.steps = 1 if preempted else self._jump_length()
            stretch.first_s = slowdown * (
                terms.base_s + self._sequence_seconds(sequences) + (terms.kv_s + terms.scan_s * sequences) * kv
            )
            stretch.growth_s = slowdown * sequences * (terms.kv_s + terms.scan_s * sequences)
            self.wake_s = stretch.end(stretch.steps)
        elif preempted:
            # Every running sequence gave way (leases hold the memory): the queue may be tried at once.
            self._start(now_s)
        else:
            stretch.steps = 0
            self.wake_s = math.inf

    def _sequence_seconds(self, sequences: int) -> float:
        terms = self.runner.terms
        return sequence_seconds(terms, sequences) if terms.sequence_knots else terms.sequence_s * sequences

    def _jump_length(self) -> int:
        """Steps until the next sequence ends or memory runs short."""
        ends = self._ends
        while ends[0][1].end_step != ends[0][0]:
            heappop(ends)
        steps = ends[0][0] - self._step
        if self._s * (steps // self.block_tokens + 1) > self._free and self._need(steps) > self._free:
            low, high = 1, steps
            while low < high:
                middle = (low + high + 1) // 2
                if self._need(middle) <= self._free:
                    low = middle
                else:
                    high = middle - 1
            steps = low
        return steps

    def _need(self, steps: int) -> int:
        """Blocks that decoding takes in the next `steps` steps."""
        whole, rest = divmod(steps, self.block_tokens)
        need = whole * self._s
        if rest:
            first = self._step % self.block_tokens
            last = first + rest
            need += sum(self._phase[first:last]) + sum(self._phase[: max(0, last - self.block_tokens)])
        return need

    def _cut(self, now_s: float) -> None:
        """Shorten the running jump to the next boundary at or after `now_s`."""
        if self._stretch.cut(now_s):
            self.wake_s = self._stretch.end(self._stretch.steps)
            self.version += 1

    def _finish(self, now_s: float, outcomes: list[Outcome]) -> None:
        stretch = self._stretch
        steps = stretch.steps
        if self.on_step is not None:
            prefill = sum(count for _, count in self._plan)
            span = StepSpan(stretch.start_s, now_s, steps, self._s, prefill, self._kv, len(self._waiting))
            self.on_step(self, span)
        self.steps_run += steps
        sequences = self._s
        if sequences:
            self._free -= self._phase[self._step % self.block_tokens] if steps == 1 else self._need(steps)
            self._kv += sequences * steps
            self._tokens_out += sequences * steps
        self._step += steps
        for job, count in self._plan:
            job.computed += count
            if job.computed == job.total:
                self._emit_first(job, now_s, outcomes)
        step = self._step
        ends = self._ends
        while ends and ends[0][0] <= step:
            end, job = heappop(ends)
            if job.end_step == end:
                self._leave_decoding(job)
                job.generated = job.output_tokens
                if not job.keeps_blocks:
                    self._free += job.blocks
                del self._running[job]
                if not job.cancelled:
                    outcomes.append((FINISHED, job))
        if self._cancels:
            self._end_cancelled()

    def _emit_first(self, job: Job, now_s: float, outcomes: list[Outcome]) -> None:
        """The last prompt token is computed: a token comes out, and the job decodes from the next step on."""
        if job is self._partial:
            self._partial = None
        self._tokens_out += 1
        job.generated += 1
        job.total += 1
        if job.first_token_s is None:
            job.first_token_s = now_s
            if not job.cancelled:
                outcomes.append((FIRST_TOKEN, job))
        if job.generated >= job.output_tokens:
            if not job.keeps_blocks or job.cancelled:
                self._free += job.blocks
            del self._running[job]
            outcomes += [] if job.cancelled else [(FINISHED, job)]
            return
        step = self._step
        job.offset = job.computed - step
        job.end_step = step + job.output_tokens - job.generated
        self._s += 1
        self._kv += job.computed
        self._phase[-job.offset % self.block_tokens] += 1
        heappush(self._ends, (job.end_step, job))

    def _leave_decoding(self, job: Job) -> None:
        """Make the lazy state of a decoding job explicit."""
        job.computed = job.offset + self._step
        job.generated = job.output_tokens - (job.end_step - self._step)
        job.total = job.prompt_tokens + job.generated
        job.blocks = -(-job.computed // self.block_tokens)
        job.end_step = -1
        self._s -= 1
        self._kv -= job.computed
        self._phase[-job.offset % self.block_tokens] -= 1

    def _make_room(self) -> bool:
        """Preempt from the tail until what decodes next fits; whether that was necessary."""
        slot = self._step % self.block_tokens
        if self._phase[slot] <= self._free:
            return False
        while self._phase[slot] > self._free:
            self._preempt(next(reversed(self._running)))
        return True

    def _preempt(self, job: Job) -> None:
        """Drop the job's KV and put it first in the queue."""
        if job.end_step >= 0:
            self._leave_decoding(job)
        if job is self._partial:
            self._partial = None
        self._free += job.blocks
        job.blocks = job.computed = 0
        job.preemptions += 1
        self.preemptions += 1
        del self._running[job]
        self._waiting.appendleft(job)
        self.waiting_tokens += job.total

    def _end_cancelled(self) -> None:
        for job in self._cancels:
            if job not in self._running:
                continue
            if job.end_step >= 0:
                self._leave_decoding(job)
            if job is self._partial:
                self._partial = None
            self._free += job.blocks
            del self._running[job]
        self._cancels = []
