"""What is no voice is not written down: tones, noise, music and hum; and quiet or noisy speech is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from torchwright.cli import main
from torchwright.models.speech import bundled
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.sound import RATE
from torchwright.models.speech.transcript import Options, Transcript, Unheard, Window
from torchwright.models.speech.voice import find_voice
from torchwright.models.speech.whisper.attempt import Attempt, Limits, unsure

soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")
SPOKEN = Path(__file__).with_name("spoken.flac")
SECONDS = 5
TIME = np.arange(SECONDS * RATE) / RATE


def partials(pitch: float, count: int, times: np.ndarray) -> np.ndarray:
    return sum(
        (np.sin(2 * np.pi * pitch * k * times + k) / k for k in range(1, count + 1)), np.zeros_like(times)
    )


def chords(step: float, decay: float) -> np.ndarray:
    """Four triads in turn, each of plucked notes."""
    sound = np.zeros_like(TIME)
    for number in range(round(SECONDS / step)):
        since = TIME[round(number * step * RATE) :] - number * step
        for semitone in ((0, 4, 7), (-3, 0, 4), (5, 9, 12), (7, 11, 14))[number % 4]:
            note = partials(261.6 * 2 ** (semitone / 12), 6, since) * np.exp(-decay * since)
            sound[-len(since) :] += note * np.minimum(1, since / 0.01)
    return sound


def signals() -> dict[str, np.ndarray]:
    """Sounds of few partials that move or come and go as quickly as those of speech."""

    def swept(hertz: np.ndarray, count: int = 1) -> np.ndarray:
        phase = 2 * np.pi * np.cumsum(hertz) / RATE
        return sum((np.sin(k * phase) / k for k in range(1, count + 1)), np.zeros_like(TIME))

    def dialled(on: float, off: float) -> np.ndarray:
        rows, columns, sound = (697, 770, 852, 941), (1209, 1336, 1477), np.zeros_like(TIME)
        for number in range(int(SECONDS / (on + off))):
            begin, times = round(number * (on + off) * RATE), np.arange(round(on * RATE)) / RATE
            pair = rows[number * 7 % 4], columns[number * 5 % 3]
            sound[begin : begin + len(times)] = sum(np.sin(2 * np.pi * hertz * times) for hertz in pair)
        return sound

    dots = np.repeat(np.arange(200) * 7 % 5 < 3, round(0.06 * RATE))[: len(TIME)]
    notes = np.repeat(600 + (np.arange(25) * 677 % 1900), RATE // 5)[: len(TIME)].astype(float)
    return {
        "digits": dialled(0.1, 0.1),
        "quick digits": dialled(0.07, 0.07),
        "wail": swept(650 + 350 * np.sin(2 * np.pi * TIME / 4)),
        "wail of three partials": swept(650 + 350 * np.sin(2 * np.pi * TIME / 4), 3),
        "yelp": swept(650 + 350 * np.sin(2 * np.pi * 3 * TIME)),
        "two tones": swept(np.where((TIME * 6).astype(int) % 2, 650.0, 900.0)),
        "sweep": swept(200 + 3000 * TIME / SECONDS),
        "rising siren": swept(500 + 1500 * ((TIME * 2) % 1)),
        "busy tone": (swept(np.full_like(TIME, 480)) + swept(np.full_like(TIME, 620))) * (TIME % 0.5 < 0.25),
        "Morse code": np.pad(np.sin(2 * np.pi * 700 * TIME[: len(dots)]) * dots, (0, len(TIME) - len(dots))),
        "whistling": swept(np.convolve(notes, np.hanning(1600) / np.hanning(1600).sum(), "same")),
    }


def silent_kinds() -> dict[str, np.ndarray]:
    noise = np.random.randn(len(TIME))
    pink = np.fft.irfft(np.fft.rfft(noise) / np.sqrt(np.arange(len(TIME) // 2 + 1) + 1.0), len(TIME))
    return {
        "tone": np.sin(2 * np.pi * 440 * TIME),
        "high tone": np.sin(2 * np.pi * 3000 * TIME),
        "white noise": noise,
        "pink noise": pink,
        "swelling noise": noise * (1 + 0.8 * np.sin(2 * np.pi * 4 * TIME)),
        "hum": partials(50, 9, TIME),
        "hum and hiss": partials(60, 9, TIME) + 0.05 * noise,
        "chords": chords(0.5, 3),
        "slow chords": chords(1.0, 0.3),
        "organ": partials(130.8, 4, TIME) + partials(196, 4, TIME) + partials(329.6, 4, TIME),
        "clicks": (np.arange(len(TIME)) % 8000 < 8).astype(float),
        **signals(),
    }


SILENT = silent_kinds()


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.parametrize("peak", [0.5, 0.003])
def test_no_voice_is_found_in(kind, peak):
    sound = SILENT[kind]
    found = find_voice((peak * sound / np.abs(sound).max()).astype(np.float32))
    assert not found.anywhere
    assert found.instead(0, SECONDS) != "silence"


def test_silence_is_called_silence():
    for samples in (np.zeros(RATE), np.zeros(10), 1e-6 * np.random.randn(3 * RATE)):
        found = find_voice(samples.astype(np.float32))
        assert not found.anywhere
        assert found.instead(0, 1) == "silence"


@pytest.fixture(scope="module")
def spoken() -> np.ndarray:
    """A sentence between a second and a half of silence and another."""
    samples, _ = soundfile.read(SPOKEN, dtype="float32")
    return np.pad(samples, (3 * RATE // 2, 3 * RATE // 2))


@pytest.mark.parametrize("peak", [0.9, 0.01, 0.001])
@pytest.mark.parametrize("noise", [None, 10, 5, 0])
def test_speech_is_found_at_any_loudness_and_in_noise(spoken, peak, noise):
    said = np.abs(spoken) > 0.02
    sound = spoken.copy()
    if noise is not None:
        level = spoken[said].std() * 10 ** (-noise / 20)
        sound = sound + level * np.random.randn(len(spoken)).astype(np.float32)
    sixteen_bits = np.round(sound / np.abs(sound).max() * peak * 32768) / 32768
    found = find_voice(sixteen_bits.astype(np.float32))
    assert found.anywhere
    begin, end = np.flatnonzero(said)[[0, -1]] / RATE
    assert found.during(begin, end)


def test_silence_beside_speech_is_told_apart(spoken):
    """A model's guess at words in the pause before a sentence is left out."""
    found = find_voice(spoken)
    assert not found.during(0.3, 1.0)
    assert found.instead(0.0, 0.9) in ("silence", "a steady sound (noise, hum or a tone)")


