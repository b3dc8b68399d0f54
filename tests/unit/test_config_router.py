"""What the router's section and the keys may not say: refused when read, with the place and a remedy."""

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
import pytest

from tests.support.gateway import answer, front
from tests.support.upstream import FakeUpstream
from weighbridge.config.settings import Settings, load_settings
from weighbridge.core.errors import ConfigError, PolicyError
from weighbridge.core.request import MOST_PRIORITY, Tier
from weighbridge.gateway.auth import Authorizer
from weighbridge.gateway.settings import GatewaySettings, KeySettings
from weighbridge.routing.policies import registry
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings, TenantLimit

GOOD = "instances: [{name: a, url: 'http://127.0.0.1:1'}]\n"
HASH = "a" * 64
OPTIONS = "its options are: gate, error, seconds, near, tail"
CASES = [
    ("tenants: {team: {max_request: 1}}", r"tenants\.team: unknown key `max_request`; did you mean `max_requests`\?"),
    ("tenants: {a: {weight: 2}, team: {tokens_per_s: 0}}", r"tenants\.team\.tokens_per_s: expected `float` > 0\.0"),
    ("tenants: {team: {tokens_per_s: .nan}}", r"tenants\.team\.tokens_per_s: expected `float` > 0\.0"),
    ("tenants: {'*': {weight: 0}}", r"tenants\.\*\.weight: expected `float` > 0\.0"),
    ("tenants: {team: {burst_tokens: 0}}", r"tenants\.team\.burst_tokens: expected `int` >= 1"),
    ("tenants: {team: {max_requests: 0}}", r"tenants\.team\.max_requests: expected `int` >= 1"),
    ("release_after: 0", r"release_after: expected `float` > 0\.0"),
    ("room_kv: 0", r"room_kv: expected `float` > 0\.0"),
    ("room_kv: 1.2", r"room_kv: expected `float` <= 1\.0"),
    ("decode_kv: -1", r"decode_kv: expected `float` > 0\.0"),
    ("headroom: 1", r"headroom: expected `float` < 1\.0"),
    ("default_ttft_s: 0", r"default_ttft_s: expected `float` > 0\.0"),
    ("max_attempts: 0", r"max_attempts: expected `int` >= 1"),
    ("max_held_s: 0", r"max_held_s: expected `float` > 0\.0"),
    ("max_held_tokens: 0", r"max_held_tokens: expected `int` >= 1"),
    ("fair_tokens: -1", r"fair_tokens: expected `int` >= 0"),
    ("length_noise: -1", r"length_noise: expected `float` >= 0\.0"),
    ("overload_enter_s: 2", r"overload_leave_s: 3 is above overload_enter_s, 2: .* set it below"),
    ("tiers: [{name: standard, priority: 0, ttft_s: 0}]", r"tiers\[0\]\.ttft_s: expected `float` > 0\.0"),
    ("tiers: [{name: standard, priority: 0, tpot_s: 0}]", r"tiers\[0\]\.tpot_s: expected `float` > 0\.0"),
    ("tiers: [{name: standard, priority: 0, e2e_s: -1}]", r"tiers\[0\]\.e2e_s: expected `float` > 0\.0"),
    ("tiers: [{name: standard, priority: 0, max_wait_s: -1}]", r"tiers\[0\]\.max_wait_s: expected `float` >= 0\.0"),
    ("tiers: [{name: standard, priority: 900001}]", r"tiers\[0\]\.priority: expected `int` <= 900000"),
    ("tiers: [{name: standard, priority: -900001}]", r"tiers\[0\]\.priority: expected `int` >= -900000"),
    ("tiers: [{name: standard, priority: 0}, {name: standard, priority: 5}]", r"tiers\[1\]\.name: two tiers are named"),
    ("shadow: [random, nosuch]", r"shadow\[1\]: unknown policy 'nosuch'; known: affinity_gate"),
    ("{policy: calibrated, policy_options: {gat: 1}}", rf"policy_options\.gat: .*has no option 'gat'; {OPTIONS}"),
    ("{policy: calibrated, policy_options: {gate: high}}", r"policy_options\.gate: .* must be a number, not 'high'"),
    ("{policy: calibrated, policy_options: {gate: .nan}}", r"policy_options\.gate: .* must be a number, not nan"),
    ("{policy: calibrated, policy_options: {gate: 2}}", rf"policy_options: .*gate must be in \[0, 1\).*{OPTIONS}"),
    ("{policy: calibrated, policy_options: {near: -7}}", r"policy_options: .*seconds and near at least 0"),
    ("{policy: block_cost, policy_options: {product: 1}}", r"policy_options\.product: .* must be true or false, not 1"),
    ("{policy: length_threshold, policy_options: {tokens: 1.5}}", r"policy_options\.tokens: .* must be a whole number"),
    ("{policy: prefix_affinity, policy_options: {on_miss: 1}}", r"policy_options\.on_miss: .* must be a word, not 1"),
    ("{policy: prefix_affinity, policy_options: {on_miss: x}}", r"policy_options: .*on_miss must be 'tree' or 'load'"),
]


