"""Which model answers a request: encode, predict quality and cost, filter, compare in USD, explain.

Pure: equal inputs give equal decisions; feedback enters only through `learn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weighbridge.core.errors import RequestError
from weighbridge.selection import calibration, choose
from weighbridge.selection.checkpoint import Checkpoint, check_fit, encoder_of
from weighbridge.selection.decision import Constraints, Decision, LiveCost, Mode, Provenance, Weighed
from weighbridge.selection.features import Features, FloatArray
from weighbridge.selection.filters import exclusions
from weighbridge.selection.forecast import Forecast, Vector
from weighbridge.selection.neighbours import Neighbours, familiarity
from weighbridge.selection.pool import MILLION, Pool
from weighbridge.selection.rules import Verdict, apply_rules
from weighbridge.selection.settings import SelectionSettings, check_settings
from weighbridge.selection.text import RoutingText, routing_text

MAX_LOG_TOKENS = 12.0


class Selector:
    """A checkpoint applied to a pool under some settings."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: Pool,
        settings: SelectionSettings | None = None,
        source: str = "checkpoint",
    ) -> None:
        """Refuses (CheckpointError, ConfigError) what does not fit together."""
        self.settings = settings or SelectionSettings()
        self.pool, self.checkpoint = pool, checkpoint
        check_fit(checkpoint, pool, self.settings.text, source)
        check_settings(self.settings, pool.names)
        self.encoder = encoder_of(checkpoint.manifest, source)
        self._columns = np.array([checkpoint.models.index(model.learned_as) for model in pool.models])
        self._weights = self._own_weights()
        self._curves, self._prior = self._own(checkpoint.curves), self._own(checkpoint.prior)
        self._unknown_prior = self._own(checkpoint.unknown_prior)
        self._output_prior, self._output_scale = self._own(checkpoint.output_prior), self._own(checkpoint.output_scale)
        self._input_line = self._own(checkpoint.input_fit)
        self._input_price = np.array([model.input_usd_per_1m for model in pool.models]) / MILLION
        self._output_price = np.array([model.output_usd_per_1m for model in pool.models]) / MILLION
        self.neighbours = Neighbours(len(pool.models), self.settings.feedback_rows)
        self.fallback = self.settings.fallback or pool.names[int(self._unknown_prior.argmax())]
        self.strong, self.weak = self._strong_and_weak()
        self._gains = np.sort(self._column_of(self.strong) - self._column_of(self.weak))
        manifest = checkpoint.manifest
        self.provenance = Provenance(
            checkpoint=manifest.id,
            encoder=manifest.encoder,
            text=manifest.text,
            pool=pool.pool,
            pool_hash=pool.hash,
            trained_on=tuple(source.name for source in manifest.data),
        )

    def decide(
        self,
        messages: Sequence[object],
        tools: Sequence[object] = (),
        mode: Mode | None = None,
        constraints: Constraints | None = None,
        live: Mapping[str, LiveCost] | None = None,
    ) -> Decision:
        """Choose a model for one request.

        Args:
            messages: the request's decoded `messages`.
            tools: its `tools`, if any.
            mode: how to compare; None means the settings' mode.
            constraints: limits of this request.
            live: what each model's pool would cost in time right now. When given, a model that is not in it has no
                instance and is excluded.

        Raises:
            RequestError: no model can serve it; the message holds each one's reason.
        """
        return self.decide_with_sketch(messages, tools, mode, constraints, live)[0]

    def decide_with_sketch(
        self,
        messages: Sequence[object],
        tools: Sequence[object] = (),
        mode: Mode | None = None,
        constraints: Constraints | None = None,
        live: Mapping[str, LiveCost] | None = None,
    ) -> tuple[Decision, FloatArray]:
        """`decide`, and the text's sketch, which `learn` needs should feedback on this request come later."""
        mode, constraints = mode or self.settings.mode, constraints or Constraints()
        text = routing_text(messages, tools, self.settings.text)
        features = self.encoder.encode(text.text)
        sketch = features.sketch()
        forecast = self.forecast(text, features, sketch, constraints.max_output_tokens)
        verdict = apply_rules(self.settings.rules, text, float(forecast.input_tokens.max()), constraints.headers)
        reasons = exclusions(self.pool, forecast, text, constraints, live, verdict.exclude)
        candidates = self._weigh(forecast, reasons, mode, live)
        model, reason = self._choose(candidates, mode, constraints, verdict, forecast.known)
        chosen = next(c for c in candidates if c.model == model)
        decision = Decision(
            model=model,
            mode=mode,
            reason=reason,
            candidates=candidates,
            known=forecast.known,
            familiarity=round(forecast.familiarity, 4),
            threshold=round(self.checkpoint.manifest.threshold, 4),
            expected_output_tokens=chosen.output_tokens,
            prompt_tokens=chosen.input_tokens,
            truncated=text.truncated,
            provenance=self.provenance,
            rules=verdict.names,
        )
        return decision, sketch

    def forecast(
        self, text: RoutingText, features: Features, sketch: FloatArray, max_output_tokens: int | None = None
    ) -> Forecast:
        """Predict every candidate; a text of an unknown family gets each model's mean over families."""
        near = familiarity(self.checkpoint.anchors, sketch)
        known = not self.settings.gate or near >= self.checkpoint.manifest.threshold
        count = len(self.pool.models)
        if known:
            rows = self._weights.take(features.buckets, axis=0, mode="clip")  # several times faster than indexing
            raw = (features.values @ rows).astype(np.float64)
            quality = calibration.apply_curves(self._curves, raw[:count] + self._prior)
            shift = raw[count:]
        else:
            quality = self._unknown_prior
            shift = np.zeros(count)
        taught = np.minimum(np.maximum(quality + self.neighbours.corrections(sketch), 0.0), 1.0)
        logs = np.minimum(np.maximum(shift + self._output_prior, 0.0), MAX_LOG_TOKENS)
        output = np.maximum(1.0, np.expm1(logs) * self._output_scale)
        if max_output_tokens is not None:
            output = np.minimum(output, max_output_tokens)
        prompt = self._input_line[:, 0] + self._input_line[:, 1] * text.prompt_bytes
        cost = prompt * self._input_price + output * self._output_price
        return Forecast(taught, quality, output, prompt, cost, known, near)

    def learn(self, sketch: FloatArray, model: str, surprise: float) -> None:
        """Remember that `model` did better or worse than forecast near this text; `surprise` = outcome - `untaught`."""
        self.neighbours.add(sketch, self.pool.names.index(model), surprise)

    def weights_of(self, model: str) -> FloatArray:
        """The quality weights of one model, one per bucket."""
        column: FloatArray = self._weights[:, self.pool.names.index(model)]
        return column

    def share_threshold(self, share: float) -> float:
        """The gain of strong over weak above which `share` of held-out rows lie."""
        if not self._gains.size:
            return 0.0
        return float(np.quantile(self._gains, min(1.0, max(0.0, 1.0 - share))))

    def _choose(
        self,
        candidates: tuple[Weighed, ...],
        mode: Mode,
        constraints: Constraints,
        verdict: Verdict,
        known: bool,
    ) -> tuple[str, str]:
        allowed = {c.model: c for c in candidates if c.excluded is None}
        if mode is Mode.FIXED:
            return choose.fixed(candidates, constraints.model)
        if not allowed:
            raise _nobody(candidates)
        if verdict.use in allowed:
            return verdict.use, f"rule {verdict.names[-1]} says use"
        if verdict.prefer and any(name in allowed for name in verdict.prefer):
            allowed = {name: c for name, c in allowed.items() if name in verdict.prefer}
        if not known:
            return choose.unknown(allowed, self.fallback)
        if mode is Mode.STRONG_SHARE:
            share = self.settings.strong_share if constraints.strong_share is None else constraints.strong_share
            return choose.strong_share(allowed, self.strong, self.weak, share, self.share_threshold(share))
        if mode is Mode.MIN_QUALITY:
            bound = self.settings.min_quality if constraints.min_quality is None else constraints.min_quality
            return choose.min_quality(allowed, bound, self.settings.worth_of(mode).second_usd)
        return choose.best(allowed, mode, constraints.previous, self.settings.sticky.margin_usd)

    def _weigh(
        self, forecast: Forecast, reasons: list[str | None], mode: Mode, live: Mapping[str, LiveCost] | None
    ) -> tuple[Weighed, ...]:
        worth = self.settings.worth_of(mode)
        quality, untaught, cost = forecast.quality.tolist(), forecast.untaught.tolist(), forecast.cost_usd.tolist()
        output, prompt = forecast.output_tokens.tolist(), forecast.input_tokens.tolist()
        here = [None if live is None else live.get(name) for name in self.pool.names]
        latencies = [None if h is None else h.latency_s(output[i]) for i, h in enumerate(here)]
        # seconds are compared only where they are known of every model that could be taken
        timed = all(latency is not None for latency, reason in zip(latencies, reasons, strict=True) if reason is None)
        out = []
        for i, name in enumerate(self.pool.names):
            latency = latencies[i]
            waiting = worth.second_usd * latency if timed and latency is not None else 0.0
            utility = worth.success_usd * quality[i] - cost[i] - waiting
            out.append(
                Weighed(
                    model=name,
                    quality=round(quality[i], 4),
                    untaught=round(untaught[i], 4),
                    cost_usd=round(cost[i], 8),
                    input_tokens=round(prompt[i]),
                    output_tokens=round(output[i]),
                    latency_s=None if latency is None else round(latency, 4),
                    utility_usd=round(utility, 8) if reasons[i] is None else None,
                    excluded=reasons[i],
                )
            )
        return tuple(out)

    def _own(self, table: FloatArray) -> Vector:
        """The rows of a per-model table in the pool's order."""
        own: Vector = table[self._columns].astype(np.float64)
        return own

    def _own_weights(self) -> FloatArray:
        columns = np.concatenate([self._columns, self._columns + len(self.checkpoint.models)])
        if np.array_equal(columns, np.arange(self.checkpoint.weights.shape[1])):
            return self.checkpoint.weights
        return np.ascontiguousarray(self.checkpoint.weights[:, columns])

    def _strong_and_weak(self) -> tuple[str, str]:
        prices = self._input_price + self._output_price
        strong = self.settings.strong or self.pool.names[int(self._prior.argmax())]
        weak = self.settings.weak or self.pool.names[int(prices.argmin())]
        return strong, weak

    def _column_of(self, name: str) -> FloatArray:
        column: FloatArray = self.checkpoint.left_out[:, int(self._columns[self.pool.names.index(name)])]
        return column


def _nobody(candidates: tuple[Weighed, ...]) -> RequestError:
    reasons = "; ".join(f"{c.model}: {c.excluded}" for c in candidates)
    down = all(c.excluded is not None and "instance" in c.excluded for c in candidates)
    if down:
        return RequestError(
            f"no model can serve this request now ({reasons})", status=503, type="server_error", code="no_capacity"
        )
    return RequestError(f"no model can serve this request ({reasons})", code="no_candidate", param="model")
