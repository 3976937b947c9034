"""Headless Chromium, driven over its debugging pipe; messages are JSON, each ended by a zero byte."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
DESKTOP, PHONE = (1280, 800), (390, 844)


class Browser:
    """One tab of a headless Chromium. Commands go in on descriptor 3, results come out on descriptor 4."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        words = [
            CHROMIUM,
            *FLAGS.split(),
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *words],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._buffer = b""
        self._id = 0
        self._target = self._session = ""
        self.console: list[str] = []
        """Errors and warnings of pages, refusals of their security policies among them."""

    def open(self) -> None:
        """Open a new tab, to which commands go from then on, and close the last one."""
        self._session, last = "", self._target
        self._target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.ask("Target.closeTarget", targetId=last)
        self._session = self.ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of one command."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._id:
            self._note(found)
        assert "result" in found, found
        return found["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, or of its promise."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def reload(self) -> None:
        """Load the page again, and return when the old one is gone."""
        self.run("window.old = true; 0")
        self.ask("Page.reload")
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # no page at all for a moment
                if self.run("!window.old && document.readyState === 'complete'"):
                    return
            time.sleep(0.02)
        raise AssertionError("the page did not load again")

    def text(self, selector: str) -> str:
        """Return the text of the first element, empty where there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def count(self, selector: str) -> int:
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click(); 0")

    def type(self, text: str) -> None:
        """Insert a text where the focus is, as a keyboard or an input method does."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key by its name."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        event: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 * shift,
        }
        event |= {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **event)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def show(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """Set the window's size, and the colors that its user prefers."""
        width, height = size
        phone = size == PHONE
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def _note(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{found['entry']['text']} ({found['entry'].get('url', '')})")
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(
                json.dumps(found["exceptionDetails"].get("exception", {}).get("description", ""))
            )

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with one tab, ended with the block; the test is skipped where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")
    browser = Browser(profile)
    try:
        browser.open()
        yield browser
    finally:
        browser.close()
