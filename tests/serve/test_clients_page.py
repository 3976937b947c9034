"""The chat page in headless Chromium: conversations, Markdown of an untrusted model, what the browser keeps, errors."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import CONTEXT
from http_support import MODEL, Running, serving, wait_until
from picture_support import picture, write_folder

from browser_support import DESKTOP, PHONE, Browser, chromium
from torchwright.serve.http import webpage
from torchwright.serve.limits import INPUT_PICTURES, INPUT_VIDEO_BYTES, INPUT_VIDEOS, MIB
from torchwright.serve.wire.client import EngineClient
from torchwright.serve.wire.messages import Submit

TALKED = "document.querySelectorAll('.assistant .acts').length"
MEASURE = "[...document.querySelectorAll('body *')].filter(e => !e.closest('pre, .table, #list, .hidden-text, .skip'))"
"""Elements that scroll by themselves, and those out of sight, may be wider than the window."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def page(server: Running, browser: Browser) -> Browser:
    """The page of a server without a key, in a tab of its own; a new port, so that nothing is kept from before."""
    page = opened(browser, server)
    wait_until(lambda: MODEL in page.run("document.title"))
    return page


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


def test_a_server_that_is_gone_is_told_in_words_and_tried_again(server: Running, page: Browser) -> None:
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


HOSTILE = [
    ("<img src=x onerror=alert(1)>", "<p", "<img"),
    ("a <script>alert(1)</script> b", "&lt;script&gt;", "<script"),
    ("<svg onload=alert(1)>\n<p>x", "&lt;svg", "<svg"),
    ("[x](javascript:alert(1))", "<span>x</span>", "href"),
    ("[x](JaVa&#115;cript:alert(1))", "<span>x</span>", "href"),
    ("[x](data:text/html,<script>)", "x", "href"),
    ("[x](//evil.example/a)", "<span>x</span>", "href"),
    ("<javascript:alert(1)>", "javascript", "href"),
    ("![cat](https://example.com/cat.png)", "Picture: cat</a>", "<img"),
    ('[x](https://example.com/" onclick="alert(1)")', "x", "<[^>]* onclick"),
    ("```<img>\n</code><img src=x>\n```", "&lt;/code&gt;&lt;img", "<img"),
    ("> " * 5000 + "deep", "deep", "<script"),
]


def test_a_hostile_answer_stays_text(page: Browser) -> None:
    for source, shown, never in HOSTILE:
        html = draw(page, source)
        assert shown in html, source
        assert not re.search(never, html), source
    safe = draw(page, "[x](https://example.com/a?b=1&amp;c=2) <me@example.com>")
    assert 'href="https://example.com/a?b=1&amp;c=2"' in safe
    assert 'href="mailto:me@example.com"' in safe
    assert safe.count('rel="noopener noreferrer nofollow"') == 2
    # Should a node ever be made from HTML after all, the page's policy refuses it.
    caught = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return '' } catch (e) { return e.name } })()"
    )
    assert page.run(caught) == "TypeError"


def test_markdown_is_drawn_as_it_grows(page: Browser) -> None:
    source = (
        "# Title\n\na *b* **c** `d<br>` ~~e~~ 1 < 2 &lt;tag&gt; &amp;amp; x<br>y\n\n"
        "```python\nif a < b:\n    pass\n```\n\n"
        "1. one\n   - two\n2. three\n\n- [x] done\n\n| a | b |\n|:-:|--:|\n| 1 | <br> |\n\n> quoted\n\n---\n"
    )
    whole = draw(page, source)
    assert draw(page, *(source[:end] for end in range(0, len(source), 3)), source) == whole
    for part in (
        "<h3>Title</h3>",
        "<em>b</em> <strong>c</strong> <code>d&lt;br&gt;</code> <del>e</del> 1 &lt; 2 &lt;tag&gt; &amp;amp; x<br>y",
        "<span>python</span>",
        "<code>if a &lt; b:\n    pass</code>",
        "<li>one<ul><li>two</li></ul></li>",
        '<li class="task"><input type="checkbox" disabled="" aria-label="done">',
        '<th class="align-center">a</th>',
        "<blockquote><p>quoted</p></blockquote><hr>",
    ):
        assert part in re.sub(r' class=""| checked=""', "", whole), part


PIECES = (
    "- a\n", "  b\n", "\n", "\n\n", "```\n", "> q\n", "# h\n", "| a |\n", "|--|\n", "words\n", "---\n", "1. x\n",
    "    deep\n", "**b", "`c", "<p>\n", "===\n", "\t- t\n", "* * *\n", "\r\n",
)  # fmt: skip


