"""`torchwright transcribe`: text as it is found, subtitles, several files, and what is kept when it ends early."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from torchwright.cli import main
from torchwright.models.speech.formats import FORMATS
from torchwright.models.speech.transcript import Segment, Transcript, Window, Word
from torchwright.models.speech.whisper.model import Whisper
from whispers import SECONDS, noise

soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    for name in ("one.wav", "two.flac"):
        soundfile.write(tmp_path / name, noise(2.5 * SECONDS), 16_000)
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    return tmp_path


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window says where it begins: what is decoded is test_whisper's business."""

    def recognize(self, sound, options):
        for i in range(3):
            count = len(sound.window(i * 64_000, 64_000))
            if not count:
                return
            found = Segment(start=i * 4.0, end=i * 4.0 + 2, text=f"window {i}", tokens=(), mean_logprob=-0.1)
            yield Window(until=i * 4 + count / 16_000, total=sound.seconds, segments=(found,), language="en")

    monkeypatch.setattr(Whisper, "recognize", recognize)


def test_text_is_on_standard_output(folder, sounds, capsys):
    assert main(["transcribe", str(sounds / "one.wav"), "--model", str(folder)]) == 0
    assert capsys.readouterr() == ("window 0\nwindow 1\nwindow 2\n", "")


def test_several_files_and_one_of_them_bad(folder, sounds, capsys):
    files = [str(sounds / name) for name in ("one.wav", "bad.wav", "two.flac")]
    assert main(["transcribe", *files, "--model", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out.count("window") == 6
    assert out.index("==> " + files[0]) < out.index("window 0") < out.index("==> " + files[2])
    assert "bad.wav is no sound" in err
    assert main(["transcribe", *files, "--model", str(folder), "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)["files"]
    assert [("error" in row, row["file"]) for row in rows] == [(i == 1, file) for i, file in enumerate(files)]
    assert rows[2]["text"] == "window 0 window 1 window 2"
    assert rows[2]["seconds"] == 2.5 * SECONDS
    assert rows[2]["real_time_factor"] > 0


def test_files_are_written_whole(folder, sounds, capsys):
    out = sounds / "new" / "out"
    files = [str(sounds / "one.wav"), str(sounds / "two.flac")]
    for form, suffix in {"text": "txt", "srt": "srt", "vtt": "vtt", "json": "json"}.items():
        assert main(["transcribe", *files, "--model", str(folder), "--format", form, "-o", str(out)]) == 0
        assert (out / f"two.{suffix}").read_text()
    assert len(list(out.iterdir())) == 8
    assert capsys.readouterr() == ("", "")
    assert json.loads((out / "one.json").read_text())["segments"][1]["start"] == 4.0


@pytest.fixture
def heard():
    """Ctrl-C is, also where a shell started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_keeps_what_was_found(folder, sounds, capsys, monkeypatch):
    recognize, out = Whisper.recognize, sounds / "out"

    def interrupted(self, sound, options):
        for i, window in enumerate(recognize(self, sound, options)):
            if i == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield window

    monkeypatch.setattr(Whisper, "recognize", interrupted)
    words = ["transcribe", str(sounds / "one.wav"), "--model", str(folder)]
    assert main(words) == 130
    assert capsys.readouterr().out == "window 0\nwindow 1\n"
    assert main([*words, "-o", str(out), "--format", "srt"]) == 130
    assert "the first 8.0 s are in" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["one.partial.srt"]
    assert "window 1" in (out / "one.partial.srt").read_text()


def test_a_damaged_file_keeps_what_was_read(folder, tmp_path, capsys):
    """Before, the window that holds the damage was lost, and all of a file of less than five seconds."""
    path = tmp_path / "a.flac"
    for seconds, place, said in ((40, "[78]", "window 0\nwindow 1\n"), (10, "[12]", "window 0\n")):
        soundfile.write(path, noise(seconds), 16_000)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.19)])
        assert main(["transcribe", str(path), "--model", str(folder), "-o", str(tmp_path)]) == 2
        assert re.search(rf"damaged or cut short at {place}\.\d s", capsys.readouterr().err)
        assert (tmp_path / "a.partial.txt").read_text() == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "srt", "--json"], "--format is for files"),
        (["two.flac", "--format", "srt"], "add -o FOLDER"),
        (["sub/one.flac", "-o", "out"], "two of the files"),
        (["--language", "xx"], "unknown language 'xx'"),
        (["--timestamps", "letter"], "letter"),
    ],
)
def test_what_cannot_be_done_is_said(folder, sounds, words, said, capsys, monkeypatch):
    monkeypatch.chdir(sounds)
    (sounds / "sub").mkdir()
    shutil.copy(sounds / "two.flac", sounds / "sub" / "one.flac")
    assert main(["transcribe", "one.wav", *words, "--model", str(folder)]) == 2
    assert said in capsys.readouterr().err


def test_the_formats():
    words = (Word(start=3661.5, end=3662.0, text=" a<b"), Word(start=3662.0, end=3662.25, text=" &"))
    spoken = Segment(start=0.9996, end=2, text="Hello.", tokens=(1,), mean_logprob=-0.1)
    timed = Segment(start=3661.5, end=3662.25, text="a<b &", tokens=(2,), mean_logprob=-0.1, words=words)
    found = Transcript(seconds=4000, language="en", segments=(spoken, timed))
    assert FORMATS["text"](found) == "Hello.\na<b &\n"
    assert FORMATS["srt"](found) == (
        "1\n00:00:01,000 --> 00:00:02,000\nHello.\n\n2\n01:01:01,500 --> 01:01:02,000\na<b\n\n"
        "3\n01:01:02,000 --> 01:01:02,250\n&\n"
    )
    assert FORMATS["vtt"](found).startswith("WEBVTT\n\n00:00:01.000 --> 00:00:02.000\nHello.\n")
    assert "a&lt;b" in FORMATS["vtt"](found)
    data = json.loads(FORMATS["json"](found))
    assert data["text"] == "Hello. a<b &"
    assert data["segments"][1]["words"][0]["end"] == 3662.0
