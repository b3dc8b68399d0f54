"""What relays and the Router's process tell each other arrives whole, wherever the socket cuts it."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.decision import Candidate, Decision
from weighbridge.core.events import FirstToken, RequestAdopted, RequestCancelled, RequestFailed, RequestFinished
from weighbridge.core.request import Request
from weighbridge.gateway.adapters import Facts
from weighbridge.gateway.kv.prompt import Prompt
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.relays.tally import Change, add, take
from weighbridge.gateway.relays.wire import (
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    MOST_MESSAGES,
    Act,
    Answered,
    Arrived,
    Beat,
    Ended,
    Engine,
    Hello,
    Refused,
    Roster,
    Runs,
    Sign,
    Splitter,
    Stop,
    Taken,
    Tally,
    Welcome,
    Went,
    decode_down,
    decode_up,
    frames,
)
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings, KeySettings
from weighbridge.gateway.stats import Stats

words = st.text(max_size=12)
counts = st.integers(0, 2**31)
requests = st.builds(
    Request,
    id=words,
    arrival_s=st.floats(0, 1e9),
    prompt_tokens=counts,
    max_tokens=counts,
    model=words,
    stream=st.booleans(),
    prefix_hashes=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    expected_output_tokens=st.none() | counts,
)
outcomes = st.none() | st.builds(Outcome, outcome=words, instance=words, e2e_s=st.floats(0, 1e6), output_tokens=counts)
instances = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
ups = st.one_of(
    st.builds(Hello, counts, counts),
    st.builds(Arrived, requests, words, st.booleans()),
    st.builds(Went, st.builds(FirstToken, request_id=words)),
    st.builds(Ended, st.builds(RequestFinished, request_id=words, output_tokens=counts), outcomes),
    st.builds(
        Ended,
        st.builds(RequestFailed, request_id=words, instance=words, reason=words, retriable=st.booleans()),
        outcomes,
    ),
    st.builds(Ended, st.builds(RequestCancelled, request_id=words)),
    st.builds(Runs, st.builds(RequestAdopted, request=requests, instance=words, output_tokens=counts)),
    st.builds(Sign, words, words, st.booleans()),
    st.builds(
        Answered,
        words,
        st.builds(Prompt, st.just((1, 2)), counts, words, st.binary(max_size=50), st.none(), counts, st.none()),
    ),
    st.builds(Tally, st.lists(st.builds(Change, words, st.just(("a",)), st.floats(0, 9), st.just((1, 2))), max_size=3)),
)
decisions = st.builds(
    Decision,
    request_id=words,
    at_s=st.floats(0, 9),
    policy=words,
    chosen=words,
    candidates=st.just((Candidate(instance="a", terms={"x": 1.0}),)),
)
downs = st.one_of(
    st.builds(Act, st.builds(Dispatch, request_id=words, instance=words, decision=st.none() | decisions)),
    st.builds(Act, st.builds(Reject, request_id=words, status=counts, reason=words, retry_after_s=st.floats(0, 9))),
    st.builds(Stop, words, counts, words),
    st.builds(Refused, words, counts, words, words, st.none() | words, st.none() | st.floats(0, 9)),
    st.builds(Taken, words),
    st.just(Beat()),
    st.just(Welcome(GatewaySettings(keys=(KeySettings(sha256="0" * 64, tenant="t"),)))),
    st.builds(
        lambda name, up: Roster((Engine(InstanceSettings(name=name, url="http://x:1"), Facts(("m",)), up, 1),)),
        instances,
        st.booleans(),
    ),
)


def through(data: bytes, cuts: list[int]) -> list[bytes]:
    splitter = Splitter()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [bytes(body) for a, b in itertools.pairwise(places) for body in splitter.feed(data[a:b])]


@given(passes=st.lists(st.lists(ups, min_size=1, max_size=5), max_size=4), cuts=st.lists(st.integers(0, 10_000)))
def test_what_goes_up_arrives_in_order_wherever_it_is_cut(passes: list[list[object]], cuts: list[int]) -> None:
    data = b"".join(frames(messages) for messages in passes)
    assert [decode_up(body) for body in through(data, cuts)] == passes


@given(passes=st.lists(st.lists(downs, min_size=1, max_size=5), max_size=4), cuts=st.lists(st.integers(0, 10_000)))
def test_what_comes_down_arrives_in_order_wherever_it_is_cut(passes: list[list[object]], cuts: list[int]) -> None:
    data = b"".join(frames(messages) for messages in passes)
    assert [decode_down(body) for body in through(data, cuts)] == passes


def test_byte_by_byte() -> None:
    data = frames([Beat(), Taken("x")]) + frames([Stop("y", 2, "why")])
    bodies = through(data, list(range(len(data))))
    assert [decode_down(body) for body in bodies] == [[Beat(), Taken("x")], [Stop("y", 2, "why")]]


def test_a_frame_of_many_reads_is_put_together_once() -> None:
    body = b"x" * (1 << 20)
    data = len(body).to_bytes(HEAD_BYTES, "big") + body
    reads = [data[n : n + 4096] for n in range(0, len(data), 4096)]
    splitter = Splitter()
    for n, read in enumerate(reads[:-1]):
        assert list(splitter.feed(read)) == []
        kept = splitter._parts
        assert len(kept) == n + 1, "nothing was joined"
        assert all(part is given for part, given in zip(kept[1:], reads[1:], strict=False)), "nothing was copied"
    assert list(splitter.feed(reads[-1])) == [body]
    assert splitter._parts == []


def test_many_messages_go_in_several_frames() -> None:
    messages = [Taken(str(n)) for n in range(2 * MOST_MESSAGES + 1)]
    bodies = through(frames(messages), [])
    assert [len(decode_down(body)) for body in bodies] == [MOST_MESSAGES, MOST_MESSAGES, 1]


def test_a_frame_without_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        list(Splitter().feed((MAX_FRAME_BYTES + 1).to_bytes(HEAD_BYTES, "big")))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_down(frames([Hello(1, 2)])[HEAD_BYTES:])


@given(
    rounds=st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 500)), max_size=20), min_size=1, max_size=5)
)
def test_the_sum_of_what_relays_count_is_what_one_process_would_count(rounds: list[list[tuple[str, float]]]) -> None:
    whole, router, relays = Stats(), Stats(), [Stats(), Stats()]
    for number, values in enumerate(rounds):
        relay = relays[number % 2]
        for model, value in values:
            for stats in (whole, relay):
                stats.requests.add(("chat", model, "i", "ok"))
                stats.finished(model, "i").duration.observe(value)
        if number % 3 < 2:
            add(router, take(relay))
    for relay in relays:
        add(router, take(relay))
        assert take(relay) == []
    shown = router.families
    for expected, family in zip(whole.families, shown, strict=True):
        for labels, value in expected.values.items():
            found = family.values.get(labels)
            if isinstance(value, float):
                assert found == value
            elif any(value.counts):
                assert found.counts == value.counts  # type: ignore[union-attr]
                assert found.sum == pytest.approx(value.sum)  # type: ignore[union-attr]
