"""`weighbridge doctor`: what is risky, missing or uncalibrated, each with the command or setting that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

if TYPE_CHECKING:
    from weighbridge.config.settings import Settings

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `remedy` is empty where nothing need be done."""

    level: Level
    subject: str
    message: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command("doctor")(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file; without one, the default fleet.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where event logs and profiles are kept.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact the configured engines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check settings, engines, models and profiles. Exit status 1 if something fails, 0 with warnings at most."""
    import os

    from weighbridge.config.settings import data_directory, load_settings

    settings = load_settings(config, os.environ)
    directory = data_directory(settings, data_dir, os.environ)
    findings = [
        *_security(settings, os.environ.get),
        *_storage(directory),
        *_embedded(settings),
        *_profiles(settings, directory, config),
        *([] if offline else _reach(settings)),
        *([] if offline else _drift(settings, config)),
    ]
    if as_json:
        typer.echo(msgspec.json.encode({"findings": findings}).decode())
    else:
        _print(findings)
    if any(f.level == "fail" for f in findings):
        raise typer.Exit(1)


def _security(settings: Settings, environment: Callable[[str], str | None]) -> Iterator[Finding]:
    import os
    import resource

    from weighbridge.commands._risks import risks

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # `serve` takes what it may
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for level, subject, message, remedy in risks(settings, environment, descriptors, memory):
        yield Finding(level, subject, message, remedy)
    yield Finding("ok", "configuration", f"policy {settings.router.policy}, tiers and limits are valid")


def _storage(directory: Path) -> Iterator[Finding]:
    import shutil
    import tempfile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        yield Finding("fail", "data directory", f"{directory}: {error.strerror}", "choose another with --data-dir")
        return
    free = shutil.disk_usage(directory).free
    if free < 4 << 30:
        message = f"{directory}: {free / (1 << 30):.1f} GiB free; event logs take up to 2 GiB"
        yield Finding("warn", "data directory", message, "free some, or lower `log_bytes` or `log_files`")
    else:
        yield Finding("ok", "data directory", f"{directory} is writable")


def _embedded(settings: Settings) -> Iterator[Finding]:
    if not settings.engines:
        return
    from weighbridge.commands._serving import missing_models
    from weighbridge.core.errors import WeighbridgeError
    from weighbridge.engine.instance import available_cores

    try:
        from weighbridge.engine.libllama import Library

        library = Library()
        yield Finding("ok", "libllama", f"{library.path.name} loads; devices: {_devices(library.devices())}")
    except (WeighbridgeError, ImportError) as error:
        yield Finding("fail", "libllama", str(error), "pip install 'weighbridge[engine]'")
    for entry in missing_models(settings.engines):
        message = f"{entry.name} is not fetched"
        yield Finding("fail", "model", message, f"weighbridge model fetch {entry.name}")
    threads = sum(e.threads or len(e.cores) or available_cores() for e in settings.engines)
    if threads > available_cores():
        message = f"the engines use {threads} threads on {available_cores()} cores and will slow each other"
        yield Finding("warn", "engines", message, "lower `threads`")


def _devices(devices: Sequence[tuple[str, str, str]]) -> str:
    return ", ".join(name for name, _, _ in devices) or "none"


def _measure(settings: Settings, name: str, config: Path | None) -> str:
    """The command that measures an instance, to be copied as it is, and what is left to do then."""
    import shlex

    instance = next((i for i in settings.instances if i.name == name), None)
    if instance is None or config is None:  # an embedded engine, or one that was added at run time
        return f"weighbridge calibrate ADDRESS --out FILE, with the address that `weighbridge serve` printed for {name}"
    command = f"weighbridge calibrate {shlex.quote(name)} --config {shlex.quote(str(config))}"
    if instance.profile is not None:
        return command
    file = shlex.quote(f"{name}.json")
    return f"{command} --out {file}, then `profile: {file}` in its entry there"


def _profiles(settings: Settings, directory: Path, config: Path | None) -> Iterator[Finding]:
    from weighbridge.core.errors import ProfileError
    from weighbridge.cost.profile import decode_profile

    rows = [(i.name, i.profile) for i in settings.instances]
    rows += [(e.name, e.profile or str(directory / "profiles" / f"{e.name}.json")) for e in settings.engines]
    embedded = {e.name for e in settings.engines}
    for name, file in rows:
        if file is not None and name not in embedded and not Path(file).exists():
            message = f"profile {file} does not exist: `serve` would not start"
            yield Finding("fail", name, message, _measure(settings, name, config))
            continue
        if file is None or not Path(file).exists():
            level: Level = "ok" if name in embedded else "warn"
            remedy = "" if level == "ok" else _measure(settings, name, config)
            tail = "; it is measured at the first start" if level == "ok" else "; routed by token counts"
            yield Finding(level, name, f"not calibrated{tail}", remedy)
            continue
        try:
            profile = decode_profile(Path(file).read_bytes(), file)
        except (OSError, ProfileError) as error:
            remedy = f"remove {file}: it is measured at the next start" if name in embedded else ""
            yield Finding("fail", name, str(error), remedy or _measure(settings, name, config))
            continue
        rates = profile.rates
        message = f"prefill {rates.prefill_tokens_per_s:,.0f} and decode {rates.decode_tokens_per_s:,.0f} tokens/s"
        yield Finding("ok", name, f"calibrated ({profile.source}): {message}")


def _reach(settings: Settings) -> Iterator[Finding]:
    import asyncio
    import os

    from weighbridge.commands._engine_checks import check_engine
    from weighbridge.core.errors import WeighbridgeError
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.http import ClientLimits, HttpClient

    async def probe() -> list[Finding]:
        findings = []
        for instance in settings.instances:
            try:
                key = instance.api_key_env
                known = {key: os.environ.get(key) or "unset"} if key else {}  # its absence is told elsewhere
                endpoint = Endpoint(msgspec.structs.replace(instance, profile=None), settings.client, known)
            except WeighbridgeError as error:
                findings.append(Finding("fail", instance.name, str(error), "mend it"))
                continue
            client = HttpClient(ClientLimits(), endpoint.ssl_context)
            findings += [Finding(*row) for row in _named(instance.name, await check_engine(endpoint, client))]
            await client.close()
        return findings

    yield from asyncio.run(probe())


def _named(name: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[tuple[Any, str, str, str]]:
    for level, message, remedy in rows:
        yield level, name, message, remedy


def _drift(settings: Settings, config: Path | None) -> Iterator[Finding]:
    """Asks a gateway that runs with these settings, if there is one, which instances left their profile."""
    import asyncio
    import os

    from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient

    async def fleet() -> list[dict[str, Any]]:
        client = HttpClient(ClientLimits(connect_s=1.0))
        token = os.environ.get(settings.admin_token_env) if settings.admin_token_env else None
        headers = (("authorization", f"Bearer {token}"),) if token else ()
        url = f"http://{settings.admin_host}:{settings.admin_port}/fleet"
        try:
            reply = await client.request("GET", url, headers=headers, timeout_s=2.0)
            found = reply.json().get("instances", []) if reply.status == 200 else []
            return found if isinstance(found, list) else []
        except (ExchangeFailed, OSError, msgspec.DecodeError, AttributeError):
            return []
        finally:
            await client.close()

    for row in asyncio.run(fleet()):
        yield from _kv_events(row)
        cost = row.get("cost") or {}
        if cost.get("level") == "online":
            message = f"its speed has changed ({cost.get('drifts')} times): forecasts follow live traffic, less exactly"
            name = str(row.get("name"))
            yield Finding("warn", name, message, _measure(settings, name, config))


KV_REMEDIES = {
    "silent": "see that the engine binds the address (vLLM: tcp://*:PORT, not a host), and the topic",
    "unmatched": "see that `kv_events` names this engine and that its /tokenize uses the model it serves",
    "untranslated": "serve /tokenize, or remove `kv_events`: its index is guessed from what is sent there",
    "off": "let the engine publish KV events, or give `kv_events` its address",
}


def _kv_events(row: dict[str, Any]) -> Iterator[Finding]:
    """An engine whose KV events are configured and do not come, or mean nothing."""
    told = row.get("kv_events")
    if not isinstance(told, dict):
        return
    name, state = str(row.get("name")), str(told.get("state"))
    if state in KV_REMEDIES:
        problem = told.get("problem") or "its prompts ought to have caused some"
        yield Finding("warn", name, f"KV events are {state}: {problem}", KV_REMEDIES[state])
    elif told.get("lost"):
        message = f"{told['lost']} batches of KV events were lost for good"
        yield Finding("warn", name, message, "give the engine a replay_endpoint and a larger buffer")
    elif state == "live":
        yield Finding("ok", name, f"KV events: {told.get('blocks')} blocks known, none lost")


def _print(findings: list[Finding]) -> None:
    import textwrap

    from rich.console import Console

    console = Console(highlight=False, markup=False)
    styles = {"ok": "", "warn": "yellow", "fail": "red"}
    order: dict[Level, int] = {"fail": 0, "warn": 1, "ok": 2}
    names = max(len(f.subject) for f in findings)
    indent = 6 + names + 2
    for finding in sorted(findings, key=lambda f: order[f.level]):
        mark = finding.level if finding.level == "ok" else finding.level.upper()
        console.print(f"{mark:<6}", style=styles[finding.level], end="")
        width = max(40, console.width - indent)
        message = f"\n{' ' * indent}".join(textwrap.wrap(finding.message, width, break_on_hyphens=False))
        console.print(f"{finding.subject:<{names}}  {message}", soft_wrap=True)
        if finding.remedy:  # never broken into lines: many are commands to be copied
            console.print(f"      -> {finding.remedy}", soft_wrap=True)
    fails, warns = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
    console.print(f"\n{fails} failing, {warns} to look at, {len(findings) - fails - warns} fine")
