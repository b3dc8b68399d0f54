"""Router.handle: placement, retry, rejection, determinism."""

import io
from math import inf, nan

import pytest

from weighbridge.core.actions import Abort, Dispatch, Reject
from weighbridge.core.errors import PolicyError
from weighbridge.core.event_log import Header, LogReader, encode_entry, encode_header
from weighbridge.core.events import (
    InstanceDown,
    InstanceUp,
    RequestAdopted,
    RequestArrived,
    RequestFailed,
    RequestFinished,
)
from weighbridge.core.instance import InstanceSpec, Limits, Rates
from weighbridge.core.request import Request
from weighbridge.routing.policies.registry import make_policy, policy_names
from weighbridge.routing.policy import Choice, Policy, View
from weighbridge.routing.router import Router, RouterSettings


def router(policy: str = "round_robin", count: int = 3, **settings: object) -> Router:
    made = Router(RouterSettings(policy=policy, **settings))  # type: ignore[arg-type]
    for number in range(count):
        spec = InstanceSpec(name=f"i{number}", rates=Rates(prefill_tokens_per_s=100, decode_tokens_per_s=10))
        made.handle(InstanceUp(spec=spec, generation=1), 0.0)
    return made


def arrived(name: str, prompt_tokens: int = 100, **fields: object) -> RequestArrived:
    return RequestArrived(
        request=Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=50, **fields)  # type: ignore[arg-type]
    )


def chosen(made: Router, name: str, **fields: object) -> str:
    (action,) = made.handle(arrived(name, **fields), 1.0)
    assert isinstance(action, Dispatch)
    return action.instance


def test_round_robin_takes_turns_and_keeps_them_when_one_is_out() -> None:
    made = router()
    assert [chosen(made, f"r{n}") for n in range(4)] == ["i0", "i1", "i2", "i0"]
    made.handle(InstanceDown(instance="i1", reason="test", drain=True), 1.0)
    assert [chosen(made, f"s{n}") for n in range(3)] == ["i2", "i0", "i2"]


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_places_everything_and_decides_alike_twice(policy: str) -> None:
    def run() -> list[str]:
        made = router(policy, seed=7, dispatch="immediate")
        return [chosen(made, f"r{n}", prompt_tokens=50 + 37 * n % 211) for n in range(60)]

    first = run()
    assert first == run()
    # 50 output tokens are below the threshold, and two of the three instances are kept for long ones
    assert set(first) == ({"i0"} if policy == "length_threshold" else {"i0", "i1", "i2"})


def test_a_retriable_failure_moves_the_request_to_another_instance() -> None:
    made = router("least_requests")
    first = chosen(made, "r")
    (second,) = made.handle(RequestFailed(request_id="r", instance=first, reason="reset", retriable=True), 2.0)
    assert isinstance(second, Dispatch)
    assert second.instance != first
    assert second.attempt == 2
    assert second.decision is not None
    assert {c.instance: c.excluded for c in second.decision.candidates}[first] == "failed on it before"


def test_attempts_are_bounded_and_end_in_one_rejection() -> None:
    made = router(max_attempts=2)
    first = chosen(made, "r")
    (again,) = made.handle(RequestFailed(request_id="r", instance=first, reason="reset", retriable=True), 2.0)
    assert isinstance(again, Dispatch)
    failed = RequestFailed(request_id="r", instance=again.instance, reason="reset", retriable=True)
    assert made.handle(failed, 3.0) == [Reject(request_id="r", status=502, reason="attempts_exhausted")]
    assert made.handle(failed, 4.0) == []
    assert made.live_requests == 0


def test_no_instance_is_a_503_with_a_retry_after() -> None:
    made = router(count=0)
    assert made.handle(arrived("r"), 1.0) == [
        Reject(request_id="r", status=503, reason="no_instance", retry_after_s=1.0)
    ]


def test_an_instance_that_dies_aborts_what_runs_there_and_comes_back_empty() -> None:
    made = router(count=1)
    chosen(made, "r", prefix_hashes=(1, 2, 3))
    (abort,) = made.handle(InstanceDown(instance="i0", reason="connection lost"), 2.0)
    assert abort == Abort(request_id="r", instance="i0", reason="connection lost")
    assert made.handle(RequestFailed(request_id="r", instance="i0", reason="reset", retriable=True), 2.1) == [
        Reject(request_id="r", status=503, reason="no_instance", retry_after_s=1.0)
    ]
    made.handle(InstanceUp(spec=InstanceSpec(name="i0"), generation=2), 3.0)
    (action,) = made.handle(arrived("s", prefix_hashes=(1, 2, 3)), 3.0)
    assert isinstance(action, Dispatch)
    assert action.decision is not None
    assert action.decision.candidates[0].cached_tokens == 0


def test_a_known_prefix_is_credited_where_it_lies() -> None:
    made = router("least_tokens", count=2)
    first = chosen(made, "r", prompt_tokens=100, prefix_hashes=(1, 2, 3, 4, 5, 6))
    made.handle(RequestFinished(request_id="r", output_tokens=3), 2.0)
    (action,) = made.handle(arrived("s", prompt_tokens=100, prefix_hashes=(1, 2, 3, 9)), 3.0)
    assert isinstance(action, Dispatch)
    assert action.instance == first
    assert action.decision is not None
    assert {c.instance: c.cached_tokens for c in action.decision.candidates}[first] == 48


