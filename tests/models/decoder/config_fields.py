"""Perturb one field of a family's configuration and compare logits with transformers', or see the field refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import COMMON, FAMILIES, LONGROPE, token_ids

from torchwright.core.errors import TorchwrightError
from torchwright.models.decoder import load_decoder

TOKENS = 24
TOLERANCE = 1e-4

LAYERS = 3
SLIDING, FULL = "sliding_attention", "full_attention"
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "attention_factor": 0.7,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {"rope_type": "longrope", "rope_theta": 500.0, **LONGROPE, "original_max_position_embeddings": 16},
    {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        **LONGROPE,
        "factor": 2.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "ntk_by_parts", "rope_theta": 500.0, "factor": 2.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0, "mrope_section": [2, 3, 3]},
    {"type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 50.0},
    },
]

VALUES: dict[str, list[Any]] = {
    "vocab_size": [160],
    "hidden_size": [128],
    "intermediate_size": [64],
    "num_hidden_layers": [2],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [32, None],
    "max_position_embeddings": [32],
    "original_max_position_embeddings": [16],
    "hidden_act": [
        "gelu",
        "relu",
        "gelu_pytorch_tanh",
        "gelu_new",
        "gelu_fast",
        "swish",
        "quick_gelu",
        "relu2",
        "tanh",
    ],
    "hidden_activation": ["gelu", "silu", "gelu_new", None],
    "rms_norm_eps": [0.3],
    "sliding_window": [5, 0, None],
    "max_window_layers": [0, 2],
    "layer_types": [
        [SLIDING, FULL, SLIDING],
        [FULL] * LAYERS,
        [SLIDING] * LAYERS,
        ["chunked_attention"] * LAYERS,
        ["linear_attention"] * LAYERS,
    ],
    "rope_parameters": ROPES,
    "no_rope_layers": [[0, 1, 1], [1, 1, 1], [0, 0, 0]],
    "no_rope_layer_interval": [1, 3],
    "query_pre_attn_scalar": [64],
    "final_logit_softcapping": [3.0, None],
    "attn_logit_softcapping": [1.0, None],
    "use_bidirectional_attention": [True],
    "clip_qkv": [0.4],
    "num_experts_per_tok": [1, 3, 6],
    "num_experts": [4],
    "num_local_experts": [4],
    "moe_intermediate_size": [64],
    "decoder_sparse_step": [2, 3],
    "mlp_only_layers": [[0], [0, 2]],
    "embedding_multiplier": [3.0],
    "logits_scaling": [4.0],
    "residual_multiplier": [0.5],
    "attention_multiplier": [0.1],
    "pad_token_id": [5, None],
    "bos_token_id": [5, None],
    "eos_token_id": [5, [5, 6], None],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "problem_type": ["regression"],
    "dtype": ["bfloat16", "float64"],
    "architectures": [["SomethingForCausalLM"]],
    "chunk_size_feed_forward": [4],
    "pretraining_tp": [2],
    "tie_last_hidden_states": [True, False],
}
"""Values of a field; of one that is not named here, another of its default's type."""

