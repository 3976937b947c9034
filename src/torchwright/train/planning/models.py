"""Models to plan for: a Hugging Face folder, a config.json, or a well-known shape that needs no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError, unknown
from torchwright.hub.architectures import recognize
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config_file
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import FAMILIES, read_decoder_config
from torchwright.train.planning.known_hybrids import HYBRIDS


def _llama(
    size: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int, context: int
) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }


def _gemma4(size: int, ffn: int, layers: int, heads: int, kv_heads: int, window: int, context: int) -> dict:
    return _llama(size, ffn, layers, heads, kv_heads, 262144, context) | {
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": window,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }


def _gpt_oss(layers: int, experts: int) -> dict:
    return _llama(2880, 2880, layers, 64, 8, 201088, 131072) | {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, 131072)
    | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256, 131072),
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 32000, 32768)
    | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": _llama(2048, 6144, 48, 32, 4, 151936, 40960)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "qwen3-235b-a22b": _llama(4096, 12288, 94, 64, 4, 151936, 40960)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
    },
    "deepseek-v2-lite": _llama(2048, 10944, 27, 16, 16, 102400, 163840)
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "deepseek-v3": _llama(7168, 18432, 61, 128, 128, 129280, 163840)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    **HYBRIDS,
    # The language models of Gemma 4, without the encoders of pictures and sound.
    "gemma-4-e2b": _gemma4(1536, 6144, 35, 8, 1, 512, 131072)
    | {
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
    },
    "gemma-4-e4b": _gemma4(2560, 10240, 42, 8, 2, 512, 131072)
    | {"num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256},
    "gemma-4-26b-a4b": _gemma4(2816, 2112, 30, 16, 8, 1024, 262144)
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma-4-31b": _gemma4(5376, 21504, 60, 32, 16, 1024, 262144)
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "hunyuan-7b": _llama(4096, 14336, 32, 32, 8, 128167, 262144)
    | {"architectures": ["HunYuanDenseV1ForCausalLM"], "tie_word_embeddings": True},
    "hunyuan-a13b": _llama(4096, 3072, 32, 32, 8, 128167, 32768)
    | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": 64,
        "moe_topk": 8,
        "tie_word_embeddings": True,
    },
}
"""Name → what the published config.json says of the shape."""


def read_model(name: str) -> DecoderConfig:
    """Return the decoder's shape from a folder, a config.json, or a name in `KNOWN`.

    Raises `UnknownName` for anything else, and `ModelError` for a configuration that cannot be read.
    """
    config = _read(name)
    if config.untrained is not None:
        raise ModelError(
            f"{name} cannot be planned", found=f"{config.untrained}, which the trainer's layers lack"
        )
    return config


def _read(name: str) -> DecoderConfig:
    if name in KNOWN:
        return _from_data(Path(name), KNOWN[name])
    path = Path(name)
    if path.is_dir():
        return read_decoder_config(path)
    if path.is_file():
        return _from_data(path, read_config_file(path))
    raise unknown(
        "model",
        name,
        KNOWN,
        next="give one of these names, a Hugging Face folder, or the path of a config.json",
    )


def _from_data(path: Path, data: dict[str, Any]) -> DecoderConfig:
    """Read a configuration in whatever format its checkpoint is: no weight is read."""
    architecture, data = recognize(data, path)
    return FAMILIES[architecture].read(architecture, Fields(path, data))
