"""The question of `plan fleet` as flags put it, its answer as JSON, table and picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.bench.charts import Series, lines
from weighbridge.bench.provenance import provenance
from weighbridge.bench.slo import tiers_of
from weighbridge.core.errors import ConfigError, ProfileError
from weighbridge.core.instance import StepTerms
from weighbridge.core.request import Tier
from weighbridge.cost.profile import decode_profile
from weighbridge.plan.fleet import Answer, Device, Question, Reordered, Slot, Trial, search, usable, with_growth
from weighbridge.routing.policies.registry import make_policy
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet_file import PRESETS


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Flags of `plan fleet`. Profiles and prices go together in order; a preset's name may stand for a profile."""

    trace: Path
    profiles: tuple[str, ...]
    slo: str
    attainment: float = 0.95
    policies: str = "calibrated,round_robin"
    prices: tuple[float, ...] = ()
    rate: float | None = None
    growth: str = "1"
    split: bool = False
    requests: int = 5000
    seeds: int = 3
    kv_blocks: int | None = None
    max_instances: int = 256
    seconds: float = 110.0
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """Answers by growth factor, in the order asked."""

    question: Question
    by_growth: tuple[tuple[float, tuple[Answer, ...]], ...]
    seconds: float
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints: the answers at today's rate at the top level, the what-ifs beside them."""
        question = self.question
        factor, answers = self.by_growth[0]
        return {
            "policies": {a.policy: _answer(a, question) for a in answers},
            "attainment_target": question.attainment,
            "slo": {k: v for k, v in msgspec.to_builtins(question.tier).items() if k in ("ttft_s", "tpot_s", "e2e_s")},
            "rate": question.workload.rate * factor,
            "growth": [
                {
                    "factor": f,
                    "rate": question.workload.rate * f,
                    "policies": {a.policy: _answer(a, question) for a in found},
                }
                for f, found in self.by_growth
            ],
            "seconds": self.seconds,
            "method": "simulation: the trace's five-minute pieces in seeded order at its mean rate; a size holds when "
            "the mean attainment over the seeds reaches the target; checked on fresh seeds",
            "provenance": provenance(**self.settings),
        }


def answer(flags: FleetFlags, progress: Callable[[str], None] | None = None) -> FleetAnswer:
    """Build the question, search, return. Raises `ConfigError`, `TraceError` or `ProfileError`."""
    began = time.monotonic()
    question = make_question(flags)
    factors = _factors(flags.growth)
    found = []
    for factor in factors:
        left = flags.seconds - (time.monotonic() - began)
        granted = replace(with_growth(question, factor), seconds=max(1.0, left))
        answers, _ = search(granted, progress)
        found.append((factor, tuple(answers)))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in _as_dict(flags).items()}
    return FleetAnswer(question, tuple(found), time.monotonic() - began, settings)


def make_question(flags: FleetFlags) -> Question:
    """The question that the flags put."""
    policies = tuple(name.strip() for name in flags.policies.split(",") if name.strip())
    if not policies:
        raise ConfigError("name at least one policy", source="--policy")
    for name in policies:
        make_policy(name)
    for flag, value in (
        ("--requests", flags.requests),
        ("--seeds", flags.seeds),
        ("--max-instances", flags.max_instances),
    ):
        if value < 1:
            raise ConfigError(f"must be at least 1, not {value}", source=flag)
    requests = usable(str(flags.trace))
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = flags.rate if flags.rate is not None else (len(requests) - 1) / span if span > 0 else 1.0
    if rate <= 0:
        raise ConfigError(f"must be above 0, not {rate:g}", source="--rate")
    tier = tiers_of([flags.slo])["standard"]
    workload = Reordered(str(flags.trace), rate, min(flags.requests, len(requests)), tier.name)
    return Question(
        workload=workload,
        slots=_slots(flags),
        tier=Tier(name=tier.name, priority=tier.priority, ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s),
        attainment=flags.attainment,
        policies=policies,
        seeds=flags.seeds,
        max_instances=flags.max_instances,
        seconds=flags.seconds,
        jobs=flags.jobs,
    )


def _slots(flags: FleetFlags) -> tuple[Slot, ...]:
    if not flags.profiles:
        raise ConfigError(f"give a profile file, or one of {', '.join(PRESETS)}", source="--profile")
    if len(flags.prices) not in (0, len(flags.profiles)):
        raise ConfigError("give one price for each --profile, in the same order", source="--price")
    prices = flags.prices or (0.0,) * len(flags.profiles)
    devices = [_device(text, price, flags.kv_blocks) for text, price in zip(flags.profiles, prices, strict=True)]
    if len({d.name for d in devices}) < len(devices):
        devices = [replace(d, name=f"{d.name}-{k}") for k, d in enumerate(devices)]
    if not flags.split:
        return tuple(Slot(device) for device in devices)
    if len(devices) > 2:
        raise ConfigError("takes one profile, or two: the first prefills, the second decodes", source="--split")
    return Slot(devices[0], "prefill"), Slot(devices[-1], "decode")