def test_a_grown_answer_is_drawn_as_a_whole_one(page: Browser) -> None:
    rng = random.Random(0)
    texts = [[rng.choice(PIECES) for _ in range(rng.randint(4, 24))] for _ in range(200)]
    differing = page.run(f"""(async () => {{
        const {{ render }} = await import("/page/markdown.js");
        return {json.dumps(texts)}.filter((pieces) => {{
            const grown = document.createElement("div"), whole = document.createElement("div");
            pieces.forEach((_, at) => render(grown, pieces.slice(0, at + 1).join("")));
            render(whole, pieces.join(""));
            const plain = (node) => node.innerHTML.replace(/\\s/g, ""); // marked strips some tabs late
            return plain(grown) !== plain(whole);
        }}); }})()""")
    assert differing == []


def test_no_text_holds_the_page_up(page: Browser) -> None:
    """Each of these takes marked seconds, and again for every token that follows, if it is read as a paragraph."""
    for text in ("_a_", "[", "*a ", "`a", "![a]("):
        nodes = page.run(f"""(async () => {{
            const {{ render }} = await import("/page/markdown.js");
            const target = document.createElement("div");
            render(target, {json.dumps(text)}.repeat(20000));
            return target.querySelectorAll("*").length; }})()""")
        assert nodes == 1  # one paragraph of text, whose marks were not looked at


def test_blocks_that_are_complete_keep_their_nodes(page: Browser) -> None:
    """A selection in an answer stays while the answer grows, and a long answer costs no more than its last block."""
    kept = page.run("""(async () => {
        const { render } = await import("/page/markdown.js");
        const target = document.createElement("div");
        render(target, "one\\n\\ntwo\\n\\nthr");
        const [one, two, three] = target.children;
        render(target, "one\\n\\ntwo\\n\\nthree");
        return [one === target.children[0], two === target.children[1], three === target.children[2]]; })()""")
    assert kept == [True, True, False]


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


