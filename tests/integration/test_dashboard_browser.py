"""A real headless Chromium opens every page under the content-security policy, light and dark, wide and narrow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Chromium, Page, find_chromium

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = find_chromium()
PAGES = ("/", "/decisions", "/tiers", "/capacity")
LIVE = ("/", "/decisions", "/tiers")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "weighbridge.cli", "dashboard", "--demo", "--port", "0", "--with-parent"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().split()[-1]
        process.stdin.close()  # --with-parent: it ends by itself
        assert process.wait(10) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert CHROMIUM is not None
    with Chromium(CHROMIUM) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    tab = browser.page()
    yield tab
    tab.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("path", PAGES)
def test_every_page_opens_with_an_empty_console_and_fits(
    path: str, width: int, dark: bool, url: str, browser: Chromium
) -> None:
    tab = browser.page(width=width, dark=dark)
    tab.open(url + path)
    if path in LIVE:
        tab.until("document.querySelector('#conn').textContent === 'live'")
    assert tab.complaints() == []
    assert tab.run("document.compatMode") == "CSS1Compat"
    assert tab.run("document.documentElement.scrollWidth") <= width
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    channels = [int(c) for c in background.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (max(channels) < 60) is dark
    tab.close()


def test_the_first_load_is_small(url: str, page: Page) -> None:
    page.open(url + "/")
    page.until("document.querySelector('#conn').textContent === 'live'")
    requests = page.events("Network.requestWillBeSent")
    assert len(requests) <= 6
    assert all(r["request"]["url"].startswith(url) for r in requests)
    decoded = page.run(
        "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        ".reduce((sum, entry) => sum + entry.decodedBodySize, 0)"
    )
    assert 20_000 < decoded <= 100_000
    page.call("HeapProfiler.collectGarbage")
    heap = {m["name"]: m["value"] for m in page.call("Performance.getMetrics")["metrics"]}["JSHeapUsedSize"]
    assert heap <= 5_000_000


def test_a_live_page_moves_and_a_paused_one_does_not(url: str, page: Page) -> None:
    age = "document.querySelector('#i-h100-0').innerHTML"
    page.open(url + "/")
    page.run(f"window.before = {age}")
    page.until(f"({age}) !== window.before")
    page.press("p")
    page.until("document.querySelector('#conn').textContent === 'paused'")
    page.run(f"window.before = {age}")
    page.browser.pump(2.5)
    assert page.run(f"({age}) === window.before")
    assert page.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    page.press("p")
    page.until(f"({age}) !== window.before")


def test_keys_select_rows_and_the_address_follows(url: str, page: Page) -> None:
    page.open(url + "/?i=h100-0")
    page.press("j")
    page.until("location.search === '?i=h100-1' && document.querySelector('tr.sel').id === 'i-h100-1'")
    page.until("document.querySelector('#detail h2').textContent.startsWith('h100-1')")
    page.press("k")
    page.until("location.search === '?i=h100-0'")
    page.run("history.back()")
    page.until("location.search === '?i=h100-1' && document.querySelector('tr.sel').id === 'i-h100-1'")
    assert page.complaints() == []


def test_focus_survives_updates(url: str, page: Page) -> None:
    page.open(url + "/")
    page.run("document.querySelector('#i-h100-3 a').focus()")
    page.browser.pump(2.5)
    assert page.run("document.activeElement.closest('tr').id") == "i-h100-3"


def test_the_theme_button_outlives_a_reload(url: str, page: Page) -> None:
    page.open(url + "/")
    page.run("document.querySelector('#theme').click()")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.open(url + "/tiers")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.run("localStorage.clear()")


def test_without_script_the_numbers_and_forms_are_there(url: str, browser: Chromium) -> None:
    tab = browser.page(script=False)
    tab.open(url + "/")
    root = tab.call("DOM.getDocument", depth=1)["root"]["nodeId"]
    markup = tab.call("DOM.getOuterHTML", nodeId=root)["outerHTML"]
    assert "h100-2" in markup and "weighbridge calibrate l4-2" in markup
    assert 'http-equiv="refresh"' in markup
    tab.close()


def test_the_crosshair_reads_the_chart(url: str, page: Page) -> None:
    page.open(url + "/")
    box = page.run(
        "(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('svg.chart').getBoundingClientRect())"
    )
    page.run(f"window.scrollTo(0, {box[1]} - 300)")
    box = page.run(
        "(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('svg.chart').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    page.until("!document.querySelector('#tip').hidden")
    text = page.run("document.querySelector('#tip').textContent")
    assert "forecast" in text and "observed" in text


def test_every_name_a_reader_hears_is_there(url: str, page: Page) -> None:
    for path in PAGES:
        page.open(url + path)
        nameless = page.run(
            "[...document.querySelectorAll('a,button,input:not([type=hidden]),select,textarea,svg[role=img],nav')]"
            ".filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []
        assert page.run("document.documentElement.lang") == "en"
        assert page.run("document.querySelectorAll('main').length") == 1
