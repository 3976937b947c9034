"""Servers and the browser of the chat page's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_support import MODEL, Running, serving, wait_until
from page_support import opened

from browser_support import Browser, chromium


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
