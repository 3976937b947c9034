"""Small random models of every family, each set up so that what is special to the family changes its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 128
TOKENS = 40
"""Length of the tests' sequences: beyond every window and every trained length below."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HALF = 8
"""Rotated dimensions over two, at the head size of 16 that COMMON gives."""


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
    "long_factor": [1.5 + 0.5 * i for i in range(HALF)],
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2}

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
DELTA_MOE = (
    MOE
    | DELTA
    | {
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
)

GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "attention_bias": True,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "vocab_size_per_layer_input": VOCABULARY,
    "tie_word_embeddings": True,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_chunk_size": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-linear": ("Llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 16}),
    "llama-llama3": ("Llama", rope("llama3", **LLAMA3, original_max_position_embeddings=16)),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-options": (
        "Llama",
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            beta_slow=0.5,
            truncate=False,
        ),
    ),
    "llama-yarn-mscale": (
        "Llama",
        rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.4, mscale_all_dim=0.7),
    ),
    "llama-longrope": (
        "Llama",
        rope("longrope", **LONGROPE, factor=4.0, original_max_position_embeddings=16),
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gemma": ("Gemma", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "cwm": (
        "Cwm",
        {
            "head_dim": 32,
            "sliding_window": 9,
            **rope("llama3", **LLAMA3, original_max_position_embeddings=16),
        },
    ),
    "ernie": ("Ernie4_5", {"head_dim": 32, "use_bias": True, "tie_word_embeddings": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("dynamic", alpha=8.0, factor=1.0),
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"head_dim": 32, "num_experts": 6, "moe_topk": 2, "intermediate_size": 48},
    ),
    "glm": ("Glm", {"head_dim": 32, **rope("default", partial_rotary_factor=0.5)}),
    "glm-no-bias": ("Glm", {"head_dim": 16, "attention_bias": False}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "glm4": ("Glm4", {"head_dim": 32, **rope("default", partial_rotary_factor=0.5)}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        "Gemma4Text",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-one-size": ("Gemma4Text", GEMMA4 | {"global_head_dim": 16, "hidden_size_per_layer_input": 16}),
    "gemma4-moe": (
        "Gemma4Text",
        GEMMA4
        | {
            "layer_types": [SLIDING, FULL, FULL],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7),
        },
    ),
    "deepseek-v2-greedy": ("DeepseekV2", LATENT | {"q_lora_rank": 24, "attention_bias": True}),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 40,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek-v3-halves": ("DeepseekV3", LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "phi3": ("Phi3", {"sliding_window": 9, **rope("default", partial_rotary_factor=0.5)}),
    "phi3-longrope": (
        "Phi3",
        rope("longrope", **LONGROPE, partial_rotary_factor=1.0) | {"original_max_position_embeddings": 16},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 1e4,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "granite": ("Granite", GRANITE | {"mlp_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3-moe": (
        "Qwen3Moe",
        MOE | {"moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 32},
    ),
    "qwen3-moe-dense-layer": (
        "Qwen3Moe",
        MOE | {"moe_intermediate_size": 32, "mlp_only_layers": [1], "head_dim": 16},
    ),
    "olmoe": ("Olmoe", MOE | {"clip_qkv": 1.0}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "seed-oss-qkv-bias": ("SeedOss", {"head_dim": 16}),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-bias": (
        "Lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA_MOE | {"mlp_only_layers": [0]},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        GRANITE
        | MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        GRANITE
        | MAMBA
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1], "mamba_n_groups": 2, "attention_bias": True}),
    "falcon-h1": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 128,
            "mamba_n_groups": 2,
            "mlp_multipliers": [0.8, 1.3],
            "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 1.4],
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "key_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "projectors_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", DELTA_MOE),
    "lfm2-moe": (
        "Lfm2Moe",
        MOE
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        DELTA
        | {
            "head_dim": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
"""Name of a model → its configuration class and what differs from `COMMON`: logits are compared with transformers."""

RECURRENT = (
    "lfm2",
    "lfm2-bias",
    "lfm2-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "granite-hybrid",
    "granite-hybrid-dense",
    "bamba",
    "falcon-h1",
    "falcon-h1-normed",
)
"""Models with layers that keep a state in place of keys and values."""
UNTRAINED = (
    "ernie",
    "glm",
    "glm-no-bias",
    "glm4",
)
"""Models that the trainer's own layers do not compute: recurrent layers, interleaved rotary embeddings."""
TRAINED = [name for name in MODELS if name not in UNTRAINED]

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Gemma": {"head_dim": 16},
    "Cwm": {"head_dim": 16, "sliding_window": 9},
    "Ernie4_5": {"head_dim": 16},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "Glm4Moe": {
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_local_experts": 6,
    },
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
    },
    "Gemma3Text": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24},
    "Gemma4Text": GEMMA4
    | {"layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 24},
    "DeepseekV2": LATENT | {"q_lora_rank": 24},
    "DeepseekV3": LATENT | {"q_lora_rank": 24},
    "Phi3": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 9},
    "Exaone4": {"sliding_window": 9, "sliding_window_pattern": 2},
    "Granite": {"attention_multiplier": 0.3},
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "SeedOss": {"head_dim": 16},
    "HunYuanDenseV1": {"head_dim": 16, **rope("dynamic", alpha=8.0, factor=1.0)},
    "HunYuanMoEV1": {"head_dim": 16, "num_experts": 6, "moe_topk": 2},
    "Lfm2": {"full_attn_idxs": [1], "block_multiple_of": 32},
    "Qwen3Next": MOE | DELTA | {"head_dim": 16, "moe_intermediate_size": 32, "full_attention_interval": 2},
    "GraniteMoeHybrid": MAMBA
    | {
        "num_local_experts": 6,
        "attention_multiplier": 0.3,
        "shared_intermediate_size": 80,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "FalconH1": MAMBA | {"mamba_d_ssm": 128, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 1.4]},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "Lfm2Moe": MOE
    | {"moe_intermediate_size": 32, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3_5MoeText": MOE
    | DELTA
    | {"head_dim": 16, "moe_intermediate_size": 32, "full_attention_interval": 2},
    "Qwen3_5Text": DELTA | {"head_dim": 16, "full_attention_interval": 2},
}
"""Configuration class without "Config" → what differs from `COMMON`, so that the family's fields matter.

tests/models/decoder/test_config_fields.py changes every field of each and compares logits with transformers.
"""


def build(name: str, seed: int = 0, **fields: Any) -> Any:
    """The transformers model in float32 with eager attention; weights wide enough for logits of order 1."""
    kind, overrides = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | overrides | fields))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.data.normal_(std=0.15)
    for buffer_name, buffer in model.named_buffers():
        if "e_score_correction_bias" in buffer_name or "expert_bias" in buffer_name:
            buffer.data.normal_(std=0.3)
        if "layer_scalar" in buffer_name:
            buffer.data.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
