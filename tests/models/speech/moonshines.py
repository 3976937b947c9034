"""Small Moonshine folders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MoonshineConfig, MoonshineForConditionalGeneration

from folders import VOCABULARY, byte_tokenizer

HEADS, LAYERS = 4, 2


def moonshine(folder: Path, head: int = 12, part: float = 0.7, **overrides: Any) -> Any:
    """The model of a new folder: heads of `head` dimensions of which a part turns, norms that no new one has."""
    fields: dict[str, Any] = {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS}
    fields |= {"encoder_num_attention_heads": HEADS, "decoder_num_attention_heads": HEADS}
    fields |= {"encoder_num_hidden_layers": LAYERS, "decoder_num_hidden_layers": LAYERS}
    fields |= {"vocab_size": VOCABULARY, "hidden_size": HEADS * head, "intermediate_size": 72}
    fields |= {"max_position_embeddings": 194}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": part}
    config = MoonshineConfig(**(fields | {"rope_parameters": rope} | overrides))
    model: Any = MoonshineForConditionalGeneration(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        else:
            parameter.mul_(20 if "embed" in name else 4)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model
