"""What is kept of decisions: the log gives the very decision back; odd numbers of a policy do no harm."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.decision import Decision
from weighbridge.core.event_log import Entry, Header
from weighbridge.core.events import BlocksStored, Event, InstanceUp, RequestArrived, RequestFinished
from weighbridge.core.instance import InstanceSpec, Limits, Rates
from weighbridge.core.request import Request
from weighbridge.gateway.log_writer import LogWriter
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


def told(writer: LogWriter, event: Event, actions: Sequence[Action]) -> list[tuple[DecisionRecord, Decision]]:
    """As the driver does."""
    decisions = [a.decision for a in actions if isinstance(a, Dispatch) and a.decision is not None]
    records = [DecisionRecord(decision) for decision in decisions]
    for record in records:
        writer.keep(record)
    writer.record(Entry(1.0, event, tuple(actions)))
    return list(zip(records, decisions, strict=True))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    made = LogWriter(tmp_path, Header(source="test"), max_bytes=10**9, max_files=3)
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["calibrated", "least_tokens", "random"])
@pytest.mark.parametrize("bulky", [False, True])
def test_the_log_gives_decisions_back(policy: str, bulky: bool, writer: LogWriter) -> None:
    made = router(policy, 3, most=4)
    found = []
    for number in range(20):
        event = arrived(number)
        found += told(writer, event, made.handle(event, 1.0))
        assert found[-1][0].decision == found[-1][1], "before it is encoded as well"
        if bulky:  # beside decisions that share their lines with little else
            stored = BlocksStored(instance="i0", generation=1, hashes=tuple(range(50_000)))
            told(writer, stored, made.handle(stored, 1.0))
    for number in range(12):
        done = RequestFinished(request_id=f"r{number}", output_tokens=5)
        found += told(writer, done, made.handle(done, 2.0 + number))
    writer.flush()
    assert len(found) == 20
    for record, decision in found:
        assert record.decision == decision
        assert record.decision is not decision, "nothing of it was kept but its place"
        assert len(record._lines) < 100_000, "and little beside it"
        assert (record.attempt, record.chosen, record.queued_s) == (1, decision.chosen, decision.queued_s)
        (chosen,) = (c for c in decision.candidates if c.instance == decision.chosen)
        assert record.terms == chosen.terms


class Measure(float):
    """As numerical libraries have them: a number to everyone but to an encoder."""


class Odd:
    def choose(self, view: View) -> Choice:
        scores = [Measure(index) for index, _ in enumerate(view.options)]
        return Choice(0, scores, [{"wait_s": Measure(0.5)} for _ in scores])


def test_a_policy_may_answer_with_any_kind_of_number(writer: LogWriter) -> None:
    made = router("random", 2)
    made.policy = Odd()
    event = arrived(1)
    ((record, decision),) = told(writer, event, made.handle(event, 1.0))
    writer.flush()
    assert record.decision == decision
    assert [c.score for c in decision.candidates] == [0.0, 1.0]
    assert record.terms == {"wait_s": 0.5}


def test_of_long_prompts_only_the_decision_is_kept(writer: LogWriter) -> None:
    made = router("least_tokens", 3)
    found = []
    for number in range(40):
        hashes = tuple(range(2**62, 2**62 + 1024))
        request = Request(
            id=f"r{number}", arrival_s=0.0, prompt_tokens=50, max_tokens=20, session=',"a":[{}]', prefix_hashes=hashes
        )
        event = RequestArrived(request=request)
        found += told(writer, event, made.handle(event, 1.0))
    writer.flush()
    for record, decision in found:
        assert record.decision == decision
        assert len(record._lines) < 1000
