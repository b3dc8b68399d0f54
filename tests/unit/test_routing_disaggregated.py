"""The two legs of a disaggregated request: prefill, hand-off, decode."""

from weighbridge.core.actions import Abort, Dispatch, Hold, Reject
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceUp,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
)
from weighbridge.core.instance import InstanceSpec, Limits, Role
from weighbridge.core.request import Request
from weighbridge.routing.router import Router, RouterSettings


def fleet(kind: str = "vllm", kv_blocks: int | None = None, **settings: object) -> Router:
    router = Router(RouterSettings(**{"policy": "least_tokens", "record_decisions": False, **settings}))  # type: ignore[arg-type]
    roles: dict[str, Role] = {"p": "prefill", "d1": "decode", "d2": "decode"}
    for name, role in roles.items():
        limits = Limits(kv_blocks=kv_blocks if role == "decode" else None)
        spec = InstanceSpec(name=name, role=role, kind=kind, limits=limits)
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    return router


def arrived(name: str, prompt_tokens: int = 100, max_tokens: int = 50) -> RequestArrived:
    return RequestArrived(
        request=Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=max_tokens, tier="batch")
    )


def test_late_binding_dispatches_twice_and_frees_the_prefill_side_at_the_first_token() -> None:
    router = fleet()
    assert router.handle(arrived("r"), 1.0) == [Dispatch(request_id="r", instance="p", leg="prefill")]
    prefill = router.fleet.instances["p"]
    assert (prefill.prefill_tokens, prefill.kv_tokens, prefill.decode_tokens) == (100, 100, 0)
    (action,) = router.handle(PrefillFinished(request_id="r"), 1.1)
    assert isinstance(action, Dispatch)
    assert (action.leg, action.prefill_instance, action.attempt) == ("decode", "p", 1)
    decode = router.fleet.instances[action.instance]
    assert (prefill.prefill_tokens, prefill.kv_tokens) == (0, 100)
    assert (decode.prefill_tokens, decode.kv_tokens, decode.decode_tokens) == (0, 100, 50)
    assert router.handle(FirstToken(request_id="r"), 1.2) == []
    assert prefill.kv_tokens == 0
    assert (decode.kv_tokens, decode.decoding) == (101, 1)
    assert router.handle(RequestFinished(request_id="r", output_tokens=50), 2.0) == []
    assert (decode.kv_tokens, decode.decode_tokens, router.live_requests) == (0, 0, 0)


def test_the_decode_instance_is_chosen_at_hand_off() -> None:
    router = fleet()
    router.handle(arrived("long", max_tokens=1000), 0.0)
    router.handle(arrived("short"), 0.0)
    (first,) = router.handle(PrefillFinished(request_id="long"), 0.1)
    (second,) = router.handle(PrefillFinished(request_id="short"), 0.2)
    assert isinstance(first, Dispatch)
    assert isinstance(second, Dispatch)
    assert first.instance != second.instance


def test_early_binding_names_both_at_once() -> None:
    for router in (fleet(binding="early"), fleet(kind="sglang")):
        (action,) = router.handle(arrived("r"), 1.0)
        assert isinstance(action, Dispatch)
        assert (action.leg, action.prefill_instance) == ("both", "p")
        assert action.instance in ("d1", "d2")
        assert router.fleet.instances["p"].prefill_tokens == 100
        assert router.handle(PrefillFinished(request_id="r"), 1.1) == []
        assert router.fleet.instances["p"].prefill_tokens == 0
        router.handle(RequestCancelled(request_id="r"), 1.2)
        assert [i.kv_tokens for i in router.fleet] == [0, 0, 0]


def test_a_full_decode_side_keeps_the_kv_on_the_prefill_instance() -> None:
    router = fleet(kv_blocks=20, dispatch="hold")
    placed = []
    for name in ("a", "b", "c"):
        router.handle(arrived(name, prompt_tokens=200), 0.0)
        (action, *_) = router.handle(PrefillFinished(request_id=name), 0.1)
        placed.append(action)
    assert [type(a) for a in placed] == [Dispatch, Dispatch, Hold]
    assert router.wants_tick
    assert router.fleet.instances["p"].kv_tokens == 600
    router.handle(FirstToken(request_id="a"), 0.2)
    (action,) = router.handle(RequestFinished(request_id="a", output_tokens=3), 0.3)
    assert isinstance(action, Dispatch)
    assert (action.request_id, action.leg) == ("c", "decode")
    assert not router.wants_tick
    assert router.handle(Tick(), 0.4) == []


