"""An outcome as a page of documentation: question, command, seeds, findings, losses, table and picture."""

from __future__ import annotations

import msgspec

from weighbridge.sim.experiments.base import Experiment, Outcome
from weighbridge.sim.sweep import Spread


def page(experiment: Experiment, outcome: Outcome) -> str:
    """Markdown; refers to NAME.png beside it."""
    seeds = ", ".join(map(str, outcome.seeds))
    size = (" --quick" if outcome.quick else "") + f" --seeds {len(outcome.seeds)}"
    lines = [
        f"# {experiment.name}",
        "",
        experiment.question.strip(),
        "",
        f"    weighbridge simulate experiment {experiment.name}{size} --out docs/experiments",
        "",
        f"Simulated; seeds {seeds}, apart from those that anything was tuned on. Attainment is the share of all",
        "offered requests that met every bound of their tier; differences are paired by seed; ± is the standard error",
        "over seeds.",
        "",
        f"![{experiment.name}]({experiment.name}.png)",
        "",
        "## Found",
        "",
        *(f"- {line}" for line in outcome.findings),
        "",
        "## Where it loses",
        "",
        *(f"- {line}" for line in outcome.loses or ["In none of the cases compared here."]),
        "",
    ]
    if outcome.by_trace:
        lines += ["## Attainment, percent", "", *_table(outcome), ""]
    for key, title, scale in (("ttft_p99_s", "P99 TTFT, seconds", 1.0), ("shed_rate", "Shed, percent", 100.0)):
        values = outcome.data.get(key)
        if isinstance(values, dict) and values:
            lines += [f"## {title}", "", *_plain(values, scale), ""]
    return "\n".join(lines)


def _plain(values: dict[str, float], scale: float) -> list[str]:
    """A table of values keyed `place/policy`; a policy may hold a slash itself."""
    places = dict.fromkeys(key.split("/")[0] for key in values)
    first = next(iter(places))
    policies = [key.removeprefix(f"{first}/") for key in values if key.startswith(f"{first}/")]
    rows = [f"| | {' | '.join(policies)} |", "|---" * (len(policies) + 1) + "|"]
    for place in places:
        cells = [f"{scale * values[f'{place}/{policy}']:.2f}" for policy in policies]
        rows.append(f"| {place} | {' | '.join(cells)} |")
    return rows


def read_outcome(data: bytes) -> Outcome:
    """The outcome of a NAME.json, without its panels: a page can be written again without running anything."""
    fields = msgspec.json.decode(data)
    fields["by_trace"] = fields.pop("spreads")
    return msgspec.convert(fields, Outcome)


def _table(outcome: Outcome) -> list[str]:
    policies = list(next(iter(outcome.by_trace.values())))
    rows = [f"| | {' | '.join(policies)} |", "|---" * (len(policies) + 1) + "|"]
    for trace, row in outcome.by_trace.items():
        rows.append(f"| {trace} | {' | '.join(_cell(row[policy]) for policy in policies)} |")
    return rows


def _cell(value: Spread) -> str:
    error = "" if value.standard_error is None else f" ± {100 * value.standard_error:.1f}"
    return f"{100 * value.mean:.1f}{error}"
