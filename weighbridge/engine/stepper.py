"""Executes the scheduler's batches on the runner and gives out what comes of them. Belongs to the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weighbridge.engine.counters import Counters
from weighbridge.engine.generation import Generation, Output, Sink
from weighbridge.engine.host_buffers import HostBuffers
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.runner import DecodeFailed, LlamaRunner, Rows
from weighbridge.engine.sampling import Logits, token_logprob
from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.prefix_cache import Placement, Saved
from weighbridge.scheduling.scheduler import Scheduler
from weighbridge.scheduling.sequence import Sequence

log = logging.getLogger("weighbridge.engine")
Kv = NDArray[np.uint8]
Deliver = Callable[[list[tuple[Sink, Output]]], None]


class Stepper:
    """Steps of one engine. `failures_in_a_row` counts forward passes that failed since the last good one."""

    def __init__(
        self,
        runner: LlamaRunner,
        scheduler: Scheduler,
        counters: Counters,
        generations: dict[str, Generation],
        options: EngineOptions,
        deliver: Deliver,
    ) -> None:
        self._runner = runner
        self._model = runner.model
        self._scheduler = scheduler
        self._counters = counters
        self._generations = generations
        self._options = options
        self._deliver = deliver
        self._swapped: dict[str, Kv] = {}
        self._saved: dict[Saved, Kv] = {}
        self._buffers = HostBuffers(options.prefix_store_bytes // 4, options.runner.slots)
        self._prefill_s_per_token = 0.0
        self.failures_in_a_row = 0
        self._announce = scheduler.prefixes.computed if scheduler.prefixes is not None else _nothing

    def prepare(self) -> bool:
        """Use a moment without work to make memory for saves ready; False when there is nothing to do."""
        return self._buffers.prepare()

    def step(self) -> None:
        """Compute one step, if there is anything to compute: decodes, deliver, prefill, deliver."""
        begun = time.perf_counter()
        batch = self._scheduler.schedule(time.monotonic())
        if batch is None:
            return
        self._move_memory(batch)
        finished: list[Sequence] = []
        if batch.decodes:
            self._decode(batch.decodes, finished)
        self._prefill(batch, finished)
        self._counters.steps += 1
        self._counters.steps_s += time.perf_counter() - begun
        self._counters.step_tokens.observe(batch.tokens)

    def _move_memory(self, batch: Batch) -> None:
        """Swap out what was preempted, put prefixes in place, swap in what comes back."""
        if batch.preempted or batch.restored:
            begun = time.perf_counter()
            for seq, tokens, slot in batch.preempted:
                if tokens:
                    self._swap_out(seq, slot)
                self.release(slot)
            self._counters.swap_s += time.perf_counter() - begun
        for placement in batch.placements:
            if not self._place(placement):  # nothing is there: its prompt is computed from the start, next step on
                batch.prefills[:] = [piece for piece in batch.prefills if piece.seq is not placement.seq]
                placement.seq.computed_tokens = placement.seq.cached_tokens = 0
        if batch.restored:
            begun = time.perf_counter()
            for seq in batch.restored:
                data = self._swapped.pop(str(seq.id))
                self._runner.restore(seq.slot, data)
                self._buffers.give_back(data)
            self._counters.swap_s += time.perf_counter() - begun

    def _swap_out(self, seq: Sequence, slot: int) -> None:
        data = self._runner.save(slot, self._buffers)
        self._swapped[str(seq.id)] = data
        self._counters.swaps += 1
        self._counters.swap_bytes += len(data)

    def _place(self, placement: Placement) -> bool:
        """Carry a placement out; False where its prefix could not be put in place."""
        begun = time.perf_counter()
        seq, slot, source = placement.seq, placement.slot, placement.source
        for saved in placement.drop:
            self._buffers.give_back(self._saved.pop(saved, None))
        if placement.save is not None:
            self._saved[placement.save] = self._runner.save(slot, self._buffers)
        if isinstance(source, Saved):
            if not self._restore(slot, source, placement.tokens):
                return False
        elif source is not None and source != slot:
            held = self._runner.length(source)
            if held < placement.tokens:  # never while the books are right, and a wrong answer when they are not
                log.error("slot %d holds %d tokens instead of %d", source, held, placement.tokens)
                self._runner.trim(slot, 0)
                return False
            data = self._runner.save(source, self._buffers)
            self._runner.restore(slot, data)
            self._buffers.give_back(data)
        self._runner.trim(slot, placement.tokens)
        if seq.preemptions == 0:
            self._counters.prefix_queries += seq.prompt_tokens
            self._counters.prefix_hits += placement.tokens
        self._counters.place_s += time.perf_counter() - begun
        return True

    def _restore(self, slot: int, source: Saved, tokens: int) -> bool:
        """Copy saved KV into a slot. What came from another instance may not fit."""
        try:
            self._runner.restore(slot, self._saved[source])
            if self._runner.length(slot) >= tokens:
                return True
            reason = f"saved KV holds {self._runner.length(slot)} tokens instead of {tokens}"
            self._runner.trim(slot, 0)
        except DecodeFailed as error:
            reason = str(error)
        log.warning("%s; the prompt is computed again", reason)
        return False

    def forget(self) -> None:
        """After an error that leaves the state of the slots unknown: empty them all, and every copy."""
        if self._scheduler.prefixes is not None:
            self._scheduler.prefixes.clear()
        for data in self._saved.values():
            self._buffers.give_back(data)
        self._saved.clear()
        self._runner.clear()

    def _decode(self, decodes: list[Sequence], finished: list[Sequence]) -> None:
        decodes = sorted(decodes, key=_slot)  # the library runs consecutive streams together
        slots = [seq.slot for seq in decodes]
        begun = time.perf_counter()
        try:
            logits = self._runner.decode(
                slots,
                [seq.tokens[seq.computed_tokens] for seq in decodes if seq.tokens is not None],
                [seq.computed_tokens for seq in decodes],
            )
        except DecodeFailed as error:
            self.drop(decodes, str(error))
            return
        self._counters.decode_s += time.perf_counter() - begun
        self._counters.decode_tokens += len(decodes)
        self.failures_in_a_row = 0
        texts = self._advance(decodes, logits)
        self._scheduler.complete_decodes(decodes, time.monotonic(), [], finished)
        self._give_out(decodes, texts, slots)

    def _prefill(self, batch: Batch, finished: list[Sequence]) -> None:
        pieces = sorted(batch.prefills, key=lambda piece: piece.seq.slot)
        ending: list[Sequence] = []
        texts: list[str] = []
        if pieces:
            rows = []
            for seq, start, count in pieces:
                assert seq.tokens is not None
                want = start + count == seq.total_tokens
                rows.append(Rows(seq.slot, seq.tokens[start : start + count], start, want))
                if want:
                    ending.append(seq)
            begun = time.perf_counter()
            try:
                logits = self._runner.prefill(rows)
            except DecodeFailed as error:
                self.drop([piece.seq for piece in pieces], str(error))
                batch.prefills.clear()
                ending = []
            else:
                self._note_prefill(batch.prefill_tokens, time.perf_counter() - begun)
                texts = self._advance(ending, logits)
        slots = [seq.slot for seq in ending]
        self._scheduler.complete_prefills(batch, time.monotonic(), [], finished)
        for seq in ending:
            if seq.finish_reason is None:
                self._announce(seq)
        self._give_out(ending, texts, slots)

    def _note_prefill(self, tokens: int, took_s: float) -> None:
        """Learn the speed, and keep a step without decodes shorter than `max_step_s`."""
        self.failures_in_a_row = 0
        self._counters.prefill_s += took_s
        self._counters.prefill_tokens += tokens
        rows = self._options.prefill_rows
        if tokens >= rows:
            known = self._prefill_s_per_token * 1.002  # the best of late: a moment without a core is no slow machine
            self._prefill_s_per_token = min(known, took_s / tokens) if known else took_s / tokens
            most = round(self._options.max_step_s / self._prefill_s_per_token / rows) * rows
            self._scheduler.prefill_limit = max(most, rows)

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
        ends = token in self._model.end_tokens
        if seq.output_tokens + 1 > request.sampling.min_tokens:
            if token in request.stop_tokens:
                seq.finish_reason, generation.stop_reason = "stop", token
                if not request.include_stop:
                    return ""
            elif ends and not request.ignore_eos:
                seq.finish_reason = "stop"
        if request.skip_special and (ends or self._model.is_control(token)):
            return ""
        text = generation.text.feed(self._model.piece(token))
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
                kv = self._held(generation, slot)
                self.release(slot)
                outputs.append(self.last_output(generation, text, tokens, kv))
        self._deliver(outputs)

    def _note_token(self, generation: Generation, now_s: float) -> None:
        self._counters.generation_tokens += 1
        if generation.first_token_s is None:
            generation.first_token_s = now_s
            self._counters.ttft_s.observe(now_s - generation.request.arrival_s)
        else:
            self._counters.itl_s.observe(now_s - generation.last_token_s)
        generation.last_token_s = now_s

    def _held(self, generation: Generation, slot: int) -> Kv | None:
        """KV of the prompt for another instance, while the slot still holds it."""
        if not generation.request.hold or generation.seq.finish_reason not in ("stop", "length"):
            return None
        return self._runner.export(slot, generation.seq.prompt_tokens)

    def take_in(self, generation: Generation) -> None:
        """Make KV that came from another instance available as a prefix."""
        request, prefixes = generation.request, self._scheduler.prefixes
        if request.kv is None or prefixes is None:
            return
        saved, drop = prefixes.add_saved(request.tokens[: request.kv_tokens], request.namespace)
        for old in drop:
            self._buffers.give_back(self._saved.pop(old, None))
        self._saved[saved] = np.frombuffer(request.kv, np.uint8)
        generation.imported = saved
        self._counters.transfers += 1
        self._counters.transfer_bytes += len(request.kv)
        self._counters.transfer_s += request.kv_s

    def last_output(
        self, generation: Generation, text: str, tokens: tuple[int, ...], kv: Kv | None = None
    ) -> tuple[Sink, Output]:
        """Close a generation: the rest of its text, its stats, its end."""
        seq = generation.seq
        reason = seq.finish_reason or "error"
        if reason in ("stop", "length"):
            text += generation.text.flush()
        if generation.sampler.grammar is not None:
            generation.sampler.grammar.close()
        del self._generations[generation.request.id]
        self._buffers.give_back(self._swapped.pop(generation.request.id, None))
        if generation.imported is not None and self._scheduler.prefixes is not None:
            self._scheduler.prefixes.remove_saved(generation.imported)
            self._saved.pop(generation.imported, None)
        stats = generation.stats(time.monotonic())
        self._counters.note_end(stats)
        output = Output(text, tokens, generation.logprobs, reason, generation.stop_reason, stats, generation.error, kv)
        return generation.sink, output

    def drop(self, seqs: list[Sequence], reason: str) -> None:
        """End sequences whose step failed, and empty their slots; the others go on."""
        self._counters.failures += 1
        self.failures_in_a_row += 1
        log.error("%d requests end: %s", len(seqs), reason)
        slots = [seq.slot for seq in seqs]
        self._scheduler.drop(seqs, time.monotonic())
        outputs = []
        for seq, slot in zip(seqs, slots, strict=True):
            self._runner.trim(slot, 0)
            generation = self._generations.get(str(seq.id))
            if generation is not None:
                generation.error = reason
                outputs.append(self.last_output(generation, "", ()))
        self._deliver(outputs)

    def release(self, slot: int) -> None:
        """A slot's sequence is gone; with a prefix cache its content stays for others."""
        if slot >= 0 and self._scheduler.prefixes is None:
            self._runner.trim(slot, 0)


def _slot(seq: Sequence) -> int:
    return seq.slot


def _nothing(_: Sequence) -> None:
    """No prefix cache, nobody to tell."""
