"""The embedded engine: one thread that owns a scheduler and a llama.cpp context and runs step after step.

Other threads submit and cancel through a queue and hear of results through `deliver`, which gets all outputs of half
a step at once. Decodes of a step are computed, sampled and delivered before its prefill begins.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import RequestError
from weighbridge.engine.counters import Counters
from weighbridge.engine.generation import Generation, GenerationRequest, Output, Sink
from weighbridge.engine.grammar import Grammar
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.runner import DecodeFailed, LlamaRunner, Rows, RunnerOptions
from weighbridge.engine.sampling import Logits, Sampler, token_logprob
from weighbridge.engine.text import TextStream
from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.order import Discipline
from weighbridge.scheduling.scheduler import AddRefused, Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence

log = logging.getLogger("weighbridge.engine")
Deliver = Callable[[list[tuple[Sink, Output]]], None]
UNHEALTHY_FAILURES = 3


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One instance. `busy_prefill_tokens` is the prefill of a step while anything decodes, `idle_prefill_tokens` else.

    `max_step_s` lowers the latter on slow machines, so that a cancelled request's slot is free about that soon.
    """

    runner: RunnerOptions = field(default_factory=RunnerOptions)
    busy_prefill_tokens: int = 128
    idle_prefill_tokens: int = 512
    prefill_rows: int = 64
    max_step_s: float = 0.5
    max_waiting: int = 512
    discipline: Discipline = "priority"
    ageing_s: float | None = 30.0
    preemption: Literal["recompute", "swap", "auto"] = "swap"
    preempt_priority: bool = True
    admission: Literal["optimistic", "reserve"] = "optimistic"


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: str


