"""Hunyuan, dense and with experts: norms of queries and keys behind their rotation, and a base that is stretched.

The facts are those of transformers' modules. The published files carry more fields than these read: sizes that other
versions of the models had, and leftovers of multimodal ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import ExpertsConfig
from torchwright.models.decoder.family import Family, Names

LEFTOVERS = (
    *("add_classification_head", "class_num", "dense_list", "mask_init_id", "pool_type", "skip_cls_token"),
    *("cla_share_factor", "norm_type", "org_vocab_size", "use_rotary_pos_emb", "xdrope_section"),
    *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "image_token_id"),
    *("im_end_id", "im_newline_id", "im_start_id", "max_image_size", "num_media_embeds", "text_end_id"),
    *("text_start_id", "video_end_id", "video_start_id", "vit_input_resolution", "vit_mapping_type"),
    *("vit_norm_type", "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type"),
    *("vit_used_rms_norm", "vit_add_patchemb_bias", "eod_token_id", "sep_token_id", "pad_id"),
)
"""Fields of published files that no module reads."""
NAMES = Names(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)
EXPERTS = ("moe_topk", "num_experts", "num_experts_per_tok", "num_local_experts", "num_shared_expert")
ROUTING = ("moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "use_mixed_mlp_moe")
"""Fields that a mixture of experts must have as the module computes, and a dense model may carry."""


def _attention(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    if not fields.flag("use_qk_norm", True):
        raise fields.wrong("use_qk_norm", "true: the family norms queries and keys")
    size = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    if fields.integer("attention_head_dim", size) != size:
        raise fields.wrong("attention_head_dim", f"{size}, as head_dim")
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "rotated"}


def _dense(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("num_experts") is not None and _one(fields, "num_experts") != 1:
        raise fields.wrong("num_experts", "1: the family has no experts")
    fields.settle(*EXPERTS, *ROUTING)
    return _attention(fields)


def _mixture(fields: Fields, layers: int) -> dict[str, Any]:
    count = _one(fields, "num_experts", "num_local_experts")
    chosen = _one(fields, "moe_topk", "num_experts_per_tok")
    if chosen > count:
        raise fields.wrong("moe_topk", f"at most the {count} experts")
    inner = fields.integer("intermediate_size")
    for name, expected in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        if fields.get(name) is not None and _one(fields, name) != expected:
            raise fields.wrong(name, f"{expected} in all layers")
    if not fields.flag("norm_topk_prob", True):
        raise fields.wrong(
            "norm_topk_prob", "true: the family scales the chosen experts' shares to a sum of 1"
        )
    if fields.number("routed_scaling_factor", 1.0) != 1:
        raise fields.wrong("routed_scaling_factor", "1")
    fields.settle(*EXPERTS, *ROUTING)
    experts = ExpertsConfig(count=count, chosen=chosen, feed_forward=inner, normalize=True, shared=inner)
    return _attention(fields) | {"experts": experts, "sparse": (True,) * layers}


def _one(fields: Fields, *names: str) -> int:
    """The number of all layers under the first of the names that is there; a list has it once for each layer."""
    name = next((name for name in names if name in fields.data), names[0])
    found = set(fields.integers(name, "a number, or the same one for each layer"))
    if len(found) != 1 or min(found) < 1:
        raise fields.wrong(name, "a number of 1 or more, or the same one for each layer")
    return found.pop()


def _family(special: Callable[[Fields, int], dict[str, Any]]) -> Family:
    return Family(
        special=special, names=NAMES, eps=1e-5, ignored=LEFTOVERS, rope_names={"dynamic": "ntk_alpha"}
    )


HUNYUAN = {
    "HunYuanDenseV1ForCausalLM": _family(_dense),
    "HunYuanMoEV1ForCausalLM": _family(_mixture),
}
"""Architecture, as config.json names it, → family."""
