"""Policies of third parties that raise or answer nonsense, as the acting one and as shadows: nothing leaks."""

from typing import Any

import msgspec
import pytest

from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.errors import LogError
from weighbridge.core.event_log import Entry
from weighbridge.core.events import InstanceUp, RequestArrived, RequestCancelled, RequestFinished, Tick
from weighbridge.core.instance import InstanceSpec, Limits
from weighbridge.core.request import Request
from weighbridge.routing.policy import Choice, View
from weighbridge.routing.replay import shadow_summary
from weighbridge.routing.router import Router, RouterSettings


class Broken:
    """Answers with `answer`, or raises it."""

    answer: Any = None

    def choose(self, view: View) -> Choice:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


def odd(*args: Any, **fields: Any) -> Any:
    """A Choice of the wrong types; compiled it cannot even be made, which fails within the policy."""
    try:
        return Choice(*args, **fields)
    except TypeError as error:
        return error


NAME = f"{__name__}:Broken"
ANSWERS = [
    RuntimeError("boom"),
    ValueError("boom"),
    None,
    3,
    Choice(7),
    Choice(-1),
    Choice(None),
    odd(0.0),
    odd("i0"),
]
ODD_RECORDS = [
    Choice(0, scores=[1.0]),
    odd(0, scores=["low", "high"]),
    Choice(0, terms=[{}]),
    odd(0, terms=[{"t": "x"}, {}]),
    odd(0, note=object()),
    odd(0, terms=[{(1, 2): 1.0}, {}]),
]


def made(**settings: Any) -> Router:
    router = Router(RouterSettings(**settings))
    for name in ("i0", "i1"):
        router.handle(InstanceUp(spec=InstanceSpec(name=name, limits=Limits(max_sequences=1)), generation=1), 0.0)
    return router


def arrived(name: str) -> RequestArrived:
    return RequestArrived(request=Request(id=name, arrival_s=0.0, prompt_tokens=100, max_tokens=50))


def through(router: Router, count: int = 5) -> list[Dispatch]:
    """Requests arrive, end or are cancelled; the placements, every one of which the event log can keep."""
    actions: list[Action] = []
    for n in range(count):
        actions += router.handle(arrived(f"r{n}"), 0.0)
    for turn in range(4 * count):
        for action in list(actions):
            if isinstance(action, Dispatch) and action.request_id in router.fleet.charges:
                end = (RequestFinished(request_id=action.request_id, output_tokens=3),
                       RequestCancelled(request_id=action.request_id))[turn % 2]  # fmt: skip
                actions += router.handle(end, 1.0 + turn)
        actions += router.handle(Tick(), 1.5 + turn)
    msgspec.json.encode(actions)
    return [action for action in actions if isinstance(action, Dispatch)]


def assert_empty(router: Router) -> None:
    assert router.live_requests == router.held_requests == router.admission.held_total == 0
    assert not router.fleet.charges
    assert not any(router.admission.running_tokens.values())
    for instance in router.fleet:
        assert (instance.in_flight, instance.prefill_tokens, instance.kv_tokens, instance.decode_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize("dispatch", ["immediate", "hold"])
@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_a_shadow_that_fails_is_noted_and_moves_nothing(answer: Any, dispatch: str, monkeypatch: Any) -> None:
    plain = through(made(policy="least_tokens", dispatch=dispatch))
    monkeypatch.setattr(Broken, "answer", answer)
    router = made(policy="least_tokens", dispatch=dispatch, shadow=(NAME, "random"))
    placed = through(router)
    assert [(p.request_id, p.instance) for p in placed] == [(p.request_id, p.instance) for p in plain]
    assert len(placed) == 5
    for action in placed:
        assert action.decision is not None
        broken, other = action.decision.shadows
        assert broken.note
        assert not broken.instance
        assert other.instance
        assert not other.note
    assert router.shadow_failures == {NAME: 5, "random": 0}
    row = next(row for row in shadow_summary([Entry(0.0, Tick(), tuple(placed))]) if row.policy == NAME)
    assert (row.asked, row.failed, row.agreed, row.compared) == (5, 5, 0, 0)
    assert_empty(router)


@pytest.mark.parametrize("dispatch", ["immediate", "hold"])
@pytest.mark.parametrize("answer", [a for a in ANSWERS if not isinstance(a, Choice) or a.index is not None], ids=repr)
def test_an_acting_policy_that_fails_is_replaced_for_that_request(answer: Any, dispatch: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Broken, "answer", answer)
    router = made(policy=NAME, dispatch=dispatch)
    placed = through(router)
    assert len(placed) == 5
    for action in placed:
        assert action.decision is not None
        assert f"policy {NAME} failed" in action.decision.note
    assert_empty(router)


@pytest.mark.parametrize("dispatch", ["immediate", "hold"])
@pytest.mark.parametrize("answer", ODD_RECORDS, ids=range(len(ODD_RECORDS)))
def test_a_choice_that_cannot_be_recorded_is_obeyed_all_the_same(
    answer: Choice, dispatch: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Broken, "answer", answer)
    router = made(policy=NAME, dispatch=dispatch)
    placed = through(router)
    assert len(placed) == 5
    assert all(action.decision is not None for action in placed)
    assert_empty(router)


@pytest.mark.parametrize("dispatch", ["immediate", "hold"])
def test_what_the_router_lets_through_leaves_nothing_once_its_request_is_given_up(
    dispatch: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Broken, "answer", LogError("a bug"))
    router = made(policy=NAME, dispatch=dispatch)
    for n in range(3):
        with pytest.raises(LogError):
            router.handle(arrived(f"r{n}"), 0.0)
        router.handle(RequestCancelled(request_id=f"r{n}", reason="internal_error"), 0.0)
    monkeypatch.setattr(Broken, "answer", Choice(0))
    assert_empty(router)
    assert len(through(router)) == 5
    assert_empty(router)


def test_a_queue_whose_policy_fails_for_once_keeps_what_it_holds(monkeypatch: Any) -> None:
    monkeypatch.setattr(Broken, "answer", Choice(0))
    router = made(policy=NAME, dispatch="hold")
    sent = [a for n in range(5) for a in router.handle(arrived(f"r{n}"), 0.0) if isinstance(a, Dispatch)]
    monkeypatch.setattr(Broken, "answer", LogError("a bug"))
    with pytest.raises(LogError):
        router.handle(RequestFinished(request_id=sent[0].request_id, output_tokens=1), 1.0)
    assert router.held_requests == 3
    held = next(f"r{n}" for n in range(5) if f"r{n}" not in router.fleet.charges and f"r{n}" != sent[0].request_id)
    monkeypatch.setattr(Broken, "answer", Choice(0))
    after = router.handle(RequestCancelled(request_id=held, reason="left"), 2.0)
    for t in range(3):
        after += router.handle(Tick(), 3.0 + t)
    assert held not in {a.request_id for a in after}
    assert router.held_requests == 1
