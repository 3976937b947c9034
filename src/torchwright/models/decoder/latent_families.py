"""Model families with latent attention; see `families.py`."""

from __future__ import annotations

import math
from typing import Any

from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import ExpertsConfig, LatentConfig
from torchwright.models.decoder.family import BIASED, Family, read_deepseek_experts

NOTES = ("aux_loss_alpha", "ep_size", "head_dim", "num_mtp_layers", "qk_head_dim", "seq_aux")
"""Fields that transformers does not read, or that follow from others."""
TURNED = 64


def _latent(fields: Fields, *, interleaved: bool) -> dict[str, Any]:
    """Read the fields of the attention that DeepSeek V2 and V3 share."""
    query_rank = fields.get("q_lora_rank") if "q_lora_rank" in fields.data else 1536
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=None if query_rank is None else fields.integer("q_lora_rank", query_rank),
        plain=fields.integer("qk_nope_head_dim", 128),
        turned=fields.integer("qk_rope_head_dim", TURNED),
        value=fields.integer("v_head_dim", 128),
        interleaved=interleaved,
    )
    if (latent.turned + latent.rank) % 2:
        raise fields.wrong("kv_lora_rank", "an even number together with qk_rope_head_dim")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.wrong("moe_layer_freq", "1: all layers from first_k_dense_replace on have experts")
    bias = fields.flag("attention_bias", False)
    return {
        "latent": latent,
        "kv_heads": 1,
        "head_dim": latent.turned + latent.rank,
        "scale": (latent.plain + latent.turned) ** -0.5 * _stretch(fields) ** 2,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _stretch(fields: Fields) -> float:
    """Return the factor that scores have twice where the context was stretched."""
    section = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    kind = section.text("rope_type", section.text("type", "default"))
    scale = None if kind == "default" else section.optional("mscale_all_dim")
    factor = section.positive("factor") if scale else 1.0
    return 0.1 * scale * math.log(factor) + 1.0 if scale and factor > 1 else 1.0


def _deepseek_v2(fields: Fields, layers: int) -> dict[str, Any]:
    fields.settle("norm_topk_prob")  # transformers' router does not read it
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "greedy or group_limited_greedy")
    if fields.text("scoring_func", "softmax") != "softmax":
        raise fields.wrong("scoring_func", "softmax")
    count, chosen = fields.integer("n_routed_experts", 64), fields.integer("num_experts_per_tok")
    grouped = method != "greedy"
    groups, chosen_groups = ((fields.integer(key) if grouped else 1) for key in ("n_group", "topk_group"))
    fields.settle("n_group", "topk_group")
    if count % groups or chosen_groups > groups:
        raise fields.wrong("n_group", f"a divisor of the {count} experts, and at least topk_group")
    if chosen > count // groups * chosen_groups:
        raise fields.wrong("num_experts_per_tok", "at most the experts of the chosen groups (topk_group)")
    inner = fields.integer("moe_intermediate_size", 1407)
    dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    if fields.flag("mlp_bias", False):
        raise fields.wrong("mlp_bias", "false: experts have no biases")
    return _latent(fields, interleaved=True) | {
        "experts": ExpertsConfig(
            count=count,
            chosen=chosen,
            feed_forward=inner,
            normalize=False,
            groups=groups,
            chosen_groups=chosen_groups,
            ranked=1,
            scale=fields.positive("routed_scaling_factor", 1.0),
            shared=inner * fields.integer("n_shared_experts", 2),
        ),
        "sparse": tuple(layer >= dense for layer in range(layers)),
    }


def _deepseek_v3(fields: Fields, layers: int) -> dict[str, Any]:
    for key, wanted in (("topk_method", BIASED), ("scoring_func", "sigmoid")):
        if fields.text(key, wanted) != wanted:
            raise fields.wrong(key, wanted)
    dense = fields.integer("first_k_dense_replace", 3, minimum=0)
    experts = read_deepseek_experts(fields, count=256, groups=8, chosen_groups=4, scale=2.5)
    return _latent(fields, interleaved=fields.flag("rope_interleave", True)) | {
        "experts": experts,
        "sparse": tuple(layer >= dense for layer in range(layers)),
    }


def _rotary_sizes(fields: Fields, head_dim: int) -> tuple[int, int]:
    turned = fields.integer("qk_rope_head_dim", TURNED)
    return turned, turned


LATENT = {
    "DeepseekV2ForCausalLM": Family(special=_deepseek_v2, rotary_sizes=_rotary_sizes, ignored=NOTES),
    "DeepseekV3ForCausalLM": Family(special=_deepseek_v3, rotary_sizes=_rotary_sizes, ignored=NOTES),
}
"""Architecture, as config.json names it, → family."""
