# pyright: reportMissingImports=false
"""Word error rate of a speech model on the recordings of Debian's pocketsphinx-testdata, which come with transcripts.

    apt-get install pocketsphinx-testdata         or download it, and dpkg -x pocketsphinx-testdata_*.deb DATA
    python -m benchmarks.speech.words MODEL [DATA] [--ways WAY ...]

MODEL is a folder of transformers; scripts/moonshine_folder.py writes a real one. A way is a precision: the original is
transformers' modules in float32, all others are our own layers.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from benchmarks.harness import run

sys.path.insert(0, str(run.ROOT / "scripts"))

from speech_scores import ORIGINAL, rungs
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.score import normalizer, word_error_rate

SETS = {"librivox": "transcription", "cards": "cards.transcription"}
"""Folder → the file of its words: a line `<s> words </s> (name)` for each recording."""
LINE = re.compile(r"<s>(.*)</s>\s*\((.*)\)")


def main() -> int:
    default = ["original", "float32", "bf16", "w8a8"]
    asked = run.options(__doc__, "model", "data?", json=False, ways=default)
    ways = rungs(Path(asked.model))
    for way in asked.ways:
        model = ways[ORIGINAL if way == "original" else way]()
        print(f"== {way}: {model.model.description}")
        transcribe_all(model, Path(asked.data or "/"))
    return 0


def transcribe_all(model: Recognizer, data: Path) -> None:
    """Print the word error rates of both sets, and the wrong transcripts."""
    normalize = normalizer("en", model.folder)
    for name, words in SETS.items():
        folder = data / "usr/share/pocketsphinx/test/data" / name
        spoken = [LINE.match(line) for line in (folder / words).read_text().splitlines()]
        references = {found[2]: found[1].strip() for found in spoken if found}
        begun = time.perf_counter()
        heard = {file: model.transcribe(folder / f"{file}.wav") for file in references}
        taken = time.perf_counter() - begun
        seconds = sum(found.seconds for found in heard.values())
        rate = word_error_rate(list(references.values()), [found.text for found in heard.values()], normalize)
        print(
            f"{name}: {len(heard)} recordings, {seconds:.1f} s, word error rate {rate.value:.1%} "
            f"({rate.low:.1%} to {rate.high:.1%}), {taken / seconds:.2f} s a second of sound"
        )
        for file, reference in references.items():
            if normalize(reference) != normalize(heard[file].text):
                print(f"  {file}: {normalize(reference)} / {normalize(heard[file].text)}")


if __name__ == "__main__":
    sys.exit(main())
