"""Names of a decoder's tensors in files that do not use the usual ones. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchwright.core.errors import ModelError
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
    """Return the file's name of each tensor under the model's name for it.

    Raises `ModelError` for two tensors that are the same one of the model.
    """
    names = list(names)
    usual = _usual_name(names, model_type)
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(usual(name), name)
        if other != name:
            raise ModelError(
                f"two tensors of the folder are the model's '{usual(name)}'",
                found=f"{other} and {name}",
                next="take the files of one checkpoint alone",
            )
    return found


def _usual_name(names: list[str], model_type: object) -> Callable[[str], str]:
    """Return what turns a file's name of a tensor into the model's."""
    if any(name.startswith(tuple(PREFIXES)) for name in names):
        return language_name
    if model_type == "exaone":
        return _renamed
    if EMBEDDING.removeprefix(BASE) in names and not any(name.startswith(BASE) for name in names):
        return lambda name: name if name == HEAD else BASE + name
    return lambda name: name


def _renamed(name: str) -> str:
    for part, usual in EXAONE.items():
        name = name.replace(part, usual)
    return name
