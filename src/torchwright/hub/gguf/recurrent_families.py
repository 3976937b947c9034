"""GGUF model families with recurrent layers; see `families.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchwright.hub.gguf.family import (
    ATTENTION_BIASES,
    EXPERTS,
    FULL,
    PARTNER,
    QK_NORMS,
    QKV,
    RENAMED,
    SIGMOID,
    WHOLE,
    Family,
    Joined,
    Target,
    read_experts,
    read_granite,
    seen,
)
from torchwright.hub.gguf.model import GgufModel
from torchwright.hub.gguf.rope import rope_of

LINEAR = "linear_attention"
NO_ATTENTION: dict[str, Target] = dict.fromkeys(
    (*QKV, "attn_qkv", "attn_output", "attn_q_norm", "attn_k_norm"), None
)


def _without_keys(model: GgufModel) -> tuple[bool, ...]:
    """Layers that have no heads of keys and values."""
    return tuple(count == 0 for count in model.kv_by_layer) or (False,) * model.layers


def _by_interval(model: GgufModel) -> tuple[bool, ...]:
    """Layers that the file lists, or all but the last of an interval."""
    keys, key = model.keys, "attention.recurrent_layers"
    interval = keys.integer("full_attention_interval", 4)
    listed = keys.get(key)
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(model.layers))
    if not isinstance(listed, list) or len(listed) != model.blocks or not set(listed) <= {0, 1}:
        raise keys.wrong(key, f"{model.blocks} times true or false")
    return tuple(map(bool, listed[: model.layers]))


def _kinds(model: GgufModel, recurrent: str) -> dict[str, Any]:
    return {"layer_types": [recurrent if each else FULL for each in model.recurrent]}


def _lfm2(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    return _kinds(model, "conv") | {
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.integer("shortconv.l_cache", minimum=2),
        "conv_bias": False,
        "intermediate_size": keys.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    found = _lfm2(model) | read_experts(model, "num_experts", normalize=True, gating=SIGMOID)
    del found["block_auto_adjust_ff_dim"]
    return found | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0, minimum=0),
        "use_expert_bias": model.has("exp_probs_b.bias"),
        # Files do not say it; llama.cpp multiplies the shares with nothing.
        "routed_scaling_factor": 1.0,
    }


def _granite_hybrid(model: GgufModel) -> dict[str, Any]:
    keys, states = model.keys, model.states()
    inner = states.heads * states.head_dim
    if inner % model.width:
        raise keys.wrong("ssm.inner_size", f"a multiple of embedding_length, {model.width}")
    # The width of the shared expert, which a model without other experts has under the key of dense layers.
    keys.settle("expert_shared_feed_forward_length")
    return {
        **_kinds(model, LINEAR),
        **read_granite(model),
        "attention_bias": model.biased(*QKV, "attn_output"),
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
        # llama.cpp's switch for a rotary embedding.
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": 0,
        "shared_intermediate_size": keys.integer("feed_forward_length"),
        "mamba_n_heads": states.heads,
        "mamba_n_groups": states.key_heads,
        "mamba_d_head": states.head_dim,
        "mamba_d_state": states.key_dim,
        "mamba_d_conv": states.width,
        "mamba_expand": inner // model.width,
        "mamba_conv_bias": model.has("ssm_conv1d.bias"),
        "mamba_proj_bias": False,
    }


def _granite_experts(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    shared = {"shared_intermediate_size": keys.integer("expert_shared_feed_forward_length")}
    return _granite_hybrid(model) | shared | read_experts(model, "num_local_experts")


def _delta(model: GgufModel) -> dict[str, Any]:
    states = model.states()
    return _kinds(model, LINEAR) | {
        "linear_num_key_heads": states.key_heads,
        "linear_num_value_heads": states.heads,
        "linear_key_head_dim": states.key_dim,
        "linear_value_head_dim": states.head_dim,
        "linear_conv_kernel_dim": states.width,
        "rope_parameters": rope_of(model, partial=True),
    }


def _delta_experts(model: GgufModel) -> dict[str, Any]:
    keys = model.keys
    sizes = read_experts(model, "num_experts", normalize=True)
    dense = keys.integer("feed_forward_length", 0, minimum=0)
    inner = keys.integer("expert_feed_forward_length", dense // sizes["num_experts_per_tok"])
    shared = keys.integer("expert_shared_feed_forward_length", dense or None)
    return (
        _delta(model)
        | sizes
        | {
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": shared,
            "decoder_sparse_step": 1,
        }
    )


def _qwen3_5_moe(model: GgufModel) -> dict[str, Any]:
    found = _delta_experts(model)
    for key in ("norm_topk_prob", "decoder_sparse_step"):  # always so in this family
        del found[key]
    return found


SHORT_CONVOLUTION: dict[str, Target] = NO_ATTENTION | {
    "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
}
MAMBA: dict[str, Target] = NO_ATTENTION | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
DELTA: dict[str, Target] = NO_ATTENTION | {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
SPLIT_DELTA: dict[str, Target] = DELTA | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
SHARED_EXPERT: dict[str, Target] = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
LFM2_NAMES: dict[str, Target] = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    special=_lfm2,
    names=LFM2_NAMES,
    recurrent=SHORT_CONVOLUTION,
    recurrent_layers=_without_keys,
    # The last norm, under a name that llama.cpp keeps for files of its first version.
    whole={name: target for name, target in WHOLE.items() if name != "output_norm.weight"}
    | {"token_embd_norm.weight": "model.embedding_norm.weight"},
)
GRANITE = Family(
    architecture="GraniteMoeHybridForCausalLM",
    special=_granite_hybrid,
    names={
        "ffn_gate.weight": Joined("shared_mlp.input_linear.weight", "ffn_up.weight"),
        "ffn_up.weight": Joined(PARTNER, "ffn_gate.weight"),
        "ffn_down": "shared_mlp.output_linear",
    },
    recurrent=MAMBA,
    recurrent_layers=_without_keys,
    biases=(*ATTENTION_BIASES, "ssm_conv1d"),
    turned=True,
)
GRANITE_EXPERTS = replace(
    GRANITE,
    special=_granite_experts,
    names={
        "ffn_gate": None,
        "ffn_up": None,
        "ffn_down": None,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps.weight": Joined("block_sparse_moe.input_linear.weight", "ffn_up_exps.weight"),
        "ffn_up_exps.weight": Joined(PARTNER, "ffn_gate_exps.weight"),
        "ffn_down_exps.weight": Joined("block_sparse_moe.output_linear.weight"),
        "ffn_gate_shexp.weight": Joined("shared_mlp.input_linear.weight", "ffn_up_shexp.weight"),
        "ffn_up_shexp.weight": Joined(PARTNER, "ffn_gate_shexp.weight"),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    mixture=True,
)
"""The hybrid with experts, which shares the dense one's name."""
QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    special=seen(_delta),
    names=QK_NORMS | RENAMED,
    recurrent=SPLIT_DELTA,
    recurrent_layers=_by_interval,
    norm_shift=1.0,
    tiled=True,
    output_gate=True,
)
RECURRENT: dict[str, Family] = {
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2,
        architecture="Lfm2MoeForCausalLM",
        special=_lfm2_moe,
        names=LFM2_NAMES
        | {
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        mixture=True,
    ),
    "granitehybrid": GRANITE,
    "qwen3next": Family(
        architecture="Qwen3NextForCausalLM",
        special=_delta_experts,
        names=QK_NORMS | EXPERTS | SHARED_EXPERT | RENAMED,
        recurrent=DELTA
        | {
            "attn_qkv.weight": Joined("linear_attn.in_proj_qkvz.weight", "attn_gate.weight"),
            "attn_gate.weight": Joined(PARTNER, "attn_qkv.weight"),
            # Files of llama.cpp's first version, whose rows are those of the model.
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        recurrent_layers=_by_interval,
        norm_shift=1.0,
        output_gate=True,
        mixture=True,
    ),
    "qwen35": QWEN3_5,
    "qwen35moe": replace(
        QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        special=seen(_qwen3_5_moe),
        names=QK_NORMS | EXPERTS | SHARED_EXPERT | RENAMED,
        mixture=True,
    ),
}
"""`general.architecture` → family."""
