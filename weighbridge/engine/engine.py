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
from dataclasses import dataclass

from weighbridge.core.errors import RequestError
from weighbridge.engine.counters import Counters
from weighbridge.engine.generation import Generation, GenerationRequest, Output, Sink
from weighbridge.engine.grammar import Grammar
from weighbridge.engine.kv_events import KvEventPublisher
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.options import EngineOptions, scheduler_config
from weighbridge.engine.runner import LlamaRunner, Rows, kv_value_bytes
from weighbridge.engine.sampling import Sampler
from weighbridge.engine.stepper import Deliver, Stepper
from weighbridge.engine.text import TextStream
from weighbridge.scheduling.prefix_cache import PrefixCache, PrefixCacheConfig
from weighbridge.scheduling.scheduler import AddRefused, Scheduler
from weighbridge.scheduling.sequence import Sequence

log = logging.getLogger("weighbridge.engine")
UNHEALTHY_FAILURES = 3


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
        self.scheduler = Scheduler(scheduler_config(options, self.runner.slot_tokens), self._prefix_cache())
        self.context_tokens = min(self.runner.slot_tokens, model.trained_context_tokens)
        self._deliver = deliver
        self.kv_events: KvEventPublisher | None = None
        if options.kv_events is not None and self.scheduler.prefixes is not None:
            self.kv_events = KvEventPublisher(options.kv_events)
            self.scheduler.prefixes.on_change = self.kv_events.change
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Call | _Stop] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._stepper = Stepper(self.runner, self.scheduler, self.counters, self._generations, options, deliver)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _prefix_cache(self) -> PrefixCache | None:
        """None where it is off, or where the model's KV cannot be cut (recurrent state, sliding windows)."""
        if not self.options.prefix_caching or not self.model.trimmable:
            return None
        per_token = max(1, self.model.file.kv_bytes(1, kv_value_bytes(self.options.runner.kv_type)))
        config = PrefixCacheConfig(saved_tokens=self.options.prefix_store_bytes // per_token)
        return PrefixCache(config, time.perf_counter)

    @property
    def healthy(self) -> bool:
        """The thread runs and the last steps did not all fail."""
        return self._thread.is_alive() and self._stepper.failures_in_a_row < UNHEALTHY_FAILURES

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
        if self.kv_events is not None:
            self.kv_events.close()

    # The engine's thread.

    def _run(self) -> None:
        while self._take_commands():
            try:
                self._stepper.step()
            except Exception:
                log.exception("a step failed; all running requests end")
                self._stepper.forget()
                self._stepper.drop(list(self.scheduler.running), "the engine failed in a step")
        for request_id in list(self._generations):
            self._cancel(request_id)

    def _take_commands(self) -> bool:
        """Take what has come in; wait for something when there is nothing to compute. False when told to stop."""
        block = self.scheduler.idle
        while block and self._commands.empty() and self._stepper.prepare():
            pass
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
            generation = Generation(request, seq, sampler, text, sink)
            self._generations[request.id] = generation
            self._stepper.take_in(generation)

    def _cancel(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is not None:
            slot = generation.seq.slot
            self.scheduler.cancel(request_id)
            self._stepper.release(slot)
            self._deliver([self._stepper.last_output(generation, "", ())])
