"""A headless Chromium, driven through its debugging pipe: no other package, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.patience import HANG

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = HANG


class Browser:
    """One page of a browser, from `with` to its end."""

    def __enter__(self) -> Browser:
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        from_us, self._writer = os.pipe()
        self._reader, to_us = os.pipe()

        def take_pipes() -> None:
            """Make the pipes descriptors 3 and 4, which may be theirs already, or those of the other ends."""
            pipes = [fcntl.fcntl(one, fcntl.F_DUPFD, 16) for one in (from_us, to_us)]
            for number, pipe in enumerate(pipes, start=3):
                os.dup2(pipe, number)

        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        options += ["--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [PROGRAM, *options, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=take_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._number, self._rest = 0, b""
        self._session = ""
        self.requests: list[str] = []  # addresses that pages asked for
        self.errors: list[str] = []  # what went wrong in scripts, and what the page's policy refused
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._writer)
        os.close(self._reader)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                result: dict[str, Any] = found["result"]
                return result

    def _read(self) -> dict[str, Any]:
        """Return the next message; what it says about requests and errors is noted."""
        while b"\0" not in self._rest:
            part = os.read(self._reader, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        return message

    def open(self, path: Path, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Open a file at a size of the screen, in light or dark."""
        self.requests, self.errors = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def point(self, expression: str, *, click: bool = False) -> None:
        """Move the pointer to the middle of an element, and perhaps click."""
        box = self.value(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({expression}.getBoundingClientRect())")
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def picture(self, path: Path) -> Path:
        """Write what the whole page looks like as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
