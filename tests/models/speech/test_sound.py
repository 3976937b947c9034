"""Sound files of any rate, channels and format; windows that go forward; files that lie."""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from torchwright.core.errors import TorchwrightError
from torchwright.models.speech.files import SoundError
from torchwright.models.speech.sound import RATE, Sound, opened

soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")


def tone(rate: int, seconds: float, pitch: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(round(rate * seconds)) / rate).astype(np.float32)


def whole(source: object, step: int = 7_001) -> np.ndarray:
    """All of a sound, in windows that follow each other."""
    parts, start = [], 0
    with opened(source) as sound:
        while len(part := sound.window(start, step)):
            parts.append(part)
            start += len(part)
    return np.concatenate(parts)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1)])
def test_any_rate_and_channels_become_16_khz(tmp_path, suffix, rate, channels):
    if rate != RATE:
        pytest.importorskip("soxr", reason="other rates are resampled by soxr")
    path, seconds = tmp_path / f"a.{suffix}", 1.5
    soundfile.write(path, np.stack([tone(rate, seconds)] * channels, 1), rate)
    found, wanted = whole(path), tone(RATE, seconds)
    assert abs(len(found) - len(wanted)) <= 2
    inner = slice(2_000, 20_000)  # without the resampler's and the codec's edges
    spectrum = np.abs(np.fft.rfft(found[inner] * np.hanning(18_000)))
    assert spectrum.argmax() * RATE / 18_000 == pytest.approx(440, abs=1)
    assert found[inner].std() == pytest.approx(wanted[inner].std(), rel=0.1)


def test_channels_are_averaged_and_windows_may_overlap(tmp_path):
    stereo = np.random.uniform(-0.5, 0.5, (RATE * 12, 2)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", stereo, RATE, subtype="FLOAT")
    mono = stereo.mean(1)
    with opened(tmp_path / "a.wav") as sound:
        assert sound.seconds == 12
        for start in (0, 0, 5_000, 150_000, 150_000):
            assert np.array_equal(sound.window(start, 90_000), mono[start : start + 90_000])
        assert not len(sound.window(len(mono), 10))
        with pytest.raises(ValueError, match="let go"):
            sound.window(10, 10)


def test_no_more_is_held_than_a_window_and_a_block():
    made = 0

    def blocks():
        nonlocal made
        for _ in range(1_000):
            made += 1
            yield np.zeros(1_000, np.float32)

    sound = Sound("long", blocks(), None)
    for start in range(0, 900_000, 4_000):
        assert len(sound.window(start, 5_000)) == 5_000
        assert made * 1_000 <= start + 6_000
        assert len(sound._held) <= 6_000


@pytest.mark.parametrize(
    "samples", [tone(RATE, 1), tone(RATE, 1).astype(np.float64), torch.from_numpy(tone(RATE, 1))]
)
def test_samples_are_taken_as_they_are(samples):
    assert np.allclose(whole(samples), tone(RATE, 1))
    assert np.allclose(whole(list(samples[:10])), tone(RATE, 1)[:10])


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (np.zeros((2, 100), np.float32), r"\[2, 100\]"),
        (np.zeros(100, np.int16), "int16"),
        (["a"], "cannot be used"),
        (np.array([0.0, np.nan]), "nan at 0.00 s"),
        (np.array([0.0, -1e9]), "-1e\\+09"),
    ],
)
def test_samples_that_are_none_are_refused(samples, said):
    with pytest.raises(SoundError, match=said):
        whole(samples)


def wav(path: Path, **fields: int) -> Path:
    """A WAV file of a second with fields of its header overwritten."""
    soundfile.write(path, tone(RATE, 1), RATE)
    data = bytearray(path.read_bytes())
    for place, value in {"rate": 24, "bytes": 40}.items():
        if place in fields:
            data[value : value + 4] = struct.pack("<I", fields[place])
    path.write_bytes(data[: fields.get("keep", len(data))])
    return path


