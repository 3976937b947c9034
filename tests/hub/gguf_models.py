"""Tiny models of each family as the GGUF files that llama.cpp's converter makes of them, written from its rules.

The files' metadata are in `gguf_sizes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf_files as files
import gguf_recurrent_models as recurrent
import gguf_sizes
import numpy as np
import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 96,
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
"""Frequencies of the rotary embedding at heads of 16."""
THETA: dict[str, Any] = {"rope_theta": 10_000.0}
LLAMA3: dict[str, Any] = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16} | THETA
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
    "long_factor": [1.5 + 0.5 * i for i in range(HALF)],
}
STRETCHED: dict[str, Any] = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
SIX: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-biases": (
        "llama",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "llama",
        "Mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "mistral3": ("mistral3", "Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2vl": ("qwen2vl", "Qwen2", {"tie_word_embeddings": True}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        SIX | {"moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32},
    ),
    "qwen3vl": ("qwen3vl", "Qwen3", {"head_dim": 32}),
    "qwen3vlmoe": (
        "qwen3vlmoe",
        "Qwen3Moe",
        SIX | {"moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gemma": ("gemma", "Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "phi3",
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75} | THETA,
        },
    ),
    "phi3-window": (
        "phi3",
        "Phi3",
        {
            "sliding_window": 9,
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0} | THETA,
        },
    ),
    "phi3-longrope": (
        "phi3",
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0} | THETA,
        },
    ),
    "chatglm": (
        "chatglm",
        "Glm",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5} | THETA},
    ),
    "glm4": (
        "glm4",
        "Glm4",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5} | THETA,
        },
    ),
    # llama.cpp's converter writes the stretched base and no scaling.
    "hunyuan-dense": (
        "hunyuan-dense",
        "HunYuanDenseV1",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "HunYuanMoEV1",
        {"head_dim": 32, "num_experts": 6, "moe_topk": 2, "intermediate_size": 64},
    ),
    "glm4moe": (
        "glm4moe",
        "Glm4Moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5} | THETA,
        },
    ),
    "deepseek-v2": ("deepseek2", "DeepseekV2", LATENT | {"q_lora_rank": None, "rope_parameters": STRETCHED}),
    "deepseek-v3": (
        "deepseek2",
        "DeepseekV3",
        LATENT | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": (
        "olmo2",
        "Olmo3",
        {
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default"} | THETA,
            },
        },
    ),
    "olmoe": ("olmoe", "Olmoe", SIX | {"norm_topk_prob": False, "num_key_value_heads": 4}),
    "exaone": (
        "exaone",
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3} | THETA},
    ),
    "exaone4": (
        "exaone4",
        "Exaone4",
        {
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "rope_parameters": {"rope_type": "default"} | THETA,
        },
    ),
    "exaone4-full": (
        "exaone4",
        "Exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"rope_type": "llama3", **LLAMA3} | THETA,
        },
    ),
    "granite": (
        "granite",
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": (
        "smollm3",
        "SmolLM3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 4, "use_sliding_window": False},
    ),
    "ernie4_5": ("ernie4_5", "Ernie4_5", {"head_dim": 32, "use_bias": False, "tie_word_embeddings": True}),
    "seed_oss": (
        "seed_oss",
        "SeedOss",
        {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
    ),
    **recurrent.MODELS,
}
"""Name → general.architecture, configuration class, and what differs from `COMMON`."""


def build(name: str, **options: Any) -> Any:
    """A random model of transformers in float32, with weights wide enough for logits of order 1."""
    _, kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | own | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2 if "norm" in parameter_name else 0.1)
        if "norm" in parameter_name and not kind.startswith("Gemma"):
            parameter.data.add_(1.0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.data.normal_(std=0.3)
    return model.requires_grad_(False)


def write(
    path: Path,
    name: str,
    model: Any,
    tokenizer: dict[str, Any],
    kind: Callable[[str], str] = lambda name: "F32",
    *,
    extra: dict[str, torch.Tensor] | None = None,
    without: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """Write a model as a file, `kind(name)` being the type of each matrix; the model gets what the blocks stand for.

    `extra` are further tensors in float32, and `without` those to leave out.
    """
    architecture = MODELS[name][0]
    keys = {
        f"{architecture}.{key}": value for key, value in gguf_sizes.sizes(architecture, model.config).items()
    }
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for stored_name, view, shape, shift in parts(architecture, model):
        plain = len(shape) == 1 or PLAIN.search(stored_name) is not None
        chosen = "F32" if plain else kind(stored_name)
        if chosen in files.DECODERS:
            content, decoded = files.blocks(chosen, (math.prod(shape[:-1]), shape[-1]), len(tensors))
            view.copy_(torch.from_numpy(decoded).view(view.shape))
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[chosen]
            content = (view + shift).to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
            view.copy_((view + shift).to(dtype).float() - shift)
        tensors[stored_name] = (chosen, shape, content)
    for stored_name, numbers in gguf_sizes.factors(model.config).items():
        tensors[stored_name] = ("F32", (len(numbers),), np.asarray(numbers, np.float32).tobytes())
    for stored_name, tensor in (extra or {}).items():
        tensors[stored_name] = ("F32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
    tensors = {stored_name: found for stored_name, found in tensors.items() if stored_name not in without}
    return files.write(path, {"general.architecture": architecture} | keys | tokenizer | metadata, tensors)


PLAIN = re.compile(r"ffn_gate_inp|conv1d|shortconv\.conv|ssm_norm|ssm_[ad]$|bias$")
"""Tensors that llama.cpp never quantizes."""
MODULES: dict[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AFTER: dict[str, str] = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NORMS: dict[str, dict[str, str]] = {
    "gemma2": AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma3": AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": AFTER,
    "exaone4": AFTER,
    "gpt-oss": AFTER,
    "glm4moe": AFTER,
    "seed_oss": AFTER,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), AFTER),
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
"""Norms that a family's files call otherwise."""
WHOLE: dict[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
TURNED = ("llama", "mistral3", "granite", "granitehybrid", "smollm3")
SHIFTED = ("gemma", "qwen3next", "qwen35")
"""The beginnings of families to whose norms the converter adds 1."""


Part = tuple[str, torch.Tensor, tuple[int, ...], float]
"""A name in the file, a view of the model's tensor in the file's order, the file's shape, and what the file adds."""


def parts(architecture: str, model: Any) -> Iterator[Part]:
    """Each tensor of the file."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(tensor.shape)
        shift = 1.0 if architecture.startswith(SHIFTED) and name.endswith("norm.weight") else 0.0
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            yield f"{WHOLE[name.removesuffix('.weight')]}.weight", tensor, shape, shift
            continue
        prefix, inner = f"blk.{match[1]}.", match[2]
        own: list[Part] = list(recurrent.parts(architecture, config, prefix, inner, tensor))
        if inner == "self_attn.kv_b_proj.weight":
            yield from latent(prefix, config, tensor)
        elif architecture in recurrent.SIZES and own:
            yield from own
        elif inner == "self_attn.sinks":
            yield f"{prefix}attn_sinks.weight", tensor, shape, shift
        elif inner == "mlp.gate.e_score_correction_bias":
            yield f"{prefix}exp_probs_b.bias", tensor, shape, shift
        elif "mlp.experts." in inner:
            yield from experts(prefix, inner.removeprefix("mlp.experts."), tensor, architecture == "gpt-oss")
        else:
            module, _, part = inner.rpartition(".")
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            count = heads.get(module.rpartition(".")[2])
            if count is not None and architecture in TURNED:
                # The file has the two halves of a head's rows in turn.
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2)
            yield f"{prefix}{(MODULES | NORMS.get(architecture, {}))[module]}.{part}", tensor, shape, shift


def latent(prefix: str, config: Any, tensor: torch.Tensor) -> Iterator[Part]:
    """Keys, transposed, and values of all heads."""
    heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    for stem, view in (("attn_k_b", keys.transpose(1, 2)), ("attn_v_b", values)):
        yield f"{prefix}{stem}.weight", view, tuple(view.shape), 0.0


def experts(prefix: str, name: str, tensor: torch.Tensor, turned: bool) -> Iterator[Part]:
    """Gate and up apart, and matrices as a linear layer has them: those of gpt-oss alternate and are transposed."""
    part = "bias" if name.endswith("_bias") else "weight"
    if turned and part == "weight":
        tensor = tensor.transpose(1, 2)
    if name.startswith("down_proj"):
        found = {"ffn_down_exps": tensor}
    elif turned:
        found = {"ffn_gate_exps": tensor[:, ::2], "ffn_up_exps": tensor[:, 1::2]}
    else:
        found = dict(zip(("ffn_gate_exps", "ffn_up_exps"), tensor.chunk(2, dim=1), strict=True))
    for stem, view in found.items():
        yield f"{prefix}{stem}.{part}", view, tuple(view.shape), 0.0
