"""The model families: for each architecture one entry that says how it differs from Llama.

A family gives its defaults, the names of its tensors, and a function that reads the fields that only it has. A field
that is neither read nor known to be inert is refused by name (`inert_fields.py`). To add a family, add an entry to
`FAMILIES` and to `hub.architectures.NATIVE`. Small random models go to tests/models/decoder/tiny.py
(docs/contributing/model-family.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwright.hardware.kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from torchwright.hub.architectures import recognize
from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.family import (
    FULL,
    SLIDING,
    Family,
    Names,
    read_biases,
    read_cap,
    read_deepseek_experts,
    read_experts,
    read_granite,
    read_window,
    read_windows,
)
from torchwright.models.decoder.gemma4_family import GEMMA4
from torchwright.models.decoder.hunyuan_families import HUNYUAN
from torchwright.models.decoder.latent_families import LATENT
from torchwright.models.decoder.recurrent_families import RECURRENT


def _asked_window(fields: Fields, default: int) -> int:
    """Return the width of sliding windows where `use_sliding_window` asks for them, else 0."""
    fields.settle("sliding_window", "max_window_layers")
    return read_window(fields, default) if fields.flag("use_sliding_window", False) else 0


def _sliding(default: int) -> Callable[[Fields, int], dict[str, Any]]:
    """One window for all layers, `default` where config.json has no such key."""
    return lambda fields, layers: {"windows": (read_window(fields, default),) * layers}


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    window = _asked_window(fields, 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return read_windows(fields, window, kinds)


def _qwen2(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(fields, layers)}


def _qwen3(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields, layers)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": windows}


def _smollm3(fields: Fields, layers: int) -> dict[str, Any]:
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.items("no_rope_layers", layers) or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    window = _asked_window(fields, 0)
    kinds = [SLIDING if window and not rotated else FULL for rotated in rotates]
    return read_biases(fields) | {"rotates": tuple(rotates), "windows": read_windows(fields, window, kinds)}


def _gemma(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false: a decoder's attention is causal")
    bias = fields.flag("attention_bias", False)
    scale = fields.integer("hidden_size") ** 0.5
    return {"qkv_bias": bias, "o_bias": bias, "norm_offset": 1.0, "embedding_scale": scale}


def _sliding_gemma(fields: Fields, layers: int, pattern: int) -> dict[str, Any]:
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    window = read_window(fields, 4096)
    if not window:
        raise fields.wrong("sliding_window", "an integer of 1 or more")
    return _gemma(fields, layers) | {
        "windows": read_windows(fields, window, kinds),
        "scale": fields.positive("query_pre_attn_scalar", 256) ** -0.5,
    }


def _gemma2(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding_gemma(fields, layers, 2) | {
        "attention_soft_cap": read_cap(fields, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": read_cap(fields, "final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding_gemma(fields, layers, fields.integer("sliding_window_pattern", 6)) | {
        "qk_norm": "head",
        "logit_soft_cap": read_cap(fields, "final_logit_softcapping", 0.0),
    }


def _seed_oss(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.flag("attention_bias", True),
        "o_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _cwm(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = [FULL if layer % 4 == 0 else SLIDING for layer in range(layers)]
    return {
        "mlp_bias": fields.flag("mlp_bias", False),
        "windows": read_windows(fields, read_window(fields, 8192), kinds),
    }


def _ernie(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("use_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "interleaved": True}


def _glm(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": fields.flag("attention_bias", True), "interleaved": True}


def _olmo2(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "projection"}


def _olmo3(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(layers)]
    return _olmo2(fields, layers) | {"windows": read_windows(fields, read_window(fields, 4096), kinds)}


def _exaone4(fields: Fields, layers: int) -> dict[str, Any]:
    window = read_window(fields, 4096)
    pattern = fields.data.get("sliding_window_pattern", 4)
    fields.settle("sliding_window_pattern")
    if "layer_types" not in fields.data and window and (type(pattern) is not int or pattern < 1):
        raise fields.wrong("sliding_window_pattern", "an integer of 1 or more, or 'layer_types'")
    every = pattern if type(pattern) is int and window else 1
    kinds = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    windows = read_windows(fields, window, kinds)
    return {"qk_norm": "head", "windows": windows, "rotates": tuple(not window or w > 0 for w in windows)}


def _mixtral(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding(0)(fields, layers) | {
        "experts": read_experts(fields, feed_forward="intermediate_size", normalize=True),
        "sparse": (True,) * layers,
    }


def _qwen3_moe(fields: Fields, layers: int) -> dict[str, Any]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", "a list of layers")
    window = _asked_window(fields, 4096)
    normalize = fields.flag("norm_topk_prob", False)
    bias = fields.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "windows": (window,) * layers,
        "experts": read_experts(fields, feed_forward="moe_intermediate_size", normalize=normalize),
        "sparse": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    }


def _gpt_oss(fields: Fields, layers: int) -> dict[str, Any]:
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(key, value) != value:
            raise fields.wrong(key, str(value))
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu")
    bias = fields.flag("attention_bias", True)
    kinds = [SLIDING if (layer + 1) % 2 else FULL for layer in range(layers)]
    experts = read_experts(fields, feed_forward="intermediate_size", normalize=True)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "windows": read_windows(fields, read_window(fields, 128), kinds),
        "activation": "clamped_swiglu",
        "experts": replace(experts, router_bias=True, linear_bias=True),
        "sparse": (True,) * layers,
    }


def _glm4_moe(fields: Fields, layers: int) -> dict[str, Any]:
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": "head" if fields.flag("use_qk_norm", False) else "none",
        "experts": read_deepseek_experts(fields),
        "sparse": tuple(layer >= dense for layer in range(layers)),
    }


def _olmoe(fields: Fields, layers: int) -> dict[str, Any]:
    normalize = fields.flag("norm_topk_prob", False)
    return _olmo2(fields, layers) | {
        "clip_qkv": fields.optional("clip_qkv"),
        "experts": read_experts(fields, feed_forward="intermediate_size", normalize=normalize),
        "sparse": (True,) * layers,
    }


GEMMA_NAMES = Names(
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)

POST_NAMES = Names(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = (
    {
        "LlamaForCausalLM": Family(special=lambda fields, layers: read_biases(fields)),
        "MistralForCausalLM": Family(special=_sliding(4096), kv_heads=8),
        "Qwen2ForCausalLM": Family(special=_qwen2, kv_heads=32, ignored=("attention_bias",)),
        "Qwen3ForCausalLM": Family(special=_qwen3, head_dim=128, kv_heads=32),
        "SmolLM3ForCausalLM": Family(special=_smollm3, theta=2_000_000.0, tied=True, kv_heads=4),
        "GemmaForCausalLM": Family(
            special=_gemma,
            tied=True,
            head_dim=256,
            kv_heads=16,
            ignored=("hidden_activation",),
            default_activation="gelu_pytorch_tanh",
        ),
        "Gemma2ForCausalLM": Family(
            special=_gemma2,
            names=GEMMA_NAMES,
            tied=True,
            head_dim=256,
            kv_heads=4,
            ignored=("hidden_act",),
            activation="hidden_activation",
            default_activation="gelu_pytorch_tanh",
        ),
        "Gemma3ForCausalLM": Family(
            special=_gemma3,
            names=GEMMA_NAMES,
            theta=1_000_000.0,
            local_theta=10_000.0,
            tied=True,
            head_dim=256,
            kv_heads=4,
            ignored=("hidden_act",),
            activation="hidden_activation",
            default_activation="gelu_pytorch_tanh",
        ),
        "Phi3ForCausalLM": Family(
            special=_sliding(0),
            names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
            eps=1e-5,
            rope_names={"su": "longrope", "yarn": "longrope"},
            partial=True,
            original=4096,
        ),
        "CwmForCausalLM": Family(
            special=_cwm,
            theta=1_000_000.0,
            eps=1e-5,
            head_dim=128,
            kv_heads=8,
            default_rope={
                "rope_type": "llama3",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            ignored=("attention_bias",),
        ),
        "Ernie4_5ForCausalLM": Family(
            special=_ernie, theta=500_000.0, eps=1e-5, tied=True, head_dim=128, kv_heads=2
        ),
        "GlmForCausalLM": Family(
            special=_glm,
            names=Names(gate_up=("mlp.gate_up_proj",)),
            eps=1.5625e-7,
            head_dim=128,
            kv_heads=2,
            partial=True,
            share=0.5,
        ),
        "Glm4ForCausalLM": Family(
            special=_glm,
            names=Names(
                post_attention="post_self_attn_layernorm",
                pre_mlp="post_attention_layernorm",
                post_mlp="post_mlp_layernorm",
                gate_up=("mlp.gate_up_proj",),
            ),
            eps=1.5625e-7,
            head_dim=128,
            kv_heads=2,
            partial=True,
            share=0.5,
        ),
        "Glm4MoeForCausalLM": Family(
            special=_glm4_moe, eps=1e-5, kv_heads=8, partial=True, share=0.5, ignored=("num_mtp_layers",)
        ),
        "Olmo2ForCausalLM": Family(special=_olmo2, names=POST_NAMES, eps=1e-5),
        "Olmo3ForCausalLM": Family(
            special=_olmo3,
            names=POST_NAMES,
            eps=1e-5,
            theta=500_000.0,
            local_theta=500_000.0,
            local_key=None,
        ),
        "Exaone4ForCausalLM": Family(
            special=_exaone4, names=POST_NAMES, eps=1e-5, kv_heads=32, ignored=("attention_bias",)
        ),
        "GraniteForCausalLM": Family(special=lambda fields, layers: read_granite(fields)),
        "MixtralForCausalLM": Family(
            special=_mixtral,
            names=Names(
                router="block_sparse_moe.gate",
                expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
                expert_down="block_sparse_moe.experts.{}.w2",
            ),
            theta=1_000_000.0,
            eps=1e-5,
            kv_heads=8,
        ),
        "Qwen3MoeForCausalLM": Family(special=_qwen3_moe, kv_heads=4),
        "OlmoeForCausalLM": Family(special=_olmoe, eps=1e-5),
        "GptOssForCausalLM": Family(
            special=_gpt_oss,
            names=Names(
                router="mlp.router",
                expert_gate_up=("mlp.experts.gate_up_proj",),
                expert_down="mlp.experts.down_proj",
            ),
            theta=150_000.0,
            eps=1e-5,
            head_dim=64,
            kv_heads=8,
            default_rope={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            ignored=("initial_context_length", "experts_per_token"),
        ),
        "SeedOssForCausalLM": Family(special=_seed_oss, head_dim=128, kv_heads=8),
    }
    | GEMMA4
    | LATENT
    | RECURRENT
    | HUNYUAN
)
"""Architecture, as config.json names it, → family."""


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Return the decoder of a Hugging Face folder.

    Raises what `decoder_config` does, and `ModelError` for a config.json that is missing or no JSON.
    """
    from torchwright.hub.folder import read_config

    return decoder_config(read_config(folder), folder / "config.json")


def decoder_config(data: dict[str, Any], path: Path | str) -> DecoderConfig:
    """Return the decoder that the fields of a config.json describe; errors name `path`.

    Raises `UnsupportedArchitecture` for a model that no family here describes. Raises `ModelError`, naming file and
    key, for fields that are missing, contradictory, not honoured, or of an unsupported checkpoint format.
    """
    from torchwright.hub.checkpoint import check_format

    architecture, data = recognize(data, path)
    check_format(path, data)
    return FAMILIES[architecture].read(architecture, Fields(path, data))
