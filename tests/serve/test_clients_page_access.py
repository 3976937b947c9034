"""The chat page in headless Chromium: reached by keyboard, as wide as the window, accessible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from http_support import wait_until
from page_support import again

from browser_support import DESKTOP, PHONE, Browser

MEASURE = "[...document.querySelectorAll('body *')].filter(e => !e.closest('pre, .table, #list, .hidden-text, .skip'))"
"""Elements that scroll by themselves, and those out of sight, may be wider than the window."""


def axe() -> str:
    """The source of axe-core, an npm package that checks pages for accessibility: `AXE_CORE` names its folder."""
    path = Path(os.environ.get("AXE_CORE", "node_modules/axe-core")) / "axe.min.js"
    if not path.is_file():
        pytest.skip(
            "axe-core is not here: `npm install axe-core`, or AXE_CORE=FOLDER (`.ci/nightly webui` has it)"
        )
    return path.read_text("utf-8")


def scene(page: Browser) -> None:
    """A conversation with everything that the page can show."""
    content = "# T\n\n- [x] done\n\n```python\nx = 1\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n> [q](https://example.com)\n"
    conversation = {
        "id": "scene", "title": "A scene", "updated": 1, "system": "", "from": 2,
        "messages": [
            {"role": "user", "content": "old"},
            {"role": "assistant", "content": "older"},
            {"role": "user", "content": "a question of some length " * 9},
            {"role": "assistant", "content": content, "reasoning": "so", "thought": 2, "cut": True, "note": "1 token"},
        ],
    }  # fmt: skip
    page.run(f"import('/page/store.js').then(store => store.save({json.dumps(conversation)}))")
    page.run("location.hash = 'scene'; 0")
    wait_until(lambda: page.count(".table") == 1)
    page.run("import('/page/thread.js').then(thread => thread.fault('A fault.', 'Its detail.'))")


def test_everything_is_reached_by_tab(page: Browser) -> None:
    scene(page)
    page.run("document.activeElement.blur(); 0")
    wanted = (
        "[...document.querySelectorAll('button, a[href], textarea, input, summary')].filter(e => e.checkVisibility()"
        " && !e.disabled && !e.closest('dialog')).length"
    )
    page.run("window.reached = new Set(); 0")
    for _ in range(60):
        page.press("Tab")
        page.run("window.reached.add(document.activeElement); 0")
    controls = (
        "[...window.reached].filter(e => e.matches('button, a[href], textarea, input, summary')).length"
    )
    assert page.run(controls) == page.run(wanted) > 15
    assert page.run("[...window.reached].some(e => e.matches('#chat, pre'))")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_window(page: Browser, size: tuple[int, int]) -> None:
    page.show(size)
    again(page)
    scene(page)
    wide = page.run(
        MEASURE + f".filter(e => e.getBoundingClientRect().right > {size[0]} + 1).map(e => e.outerHTML)"
    )
    assert wide == []
    assert page.run("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(page: Browser, size: tuple[int, int], dark: bool) -> None:
    source = axe()
    page.show(size, dark=dark)
    again(page)
    page.run(source + "\n;0")
    found = (
        "axe.run().then(all => all.violations.filter(({impact}) => ['serious', 'critical'].includes(impact))"
        ".map(({id, nodes}) => `${id}: ${nodes.map(n => n.target).join(' ')}`))"
    )
    assert page.run(found) == []
    scene(page)
    assert page.run(found) == []
    if size == PHONE:
        page.click("#side-toggle")
        assert page.run(found) == []
        page.click("#side-close")
    page.click("#open-settings")
    assert page.run(found) == []