@pytest.mark.parametrize("under", ["hum", "chords", "tone"])
def test_speech_over_music_and_hum_is_found(spoken, under):
    music = SILENT[under][: len(spoken)]
    level = spoken[np.abs(spoken) > 0.02].std() / music.std() * 10 ** (-10 / 20)
    sound = spoken[: len(music)] + (level * music).astype(np.float32)
    assert find_voice(sound).anywhere


def test_an_improbable_text_is_not_believed():
    limits = Limits()

    def why(logprob: float, no_speech: float = 0.0, ratio: float = 1.0) -> str | None:
        found = Attempt(tokens=(1,), mean_logprob=logprob, no_speech=no_speech, temperature=1.0)
        return unsure(found, ratio, limits)

    assert why(-0.5) is None
    assert why(-1.5) is None
    assert why(-0.5, no_speech=0.9, ratio=9) is None
    assert "hears no speech (probability 0.90)" in str(why(-1.2, no_speech=0.9))
    assert "-4.5" in str(why(-4.5))
    assert "repeats itself" in str(why(-1.2, ratio=3.0))


def test_remarks_join_what_follows_and_are_few():
    whole = Transcript()
    for i in range(30):
        reason = "silence" if i < 10 else f"kind {i // 2}"
        window = Window(
            until=i + 1.0,
            total=30,
            segments=(),
            language="en",
            unheard=(Unheard(start=i, end=i + 1.0, reason=reason),),
        )
        whole = whole.and_then(window)
    told = whole.remarks()
    assert told[:2] == ["no speech from 0.0 to 10.0 s: silence", "no speech from 10.0 to 12.0 s: kind 5"]
    assert told[-1] == "no speech in 6 other places"


there = pytest.mark.skipif(
    not (bundled.FOLDER / "model.safetensors").is_file(), reason="this checkout has no bundled speech model"
)


@there
def test_the_command_prints_nothing_of_a_tone_and_says_why(tmp_path, capsys):
    """A 440 Hz tone was "turn on the blue light in the library"."""
    for name in ("tone", "chords"):
        sound = SILENT[name]
        soundfile.write(tmp_path / f"{name}.wav", 0.4 * sound / np.abs(sound).max(), RATE)
    files = [str(tmp_path / "tone.wav"), str(tmp_path / "chords.wav")]
    assert main(["transcribe", files[0], "--language", "English"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "tone.wav: no speech from 0.0 to 5.0 s: a steady sound" in err
    assert main(["transcribe", *files, "--batch", "2", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["files"]
    assert [row["text"] for row in rows] == ["", ""]
    assert all(row["unheard"][0]["end"] == SECONDS for row in rows)
    assert main(["transcribe", files[1], "--all", "--quiet"]) == 0
    assert capsys.readouterr().out != ""


@there
def test_words_of_quiet_speech_are_kept_and_those_of_a_pause_are_not(spoken):
    model = load_speech(None)
    text = model.transcribe(spoken, language="en").text
    assert text.endswith("five fifteen")
    assert model.transcribe(0.02 * spoken, language="en").text.endswith("fifteen")
    assert Options().only_speech
