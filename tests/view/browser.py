"""A headless Chromium, driven by its own protocol over a pipe, that can reach nothing but this machine."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.components import require_chromium

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
WAIT_S = 20.0
LEFT = "Inspected target navigated or closed"
"""The error of an expression whose page was left while it was evaluated."""
READY = "document.querySelector('main') && !document.querySelector('[role=status]')"
"""True if the page has the replies to its requests."""


class Browser:
    """One page of a browser. `problems` has the errors, and the requests that a policy or the network refused."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._number = b"", 0
        self.problems: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return dict(reply["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            found = os.read(self._receive, 1 << 20)
            assert found, "the browser has ended"
            self._buffer += found
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(given["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning"):
                self.problems.append(json.dumps(given["args"])[:2000])
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.problems.append(given["entry"]["text"] + " " + given["entry"].get("url", ""))
            case "Network.requestWillBeSent":
                self.requested.append(given["request"]["url"])
        return message

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open an address in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, expression: str, within_s: float = WAIT_S) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + within_s
        while not self._holds(expression):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"never true: {expression}\n{text[:2000]}\n{self.problems}")
            time.sleep(0.05)

    def _holds(self, expression: str) -> bool:
        """Return whether an expression is true; it is not while the page gives way to another."""
        try:
            return bool(self.evaluate(f"Boolean({expression})"))
        except AssertionError as error:
            if LEFT in str(error):
                return False
            raise

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


def texts(browser: Browser, selector: str) -> list[str]:
    """Return the visible text of each element."""
    return list(browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(found => found.innerText.trim())"))


def click(browser: Browser, label: str) -> None:
    """Click on the button of this name."""
    browser.evaluate(f"[...document.querySelectorAll('button')].find(x => x.innerText.trim() == {label!r}).click()")


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Yield a browser that ends with the block. folder: for its profile."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:  # the protocol is on the descriptors 3 and 4, which any of the pipes may have now
        receive = fcntl.fcntl(to_browser[0], fcntl.F_DUPFD_CLOEXEC, 5)
        send = fcntl.fcntl(from_browser[1], fcntl.F_DUPFD_CLOEXEC, 5)
        os.dup2(receive, 3)
        os.dup2(send, 4)

    command = [require_chromium(), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    environment = {**os.environ, "HOME": str(folder)}
    process = subprocess.Popen(
        command,
        preexec_fn=connect,
        close_fds=False,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        process.terminate()
        process.wait(10)
        os.close(to_browser[1])
        os.close(from_browser[0])
