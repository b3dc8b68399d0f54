"""Decisions: modes, filters, rules, gate, live costs, sessions, cascades, feedback."""

from __future__ import annotations

import io

import msgspec
import pytest

from tests.unit.test_selection_checkpoint import dataset
from weighbridge.core.errors import ConfigError, InputError, RequestError
from weighbridge.selection import cascade, feedback
from weighbridge.selection.checkpoint import Checkpoint
from weighbridge.selection.decision import Constraints, Decision, LiveCost, Mode
from weighbridge.selection.explain import explain
from weighbridge.selection.language import language_of
from weighbridge.selection.pool import Pool, decode_pool
from weighbridge.selection.rules import Match, Rule
from weighbridge.selection.selector import Selector
from weighbridge.selection.settings import SelectionSettings, Worth
from weighbridge.selection.sticky import Sessions
from weighbridge.selection.train import TrainSettings, train

POOL_TEXT = """
pool: two
models:
  - {name: big, input_usd_per_1m: 5, output_usd_per_1m: 100, capabilities: [tools, vision], regions: [eu]}
  - {name: small, input_usd_per_1m: 0.1, output_usd_per_1m: 0.2, context_tokens: 4000, max_output_tokens: 1000}
"""
POEM = [{"role": "user", "content": "write a cheerful poem number 5 please 7"}]
PROOF = [{"role": "user", "content": "prove the algebra theorem number 5 please 7"}]
STRANGE = [
    {"role": "user", "content": "¿Cuánto cuesta un billete de tren a Sevilla mañana por la tarde, ida y vuelta?"}
]
BOTH = {"big": LiveCost(ttft_s=0.2, tpot_s=0.01), "small": LiveCost(ttft_s=0.2, tpot_s=0.01)}


@pytest.fixture(scope="module")
def made() -> Checkpoint:
    return train(dataset(), TrainSettings(buckets=1024), pool="two", created="2026-01-01")


@pytest.fixture(scope="module")
def pool() -> Pool:
    return decode_pool(POOL_TEXT)


@pytest.fixture
def selector(made: Checkpoint, pool: Pool) -> Selector:
    return Selector(made, pool)


def with_settings(selector: Selector, **changes: object) -> Selector:
    settings = msgspec.convert(changes, SelectionSettings)
    return Selector(selector.checkpoint, selector.pool, settings)


def test_the_adequate_cheap_model_wins_where_it_is_good_and_loses_where_it_is_not(selector: Selector) -> None:
    assert selector.decide(POEM).model == "small"
    assert selector.decide(PROOF).model == "big"
    decision = selector.decide(POEM)
    assert decision.known
    assert decision.expected_output_tokens < 100
    assert decision.chosen().utility_usd == max(c.utility_usd or 0 for c in decision.candidates)


def test_a_decision_is_pure(selector: Selector) -> None:
    assert selector.decide(PROOF) == selector.decide(PROOF)
    assert msgspec.json.decode(msgspec.json.encode(selector.decide(PROOF)), type=Decision) == selector.decide(PROOF)


def test_costs_follow_the_pool_file_and_the_token_head(selector: Selector) -> None:
    big = next(c for c in selector.decide(PROOF).candidates if c.model == "big")
    assert big.output_tokens == pytest.approx(300, rel=0.2)
    assert big.cost_usd == pytest.approx((5 * big.input_tokens + 100 * big.output_tokens) / 1e6, rel=0.02)
    capped = selector.decide(PROOF, constraints=Constraints(max_output_tokens=10))
    assert all(c.output_tokens <= 10 for c in capped.candidates)


def test_budget_and_quality_modes(selector: Selector) -> None:
    budget = selector.decide(PROOF, mode=Mode.MAX_COST_USD, constraints=Constraints(max_cost_usd=0.001))
    assert budget.model == "small"
    assert "over $0.001" in (budget.candidates[0].excluded or "")
    assert selector.decide(PROOF, mode=Mode.QUALITY).model == "big"
    assert selector.decide(PROOF, mode=Mode.MIN_QUALITY, constraints=Constraints(min_quality=0.6)).model == "big"
    assert selector.decide(POEM, mode=Mode.MIN_QUALITY, constraints=Constraints(min_quality=0.6)).model == "small"
    nobody = selector.decide(POEM, mode=Mode.MIN_QUALITY, constraints=Constraints(min_quality=1.0))
    assert "no model reaches chance 1" in nobody.reason


