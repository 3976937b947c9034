"""The chat page in headless Chromium: sounds, pictures and videos."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from http_support import serving, submits, wait_until
from page_support import again, answered, limit, opened, say
from picture_support import picture, write_folder

from browser_support import Browser
from torchwright.serve.http import webpage
from torchwright.serve.limits import INPUT_PICTURES, INPUT_VIDEO_BYTES, INPUT_VIDEOS, MIB


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


def test_pictures_are_chosen_pasted_dropped_sent_and_kept(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "chosen.png").write_bytes(picture(84, 56))
    (tmp_path / "broken.png").write_bytes(b"abc")
    with serving(folder=write_folder(tmp_path)) as server, server.client.recording() as sent:
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
        assert submits(sent)[-1].pictures[0].tokens == 6
        again(page)
        wait_until(lambda: page.run("document.querySelector('.user img')?.naturalWidth ?? 0") == 84)
        assert page.run("document.querySelectorAll('.user img')[1].naturalWidth") == 2048
        say(page, "And?")
        answered(page, 2)
        assert submits(sent)[-1].pictures == submits(sent)[0].pictures
        page.run(PUT % (56, PASTE))  # a picture without a word
        wait_until(lambda: page.count("#pictures img") == 1)
        page.click("#send")
        answered(page, 3)
        assert submits(sent)[-1].pictures[2].tokens == 4
        assert page.console == []


def test_the_pages_limits_are_the_servers() -> None:
    script = (webpage.FOLDER / "pictures.js").read_text()
    wanted = {
        "MOST_PICTURES": INPUT_PICTURES, "MOST_VIDEOS": INPUT_VIDEOS, "MOST_VIDEO_MIB": INPUT_VIDEO_BYTES // MIB
    }  # fmt: skip
    assert {name: int(re.findall(rf"const {name} = (\d+);", script)[0]) for name in wanted} == wanted


def test_videos_are_chosen_sent_and_kept(browser: Browser, tmp_path: Path) -> None:
    """To a model that takes videos; the server reads a recording of the browser's own."""
    pytest.importorskip(
        "torchvision", reason="transformers prepares videos with torchvision, which is not installed"
    )
    pytest.importorskip("av", reason="videos are read with PyAV, which is not installed")
    from test_http_videos import write_video_folder

    with serving(folder=write_video_folder(tmp_path)) as server, server.client.recording() as sent:
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
        assert [shown.moves for shown in submits(sent)[-1].pictures] == [True]
        again(page)
        wait_until(lambda: page.count(".user video") == 1)
        say(page, "And?")
        answered(page, 2)
        assert submits(sent)[-1].pictures == submits(sent)[0].pictures
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
