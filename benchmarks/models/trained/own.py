# pyright: reportMissingImports=false
"""The two models that Torchwright brings along: a language model of Python's documentation, and a small Whisper.

    apt-get install espeak-ng flite

The language model's metric is the perplexity of text that training never saw. The Whisper's is the share of words that
it hears right, 1 less the word error rate, of sentences by voices that training never heard.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.run import BUNDLED, ROOT
from benchmarks.models.trained.task import Inputs, MissingPackage, Trained

TEXTS, TOKENS = 4, 128
"""Pieces of a call, and their tokens."""
SEARCH_CALLS, HELD_OUT_CALLS = 12, 32

SENTENCES, HEARD_TOKENS = 8, 24
"""Windows of a call, and tokens of the longest transcript with its timestamps."""
SEARCH_SPOKEN, HELD_OUT_SPOKEN = 4, 8
SEARCH_SEED, HELD_OUT_SEED = 2_000_000, 1_000_000
"""Seeds of training windows lie below both."""


class Logits(nn.Module):
    """A model of transformers without a cache, which answers with its logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class LanguageLogits(Logits):
    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids_BT, use_cache=False).logits


class SpeechLogits(Logits):
    def forward(self, mels_BMF: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.inner(input_features=mels_BMF, decoder_input_ids=ids_BT, use_cache=False).logits


@dataclass
class Perplexity:
    """exp(mean loss) of every token but the first of each piece."""

    calls: list[Inputs]
    __name__: str = field(default="perplexity")

    @torch.inference_mode()
    def __call__(self, model: nn.Module) -> float:
        losses = [
            F.cross_entropy(model(ids_BT)[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten())
            for (ids_BT,) in self.calls
        ]
        return torch.stack(losses).double().mean().exp().item()


def bundled() -> Trained:
    """Return the language model: it searches by its calibration text, and its evaluation text is held out."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    inner = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    search = texts(tokenizer, "calibration.txt", SEARCH_CALLS)
    held_out = texts(tokenizer, "eval.txt", HELD_OUT_CALLS)
    return Trained(
        model=LanguageLogits(inner).eval().requires_grad_(False),
        search=search,
        search_metric=Perplexity(search),
        held_out=held_out,
        held_out_metric=Perplexity(held_out),
        higher_is_better=False,
        source="Torchwright's bundled language model and its texts",
    )


def texts(tokenizer: Any, file: str, count: int) -> list[Inputs]:
    """Return calls of pieces, each led by the token that begins a text, taken evenly from the file."""
    ids = torch.tensor(tokenizer.encode((BUNDLED / file).read_text("utf-8"), add_special_tokens=False).ids)
    begin = tokenizer.token_to_id("<|begin|>")
    pieces = ids[: len(ids) // (TOKENS - 1) * (TOKENS - 1)].view(-1, TOKENS - 1)
    places = torch.linspace(0, len(pieces) - 1, count * TEXTS).long()
    return [(rows.contiguous(),) for rows in F.pad(pieces[places], (1, 0), value=begin).split(TEXTS)]


@dataclass
class WordsHeard:
    """1 less the word error rate of greedy transcripts, found by calls of one shape."""

    windows: list[Inputs]
    """Spectrograms, and tokens that are padded behind the first one."""
    references: list[str]
    end: int
    """The token that ends a transcript; those above are timestamps and other special ones."""
    tokenizer: Any
    __name__: str = field(default="1 less the word error rate")

    def __call__(self, model: nn.Module) -> float:
        from torchwright.models.speech.score import normalizer, word_error_rate

        return 1 - word_error_rate(self.references, self.transcripts(model), normalizer("en")).value

    @torch.inference_mode()
    def transcripts(self, model: nn.Module) -> list[str]:
        found = list[str]()
        for mels_BMF, start_BT in self.windows:
            ids_BT = start_BT.clone()
            ended_B = torch.zeros(len(ids_BT), dtype=torch.bool)
            for place in range(1, ids_BT.shape[1]):
                next_B = model(mels_BMF, ids_BT)[:, place - 1].argmax(-1)
                ids_BT[:, place] = torch.where(ended_B, self.end, next_B)
                ended_B |= next_B == self.end
                if ended_B.all():
                    break
            found += [self.tokenizer.decode(ids_T[ids_T < self.end]) for ids_T in ids_BT]
        return found


def bundled_speech() -> Trained:
    """Return the small Whisper: voices that training heard search, voices that it never heard are held out."""
    from transformers import AutoTokenizer, WhisperForConditionalGeneration

    sys.path.insert(0, str(ROOT / "scripts"))
    import speech_corpus as corpus

    if engine := corpus.missing():
        raise MissingPackage(f"{engine} is not installed; `apt-get install espeak-ng flite`")
    folder = BUNDLED / "speech"
    inner = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    search = said(tokenizer, corpus.HEARD, SEARCH_SPOKEN, SEARCH_SEED)
    held_out = said(tokenizer, corpus.NEVER_HEARD, HELD_OUT_SPOKEN, HELD_OUT_SEED)
    return Trained(
        model=SpeechLogits(inner).eval().requires_grad_(False),
        search=search.windows,
        search_metric=search,
        held_out=held_out.windows,
        held_out_metric=held_out,
        higher_is_better=True,
        source="Torchwright's bundled speech model; sentences by espeak-ng and flite",
    )


def said(tokenizer: Any, voices: tuple[str, ...], count: int, seed: int) -> WordsHeard:
    """Return so many calls of sentences by these voices, with the words to find."""
    from transformers import AutoFeatureExtractor

    import speech_corpus as corpus

    extract = AutoFeatureExtractor.from_pretrained(BUNDLED / "speech")
    spoken = [corpus.window(seed + place, voices, single=True) for place in range(count * SENTENCES)]
    sounds = [one.samples for one in spoken]
    mels_NMF = extract(sounds, sampling_rate=corpus.RATE, return_tensors="pt").input_features
    begin, end = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|endoftext|>"])
    start = torch.full((SENTENCES, HEARD_TOKENS), end)
    start[:, 0] = begin
    return WordsHeard(
        windows=[(rows.contiguous(), start) for rows in mels_NMF.split(SENTENCES)],
        references=[" ".join(text for text, _, _ in one.said if text is not None) for one in spoken],
        end=end,
        tokenizer=tokenizer,
    )
