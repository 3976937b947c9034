"""The bundled speech model: small, whole, as good as its card says, and what `torchwright transcribe FILE` takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from torchwright.cli import main
from torchwright.models.speech import bundled
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.pauses import FRAME, levels
from torchwright.models.speech.score import edits

soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")
SCRIPTS = Path(__file__).parents[3] / "scripts"
SAID = "wake me at five fifteen"
SPOKEN = Path(__file__).with_name("spoken.flac")
"""`SAID` by espeak-ng in a voice that the model was trained on."""
BYTES_ALLOWED = 15_000_000
FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("preprocessor_config.json", "tokenizer.json"),
}
SENTENCES, SLACK = 20, 0.15
"""Fewer than the card's, so that their rate may be worse by so much."""
there = pytest.mark.skipif(
    not (bundled.FOLDER / "model.safetensors").is_file(), reason="this checkout has no bundled speech model"
)


def test_a_copy_without_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    assert main(["transcribe", str(SPOKEN), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no speech model in it" in err
    assert "--model" in err


@there
def test_it_is_whole_and_small():
    files = list(bundled.FOLDER.iterdir())
    assert {path.name for path in files} == FILES
    assert sum(path.stat().st_size for path in files) <= BYTES_ALLOWED


@there
def test_the_command_without_a_model_writes_down_what_is_said(capsys):
    assert main(["transcribe", str(SPOKEN)]) == 0
    out, err = capsys.readouterr()
    assert edits(SAID.split(), out.split()) <= 1
    assert "bundled speech model" in err
    assert main(["transcribe", str(SPOKEN), "--quiet", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["model"] == "bundled"
    assert edits(SAID.split(), found["files"][0]["text"].split()) <= 1


@there
def test_words_lie_where_they_are_said():
    """By the sound's own loudness; with the heads of the upper half of the layers the last word lasts to its end."""
    samples, rate = soundfile.read(SPOKEN, dtype="float32")
    assert rate == 16_000
    samples = np.concatenate([samples, np.zeros(5 * rate - len(samples), np.float32)])
    loud = levels(samples) > 0.05 * levels(samples).max()
    begin, end = (at * FRAME / rate for at in (loud.argmax(), len(loud) - loud[::-1].argmax()))
    found = load_speech(None).transcribe(samples, timestamps="word")
    words = [word for segment in found.segments for word in segment.words]
    assert abs(words[-1].end - end) < 0.3
    assert abs(words[0].end - begin) < 0.6
    assert max(word.end - word.start for word in words) < 1.2


@there
@pytest.mark.parametrize("asked", [["--language", "de"], ["--translate"]], ids=str)
def test_what_it_cannot_do_is_refused(asked, capsys):
    assert main(["transcribe", str(SPOKEN), *asked]) == 2
    assert "English alone" in capsys.readouterr().err


@there
def test_it_is_as_good_as_its_card_says(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "speech_corpus", raising=False)
    import speech_corpus as corpus
    from speech_scores import Sentences

    if engine := corpus.missing():
        pytest.skip(f"{engine} is not installed: apt-get install espeak-ng flite")
    card = (bundled.FOLDER / "README.md").read_text("utf-8")
    row = re.search(r"^\| bf16 \| ([\d.]+)% .*\| ([\d.]+)% ", card, re.MULTILINE)
    assert row, "the card has no row for bf16"
    model = load_speech(dtype=None)
    for promised, voices in zip(row.groups(), (corpus.HEARD, corpus.NEVER_HEARD), strict=True):
        words_U, errors_U = Sentences.make(SENTENCES, voices).errors(model)
        assert errors_U.sum() / words_U.sum() <= float(promised) / 100 + SLACK
