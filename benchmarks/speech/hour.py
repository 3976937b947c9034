# pyright: reportMissingImports=false
"""An hour of synthetic speech through `transcribe`: throughput, memory over time, differences to each sentence's.

    python -m benchmarks.speech.hour [MODEL] [--minutes 60] [--batch 1 8] [--quantize SCHEME]

MODEL is the bundled speech model, or a folder of scripts/train_speech.py. The sound is a file of sentences between
pauses, 120 different ones again and again, drawn anew each time. Words are compared with the spoken text, and with the
transcript of each sentence alone: a difference there was lost, doubled or changed at a seam or in other company. Needs
espeak-ng and flite.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import soundfile
import torch

from benchmarks.harness import run
from benchmarks.harness.turns import both_clocks, since

sys.path.insert(0, str(run.ROOT / "scripts"))

import speech_corpus as corpus
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.score import edits

SENTENCES, PAUSES = 120, (0.4, 0.9)
MARKS = 6
"""Number of times that memory is read."""


def main() -> int:
    asked = run.options(__doc__, "model?", json=False, minutes=60.0, batch=[1, 8], quantize=str)
    if engine := corpus.missing():
        print(f"{engine} is not installed: apt-get install espeak-ng flite")
        return 1
    model = load_speech(Path(asked.model or bundled()), torch.bfloat16, asked.quantize)
    run.Rows(note=model.model.description)
    draw = Random(0)
    texts = [corpus.sentence(draw) for _ in range(SENTENCES)]
    sounds = [corpus.speak(text, draw.choice(corpus.HEARD), draw) for text in texts]
    sounds = [0.6 * sound / np.abs(sound).max() for sound in sounds]
    alone = [model.transcribe(sound).text.split() for sound in sounds]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hour.wav"
        order = write(file, sounds, asked.minutes, draw)
        said = [word for index in order for word in texts[index].split()]
        heard = [word for index in order for word in alone[index]]
        print(f"{len(order)} sentences, {len(said)} words; alone {edits(said, heard) / len(said):.2%} wrong")
        for batch in asked.batch:
            transcribe(model, file, batch, said, heard)
    return 0


def write(file: Path, sounds: list[np.ndarray], minutes: float, draw: Random) -> list[int]:
    """Write so many minutes of sentences between pauses; return their numbers in order."""
    order, seconds = list[int](), 0.0
    with soundfile.SoundFile(file, "w", corpus.RATE, 1, "PCM_16") as out:
        while seconds < 60 * minutes:
            order.append(draw.randrange(len(sounds)))
            pause = np.zeros(round(draw.uniform(*PAUSES) * corpus.RATE), np.float32)
            for part in (pause, sounds[order[-1]]):
                out.write(part)
                seconds += len(part) / corpus.RATE
    return order


def transcribe(model: Recognizer, file: Path, batch: int, said: list[str], heard: list[str]) -> None:
    words, marks = list[str](), list[str]()
    begun = both_clocks()
    total = soundfile.info(file).duration
    until = 0.0
    for window in model.windows(file, batch=batch):
        assert window.until > until or not window.segments, "windows go forward"
        until = window.until
        words += [word for segment in window.segments for word in segment.text.split()]
        if until >= (len(marks) + 1) / MARKS * total:
            marks.append(f"{resident() / 2**20:.0f}")
    taken, used = since(begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"batch {batch}: {until:.0f} of {total:.0f} s of sound in {taken:.1f} s ({total / taken:.0f} times as fast), "
        f"{used:.1f} s of processor time; MiB resident on the way {', '.join(marks)}, peak {peak:.0f}; "
        f"{len(words)} words, {edits(said, words) / len(said):.2%} other than was said, "
        f"{edits(heard, words) / len(heard):.2%} other than alone"
    )


def resident() -> int:
    """Return the resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    raise SystemExit(main())
