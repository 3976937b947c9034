"""Model families with recurrent layers; see `families.py`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DeltaConfig, MambaConfig, ParallelConfig, ShortConvConfig
from torchwright.models.decoder.family import (
    FULL,
    Family,
    Names,
    read_biases,
    read_experts,
    read_granite,
    read_recurrent,
)


def _short_conv(fields: Fields, layers: int, attends: Collection[int]) -> dict[str, Any]:
    return {
        "qk_norm": "head",
        "recurrent": read_recurrent(fields, ("conv",), [layer not in attends for layer in range(layers)]),
        "mixer": ShortConvConfig(
            width=fields.integer("conv_L_cache", 3, minimum=2), bias=fields.flag("conv_bias", False)
        ),
    }


def _lfm2(fields: Fields, layers: int) -> dict[str, Any]:
    inner = fields.integer("intermediate_size", 12288)
    factor, multiple = fields.optional("block_ffn_dim_multiplier"), fields.integer("block_multiple_of", 256)
    if fields.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        missing = "block_ffn_dim_multiplier" not in fields.data
        if missing or factor is not None:
            inner = int((1.0 if missing or factor is None else factor) * inner)
            inner = -(-inner // multiple) * multiple
    attends = fields.integers("full_attn_idxs", "a list of layers") or range(layers)
    return _short_conv(fields, layers, attends) | {"feed_forward": inner}


def _lfm2_moe(fields: Fields, layers: int) -> dict[str, Any]:
    experts = read_experts(
        fields, feed_forward="moe_intermediate_size", normalize=fields.flag("norm_topk_prob", True)
    )
    dense = fields.integer("num_dense_layers", 2, minimum=0)
    return _short_conv(fields, layers, range(layers)) | {
        "experts": replace(
            experts,
            bias=fields.flag("use_expert_bias", True),
            sigmoid=True,
            scale=fields.positive("routed_scaling_factor", 1.0),
        ),
        "sparse": tuple(layer >= dense for layer in range(layers)),
    }


def _delta(fields: Fields, layers: int) -> dict[str, Any]:
    """Read the fields that Qwen3-Next and Qwen3.5 share."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, which the convolutions have as well")
    every = fields.integer("full_attention_interval", 4)
    key_heads, heads = (
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
    )
    if heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    bias = fields.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "norm_offset": 1.0,
        "output_gate": True,
        "recurrent": read_recurrent(
            fields, ("linear_attention",), [(layer + 1) % every != 0 for layer in range(layers)]
        ),
        "mixer": DeltaConfig(
            key_heads=key_heads,
            heads=heads,
            key_dim=fields.integer("linear_key_head_dim", 128),
            head_dim=fields.integer("linear_value_head_dim", 128),
            width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        ),
    }


def _qwen3_next(fields: Fields, layers: int) -> dict[str, Any]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", "a list of layers")
    return _delta_experts(fields, layers, normalize=fields.flag("norm_topk_prob", True)) | {
        "sparse": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    }


def _delta_experts(fields: Fields, layers: int, *, normalize: bool) -> dict[str, Any]:
    experts = read_experts(fields, feed_forward="moe_intermediate_size", normalize=normalize)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    return _delta(fields, layers) | {
        "experts": replace(experts, shared=shared, shared_gate=True),
        "sparse": (True,) * layers,
    }


def _mamba(fields: Fields, inner: int | None = None) -> MambaConfig:
    """Read the fields that all families with Mamba-2 share; `inner` are the values of a token."""
    expanded = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    inner = expanded if inner is None else inner
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    size = fields.get("mamba_d_head")
    size = inner // heads if size in (None, "auto") else fields.integer("mamba_d_head")
    if heads % groups or size * heads != inner:
        raise fields.wrong(
            "mamba_n_heads", f"a multiple of mamba_n_groups, {groups}, whose heads make {inner}"
        )
    # JSON has no infinity; transformers 5 writes it as its name.
    if fields.get("time_step_limit") not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.wrong("time_step_limit", "0 to infinity")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, which the convolutions have as well")
    fields.settle("mamba_chunk_size")
    bias = fields.flag("mamba_proj_bias", False)
    return MambaConfig(
        key_heads=groups,
        heads=heads,
        key_dim=fields.integer("mamba_d_state", 256),
        head_dim=size,
        width=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias,
    )


def _mamba_layers(fields: Fields, default: list[bool]) -> tuple[bool, ...]:
    return read_recurrent(fields, ("linear_attention", "mamba"), default, others=(FULL, "attention"))


def _bamba(fields: Fields, layers: int) -> dict[str, Any]:
    attends = fields.integers("attn_layer_indices", "a list of layers")
    recurrent = tuple(layer not in attends for layer in range(layers))
    if _mamba_layers(fields, list(recurrent)) != recurrent:
        raise fields.wrong("layer_types", f"{FULL} for attn_layer_indices, {list(attends)}, alone")
    if fields.number("partial_rotary_factor", 0.5) != 0.5:
        raise fields.wrong("partial_rotary_factor", "0.5, which transformers takes whatever is written there")
    return read_biases(fields) | {"mixer": _mamba(fields), "recurrent": recurrent}


