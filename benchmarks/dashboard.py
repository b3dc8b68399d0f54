"""Measures the dashboard and takes its pictures.

python benchmarks/dashboard.py pictures docs/dashboard      every page, light and dark, 1440 and 390 px
python benchmarks/dashboard.py load                         first load in a real browser: requests, bytes, heap
python benchmarks/dashboard.py viewers --seconds 60         processor time and bytes for 0, 1 and 10 viewers
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.chromium import Chromium, Page, find_chromium  # noqa: E402 - needs the path above
from weighbridge.http import HttpClient  # noqa: E402 - the same

PAGES = {
    "fleet": "/", "decisions": "/decisions", "tiers": "/tiers", "whatif": "/whatif", "capacity": "/capacity",
    "reports": "/reports",
}  # fmt: skip


@contextmanager
def demo() -> Iterator[tuple[str, int]]:
    """A demo dashboard; its address and process id."""
    command = [sys.executable, "-m", "weighbridge.cli", "dashboard", "--demo", "--port", "0", "--with-parent"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().split()[-1], process.pid
        process.stdin.close()


def browser() -> Chromium:
    found = find_chromium()
    if found is None:
        sys.exit("chromium is not installed")
    return Chromium(found)


def wait_live(page: Page) -> None:
    page.until("!document.body.dataset.live || document.querySelector('#conn').textContent === 'live'", 90)


def pictures(out: Path) -> None:
    """PNGs named PAGE-THEME-WIDTH.png; the what-if is asked first, so that its answer is in the picture."""
    out.mkdir(parents=True, exist_ok=True)
    with demo() as (url, _), browser() as chromium:
        page = chromium.page()
        for _ in range(240):
            page.open(url + "/whatif", 90)
            if page.run("!!document.querySelector('button[value=run]')"):
                break
            chromium.pump(0.5)
        page.run("document.querySelector('[name=end]').value = '60'")
        page.run("document.querySelector('button[value=run]').click()")
        page.until("document.querySelector('#job h2')?.textContent === 'Answer'", 600)
        for name, path in PAGES.items():
            where = path
            if name == "decisions":
                page.open(url + path, 90)
                done = "[...document.querySelectorAll('#rows tr')].find(r => r.cells[6].textContent.endsWith('s'))"
                page.until(f"!!{done}", 90)
                where = page.run(f"{done}.querySelector('a').getAttribute('href')")
            if name == "reports":
                page.open(url + path, 90)
                ids = page.run("[...document.querySelectorAll('[name=id]')].map(e => e.value)")
                where = f"/reports?id={ids[0]}&id={ids[4]}&id={ids[8]}" if len(ids) > 9 else path
            for dark in (False, True):
                for width in (1440, 390):
                    tab = chromium.page(width=width, height=900 if width > 1000 else 844, dark=dark)
                    tab.open(url + where, 90)
                    wait_live(tab)
                    chromium.pump(1.2)
                    wide = tab.run("document.documentElement.scrollWidth")
                    problems = tab.complaints()
                    file = out / f"{name}-{'dark' if dark else 'light'}-{width}.png"
                    file.write_bytes(tab.picture())
                    size = file.stat().st_size // 1000
                    print(f"{file.name}: {size} kB, page width {wide}, console {problems or 'empty'}", flush=True)
                    tab.close()


def load() -> None:
    """First load of the front page in a fresh browser, nothing cached."""
    with demo() as (url, _), browser() as chromium:
        page = chromium.page()
        page.open(url + "/", 90)
        wait_live(page)
        chromium.pump(3)
        page.call("HeapProfiler.collectGarbage")
        heap = {m["name"]: m["value"] for m in page.call("Performance.getMetrics")["metrics"]}["JSHeapUsedSize"]
        entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        sizes = page.run(f"{entries}.map(e => [e.name, e.decodedBodySize, e.encodedBodySize])")
        requests = [r["request"]["url"] for r in page.events("Network.requestWillBeSent")]
        print(json.dumps({
            "requests": len(requests), "outside": [r for r in requests if not r.startswith(url)],
            "decoded_bytes": sum(s[1] for s in sizes), "wire_bytes": sum(s[2] for s in sizes),
            "js_heap_bytes": heap, "console": page.complaints(), "files": sizes,
        }, indent=1))  # fmt: skip


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def watch(url: str, seconds: float) -> int:
    """One viewer of the front page; bytes received."""
    client, received = HttpClient(), 0
    try:
        async with asyncio.timeout(seconds), client.stream("GET", url + "/live?_p=/") as stream:
            async for data in stream:
                received += len(data)
    except TimeoutError:
        pass
    await client.close()
    return received


async def measure(url: str, pid: int, seconds: float) -> None:
    await asyncio.sleep(20)  # the demo's own log has been written
    for viewers in (0, 1, 10, 1, 10):
        before = cpu_s(pid)
        got = await asyncio.gather(*(watch(url, seconds) for _ in range(viewers)), asyncio.sleep(seconds))
        used = cpu_s(pid) - before
        each = sum(x or 0 for x in got) / max(1, viewers) / seconds
        print(f"{viewers:2d} viewers: {100 * used / seconds:.2f} % of a core, {each / 1000:.1f} kB/s each")
    print(f"resident {rss_bytes(pid) / 1e6:.0f} MB")


def viewers(seconds: float) -> None:
    """Processor time of the server for 0, 1 and 10 viewers of 16 instances at 1 Hz."""
    with demo() as (url, pid):
        asyncio.run(measure(url, pid, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pictures", "load", "viewers"])
    parser.add_argument("out", nargs="?", type=Path, default=Path("docs/dashboard"))
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.what == "pictures":
        pictures(options.out)
    elif options.what == "load":
        load()
    else:
        viewers(options.seconds)


if __name__ == "__main__":
    main()
