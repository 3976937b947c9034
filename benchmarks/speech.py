"""Seconds that Whisper takes for a window of 30 s with a fixed number of tokens, ours beside transformers' `generate`.

    python benchmarks/speech.py [--tokens 64] [--rounds 3]

Random weights of Whisper-base's shape; the end is forbidden to both, so that each decodes as many tokens. Contenders
take turns in one process; features are made anew each time. Ratios are of medians, and of this run alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from torchwright.speech.steps import Steps
from torchwright.speech.whisper.attempt import attempt
from torchwright.speech.whisper.features import LogMel
from torchwright.speech.whisper.vocabulary import Vocabulary

SECONDS = 30
END, START, PREVIOUS, NO_TIMESTAMPS, SIZE = 50257, 50258, 50361, 50363, 51865
"""Ids of the multilingual Whispers before large-v3."""
SHAPE = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048}
SHAPE |= {"decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    shape: dict[str, Any] = dict(SHAPE)
    build: Any = transformers.WhisperForConditionalGeneration
    config = transformers.WhisperConfig(
        vocab_size=SIZE, eos_token_id=END, decoder_start_token_id=START, **shape
    )
    wide = build(config).eval()
    narrow = build(config).eval().to(torch.bfloat16)
    calls = {
        f"{name} {dtype}": make(model, asked.tokens)
        for dtype, model in {"fp32": wide, "bf16": narrow}.items()
        for name, make in {"transformers": theirs, "ours": ours}.items()
    }
    samples = (0.1 * torch.randn(SECONDS * 16_000)).numpy()
    taken = {name: list[float]() for name in calls}
    with torch.inference_mode():
        for _ in range(asked.rounds + 1):
            for name, call in calls.items():
                begun = time.perf_counter()
                call(samples)
                taken[name].append(time.perf_counter() - begun)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(
        f"transformers {transformers.__version__}, load {os.getloadavg()[0]:.0f}, {asked.tokens} tokens a window"
    )
    for name, seconds in taken.items():
        middle = statistics.median(seconds[1:])
        print(f"{name:18} {middle:6.2f} s a window, {middle / SECONDS:.3f} s a second of sound")
    return 0


def ours(model: Any, tokens: int) -> Callable[..., None]:
    """Features, encoder and one attempt at temperature 0, as `Whisper.recognize` runs them."""
    with TemporaryDirectory() as empty:
        features = LogMel(Path(empty), bands=80, frames=SECONDS * 100)
    vocabulary = Vocabulary(
        size=SIZE,
        start=START,
        end=END,
        no_timestamps=NO_TIMESTAMPS,
        previous=PREVIOUS,
        tasks={"transcribe": 50359},
        languages={"en": 50259},
        suppressed=tuple(range(END, NO_TIMESTAMPS + 1)),
        suppressed_first=(),
        max_initial=50,
    )
    prompt, random = vocabulary.prompt("en", "transcribe"), torch.Generator()

    def call(samples) -> None:
        states = model.get_encoder()(features(samples).to(model.dtype)).last_hidden_state
        found = attempt(Steps(model, states), prompt, vocabulary, room=tokens, temperature=0.0, random=random)
        assert len(found.tokens) == tokens

    return call


def theirs(model: Any, tokens: int) -> Callable[..., None]:
    """transformers' feature extractor and its plain `generate`, without its rules for long sound."""
    extractor = transformers.WhisperFeatureExtractor()
    prompt = torch.tensor([[START, 50259, 50359]])
    plain: Any = transformers.GenerationMixin

    def call(samples) -> None:
        made = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features.to(model.dtype)
        ids = plain.generate(
            model,
            made,
            decoder_input_ids=prompt,
            generation_config=transformers.GenerationConfig(
                min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=END, pad_token_id=END
            ),
        )
        assert ids.shape[1] == prompt.shape[1] + tokens

    return call


if __name__ == "__main__":
    sys.exit(main())