EXTRA: dict[str, list[Any]] = {
    "sliding_window": [5, None],
    "layer_types": [[SLIDING, FULL, SLIDING], [FULL] * LAYERS],
    "head_dim": [32],
    "attention_bias": [False],
    "mlp_bias": [False],
    "is_causal": [True, False],
    "use_bidirectional_attention": [False, True],
    "attn_logit_softcapping": [1.0, None],
    "final_logit_softcapping": [1.0, None],
    "logit_scale": [0.5],
    "logits_scaling": [4.0],
    "embedding_multiplier": [4.0, 1.0],
    "residual_multiplier": [0.5],
    "attention_multiplier": [0.5],
    "query_pre_attn_scalar": [99],
    "clip_qkv": [0.4, None],
    "qk_layernorm": [True],
    "use_qk_norm": [True, False],
    "norm_topk_prob": [True],
    "routed_scaling_factor": [2.5, 1.0],
    "n_shared_experts": [1, 0],
    "shared_expert_intermediate_size": [32],
    "num_experts": [4],
    "n_group": [2],
    "topk_group": [1],
    "scoring_func": ["sigmoid"],
    "no_rope_layers": [[0, 1, 1]],
    "partial_rotary_factor": [0.5, 1.0],
    "rotary_pct": [0.5],
    "rope_theta": [500.0],
    "rope_local_base_freq": [50.0],
    "rope_scaling": [{"type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}, None],
    "rope_interleaved": [True],
    "sliding_window_pattern": [2],
    "_sliding_window_pattern": [2],
    "max_window_layers": [1],
    "use_sliding_window": [True, False],
    "original_max_position_embeddings": [16],
    "attention_chunk_size": [8],
    "per_layer_config": [{"0": {"intermediate_size": 64}}],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "tie_encoder_decoder": [True],
    "pruned_heads": [{"0": [1]}, {}],
    "output_router_logits": [True],
    "torch_dtype": ["bfloat16"],
    "use_cache": [False],
    "temperature": [0.5],
    "repetition_penalty": [1.3],
    "alibi": [True],
    "position_embedding_type": ["alibi"],
    "hidden_act": ["silu"],
    "hidden_activation": ["gelu"],
    "mlp_activation": ["relu"],
    "layer_norm_eps": [0.1],
    "quantization": [{"bits": 4, "group_size": 64}],
    "compression_config": [{"quant_method": "compressed-tensors", "format": "pack-quantized"}],
}
"""Fields that other classes have, or older files, written into config.json beside the family's own."""


def fields(family: str) -> dict[str, Any]:
    """The fields of a configuration class and their defaults."""
    kind = getattr(transformers, f"{family}Config")
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(kind)
    }


def values(name: str, default: Any) -> list[Any]:
    """Values of a field other than its default."""
    if name in VALUES:
        return [value for value in VALUES[name] if value != default]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [default + 1.5 if isinstance(default, float) else default + 1]
    return [True] if default is None else [f"{default}x"]


def built(family: str, overrides: dict[str, Any], seed: int = 0) -> Any:
    """A small random model of transformers; raises what transformers raises where it takes no such field."""
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family] | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.data.normal_(std=0.15)
    return model.requires_grad_(False)


def reference(folder: Path) -> torch.Tensor | None:
    """transformers' logits of a folder; None where it takes no such folder, or fills in weights of its own."""
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        model, info = loaded
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        model.config.return_dict, model.config.output_router_logits = True, False
        with torch.no_grad():
            return model.eval()(token_ids(1, TOKENS), use_cache=False).logits
    except Exception:
        return None


def verdict(folder: Path, field: str) -> str:
    """Compare a folder's logits: "equal", "refused", "alone" where transformers refuses, or what is wrong."""
    wanted = reference(folder)
    try:
        got = load_decoder(folder).logits(token_ids(1, TOKENS))
    except TorchwrightError as error:
        named = re.search(rf"\b({field}|layer_types)\b", str(error))
        return "refused" if named or wanted is None else f"refused without its name: {error}"
    if wanted is None:
        return "alone"
    worst = (got - wanted).abs().max().item()
    return "equal" if worst <= TOLERANCE else f"logits differ by {worst:.2g}"


def own(family: str, field: str, value: Any, folder: Path) -> str:
    """The verdict on a model that is built with a field of its class."""
    try:
        model = built(family, {field: value})
        model.save_pretrained(folder)
    except Exception:
        return "transformers does not build it"
    return verdict(folder, field)


def written(base: Path, field: str, value: Any, folder: Path) -> str:
    """The verdict on a saved model into whose config.json a field is written."""
    config = json.loads((base / "config.json").read_text()) | {field: value}
    if field.startswith("rope_") and field != "rope_parameters":
        config.pop("rope_parameters", None)
    return verdict(with_config(base, config, folder), field)


def without(base: Path, field: str, folder: Path) -> str:
    """The verdict on a saved model from whose config.json a field is taken."""
    config = json.loads((base / "config.json").read_text())
    del config[field]
    return verdict(with_config(base, config, folder), field)


def with_config(base: Path, config: dict[str, Any], folder: Path) -> Path:
    """A folder with the weights of another and this config.json."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
