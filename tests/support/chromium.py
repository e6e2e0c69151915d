"""A headless Chromium, told what to do through its debugging pipe: the DevTools protocol, one JSON
document after another."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = 60
"""Seconds for any answer."""
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
]


class Chromium:
    """A running browser, without a page so far."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, (
            "no Chromium: `make browser` installs it on Debian; elsewhere install the package "
            "chromium"
        )
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = [
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._buffer = b""
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **params):
        """Send a command; its result."""
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Wait for an event."""
        deadline = time.monotonic() + TIMEOUT
        while all(event.get("method") != method for event in self.events):
            self.events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def close(self) -> None:
        """End it, and everything it has started."""
        os.close(self._out)
        os.close(self._in)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT)
        self._profile.cleanup()

    @contextmanager
    def page(self, path: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False):
        """A file, or a url, opened in a window of that size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if dark else "light"
        self.call(
            "Emulation.setEmulatedMedia",
            session,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call(
            "Page.navigate", session, url=path if isinstance(path, str) else path.resolve().as_uri()
        )
        self.wait_for("Page.loadEventFired")
        page = Page(self, session)
        # The event may be that of the empty page.
        page.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)


class Page:
    """An open page."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def run(self, script: str):
        """The value of an expression."""
        answer = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=script,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true, also on the page that follows."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            with suppress(AssertionError):  # between two pages there is none to run it
                if self.run(f"Boolean({condition})"):
                    return
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, pressed and released."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}.get(key, 0)
            self._browser.call(
                "Input.dispatchKeyEvent",
                self._session,
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self._browser.call("Input.dispatchMouseEvent", self._session, type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._browser.call("Input.insertText", self._session, text=text)

    def screenshot(self, path: Path) -> None:
        """The page as a PNG, but for what is far below."""
        size = self._browser.call("Page.getLayoutMetrics", self._session)["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], 8000),
            "scale": 1,
        }
        shot = self._browser.call(
            "Page.captureScreenshot", self._session, captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[dict]:
        """Errors of scripts, what was written to the console, and what the browser says of the
        page."""
        self.run("1")  # everything before it has been told then
        wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self._browser.events if event.get("method") in wrong]

    @property
    def requests(self) -> list[str]:
        """Urls that were asked for."""
        sent = (
            event["params"]
            for event in self._browser.events
            if event.get("method") == "Network.requestWillBeSent"
        )
        return [params["request"]["url"] for params in sent]


def contrast(first, second):
    """WCAG's ratio of two colours, as getComputedStyle writes them."""

    def luminance(color):
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def check_page(page, url):
    """Check the rules that every page of a service must keep."""
    assert page.complaints == []
    assert {urlsplit(one).netloc for one in page.requests} == {urlsplit(url).netloc}
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert (
        page.run("document.querySelectorAll('img, iframe, object, embed, [style], style').length")
        == 0
    )
    assert page.run(
        "[...document.scripts].every((one) => one.src || one.type === 'application/json')"
    )
    assert page.run(
        "[...document.querySelectorAll('*')].every((one) => [...one.attributes].every((a) => "
        "!a.name.startsWith('on')))"
    )
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.querySelectorAll('h1').length") == 1
    assert page.run("document.querySelectorAll('main').length") == 1
    ids = page.run("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    assert page.run(
        "[...document.querySelectorAll('input:not([type=hidden]), select, "
        "textarea')].every((one) => one.labels.length === 1)"
    )
    assert page.run(
        "[...document.querySelectorAll('svg:not([aria-hidden])')].every((one) => "
        "one.getAttribute('aria-label')?.length > 20)"
    )
    assert page.run(
        "[...document.querySelectorAll('a')].every((one) => one.textContent.trim() || "
        "one.getAttribute('aria-label'))"
    )
    # Even what got in would not be run.
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    assert page.run(f"document.body.append({script}); window.ran ?? 0") == 0
