"""A headless Chromium over its DevTools pipe: open a page, run script in it, read its console, take a picture.

No driver and no websocket: `--remote-debugging-pipe` speaks NUL-separated JSON on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
]


def find_chromium() -> str | None:
    """Path of a Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Chromium:
    """One browser process; a context manager."""

    def __init__(self, executable: str) -> None:
        self._home = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def wire() -> None:
            # via high numbers first, so that neither end is overwritten before it is copied
            read, write = os.dup2(to_read, 100), os.dup2(to_write, 101)
            os.dup2(read, 3, inheritable=True)
            os.dup2(write, 4, inheritable=True)

        self.process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={self._home}", "about:blank"],
            preexec_fn=wire,  # noqa: PLW1509 - it only duplicates descriptors
            pass_fds=(3, 4, to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home},
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, session: str | None = None, timeout_s: float = 60.0, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are kept."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + timeout_s
        while True:
            answer = self._receive(limit, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)

    def pump(self, seconds: float) -> None:
        """Take in events for a while."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            try:
                self.events.append(self._receive(limit, "events"))
            except TimeoutError:
                return

    def _receive(self, limit: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium did not answer {what}")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("chromium closed its pipe")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def page(self, width: int = 1440, height: int = 900, dark: bool = False, script: bool = True) -> Page:
        """A new tab of this size and colour scheme."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=scheme)
        if not script:
            page.call("Emulation.setScriptExecutionDisabled", value=True)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command on this tab."""
        return self.browser.call(method, self.session, **params)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of this tab's events of some methods so far."""
        return [
            e["params"] | {"method": e["method"]}
            for e in self.browser.events
            if e.get("sessionId") == self.session and e.get("method") in methods
        ]

    def open(self, url: str, timeout_s: float = 30.0) -> None:
        """Load `url` and wait for its load event."""
        loads = len(self.events("Page.loadEventFired"))
        self.call("Page.navigate", url=url)
        limit = time.monotonic() + timeout_s
        while len(self.events("Page.loadEventFired")) == loads:
            if time.monotonic() > limit:
                raise TimeoutError(f"{url} did not load")
            self.browser.pump(0.1)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "script failed"))
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 15.0) -> None:
        """Wait until a JavaScript expression is true."""
        self.wait_for(lambda: bool(self.run(f"!!({expression})")), timeout_s, expression)

    def wait_for(self, test: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `test` holds."""
        limit = time.monotonic() + timeout_s
        while not test():
            if time.monotonic() > limit:
                raise TimeoutError(f"still not so after {timeout_s} s: {what}")
            self.browser.pump(0.1)

    def press(self, key: str) -> None:
        """One key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def complaints(self) -> list[str]:
        """Everything the browser wrote to the console or logged: errors, warnings, CSP violations, exceptions."""
        events = self.events("Runtime.consoleAPICalled", "Log.entryAdded", "Runtime.exceptionThrown")
        return [json.dumps(e.get("entry") or e.get("exceptionDetails") or e)[:500] for e in events]

    def picture(self, full: bool = True) -> bytes:
        """A PNG of the whole page."""
        params: dict[str, Any] = {"format": "png"}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            params["captureBeyondViewport"] = True
        return base64.b64decode(self.call("Page.captureScreenshot", **params)["data"])

    def close(self) -> None:
        """Close the tab."""
        self.browser.call("Target.closeTarget", targetId=self.target)
