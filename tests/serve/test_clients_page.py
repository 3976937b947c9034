"""The web page in headless Chromium, driven over its debugging pipe: a chat, and the figures that change with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_support import MODEL, Running, serving, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page of a headless Chromium; messages are JSON, ended by a zero byte, on the descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        words = [
            CHROMIUM,
            *flags.split(),
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
        self._session = ""

    def open(self) -> None:
        """A page of its own."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._id:
            pass
        assert "result" in found, found
        return found["result"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")
    browser = Browser(tmp_path)
    try:
        browser.open()
        yield browser
    finally:
        browser.close()


@pytest.fixture
def server() -> Iterator[Running]:
    with serving(keys=["secret"]) as running:
        yield running


def text(browser: Browser, selector: str) -> str:
    return browser.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")


def test_a_chat_in_the_browser(server: Running, browser: Browser) -> None:
    browser.ask("Page.navigate", url=server.url)
    wait_until(lambda: text(browser, "#model") == MODEL)
    assert text(browser, "#state") == "ready"

    # A key is asked for once it is missing; the figures come with it.
    wait_until(lambda: browser.run("!document.querySelector('#key-row').hidden"))
    browser.run("document.querySelector('#key').value = 'secret'; 0")
    browser.run("document.querySelector('#limit').value = 12; 0")
    browser.run("document.querySelector('#text').value = 'Hello <b>there</b> 🥊'; 0")
    browser.run("document.querySelector('#form').requestSubmit(); 0")
    wait_until(lambda: "12 new" in text(browser, ".assistant .foot"))
    assert text(browser, ".user") == "Hello <b>there</b> 🥊"
    assert text(browser, ".assistant span").startswith("User: Hello <b>there")
    assert browser.run("document.querySelectorAll('.message b').length") == 0
    assert text(browser, ".assistant .foot").startswith("length; ")
    wait_until(lambda: text(browser, "#batch") == "0 / 0" and text(browser, "#kv") == "0.0 %")

    # What the server refuses is shown, and the message can be sent again.
    browser.run("document.querySelector('#limit').value = 100000; 0")
    browser.run("document.querySelector('#text').value = 'more'; 0")
    browser.run("document.querySelector('#form').requestSubmit(); 0")
    wait_until(lambda: "too many" in text(browser, ".fault span"))
    assert browser.run("messages.length") == 2
    assert browser.run("document.querySelector('#send').disabled") is False
    browser.run("document.querySelector('#clear').click(); 0")
    assert browser.run("document.querySelectorAll('.message').length + messages.length") == 0