@dataclass(frozen=True, slots=True)
class _Call:
    """Run something between two steps, in the engine's thread."""

    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Engine:
    """One instance. `start` begins the thread; `stop` ends it, cancelling what still runs."""

    def __init__(self, model: LlamaModel, options: EngineOptions, deliver: Deliver) -> None:
        self.model = model
        self.options = options
        self.counters = Counters()
        self.runner = LlamaRunner(model, options.runner)
        self.scheduler = Scheduler(_scheduler_config(options, self.runner.slot_tokens))
        self.context_tokens = min(self.runner.slot_tokens, model.trained_context_tokens)
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Call | _Stop] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._swapped: dict[str, NDArray[np.uint8]] = {}
        self._failures_in_a_row = 0
        self._prefill_s_per_token = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """The thread runs and the last steps did not all fail."""
        return self._thread.is_alive() and self._failures_in_a_row < UNHEALTHY_FAILURES

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, nothing is on its way in."""
        return self.scheduler.idle and not self._generations and self._commands.empty()

    def warm_up(self) -> None:
        """One small request through the whole path of the library, so that the first real one finds it warm."""
        start = self.model.bos if self.model.bos >= 0 else 0
        self.runner.prefill([Rows(0, [start] * 8, 0, True)])
        self.runner.decode([0], [start], [8])
        self.runner.trim(0, 0)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request, from any thread. Its end, refusals included, comes as its last Output."""
        self._commands.put(_Submit(request, sink))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, from any thread; it gets a last Output with reason `cancelled`."""
        self._commands.put(_Cancel(request_id))

    def call(self, work: Callable[[], None]) -> None:
        """Run something in the engine's thread before its next step."""
        self._commands.put(_Call(work))

    def stop(self) -> None:
        """End everything that runs with reason `cancelled`, then the thread, then the context."""
        if self._thread.is_alive():
            self._commands.put(_Stop())
            self._thread.join()
        self.runner.close()

    # The engine's thread.

    def _run(self) -> None:
        while self._take_commands():
            try:
                self._step()
            except Exception:
                log.exception("a step failed; all running requests end")
                self._drop(list(self.scheduler.running), "the engine failed in a step")
        for request_id in list(self._generations):
            self._cancel(request_id)

    def _take_commands(self) -> bool:
        """Take what has come in; wait for something when there is nothing to compute. False when told to stop."""
        block = self.scheduler.idle
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Submit):
                self._add(command.request, command.sink)
            elif isinstance(command, _Cancel):
                self._cancel(command.id)
            elif isinstance(command, _Call):
                command.work()
            else:
                return False

    def _add(self, request: GenerationRequest, sink: Sink) -> None:
        try:
            seq = Sequence(
                request.id,
                len(request.tokens),
                request.max_tokens,
                request.arrival_s,
                priority=request.priority,
                tenant=request.tenant,
                namespace=request.namespace,
                tokens=list(request.tokens),
            )
            grammar = Grammar(self.model, request.grammar) if request.grammar is not None else None
            sampler = Sampler(request.sampling, self.model.end_tokens, request.tokens, grammar)
            self.scheduler.add(seq)
        except AddRefused as error:
            reason = "overloaded" if error.reason == "queue_full" else "error"
            self._deliver([(sink, Output("", (), finish_reason=reason, error=str(error)))])
        except (RequestError, ValueError) as error:
            self._deliver([(sink, Output("", (), finish_reason="error", error=str(error)))])
        else:
            text = TextStream(request.stops, include_stop=request.include_stop)
            self._generations[request.id] = Generation(request, seq, sampler, text, sink)

    def _cancel(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is not None:
            slot = generation.seq.slot
            self.scheduler.cancel(request_id)
            self._release(slot)
            self._deliver([self._last_output(generation, "", ())])

    def _step(self) -> None:
        begun = time.perf_counter()
        batch = self.scheduler.schedule(time.monotonic())
        if batch is None:
            return
        self._move_memory(batch)
        finished: list[Sequence] = []
        if batch.decodes:
            self._decode(batch.decodes, finished)
        self._prefill(batch, finished)
        self.counters.steps += 1
        self.counters.steps_s += time.perf_counter() - begun
        self.counters.step_tokens.observe(batch.tokens)

    def _move_memory(self, batch: Batch) -> None:
        """Swap out what was preempted and in what comes back, before their slots are written."""
        if not batch.preempted and not batch.restored:
            return
        begun = time.perf_counter()
        for seq, tokens, slot in batch.preempted:
            if tokens:
                data = self.runner.save(slot)
                self._swapped[str(seq.id)] = data
                self.counters.swaps += 1
                self.counters.swap_bytes += len(data)
            self._release(slot)
        for seq in batch.restored:
            self.runner.restore(seq.slot, self._swapped.pop(str(seq.id)))
        self.counters.swap_s += time.perf_counter() - begun

    def _decode(self, decodes: list[Sequence], finished: list[Sequence]) -> None:
        decodes = sorted(decodes, key=_slot)  # the library runs consecutive streams together
        slots = [seq.slot for seq in decodes]
        begun = time.perf_counter()
        try:
            logits = self.runner.decode(
                slots,
                [seq.tokens[seq.computed_tokens] for seq in decodes if seq.tokens is not None],
                [seq.computed_tokens for seq in decodes],
            )
        except DecodeFailed as error:
            self._drop(decodes, str(error))
            return
        self.counters.decode_s += time.perf_counter() - begun
        self.counters.decode_tokens += len(decodes)
        self._failures_in_a_row = 0
        texts = self._advance(decodes, logits)
        self.scheduler.complete_decodes(decodes, time.monotonic(), [], finished)
        self._give_out(decodes, texts, slots)

    def _prefill(self, batch: Batch, finished: list[Sequence]) -> None:
        pieces = sorted(batch.prefills, key=lambda piece: piece.seq.slot)
        ending: list[Sequence] = []
        texts: list[str] = []
        if pieces:
            rows = []
            for seq, start, count in pieces:
                assert seq.tokens is not None
                if start == 0:
                    self.runner.trim(seq.slot, 0)
                want = start + count == seq.total_tokens
                rows.append(Rows(seq.slot, seq.tokens[start : start + count], start, want))
                if want:
                    ending.append(seq)
            begun = time.perf_counter()
            try:
                logits = self.runner.prefill(rows)
            except DecodeFailed as error:
                self._drop([piece.seq for piece in pieces], str(error))
                batch.prefills.clear()
                ending = []
            else:
                self._note_prefill(batch.prefill_tokens, time.perf_counter() - begun)
                texts = self._advance(ending, logits)
        slots = [seq.slot for seq in ending]
        self.scheduler.complete_prefills(batch, time.monotonic(), [], finished)
        self._give_out(ending, texts, slots)

    def _note_prefill(self, tokens: int, took_s: float) -> None:
        """Learn the speed, and keep a step without decodes shorter than `max_step_s`."""
        self._failures_in_a_row = 0
        self.counters.prefill_s += took_s
        self.counters.prefill_tokens += tokens
        rows = self.options.prefill_rows
        if tokens >= rows:
            known = self._prefill_s_per_token
            self._prefill_s_per_token = 0.7 * known + 0.3 * took_s / tokens if known else took_s / tokens
            most = int(self.options.max_step_s / self._prefill_s_per_token) // rows * rows
            self.scheduler.prefill_limit = max(most, rows)

    def _advance(self, seqs: list[Sequence], logits: Logits) -> list[str]:
        """Choose each sequence's next token, append it, and make its text; sets `finish_reason` where it ends."""
        if not seqs:
            return []
        greedy = logits.argmax(axis=1).tolist()
        texts = []
        for row, seq in enumerate(seqs):
            generation = self._generations[str(seq.id)]
            sampler = generation.sampler
            try:
                token = greedy[row] if sampler.plain else sampler.sample(logits[row], seq.output_tokens)
                alternatives = generation.request.sampling.logprobs
                if alternatives is not None:
                    generation.logprobs = (token_logprob(logits[row], token, alternatives),)
                assert seq.tokens is not None
                seq.tokens.append(token)
                texts.append(self._text_of(generation, token))
            except Exception as error:  # one request's sampler must not end the others
                log.exception("sampling failed")
                generation.error, seq.finish_reason = f"sampling failed: {error}", "error"
                texts.append("")
        return texts

    def _text_of(self, generation: Generation, token: int) -> str:
        """The text that is ready with one more token; decides whether the generation ends here."""
        request, seq = generation.request, generation.seq
        ends = token in self.model.end_tokens
        if seq.output_tokens + 1 > request.sampling.min_tokens:
            if token in request.stop_tokens:
                seq.finish_reason, generation.stop_reason = "stop", token
                if not request.include_stop:
                    return ""
            elif ends and not request.ignore_eos:
                seq.finish_reason = "stop"
        if request.skip_special and (ends or self.model.is_control(token)):
            return ""
        text = generation.text.feed(self.model.piece(token))
        if generation.text.stop.matched is not None:
            seq.finish_reason, generation.stop_reason = "stop", generation.text.stop.matched
        return text

    def _give_out(self, seqs: list[Sequence], texts: list[str], slots: list[int]) -> None:
        """Deliver what a half step made; `slots` are those the sequences had while it ran."""
        if not seqs:
            return
        now_s = time.monotonic()
        outputs = []
        for seq, text, slot in zip(seqs, texts, slots, strict=True):
            generation = self._generations[str(seq.id)]
            assert seq.tokens is not None
            if seq.finish_reason == "error":
                tokens: tuple[int, ...] = ()
            else:
                tokens = (seq.tokens[-1],)
                self._note_token(generation, now_s)
            if seq.finish_reason is None:
                outputs.append((generation.sink, Output(text, tokens, generation.logprobs)))
            else:
                self._release(slot)
                outputs.append(self._last_output(generation, text, tokens))
        self._deliver(outputs)

    def _note_token(self, generation: Generation, now_s: float) -> None:
        self.counters.generation_tokens += 1
        if generation.first_token_s is None:
            generation.first_token_s = now_s
            self.counters.ttft_s.observe(now_s - generation.request.arrival_s)
        else:
            self.counters.itl_s.observe(now_s - generation.last_token_s)
        generation.last_token_s = now_s

    def _last_output(self, generation: Generation, text: str, tokens: tuple[int, ...]) -> tuple[Sink, Output]:
        """Close a generation: the rest of its text, its stats, its end."""
        seq = generation.seq
        reason = seq.finish_reason or "error"
        if reason in ("stop", "length"):
            text += generation.text.flush()
        if generation.sampler.grammar is not None:
            generation.sampler.grammar.close()
        del self._generations[generation.request.id]
        self._swapped.pop(generation.request.id, None)
        stats = generation.stats(time.monotonic())
        self.counters.note_end(stats)
        output = Output(text, tokens, generation.logprobs, reason, generation.stop_reason, stats, generation.error)
        return generation.sink, output

    def _drop(self, seqs: list[Sequence], reason: str) -> None:
        """End sequences whose step failed, and empty their slots; the others go on."""
        self.counters.failures += 1
        self._failures_in_a_row += 1
        log.error("%d requests end: %s", len(seqs), reason)
        slots = [seq.slot for seq in seqs]
        self.scheduler.drop(seqs, time.monotonic())
        outputs = []
        for seq, slot in zip(seqs, slots, strict=True):
            self._release(slot)
            generation = self._generations.get(str(seq.id))
            if generation is not None:
                generation.error = reason
                outputs.append(self._last_output(generation, "", ()))
        self._deliver(outputs)

    def _release(self, slot: int) -> None:
        """A slot's sequence is gone."""
        if slot >= 0:
            self.runner.trim(slot, 0)


def _slot(seq: Sequence) -> int:
    return seq.slot


def _scheduler_config(options: EngineOptions, slot_tokens: int) -> SchedulerConfig:
    block_tokens = 16
    return SchedulerConfig(
        mixing="split",
        token_budget=options.idle_prefill_tokens,
        busy_prefill_tokens=options.busy_prefill_tokens,
        prefill_rows=options.prefill_rows,
        max_sequences=options.runner.slots,
        block_tokens=block_tokens,
        blocks=options.runner.slots * slot_tokens // block_tokens,
        max_waiting=options.max_waiting,
        discipline=options.discipline,
        ageing_s=options.ageing_s,
        admission=options.admission,
        preemption=options.preemption,
        preempt_priority=options.preempt_priority,
    )
