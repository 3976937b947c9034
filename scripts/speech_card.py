"""The card of the bundled speech model: its figures are measured as it is written."""

from __future__ import annotations

from pathlib import Path

import speech_corpus as corpus
from speech_scores import ORIGINAL, Sentences, row, rungs, shown
from torchwright.hub.folder import read_config
from torchwright.models.speech.score import rate

RUNGS = (ORIGINAL, "bf16", "w8a8", "w4a8")

CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
tags: [automatic-speech-recognition, whisper, tiny, synthetic]
---

# Torchwright's bundled speech model

A small Whisper of {words} English words and the letters of the alphabet, trained from nothing on speech that espeak-ng
and flite made. It exists so that `torchwright transcribe FILE` says something true without a download, and so that
quantization costs in tests what it costs on real answers. **It is no general recognizer**: it writes every sound with
the words that it knows.

`scripts/train_speech.py` made this folder, and `scripts/train_speech.py export` measured every figure on this card.

## Word error rate

{count} made sentences for each kind of voices, with pink noise of 30, 20, 10 dB or none, from seeds that training never
had; 95% intervals of a bootstrap over sentences. Words are compared as Whisper's evaluation does.

{scores}

`python -m benchmarks.speech.voices` measures it again, with what a search keeps beside it.
`python scripts/speech_heads.py --write` finds the heads that place words in time.

## Architecture

Whisper, {parameters:,} parameters, {size:.1f} MB in bfloat16.

| | |
|---|---|
| layers of encoder and decoder | {encoder_layers}, {decoder_layers} |
| model size, feed-forward size | {d_model}, {encoder_ffn_dim} |
| heads, head size | {encoder_attention_heads}, {head} |
| window | {seconds} s, {max_source_positions} states |
| positions of the decoder | {max_target_positions} |
| vocabulary | {vocab_size}: a token for each word, bytes, {special} special ones, a timestamp for each 20 ms |

## Training

| | |
|---|---|
| windows | {windows:,} of {seconds} s, {hours:.0f} hours, of {voices} voices |
| time | {trained} |
| loss | cross-entropy of words and timestamps; beside it CTC of letters on the encoder, whose layer was thrown away |
| optimizer | Muon (matrices of layers) and AdamW (all else) |

## Data

Sentences of a small grammar (`scripts/speech_corpus.py`): commands for a house, numbers from 0 to 9999 in words,
digits, letters that are spelled, names, places, months, days, animals. No recording of a person is in it. Voices that
training never heard:
{never}.

## Limits

- It knows these words alone, and speech of espeak-ng and flite best. Of people it understands little, of telephones
  (sound of 8 kHz) as well: training had none.
- English, lower case, no punctuation. No language is detected, nothing is translated, no prompt is taken.
- Windows of {seconds} s: a sentence that is longer is cut, and the next window begins where the last whole one ended.
- Of a longer sound it loses words where pauses are longer than what it was trained on (0.25 to 0.6 s): `--batch 8`
  cuts at pauses and suits it better (`python -m benchmarks.speech.hour`).
"""


def card(folder: Path, *, words: int, windows: int, parameters: int, trained: str, sentences: int) -> str:
    """Return the card of a folder with weights, measured on so many sentences of each kind of voices."""
    config = read_config(folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".md") / 1e6
    return CARD.format(
        **config,
        words=words,
        windows=windows,
        hours=windows * corpus.SECONDS / 3600,
        voices=len(set(corpus.HEARD)),
        parameters=parameters,
        size=size,
        trained=trained,
        head=config["d_model"] // config["encoder_attention_heads"],
        seconds=corpus.SECONDS,
        special=7,
        count=sentences,
        scores=_scores(folder, sentences),
        never=", ".join(corpus.NEVER_HEARD),
    )


def _scores(folder: Path, sentences: int) -> str:
    kinds = {"heard": corpus.HEARD, "never heard": corpus.NEVER_HEARD}
    sets = {name: Sentences.make(sentences, voices) for name, voices in kinds.items()}
    rows = [row(["computed in", *(f"voices {name}" for name in sets)]), "|---|---:|---:|"]
    ways = rungs(folder)
    for name in RUNGS:
        model = ways[name]()
        rows.append(row([name, *(shown(rate(*said.errors(model))) for said in sets.values())]))
        print(rows[-1], flush=True)
    return "\n".join(rows)