def load(tmp_path: Path, text: str) -> GatewaySettings:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    return load_settings(file, {})


@pytest.mark.parametrize(("section", "message"), CASES, ids=[case[0] for case in CASES])
def test_refused_in_the_file(tmp_path: Path, section: str, message: str) -> None:
    router = section if section.startswith("{") else f"{{{section}}}"
    with pytest.raises(ConfigError, match=rf"yaml:2: \$\.router\.{message}"):
        load(tmp_path, f"{GOOD}router: {router}\n")


@pytest.mark.parametrize(
    "settings",
    [
        {"release_after": 0.0},
        {"room_kv": 0.0},
        {"default_ttft_s": math.nan},
        {"tenants": {"team": TenantLimit(weight=0.0)}},
        {"tenants": {"team": TenantLimit(tokens_per_s=0.0)}},
        {"tiers": (Tier(name="standard", priority=0, ttft_s=0.0),)},
        {"tiers": (Tier(name="standard", priority=MOST_PRIORITY + 1),)},
        {"tiers": (Tier(name="standard", priority=0), Tier(name="standard", priority=1))},
    ],
    ids=str,
)
def test_refused_in_code_too_as_simulations_do_it(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\$\.router\."):
        Router(RouterSettings(**settings))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (f"[{{sha256: '{HASH}', tenant: t, tier: interactve}}]", r"\[0\]\.tier: .*not defined; defined: batch, inter"),
        (f"[{{sha256: '{HASH}', tenant: t}}, {{sha256: '{HASH}', tenant: u}}]", r"\[1\]\.sha256: .*\$\.keys\[0\]"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\$\.keys{message}"):
        load(tmp_path, f"{GOOD}keys: {keys}\n")


def test_a_gateway_refuses_them_as_well_when_it_is_made_or_reloaded() -> None:
    key = KeySettings(sha256=HASH, tenant="t", tier="gold")
    with pytest.raises(ConfigError, match=r"\$\.keys\[0\]\.tier"):
        Authorizer(GatewaySettings(keys=(key,)))
    gold = RouterSettings(tiers=(Tier(name="gold", priority=0),))
    Authorizer(GatewaySettings(keys=(key,), router=gold, default_tier="gold"))

    async def run() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as face:
            settings = msgspec.structs.replace(face.gateway.settings, keys=(key,))
            with pytest.raises(ConfigError, match=r"\$\.keys\[0\]\.tier"):
                await face.gateway.reload(settings)
            assert face.gateway.settings.keys == ()

    asyncio.run(run())


SOURCES = {
    "syntax": ("class X(:\n", r"SyntaxError: .*mend it"),
    "raises": ("1 / 0\n", r"ZeroDivisionError"),
    "absent": ("Y = 1\n", r"has no attribute 'X'"),
    "number": ("X = 1\n", r"is no class"),
    "no_method": ("class X: pass\n", r"has no method `choose\(view\)`"),
    "constructor": ("class X:\n    def __init__(self): raise KeyError('home')\n", r"'home'"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_policy_that_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, message = SOURCES[name]
    (tmp_path / f"own_policy_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for section in (f"policy: 'own_policy_{name}:X'", f"shadow: ['own_policy_{name}:X']"):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, f"{GOOD}router: {{{section}}}\n")


def test_an_installed_policy_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "theirs", "their.module:Policy"

        def load(self) -> object:
            raise RuntimeError("no licence")

    monkeypatch.setattr(registry, "entry_points", lambda **_: [Point()])
    with pytest.raises(PolicyError, match=r"'theirs' \(their\.module:Policy\) cannot be loaded: RuntimeError: no lic"):
        registry.make_policy("theirs")


def test_the_most_extreme_priorities_fit_what_engines_take() -> None:
    for priority in (MOST_PRIORITY, -MOST_PRIORITY):
        assert abs(priority * 10**13 + 10**13) < 2**63


def test_no_section_of_the_file_takes_unknown_keys() -> None:
    seen: set[type] = set()

    def walk(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in seen:
                return
            seen.add(info.cls)
            assert info.forbid_unknown_fields, info.cls
            for field in info.fields:
                walk(field.type)
        for several in ("types", "item_types"):
            for each in getattr(info, several, ()):
                walk(each)
        for one in ("item_type", "value_type"):
            if hasattr(info, one):
                walk(getattr(info, one))

    walk(msgspec.inspect.type_info(Settings))
    assert {TenantLimit, Tier, KeySettings} <= seen
