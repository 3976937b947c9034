"""The chat page in headless Chromium: what its tests do with it."""

from __future__ import annotations

import json

from http_support import MODEL, Running, wait_until

from browser_support import DESKTOP, Browser

TALKED = "document.querySelectorAll('.assistant .acts').length"


def opened(browser: Browser, server: Running) -> Browser:
    browser.open()
    browser.console.clear()
    browser.show(DESKTOP)
    browser.ask("Page.navigate", url=server.url)
    wait_until(lambda: browser.text("#model") == MODEL)
    return browser


def say(page: Browser, text: str) -> None:
    """Write a message with the keyboard and send it."""
    page.run("document.querySelector('#text').focus(); 0")
    page.type(text)
    page.press("Enter")


def answered(page: Browser, count: int) -> None:
    """Wait until so many answers are complete."""
    wait_until(
        lambda: page.count(".assistant .acts") == count and page.run("document.querySelector('#stop').hidden")
    )


def limit(page: Browser, tokens: int) -> None:
    """Let answers have so many tokens: the fake engine never ends one by itself."""
    kept = json.dumps({"limit": str(tokens)})
    page.run(f"localStorage.setItem('torchwright.settings', {json.dumps(kept)}); 0")
    again(page)


def again(page: Browser) -> None:
    """Reload the page, and wait until it knows the model."""
    page.reload()
    wait_until(lambda: MODEL in page.run("document.title"))


def slow(page: Browser) -> None:
    """Let bytes come slowly: the fake engine writes its longest answer in less than a second."""
    page.ask("Network.enable")
    page.ask(
        "Network.emulateNetworkConditions",
        offline=False, latency=0, downloadThroughput=30_000, uploadThroughput=-1,
    )  # fmt: skip


def draw(page: Browser, *sources: str) -> str:
    """Return the HTML of a text as an answer, drawn after each of its beginnings."""
    return page.run(f"""(async () => {{
        const {{ render }} = await import("/page/markdown.js");
        const target = document.createElement("div");
        for (const source of {json.dumps(sources)}) render(target, source);
        return target.innerHTML; }})()""")
