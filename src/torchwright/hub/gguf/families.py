"""The model families of GGUF files: how each differs from Llama in names, in rows, and in its configuration.

The facts are those of llama.cpp's loaders and of its converter. A key that a family does not read is refused by name,
unless its value says that the feature is off. To add a family, add an entry to `FAMILIES`, and a model to
tests/hub/gguf_models.py. Those with recurrent layers are in `recurrent_families.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchwright.hub.fields import Fields
from torchwright.hub.gguf.family import (
    ATTENTION_BIASES,
    EXPERTS,
    FULL,
    FUSED,
    GATED,
    GEMMA,
    PARTNER,
    POST,
    QK_NORMS,
    QKV,
    RENAMED,
    SHARED,
    SIGMOID,
    SLIDING,
    Family,
    Stacked,
    Target,
    read_experts,
    read_granite,
    seen,
)
from torchwright.hub.gguf.header import Header
from torchwright.hub.gguf.latent_families import DEEPSEEK_V2, DEEPSEEK_V3
from torchwright.hub.gguf.model import GgufModel
from torchwright.hub.gguf.recurrent_families import GRANITE_EXPERTS, RECURRENT
from torchwright.hub.gguf.rope import rope_of, ropes_of


def _whole_width(model: GgufModel) -> dict[str, Any]:
    """Return the width of experts that are as wide as the key of dense layers says, or as their own."""
    width = model.keys.integer("feed_forward_length", 0, minimum=0)
    return {"intermediate_size": model.keys.integer("expert_feed_forward_length", width)}


def _windows(model: GgufModel, default: int, period: int) -> dict[str, Any]:
    """Return sliding windows and the layers that have one: all but the last of `period`, if the file does not say.

    A window of 0 switches windows off.
    """
    keys = model.keys
    window = keys.integer("attention.sliding_window", default, minimum=0)
    pattern = keys.data.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        keys.settle("attention.sliding_window_pattern")
        if len(pattern) < model.layers or not all(value in (0, 1) for value in pattern):
            raise keys.wrong(
                "attention.sliding_window_pattern", f"a number, or {model.layers} times true or false"
            )
        slides = [bool(value) for value in pattern[: model.layers]]
    else:
        period = keys.integer("attention.sliding_window_pattern", period, minimum=0)
        slides = [not period or (layer + 1) % period != 0 for layer in range(model.layers)]
    kinds = [SLIDING if window and slide else FULL for slide in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _llama(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": model.biased(*QKV, "attn_output"), "mlp_bias": model.biased(*GATED)}


def _mixtral(model: GgufModel) -> dict[str, Any]:
    return read_experts(model, "num_local_experts") | _whole_width(model) | {"sliding_window": None}


def _qwen3(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": model.biased(*QKV, "attn_output")}


def _qwen3_moe(model: GgufModel) -> dict[str, Any]:
    sizes = read_experts(model, "num_experts", normalize=True)
    dense = model.keys.integer("feed_forward_length", 0, minimum=0)
    inner = model.keys.integer("expert_feed_forward_length", dense // sizes["num_experts_per_tok"])
    return _qwen3(model) | sizes | {"moe_intermediate_size": inner, "decoder_sparse_step": 1}


def _gemma(model: GgufModel) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma_scale(model: GgufModel, largest: int) -> dict[str, Any]:
    """The largest model of a generation, which its layers tell, scales scores by the width that a head stands for."""
    per_head = model.width // model.heads if model.layers == largest else model.head_dim
    return {"query_pre_attn_scalar": per_head}


def _gemma2(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    return (
        _gemma(model)
        | _windows(model, 4096, 2)
        | _gemma_scale(model, 46)
        | {
            "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        }
    )


def _gemma3(model: GgufModel) -> dict[str, Any]:
    found = _gemma(model) | _windows(model, 0, 6) | _gemma_scale(model, 62)
    # config.json needs a width; without one in the file no layer has a window.
    window = found["sliding_window"] or model.context
    cap = model.keys.number("final_logit_softcapping", 0.0) or None
    ropes = {"rope_parameters": ropes_of(model, 10_000.0)}
    return found | ropes | {"sliding_window": window, "final_logit_softcapping": cap}


def _phi3(model: GgufModel) -> dict[str, Any]:
    original = model.keys.integer("rope.scaling.original_context_length", model.context)
    return {
        "sliding_window": model.keys.integer("attention.sliding_window", 0, minimum=0) or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope_of(model, partial=True),
    }


def _glm(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": model.biased(*QKV), "rope_parameters": rope_of(model, partial=True)}


def _glm4_moe(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    return (
        _glm(model)
        | read_experts(model, "n_routed_experts", normalize=False, gating=SIGMOID)
        | {
            "use_qk_norm": model.has("attn_q_norm.weight"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "n_shared_experts": keys.integer("expert_shared_count"),
            "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
            "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
            "n_group": keys.integer("expert_group_count", 0, minimum=0) or 1,
            "topk_group": keys.integer("expert_group_used_count", 0, minimum=0) or 1,
        }
    )


def _attention_bias(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": model.biased(*QKV, "attn_output")}


def _olmo3(model: GgufModel) -> dict[str, Any]:
    return _attention_bias(model) | _windows(model, 0, 4) | {"rope_parameters": ropes_of(model, None)}


def _olmoe(model: GgufModel) -> dict[str, Any]:
    return _attention_bias(model) | read_experts(model, "num_experts", normalize=False) | _whole_width(model)


def _exaone4(model: GgufModel) -> dict[str, Any]:
    return _windows(model, 0, 4) | {"sliding_window_pattern": None}


def _granite(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    if not keys.flag("rope.scaling.finetuned", True):
        raise keys.wrong("rope.scaling.finetuned", "true, which stands for a rotary embedding here")
    return _llama(model) | read_granite(model) | {"logits_scaling": keys.positive("logit_scale")}


def _smollm3(model: GgufModel) -> dict[str, Any]:
    # Files do not say which layers have no rotary embedding; llama.cpp computes every fourth without one.
    return _llama(model) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _seed_oss(model: GgufModel) -> dict[str, Any]:
    return {
        "attention_bias": model.biased(*QKV),
        "attention_out_bias": model.biased("attn_output"),
        "mlp_bias": model.biased(*GATED),
    }


def _ernie(model: GgufModel) -> dict[str, Any]:
    return {"use_bias": model.biased(*QKV, "attn_output", *GATED)}


def _hunyuan_moe(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    found = _whole_width(model)
    shared = keys.integer("expert_shared_feed_forward_length", found["intermediate_size"])
    if shared != found["intermediate_size"]:
        raise keys.wrong("expert_shared_feed_forward_length", f"{found['intermediate_size']}, as the experts")
    # llama.cpp scales the chosen experts' shares to a sum of 1, whatever the file says.
    keys.settle("expert_weights_norm", "expert_shared_count")
    return _attention_bias(model) | read_experts(model, "num_experts") | found


def _gpt_oss(model: GgufModel) -> dict[str, Any]:
    rope = rope_of(model)
    if rope["rope_type"] == "yarn":
        # Files do not say it, but the published models do: the ramp's ends are not rounded to whole dimensions.
        rope["truncate"] = False
    return (
        _windows(model, 128, 2)
        | read_experts(model, "num_local_experts")
        | _whole_width(model)
        | {
            "attention_bias": model.biased(*QKV, "attn_output"),
            "rope_parameters": rope,
        }
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    special=_qwen3_moe,
    names=QK_NORMS | EXPERTS,
    biases=ATTENTION_BIASES,
    mixture=True,
)
HUNYUAN_NORMS: dict[str, Target] = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
QWEN2_BIASES = (*QKV, "attn_qkv")
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", special=_llama, biases=(*ATTENTION_BIASES, *GATED), turned=True
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", biases=QWEN2_BIASES),
    "qwen3": Family(architecture="Qwen3ForCausalLM", special=_qwen3, names=QK_NORMS, biases=ATTENTION_BIASES),
    "qwen3moe": QWEN3_MOE,
    "qwen2vl": Family(architecture="Qwen2ForCausalLM", special=seen(lambda model: {}), biases=QWEN2_BIASES),
    "qwen3vl": Family(
        architecture="Qwen3ForCausalLM", special=seen(_qwen3), names=QK_NORMS, biases=ATTENTION_BIASES
    ),
    "qwen3vlmoe": replace(QWEN3_MOE, special=seen(_qwen3_moe)),
    "mistral3": Family(
        architecture="MistralForCausalLM", special=lambda model: {"sliding_window": None}, turned=True
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        special=_gpt_oss,
        names=RENAMED
        | {
            "ffn_gate": None,
            "ffn_up": None,
            "ffn_down": None,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": Stacked("mlp.experts.gate_up_proj", "ffn_up_exps.weight"),
            "ffn_up_exps.weight": Stacked(PARTNER, "ffn_gate_exps.weight"),
            "ffn_down_exps.weight": Stacked("mlp.experts.down_proj"),
            "ffn_gate_exps.bias": Stacked("mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias"),
            "ffn_up_exps.bias": Stacked(PARTNER, "ffn_gate_exps.bias"),
            "ffn_down_exps.bias": Stacked("mlp.experts.down_proj_bias"),
        },
        biases=(*ATTENTION_BIASES, "ffn_gate_inp"),
        mixture=True,
    ),
    "gemma": Family(architecture="GemmaForCausalLM", special=_gemma, norm_shift=1.0),
    "gemma2": Family(architecture="Gemma2ForCausalLM", special=_gemma2, names=GEMMA, norm_shift=1.0),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM", special=_gemma3, names=GEMMA | QK_NORMS, norm_shift=1.0
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        special=_phi3,
        names=FUSED | {"attn_q": None, "attn_k": None, "attn_v": None, "attn_qkv": "self_attn.qkv_proj"},
    ),
    "chatglm": Family(architecture="GlmForCausalLM", special=_glm, names=FUSED, biases=QWEN2_BIASES),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        special=_glm,
        names=FUSED
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        biases=QWEN2_BIASES,
    ),
    "glm4moe": Family(
        architecture="Glm4MoeForCausalLM",
        special=_glm4_moe,
        names=QK_NORMS
        | EXPERTS
        | SHARED
        | RENAMED
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        biases=QWEN2_BIASES,
        mixture=True,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        special=_attention_bias,
        names=POST | QK_NORMS,
        biases=ATTENTION_BIASES,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        special=_olmoe,
        names=QK_NORMS | EXPERTS,
        biases=ATTENTION_BIASES,
        mixture=True,
    ),
    "deepseek2": DEEPSEEK_V2,
    "exaone": Family(architecture="LlamaForCausalLM"),
    "exaone4": Family(architecture="Exaone4ForCausalLM", special=_exaone4, names=POST | QK_NORMS),
    "granite": Family(
        architecture="GraniteForCausalLM",
        special=_granite,
        biases=(*ATTENTION_BIASES, *GATED),
        turned=True,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        special=_smollm3,
        biases=(*ATTENTION_BIASES, *GATED),
        turned=True,
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM", special=_ernie, biases=(*ATTENTION_BIASES, *GATED)
    ),
    "hunyuan-dense": Family(
        architecture="HunYuanDenseV1ForCausalLM",
        special=_attention_bias,
        names=HUNYUAN_NORMS,
        biases=ATTENTION_BIASES,
    ),
    "hunyuan-moe": Family(
        architecture="HunYuanMoEV1ForCausalLM",
        special=_hunyuan_moe,
        names=HUNYUAN_NORMS
        | EXPERTS
        | {
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        biases=ATTENTION_BIASES,
        mixture=True,
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        special=_seed_oss,
        names=RENAMED,
        biases=(*ATTENTION_BIASES, *GATED),
    ),
} | RECURRENT
"""`general.architecture` → family."""
OTHERS: dict[tuple[str, str], Family] = {
    ("llama", "expert_count"): Family(
        architecture="MixtralForCausalLM",
        special=_mixtral,
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        turned=True,
        mixture=True,
    ),
    ("granitehybrid", "expert_count"): GRANITE_EXPERTS,
    ("olmo2", "attention.sliding_window"): Family(
        architecture="Olmo3ForCausalLM", special=_olmo3, names=POST | QK_NORMS, biases=ATTENTION_BIASES
    ),
}
"""Families that share another one's name; a key that only they have identifies them."""
SIGMOIDS = {"deepseek2": DEEPSEEK_V3}
"""Those whose shares are sigmoids."""


def family_of(header: Header) -> tuple[Family, GgufModel]:
    """Return a file's family and its model; raises `ModelError` for a family that is not read here."""
    metadata = Fields(header.path, header.metadata)
    name = metadata.text("general.architecture", "")
    if name not in FAMILIES:
        raise metadata.wrong("general.architecture", ", ".join(FAMILIES))
    other = (
        family
        for (kind, key), family in OTHERS.items()
        if kind == name and header.metadata.get(f"{name}.{key}")
    )
    family, model = next(other, FAMILIES[name]), GgufModel(header, name)
    if header.metadata.get(f"{name}.expert_gating_func") == SIGMOID:
        family = SIGMOIDS.get(name, family)
    if model.experts and not family.mixture:
        raise model.keys.wrong("expert_count", f"0: {family.architecture} has no experts")
    if family.mixture and not model.experts:
        raise model.keys.wrong("expert_count", f"1 or more: {family.architecture} is a mixture of experts")
    if family.recurrent_layers is not None:
        model.recurrent = family.recurrent_layers(model)
    elif 0 in model.kv_by_layer:
        raise model.keys.wrong(
            "attention.head_count_kv", f"1 or more: {family.architecture} has no recurrent layers"
        )
    return family, model
