"""The names of a GGUF file's tensors, and those that the same tensors have in a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchwright.core.errors import ModelError

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE = "rope_freqs.weight"
"""Factors of the rotary embedding, which config.json has a place for."""
IN_A_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")


def model_names(names: Iterable[str], what: str) -> dict[str, str]:
    """The model's name of each tensor → the file's; raises `ModelError` for one that no family here has."""
    found: dict[str, str] = {}
    for name in names:
        if name == ROPE:
            continue
        if (match := IN_A_LAYER.fullmatch(name)) and match[2] in LAYER:
            found[f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"] = name
        elif (match := OUTSIDE.fullmatch(name)) and match[1] in WHOLE:
            found[f"{WHOLE[match[1]]}.{match[2]}"] = name
        else:
            raise ModelError(
                f"{what} has a tensor '{name[:80]}' that no family of those that are read from GGUF has",
                next="take the model's folder with *.safetensors",
            )
    return found
