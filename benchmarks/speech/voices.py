# pyright: reportMissingImports=false
"""Word error rate of a small Whisper on voices that neither training nor calibration heard: original and recipes.

    python -m benchmarks.speech.voices [MODEL] [--sentences 120] [--judged 80] [--max-drop 0.02] [--time-budget 120]

MODEL is the bundled speech model, or a folder of scripts/train_speech.py. `torchwright optimize` judges a recipe by
--judged sentences of voices that training heard. Then the original, each way of running it and the artifact hear
others, of voices that nobody heard before. Growth is over the original, of the same sentences, with a bootstrap's 95%
interval. Needs espeak-ng and flite.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import run

sys.path.insert(0, str(run.ROOT / "scripts"))

import speech_corpus as corpus
import torchwright as tw
from speech_scores import FIRST_SEED, ORIGINAL, Sentences, growth, row, rungs, shown
from torchwright.core.records import Interval
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.score import rate

CALIBRATED = 2 * FIRST_SEED
"""Seeds of the sentences by which a search judges."""


def main() -> int:
    limits = {"max_drop": 0.02, "time_budget": 120.0}
    counts = {"sentences": 120, "judged": 80, "seed": FIRST_SEED}
    asked = run.options(__doc__, "model?", json=False, **counts, **limits)
    if engine := corpus.missing():
        print(f"{engine} is not installed: apt-get install espeak-ng flite")
        return 1
    folder = Path(asked.model or bundled())
    run.Rows()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        recipe = search(folder, Path(temporary), out, asked)
        said = Sentences.make(asked.sentences, corpus.NEVER_HEARD, asked.seed)
        ways = rungs(folder) | {f"recipe: {recipe}": lambda: tw.load(out).model}
        held = compare(said, ways, asked.max_drop)
    print(f"the recipe keeps the budget of {asked.max_drop:.1%}: {'yes' if held else 'NO'}")
    return 0 if held else 1


def search(folder: Path, scratch: Path, out: Path, asked: argparse.Namespace) -> str:
    """Write the artifact that `torchwright optimize` finds by voices that training heard; return its steps."""
    judged = Sentences.make(asked.judged, corpus.HEARD, CALIBRATED)
    files = []
    for index, (spoken, text) in enumerate(zip(judged.spoken, judged.texts, strict=True)):
        sound, words = scratch / f"{index}.flac", scratch / f"{index}.txt"
        sound.write_bytes(corpus.flac(spoken.samples))
        words.write_text(text)
        files += ["--audio", str(sound), "--reference", str(words)]
    limits = ("--max-drop", asked.max_drop, "--time-budget", asked.time_budget, "--new-tokens", 16)
    run.torchwright("optimize", folder, *files, "-o", out, *limits)
    steps = json.loads((out / "recipe.json").read_text())["steps"]
    return " + ".join(step["name"] for step in steps) or "as it is"


def compare(said: Sentences, ways: dict, most: float) -> bool:
    """Print the table; return True if the last way's word error rate has grown by no more than `most`."""
    voices = ", ".join(dict.fromkeys(corpus.NEVER_HEARD))
    print(f"\n{len(said.texts)} sentences by {voices}\n")
    print(row(["computed in", "word error rate", f"growth over {ORIGINAL}"]))
    print("|---|---:|---:|")
    words_U = before_U = None
    grown = Interval(value=0.0, low=0.0, high=0.0)
    for name, opened in ways.items():
        words_U, errors_U = said.errors(opened())
        before_U = errors_U if before_U is None else before_U
        grown = growth(words_U, errors_U, before_U)
        print(row([name, shown(rate(words_U, errors_U)), shown(grown)]), flush=True)
    return grown.value <= most


if __name__ == "__main__":
    raise SystemExit(main())
