"""What the Router counts of its own, on /metrics and in /fleet."""

import asyncio
from typing import Any

from prometheus_client.core import Metric

from tests.support.gateway import answer, chat, front
from tests.support.upstream import FakeUpstream
from weighbridge.core.actions import Reject
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived, RequestFinished, TokensProgressed
from weighbridge.core.instance import InstanceSpec, Limits
from weighbridge.core.request import DEFAULT_TIERS, Request
from weighbridge.gateway.router_metrics import router_metrics, router_rows
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.routing.settings import TenantLimit


def samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples if s.value}


def arrived(name: str, **fields: Any) -> RequestArrived:
    values: dict[str, Any] = {"arrival_s": 0.0, "prompt_tokens": 64, "max_tokens": 50, **fields}
    return RequestArrived(request=Request(id=name, **values))


def test_stale_credit_is_counted() -> None:
    router = Router(RouterSettings(policy="least_tokens"))
    router.handle(InstanceUp(spec=InstanceSpec(name="i"), generation=1), 0.0)
    hashes = (1, 2, 3)
    for name, found in (("cold", 0), ("warm", 48), ("stale", 16)):
        router.handle(arrived(name, prefix_hashes=hashes), 0.0)
        router.handle(RequestFinished(request_id=name, output_tokens=3, cached_tokens=found), 1.0)
    assert router_rows(router)["prefix_credit"] == {
        "requests": 3, "prompt_tokens": 192, "credited_tokens": 96, "found_tokens": 64, "missed_tokens": 32,
    }  # fmt: skip
    found = samples(list(router_metrics(router)))
    assert found["weighbridge_prefix_credit_requests_total",] == 3
    assert found["weighbridge_prefix_credit_tokens_total", "missed"] == 32
    assert found["weighbridge_prefix_credit_tokens_total", "credited"] == 96


def test_tiers_that_clients_invent_make_no_labels() -> None:
    settings = RouterSettings(policy="least_tokens", dispatch="hold", tenants={"*": TenantLimit(max_requests=1)})
    router = Router(settings)
    spec = InstanceSpec(name="i", limits=Limits(max_sequences=1, kv_blocks=20), preemption=("swap",))
    router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    for n in range(20):
        for tenant in ("a", "b"):
            router.handle(arrived(f"{tenant}{n}", tier=f"tier-{n}", tenant=tenant, prompt_tokens=250), 0.0)
        if not n:
            router.handle(FirstToken(request_id="a0"), 0.0)
            router.handle(TokensProgressed(request_id="a0", output_tokens=3), 0.0)
            router.handle(arrived("urgent", tier="interactive", tenant="c", prompt_tokens=250), 0.1)
    rows = router_rows(router)["admission"]
    assert rows["standard"] == {"preempted": 1, "tenant_concurrency": 38}
    assert set(rows) <= {tier.name for tier in DEFAULT_TIERS}
    assert samples(list(router_metrics(router)))["weighbridge_admission_total", "standard", "tenant_concurrency"] == 38


def test_refusals_show_on_the_admin_listener() -> None:
    async def run() -> None:
        router = RouterSettings(
            policy="least_tokens", shadow=("random",), tenants={"*": TenantLimit(tokens_per_s=0.001, burst_tokens=1)}
        )
        async with FakeUpstream(answer) as upstream, front(upstream, router=router) as face:
            assert [(await face.post(chat(stream=False))).status for _ in range(3)] == [200, 429, 429]
            text = (await face.get("/metrics", admin=True)).body.decode()
            assert 'weighbridge_admission_total{reason="tenant_rate",tier="standard"} 2.0' in text
            assert 'weighbridge_shadow_failures_total{policy="random"} 0.0' in text
            assert "weighbridge_overloaded 0.0" in text
            fleet = (await face.get("/fleet", admin=True)).json()
            assert fleet["admission"] == {"standard": {"tenant_rate": 2}}
            assert fleet["shadow_failures"] == {"random": 0}
            assert fleet["overloaded"] is False

    asyncio.run(run())


def test_a_refusal_names_a_reason_that_is_counted() -> None:
    router = Router(RouterSettings(policy="least_tokens"))
    (action,) = router.handle(arrived("r"), 0.0)
    assert isinstance(action, Reject)
    assert router_rows(router)["admission"] == {"standard": {action.reason: 1}}
