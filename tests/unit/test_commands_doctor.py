"""Risky settings: each is found, says what to do, and the safe defaults have none."""

from typing import Any

import pytest

from weighbridge.commands._risks import risks
from weighbridge.config.settings import Settings, default_settings
from weighbridge.gateway.settings import (
    DnsSource,
    HealthSettings,
    InstanceSettings,
    KeySettings,
    TracingSettings,
)
from weighbridge.http import ServerLimits


def key(tenant: str, **fields: Any) -> KeySettings:
    return KeySettings(sha256="0" * 64, tenant=tenant, **fields)


def found(
    settings: Settings, descriptors: int | None = 10**6, memory: int | None = 2**40
) -> list[tuple[str, str, str]]:
    rows = list(risks(settings, lambda name: None, descriptors, memory))
    assert all(remedy for *_, remedy in rows)
    return [(level, subject, message) for level, subject, message, _ in rows]


def test_the_defaults_are_safe() -> None:
    assert found(default_settings()) == []
    local = (InstanceSettings(name="a", url="http://127.0.0.1:8000", kind="vllm"),)
    assert found(Settings(instances=local, keys=(key("t"),))) == []


TWO = (key("a"), key("b"))
FAR = InstanceSettings(name="far", url="http://10.0.0.1:8000", kind="vllm", api_key_env="KEY")


@pytest.mark.parametrize(
    ("fields", "level", "subject", "words"),
    [
        ({"host": "0.0.0.0"}, "warn", "listener", "anyone who reaches"),
        ({"host": "0.0.0.0", "keys": (key("t"),)}, "warn", "listener", "unencrypted"),
        ({"admin_host": "10.0.0.1"}, "fail", "admin listener", "without a token"),
        ({"admin_host": "10.0.0.1", "admin_token_env": "T"}, "warn", "admin listener", "no TLS"),
        ({"tracing": TracingSettings(endpoint="http://collector:4318/v1/traces")}, "warn", "tracing", "unencrypted"),
        ({"keys": (key("t", disabled=True),)}, "fail", "keys", "every key is disabled"),
        ({"keys": TWO, "isolate_tenants": False}, "warn", "tenants", "share prefix caches"),
        ({"keys": TWO}, "warn", "tenants", "new at each start"),
        (
            {"keys": TWO, "instances": (InstanceSettings(name="l", url="http://127.0.0.1:1", kind="llamacpp"),)},
            *("warn", "l", "cannot keep tenants"),
        ),
        ({"instances": (FAR,)}, "fail", "far", "KEY is not set"),
        ({"instances": (FAR,)}, "warn", "far", "its key travels unencrypted"),
        (
            {"discovery": (DnsSource(host="h", port=1, instance={"api_key_env": "K"}),)},
            *("warn", "discovery of h", "without TLS"),
        ),
        ({"server": ServerLimits(max_connections=600_000)}, "warn", "limits", "descriptors"),
        ({"server": ServerLimits(max_buffered_bytes=2**40)}, "warn", "limits", "of memory"),
        ({"drain_s": 5.0}, "warn", "drain", "cuts streams after 5 s"),
        ({"health": HealthSettings(eject_share=1.0)}, "warn", "health", "most of the fleet"),
        ({"retry_share": 1.0}, "warn", "retries", "half as much again"),
    ],
)
def test_each_risk_is_found(fields: dict[str, Any], level: str, subject: str, words: str) -> None:
    rows = found(Settings(**fields))
    assert any((row[0], row[1]) == (level, subject) and words in row[2] for row in rows), rows


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:8000", "https://10.0.0.1"])
def test_a_key_on_loopback_or_tls_is_no_risk(url: str) -> None:
    instances = (InstanceSettings(name="a", url=url, kind="vllm", api_key_env="KEY"),)
    assert not any("unencrypted" in message for _, _, message in found(Settings(instances=instances)))
