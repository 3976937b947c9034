"""Find the heads of a small Whisper's decoder that follow the sound, so that its words are placed in time.

    python scripts/speech_heads.py [FOLDER] [--sentences 24] [--write]

FOLDER is the bundled speech model, or another of scripts/train_speech.py. Each head alone places the words of sentences
that speech_corpus.py makes, by voices that training heard. Then the best ones place them together, and those are taken
whose last word ends nearest to the end of the sentence. Unheard voices compare them with the upper half of the layers,
which is the default. --write puts them into generation_config.json. Needs espeak-ng and flite.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import speech_corpus as corpus
from speech_scores import FIRST_SEED, Sentences
from torchwright.hub.folder import read_config
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.steps import Head

TOGETHER = 4
"""Heads at most."""
LONG = 1.2
"""Seconds that none of the corpus's words lasts."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=bundled())
    parser.add_argument("--sentences", type=int, default=24)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if engine := corpus.missing():
        print(f"{engine} is not installed: apt-get install espeak-ng flite")
        return 1
    model, config = load_speech(asked.folder), read_config(asked.folder)
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    heard = Sentences.make(asked.sentences, corpus.HEARD, 3 * FIRST_SEED)
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    alone = {head: tell(model, heard, [head]) for head in every}
    best = sorted(every, key=lambda head: alone[head])
    chosen = min(
        (best[:count] for count in range(1, TOGETHER + 1)), key=lambda some: tell(model, heard, some)
    )
    print("voices that nobody heard:")
    others = Sentences.make(2 * asked.sentences, corpus.NEVER_HEARD, 4 * FIRST_SEED)
    tell(model, others, [head for head in every if head[0] >= layers // 2])
    tell(model, others, chosen)
    if asked.write:
        file = asked.folder / "generation_config.json"
        settings = json.loads(file.read_text()) | {"alignment_heads": [list(head) for head in chosen]}
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return 0


def tell(model: Recognizer, said: Sentences, heads: list[Head]) -> float:
    """Print and return how far, in seconds and on average, the last word's end is from the sentence's."""
    model.heads = heads  # pyright: ignore[reportAttributeAccessIssue]
    apart: list[float] = []
    longest: list[float] = []
    for spoken in said.spoken:
        found = model.transcribe(spoken.samples, timestamps="word")
        words = [word for segment in found.segments for word in segment.words or ()]
        if words:
            ends = [end for text, _, end in spoken.said if text is not None]
            apart.append(abs(words[-1].end - ends[-1] / corpus.TICKS_PER_SECOND))
            longest.append(max(word.end - word.start for word in words))
    mean = float(np.mean(apart)) if apart else np.inf
    if apart:
        long = float(np.mean(np.array(longest) > LONG))
        print(
            f"{heads}: the last word ends {np.median(apart):.2f} s off (median), {mean:.2f} s (mean); "
            f"{long:.0%} of the sentences have a word of more than {LONG} s",
            flush=True,
        )
    return mean


if __name__ == "__main__":
    sys.exit(main())
