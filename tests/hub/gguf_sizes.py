"""Metadata of GGUF files, from a configuration of transformers: what llama.cpp's converter writes of each family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf_recurrent_models as recurrent
from gguf_files import U32


def sizes(architecture: str, config: Any) -> dict[str, Any]:
    """The keys of an architecture, without its name in front."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: dict[str, Any] = {
        "context_length": U32(config.max_position_embeddings),
        "embedding_length": U32(config.hidden_size),
        "block_count": U32(config.num_hidden_layers),
        "feed_forward_length": U32(config.intermediate_size),
        "attention.head_count": U32(config.num_attention_heads),
        "attention.head_count_kv": U32(config.num_key_value_heads),
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.norm_eps),
    }
    if head_dim != config.hidden_size // config.num_attention_heads:
        found |= {"attention.key_length": U32(head_dim), "attention.value_length": U32(head_dim)}
    return found | rotary(config, head_dim) | SIZES.get(architecture, lambda config: {})(config)


def rotary(config: Any, head_dim: int) -> dict[str, Any]:
    own = config.rope_parameters
    full, local = own.get("full_attention", own), own.get("sliding_attention", {})
    share = full.get("partial_rotary_factor") or 1.0
    found: dict[str, Any] = {
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": U32(int(head_dim * share)),
    }
    if "rope_theta" in local:
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = full["rope_type"]
        found["rope.scaling.factor"] = float(full["factor"])
    if full["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = U32(full["original_max_position_embeddings"])
    return found


def factors(config: Any) -> dict[str, list[float]]:
    """Tensors of the rotary embedding: Llama 3.1's one factor for each frequency, Phi-3's two."""
    own = config.rope_parameters
    if own.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": own["long_factor"],
            "rope_factors_short.weight": own["short_factor"],
        }
    if own.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = []
    for i in range(head_dim // 2):
        wave = 2 * math.pi * own["rope_theta"] ** (2 * i / head_dim)
        low, high = own["low_freq_factor"], own["high_freq_factor"]
        smooth = (own["original_max_position_embeddings"] / wave - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        found.append(1 / ((1 - smooth) / own["factor"] + smooth))
    return {"rope_freqs.weight": found}


def mixture(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": U32(count), "expert_used_count": U32(config.num_experts_per_tok)}


def inner(config: Any) -> dict[str, Any]:
    return mixture(config) | {"expert_feed_forward_length": U32(config.moe_intermediate_size)}


def sections(config: Any) -> dict[str, Any]:
    """Return the number of frequencies that turn with each axis of a picture."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    third = head_dim // 2 // 3
    return {"rope.dimension_sections": [U32(head_dim // 2 - 2 * third), U32(third), U32(third), U32(0)]}


def window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": U32(config.sliding_window or 0)}


def pattern(config: Any) -> dict[str, Any]:
    if not getattr(config, "sliding_window", None):
        return {}
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return window(config) | {"attention.sliding_window_pattern": kinds}


def longrope(config: Any) -> dict[str, Any]:
    original = config.original_max_position_embeddings
    found = window(config) | {"rope.scaling.original_context_length": U32(original)}
    stretch = config.max_position_embeddings / original
    if stretch > 1:
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    return found


def glm4_moe(config: Any) -> dict[str, Any]:
    return {
        "expert_count": U32(config.n_routed_experts),
        "expert_used_count": U32(config.num_experts_per_tok),
        "expert_group_count": U32(config.n_group),
        "expert_group_used_count": U32(config.topk_group),
        "expert_feed_forward_length": U32(config.moe_intermediate_size),
        "expert_shared_count": U32(config.n_shared_experts),
        "leading_dense_block_count": U32(config.first_k_dense_replace),
        "expert_gating_func": U32(2),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
    }


def deepseek(config: Any) -> dict[str, Any]:
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    found = glm4_moe(config) | {
        "attention.head_count_kv": U32(1),
        "attention.key_length": U32(kept),
        "attention.value_length": U32(config.kv_lora_rank),
        "attention.key_length_mla": U32(config.qk_nope_head_dim + config.qk_rope_head_dim),
        "attention.value_length_mla": U32(config.v_head_dim),
        "attention.kv_lora_rank": U32(config.kv_lora_rank),
    }
    if config.q_lora_rank is not None:
        found["attention.q_lora_rank"] = U32(config.q_lora_rank)
    if not hasattr(config, "num_mtp_layers"):  # DeepSeek V2
        found["expert_gating_func"] = U32(1)
        found["expert_weights_norm"] = False
    if stretch := config.rope_parameters.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * stretch
    return found


SIZES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda config: mixture(config) if hasattr(config, "num_local_experts") else {},
    "qwen2vl": sections,
    "qwen3moe": inner,
    "qwen3vl": lambda config: sections(config) | {"n_deepstack_layers": U32(3)},
    "qwen3vlmoe": lambda config: sections(config) | inner(config) | {"n_deepstack_layers": U32(3)},
    "gpt-oss": lambda config: (
        mixture(config) | window(config) | {"expert_feed_forward_length": U32(config.intermediate_size)}
    ),
    "gemma2": lambda config: (
        window(config)
        | {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    ),
    "gemma3": window,
    "phi3": longrope,
    "hunyuan-moe": lambda config: {
        "expert_count": U32(config.num_experts),
        "expert_used_count": U32(config.moe_topk),
        "expert_shared_count": U32(1),
        "expert_feed_forward_length": U32(config.intermediate_size),
        "expert_shared_feed_forward_length": U32(config.intermediate_size),
    },
    "glm4moe": glm4_moe,
    "deepseek2": deepseek,
    "olmo2": pattern,
    "olmoe": mixture,
    "exaone4": pattern,
    "granite": lambda config: {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    },
    **recurrent.SIZES,
}
"""Metadata that the converter writes for one architecture alone."""
