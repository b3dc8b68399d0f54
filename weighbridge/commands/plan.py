"""`weighbridge plan`: KV capacity, stability, and the smallest fleet that holds an SLO."""

from __future__ import annotations

import typer

from weighbridge.commands._flags import takes
from weighbridge.commands._plan_flags import FleetSearchFlags, KvFlags, StabilityFlags


def register(app: typer.Typer) -> None:
    """Add the `plan` group."""
    plan = typer.Typer(help="Size a deployment before it exists.", no_args_is_help=True, rich_markup_mode=None)
    plan.command("kv")(_kv)
    plan.command("stability")(_stability)
    plan.command("fleet")(_fleet)
    app.add_typer(plan, name="plan")


@takes(KvFlags)
def _kv(flags: KvFlags) -> None:
    """Bytes of the KV cache, and how many sequences fit a memory. Whole numbers; KiB = 2^10, GiB = 2^30."""
    from weighbridge.plan import kv as kv_module
    from weighbridge.plan.kv_report import KvQuestion, answer, print_answer

    stored = None
    if flags.kv_dtype is not None:
        stored = kv_module.kv_format(flags.kv_dtype, flags.scale_bytes)
    elif flags.dtype_bytes is not None:
        stored = kv_module.kv_bytes_format(flags.dtype_bytes, flags.scale_bytes)
    question = KvQuestion(
        layers=flags.layers,
        kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        window=flags.window,
        config=flags.config,
        gguf=flags.gguf,
        stored=stored,
        tokens=flags.tokens,
        sequences=flags.sequences,
        shared_tokens=flags.shared_prefix,
        block_tokens=flags.block_size,
        tensor_parallel=flags.tp,
        memory=flags.memory,
        weights=flags.weights,
        reserve=flags.reserve,
    )
    print_answer(answer(question), as_json=flags.json)


@takes(StabilityFlags)
def _stability(flags: StabilityFlags) -> None:
    """Whether a load can be sustained, which limit binds first, and the head-room."""
    from weighbridge.plan.stability_report import answer, print_answer

    result = answer(
        rate=flags.rate,
        prompt=flags.prompt,
        output=flags.output,
        trace=flags.trace,
        profile=flags.profile,
        step_time=flags.step_time,
        budget=flags.budget,
        kv_tokens=flags.kv_tokens,
        max_sequences=flags.max_sequences,
        instances=flags.instances,
    )
    print_answer(result, as_json=flags.json)


@takes(FleetSearchFlags)
def _fleet(flags: FleetSearchFlags) -> None:
    """The smallest fleet that holds an SLO on a trace, per policy, by simulation over seeds."""
    from rich.console import Console

    from weighbridge.plan.fleet_report import FleetFlags, answer, print_answer

    question = FleetFlags(
        trace=flags.trace,
        profiles=tuple(flags.profile),
        slo=flags.slo,
        attainment=flags.attainment,
        policies=flags.policy,
        prices=tuple(flags.price),
        rate=flags.rate,
        growth=flags.growth,
        split=flags.split,
        requests=flags.requests,
        seeds=flags.seeds,
        kv_blocks=flags.kv_blocks,
        max_instances=flags.max_instances,
        seconds=flags.seconds,
        jobs=flags.jobs,
    )
    console = Console(stderr=True)
    if flags.json or not console.is_terminal:
        found = answer(question)
    else:
        with console.status("reading the trace") as status:
            found = answer(question, status.update)
    print_answer(found, as_json=flags.json, picture_path=flags.picture)
