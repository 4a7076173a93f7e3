"""A headless Chromium, spoken to through a pair of pipes: no driver, no package, no port.

The protocol is the one of the developer tools: JSON with a zero byte behind each message, commands
in through descriptor 3, answers and events out through descriptor 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 30.0  # seconds for an answer; a busy machine is slow to start a browser
OPTIONS = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)


def binary() -> str | None:
    """The browser of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One process. Close it, or use it in a `with`."""

    def __init__(self, program: str) -> None:
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with it
        command = [program, *OPTIONS, *sandbox, f"--user-data-dir={self.home.name}", "about:blank"]
        # The shell puts the pipes where the browser looks for them.
        script = f'exec "$@" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self.events: list[dict[str, Any]] = []
        self._number, self._rest = 0, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)
        self.home.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)
        raise TimeoutError(method)

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + LIMIT
        while True:
            whole, zero, rest = self._rest.partition(b"\0")
            if zero:
                self._rest = rest
                yield json.loads(whole)
                continue
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise TimeoutError("the browser has ended")
            self._rest += part

    def page(self, width: int = 1280, height: int = 900) -> Page:
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        return Page(self, target, attached["sessionId"], width, height)


class Page:
    """One tab of a given size."""

    def __init__(
        self, browser: Browser, target: str, session: str, width: int, height: int
    ) -> None:
        self.browser, self.target, self.session = browser, target, session
        self._scheme = "light"
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this tab."""
        return self.browser.call(method, self.session, **params)

    def close(self) -> None:
        """Take the tab away."""
        self.browser.call("Target.closeTarget", targetId=self.target)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """The size of the window in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        self._scheme = name
        self.media("")

    def media(self, name: str) -> None:
        """Show the page as on another medium, such as print; empty: as on screen."""
        preferences = {"color-scheme": self._scheme, "reduced-motion": "reduce"}
        features = [{"name": f"prefers-{n}", "value": v} for n, v in preferences.items()]
        self.call("Emulation.setEmulatedMedia", media=name, features=features)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.browser.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until(lambda: self.run("document.readyState") == "complete", "the page to load")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, true: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.02)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element is, scrolled into view."""
        found = self.run(
            f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center", behavior: "instant"}});
            const b = e.getBoundingClientRect();
            return [b.left + b.width / 2, b.top + b.height / 2]; }})()"""
        )
        return found[0], found[1]

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click on it with the mouse."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector: str) -> None:
        """Touch it with a finger."""
        x, y = self.middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, text: str = "") -> None:
        """A key, to what has the focus."""
        codes = {"Enter": 13, "ArrowUp": 38, "ArrowDown": 40, "ArrowRight": 39}
        told = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def type(self, text: str) -> None:
        """Text, to what has the focus."""
        self.call("Input.insertText", text=text)

    def complaints(self) -> list[str]:
        """What the page has put on the console, and every exception."""
        self.run("0")  # whatever is on its way arrives before the answer
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self._events() if e.get("method") in names]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, itself among them."""
        self.run("0")
        sent = (e for e in self._events() if e.get("method") == "Network.requestWillBeSent")
        return [e["params"]["request"]["url"] for e in sent]

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in self.browser.events if e.get("sessionId") == self.session]

    def shot(self, path: Path, whole: bool = True) -> None:
        """The page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path: Path) -> None:
        """The page on paper (A4)."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": False}
        found = self.call("Page.printToPDF", printBackground=True, **size)
        path.write_bytes(base64.b64decode(found["data"]))
