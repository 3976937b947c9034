"""Published shapes of models with recurrent layers, as their config.json says them."""

from __future__ import annotations

from typing import Any


def _lfm2(size: int, ffn: int, heads: int, attends: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": size,
        "intermediate_size": ffn,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
        "num_hidden_layers": 16,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "full_attn_idxs": attends,
        "conv_L_cache": 3,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    }


def _qwen3_5(size: int, ffn: int, layers: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": size,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }


def _granite(
    size: int, shared: int, heads: int, kv_heads: int, mamba_heads: int, attends: list[int]
) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": size,
        "intermediate_size": shared,
        "shared_intermediate_size": shared,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in attends else "mamba" for layer in range(40)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": 0,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "position_embedding_type": "nope",
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }


def _falcon_h1(
    size: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, ssm: tuple[int, int, int]
) -> dict[str, Any]:
    """`ssm` are heads, their size and the state's."""
    mamba_heads, mamba_head, state = ssm
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": size,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "mamba_d_ssm": mamba_heads * mamba_head,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": mamba_head,
        "mamba_d_state": state,
        "mamba_n_groups": 1,
        "mamba_rms_norm": True,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }


LFM2_ATTENDS = [2, 5, 8, 10, 12, 14]
GRANITE_ATTENDS = [5, 15, 25, 35]

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2-350m": _lfm2(1024, 6656, 16, LFM2_ATTENDS),
    "lfm2-700m": _lfm2(1536, 10240, 24, LFM2_ATTENDS),
    "lfm2-1.2b": _lfm2(2048, 12288, 32, LFM2_ATTENDS),
    "lfm2-8b-a1b": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 24,
        "layer_types": [
            "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
        ],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "conv_L_cache": 3,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, 24, 4, 48),
    "qwen3.5-35b-a3b": _qwen3_5(2048, 512, 40, 16, 2, 32)
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "granite-4.0-h-micro": _granite(2048, 8192, 32, 8, 64, GRANITE_ATTENDS),
    "granite-4.0-h-tiny": _granite(1536, 1024, 12, 4, 48, GRANITE_ATTENDS)
    | {"intermediate_size": 512, "num_local_experts": 64, "num_experts_per_tok": 6},
    "granite-4.0-h-small": _granite(4096, 1536, 32, 8, 128, GRANITE_ATTENDS)
    | {"intermediate_size": 768, "num_local_experts": 72, "num_experts_per_tok": 10},
    "bamba-9b": {
        "architectures": ["BambaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "vocab_size": 128256,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "falcon-h1-0.5b": _falcon_h1(1024, 2048, 36, 8, 2, 64, (24, 64, 128))
    | {"vocab_size": 32784, "mamba_rms_norm": False},
    "falcon-h1-1.5b": _falcon_h1(2048, 4608, 24, 8, 2, 128, (48, 64, 256)) | {"vocab_size": 65537},
    "falcon-h1-7b": _falcon_h1(3072, 12288, 44, 12, 2, 128, (24, 128, 256)) | {"vocab_size": 130049},
    "falcon-h1-34b": _falcon_h1(5120, 21504, 72, 20, 4, 128, (32, 128, 256))
    | {"vocab_size": 261120, "mamba_n_groups": 2},
}
"""Name → what the published config.json says of the shape."""
