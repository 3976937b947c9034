"""Gemma 4; see `families.py`."""

from __future__ import annotations

from typing import Any

from torchwright.hub.fields import Fields
from torchwright.hub.language_part import PLACEHOLDERS
from torchwright.models.decoder.config import ExpertsConfig, LayerInputs, LayerShape
from torchwright.models.decoder.family import (
    FULL,
    SLIDING,
    Family,
    Names,
    read_cap,
    read_window,
    read_windows,
)

USUAL_PATTERN = 6
"""Every sixth layer has full attention, and so has the last."""
WIDE_HEAD = 512
SIZES = ("head_dim", "num_key_value_heads")


def _wide_sizes(fields: Fields, usual: dict[str, int]) -> dict[str, int]:
    """Return head size and key-value heads of full-attention layers."""
    found = _named_sizes(fields, usual)
    if fields.integer("num_attention_heads") % found["num_key_value_heads"]:
        raise fields.wrong("num_global_key_value_heads", "a divisor of num_attention_heads")
    if found["head_dim"] % 2:
        raise fields.wrong("global_head_dim", "an even number")
    return found


def _named_sizes(fields: Fields, usual: dict[str, int]) -> dict[str, int]:
    """The same unchecked: published files name them, and transformers writes what differs from layer to layer."""
    by_layer = fields.section("per_layer_config")
    if fields.data.get("per_layer_config") is None:
        shares = (
            fields.get("attention_k_eq_v") is True and fields.get("num_global_key_value_heads") is not None
        )
        fields.settle("num_global_key_value_heads")
        heads = fields.integer("num_global_key_value_heads") if shares else usual["num_key_value_heads"]
        return {"head_dim": fields.integer("global_head_dim", WIDE_HEAD), "num_key_value_heads": heads}
    kinds = _kinds(fields, fields.integer("num_hidden_layers"))
    found = []
    for layer, kind in enumerate(kinds):
        section = by_layer.section(str(layer))
        sizes = {key: section.integer(key, usual[key]) for key in SIZES}
        if kind == SLIDING and sizes != usual:
            raise by_layer.wrong(str(layer), f"{usual}, as all layers with sliding windows")
        found += [sizes] if kind == FULL else []
    if any(sizes != found[0] for sizes in found):
        raise fields.wrong("per_layer_config", "the same sizes for all layers with full attention")
    return found[0]


def _usual_sizes(fields: Fields) -> dict[str, int]:
    return {
        "head_dim": fields.integer("head_dim", 256),
        "num_key_value_heads": fields.integer("num_key_value_heads", 4),
    }


def _kinds(fields: Fields, layers: int) -> list[str]:
    usual = [SLIDING if (layer + 1) % USUAL_PATTERN else FULL for layer in range(layers)]
    kinds = fields.items("layer_types", layers)
    if kinds is not None and kinds[-1] != FULL:
        raise fields.wrong("layer_types", f"{FULL} for the last layer")
    return kinds or [*usual[:-1], FULL]


def _rotary_sizes(fields: Fields, head_dim: int) -> tuple[int, int]:
    return _wide_sizes(fields, _usual_sizes(fields))["head_dim"], head_dim


def _reads(fields: Fields, kinds: list[str], shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each reads: the last ones those of the last of their kind before."""
    own = len(kinds) - shared
    if own < 1 or set(kinds[:own]) != set(kinds):
        raise fields.wrong("num_kv_shared_layers", "fewer: a layer of each type keeps keys and values")
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return tuple(layer if layer < own else last[kind] for layer, kind in enumerate(kinds))


def _experts(fields: Fields) -> dict[str, Any]:
    if not fields.flag("enable_moe_block", False):
        fields.settle("num_experts", "top_k_experts", "moe_intermediate_size")
        return {}
    count, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    if chosen > count:
        raise fields.wrong("top_k_experts", f"at most the {count} experts")
    inner = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(count=count, chosen=chosen, feed_forward=inner, normalize=True, expert_scale=True)
    return {"experts": experts}


def _gemma4(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.wrong("use_bidirectional_attention", "vision or null: a decoder's attention is causal")
    usual = _usual_sizes(fields)
    wide, kinds = _wide_sizes(fields, usual), _kinds(fields, layers)
    window = read_window(fields, 512)
    if not window:
        raise fields.wrong("sliding_window", "an integer of 1 or more")
    inner, shared = (
        fields.integer("intermediate_size"),
        fields.integer("num_kv_shared_layers", 0, minimum=0),
    )
    reads = _reads(fields, kinds, shared)
    widened = 2 if fields.flag("use_double_wide_mlp", False) else 1
    keys_as_values = fields.flag("attention_k_eq_v", False)

    def shape(layer: int, kind: str) -> LayerShape:
        sizes, own = (wide if kind == FULL else usual), reads[layer] == layer
        return LayerShape(
            kv_heads=sizes["num_key_value_heads"] if own else 0,
            head_dim=sizes["head_dim"],
            feed_forward=inner if own else inner * widened,
            keys_as_values=own and keys_as_values and kind == FULL,
        )

    bias = fields.flag("attention_bias", False)
    vocabulary = fields.integer("vocab_size_per_layer_input", 262_144)
    width = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    if width and vocabulary < fields.integer("vocab_size"):
        raise fields.wrong("vocab_size_per_layer_input", "vocab_size or more")
    return _experts(fields) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "value_norm": True,
        "scale": 1.0,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "logit_soft_cap": read_cap(fields, "final_logit_softcapping", 0.0),
        "windows": read_windows(fields, window, kinds),
        "shapes": tuple(shape(layer, kind) for layer, kind in enumerate(kinds)),
        "reads": reads if shared else (),
        "placeholders": tuple(
            token
            for token in fields.integers(PLACEHOLDERS, "a list of tokens")
            if 0 <= token < fields.integer("vocab_size")
        ),
        "padding": (*fields.ids("pad_token_id"), 0)[0],
        "layer_inputs": LayerInputs(width=width, vocabulary=vocabulary),
    }


GEMMA4 = {
    "Gemma4ForCausalLM": Family(
        special=_gemma4,
        names=Names(
            post_attention="post_attention_layernorm",
            pre_mlp="pre_feedforward_layernorm",
            post_mlp="post_feedforward_layernorm",
            router="router.proj",
            expert_gate_up=("experts.gate_up_proj",),
            expert_down="experts.down_proj",
        ),
        rotary_sizes=_rotary_sizes,
        local_theta=10_000.0,
        local_key=None,
        tied=True,
        head_dim=256,
        kv_heads=4,
        ignored=("hidden_act",),
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_rope={
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
}
"""Architecture, as config.json names it, → family."""