def test_a_sound_is_transcribed(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("python_multipart", reason="uploads are read with python-multipart")
    soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")
    soundfile.write(tmp_path / "talk.wav", np.zeros(32_000), 16_000)
    with serving(kind="recognizer") as server:
        page = opened(browser, server)
        wait_until(lambda: page.run("!document.querySelector('#sound-row').hidden"))
        root = page.ask("DOM.getDocument")["root"]["nodeId"]
        node = page.ask("DOM.querySelector", nodeId=root, selector="#sound")["nodeId"]
        page.ask("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "talk.wav")])
        wait_until(lambda: page.text("#sound-name") == "talk.wav")
        page.click("#send")
        wait_until(lambda: "heard 16000" in page.text(".assistant .body"))
        answered(page, 1)
        assert page.text(".user .file") == "talk.wav"
        assert page.count("audio") == 1
        assert page.console == []


PUT = """(async () => {
    const canvas = new OffscreenCanvas(%d, 56);
    canvas.getContext("2d").fillRect(0, 0, 28, 28);
    const data = new DataTransfer();
    data.items.add(new File([await canvas.convertToBlob()], "drawn.png", { type: "image/png" }));
    %s; })()"""
DROP_FILES = """(() => {
    const data = new DataTransfer();
    for (let at = 0; at < %d; at++)
        data.items.add(new File([new Uint8Array(%d)], "clip.mp4", { type: "video/mp4" }));
    dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true })); })()"""
RECORD = """(async () => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 56;
    const pen = canvas.getContext("2d"), pieces = [];
    const recorder = new MediaRecorder(canvas.captureStream(20), { mimeType: "video/webm" });
    recorder.ondataavailable = ({ data }) => pieces.push(data);
    const ended = new Promise((done) => { recorder.onstop = done; });
    recorder.start();
    for (let at = 0; at < 24; at++) {
        pen.fillStyle = `hsl(${at * 15} 80% 50%)`;
        pen.fillRect(0, 0, 56, 56);
        await new Promise((done) => setTimeout(done, 50));
    }
    recorder.stop();
    await ended;
    const data = new DataTransfer();
    data.items.add(new File(pieces, "drawn.webm", { type: "video/webm" }));
    dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true })); })()"""
PASTE = """document.querySelector("#text").dispatchEvent(
    new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }))"""
DROP = 'dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }))'


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    """The messages that the engine is sent from now on."""
    found: list[Submit] = []
    submit = EngineClient.submit

    def note(self: EngineClient, message: Any, mailbox: Any) -> None:
        found.append(message)
        submit(self, message, mailbox)

    monkeypatch.setattr(EngineClient, "submit", note)
    return found


def test_pictures_are_chosen_pasted_dropped_sent_and_kept(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = noted(monkeypatch)
    (tmp_path / "chosen.png").write_bytes(picture(84, 56))
    (tmp_path / "broken.png").write_bytes(b"abc")
    with serving(folder=write_folder(tmp_path)) as server:
        page = opened(browser, server)
        limit(page, 4)
        wait_until(lambda: not page.run("document.querySelector('#picture-pick').hidden"))
        root = page.ask("DOM.getDocument")["root"]["nodeId"]
        node = page.ask("DOM.querySelector", nodeId=root, selector="#picture")["nodeId"]
        chosen = [str(tmp_path / name) for name in ("chosen.png", "broken.png")]
        page.ask("DOM.setFileInputFiles", nodeId=node, files=chosen)
        wait_until(lambda: page.count("#pictures img") == 1)
        assert page.text("#notice-text") == "This browser cannot read the picture."
        for width, act in ((4200, PASTE), (56, DROP)):
            before = page.count("#pictures img")
            page.run(PUT % (width, act))
            wait_until(lambda before=before: page.count("#pictures img") == before + 1)
        page.click("#pictures li:last-child button")
        assert page.count("#pictures img") == 2
        say(page, "What?")
        answered(page, 1)
        assert page.count("#pictures img") == 0
        assert page.count(".user img") == 2
        # The second is scaled down to 2048 pixels, and then by the model's processor.
        assert submitted[-1].pictures[0].tokens == 6
        again(page)
        wait_until(lambda: page.run("document.querySelector('.user img')?.naturalWidth ?? 0") == 84)
        assert page.run("document.querySelectorAll('.user img')[1].naturalWidth") == 2048
        say(page, "And?")
        answered(page, 2)
        assert submitted[-1].pictures == submitted[0].pictures
        page.run(PUT % (56, PASTE))  # a picture without a word
        wait_until(lambda: page.count("#pictures img") == 1)
        page.click("#send")
        answered(page, 3)
        assert submitted[-1].pictures[2].tokens == 4
        assert page.console == []


def test_the_pages_limits_are_the_servers() -> None:
    script = (webpage.FOLDER / "pictures.js").read_text()
    wanted = {
        "MOST_PICTURES": INPUT_PICTURES, "MOST_VIDEOS": INPUT_VIDEOS, "MOST_VIDEO_MIB": INPUT_VIDEO_BYTES // MIB
    }  # fmt: skip
    assert {name: int(re.findall(rf"const {name} = (\d+);", script)[0]) for name in wanted} == wanted


def test_videos_are_chosen_sent_and_kept(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a model that takes videos; the server reads a recording of the browser's own."""
    pytest.importorskip(
        "torchvision", reason="transformers prepares videos with torchvision, which is not installed"
    )
    pytest.importorskip("av", reason="videos are read with PyAV, which is not installed")
    from test_http_videos import write_video_folder

    submitted = noted(monkeypatch)
    with serving(folder=write_video_folder(tmp_path)) as server:
        page = opened(browser, server)
        limit(page, 4)
        wait_until(lambda: not page.run("document.querySelector('#picture-pick').hidden"))
        assert page.run("document.querySelector('#picture-pick').title") == "Add pictures or videos"
        assert page.run("document.querySelector('#picture').accept") == "image/*,video/*"
        page.run(DROP_FILES % (1, 21 << 20))
        wait_until(lambda: page.text("#notice-text") == "A video may have 20 MiB.")
        page.run(RECORD)
        wait_until(lambda: page.count("#pictures video") == 1)
        say(page, "What?")
        answered(page, 1)
        assert page.count(".user video") == 1
        assert [shown.moves for shown in submitted[-1].pictures] == [True]
        again(page)
        wait_until(lambda: page.count(".user video") == 1)
        say(page, "And?")
        answered(page, 2)
        assert submitted[-1].pictures == submitted[0].pictures
        page.run(DROP_FILES % (5, 1))
        wait_until(lambda: "4 videos among them" in page.text("#notice-text"))
        assert page.count("#pictures video") == 0
        assert page.console == []


def test_a_model_of_text_alone_is_offered_no_pictures(page: Browser) -> None:
    assert page.run("document.querySelector('#picture-pick').hidden")
    page.run(PUT % (56, DROP))
    page.run(PUT % (56, PASTE))
    assert page.count("#pictures img") == 0


def test_a_picture_is_made_and_kept(browser: Browser) -> None:
    with serving(kind="painter") as server:
        page = opened(browser, server)
        wait_until(lambda: page.run("document.querySelector('#text').placeholder") == "Describe a picture")
        say(page, "a red bicycle")
        wait_until(lambda: page.run("document.querySelector('.assistant img')?.naturalWidth ?? 0") == 24)
        # It is shown before it is kept, and on a busy machine the next line comes between the two.
        kept = "import('/page/store.js').then(s => s.load(location.hash.slice(1))).then(c => !c.messages.at(-1).ended)"
        wait_until(lambda: page.run(kept))
        again(page)
        wait_until(lambda: page.run("document.querySelector('.assistant img')?.naturalWidth ?? 0") == 24)
        assert page.console == []


def test_a_model_that_writes_nothing_says_so(browser: Browser) -> None:
    with serving(kind="encoder") as server:
        page = opened(browser, server)
        wait_until(lambda: page.text("#hello") == "This model does not write.")
        assert page.run("document.querySelector('#form').hidden")


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
