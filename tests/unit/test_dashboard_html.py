"""Escaping is the default: data can never become markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from weighbridge.dashboard.html import Html, escape, h, join


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "' onfocus='x", "&amp;<", "a\x00b"]
)
def test_text_and_attributes_come_back_as_they_were_and_never_as_markup(hostile: str) -> None:
    markup = h("p", hostile, title=hostile, id=hostile)
    seen: list[tuple[str, dict[str, str | None]]] = []
    text: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append((tag, dict(attrs)))

        def handle_data(self, data: str) -> None:
            text.append(data)

    Reader().feed(markup)
    wanted = hostile.replace("\x00", "\ufffd")
    assert seen == [("p", {"title": wanted, "id": wanted})]
    assert "".join(text) == wanted


def test_markup_nests_without_being_escaped_twice() -> None:
    assert h("b.x#y", join("a", h("i", "<"), None, 3)) == '<b class="x" id="y">a<i>&lt;</i>3</b>'


def test_attributes() -> None:
    made = h("input.a", class_="b", checked=True, disabled=False, value=None, aria_label="x", max=3)
    assert made == '<input class="b a" checked aria-label="x" max="3">'
    assert h("p", class_="only") == '<p class="only"></p>'
    assert h("td.num", class_=None) == '<td class="num"></td>'


def test_lists_are_flattened_and_truth_values_are_not_text() -> None:
    assert h("ul", [h("li", n) for n in (1, 2)], False, True, None) == "<ul><li>1</li><li>2</li></ul>"


def test_a_plain_string_is_not_markup_even_when_it_was_made_from_it() -> None:
    assert h("p", str(h("b", "x")).upper()) == "<p>&lt;B&gt;X&lt;/B&gt;</p>"
    assert isinstance(h("p"), Html)
    assert escape("a\tb\nc\x07") == "a\tb\nc\ufffd"