def test_cheap_gives_up_quality_that_costs_too_much(selector: Selector) -> None:
    stingy = with_settings(selector, worth={"cheap": {"success_usd": 0.001, "second_usd": 0.0}})
    assert stingy.decide(PROOF, mode=Mode.CHEAP).model == "small"


def test_fixed_mode_names_the_model_or_refuses(selector: Selector) -> None:
    assert selector.decide(POEM, mode=Mode.FIXED, constraints=Constraints(model="big")).model == "big"
    with pytest.raises(RequestError, match=r"model of the pool \(big, small\), got 'other'"):
        selector.decide(POEM, mode=Mode.FIXED, constraints=Constraints(model="other"))
    with pytest.raises(RequestError, match="cannot serve this request: is not in region eu"):
        selector.decide(POEM, mode=Mode.FIXED, constraints=Constraints(model="small", region="eu"))


def test_strong_share_sends_that_share_of_held_out_rows_to_the_strong_model(selector: Selector) -> None:
    texts = dataset(300, seed=9).texts
    taken = {}
    for share in (0.0, 0.3, 1.0):
        limits = Constraints(strong_share=share)
        chosen = [
            selector.decide([{"role": "user", "content": t}], mode=Mode.STRONG_SHARE, constraints=limits) for t in texts
        ]
        known = [decision.model == "big" for decision in chosen if decision.known]
        taken[share] = sum(known) / len(known)
    assert taken[0.0] == 0.0
    assert taken[1.0] == 1.0
    assert taken[0.3] == pytest.approx(0.3, abs=0.12)


@pytest.mark.parametrize(
    ("messages", "tools", "constraints", "reason"),
    [
        (POEM, [], Constraints(region="eu"), "is not in region eu"),
        (POEM, [], Constraints(json_schema=True, exclude=("nobody",)), "does not do json_schema"),
        (POEM, [], Constraints(exclude=("small",)), "excluded by the request"),
        (POEM, [], Constraints(max_output_tokens=2000), "writes at most 1000 tokens"),
        ([{"role": "user", "content": "poem " * 4000}], [], Constraints(), "context of 4000 tokens is short"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [], Constraints(), "do vision"),
    ],
)
def test_hard_filters_say_why(
    selector: Selector, messages: list[object], tools: list[object], constraints: Constraints, reason: str
) -> None:
    decision = selector.decide(messages, tools, constraints=constraints)
    reasons = [c.excluded or "" for c in decision.candidates]
    assert any(reason in text for text in reasons)
    assert decision.chosen().excluded is None


def test_when_nobody_can_serve_every_reason_is_given(selector: Selector) -> None:
    with pytest.raises(RequestError, match=r"big: excluded by the request; small: excluded by the request") as caught:
        selector.decide(POEM, constraints=Constraints(exclude=("big", "small")))
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="no healthy instance") as caught:
        selector.decide(POEM, live={"big": LiveCost(ttft_s=0, healthy=0)})
    assert caught.value.status == 503


def test_a_saturated_strong_model_loses_to_an_idle_adequate_one_in_balanced_only(selector: Selector) -> None:
    idle = selector.decide(PROOF, mode=Mode.BALANCED, live=BOTH)
    assert idle.model == "big"
    assert idle.chosen().latency_s == pytest.approx(0.2 + 0.01 * (idle.chosen().output_tokens - 1), rel=0.01)
    queue = BOTH | {"big": LiveCost(ttft_s=600.0, tpot_s=0.01)}
    assert selector.decide(PROOF, mode=Mode.BALANCED, live=queue).model == "small"
    assert selector.decide(PROOF, mode=Mode.QUALITY, live=queue).model == "big"
    late = selector.decide(PROOF, mode=Mode.QUALITY, live=queue, constraints=Constraints(max_latency_s=60.0))
    assert late.model == "small"


