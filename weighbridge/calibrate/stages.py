"""Which probes to send: stages that together tell the terms of the cost model apart.

alone       one prompt at a time, from short to long: prefill and attend
decode-C    C sequences at once, short and long contexts: base, the curve in sequences, and kv
mixed       a prompt arrives while others decode: how one slows the other
burst       twice the engine's sequences at once: the queue, and how many run
repeat      one prompt twice: whether a prefix is found again
traffic     random lengths and arrivals: what requests cost each other beyond their steps
random      the same at another load: held out, to judge the fit by
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from weighbridge.calibrate.probe import Probe
from weighbridge.core.instance import Limits

TRAFFIC = "traffic"
HELD_OUT = "random"
LEAST_HELD_OUT = 48
"""About so many requests are held out at least, unless the budget is very short."""
SPREAD = 1.2
"""Of the logarithm of prompt lengths in random stages: short prompts among long ones, as in real traffic."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Probes that are sent together, each after its own delay; the stage ends with the last of them."""

    name: str
    probes: tuple[Probe, ...]


@dataclass(slots=True)
class Speed:
    """Rough seconds of this engine, to fit stages into a budget; refined by every stage that has run."""

    prefill_s: float = 1e-3
    step_s: float = 0.03
    sequence_s: float = 0.01

    def seconds(self, stage: Stage, sequences: int) -> float:
        """About how long a stage will last."""
        prompts = sum(p.prompt_tokens for p in stage.probes)
        outputs = [p.output_tokens for p in stage.probes]
        width = min(sequences, len(outputs))
        steps = max(*outputs, math.ceil(sum(outputs) / width))
        last = max(p.after_s for p in stage.probes)
        return last + self.prefill_s * prompts + steps * (self.step_s + self.sequence_s * width)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the stages must fit: the longest prompt and answer together, and how many run at once."""

    context_tokens: int
    sequences: int

    @classmethod
    def of(cls, limits: Limits, *, longest: int = 4096) -> Shape:
        """From an engine's limits; 16 sequences and 2,048 tokens where it does not tell."""
        context = min(limits.max_context or 2048, longest)
        return cls(context_tokens=context, sequences=limits.max_sequences or 16)

    def lengths(self, shortest: int = 16) -> list[int]:
        """Powers of two up to what leaves room for an answer."""
        top = self.context_tokens - 32
        found = [n for n in (16 << i for i in range(16)) if shortest <= n < top]
        return [*found, top]

    def widths(self) -> list[int]:
        """Numbers of sequences: powers of two, 3 and 6 for the stairs that kernels of few rows make, and all."""
        found = {*(1 << i for i in range(12)), 3, 6}
        return [*sorted(width for width in found if width < self.sequences), self.sequences]


def round_of(shape: Shape, number: int, rng: random.Random, *, long_tokens: int) -> list[Stage]:
    """One round, most telling first. `number` 0 is the plain grid; later rounds vary sizes around it.

    `long_tokens` bounds prompts, so that a slow engine is not asked for minutes of prefill.
    """

    top = min(long_tokens, shape.context_tokens - 64)

    def vary(tokens: int) -> int:
        return min(top, max(4, tokens if number == 0 else round(tokens * rng.uniform(0.7, 1.2))))

    lengths = [n for n in shape.lengths() if n <= top] or [top]
    stages = [Stage("alone", (Probe(vary(n), 4),)) for n in lengths]
    widths = shape.widths()
    for width in widths:
        short = tuple(Probe(vary(24), 24) for _ in range(width))
        stages.append(Stage(f"decode-{width}", short))
    for width in (1, widths[-1] // 2, widths[-1]):
        if width:
            context = max(32, min(top, 1024 if width == 1 else 512))
            stages.append(Stage(f"decode-{width}-long", tuple(Probe(vary(context), 24) for _ in range(width))))
    others = max(1, shape.sequences // 2)
    running = tuple(Probe(vary(32), 40) for _ in range(others))
    stages.append(Stage("mixed", (*running, Probe(vary(min(top, 512)), 8, after_s=0.0))))
    stages.append(Stage("burst", tuple(Probe(vary(rng.choice([16, 64, 192])), 16) for _ in range(2 * shape.sequences))))
    return stages


def repeat_stages(long_tokens: int, seed: int) -> list[Stage]:
    """The same prompt twice, one after the other."""
    tokens = min(256, long_tokens)
    return [Stage("repeat-cold", (Probe(tokens, 2, seed=seed),)), Stage("repeat-warm", (Probe(tokens, 2, seed=seed),))]


def random_stage(
    name: str, shape: Shape, speed: Speed, seconds: float, rng: random.Random, *, long_tokens: int, busy: float
) -> Stage:
    """Random lengths at Poisson arrivals that keep the engine `busy` (a share) for about `seconds`."""
    probes: list[Probe] = []
    now = 0.0
    top = min(long_tokens, shape.context_tokens - 64)
    width = max(1, shape.sequences // 2)
    mean_prompt, mean_output = 0.25 * top, 20.0
    typical = speed.prefill_s * mean_prompt + mean_output * (speed.step_s / width + speed.sequence_s)
    # a slow engine gets shorter requests rather than too few to judge a fit by
    shrink = min(1.0, busy * seconds / (LEAST_HELD_OUT * typical))
    median = max(8.0, shrink * mean_prompt) / math.exp(0.5 * SPREAD**2)
    while now < seconds and len(probes) < 200:
        prompt = min(top, 4 + int(median * math.exp(rng.gauss(0.0, SPREAD))))
        output = min(64, 4 + int(rng.expovariate(1 / max(4.0, shrink * mean_output))))
        probes.append(Probe(prompt, output, after_s=now))
        work_s = speed.prefill_s * prompt + output * (speed.step_s / width + speed.sequence_s)
        now += rng.expovariate(busy / work_s)
    return Stage(name, tuple(probes))
