"""Two models on the same engines: each has a queue of its own, and urgency holds across both."""

from weighbridge.core.actions import Action, Dispatch, Reject
from weighbridge.core.events import InstanceUp, PrefillFinished, RequestArrived, RequestFailed, RequestFinished, Tick
from weighbridge.core.instance import InstanceSpec, Limits, Role
from weighbridge.core.request import Request, Tier
from weighbridge.routing.policy import Choice, View
from weighbridge.routing.router import Router, RouterSettings

TIERS = (
    Tier(name="interactive", priority=0),
    Tier(name="standard", priority=10),
    Tier(name="batch", priority=20, max_wait_s=5.0),
)
BOTH = ("one", "two")


def up(router: Router, name: str, models: tuple[str, ...] = BOTH, role: Role = "mixed") -> None:
    slots = Limits(max_sequences=None if role == "prefill" else 1)
    router.handle(InstanceUp(spec=InstanceSpec(name=name, models=models, role=role, limits=slots), generation=1), 0.0)


def fleet(**settings: object) -> Router:
    settings = {"policy": "least_tokens", "dispatch": "hold", "record_decisions": False, **settings}
    return Router(RouterSettings(tiers=TIERS, **settings))  # type: ignore[arg-type]


def arrive(router: Router, name: str, model: str, tier: str, now_s: float = 0.0) -> list[Action]:
    request = Request(id=name, model=model, arrival_s=now_s, tier=tier, prompt_tokens=100, max_tokens=10)
    return router.handle(RequestArrived(request=request), now_s)


def finish(router: Router, name: str, now_s: float = 1.0) -> list[str]:
    return sent(router.handle(RequestFinished(request_id=name, output_tokens=10), now_s))


def sent(actions: list[Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Dispatch)]


def filled() -> Router:
    router = fleet()
    up(router, "i")
    assert sent(arrive(router, "running", "one", "batch")) == ["running"]
    return router


def test_the_most_urgent_goes_first_whatever_its_model() -> None:
    router = filled()
    for name, model, tier in (
        ("b1", "one", "batch"),
        ("s1", "one", "standard"),
        ("i2", "two", "interactive"),
        ("s2", "two", "standard"),
        ("i1", "one", "interactive"),
    ):
        assert sent(arrive(router, name, model, tier)) == []
    order = ["running"]
    while router.live_requests:
        order += finish(router, order[-1])
    assert set(order[1:3]) == {"i1", "i2"}
    assert set(order[3:5]) == {"s1", "s2"}
    assert order[5] == "b1"


def test_a_second_try_takes_its_place_and_not_the_room_that_it_left() -> None:
    router = filled()
    arrive(router, "urgent", "two", "interactive")
    assert sent(router.handle(RequestFailed(request_id="running", instance="i", reason="x", retriable=True), 1.0)) == [
        "urgent"
    ]
    assert finish(router, "urgent") == ["running"]


def test_one_in_four_places_is_for_those_who_waited_too_long_of_any_model() -> None:
    router = filled()
    arrive(router, "old", "two", "batch")
    arrive(router, "older", "two", "batch")
    last, order = "running", []
    for n in range(12):
        arrive(router, f"u{n}", "one", "interactive", 10.0 + n)
        (last,) = finish(router, last, 10.0 + n)
        order.append(last)
    assert order[3] == "old"
    assert order[7] == "older"
    assert [name[0] for name in order].count("u") == 10


def test_too_many_are_refused_from_the_least_urgent_end_of_all_queues() -> None:
    router = fleet(max_held_tokens=250)
    up(router, "i")
    arrive(router, "running", "one", "standard")
    arrive(router, "b", "two", "batch")
    arrive(router, "s", "one", "standard")
    (refused,) = [a for a in arrive(router, "i1", "one", "interactive") if isinstance(a, Reject)]
    assert (refused.request_id, refused.reason) == ("b", "queue_full")


def test_a_late_request_is_not_forgotten_when_too_many_wait() -> None:
    tiers = (Tier(name="interactive", priority=0), Tier(name="standard", priority=10, ttft_s=0.5))
    settings = RouterSettings(
        tiers=tiers, policy="least_tokens", dispatch="hold", max_held_tokens=250, reject_hopeless=False
    )
    router = Router(settings)
    up(router, "i")
    arrive(router, "running", "one", "standard")
    arrive(router, "late", "one", "standard")
    finish(router, "running", 0.1)
    arrive(router, "more", "one", "standard", 0.2)
    router.handle(Tick(), 5.0)  # it is set aside
    assert sent(arrive(router, "i1", "one", "interactive", 5.1)) == []
    (refused,) = [a for a in arrive(router, "i2", "one", "interactive", 5.2) if isinstance(a, Reject)]
    assert refused.request_id == "more"


def test_who_shares_no_engine_does_not_wait_for_the_other() -> None:
    router = fleet()
    up(router, "i", ("one",))
    up(router, "j", ("two",))
    arrive(router, "running", "one", "batch")
    assert sent(arrive(router, "urgent", "one", "interactive")) == []
    assert sent(arrive(router, "free", "two", "batch")) == ["free"]
    assert sent(arrive(router, "more", "two", "batch")) == []
    assert finish(router, "free") == ["more"]


def test_decode_legs_keep_the_order_across_models() -> None:
    router = fleet(binding="late")
    up(router, "p", role="prefill")
    up(router, "d", role="decode")
    for name, model, tier in (("r", "one", "batch"), ("b", "one", "batch"), ("u", "two", "interactive")):
        assert sent(arrive(router, name, model, tier)) == [name]
    assert sent(router.handle(PrefillFinished(request_id="r"), 0.1)) == ["r"]
    assert sent(router.handle(PrefillFinished(request_id="b"), 0.2)) == []
    assert sent(router.handle(PrefillFinished(request_id="u"), 0.3)) == []
    assert finish(router, "r") == ["u"]
    assert finish(router, "u") == ["b"]


def test_decode_legs_age_as_first_legs_do() -> None:
    router = fleet(binding="late")
    up(router, "p", role="prefill")
    up(router, "d", role="decode")

    def prompt_done(name: str, tier: str, now_s: float) -> list[str]:
        arrive(router, name, "one", tier, now_s)
        return sent(router.handle(PrefillFinished(request_id=name), now_s))

    last, order = "r", []
    assert prompt_done("r", "standard", 0.0) == ["r"]
    assert prompt_done("old", "batch", 0.1) == []
    for n in range(8):
        assert prompt_done(f"u{n}", "interactive", 10.0 + n) == []
        (last,) = finish(router, last, 10.5 + n)
        order.append(last)
    assert order.index("old") == 2, "three were sent before: r, u0 and u1"


class Choosy:
    """Declines whatever is not of the last tier, while it may."""

    def choose(self, view: View) -> Choice:
        return Choice(None if view.may_hold and view.tier.name != "batch" else 0)


def test_when_so_many_were_declined_that_a_queue_waits_the_others_on_its_engines_wait_too() -> None:
    router = filled()
    router.policy = Choosy()
    up(router, "other", ("three",))
    for n in range(4):
        arrive(router, f"s{n}", "two", "standard", 0.1)
    arrive(router, "b", "one", "batch", 0.1)
    arrive(router, "t", "three", "standard", 0.1)
    arrive(router, "u", "three", "batch", 0.1)
    assert finish(router, "running", 1.0) == ["u"], "three of four were asked, and nobody passes the fourth"
    assert sent(arrive(router, "v", "one", "batch", 1.005)) == [], "a moment later neither"
