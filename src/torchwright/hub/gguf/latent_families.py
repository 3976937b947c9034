"""GGUF files of models with latent attention; see `families.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchwright.hub.gguf.family import (
    EXPERTS,
    PARTNER,
    SHARED,
    SIGMOID,
    SOFTMAX,
    ByHead,
    Family,
    read_experts,
)
from torchwright.hub.gguf.model import GgufModel
from torchwright.hub.gguf.rope import rope_of

STEP = 0.1
"""The growth of scores by the logarithm of a context's stretch, which files multiply `mscale_all_dim` with."""


def _latent(model: GgufModel, gating: int) -> dict[str, Any]:
    keys = model.keys
    rank, turned = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    # Newer files have the sizes of what is kept, and those of heads under other names.
    head = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    if head <= turned:
        raise keys.wrong("attention.key_length", f"more than the {turned} dimensions that turn")
    model.head_dim = turned
    rope, stretch = rope_of(model), keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn":
        rope |= {"attention_factor": 1.0, "mscale_all_dim": stretch / STEP}
    return read_experts(
        model, "n_routed_experts", normalize=False if gating == SIGMOID else None, gating=gating
    ) | {
        "num_key_value_heads": model.heads,
        "head_dim": turned,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0, minimum=0) or None,
        "qk_nope_head_dim": head - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "rope_parameters": rope,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": keys.integer("expert_group_count", 0, minimum=0) or 1,
        "topk_group": keys.integer("expert_group_used_count", 0, minimum=0) or 1,
    }


def _deepseek_v2(model: GgufModel) -> dict[str, Any]:
    found = _latent(model, SOFTMAX)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    special=_deepseek_v2,
    names=EXPERTS
    | SHARED
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_k": None,
        "attn_v": None,
        "attn_qkv": None,
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b.weight": ByHead("self_attn.kv_b_proj.weight", "attn_v_b.weight"),
        "attn_v_b.weight": ByHead(PARTNER, "attn_k_b.weight"),
    },
    latent=True,
    mixture=True,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    architecture="DeepseekV3ForCausalLM",
    special=lambda model: _latent(model, SIGMOID),
    names=DEEPSEEK_V2.names | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
)
