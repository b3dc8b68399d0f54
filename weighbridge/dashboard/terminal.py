"""The fleet in a terminal: the same snapshot, judgements and sentences as the first page."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighbridge.dashboard import judge
from weighbridge.dashboard.judge import SIGN, Judgement
from weighbridge.dashboard.snapshot import InstanceView, Snapshot
from weighbridge.dashboard.words import NONE, age, count, percent, rate, seconds, signed

STYLE = {"good": "green", "watch": "yellow", "bad": "bold red", "none": ""}
MOST_ATTENTION = 5


def screen(s: Snapshot, wide: bool = True) -> RenderableType:
    """Headline, what needs attention, instances and the last decisions."""
    return Group(_headline(s), *_attention(s), _instances(s, wide), _decisions(s))


def _marked(text: str, judgement: Judgement) -> Text:
    sign = f" {SIGN[judgement]}" if judgement in ("watch", "bad") else ""
    return Text(text + sign, style=STYLE[judgement])


def _headline(s: Snapshot) -> RenderableType:
    worst = judge.worst(s)
    room = None if worst is None or worst.load is None else 1 - worst.load
    parts: tuple[tuple[str, str, Judgement], ...] = (
        ("attainment", percent(s.attainment, 1), judge.above(s.attainment, judge.ATTAINMENT_TARGET)),
        ("goodput", rate(s.goodput_per_s), "none"),
        ("shed", percent(s.shed, 2), judge.below(s.shed, 0.01, 0.05)),
        ("P99 TTFT", seconds(s.ttft_p99_s), judge.below(s.ttft_p99_s, s.ttft_bound_s)),
        (
            f"head-room {worst.name if worst else ''}".strip(),
            signed(room),
            judge.headroom(worst.load if worst else None),
        ),
        ("forecast error", percent(s.forecast_error, 1), judge.below(s.forecast_error, s.error_bar)),
        ("held", count(s.queued), "none"),
    )
    line = Text()
    for name, value, judgement in parts:
        line.append(f"{name} ", style="dim")
        line.append_text(_marked(value, judgement))
        line.append("   ")
    return line


def _attention(s: Snapshot) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if s.error:
        lines.append(Text(f"✕ {s.error} What follows is {seconds(s.age_s)} old.", style="bold red"))
    if s.note:
        lines.append(Text(s.note, style="dim"))
    for a in judge.attention(s)[:MOST_ATTENTION]:
        text = Text(f"{SIGN[a.judgement]} ", style=STYLE[a.judgement])
        text.append(a.subject.removeprefix("tier:"), style="bold")
        text.append(f" {a.text}", style="default")
        if a.command:
            text.append(f"  $ {a.command}", style="cyan")
        lines.append(text)
    return lines


def _instances(s: Snapshot, wide: bool) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ["instance", "state", "running", "queue", "KV", "head-room"]
    names += ["forecast", "observed", "error", "pool", "calibration", "age"] if wide else ["age"]
    for name in names:
        words = name in ("instance", "pool", "state", "calibration")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for i in s.instances:
        table.add_row(*_row(i, wide))
    return table


def _row(i: InstanceView, wide: bool) -> list[Text | str]:
    error = judge.spread(i)
    drift = judge.drifted(i, error)
    room = None if i.load is None else 1 - i.load
    last = i.pairs[-1] if i.pairs else None
    running = f"{i.running}/{i.max_sequences}" if i.max_sequences else count(i.running)
    state = Text(i.state, style="" if i.state == "up" else "yellow" if i.state != "down" else "bold red")
    cells: list[Text | str] = [
        i.name, state, running, _marked(count(i.waiting), "watch" if i.waiting > 3 else "none"),
        _marked(percent(i.kv_used), "bad" if (i.kv_peak or 0) > 1 else "none"),
        _marked(signed(room), judge.headroom(i.load)),
    ]  # fmt: skip
    if wide:
        cells += [
            seconds(last.forecast_s if last else None),
            seconds(last.observed_s if last else None),
            _marked(signed(error.median) if error else NONE, "watch" if drift else "none"),
            i.pool,
            i.level,
        ]
    return [*cells, age(i.age_s)]


def _decisions(s: Snapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", title="last decisions", title_justify="left",
                  title_style="dim")  # fmt: skip
    for name in ("request", "tier", "in", "out", "chosen", "forecast", "observed", "outcome"):
        number = name in ("in", "out", "forecast", "observed")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for d in s.decisions[:6]:
        table.add_row(
            d.id, d.tier, count(d.prompt_tokens), count(d.expected_output_tokens), d.chosen or NONE,
            seconds(d.judged_s), seconds(d.observed_s),
            _marked(d.outcome, "bad" if d.outcome in ("failed", "rejected") else "none"),
        )  # fmt: skip
    return table
