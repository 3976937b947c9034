"""config.json from a GGUF file's metadata, for the families whose keys and tensors are known (`families.py`)."""

from __future__ import annotations

from typing import Any

from torchwright.hub.architectures import NATIVE
from torchwright.hub.fields import Fields, is_off
from torchwright.hub.gguf.families import family_of
from torchwright.hub.gguf.header import Header
from torchwright.hub.gguf.model import GgufModel
from torchwright.hub.gguf.rope import rope_of

INERT = (
    "vocab_size",
    "feed_forward_length",
    "rope.scaling.finetuned",
    "expert_used_count",
    "pooling_type",
    "tensor_data_layout",
)
"""Keys that change no logits, or that a family without dense layers or without experts does not need."""


def config_of(header: Header) -> dict[str, Any]:
    """Return the config.json that a file's metadata describes.

    Raises `ModelError`, naming file and key, for a family or a setting that is not read here.
    """
    metadata = Fields(header.path, header.metadata)
    family, model = family_of(header)
    if metadata.integer("split.count", 1) != 1:
        raise metadata.wrong("split.count", "1: a file that holds the whole model (llama-gguf-split --merge)")
    keys = model.keys
    if not family.latent and keys.integer("attention.value_length", model.head_dim) != model.head_dim:
        raise keys.wrong("attention.value_length", f"{model.head_dim}, the size of a head's keys")
    if not keys.flag("attention.causal", True):
        raise keys.wrong("attention.causal", "true: a decoder's attention is causal")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": NATIVE[family.architecture],
        "quantization_config": {"quant_method": "gguf"},
        "vocab_size": model.tensor("token_embd.weight", 2).shape[0],
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "bos_token_id": _id(metadata, "bos"),
        "eos_token_id": _id(metadata, "eos"),
    }
    config |= family.special(model)
    if "rope_parameters" not in config:
        config["rope_parameters"] = rope_of(model)
    if "intermediate_size" not in config:
        # A file of experts alone may leave it out.
        config["intermediate_size"] = keys.integer("feed_forward_length", config.get("moe_intermediate_size"))
    _refuse_unread(model)
    return config


def stop_ids(header: Header) -> list[int]:
    """Tokens that end an answer or a turn of one."""
    metadata = Fields(header.path, header.metadata)
    found = [_id(metadata, name) for name in ("eos", "eot", "eom")]
    return sorted({token for token in found if token is not None})


def _id(metadata: Fields, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return None if metadata.data.get(key) is None else metadata.integer(key, minimum=0)


def _refuse_unread(model: GgufModel) -> None:
    """Raise `ModelError` for a key of the family that is not honoured and does not say that its feature is off."""
    model.keys.settle(*INERT)
    for key, value in model.keys.unread():
        if not is_off(key, value):
            raise model.keys.wrong(
                key.removeprefix(model.keys.prefix), "no such key, or a value that switches the feature off"
            )
