"""Uploaded sounds as clients send them, over a fake engine; whatever is sent, no file and no place is left behind."""

from __future__ import annotations

import io
import json
import socket
import struct
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from fake_engine import DIES, HUM, NEVER
from http_support import MODEL, Running, serving, wait_until

from torchwright.serve.limits import Limits

pytest.importorskip("python_multipart", reason="uploads are read with python-multipart")
soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")

PATH = "/v1/audio/transcriptions"
SMALL = Limits(upload_bytes=1 << 20, sound_seconds=20, sounds=4, sounds_bytes=3 << 20)


def wav(seconds: float, rate: int = 16_000, subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, 0.3 * np.random.randn(round(seconds * rate)), rate, subtype, format="WAV")
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.wav", wav(0.1))
    return file.getvalue()


def broken() -> dict[str, tuple[bytes, str]]:
    """Files that are no sound, and what is said of each."""
    good = wav(0.5)
    at = good.index(b"data") + 4
    silent = bytearray(good)
    silent[24:28] = struct.pack("<I", 0)
    wrong = io.BytesIO()
    soundfile.write(wrong, np.array([0.1, np.nan, 0.2]), 16_000, "FLOAT", format="WAV")
    return {
        "empty": (b"", "0 bytes"),
        "truncated": (good[:-9_000], "cut short"),
        "no sound": (b"Good morning. " * 99, "no sound"),
        "a zip": (archive(), "no sound"),
        "a lie": (good[:at] + struct.pack("<I", 1 << 30) + good[at + 4 :], "its header lies"),
        "0 Hz": (bytes(silent), "file"),
        "NaN": (wrong.getvalue(), "holds samples that are no sound"),
        "no samples": (wav(0), "0 samples"),
        "long": (wav(30, 8_000, "PCM_U8"), "20 seconds"),
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(kind="recognizer", limits=SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_left(server: Running) -> Iterator[None]:
    yield
    wait_until(server.cancelled)
    sounds = server.service.sounds
    assert sounds is not None
    wait_until(lambda: not list(sounds._folder.path.iterdir()))
    wait_until(lambda: (sounds.open, sounds.held_bytes) == (0, 0))


def post(http: httpx.Client, data: bytes, **fields: object) -> httpx.Response:
    return http.post(PATH, files={"file": ("talk.wav", data)}, data=fields)


def test_the_forms(http):
    data = wav(1.5)
    found = post(http, data, model=MODEL).json()
    assert found == {"text": "heard 16000 heard 8000", "usage": {"type": "duration", "seconds": 1.5}}
    text = post(http, data, response_format="text", temperature="0.4", language="en")
    assert text.text == "heard 16000 heard 8000\n"
    assert text.headers["content-type"].startswith("text/plain")
    assert post(http, data, response_format="srt").text.startswith(
        "1\n00:00:00,000 --> 00:00:01,000\nheard 16000\n"
    )
    vtt = post(http, data, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> ")
    assert vtt.headers["content-type"].startswith("text/vtt")


def test_verbose_json_has_what_was_asked_for(http):
    found = post(http, wav(1.5), response_format="verbose_json").json()
    assert (found["task"], found["language"], found["duration"]) == ("transcribe", "en", 1.5)
    assert [(row["id"], row["seek"], row["start"], row["end"]) for row in found["segments"]] == [
        (0, 0, 0.0, 1.0),
        (1, 100, 1.0, 1.5),
    ]
    assert "words" not in found
    both = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    found = post(http, wav(1), **both).json()
    assert [word["word"] for word in found["words"]] == ["heard", "16000"]
    assert len(found["segments"]) == 1
    plain = {"response_format": "verbose_json", "timestamp_granularities": ["segment", "word"]}
    assert len(post(http, wav(1), **plain).json()["words"]) == 2
    assert "segments" not in post(http, wav(1), **(both | {"timestamp_granularities[]": ["word"]})).json()


def test_other_rates_and_formats_are_resampled(http):
    file = io.BytesIO()
    soundfile.write(file, 0.1 * np.random.randn(44_100, 2), 44_100, format="FLAC")
    assert post(http, file.getvalue()).json()["text"] == "heard 16000"


def test_openais_client(server):
    openai = pytest.importorskip("openai", reason="OpenAI's own client")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        data = wav(2.5)
        audio = client.audio
        assert (
            audio.transcriptions.create(file=data, model=MODEL).text == "heard 16000 heard 16000 heard 8000"
        )
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # its own
            assert audio.translations.create(file=("a.wav", data), model=MODEL).text.startswith("heard")
        words = audio.transcriptions.create(
            file=data,
            model=MODEL,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            prompt="Names: Ada.",
        )
        assert (len(words.words), words.segments[2].seek, words.usage.seconds) == (6, 200, 2.5)
        assert "-->" in audio.transcriptions.create(file=data, model=MODEL, response_format="srt")
        events = list(audio.transcriptions.create(file=data, model=MODEL, stream=True))
        assert [event.type for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
        assert "".join(event.delta for event in events[:3]) == events[3].text


@pytest.mark.parametrize("name", broken())
def test_broken_sounds_are_refused_with_the_reason(http, name):
    data, said = broken()[name]
    answer = post(http, data)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "file"


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"response_format": "diarized_json"}, 400, "response_format"),
        ({"model": "whisper-9"}, 404, "there is no model"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": "1.5"}, 400, "temperature"),
        ({"languages[]": ["en"]}, 400, "use language"),
        ({"speed": "2"}, 400, "'speed' is not supported"),
        ({"timestamp_granularities[]": ["word"]}, 400, "for response_format verbose_json"),
        ({"timestamp_granularities": ["word", "word", "word"]}, 400, "timestamp_granularities"),
        ({"stream": "true", "response_format": "vtt"}, 400, "vtt is not streamed"),
        ({"language": "xx"}, 400, "unknown language"),
        ({"language": "xx", "stream": "true"}, 400, "unknown language"),
        ({"language": ["en", "de"]}, 400, "'language'"),
        ({"prompt": "a" * 300_000}, 400, "the fields beside 'file'"),
        ({f"f{i}": "" for i in range(40)}, 400, "more than 32 fields"),
    ],
)
def test_wrong_fields_are_refused(http, fields, status, said):
    answer = post(http, wav(0.1), **fields)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_what_is_no_such_form(http):
    assert http.post(PATH, json={}).status_code == 415
    assert "'file' is missing" in http.post(PATH, files={"model": (None, MODEL)}).text
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body, said in (
        (b"hello", "no form"),
        (b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc', "breaks off"),
        (b"--x\r\nx: y\r\n\r\nabc\r\n--x--\r\n", "without a name"),
    ):
        answer = http.post(PATH, content=body, headers=form)
        assert (answer.status_code, said in answer.text) == (400, True), answer.text
    assert "no boundary" in http.post(PATH, content=b"", headers={"content-type": "multipart/form-data"}).text
    twice = [("file", ("a", wav(0.1))), ("file", ("b", wav(0.1)))]
    assert "given twice" in http.post(PATH, files=twice).text
    assert "the file is 'file'" in http.post(PATH, files={"model": ("a", b"")}).text
    # A path in place of a file is a text that is no sound, and nothing is opened by it.
    assert "no sound" in http.post(PATH, files={"file": (None, __file__)}).text


def test_short_values_of_a_form_are_no_chunks(http):
    """`de` and `0` on lines of their own look like heads of chunks of a few bytes."""
    answer = post(http, wav(0.1), language="de", temperature="0")
    assert answer.status_code == 200, answer.text
    part = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = (
        part % (b"language", b"de")
        + part % (b"temperature", b"0")
        + part % (b"file", b"no sound " * 12)
        + b"--x--\r\n"
    )
    where = urlsplit(str(http.base_url))
    with socket.create_connection((where.hostname, where.port), 30) as raw:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        )
        raw.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n".encode())
        raw.sendall(body)
        told = b"".join(iter(lambda: raw.recv(4096), b""))
    assert b"cannot be read" in told or b"no sound" in told, told


def test_a_form_of_many_parts_or_long_headers_is_refused_at_once(http):
    form = {"content-type": "multipart/form-data; boundary=x"}
    part = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\na\r\n'
    answer = http.post(PATH, content=part * 10_000 + b"--x--\r\n", headers=form)
    assert (answer.status_code, "more than 32 fields" in answer.text) == (400, True), answer.text
    # Below the limit that recent versions of the parser have for one header.
    lines = b"".join(b"x%d: %s\r\n" % (number, b"y" * 4000) for number in range(4))
    answer = http.post(
        PATH, content=part.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n") + b"--x--\r\n", headers=form
    )
    assert (answer.status_code, "bytes of headers" in answer.text) == (400, True), answer.text
    long = b'--x\r\ncontent-disposition: form-data; name="' + b"n" * 500_000 + b'"\r\n\r\na\r\n--x--\r\n'
    assert http.post(PATH, content=long, headers=form).status_code == 400


@pytest.mark.parametrize("name", ["../../../a.wav", "/etc/passwd", "a" * 10_000, "\x1b]0;x\x07.wav", "PRN"])
def test_a_file_name_of_a_client_is_no_name_here(http, name):
    answer = http.post(PATH, files={"file": (name, b"no sound")})
    assert (answer.status_code, name[:9] in answer.text) == (400, False), answer.text


def test_a_large_upload_is_refused(http, server):
    answer = post(http, bytes(SMALL.upload_bytes + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), 30) as raw:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10 << 30}\r\n"
        raw.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
        assert b" 413 " in raw.recv(100)