def test_losing_the_only_prefill_instance_between_the_legs_goes_on_at_a_decode_instance() -> None:
    router = fleet(kv_blocks=20, dispatch="hold")
    for name in ("a", "b", "c"):
        router.handle(arrived(name, prompt_tokens=200), 0.0)
        router.handle(PrefillFinished(request_id=name), 0.1)
    aborted = router.handle(InstanceDown(instance="p", reason="gone"), 0.2)
    assert aborted == [Abort(request_id="c", instance="p", reason="gone")]
    failed = RequestFailed(request_id="c", instance="p", reason="gone", retriable=True)
    assert router.handle(failed, 0.2) == [Hold(request_id="c")], "both are full"
    router.handle(FirstToken(request_id="a"), 0.3)
    (action,) = router.handle(RequestFinished(request_id="a", output_tokens=3), 0.4)
    assert isinstance(action, Dispatch)
    assert (action.request_id, action.leg, action.instance[0]) == ("c", "whole", "d")


def test_a_failed_decode_leg_is_tried_again_from_the_prompt() -> None:
    router = fleet()
    router.handle(arrived("r"), 0.0)
    (action,) = router.handle(PrefillFinished(request_id="r"), 0.1)
    assert isinstance(action, Dispatch)
    (again,) = router.handle(RequestFailed(request_id="r", instance=action.instance, reason="x", retriable=True), 0.2)
    assert again == Dispatch(request_id="r", instance="p", leg="prefill", attempt=2)
    (other,) = router.handle(PrefillFinished(request_id="r"), 0.3)
    assert isinstance(other, Dispatch)
    assert other.instance != action.instance


def test_without_a_decode_instance_nothing_can_start() -> None:
    router = fleet()
    for name in ("d1", "d2"):
        router.handle(InstanceDown(instance=name, reason="test"), 0.5)
    assert router.handle(arrived("r"), 1.0) == [
        Reject(request_id="r", status=503, reason="no_instance", retry_after_s=1.0)
    ]


def test_a_prefill_reply_read_after_the_first_token_starts_no_second_decode_leg() -> None:
    router = fleet(binding="early")
    (action,) = router.handle(arrived("r"), 0.0)
    assert isinstance(action, Dispatch)
    assert action.leg == "both"
    assert router.handle(FirstToken(request_id="r"), 0.1) == []
    assert router.handle(PrefillFinished(request_id="r"), 0.2) == []
    assert router.fleet.charges["r"].instance.name == action.instance
    router.handle(RequestFinished(request_id="r", output_tokens=3), 0.3)
    assert all(i.kv_tokens == i.in_flight == 0 for i in router.fleet)


def test_the_last_try_runs_whole_at_a_decode_instance_and_is_charged_as_such() -> None:
    for dispatch in ("auto", "hold"):
        router = fleet(dispatch=dispatch)
        router.handle(arrived("r"), 0.0)
        failed = RequestFailed(request_id="r", instance="p", reason="x", retriable=True)
        (again,) = router.handle(failed, 0.1)
        assert again == Dispatch(request_id="r", instance="p", leg="prefill", attempt=2)
        (last,) = router.handle(failed, 0.2)
        assert isinstance(last, Dispatch)
        assert (last.leg, last.attempt, last.instance[0], last.prefill_instance) == ("whole", 3, "d", None)
        charged = router.fleet.instances[last.instance]
        assert (charged.prefill_tokens, charged.decode_tokens) == (100, 50)
        router.handle(RequestFinished(request_id="r", output_tokens=50), 0.3)
        assert all(i.kv_tokens == i.in_flight == 0 for i in router.fleet)


def test_the_last_try_needs_a_pair_where_decode_instances_cannot_do_without() -> None:
    router = fleet(kind="sglang")
    router.handle(arrived("r"), 0.0)
    for attempt in (2, 3):
        (again,) = router.handle(RequestFailed(request_id="r", instance="p", reason="x", retriable=True), 0.1)
        assert isinstance(again, Dispatch)
        assert (again.leg, again.attempt) == ("both", attempt)
