"""The language model inside a multimodal folder: its part of config.json, and of the tensors' names. No torch here.

With text alone these models compute what their language model computes. Rotary embeddings with three positions for a
token (Qwen2-VL and later) turn a text's tokens by one; their sections say which frequencies turn with which of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwright.hub.architectures import NATIVE

HOSTS = (
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
"""`model_type` of multimodal models whose text goes through their language model as it is."""
FLAT = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "paddleocr_vl": "paddleocr_vl_text",
}
"""Those whose older files have the language model's fields at the top level → its `model_type`."""
PARTS = {kind: architecture for architecture, kind in NATIVE.items()} | {
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
}
"""`model_type` of a language model inside another → the native architecture."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "paddleocr_vl_text": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
}
"""`model_type` of such a language model → defaults that differ from the native architecture's."""
SEVERAL = {"paddleocr_vl_text": {"use_bias": ("attention_bias", "mlp_bias")}}
"""`model_type` → its fields that set several of the native architecture's."""
SECTIONS = {
    "qwen2_vl": ([16, 24, 24], False),
    "qwen2_5_vl": ([16, 24, 24], False),
    "qwen3_vl": ([24, 20, 20], True),
    "qwen3_vl_moe": ([24, 20, 20], True),
    "qwen3_5": ([11, 11, 10], True),
    "qwen3_5_moe": ([11, 11, 10], True),
    "paddleocr_vl": ([16, 24, 24], False),
}
"""`model_type` → the sections of a rotary embedding for pictures, and whether frequencies take turns.

The sections are transformers' own, for files that name none; transformers decides the second by the class alone."""
PLACEHOLDERS = "placeholder_token_ids"
"""The field of the tokens that Gemma 4's text reads as padding, as named here."""
UNREAD = ("image_token_id", "video_token_id", "audio_token_id")
"""Their fields in a multimodal config.json."""
OTHERS = (
    "vision",
    "image",
    "video",
    "audio",
    "projector",
    "multimodal",
    "mm_",
    "spatial",
    "temporal",
    "downsample",
)
"""Beginnings of the fields of older flat files that describe pictures and sound."""
UNUSED = {
    "paddleocr_vl": ("compression_ratio", "ignored_index", "use_flash_attention", "weight_share_add_bias")
}
"""Fields of older flat files that transformers does not read."""
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
"""Beginnings of tensors' names in multimodal files → those of the language model alone."""
LANGUAGE = (
    "model.layers.",
    "model.embed_tokens.",
    "model.embed_tokens_per_layer.",
    "model.per_layer_",
    "model.norm.",
    "lm_head.",
)
"""Beginnings of all names of a language model alone."""


def language_part(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the native language model inside a multimodal config.json, any other's as they are."""
    host = data.get("model_type")
    if host not in HOSTS:
        return data
    text = data.get("text_config")
    if text is None and host in FLAT:
        unread = UNUSED.get(host, ())
        text = {key: value for key, value in data.items() if not key.startswith(OTHERS) and key not in unread}
        text["model_type"] = FLAT[host]
    if not isinstance(text, dict) or text.get("model_type") not in PARTS:
        return data
    architecture = PARTS[text["model_type"]]
    text = _translated(text)
    found = text | {"architectures": [architecture], "model_type": NATIVE[architecture]}
    for key in (
        "quantization_config",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "torch_dtype",
    ):
        if data.get(key) is not None:
            found[key] = data[key]
    if host == "gemma4":
        found[PLACEHOLDERS] = [data[key] for key in UNREAD if data.get(key) is not None]
    if host in SECTIONS:
        key = "rope_scaling" if isinstance(found.get("rope_scaling"), dict) else "rope_parameters"
        found[key] = _sectioned(found.get(key) or {}, *SECTIONS[host])
    return found


def _translated(text: dict[str, Any]) -> dict[str, Any]:
    """Return a language model's fields by the native architecture's names, with its own defaults."""
    kind = text["model_type"]
    several = SEVERAL.get(kind, {})
    found = DEFAULTS.get(kind, {}) | {key: value for key, value in text.items() if key not in several}
    for key, names in several.items():
        if key in text:
            found |= dict.fromkeys(names, text[key])
    return found


def _sectioned(section: dict[str, Any], usual: list[int], interleaved: bool) -> dict[str, Any]:
    """A rotary embedding's fields with its sections; older files call one that has them "mrope"."""
    found = {"mrope_section": usual, **section, "mrope_interleaved": interleaved}
    for key in ("rope_type", "type"):
        if found.get(key) == "mrope":
            found[key] = "default"
    return found


def loaded_tensors(data: dict[str, Any]) -> Callable[[str], bool]:
    """Return the check whether a tensor is loaded: of a multimodal folder's the language model's alone are."""
    if language_part(data) is data:
        return lambda name: True
    return lambda name: language_name(name).startswith(LANGUAGE)


def language_name(name: str) -> str:
    """The name of a tensor of a multimodal file as the language model alone calls it."""
    for prefix, usual in PREFIXES.items():
        if name.startswith(prefix):
            return usual + name.removeprefix(prefix)
    return name