def odd(kind: str, path: Path) -> Path:
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.wav", b"no sound")
    elif kind == "text":
        path.write_text("#EXTM3U\nfile:///etc/passwd\n")
    elif kind == "no samples":
        soundfile.write(path, tone(RATE, 0), RATE)
    elif kind == "nan":
        soundfile.write(path, np.array([0.1] * 9 + [np.nan]), RATE, subtype="FLOAT")
    elif kind == "low rate":
        soundfile.write(path, tone(RATE, 1), 100)
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "empty. Found: 0 bytes"),
        ("zip", "no sound that"),
        ("text", "no sound that"),
        ("no samples", "empty. Found: 0 samples"),
        ("nan", "nan at 0.00 s"),
        ("low rate", "100 Hz"),
        ("folder", "is no file"),
        ("missing", "cannot be opened"),
    ],
)
def test_files_that_are_no_sound_are_refused(tmp_path, kind, said):
    with pytest.raises(ValueError, match=said):  # SoundError is one
        whole(odd(kind, tmp_path / "odd.wav"))


def test_headers_that_lie_are_refused(tmp_path):
    with pytest.raises(SoundError, match=r"10,000,000 bytes of sound declared at byte 36, 32,000 there"):
        whole(wav(tmp_path / "a.wav", bytes=10_000_000))
    with pytest.raises(SoundError, match="cut short"):
        whole(wav(tmp_path / "a.wav", keep=20_000))
    with pytest.raises(SoundError, match="no data chunk"):
        whole(wav(tmp_path / "a.wav", keep=40))
    with pytest.raises(SoundError, match="no sound that"):
        whole(wav(tmp_path / "a.wav", rate=0))
    many = b"RIFF\xff\xff\xff\xffWAVE" + b"note\x00\x00\x00\x00" * 100_000  # each would cost a read
    (tmp_path / "a.wav").write_bytes(many)
    with pytest.raises(SoundError, match="no data chunk in 8,012 bytes"):
        whole(tmp_path / "a.wav")
    # A writer into a pipe cannot know the length.
    assert len(whole(wav(tmp_path / "a.wav", bytes=0xFFFFFFFF))) == RATE


def test_a_damaged_file_gives_what_is_whole_and_then_the_place(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.uniform(-0.5, 0.5, RATE * 30), RATE)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.7)])
    with opened(path) as sound:
        assert len(sound.window(0, RATE * 10)) == RATE * 10
        with pytest.raises(SoundError, match=r"a.flac is damaged or cut short at 2[01].\d s"):
            sound.window(0, RATE * 30)
    # Where a recognizer reads it, the last window ends where the damage begins.
    with opened(path, until_fault=True) as sound:
        assert 20 < len(sound.window(0, RATE * 30)) / RATE < 21.1
        assert "damaged or cut short at 2" in str(sound.fault)
        assert not len(sound.window(RATE * 29, RATE))


def test_a_file_that_ends_early_is_noticed(tmp_path):
    """A download that broke off: an MP3's header has its length, and its end is no fault to its reader."""
    path = tmp_path / "a.mp3"
    soundfile.write(path, np.random.uniform(-0.5, 0.5, RATE * 30), RATE, format="MP3")
    with opened(path) as sound:
        sound.window(0, RATE * 40)
        assert not sound.notices
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.7)])
    with opened(path) as sound:
        assert len(sound.window(0, RATE * 40)) / RATE == pytest.approx(21, abs=0.5)
        assert re.fullmatch(r"it ends at 2[01].\d s where 30.0 s were expected.*", sound.notices[0])


def aac(path, kind=None):
    """Write two seconds of a tone into a container."""
    av = pytest.importorskip("av", reason="containers are read by PyAV")
    with av.open(str(path), "w", format=kind) as file:
        stream = file.add_stream("aac", rate=44_100, layout="stereo")
        sound = np.stack([tone(44_100, 2)] * 2)
        for begin in range(0, sound.shape[1], 1_024):
            part = np.ascontiguousarray(sound[:, begin : begin + 1_024])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
            frame.rate, frame.pts = 44_100, begin
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return path


