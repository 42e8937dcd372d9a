"""A real Chromium, driven over its debugging pipe by the standard library alone.

Nothing here waits without a limit: a call that gets no answer in time raises, and leaving the
context kills whatever was started.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIRED = "TENSORTAP_REQUIRE_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root, where Chromium has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    # No network: no name resolves, and whatever is asked for goes to a port that nobody serves.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--remote-debugging-pipe",
)


# What is wider than the room it has: it would be cut, or push the page apart.
TOO_WIDE = """[...document.querySelectorAll('.inside, .inside *')]
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth)
  .map(e => e.outerHTML.slice(0, 200))"""

# Text against the nearest painted background behind it, as WCAG 2 counts it.
POOR_CONTRAST = """(() => {
  const parse = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    return parts.length < 4 ? [...parts, 1] : parts;
  };
  const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => [.2126, .7152, .0722].reduce((s, w, i) => s + w * linear(c[i] / 255), 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] > .9) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || e.closest('svg')) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [parse(getComputedStyle(e).color), behind(e)].map(light);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push([e.textContent.slice(0, 40), ratio.toFixed(2)]);
  }
  return poor;
})()"""


class BrowserError(Exception):
    """The browser did not do what it was asked, or not in time."""


def find() -> str | None:
    """Where Chromium is; None where there is none."""
    named = os.environ.get("TENSORTAP_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One tab, with all that it asked for and all that it complained about."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def heard(self, method: str, told: dict[str, Any]) -> None:
        """Take note of an event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            thrown = told["exceptionDetails"]
            said = thrown.get("exception", {}).get("description") or thrown.get("text")
            self.complaints.append(f"exception: {said}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            said = [str(item.get("value", item.get("description"))) for item in told["args"]]
            self.complaints.append(f"console.{told['type']}: {' '.join(said)}")
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log {told['entry']['level']}: {told['entry']['text']}")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and whether the person likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Open a file and wait until it is all there."""
        failed = self.call("Page.navigate", url=path.resolve().as_uri()).get("errorText")
        if failed:
            raise BrowserError(f"{path} did not open: {failed}")
        self.wait("document.readyState === 'complete'")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that layout and observers have had their turn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            said = thrown.get("exception", {}).get("description", thrown["text"])
            raise BrowserError(f"{expression}\n{said}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(expression):
            if time.monotonic() > end:
                raise BrowserError(f"Still not true after {seconds} s: {expression}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element."""
        x, y = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)
        self.settle()

    def hover(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element is on the screen, after scrolling to it."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " if (!e) return null; e.scrollIntoView({block: 'center', inline: 'center'});"
            " const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        if place is None:
            raise BrowserError(f"There is no {selector} in the page")
        return place[0], place[1]

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)
        self.settle()

    def press(self, key: str, code: int) -> None:
        """Press and release one key, by its name and Windows key code."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            said = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **said,
            )
        self.settle()

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save what the page looks like as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


class Chromium:
    """A browser process, killed at the end whatever happened."""

    def __init__(self, executable: str, folder: Path, seconds: float = 30.0) -> None:
        self._seconds = seconds
        self._next = 0
        self._buffer = b""
        self._pages: dict[str, Page] = {}
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Above 3 and 4, so that putting them there overwrites neither.
        high_in = fcntl.fcntl(theirs_in, fcntl.F_DUPFD_CLOEXEC, 20)
        high_out = fcntl.fcntl(theirs_out, fcntl.F_DUPFD_CLOEXEC, 20)
        log = os.open(folder / "chromium.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._log = folder / "chromium.log"
        try:
            self._pid = os.posix_spawn(
                executable,
                [executable, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                {**os.environ, "HOME": str(folder)},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, high_in, 3),
                    (os.POSIX_SPAWN_DUP2, high_out, 4),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setpgroup=0,
            )
        finally:
            for end in (theirs_in, theirs_out, high_in, high_out, log):
                os.close(end)

    def page(self) -> Page:
        """A new tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        page = self._pages[session] = Page(self, session)
        return page

    def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Ask for something and wait for the answer; events on the way go to their pages."""
        self._next += 1
        asked = {"id": self._next, "method": method, "params": parameters or {}}
        if session is not None:
            asked["sessionId"] = session
        end = time.monotonic() + self._seconds
        self._send(json.dumps(asked).encode() + b"\0")
        while True:
            told = self._receive(method, end)
            if told.get("id") == self._next:
                if "error" in told:
                    raise BrowserError(f"{method}: {told['error']['message']}")
                result: dict[str, Any] = told["result"]
                return result
            page = self._pages.get(told.get("sessionId", ""))
            if page is not None:
                page.heard(told["method"], told["params"])

    def close(self) -> None:
        """End the browser and all that it started."""
        os.close(self._out)
        os.close(self._in)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                self._pid = -1
                break
            time.sleep(0.02)
        if self._pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _send(self, message: bytes) -> None:
        try:
            while message:
                message = message[os.write(self._out, message) :]
        except BrokenPipeError:
            raise BrowserError(f"Chromium is gone. It said: {self._said()}") from None

    def _receive(self, method: str, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise BrowserError(f"No answer to {method} in {self._seconds} s: {self._said()}")
            got = os.read(self._in, 1 << 16)
            if not got:
                raise BrowserError(f"Chromium is gone. It said: {self._said()}")
            self._buffer += got
        message, self._buffer = self._buffer.split(b"\0", 1)
        told: dict[str, Any] = json.loads(message)
        return told

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]


@contextlib.contextmanager
def browser(executable: str) -> Iterator[Chromium]:
    """A browser with a profile of its own, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tensortap-chromium-"))
    running = Chromium(executable, folder)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)
