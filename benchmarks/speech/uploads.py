# pyright: reportMissingImports=false
"""Many uploads at once to a served speech model, some of them broken, some of whose clients leave.

torchwright serve MODEL --port 8000
python -m benchmarks.speech.uploads RECORDING [--url http://127.0.0.1:8000]

Prints the number of times that each transcript came (there should be one), and the answer to each broken file.
"""

from __future__ import annotations

import contextlib
import io
import random
import struct
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import soundfile

from benchmarks.harness import run

READY_SECONDS = 300
LEAVING = 0.1
"""Share of the whole files that a client sends once before and then leaves, within three seconds."""


def main() -> int:
    url = "http://127.0.0.1:8000"
    asked = run.options(__doc__, "recording", json=False, url=url, uploads=200, clients=24)
    samples, rate = soundfile.read(asked.recording, dtype="float32")
    whole, others = wav(samples, rate), broken(samples, rate)
    names = [*others, *others][: asked.uploads // 10]
    jobs = [("", whole)] * (asked.uploads - len(names)) + [(name, others[name]) for name in names]
    random.shuffle(jobs)
    wait(asked.url)
    begun = time.perf_counter()
    with ThreadPoolExecutor(asked.clients) as pool:
        answers = list(pool.map(lambda job: send(asked.url, *job), jobs))
    for (name, status, text), count in sorted(Counter(answers).items()):
        print(f"{count:4}  {name or 'whole'}: {status} {text}")
    print(f"{asked.uploads} uploads by {asked.clients} clients in {time.perf_counter() - begun:.1f} s")
    return 0


def wait(url: str) -> None:
    """Wait until the server takes requests: it answers before its engine has a model."""
    until = time.monotonic() + READY_SECONDS
    while not (answer := httpx.get(f"{url}/health", timeout=30)).is_success:
        if time.monotonic() > until:
            raise SystemExit(f"{url} is not ready after {READY_SECONDS} s: {answer.text[:200]}")
        time.sleep(0.5)


def send(url: str, name: str, data: bytes) -> tuple[str, int, str]:
    """Upload once, again while the server is full; return the name, the status, the text or the reason."""
    path, files = f"{url}/v1/audio/transcriptions", {"file": ("a.wav", data)}
    if not name and random.random() < LEAVING:
        with contextlib.suppress(httpx.TimeoutException):  # that is what it is for
            httpx.post(path, files=files, timeout=random.uniform(0.05, 3))
    while (answer := httpx.post(path, files=files, timeout=900)).status_code == 429:
        time.sleep(float(answer.headers["retry-after"]))
    found = answer.json()
    return name, answer.status_code, found["text"] if answer.is_success else found["error"]["message"]


def broken(samples: np.ndarray, rate: int) -> dict[str, bytes]:
    """Return broken sound files by name."""
    whole, archive = wav(samples, rate), io.BytesIO()
    at = whole.index(b"data") + 4
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("a.wav", whole)
    wrong = samples.copy()
    wrong[len(wrong) // 2] = np.nan
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "no sound": b"Good morning. " * 99,
        "a zip": archive.getvalue(),
        "a header that lies": whole[:at] + struct.pack("<I", 1 << 31) + whole[at + 4 :],
        "0 Hz": whole[:24] + struct.pack("<I", 0) + whole[28:],
        "NaN": wav(wrong, rate, subtype="FLOAT"),
        "bytes": random.randbytes(5000),
        "MP3 alone in name": b"ID3\x04" + random.randbytes(3000),
        "FLAC cut short": wav(samples, rate, form="FLAC")[:3000],
    }


def wav(samples: np.ndarray, rate: int, form: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """Return a sound file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=form)
    return file.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