def test_the_last_prompt_token_is_never_credited() -> None:
    made = router("least_tokens", count=1)
    chosen(made, "r", prompt_tokens=32, prefix_hashes=(1, 2))
    (action,) = made.handle(arrived("s", prompt_tokens=32, prefix_hashes=(1, 2)), 3.0)
    assert isinstance(action, Dispatch)
    assert action.decision is not None
    assert action.decision.candidates[0].cached_tokens == 31


def test_exclusions_are_explained() -> None:
    made = Router(RouterSettings(policy="round_robin"))
    for spec in (
        InstanceSpec(name="other", models=("llama",)),
        InstanceSpec(name="short", limits=Limits(max_context=64)),
        InstanceSpec(name="decode", role="decode"),
        InstanceSpec(name="good", models=("smol",)),
    ):
        made.handle(InstanceUp(spec=spec, generation=1), 0.0)
    (action,) = made.handle(arrived("r", model="smol"), 1.0)
    assert isinstance(action, Dispatch)
    assert action.decision is not None
    assert {c.instance: c.excluded for c in action.decision.candidates} == {
        "good": None,
        "other": "serves another model",
        "short": "prompt exceeds its context of 64 tokens",
        "decode": "role decode",
    }


def test_policy_errors_name_the_remedy() -> None:
    with pytest.raises(PolicyError, match=r"unknown policy 'nope'; known: .*least_tokens"):
        make_policy("nope")
    with pytest.raises(PolicyError, match="its options are: none"):
        make_policy("round_robin", {"weight": 1})


def test_a_prompt_that_seems_too_long_for_all_goes_to_the_largest_context() -> None:
    """The size may be an estimate; the engine refuses with the exact numbers, not the router with a 503."""
    made = Router(RouterSettings(policy="round_robin"))
    for name, context in (("small", 64), ("large", 128)):
        spec = InstanceSpec(name=name, limits=Limits(max_context=context))
        made.handle(InstanceUp(spec=spec, generation=1), 0.0)
    assert [chosen(made, f"r{n}", prompt_tokens=500) for n in range(3)] == ["large"] * 3
    assert chosen(made, "s", prompt_tokens=100) == "large"


class Raises:
    def choose(self, view: View) -> Choice:
        raise KeyError("my bug")


class OutOfRange:
    def choose(self, view: View) -> Choice:
        return Choice(len(view.options))


class Holds:
    def choose(self, view: View) -> Choice:
        return Choice(None)


class Infinite:
    def choose(self, view: View) -> Choice:
        return Choice(0, [inf for _ in view.options], [{"wait_s": nan} for _ in view.options])


@pytest.mark.parametrize(
    ("policy", "said"), [(Raises(), "KeyError: 'my bug'"), (OutOfRange(), "index 3 of 3"), (Holds(), "wants to hold")]
)
def test_a_policy_that_breaks_its_contract_is_replaced_for_that_request_and_named(policy: Policy, said: str) -> None:
    made = router("least_requests")
    made.policy = policy
    names = []
    for n in range(3):
        (action,) = made.handle(arrived(f"r{n}"), 1.0)
        assert isinstance(action, Dispatch)
        assert action.decision is not None
        assert said in action.decision.note
        names.append(action.instance)
    assert sorted(names) == ["i0", "i1", "i2"]
    for n in range(3):
        made.handle(RequestFinished(request_id=f"r{n}", output_tokens=1), 2.0)
    assert made.live_requests == 0


def test_numbers_that_json_cannot_hold_stay_out_of_the_record() -> None:
    made = router("least_requests")
    made.policy = Infinite()
    actions = made.handle(arrived("r"), 1.0)
    line = encode_entry(1.0, arrived("r"), actions)
    (entry,) = LogReader(io.BytesIO(encode_header(Header()) + line))
    assert entry.a == tuple(actions)


def test_an_adopted_request_is_charged_where_it_runs_and_may_fail_over() -> None:
    made = router("least_tokens", count=2)
    request = arrived("old").request
    assert made.handle(RequestAdopted(request=request, instance="i0", attempt=2, output_tokens=7), 1.0) == []
    instance = made.fleet.instances["i0"]
    assert (instance.in_flight, instance.prefill_tokens, instance.decoding) == (1, 0, 1)
    assert instance.kv_tokens == 107
    assert chosen(made, "new") == "i1"
    (action,) = made.handle(RequestFailed(request_id="old", instance="i0", reason="reset", retriable=True), 2.0)
    assert isinstance(action, Dispatch)
    assert (action.instance, action.attempt) == ("i1", 3)
    made.handle(RequestFinished(request_id="old", output_tokens=9), 3.0)
    made.handle(RequestFinished(request_id="new", output_tokens=9), 3.0)
    assert made.live_requests == sum(i.in_flight + i.kv_tokens + i.decode_tokens for i in made.fleet) == 0


def test_an_adopted_request_of_an_unknown_instance_is_live_and_costs_nothing() -> None:
    made = router(count=1)
    assert made.handle(RequestAdopted(request=arrived("old").request, instance="gone"), 1.0) == []
    assert (made.live_requests, made.fleet.instances["i0"].in_flight) == (1, 0)
    made.handle(RequestFinished(request_id="old", output_tokens=9), 3.0)
    assert made.live_requests == 0
    assert made.admission.running_tokens.get("standard", 0) == 0
