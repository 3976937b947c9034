# pyright: reportMissingImports=false
"""Moonshine base's encoder, for the words that its decoder then finds.

    pip install --no-deps moonshine-cpp; pip install onnxruntime soundfile scipy
    apt-get download asterisk-core-sounds-en-wav; dpkg -x asterisk-core-sounds-en-wav_*.deb DATA

English announcements, joined to pieces of one length; every second recording is held out. The decoder stays as it is.
The metric is 1 less the word error rate against the original's own transcripts: the package has no others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.run import ROOT
from benchmarks.models.trained.sounds import ANNOUNCED, RATE, as_loud, joined
from benchmarks.models.trained.task import Inputs, MissingPackage, Trained, package_folder

SECONDS, BATCH, TOKENS = 5, 4, 32
"""Length of a piece, pieces of a call, and tokens of the longest transcript."""
SEARCH_CALLS, HELD_OUT_CALLS = 4, 10
SPEAKER = "en*/**/*.wav"
"""Files of the English speaker."""


class Encoder(nn.Module):
    """Sound (batch, samples) at 16 kHz → states (batch, positions, width)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, sound_BS: torch.Tensor) -> torch.Tensor:
        return self.inner(sound_BS).last_hidden_state


@dataclass
class SameWords:
    """1 less the word error rate of the decoder's transcripts, against these."""

    calls: list[Inputs]
    references: list[str]
    decoder: Any
    """Moonshine, of which the decoder is called."""
    tokenizer: Any
    __name__: str = field(default="1 less the word error rate")

    def __call__(self, model: nn.Module) -> float:
        from torchwright.models.speech.score import normalizer, word_error_rate

        found = transcripts(model, self.calls, self.decoder, self.tokenizer)
        return 1 - word_error_rate(self.references, found, normalizer("en")).value


@torch.inference_mode()
def transcripts(encoder: nn.Module, calls: list[Inputs], decoder: Any, tokenizer: Any) -> list[str]:
    """Return the greedy transcript of every piece."""
    from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

    found = list[str]()
    for call in calls:
        states_BTE = encoder(*call).float().clone()
        ids_BT = decoder.generate(
            encoder_outputs=MoonshineEncoderModelOutput(last_hidden_state=states_BTE),
            attention_mask=torch.ones(states_BTE.shape[:2], dtype=torch.long),
            pad_token_id=decoder.config.eos_token_id,
            max_new_tokens=TOKENS,
            do_sample=False,
        )
        found += tokenizer.decode_batch(ids_BT.tolist(), skip_special_tokens=True)
    return found


def moonshine(sounds: Path) -> Trained:
    """Return the encoder with pieces of the English speaker's announcements."""
    files = sorted((sounds / ANNOUNCED).glob(SPEAKER))
    if not files:
        raise MissingPackage(
            f"{sounds / ANNOUNCED} has no {SPEAKER}; unpack Debian's asterisk-core-sounds-en-wav there"
        )
    whole, tokenizer = load()
    encoder = Encoder(whole.model.encoder)
    search, held_out = pieces(files[::2], SEARCH_CALLS), pieces(files[1::2], HELD_OUT_CALLS)
    return Trained(
        model=encoder,
        search=search,
        search_metric=SameWords(search, transcripts(encoder, search, whole, tokenizer), whole, tokenizer),
        held_out=held_out,
        held_out_metric=SameWords(
            held_out, transcripts(encoder, held_out, whole, tokenizer), whole, tokenizer
        ),
        higher_is_better=True,
        source="moonshine-cpp; the English speaker of asterisk-core-sounds",
    )


def load() -> tuple[Any, Any]:
    """Return transformers' Moonshine with the package's weights, int8 made wide, and its tokenizer."""
    from transformers import MoonshineForConditionalGeneration

    sys.path.insert(0, str(ROOT / "scripts"))
    from moonshine_folder import base, every_weight, tokenizer

    folder = package_folder("moonshine_cpp", "moonshine-cpp") / "models" / "base-en"
    tensors = every_weight(
        (folder / "encoder_model.ort").read_bytes(), (folder / "decoder_model_merged.ort").read_bytes()
    )
    # transformers complains of a parameter that is missing or has another shape.
    whole: Any = MoonshineForConditionalGeneration.from_pretrained(None, config=base(), state_dict=tensors)
    return whole.eval().requires_grad_(False), tokenizer((folder / "tokenizer.bin").read_bytes())


def pieces(files: list[Path], count: int) -> list[Inputs]:
    """Return calls of pieces of these recordings, one after the other."""
    sound = joined(files, count * BATCH * SECONDS).view(-1, SECONDS * RATE)
    return [(rows.contiguous(),) for rows in torch.stack([*map(as_loud, sound)]).split(BATCH)]
