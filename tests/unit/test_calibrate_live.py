"""Calibration over HTTP: what it keeps, and every way in which an engine can be unfit to be measured."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.loop import run
from tests.support.paced_engine import PacedEngine
from weighbridge.calibrate.endpoint import base_url
from weighbridge.calibrate.live import calibrate_url
from weighbridge.calibrate.quick import quick_profile
from weighbridge.cli import app
from weighbridge.core.errors import ConfigError, InputError, UpstreamError
from weighbridge.core.instance import Limits
from weighbridge.cost.profile import decode_profile, encode_profile


async def _refused(**settings: Any) -> str:
    asked = {name: settings.pop(name) for name in ("model", "key", "budget_s") if name in settings}
    async with PacedEngine(**settings) as engine:
        with pytest.raises(UpstreamError) as caught:
            await calibrate_url(engine.url, seed=1, **({"budget_s": 3.0} | asked))
        assert engine.url in str(caught.value)
        return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ["a", "b"]}, "name the model by --model; it serves a, b"),
        ({"model": "other"}, "does not serve 'other'; it serves m"),
        ({"others_running": 3}, "3 running and 0 waiting requests of others; calibrate when it is idle"),
        ({"stream": False}, "does not stream"),
        ({"usage": False}, "no usage"),
        ({"status": 404}, "HTTP 404: it broke; is --model right?"),
        ({"status": 500}, "HTTP 500: it broke"),
        ({"fail_after": 3, "restart_on_failure": True}, "restarted while it was measured"),
        ({"fail_after": 3}, "HTTP 500: it broke"),
    ],
)
def test_an_engine_that_cannot_be_measured_is_one_clear_error(settings: dict[str, Any], message: str) -> None:
    assert message in run(_refused(**settings))


def test_a_refused_key_and_a_wrong_address_say_what_to_do() -> None:
    async def main() -> None:
        async with PacedEngine(key="right") as engine:
            with pytest.raises(UpstreamError, match="refused with HTTP 401; name a variable that holds a key"):
                await calibrate_url(engine.url, key="wrong", budget_s=3.0)
            url = engine.url
        with pytest.raises(UpstreamError, match="is the engine running, and is this its address"):
            await calibrate_url(url, budget_s=3.0)

    run(main())
    with pytest.raises(ConfigError, match="is not an http"):
        base_url("ftp://host")
    assert base_url("host:8000/v1/") == "http://host:8000"
    assert base_url("https://host/a/v1") == "https://host/a"


def test_a_whole_calibration_keeps_errors_ranges_and_provenance() -> None:
    async def main() -> None:
        async with PacedEngine(key="k") as engine:
            found = await calibrate_url(engine.url, key="k", budget_s=8.0, limits=Limits(max_sequences=4), seed=3)
        profile = found.profile
        assert decode_profile(encode_profile(profile)) == profile
        assert profile.source == "measured"
        assert profile.limits.max_sequences == 4
        assert profile.limits.kv_blocks == 500
        assert profile.limits.block_size == 32
        assert profile.provenance.engine == "vllm"
        assert profile.provenance.engine_version == "9.9"
        assert profile.provenance.measured_at
        assert profile.step is not None
        assert profile.step.prefill_s >= 0
        assert profile.extra["cold_first_request_s"] > 0
        assert profile.extra["rounds"] >= 1
        assert any(was for was in found.fitted)
        assert profile.residuals["e2e_s"].count == sum(not was for was in found.fitted)
        assert profile.error is not None
        low, high = profile.ranges["prompt_tokens"]
        assert low < high <= 512
        assert any("token budget is not told" in warning for warning in found.warnings)

    run(main())


def test_an_interrupted_calibration_keeps_what_it_has_and_says_what_is_missing() -> None:
    async def main() -> None:
        async with PacedEngine() as engine:
            stop = asyncio.Event()
            seen: list[float] = []

            def progress(done: float, total: float) -> None:
                seen.append(done)
                if engine.served > 60:
                    stop.set()

            found = await calibrate_url(engine.url, budget_s=60.0, seed=4, stop=stop, progress=progress)
        assert found.profile.extra["seconds"] < 30.0
        assert "random" in found.profile.extra["missing"]
        assert any("interrupted" in warning for warning in found.warnings)
        assert found.profile.residuals["e2e_s"].count > 0, "a share of the grid is held out instead"
        assert seen

    run(main())


def test_too_few_probes_are_no_profile() -> None:
    async def main() -> None:
        async with PacedEngine(token_s=0.02) as engine:
            stop = asyncio.Event()

            def progress(done: float, total: float) -> None:
                if engine.served > 4:
                    stop.set()

            with pytest.raises(InputError, match="are needed for a fit"):
                await calibrate_url(engine.url, budget_s=20.0, seed=5, stop=stop, progress=progress)

    run(main())


def test_a_quick_profile_has_rates_and_says_that_it_is_rough() -> None:
    async def main() -> None:
        async with PacedEngine() as engine:
            profile = await quick_profile(engine.url, seed=6, budget_s=2.0)
            with pytest.raises(UpstreamError, match="does not serve"):
                await quick_profile(engine.url, "other")
        assert profile.rates.prefill_tokens_per_s > 0
        assert profile.rates.decode_tokens_per_s > 0
        assert not profile.identifiable
        assert profile.extra["quick"] is True
        assert decode_profile(encode_profile(profile)) == profile

    run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of: the URL of an engine, --from"),
        (["http://127.0.0.1:1", "--from", "x"], "give one of: the URL of an engine, --from"),
        (["http://127.0.0.1:1", "--limit", "sequences=4"], "expected NAME=NUMBER"),
        (["--prior", "config.json"], "--prior needs --device"),
        (["http://127.0.0.1:1", "--kind", "x"], "--kind is 'x', expected one of vllm"),
        (["http://127.0.0.1:1", "--budget", "soon"], "--budget is 'soon'"),
        (["http://127.0.0.1:1", "--key-env", "WB_NO_SUCH"], "names WB_NO_SUCH, but that variable is not set"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_nothing_is_written_when_the_engine_fails(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["calibrate", "http://127.0.0.1:9", "--out", str(out), "--budget", "5s"])
    assert isinstance(result.exception, UpstreamError)
    assert list(tmp_path.iterdir()) == []


def test_an_instance_is_found_by_its_name_in_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "weighbridge.yaml"
    config.write_text("instances:\n  - name: a\n    url: http://127.0.0.1:9\n    kind: vllm\n")
    runner = CliRunner()
    result = runner.invoke(app, ["calibrate", "a", "--config", str(config)])
    assert isinstance(result.exception, UpstreamError)
    assert "http://127.0.0.1:9" in str(result.exception)
    result = runner.invoke(app, ["calibrate", "b", "--config", str(config)])
    assert isinstance(result.exception, ConfigError)
    assert "no instance is named 'b'; named are a" in str(result.exception)