@pytest.mark.slow
def test_many_at_once_and_some_of_them_broken(http, server):
    """The places are taken by others at times: who is told so comes again."""
    files = [(wav(1), "") for _ in range(32)]
    files[::4] = list(broken().values())[:8]

    def send(job: tuple[bytes, str]) -> bool:
        data, said = job
        while (answer := post(http, data)).status_code == 429:
            assert answer.headers["retry-after"] == "1"
        if not said:
            return answer.json()["text"] == "heard 16000"
        return answer.status_code == 400 and said in answer.text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, files))
    assert http.get("/health_generate").status_code == 200


def test_a_client_that_leaves(server):
    form = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = form % (b"file", wav(1)) + form % (b"prompt", NEVER.encode()) + b"--x--\r\n"
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    where, sounds = urlsplit(server.url), server.service.sounds
    assert sounds is not None
    for sent in (len(body) // 2, len(body)):
        with socket.create_connection((where.hostname, where.port), 30) as raw:
            raw.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n".encode() + body[:sent])
            wait_until(lambda: sounds.open == 1)
            if sent == len(body):
                wait_until(lambda: server.service.client.waiting == 1)
        wait_until(lambda: sounds.open == 0)


def test_a_stream_whose_reader_leaves(http, server):
    files = {"file": ("a.wav", wav(2))}
    with http.stream("POST", PATH, files=files, data={"stream": "true", "prompt": NEVER}) as answer:
        first = next(answer.iter_lines())
        assert json.loads(first.removeprefix("data: "))["delta"] == "heard 16000"


def test_too_many_bytes_are_refused_for_now(http):
    """A sound of 15 seconds is a megabyte of samples: three uploads leave no room for them."""
    jobs = [wav(15, subtype="PCM_16")] * 8
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda data: post(http, data).status_code, jobs))
    assert set(answers) <= {200, 429}


