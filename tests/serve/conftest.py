"""Servers and the browser of the chat page's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_support import MODEL, Command, Running, command, serving, wait_until
from page_support import opened

from browser_support import Browser, chromium
from torchwright.serve.engine import ahead
from torchwright.serve.wire.messages import ToEngine


@pytest.fixture(scope="session")
def bundled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Command]]:
    """Start the bundled model's server when it is first asked for, and again when a test has ended it.

    Its key is `secret`. It takes seconds to start: the tests of all outside clients in a pytest process share it.
    """
    folder = tmp_path_factory.mktemp("bundled")
    (folder / "keys").write_text("secret\n")
    words = ("--api-key-file", str(folder / "keys"), "--max-running", "64")
    running: list[Command] = []
    with contextlib.ExitStack() as stack:

        def given() -> Command:
            if not running or running[-1].process.poll() is not None:
                batches = folder / f"batches-{len(running)}"
                running.append(stack.enter_context(command(*words, "--batches", str(batches))))
            return running[-1]

        yield given


@pytest.fixture
def sent(server: Running) -> Iterator[list[ToEngine]]:
    """The messages that the module's server sends its engine during the test."""
    with server.client.recording() as found:
        yield found


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for a device that computes while the host goes on."""
    monkeypatch.setattr(ahead, "is_asynchronous", lambda device: True)


@pytest.fixture
def ahead_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the sequences of each step that were computed ahead."""
    found: list[int] = []
    planned = ahead.StepAhead.planned

    def counted(self: ahead.StepAhead, *args: Any) -> Any:
        early = planned(self, *args)
        found.append(len(early))
        return early

    monkeypatch.setattr(ahead.StepAhead, "planned", counted)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page_server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def page(page_server: Running, browser: Browser) -> Browser:
    """The page of a server without a key, in a tab of its own; a new port, so that nothing is kept from before."""
    page = opened(browser, page_server)
    wait_until(lambda: MODEL in page.run("document.title"))
    return page
