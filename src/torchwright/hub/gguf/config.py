"""config.json from a GGUF file's metadata, for the families whose keys and tensors are known."""

from __future__ import annotations

import math
import struct
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields, is_off
from torchwright.hub.gguf.header import GgufTensor, Header
from torchwright.hub.gguf.names import ROPE

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture → config.json's."""
INERT = (
    "vocab_size",
    "rope.scaling.finetuned",
    "expert_used_count",
    "pooling_type",
    "tensor_data_layout",
)
"""Keys of a family that change no logits: experts are refused by their count, pooling is an embedding model's."""


def config_of(header: Header) -> dict[str, Any]:
    """Return the config.json that a file's metadata describes.

    Raises `ModelError`, naming file and key, for a family or a setting that is not read here.
    """
    metadata = Fields(header.path, header.metadata)
    family = metadata.text("general.architecture", "")
    if family not in FAMILIES:
        raise metadata.wrong("general.architecture", ", ".join(FAMILIES))
    if metadata.integer("split.count", 1) != 1:
        raise metadata.wrong("split.count", "1: a file that holds the whole model (llama-gguf-split --merge)")
    embedding = _tensor(header, "token_embd.weight", 2)
    heads = metadata.integer(f"{family}.attention.head_count")
    model = metadata.integer(f"{family}.embedding_length")
    head_dim = metadata.integer(f"{family}.attention.key_length", max(1, model // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{family}.{key}", head_dim) != head_dim:
            raise metadata.wrong(f"{family}.{key}", f"{head_dim}, the size of a head's keys")
    if metadata.integer(f"{family}.expert_count", 0, minimum=0):
        raise metadata.wrong(f"{family}.expert_count", "0: no mixture of experts is read from GGUF")
    if not metadata.flag(f"{family}.attention.causal", True):
        raise metadata.wrong(f"{family}.attention.causal", "true: a decoder's attention is causal")
    context = metadata.integer(f"{family}.context_length")
    config = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "quantization_config": {"quant_method": "gguf"},
        "vocab_size": embedding.shape[0],
        "hidden_size": model,
        "intermediate_size": metadata.integer(f"{family}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, metadata, family, head_dim, context),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": _id(metadata, "bos"),
        "eos_token_id": _id(metadata, "eos"),
    }
    _refuse_unread(metadata, family)
    return config | ({"mlp_bias": "blk.0.ffn_gate.bias" in header.tensors} if family == "llama" else {})


def stop_ids(header: Header) -> list[int]:
    """Tokens that end an answer or a turn of one."""
    metadata = Fields(header.path, header.metadata)
    found = [_id(metadata, name) for name in ("eos", "eot", "eom")]
    return sorted({token for token in found if token is not None})


def _id(metadata: Fields, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return None if metadata.data.get(key) is None else metadata.integer(key, minimum=0)


def _refuse_unread(metadata: Fields, family: str) -> None:
    """Raise `ModelError` for a key of the family that is not honoured and does not say that its feature is off."""
    metadata.settle(*(f"{family}.{key}" for key in INERT))
    for key, value in metadata.unread():
        if key.startswith(f"{family}.") and not is_off(key, value):
            raise metadata.wrong(key, "no such key, or a value that switches the feature off")


def _rope(header: Header, metadata: Fields, family: str, head_dim: int, context: int) -> dict[str, Any]:
    prefix = f"{family}.rope.scaling"
    # As llama.cpp has it: an old key holds the factor, and a factor without a type scales linearly.
    factor = metadata.number(f"{prefix}.factor", metadata.number(f"{family}.rope.scale_linear", 0.0))
    kind = metadata.text(f"{prefix}.type", "linear" if factor else "none")
    metadata.settle(f"{prefix}.original_context_length")
    plain = {"rope_type": "default", "rope_theta": metadata.number(f"{family}.rope.freq_base", 10_000.0)}
    if ROPE in header.tensors:
        if kind != "none":
            raise metadata.wrong(f"{prefix}.type", f"none, beside {ROPE}")
        # Llama 3.1's scaling is a factor for each frequency here, the same at every length.
        factors = _floats(header, ROPE, head_dim // 2)
        same = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        return plain | same | {"rope_type": "longrope", "original_max_position_embeddings": context}
    if kind == "none":
        return plain
    if kind == "linear" and not factor:
        return plain
    scaled = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return plain | scaled
    if kind != "yarn":
        raise metadata.wrong(f"{prefix}.type", "none, linear or yarn")
    if factor < 1:
        raise metadata.wrong(f"{prefix}.factor", "a number of 1 or more")
    original = metadata.integer(f"{prefix}.original_context_length", context)
    return plain | scaled | {"original_max_position_embeddings": original}


def _floats(header: Header, name: str, count: int) -> list[float]:
    """A small float32 tensor's numbers."""
    stored = _tensor(header, name, 1)
    if stored.type.name != "F32" or stored.shape != (count,):
        raise ModelError(
            f"the tensor '{name}' in {header.path} is {list(stored.shape)} of {stored.type.name}",
            allowed=f"{[count]} of F32",
        )
    with header.path.open("rb") as file:
        file.seek(stored.begin)
        found = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(math.isfinite(value) and value > 0 for value in found):
        raise ModelError(f"the tensor '{name}' in {header.path} holds numbers that are no factors")
    return list(found)


def _tensor(header: Header, name: str, extents: int) -> GgufTensor:
    stored = header.tensors.get(name)
    if stored is None or len(stored.shape) != extents:
        raise ModelError(
            f"{header.path} lacks the tensor '{name}'",
            found=f"{len(header.tensors)} tensors" if stored is None else str(list(stored.shape)),
            next="take a file that holds a whole language model",
        )
    return stored
