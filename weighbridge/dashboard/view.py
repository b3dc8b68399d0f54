"""One page ready to be sent: the whole body, its changing fragments, and the frame around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weighbridge.dashboard.html import Child, Html, h, join

NAV = (
    ("/", "Fleet"),
    ("/decisions", "Decisions"),
    ("/tiers", "Tiers"),
    ("/whatif", "What-if"),
    ("/capacity", "Capacity"),
    ("/reports", "Reports"),
)


@dataclass(frozen=True, slots=True)
class View:
    """`body` contains every fragment of `parts` (element id to markup). While `shape` stays equal, a viewer needs only
    the parts that changed; when it changes, the whole body is sent again."""

    title: str
    body: Html
    parts: Mapping[str, Html] = field(default_factory=dict)
    shape: str = ""
    live: bool = False


_LOGO = h(
    "svg.logo",
    h("path", d="M2 18h20M4 18l2-5h12l2 5M12 13V6M7 6h10"),
    viewBox="0 0 24 24",
    aria_hidden="true",
    focusable="false",
)


def layout(path: str, view: View, live_url: str, version: str) -> bytes:
    """The document around a view. `live_url` is empty where nothing is streamed."""
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", f"{view.title} · Weighbridge"),
        h("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        h("link", rel="stylesheet", href=f"/static/app.css?v={version}"),
        h("script", src=f"/static/app.js?v={version}", defer=True),
        h("noscript", h("meta", http_equiv="refresh", content="5")) if view.live else None,
    )
    links = [h("a", name, href=url, aria_current="page" if url == path else None) for url, name in NAV]
    header = h(
        "header",
        h("a.brand", _LOGO, h("span", "Weighbridge"), href="/"),
        h("nav", *links, aria_label="Pages"),
        h(
            "div.tools",
            h("span.conn#conn", "static page", role="status"),
            h("button#pause", "Pause", type="button", aria_pressed="false", hidden=True, title="Key p")
            if live_url
            else None,
            h("button#theme", "Theme", type="button", hidden=True, aria_label="Switch between light and dark"),
        ),
    )
    body = h(
        "body",
        h("a.skip", "Skip to content", href="#main"),
        header,
        h("main#main", view.body, tabindex="-1"),
        data_live=live_url or None,
    )
    return f"<!doctype html>{h('html', head, body, lang='en')}".encode()


def panel(title: Child, *children: Child, anchor: str | None = None, legend: Child = None) -> Html:
    """A titled box."""
    return h("section.panel", h("h2", title, legend), *children, id=anchor)


def scroller(label: str, *children: Child) -> Html:
    """A box that scrolls sideways on a narrow screen, reachable by keyboard."""
    return h("div.scroll", *children, tabindex="0", role="region", aria_label=label)


def message(title: str, *text: Child) -> View:
    """A page that only says something."""
    return View(title, h("section.panel.message", h("h1", title), h("p", *text)))


def command(text: str) -> Html:
    """Something to type, with a copy button that the script shows."""
    return join(
        h("code.cmd", text),
        h("button.copy", "Copy", type="button", hidden=True, data_copy=text, aria_label=f"Copy: {text}"),
    )
