"""Open WebUI, from PyPI in an environment of its own, over the served bundled model: sign in, chat, a streamed answer.

`OPEN_WEBUI` names its command; `.ci/nightly webui` installs it, because it pins other versions of shared packages.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_support import MODEL, command, wait_until

from browser_support import Browser, chromium

OPEN_WEBUI = os.environ.get("OPEN_WEBUI") or shutil.which("open-webui")
EMAIL, PASSWORD = "admin@example.com", "a password of the test"
STARTS_WITHIN = 600.0
"""Seconds; it imports some two hundred packages, on a machine that others use."""
WATCH = """(() => {
    window.lengths = new Set();
    const look = () => {
        const answers = document.querySelectorAll("#response-content-container");
        const length = [...answers].at(-1)?.textContent.trim().length;
        if (length) window.lengths.add(length);
    };
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true });
})()"""
"""Collects the lengths that the newest answer has had."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def open_webui(tmp_path: Path) -> Iterator[str]:
    """The address of an Open WebUI in front of the real server, with one administrator, and nothing to download."""
    if OPEN_WEBUI is None:
        pytest.skip("Open WebUI is not here: OPEN_WEBUI=COMMAND names it (`.ci/nightly webui` installs it)")
    with command("--api-key", "secret") as served, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        data = tmp_path / "data"
        data.mkdir()
        settings = {
            "DATA_DIR": str(data),
            "OPENAI_API_BASE_URL": f"{served.url}/v1",
            "OPENAI_API_KEY": "secret",
            "DEFAULT_MODELS": MODEL,
            "WEBUI_ADMIN_EMAIL": EMAIL,
            "WEBUI_ADMIN_PASSWORD": PASSWORD,
            "WEBUI_SECRET_KEY": "a secret of the test",
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
            "ENABLE_VERSION_UPDATE_CHECK": "false",
            "RAG_EMBEDDING_ENGINE": "openai",  # or a sentence encoder is loaded at the start
            # Without its built-in tools, whose descriptions take nine times the bundled model's context.
            "DEFAULT_MODEL_PARAMS": '{"function_calling": "legacy"}',
            "ENABLE_OLLAMA_API": "false",
            "ENABLE_TITLE_GENERATION": "false",
            "ENABLE_TAGS_GENERATION": "false",
            "ENABLE_FOLLOW_UP_GENERATION": "false",
            "ANONYMIZED_TELEMETRY": "false",
            "DO_NOT_TRACK": "true",
            "SCARF_NO_ANALYTICS": "true",
        }
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [OPEN_WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)],
                env=env | settings, cwd=tmp_path, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until(lambda: _is_up(url, process, tmp_path / "log"), STARTS_WITHIN)
                yield url
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(30)


def _is_up(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    time.sleep(0.5)
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def there(browser: Browser, selector: str, seconds: float = 120.0) -> None:
    """Wait for an element that can be seen."""
    found = f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false"
    wait_until(lambda: browser.run(found), seconds)


def fill(browser: Browser, selector: str, text: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).focus(); 0")
    browser.type(text)


def dismiss(browser: Browser) -> None:
    """Close the notes on the release, which an administrator sees first."""
    browser.run(
        "[...document.querySelectorAll('button')].find(b => b.textContent.trim() === \"Okay, Let's Go!\")?.click(); 0"
    )


def test_open_webui_signs_in_and_streams_an_answer(open_webui: str, tmp_path: Path) -> None:
    with chromium(tmp_path / "profile") as browser:
        try:
            browser.show((1280, 800))
            browser.ask("Page.navigate", url=f"{open_webui}/auth")
            there(browser, "input[name=email]")
            fill(browser, "input[name=email]", EMAIL)
            fill(browser, "input[type=password]", PASSWORD)
            browser.press("Enter")
            there(browser, "#chat-input")
            time.sleep(2)  # for the release notes, which come after the page
            dismiss(browser)
            wait_until(lambda: MODEL in browser.text("body"), 60)
            browser.run(WATCH)
            fill(browser, "#chat-input", "Good morning")
            there(browser, "#send-message-button:not(:disabled)")
            browser.click("#send-message-button")
            there(browser, "#response-content-container")
            wait_until(lambda: browser.run("window.lengths.size") >= 3, 120)
            assert "Good morning" in browser.text("body")
        finally:
            browser.screenshot(tmp_path / "last.png")
            if kept := os.environ.get("OPEN_WEBUI_PICTURE"):
                shutil.copy(tmp_path / "last.png", kept)
