# pyright: reportMissingImports=false
"""Word error rate of a small Whisper on voices that neither training nor calibration heard: original, rungs, a recipe.

    python benchmarks/speech_voices.py [MODEL] [--sentences 120] [--judged 80] [--max-drop 0.02] [--time-budget 120]

MODEL is the bundled speech model, or a folder of scripts/train_speech.py. `torchwright optimize` judges a recipe by
sentences of voices that training heard; then the original, each way of running it and the artifact hear others, of
voices that nobody heard before. Growth is over the original, of the same sentences, with a bootstrap's 95% interval.
Needs espeak-ng and flite.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import speech_corpus as corpus
import torchwright as tw
from speech_scores import FIRST_SEED, ORIGINAL, Sentences, growth, row, rungs, shown
from torchwright.core.records import Interval
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.score import rate

CALIBRATED = 2 * FIRST_SEED
"""Seeds of the sentences by which a search judges."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--sentences", type=int, default=120)
    parser.add_argument("--judged", type=int, default=80, help="sentences by which the search judges")
    parser.add_argument("--max-drop", type=float, default=0.02, help="of word error rate, at most")
    parser.add_argument("--time-budget", type=float, default=120, help="seconds of the search")
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    asked = parser.parse_args()
    if engine := corpus.missing():
        print(f"{engine} is not installed: apt-get install espeak-ng flite")
        return 1
    folder = asked.model or bundled()
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(f"python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        recipe = search(folder, Path(temporary), out, asked)
        said = Sentences.make(asked.sentences, corpus.NEVER_HEARD, asked.seed)
        ways = rungs(folder) | {f"recipe: {recipe}": lambda: tw.load(out).model}
        held = compare(said, ways, asked.max_drop)
    print(f"the recipe keeps the budget of {asked.max_drop:.1%}: {'yes' if held else 'NO'}")
    return 0 if held else 1


def search(folder: Path, beside: Path, out: Path, asked: argparse.Namespace) -> str:
    """The artifact that `torchwright optimize` finds by voices that training heard, and its steps in words."""
    judged = Sentences.make(asked.judged, corpus.HEARD, CALIBRATED)
    files = []
    for index, (spoken, text) in enumerate(zip(judged.spoken, judged.texts, strict=True)):
        sound, words = beside / f"{index}.flac", beside / f"{index}.txt"
        sound.write_bytes(corpus.flac(spoken.samples))
        words.write_text(text)
        files += ["--audio", str(sound), "--reference", str(words)]
    command = [sys.executable, "-m", "torchwright", "optimize", str(folder), *files, "-o", str(out)]
    command += ["--max-drop", str(asked.max_drop), "--time-budget", str(asked.time_budget)]
    command += ["--new-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"optimize ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    steps = json.loads((out / "recipe.json").read_text())["steps"]
    return " + ".join(step["name"] for step in steps) or "as it is"


def compare(said: Sentences, ways: dict, most: float) -> bool:
    """The table; whether the last way's word error rate has grown by no more than `most`."""
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