def _device(text: str, price: float, kv_blocks: int | None) -> Device:
    changes: dict[str, Any] = {"blocks": kv_blocks} if kv_blocks is not None else {}
    if text in PRESETS:
        return Device(text, PRESETS[text], SchedulerConfig(prefix_caching=True, **changes), price)
    path = Path(text)
    try:
        profile = decode_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror or error}") from None
    limits = profile.limits
    for field, value in (
        ("token_budget", limits.token_budget), ("max_sequences", limits.max_sequences),
        ("block_tokens", limits.block_size), ("blocks", limits.kv_blocks),
    ):  # fmt: skip
        if value is not None:
            changes.setdefault(field, value)
    terms = profile.step
    if terms is None:
        # the two-rate view alone: every token costs what it costs in isolation, batching gains nothing
        rates = profile.rates
        terms = StepTerms(
            base_s=0.0, prefill_s=1.0 / rates.prefill_tokens_per_s, sequence_s=1.0 / rates.decode_tokens_per_s
        )
    return Device(path.stem, terms, SchedulerConfig(prefix_caching=limits.prefix_caching, **changes), price)


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if not factors or min(factors) <= 0:
        raise ConfigError(f"'{text}' is not a list of factors above 0, such as 1,1.5,2", source="--growth")
    return factors


def _as_dict(flags: FleetFlags) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in FleetFlags.__slots__}


def _answer(found: Answer, question: Question) -> dict[str, Any]:
    best = found.best
    out: dict[str, Any] = {"instances": best.size if best is not None else None}
    if best is not None:
        labels = [slot.label for slot in question.slots]
        price = sum(s.device.price_per_hour * n for s, n in zip(question.slots, best.composition, strict=True))
        out["composition"] = {label: n for label, n in zip(labels, best.composition, strict=True) if n}
        out.update(_trial(best))
        out["price_per_hour"] = price or None
        per_hour = 3600.0 * best.output_tokens_per_s
        out["price_per_million_output_tokens"] = 1e6 * price / per_hour if price and per_hour else None
    if found.check is not None:
        fewer = _trial(found.one_fewer) if found.one_fewer is not None else None
        out["fresh_seeds"] = {
            "holds": found.check.attainment.mean >= question.attainment,
            **_trial(found.check),
            "one_fewer": None
            if fewer is None
            else {"holds": fewer["attainment"]["mean"] >= question.attainment, **fewer},
        }
    out["tried"] = [
        {"composition": list(t.composition), "instances": t.size, "attainment": t.attainment.mean} for t in found.tried
    ]
    if found.note:
        out["note"] = found.note
    return out


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "attainment": msgspec.to_builtins(trial.attainment),
        "ttft_p99_s": trial.ttft_p99_s,
        "tpot_p99_s": trial.tpot_p99_s,
        "shed_rate": trial.shed_rate,
        "output_tokens_per_s": trial.output_tokens_per_s,
    }


def picture(found: FleetAnswer) -> str:
    """Attainment against the number of instances, by policy, as SVG."""
    series = []
    for a in found.by_growth[0][1]:
        best: dict[int, float] = {}
        for t in a.tried:
            best[t.size] = max(best.get(t.size, 0.0), t.attainment.mean)
        series.append(Series(a.policy, sorted(best.items()), dots=True))
    target = found.question.attainment
    return lines(
        "SLO attainment by fleet size", "instances", "attainment of all offered", series,
        y_range=(0.0, 1.05), level=(target, f"target {target:g}"),
    )  # fmt: skip


def print_answer(found: FleetAnswer, *, as_json: bool, picture_path: Path | None = None) -> None:
    """JSON for programs; a table for people; the picture where asked."""
    if picture_path is not None:
        try:
            picture_path.write_text(picture(found), encoding="utf-8")
        except OSError as error:
            print(f"cannot write {picture_path}: {error.strerror or error}", file=sys.stderr)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found.to_json()), indent=2).decode() + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    tier = found.question.tier
    bounds = ", ".join(
        f"{name} <= {value:g} s"
        for name, value in (
            ("TTFT", tier.ttft_s), ("TPOT", tier.tpot_s), ("E2E", tier.e2e_s)
        )
        if value is not None
    )  # fmt: skip
    console.print(f"hold {bounds} for {100 * found.question.attainment:g} % of all requests", soft_wrap=True)
    for factor, answers in found.by_growth:
        _table(found.question, factor, answers, console)
    console.print(f"{found.seconds:.0f} s of simulation", style="dim")


def _table(question: Question, factor: float, answers: Sequence[Answer], console: Any) -> None:
    from rich.table import Table

    console.print(f"at {question.workload.rate * factor:.2f} requests/s" + (f" (x {factor:g})" if factor != 1 else ""))
    table = Table(box=None, pad_edge=False)
    for name in (
        "policy",
        "instances",
        "attainment",
        "fresh seeds",
        "one fewer",
        "TTFT p99",
        "TPOT p99",
        "cost/1M out",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for a in answers:
        if a.best is None:
            table.add_row(a.policy, "none")
            continue
        best, row = a.best, _answer(a, question)
        counts = " + ".join(f"{n} {label}" for label, n in row["composition"].items())
        size = counts if len(question.slots) > 1 else str(best.size)
        cost = row["price_per_million_output_tokens"]
        table.add_row(
            a.policy, size, _share(best), _share(a.check), _share(a.one_fewer),
            f"{best.ttft_p99_s:.2f} s", f"{1e3 * best.tpot_p99_s:.0f} ms", f"{cost:.2f}" if cost else "-",
        )  # fmt: skip
    console.print(table)
    for a in answers:
        if a.note:
            console.print(f"{a.policy}: {a.note}", soft_wrap=True, style="yellow")


def _share(trial: Trial | None) -> str:
    if trial is None:
        return "-"
    error = trial.attainment.standard_error
    return f"{100 * trial.attainment.mean:.1f} %" + (f" +-{100 * error:.1f}" if error is not None else "")