def test_containers_are_read_by_av(tmp_path):
    found = whole(aac(tmp_path / "a.mp4"))
    assert len(found) / RATE == pytest.approx(2, abs=0.1)
    assert found[4_000:20_000].std() == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def test_damaged_packets_are_left_out_and_noticed(tmp_path):
    """FFmpeg's program skips damaged packets too. In training data the file still counts as broken."""
    path = aac(tmp_path / "a.aac", "adts")
    data = path.read_bytes()
    middle = data.index(b"\xff\xf1", len(data) // 2)  # of a packet's header
    path.write_bytes(data[: middle + 8] + b"\x51" * 300 + data[middle + 308 :])
    with opened(path, until_fault=True) as sound:
        assert len(sound.window(0, 3 * RATE)) / RATE == pytest.approx(2, abs=0.3)
        assert re.search(r"damaged: \d+ packets? of sound left out, the first at [01].\d s", sound.notices[0])
    with pytest.raises(SoundError, match=r"damaged or cut short at 0\.0 s"):
        whole(path)
    path.write_bytes(data[:middle][:-50])
    with opened(path, until_fault=True) as sound:
        assert len(sound.window(0, 3 * RATE)) / RATE == pytest.approx(1, abs=0.3)
        assert "1 packet of sound left out" in sound.notices[0]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = wav(tmp_path / "a.wav")
    monkeypatch.setattr("torchwright.models.speech.files.find_spec", lambda name: None)
    with pytest.raises(TorchwrightError, match=r"soundfile, which is not installed.*torchwright\[speech\]"):
        whole(path)
    assert "soundfile" in sys.modules


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
def test_a_streamed_wav_is_read_to_its_end(tmp_path, size):
    """Writers to a pipe do not know how long the sound will be; espeak-ng and sox write 0x7FFFF000."""
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(RATE, 2.0), RATE)
    data = bytearray(path.read_bytes())
    place = data.index(b"data")
    data[4:8] = struct.pack("<I", min(size + 36, 0xFFFFFFFF))
    data[place + 4 : place + 8] = struct.pack("<I", size)
    path.write_bytes(data)
    assert len(whole(path)) == 2 * RATE
    assert np.abs(whole(path)).max() == pytest.approx(0.5, abs=1e-3)


def test_a_wav_that_says_zero_and_has_other_chunks_alone_is_empty(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(RATE, 0.1), RATE)
    data = path.read_bytes()
    place = data.index(b"data")
    path.write_bytes(data[: place + 4] + struct.pack("<I", 0) + b"LIST" + struct.pack("<I", 4) + b"INFO")
    with pytest.raises(SoundError, match="0 samples"):
        whole(path)


def test_channels_that_cancel_each_other_are_noticed(tmp_path):
    one = np.random.uniform(-0.5, 0.5, RATE * 7).astype(np.float32)
    soundfile.write(tmp_path / "opposite.wav", np.stack([one, -0.9 * one], 1), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "left.wav", np.stack([one, 0 * one], 1), RATE, subtype="FLOAT")
    with opened(tmp_path / "opposite.wav") as sound:
        assert np.array_equal(sound.window(0, RATE), one[:RATE])
        sound.window(6 * RATE, RATE)
        assert len(sound.notices) == 1
        assert "opposite phase" in sound.notices[0]
    with opened(tmp_path / "left.wav") as sound:
        assert np.array_equal(sound.window(0, RATE), one[:RATE] / 2)
        assert not sound.notices


@pytest.mark.parametrize(("rate", "codec", "word"), [(0, object(), "sample rate"), (None, None, "codec")])
def test_a_track_that_says_nothing_of_itself_is_refused_in_words(tmp_path, monkeypatch, rate, codec, word):
    """An M4A whose header has no rate, an MPEG-TS whose stream never came."""
    av = pytest.importorskip("av", reason="other containers are read by PyAV")

    class Track:
        codec_context, channels = codec, 2

        @property
        def rate(self):
            if codec is None:
                raise AttributeError("'NoneType' object has no attribute 'rate'")
            return rate

    class Container:
        streams = type("Streams", (), {"audio": [Track()]})
        duration, format = None, type("Format", (), {"long_name": "MPEG-TS"})

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(av, "open", lambda *_, **__: Container())
    (tmp_path / "a.ts").write_bytes(b"G" * 500)
    with pytest.raises(SoundError, match=f"its sound track names no {word}"):
        whole(tmp_path / "a.ts")


def test_a_url_is_refused_as_it_was_written():
    with pytest.raises(SoundError, match=r"https://host/a//b\.wav is a URL"):
        whole("https://host/a//b.wav")
