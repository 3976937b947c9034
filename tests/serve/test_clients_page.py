"""The chat page in headless Chromium: its files, conversations, keys, and what it says of models and faults."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from fake_engine import CONTEXT
from http_support import MODEL, serving, wait_until
from page_support import again, answered, limit, opened, say

from browser_support import Browser


def test_the_pages_files_have_types_and_digests_and_need_no_key() -> None:
    with serving(keys=["secret"]) as running, httpx.Client(base_url=running.url) as http:
        names = re.findall(r'"(page/[\w.]+)"', http.get("/").text)
        scripts = [name for name in names if name.endswith(".js")]
        while scripts:  # what the scripts import
            for name in re.findall(r'from "\./([\w.]+)"', http.get(scripts.pop()).text):
                if f"page/{name}" not in names:
                    names.append(f"page/{name}")
                    scripts.append(f"page/{name}")
        types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert len(names) > 10
        for name in names:
            found = http.get(f"/{name}")
            assert found.status_code == 200
            assert found.headers["content-type"].partition(";")[0] == types[name.rpartition(".")[2]]
            assert found.headers["cache-control"] == "no-cache"
            again = http.get(f"/{name}", headers={"if-none-match": f'"other", W/{found.headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
        assert "MIT" in http.get("/page/marked.license.txt").text
        assert "https://" not in http.get("/").text
        for name in ("none.js", "..%2fapp.py", "%2e%2e/app.py"):
            assert http.get(f"/page/{name}").status_code == 404
        policy = http.get("/").headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy


@pytest.mark.slow
def test_what_a_model_takes_is_in_its_card() -> None:
    for kind, path, takes in (
        ("decoder", "/v1/chat/completions", "text"),
        ("encoder", "/v1/embeddings", "text"),
        ("recognizer", "/v1/audio/transcriptions", "audio"),
    ):
        with serving(kind=kind) as running, httpx.Client(base_url=running.url) as http:
            (card,) = http.get("/v1/models").json()["data"]
            assert (card["endpoints"][0], card["input_modalities"]) == (path, [takes])
            assert set(card["endpoints"]) <= set(http.get("/openapi.json").json()["paths"])


def test_a_conversation_by_keyboard_is_kept_and_can_be_edited(page: Browser) -> None:
    limit(page, 12)
    assert page.text("#batch") == "0 / 0"
    say(page, "Hello <b>there</b> 🥊")
    answered(page, 1)
    assert page.text(".user .body") == "Hello <b>there</b> 🥊"
    assert page.text(".assistant .body").startswith("User: Hello <b>there")
    assert page.count(".message b") == 0
    assert page.text(".assistant .end") == "Cut off: it has as many tokens as it may."
    assert page.text(".note span").startswith("12 tokens, ")

    # Two lines: Shift+Enter does not send.
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    page.press("Enter")
    answered(page, 2)
    assert page.run("document.querySelectorAll('.user .body')[1].textContent") == "one\ntwo"

    # Regenerate replaces the last answer; the roles still alternate for the next question.
    # Deleted while it is being written, it stays deleted; brought back, it is whole. The page itself waits for the
    # answer's first words: on a busy machine the answer is over before a question from here comes through.
    page.run("""new Promise((done, late) => {
        new MutationObserver((_, observer) => {
            if (!document.querySelector(".growing")) return;
            observer.disconnect();
            document.querySelector("#list [aria-current] ~ [title=Delete]").click();
            done(0);
        }).observe(document.body, { subtree: true, childList: true, attributes: true });
        setTimeout(late, 20000);
        [...document.querySelectorAll(".acts button")].find(b => b.textContent === "Regenerate").click();
    })""")
    wait_until(lambda: page.count("#list li") == 0)
    page.reload()
    wait_until(lambda: MODEL in page.run("document.title"))
    assert page.count("#list li") == 0


def test_a_key_is_asked_for_and_remembered(browser: Browser) -> None:
    with serving(keys=["secret"]) as server:
        page = opened(browser, server)
        wait_until(lambda: "asks for an API key" in page.text("#fault"))
        for given, then in (("日本", "no key has"), ("wrong", "does not know"), ("secret", "")):
            page.run("document.querySelector('#fault button')?.click(); 0")
            wait_until(lambda: page.run("document.activeElement.name === 'key'"))
            page.run("document.activeElement.value = ''; 0")
            page.type(given)
            page.press("Enter")
            wait_until(lambda then=then: then in page.text("#fault"))
        wait_until(lambda: page.run("document.querySelector('#fault').hidden"))
        limited = json.dumps({"limit": "3", "key": "secret"})
        page.run(f"localStorage.setItem('torchwright.settings', {json.dumps(limited)}); 0")
        again(page)
        wait_until(lambda: page.text("#batch") == "0 / 0" and page.text("#hits") == "–")
        say(page, "hello")
        answered(page, 1)


def test_old_messages_are_left_out_when_the_context_is_full(page: Browser) -> None:
    long = "word " * (CONTEXT // 3)
    limit(page, CONTEXT // 4)
    say(page, long)
    answered(page, 1)
    say(page, long)
    wait_until(lambda: "longer than the model can read" in page.text("#fault"))
    assert page.text("#fault details").endswith("too many")
    page.click("#fault .strong")
    answered(page, 2)
    assert page.count(".left-out") == 2
    assert "no longer reads" in page.text(".divider")
    page.click(".divider button")
    wait_until(lambda: page.count(".left-out") == 0)
    page.click("#new")
    say(page, "word " * CONTEXT)
    wait_until(lambda: page.text("#fault").startswith("The message is longer than the model can read."))
    assert page.count("#fault .strong") == 0


def test_a_server_that_is_gone_is_told_in_words_and_tried_again(page: Browser) -> None:
    limit(page, 3)
    page.ask("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.ask("Network.emulateNetworkConditions", offline=True, **offline)
    say(page, "hello")
    wait_until(lambda: page.text("#fault p") == "The server does not answer. Is it still running?")
    assert page.text("#state") in ("ready", "the server does not answer")
    page.ask("Network.emulateNetworkConditions", offline=False, **offline)
    page.run("[...document.querySelectorAll('#fault button')].at(-1).click(); 0")
    answered(page, 1)
    assert page.count(".user") == 1
    assert page.run("document.querySelector('#fault').hidden")


def test_enter_that_ends_a_composition_does_not_send(page: Browser) -> None:
    page.run("""(() => { const box = document.querySelector('#text'); box.value = 'にほん';
        for (const more of [{ isComposing: true }, { keyCode: 229 }])
            box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true, ...more })); })()""")
    assert page.count(".message") == 0
    assert page.run("document.querySelector('#text').value") == "にほん"


def test_reasoning_is_folded(browser: Browser) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    with serving(template=template) as server:
        page = opened(browser, server)
        limit(page, 200)
        say(page, "I think</think>So *it* is. ")
        answered(page, 1)
        assert page.text(".reasoning > div").startswith("think")
        assert page.run("document.querySelector('.reasoning').open") is False
        assert "So it is." in page.text(".assistant .body")


def test_a_model_that_writes_nothing_says_so(browser: Browser) -> None:
    with serving(kind="encoder") as server:
        page = opened(browser, server)
        wait_until(lambda: page.text("#hello") == "This model does not write.")
        assert page.run("document.querySelector('#form').hidden")
