"""Live text: every word once, in order, and soon; by construction, and through the command."""

from __future__ import annotations

import io
import os
import random
import sys
import threading

import numpy as np
import pytest

from torchwright.cli import listening, main
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.live import FULL, Live
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.sound import RATE
from torchwright.models.speech.transcript import Segment, Transcript, Word
from whispers import noise

WINDOW = 8 * RATE


class Bursts(Recognizer):
    """Hears words, each a height that is its number; of one that is cut off at the end it hears something else.

    Times are off by up to 40 ms, and some marks come and go.
    """

    model_type = "bursts"
    cache = heard = begin = None  # of a model, which it has none of

    def __init__(self) -> None:
        self.window = WINDOW

    def check(self, options):
        pass

    def recognize(self, sound, options):
        raise NotImplementedError

    def transcribe(self, source, **options):
        edges = (
            np.flatnonzero(np.diff((source != 0).astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
        )
        words = []
        for begin, end in edges:
            if end - begin < 0.1 * RATE and not begin:
                continue  # the end of a word whose sound was let go
            number = round((float(source[begin]) - 0.3) / 0.002)
            text = f" w{number}{random.choice(['', ',', '.'])}" if end < len(source) else " hm"
            shift = random.uniform(-0.04, 0.04)
            words.append(Word(start=max(0, begin / RATE + shift), end=end / RATE + shift, text=text))
        found = Segment(start=0, end=1, text="", tokens=(), mean_logprob=0, words=tuple(words))
        return Transcript(segments=(found,))


def spoken(words: int) -> tuple[np.ndarray, list[float]]:
    sound, ends = [], []
    for i in range(words):
        sound.append(np.zeros(round(random.choice([0.08, 0.2, 0.5, 9.0] if i % 7 else [0.2]) * RATE)))
        sound.append(np.full(round(random.uniform(0.15, 0.6) * RATE), 0.3 + 0.002 * i))
        ends.append(sum(map(len, sound)) / RATE)
    return np.concatenate([*sound, np.zeros(RATE)]).astype(np.float32), ends


def test_every_word_settles_once_and_soon():
    for _ in range(5):
        samples, ends = spoken(60)
        live, said, place = Live(Bursts()), list[tuple[str, float]](), 0
        while place < len(samples):
            step = round(random.uniform(0.9, 1.3) * RATE)
            text = live.hear(samples[place : place + step])
            place += step
            said += [(word.strip(".,"), place / RATE) for word in text.split()]
            assert len(live._held) <= FULL * WINDOW + 2 * RATE
        said += [(word.strip(".,"), place / RATE) for word in live.rest().split()]
        assert [word for word, _ in said] == [f"w{i}" for i in range(60)]
        assert all(when <= end + 2 * 1.3 + 0.01 for (_, when), end in zip(said, ends, strict=True))


def test_what_was_not_agreed_on_is_the_rest():
    samples, _ = spoken(1)
    live = Live(Bursts())
    assert live.hear(samples) == ""
    assert live.rest().strip(".,") == "w0"
    assert live.rest() == ""


@pytest.mark.slow
def test_a_whisper_writes_live(folder):
    live = Live(load_speech(folder), language="en")
    texts = [live.hear(noise(1)) for _ in range(5)]
    assert any(texts) or live.rest()


def raw(seconds: float) -> bytes:
    return (noise(seconds) * 32767).astype("<i2").tobytes()


@pytest.fixture
def stdin(monkeypatch):
    given = list[io.TextIOWrapper]()

    def give(data: bytes) -> None:
        ours, theirs = os.pipe()
        threading.Thread(target=lambda: (os.write(theirs, data), os.close(theirs))).start()
        given.append(os.fdopen(ours))
        monkeypatch.setattr(sys, "stdin", given[-1])

    yield give
    for file in given:
        file.close()


@pytest.mark.slow
def test_the_command(folder, stdin, capsys):
    words = ["transcribe", "--live", "--all", "--language", "en", "--model", str(folder)]
    stdin(raw(3))
    assert main(words) == 0
    assert capsys.readouterr().out.strip()
    stdin(raw(1) + b"x")
    assert main(words) == 2
    assert "within a sample" in capsys.readouterr().err
    stdin(b"RIFF" + raw(1))
    assert main(words) == 2
    assert "is a WAV file" in capsys.readouterr().err
    stdin(b"")
    assert main(words) == 0


@pytest.mark.parametrize(
    "words",
    [["a.wav"], ["--format", "srt"], ["-o", "out"], ["--json"], ["--batch", "2"], ["--timestamps", "word"]],
)
def test_what_does_not_go_with_it_is_said(words, capsys):
    assert main(["transcribe", "--live", "--model", "none", *words]) == 2
    assert "--live prints text" in capsys.readouterr().err
    assert main(["transcribe", "--model", "none"]) == 2
    assert "name a sound file" in capsys.readouterr().err


def test_blocks_are_what_has_come(stdin):
    data = raw(2)
    stdin(data)
    found = list(listening._blocks(32_000))
    assert b"".join(found) == data
    assert all(len(block) >= 32_000 for block in found[:-1])