@pytest.mark.slow
def test_an_engine_that_dies(server):
    with serving(kind="recognizer") as running, httpx.Client(base_url=running.url, timeout=60) as http:
        assert post(http, wav(1), prompt=DIES).status_code == 503
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert post(http, wav(1)).status_code == 200
        sounds = running.service.sounds
        assert sounds is not None
        folder = sounds._folder.path
        assert list(folder.iterdir()) == []
    assert not Path(folder).exists()


def test_other_models_take_no_sound():
    with serving(kind="encoder") as running:
        answer = httpx.post(running.url + PATH, files={"file": b""})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_model_kind")


def test_it_reads_no_text(http):
    answer = http.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, "audio/transcriptions" in answer.text) == (400, True)
    assert http.get("/model_info").json()["has_audio_understanding"] is True


def test_why_there_is_no_text_is_said_in_every_form(http):
    """In a field of JSON and of the last event, and in a header beside text and subtitles."""
    said = "no speech from 0.0 to 1.0 s: a steady sound"
    for form in ("json", "verbose_json"):
        found = post(http, wav(1), prompt=HUM, response_format=form).json()
        assert (found["text"], found["notices"]) == ("", [said])
    for form, body in (("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n")):
        answer = post(http, wav(1), prompt=HUM, response_format=form)
        assert (answer.text, answer.headers["x-torchwright-notices"]) == (body, said)
    events = post(http, wav(1), prompt=HUM, stream="true").text.strip().split("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in events] == [
        {"type": "transcript.text.done", "text": "", "notices": [said]}
    ]
    assert "notices" not in post(http, wav(1)).json()


def test_channels_that_cancel_are_told(http):
    file, one = io.BytesIO(), 0.3 * np.random.randn(16_000)
    soundfile.write(file, np.stack([one, -one], 1), 16_000, format="WAV")
    found = post(http, file.getvalue()).json()
    assert found["text"] == "heard 16000"
    assert "opposite phase" in found["notices"][0]
