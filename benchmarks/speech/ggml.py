"""A Whisper folder as whisper.cpp's own file, for speed.py: its layout as ggml's whisper.cpp reads it (`lmgg`).

Header, mel filters, words of the vocabulary, then tensors under openai/whisper's names. Matrices are in 16 bits or, as
q8_0, in blocks of 32 signed bytes with a scale in 16 bits; what whisper.cpp's quantizer leaves in 16 bits or 32 stays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import load_file
from transformers.audio_utils import mel_filter_bank

from benchmarks.speech.rules import BANDS, END, RATE

MAGIC, FFT = 0x67676D6C, 400
F32, F16, Q8_0 = 0, 1, 8
"""Tensor types."""
FILES = {"f16": 1, "q8_0": 2007}
"""File types: matrices of 16 bits; q8_0 (7) of the second version of its layout."""
BLOCK = 32
WIDE = ("conv1.bias", "conv2.bias", "positional_embedding")
NAMES = (
    ("model.", ""),
    ("layers.", "blocks."),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn.", "cross_attn."),
    ("self_attn.", "attn."),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
)


def write(folder: Path, out: Path, how: str) -> None:
    """Write `folder`'s model as a file of `FILES`."""
    config = json.loads((folder / "config.json").read_text())
    with out.open("wb") as file:
        audio = [config[key] for key in ("max_source_positions", "d_model")]
        text = [config[key] for key in ("max_target_positions", "d_model")]
        audio += [config[f"encoder_{key}"] for key in ("attention_heads", "layers")]
        text += [config[f"decoder_{key}"] for key in ("attention_heads", "layers")]
        numbers = (MAGIC, config["vocab_size"], *audio, *text, config["num_mel_bins"], FILES[how])
        file.write(struct.pack("<12i", *numbers))
        filters_FM = mel_filter_bank(
            1 + FFT // 2, BANDS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney"
        )
        file.write(struct.pack("<2i", BANDS, 1 + FFT // 2) + filters_FM.T.astype("<f4").tobytes())
        file.write(struct.pack("<i", END))
        for index in range(END):  # the words of a random model mean nothing
            word = f"word{index}".encode()
            file.write(struct.pack("<i", len(word)) + word)
        for name, values in tensors(folder):
            put(file, name, values, how)


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in load_file(folder / "model.safetensors").items():
        if name == "proj_out.weight":  # the token embedding's
            continue
        for ours, theirs in NAMES:
            name = name.replace(ours, theirs)
        yield name, values[:, None] if name.endswith(("conv1.bias", "conv2.bias")) else values


def put(file: BinaryIO, name: str, values: np.ndarray, how: str) -> None:
    kind = F32
    if values.ndim > 1 and not name.endswith(WIDE):
        kind = Q8_0 if how == "q8_0" and values.ndim == 2 else F16
    title = name.encode()
    file.write(struct.pack("<3i", values.ndim, len(title), kind))
    file.write(struct.pack(f"<{values.ndim}i", *reversed(values.shape)) + title)
    if kind == Q8_0:
        file.write(blocks(values))
    else:
        file.write(values.astype("<f2" if kind == F16 else "<f4").tobytes())


def blocks(values: np.ndarray) -> bytes:
    """Return q8_0: each 32 numbers of a row as a scale in float16 and as many signed bytes."""
    rows_NB = values.astype(np.float32).reshape(-1, BLOCK)
    scales_N = np.abs(rows_NB).max(1) / 127
    inverse_N = np.divide(1, scales_N, out=np.zeros_like(scales_N), where=scales_N > 0)
    made = np.empty(len(rows_NB), np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)]))
    made["scale"], made["values"] = scales_N, np.rint(rows_NB * inverse_N[:, None])
    return made.tobytes()