def _falcon_h1(fields: Fields, layers: int) -> dict[str, Any]:
    def factor(key: str) -> float:
        return fields.number(key, 1.0)

    def factors(key: str, count: int) -> tuple[float, ...]:
        return (1.0,) * count if fields.get(key) is None else fields.numbers(key, count)

    if fields.items("layer_types", layers) not in (None, ["hybrid"] * layers):
        raise fields.wrong("layer_types", "hybrid for all layers")
    absent = "mamba_d_ssm" not in fields.data
    inner = None if not absent and fields.get("mamba_d_ssm") is None else fields.integer("mamba_d_ssm", 1024)
    gate, down = factors("mlp_multipliers", 2)
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    return read_biases(fields) | {
        "scale": head_dim**-0.5 * factor("key_multiplier"),
        "embedding_scale": factor("embedding_multiplier"),
        "logit_scale": factor("lm_head_multiplier"),
        "mixer": replace(
            _mamba(fields, inner),
            out_bias=fields.flag("projectors_bias", False),
            normed=fields.flag("mamba_rms_norm", False),
            gate_first=not fields.flag("mamba_norm_before_gate", True),
            input_scale=factor("ssm_in_multiplier"),
            scales=factors("ssm_multipliers", 5),
        ),
        "parallel": ParallelConfig(
            attention_in=factor("attention_in_multiplier"),
            attention_out=factor("attention_out_multiplier"),
            mixer_out=factor("ssm_out_multiplier"),
            gate=gate,
            down=down,
        ),
    }


def _granite_hybrid(fields: Fields, layers: int) -> dict[str, Any]:
    mixer, recurrent = _mamba(fields), _mamba_layers(fields, [True] * layers)
    width = fields.integer("shared_intermediate_size", 1024)
    positions = fields.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise fields.wrong("position_embedding_type", "rope, or nope or null for none")
    found = read_granite(fields) | {
        "mixer": mixer,
        "recurrent": recurrent,
        "rotates": (positions == "rope",) * layers,
        "feed_forward": width,
    }
    if not fields.integer("num_local_experts", 8, minimum=0):
        fields.settle("num_experts_per_tok")
        return found
    experts = read_experts(fields, feed_forward="intermediate_size", normalize=True)
    return found | {"experts": replace(experts, shared=width), "sparse": (True,) * layers}


LFM2_NAMES = Names(
    pre_attention="operator_norm",
    pre_mlp="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    expert_down="feed_forward.experts.{}.w2",
    choice_bias="feed_forward.expert_bias",
    conv="conv.conv",
    final_norm="model.embedding_norm",
)

DELTA_NAMES = Names(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)

BAMBA_NAMES = Names(
    pre_mlp="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    conv="mamba.conv1d",
    final_norm="model.final_layernorm",
)

QWEN3_5_NOTES = (
    "attn_output_gate",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
)
"""Fields that transformers does not read: the gate is always there, states are float32, and the layer drafts."""

RECURRENT: dict[str, Family] = {
    "Lfm2ForCausalLM": Family(
        special=_lfm2,
        names=LFM2_NAMES,
        theta=1_000_000.0,
        eps=1e-5,
        tied=True,
        kv_heads=8,
        ignored=(
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "theta",
            "use_pos_enc",
        ),
    ),
    "Lfm2MoeForCausalLM": Family(
        special=_lfm2_moe, names=LFM2_NAMES, theta=1_000_000.0, eps=1e-5, tied=True, kv_heads=8
    ),
    "Qwen3NextForCausalLM": Family(
        special=_qwen3_next,
        names=replace(DELTA_NAMES, delta_in=("linear_attn.in_proj_qkvz",), decay=("linear_attn.in_proj_ba",)),
        head_dim=256,
        kv_heads=2,
        partial=True,
        share=0.25,
    ),
    "Qwen3_5ForCausalLM": Family(
        special=_delta, head_dim=256, kv_heads=4, partial=True, share=0.25, ignored=QWEN3_5_NOTES
    ),
    "Qwen3_5MoeForCausalLM": Family(
        special=lambda fields, layers: _delta_experts(fields, layers, normalize=True),
        names=DELTA_NAMES,
        width="moe_intermediate_size",
        head_dim=256,
        kv_heads=2,
        partial=True,
        share=0.25,
        ignored=("intermediate_size", *QWEN3_5_NOTES),
    ),
    "FalconH1ForCausalLM": Family(
        special=_falcon_h1, names=BAMBA_NAMES, eps=1e-5, kv_heads=8, ignored=("num_logits_to_keep",)
    ),
    "BambaForCausalLM": Family(
        special=_bamba,
        names=BAMBA_NAMES,
        eps=1e-5,
        kv_heads=8,
        partial=True,
        share=0.5,
        ignored=("num_logits_to_keep", "z_loss_coefficient"),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        special=_granite_hybrid,
        names=Names(
            gate_up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            router="block_sparse_moe.router.layer",
            expert_gate_up=("block_sparse_moe.input_linear",),
            expert_down="block_sparse_moe.output_linear",
            stacked_modules=True,
            shared_gate_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
            conv="mamba.conv1d",
        ),
        ignored=("normalization_function", "init_method"),
    ),
}
"""Architecture, as config.json names it, → family."""
