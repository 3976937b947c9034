"""Names of a decoder's tensors in files that do not use the usual ones. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from torchwright.hub.language_part import PREFIXES, language_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BASE = "model."
"""Prefix of all tensors but the output layer's; files of a base model, saved by itself, lack it."""
EXAONE = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}
"""Parts of EXAONE 3's names → Llama's, longer ones first."""


def file_names(names: Iterable[str], model_type: object) -> dict[str, str]:
    """Return the file's name of each tensor under the model's name for it."""
    names = list(names)
    if any(name.startswith(tuple(PREFIXES)) for name in names):
        return {language_name(name): name for name in names}
    if model_type == "exaone":
        return {_renamed(name): name for name in names}
    if EMBEDDING.removeprefix(BASE) in names and not any(name.startswith(BASE) for name in names):
        return {name if name == HEAD else BASE + name: name for name in names}
    return dict(zip(names, names, strict=True))


def _renamed(name: str) -> str:
    for part, usual in EXAONE.items():
        name = name.replace(part, usual)
    return name
