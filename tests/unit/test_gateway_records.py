"""What is kept of decisions: the line of the log gives the very decision back; odd numbers of a policy do no harm."""

from collections.abc import Sequence

import pytest

from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.decision import Decision
from weighbridge.core.event_log import Entry, entry_line
from weighbridge.core.events import Event, InstanceUp, RequestArrived, RequestFinished
from weighbridge.core.instance import InstanceSpec, Limits, Rates
from weighbridge.core.request import Request
from weighbridge.gateway.records import DecisionRecord
from weighbridge.routing.policy import Choice, View
from weighbridge.routing.router import Router, RouterSettings


def router(policy: str, count: int, most: int | None = None) -> Router:
    made = Router(RouterSettings(policy=policy))
    for number in range(count):
        rates = Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0)
        spec = InstanceSpec(name=f"i{number}", rates=rates, limits=Limits(max_sequences=most, kv_blocks=512))
        made.handle(InstanceUp(spec=spec, generation=1), 0.0)
    return made


def arrived(number: int) -> RequestArrived:
    hashes = tuple(range(number % 3))
    return RequestArrived(
        request=Request(id=f"r{number}", arrival_s=0.0, prompt_tokens=50 + number, max_tokens=20, prefix_hashes=hashes)
    )


def told(event: Event, actions: Sequence[Action]) -> list[tuple[DecisionRecord, Decision]]:
    """As the driver does: one line of the log for all that an event led to."""
    line = entry_line(Entry(1.0, event, tuple(actions)))
    decisions = [a.decision for a in actions if isinstance(a, Dispatch) and a.decision is not None]
    return [(DecisionRecord(decision, line), decision) for decision in decisions]


@pytest.mark.parametrize("policy", ["calibrated", "least_tokens", "random"])
def test_a_line_gives_its_decisions_back(policy: str) -> None:
    made = router(policy, 3, most=4)
    found = []
    for number in range(20):
        event = arrived(number)
        found += told(event, made.handle(event, 1.0))
    for number in range(12):
        done = RequestFinished(request_id=f"r{number}", output_tokens=5)
        found += told(done, made.handle(done, 2.0 + number))
    assert len(found) == 20
    for record, decision in found:
        assert record.decision == decision
        assert record.decision is not decision, "nothing of it was kept but the line"
        assert (record.attempt, record.chosen, record.queued_s) == (1, decision.chosen, decision.queued_s)
        (chosen,) = (c for c in decision.candidates if c.instance == decision.chosen)
        assert record.terms == chosen.terms


def test_without_a_line_the_decision_itself_is_kept() -> None:
    decision = Decision(request_id="r", at_s=1.0, policy="p", chosen="a", candidates=(), attempt=2)
    record = DecisionRecord(decision)
    assert record.decision is decision
    assert (record.attempt, record.terms) == (2, {})


class Measure(float):
    """As numerical libraries have them: a number to everyone but to an encoder."""


class Odd:
    def choose(self, view: View) -> Choice:
        scores = [Measure(index) for index, _ in enumerate(view.options)]
        return Choice(0, scores, [{"wait_s": Measure(0.5)} for _ in scores])


def test_a_policy_may_answer_with_any_kind_of_number() -> None:
    made = router("random", 2)
    made.policy = Odd()
    event = arrived(1)
    ((record, decision),) = told(event, made.handle(event, 1.0))
    assert record.decision == decision
    assert [c.score for c in decision.candidates] == [0.0, 1.0]
    assert record.terms == {"wait_s": 0.5}
