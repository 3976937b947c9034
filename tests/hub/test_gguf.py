"""GGUF files: logits equal to those of the weights that their blocks stand for, tokenizers, and files that are wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf_files as files
import pytest
import quantized as made
import torch

from torchwright.decoder import load_decoder
from torchwright.errors import ModelError
from torchwright.hub.gguf.folder import opened
from torchwright.hub.gguf.header import read_gguf

BUNDLED = Path(__file__).parents[2] / "src/torchwright/bundled"
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))


def letters(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of 96 tokens: bytes of some characters, letters, words."""
    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
    pieces += [(f"<0x{byte:02X}>", 6, 0.0) for byte in (0x0A, 0xC3, 0xA9)]
    words = ["▁", *"helowrd", "▁h", "el", "lo", "ell", "▁hell", "▁hello", "or", "wor", "▁wor", "ld", "▁world", "he"]
    pieces += [(word, 1, -float(index)) for index, word in enumerate(words)]
    pieces += [("<|tool|>", 4, 0.0)]
    pieces += [(f"[PAD{index}]", 5, 0.0) for index in range(96 - len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, _, score in pieces],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in pieces],
        "tokenizer.ggml.bos_token_id": files.U32(1),
        "tokenizer.ggml.eos_token_id": files.U32(2),
        "tokenizer.ggml.unknown_token_id": files.U32(0),
        **more,
    }


EACH = [(kind, list(made.FAMILIES)[at % len(made.FAMILIES)]) for at, kind in enumerate(TYPES)]
ALL = [pytest.param(kind, family, marks=() if (kind, family) in EACH else pytest.mark.sweep) for kind in TYPES for family in made.FAMILIES]


@pytest.mark.parametrize(("kind", "family"), ALL)
def test_logits_are_those_of_the_weights_that_the_blocks_stand_for(
    kind: str, family: str, tmp_path: Path
) -> None:
    model = made.build(family, num_hidden_layers=1, intermediate_size=256)
    path = files.model_file(tmp_path / "model.gguf", model, lambda name: kind, letters())
    ids_BT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    loaded = load_decoder(path)
    torch.testing.assert_close(loaded.logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=1e-4)
    became = "dequantized to" if kind.startswith("Q") else "read as"
    assert loaded.stored == f"GGUF {kind}: {became} float32"
