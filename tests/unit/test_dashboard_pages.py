"""Pages are pure: equal snapshots give equal bytes, hostile names stay text, and every page survives an empty fleet."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import msgspec
import pytest

from weighbridge.dashboard.demo import DemoSource
from weighbridge.dashboard.html import Html
from weighbridge.dashboard.pages import capacity, decisions, fleet, tiers
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import Snapshot
from weighbridge.dashboard.view import View, layout

PAGES = {"/": fleet.page, "/decisions": decisions.page, "/tiers": tiers.page, "/capacity": capacity.page}
HOSTILE = "<script>alert('x')</script>\"'&"
VOID = {"meta", "link", "input", "br", "hr", "img"}


@pytest.fixture(scope="module")
def demo() -> Snapshot:
    return DemoSource(7).snapshot()


def query(text: str = "") -> Query:
    return Query.parse(text)


class Tree(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(markup: str) -> Tree:
    tree = Tree()
    tree.feed(markup)
    assert tree.open == []
    return tree


def hostile(snapshot: Snapshot) -> Snapshot:
    """The same fleet with every name, reason and note turned into markup."""

    def poison(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [poison(v, key) for v in value]
        keep = ("state", "level", "outcome", "role")
        if isinstance(value, str) and key not in keep and not isinstance(value, Html):
            return f"{HOSTILE}{value}"
        return value

    return msgspec.convert(poison(msgspec.to_builtins(snapshot)), Snapshot)


@pytest.mark.parametrize("path", PAGES)
def test_equal_snapshots_give_equal_bytes_and_whole_markup(path: str, demo: Snapshot) -> None:
    first, second = (PAGES[path](DemoSource(7).snapshot(), query()) for _ in range(2))
    assert first == second
    tree = read(layout(path, first, "/live", "1").decode())
    ids = [a["id"] for _, a in tree.tags if "id" in a]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", PAGES)
def test_hostile_names_stay_text(path: str, demo: Snapshot) -> None:
    poisoned = hostile(demo)
    wanted = query(f"i={poisoned.instances[0].name}&id={poisoned.decisions[5].id}") if path != "/capacity" else query()
    view = PAGES[path](poisoned, wanted)
    tree = read(layout(path, view, "/live", "1").decode())
    assert [a for t, a in tree.tags if t == "script"] == [{"src": "/static/app.js?v=1", "defer": None}]
    assert not any(name.startswith("on") or name == "style" for _, a in tree.tags for name in a)
    if path != "/capacity":
        assert any(HOSTILE in text for text in tree.text)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize(
    "text", ["", "i=nobody&id=nothing&tier=x&sort=zzz&tenant=q&show=?", "kv_heads=0", "rate=-1&budget=x", "config={"]
)
def test_no_query_and_no_empty_fleet_breaks_a_page(path: str, text: str) -> None:
    empty = Snapshot(at_s=0.0, source="test", error="connection refused", age_s=3.0)
    for snapshot in (empty, DemoSource(3).snapshot()):
        read(PAGES[path](snapshot, query(text)).body)


@pytest.mark.parametrize("path", ["/", "/decisions", "/tiers"])
def test_every_part_stands_in_the_body_under_its_id(path: str, demo: Snapshot) -> None:
    view = PAGES[path](demo, query())
    assert view.live
    for name, markup in view.parts.items():
        assert markup in view.body
        assert read(markup).tags[0][1]["id"] == name


def test_the_first_page_leads_to_the_sick_instance(demo: Snapshot) -> None:
    view = fleet.page(demo, query())
    assert re.search(r'href="/\?i=h100-2".{0,60}h100-2', view.parts["att"])
    assert "weighbridge calibrate l4-2" in view.parts["att"]
    chosen = fleet.page(demo, query("i=l4-2"))
    assert "l4-2: TTFT of its last requests" in chosen.parts["detail"]


def test_sorting_changes_the_order_of_rows_only_when_asked(demo: Snapshot) -> None:
    def names(view: View) -> list[str]:
        return [name for name in view.parts if name.startswith("i-")]

    plain, worst = fleet.page(demo, query()), fleet.page(demo, query("sort=headroom"))
    assert names(plain) == [f"i-{i.name}" for i in demo.instances]
    assert names(worst)[0] == "i-h100-2"


def test_a_decision_names_terms_runner_up_exclusions_and_outcome(demo: Snapshot) -> None:
    done = next(d for d in demo.decisions if d.outcome == "ok" and any(c.excluded for c in d.candidates))
    view = decisions.page(demo, query(f"id={done.id}"))
    text = "".join(read(view.body).text)
    assert "excluded: draining" in text
    assert "mostly decode" in text
    assert "next is" in view.parts["first"]
    assert "Observed" in text
    assert 'class="obs"' in view.parts["detail"]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("tier=batch", lambda d: d.tier == "batch"),
        ("tenant=search", lambda d: d.tenant == "search"),
        ("instance=h100-1", lambda d: d.chosen == "h100-1"),
        ("show=tie", lambda d: d.ties > 1),
        ("show=outside", lambda d: d.outside),
        ("show=shed", lambda d: d.outcome == "rejected"),
    ],
)
def test_filters(text: str, holds: Callable[[object], bool], demo: Snapshot) -> None:
    view = decisions.page(demo, query(text))
    shown = [name[2:] for name in view.parts if name.startswith("d-")]
    wanted = [d.id for d in demo.decisions if holds(d)][: decisions.MOST_ROWS]
    assert shown == wanted


def test_an_open_decision_keeps_the_list_still(demo: Snapshot) -> None:
    source = DemoSource(7)
    chosen = demo.decisions[60]
    view = decisions.page(demo, query(f"id={chosen.id}"))
    assert f'id="d-{chosen.id}"' in view.body
    source.advance()
    later = decisions.page(source.snapshot(), query(f"id={chosen.id}"))
    assert later.shape == view.shape
    assert not any(name.startswith("d-") for name in later.parts)


def test_capacity_defaults_and_the_question_of_24_gib() -> None:
    text = "".join(read(capacity.page(Snapshot(at_s=0, source="t"), query()).body).text)
    for wanted in (
        "4.00 GiB",
        "128.00 KiB",
        "1.00 GiB",
        "4,294,967,296",
        "24sequences of 8,192 tokens fit in 24.00 GiB",
    ):
        assert wanted in text
    assert "12960 tokens/s < 2048 / 0.021 s" in text


def test_capacity_reads_a_pasted_config() -> None:
    config = (
        '{"model_type":"qwen2","num_hidden_layers":24,"num_attention_heads":14,"num_key_value_heads":2,'
        '"hidden_size":896,"torch_dtype":"float32"}'
    )
    pasted = Query({"config": [config], "tokens": ["5456"], "memory": ["128MiB"], "sequences": ["1"]})
    text = "".join(read(capacity.page(Snapshot(at_s=0, source="t"), pasted).body).text)
    assert "341 blocks" in text


def test_capacity_is_prefilled_from_a_live_instance(demo: Snapshot) -> None:
    text = "".join(read(capacity.page(demo, query("from=h100-1&tokens=4096")).body).text)
    assert "h100-1 holds 480,000 tokens" in text
    assert "117 sequences" in text
    assert "Stability: h100-1, prefilled" in text


def test_capacity_names_the_field_that_cannot_be(demo: Snapshot) -> None:
    view = capacity.page(demo, query("kv_heads=7&tp=3"))
    assert "Tensor-parallel devices: 7 KV heads can be neither split" in "".join(read(view.body).text)
    assert "Layers: &#39;many&#39; is not a whole number" in capacity.page(demo, query("layers=many")).body
