"""The knee predicted from the step costs is found, queues diverge above it, and Little's law holds.

Capacity of one engine: at saturation a step holds S decodes and S * m_p / m_d prefill tokens (every request needs m_p
of one and m_d of the other), so it finishes S / m_d requests in t_step seconds. S is bounded by the token budget, by
the number of sequences and by the KV memory. That is `lambda * (m_p + m_d) < B / t_step`, B the tokens of such a step.
"""

from __future__ import annotations

from dataclasses import replace

from weighbridge.core.metrics import RequestRecord
from weighbridge.cost.step import step_seconds
from weighbridge.scheduling.order import Discipline
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, Panel
from weighbridge.sim.fleet import SimulatedInstance
from weighbridge.sim.runs import Generated, Run, run_with_records
from weighbridge.workload.arrivals import Poisson
from weighbridge.workload.lengths import Exponential
from weighbridge.workload.synthetic import RequestClass, Synthetic

PROMPT, OUTPUT = 500.0, 150.0
DISCIPLINES: tuple[Discipline, ...] = ("fcfs", "spf", "sjf")


def predicted_rate(one: SimulatedInstance, prompt: float, output: float) -> float:
    """Requests per second at which the engine saturates, for mean lengths in tokens (exponential outputs)."""
    config = one.scheduler
    # Exponential outputs are length-biased among what decodes: half of twice the mean has been generated.
    context = prompt + output
    by_memory = config.blocks * config.block_tokens / (context + config.block_tokens / 2)
    by_budget = config.token_budget / (1.0 + prompt / output)
    decodes = min(float(config.max_sequences), by_memory, by_budget)
    prefill = decodes * prompt / output
    seconds = step_seconds(
        one.terms,
        prefill_tokens=round(prefill),
        attended_tokens=round(prefill * prompt),
        sequences=round(decodes),
        kv_tokens=round(decodes * context),
    )
    return decodes / output / seconds


def make_run(rate: float, duration_s: float, seed: int, discipline: Discipline) -> Run:
    """One engine alone, with room for every decode that the budget admits."""
    work = Synthetic(Poisson(rate), (RequestClass("", 1.0, Exponential(PROMPT), Exponential(OUTPUT)),))
    fleet = fleets.mixed(1, blocks=12_000)
    scheduler = replace(fleet.instances[0].scheduler, discipline=discipline)
    return Run(
        fleet=fleet.changed(scheduler=scheduler),
        workload=Generated(work, duration_s=duration_s),
        seed=seed,
        assign="fixed",
    )


def backlog(records: list[RequestRecord], at_s: float) -> int:
    """Requests in the system at a moment."""
    return sum(r.scheduled_s <= at_s and (r.last_token_s is None or r.last_token_s > at_s) for r in records)


def growth(records: list[RequestRecord], duration_s: float) -> float:
    """Requests per second by which the backlog grows over the second half of the arrivals."""
    marks = [duration_s * (0.5 + 0.05 * k) for k in range(11)]
    counts = [float(backlog(records, at)) for at in marks]
    middle_t, middle_n = sum(marks) / 11, sum(counts) / 11
    slope = sum((t - middle_t) * (n - middle_n) for t, n in zip(marks, counts, strict=True))
    return slope / sum((t - middle_t) ** 2 for t in marks)


def little(records: list[RequestRecord]) -> dict[str, float]:
    """Relative gap between L and lambda * W, in requests and in tokens, L from a sweep over arrivals and ends.

    Over a run that starts and ends empty the two are equal; the gap is rounding, and checks the event times.
    """
    events = []
    for r in records:
        assert r.last_token_s is not None
        tokens = r.prompt_tokens + r.output_tokens
        events += [(r.scheduled_s, 1, tokens), (r.last_token_s, -1, -tokens)]
    events.sort()
    span = events[-1][0] - events[0][0]
    inside = inside_tokens = 0
    area = area_tokens = 0.0
    last = events[0][0]
    for at, one, tokens in events:
        area += inside * (at - last)
        area_tokens += inside_tokens * (at - last)
        inside, inside_tokens, last = inside + one, inside_tokens + tokens, at
    waits = sum(r.e2e_s or 0.0 for r in records)
    weighted = sum((r.e2e_s or 0.0) * (r.prompt_tokens + r.output_tokens) for r in records)
    # lambda * W = (n / span) * (waits / n)
    return {
        "requests": abs(area / span / (waits / span) - 1.0),
        "tokens": abs(area_tokens / span / (weighted / span) - 1.0),
    }


def run(options: Options) -> Outcome:
    """Sweep the rate through the predicted knee."""
    duration = 150.0 if options.quick else 400.0
    one = make_run(1.0, 1.0, 1, "fcfs").fleet.instances[0]
    knee = predicted_rate(one, PROMPT, OUTPUT)
    shares = [0.8, 1.2] if options.quick else [0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4]
    seed = options.seed_list()[0]
    waits: dict[str, list[float]] = {}
    grows: dict[str, list[float]] = {}
    gaps = {"requests": 0.0, "tokens": 0.0}
    for discipline in DISCIPLINES[:1] if options.quick else DISCIPLINES:
        for share in shares:
            _, records = run_with_records(make_run(knee * share, duration, seed, discipline))
            gap = little(records)
            gaps = {name: max(gaps[name], gap[name]) for name in gaps}
            grows.setdefault(discipline, []).append(growth(records, duration) / (knee * share))
            waits.setdefault(discipline, []).append(sum(r.ttft_s or 0.0 for r in records) / len(records))
    found = {}
    for name, slopes in grows.items():
        above = [share for share, slope in zip(shares, slopes, strict=True) if slope > 0.03]
        below = [share for share, slope in zip(shares, slopes, strict=True) if slope <= 0.03]
        found[name] = (max(below, default=0.0) + min(above, default=shares[-1])) / 2
    findings = [
        f"predicted knee {knee:.1f} requests/s; {d}: backlog grows without bound from {share:.3f} times that"
        for d, share in found.items()
    ]
    findings.append(
        f"Little's law, largest gap on {len(shares) * len(grows)} runs: {gaps['requests']:.1e} in requests, "
        f"{gaps['tokens']:.1e} in tokens"
    )
    curves = {d: (shares, slopes) for d, slopes in grows.items()}
    return Outcome(
        experiment="stability",
        quick=options.quick,
        seeds=[seed],
        data={
            "predicted_rate": knee,
            "found": found,
            "little_gap": gaps,
            "shares": shares,
            "growth": grows,
            "ttft_s": waits,
        },
        findings=findings,
        panels=[
            Panel(title="growth of the backlog, share of arrivals", x="rate / predicted knee", y="", curves=curves),
            Panel(
                title=f"mean TTFT in {duration:.0f} s of arrivals",
                x="rate / predicted knee",
                y="s",
                log_y=True,
                curves={d: (shares, w) for d, w in waits.items()},
            ),
        ],
    )


EXPERIMENT = Experiment("stability", __doc__ or "", run)