def test_seconds_do_not_count_while_one_models_speed_is_unknown(selector: Selector) -> None:
    half = {"big": LiveCost(ttft_s=600.0), "small": LiveCost()}
    decision = selector.decide(PROOF, mode=Mode.BALANCED, live=half)
    assert decision.model == "big"
    assert [c.latency_s for c in decision.candidates] == [600.0, None]


def test_an_unknown_family_goes_to_the_fallback_and_the_record_says_so(selector: Selector) -> None:
    decision = selector.decide(STRANGE)
    assert not decision.known
    assert decision.familiarity < decision.threshold
    assert decision.model == selector.fallback == "big"
    assert decision.reason == "unknown task family: fallback"
    named = with_settings(selector, fallback="small")
    assert named.decide(STRANGE).model == "small"
    without = named.decide(STRANGE, constraints=Constraints(exclude=("small",)))
    assert without.model == "big"
    assert "fallback small cannot serve" in without.reason
    assert with_settings(selector, gate=False).decide(STRANGE).known


def test_rules_come_before_learning(selector: Selector) -> None:
    rules = (
        Rule(match=Match(keywords=("THEOREM",)), use="small", name="no proofs"),
        Rule(match=Match(headers={"X-Team": "gold"}), prefer=("big",)),
        Rule(match=Match(tools=True), exclude=("small",)),
        Rule(match=Match(languages=("es",)), prefer=("small",)),
        Rule(match=Match(min_prompt_tokens=500), prefer=("big",)),
    )
    ruled = Selector(selector.checkpoint, selector.pool, SelectionSettings(rules=rules))
    decision = ruled.decide(PROOF)
    assert (decision.model, decision.rules, decision.reason) == ("small", ("no proofs",), "rule no proofs says use")
    assert ruled.decide(POEM, constraints=Constraints(headers={"x-team": "gold"})).model == "big"
    assert ruled.decide(POEM, constraints=Constraints(headers={"x-team": "silver"})).model == "small"
    tooled = ruled.decide(POEM, [{"type": "function", "function": {"name": "f"}}])
    assert tooled.candidates[1].excluded == "excluded by a rule"
    assert ruled.decide(STRANGE).rules == ("rules[3]",)
    assert ruled.decide([{"role": "user", "content": "poem " * 600}]).rules == ("rules[4]",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fallback": "x"}, r"\$\.fallback: 'x' is not a model"),
        ({"rules": [{"match": {}}]}, r"rules\[0\]: needs one of use"),
        ({"rules": [{"match": {}, "use": "x"}]}, "'x' is not a model"),
        ({"strong_share": 2.0}, "between 0 and 1"),
        ({"worth": {"best": {"success_usd": 1, "second_usd": 0}}}, "'best' is not a mode"),
        ({"cascade": {"models": ["small"], "verifier": {"pattern": "x"}}}, "at least two"),
        ({"cascade": {"models": ["small", "big"], "verifier": {}}}, "exactly one of"),
        ({"cascade": {"models": ["small", "big"], "verifier": {"pattern": "("}}}, "not a regular expression"),
    ],
)
def test_bad_settings_name_the_field(selector: Selector, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(selector, **changes)


def test_a_session_stays_unless_the_gain_exceeds_the_margin(selector: Selector) -> None:
    patient = with_settings(selector, sticky={"margin_usd": 1.0})
    stayed = patient.decide(PROOF, constraints=Constraints(previous="small"))
    assert stayed.model == "small"
    assert "session stays" in stayed.reason
    left = selector.decide(PROOF, constraints=Constraints(previous="small"))
    assert left.model == "big"
    assert "leaves small" in left.reason


def test_sessions_are_bounded_and_the_least_recently_used_goes() -> None:
    sessions = Sessions(2)
    for name in ("a", "b"):
        sessions.put(name, "m")
    assert sessions.get("a") == "m"
    sessions.put("c", "m")
    assert (len(sessions), sessions.get("b"), sessions.get("a")) == (2, "", "m")
    none = Sessions(0)
    none.put("a", "m")
    assert len(none) == 0


def test_feedback_is_learned_and_survives_a_torn_line(selector: Selector) -> None:
    decision, sketch = selector.decide_with_sketch(PROOF)
    record = feedback.make_feedback(selector, sketch, "big", 0.0, decision.chosen().quality, at_s=1.0)
    line = feedback.encode(record)
    log = line * 12 + line[: len(line) // 2]
    assert feedback.replay(selector, feedback.read(io.BytesIO(log))) == 12
    after = selector.decide(PROOF)
    assert after.chosen().quality != decision.chosen().quality
    assert next(c for c in after.candidates if c.model == "big").quality < decision.chosen().quality - 0.3
    with pytest.raises(InputError, match="line 1"):
        list(feedback.read(io.BytesIO(b"nonsense\n" + line)))
    with pytest.raises(InputError, match="between 0 and 1"):
        feedback.make_feedback(selector, sketch, "big", 2.0, 0.5, at_s=1.0)
    with pytest.raises(InputError, match="'x' is not in the pool"):
        feedback.make_feedback(selector, sketch, "x", 1.0, 0.5, at_s=1.0)


def test_an_explanation_lists_words_of_the_text(selector: Selector) -> None:
    explanation = explain(selector, selector.decide(PROOF), PROOF)
    assert explanation.runner_up == "small"
    said = {"prove", "the", "algebra", "theorem", "number", "please", "5", "7"}
    assert {w.word for w in explanation.words} <= said
    strongest = max(explanation.words, key=lambda w: w.score)
    assert strongest.word in {"prove", "algebra", "theorem", "the"}
    assert explain(selector, selector.decide(STRANGE), STRANGE).words == ()


def test_pattern_and_schema_verifiers() -> None:
    number = cascade.Verifier(pattern=r"\b\d+\b")
    assert cascade.check_answer(number, "it is 42").passed
    assert cascade.check_answer(number, "no idea").reason == "the pattern was not found"
    schema = cascade.Verifier(json_schema={"type": "object", "required": ["a"]})
    assert cascade.check_answer(schema, ' {"a": 1} ').passed
    assert "not JSON" in cascade.check_answer(schema, "a: 1").reason
    assert "required" in cascade.check_answer(schema, "{}").reason


def test_judge_grades_and_the_order_of_a_cascade() -> None:
    judge = cascade.Verifier(judge="big", min_grade=7)
    assert cascade.check_grade(judge, "8").passed
    assert cascade.check_grade(judge, "Grade: 6.5").reason == "graded 6.5"
    assert not cascade.check_grade(judge, "good").passed
    prompt = cascade.judge_prompt("Q?", "A!")
    assert "Q?" in prompt
    assert "A!" in prompt
    settings = cascade.CascadeSettings(models=("small", "big"), verifier=judge)
    settings.check(("big", "small"))
    assert cascade.next_model(settings, ()) == "small"
    assert cascade.next_model(settings, ("small",)) == "big"
    assert cascade.next_model(settings, ("small", "big")) == ""
    with pytest.raises(ConfigError, match="not a JSON schema"):
        cascade.CascadeSettings(
            models=("small", "big"), verifier=cascade.Verifier(json_schema={"type": "nothing"})
        ).check(("big", "small"))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("what is the time in that town", "en"),
        ("wie ist das Wetter und was mache ich", "de"),
        ("comment est le temps et que faire avec la pluie", "fr"),
        ("これは日本語の文章です", "ja"),
        ("请用中文回答这个问题", "zh"),
        ("привет как дела", "ru"),
        ("안녕하세요 세계", "ko"),
        ("x = y + 1", ""),
    ],
)
def test_language_guess(text: str, code: str) -> None:
    assert language_of(text) == code


def test_worth_of_modes_without_prices_of_their_own() -> None:
    own = SelectionSettings(worth={"balanced": Worth(success_usd=2.0, second_usd=0.5)})
    assert own.worth_of(Mode.MIN_QUALITY).second_usd == 0.5
    assert own.worth_of(Mode.MAX_COST_USD).success_usd == 10.0
