"""Tiny models with recurrent layers, and their tensors and keys as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gguf_files import U32

KINDS = ["linear_attention", "full_attention", "linear_attention"]
CONV = ["conv", "full_attention", "conv"]
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 10_000.0},
    "layer_types": KINDS,
}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 64}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "layer_types": KINDS,
    "position_embedding_type": "nope",
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("lfm2", "Lfm2", {"layer_types": CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": (
        "lfm2",
        "Lfm2",
        {
            "layer_types": [*CONV, "full_attention"],
            "num_hidden_layers": 4,
            "intermediate_size": 150,
            "block_multiple_of": 32,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2moe": (
        "lfm2moe",
        "Lfm2Moe",
        EXPERTS | {"layer_types": CONV, "num_dense_layers": 1, "tie_word_embeddings": True},
    ),
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 96, "tie_word_embeddings": True},
    ),
    "granitehybrid-rope": (
        "granitehybrid",
        "GraniteMoeHybrid",
        GRANITE
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": [*KINDS[1:], "linear_attention"],
            "attention_bias": True,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
        },
    ),
    "granitehybrid-experts": (
        "granitehybrid",
        "GraniteMoeHybrid",
        GRANITE
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_groups": 2,
        },
    ),
    "qwen3next": ("qwen3next", "Qwen3Next", DELTA | EXPERTS | SHARED),
    "qwen35": ("qwen35", "Qwen3_5Text", DELTA | {"tie_word_embeddings": True, "linear_value_head_dim": 32}),
    "qwen35moe": ("qwen35moe", "Qwen3_5MoeText", DELTA | EXPERTS | SHARED),
}
"""Name → general.architecture, configuration class, and what differs from `gguf_models.COMMON`."""


class Rows:
    """A tensor of the model as a file has it: these rows or columns, in this order and shape."""

    def __init__(self, tensor: torch.Tensor, order: torch.Tensor, dim: int = 0) -> None:
        self.tensor, self.order, self.dim = tensor, order, dim
        self.shape = tensor.index_select(dim, order).shape

    def __add__(self, shift: float) -> torch.Tensor:
        return self.tensor.index_select(self.dim, self.order) + shift

    def copy_(self, values: torch.Tensor) -> None:
        self.tensor.index_copy_(self.dim, self.order, values.to(self.tensor.dtype))


class Rate(Rows):
    """-exp of the model's numbers; a file has them in float32."""

    def __add__(self, shift: float) -> torch.Tensor:
        return -super().__add__(shift).exp()

    def copy_(self, values: torch.Tensor) -> None:
        pass


Part = tuple[str, Any, tuple[int, ...], float]
"""As in `gguf_models`."""
DELTA_NAMES: dict[str, str] = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "in_proj_ba": "ssm_ba",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
}
LFM2_NAMES: dict[str, str] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}
GRANITE_NAMES: dict[str, str] = {
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "block_sparse_moe.router": "ffn_gate_inp",
}
SHARED_NAMES: dict[str, str] = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def parts(architecture: str, config: Any, prefix: str, inner: str, tensor: torch.Tensor) -> Iterator[Part]:
    """The file's tensors of one of a layer's that no other family has; nothing for any other tensor."""
    module, _, last = inner.rpartition(".")
    if "experts." in inner:
        yield from experts(prefix, last, tensor)
    elif inner.startswith("linear_attn.") and architecture == "qwen3next":
        yield from grouped(config, prefix, module.rpartition(".")[2], last, tensor)
    elif inner.startswith("linear_attn."):
        yield from tiled(config, prefix, module.rpartition(".")[2], last, tensor)
    elif inner == "feed_forward.expert_bias":
        yield f"{prefix}exp_probs_b.bias", tensor, tuple(tensor.shape), 0.0
    elif inner.startswith("shared_mlp."):
        yield from shared(config, prefix, module, tensor)
    elif inner in ("mamba.A_log", "mamba.D", "mamba.dt_bias"):
        yield vector(prefix, last, tensor, (len(tensor),) if last == "dt_bias" else (len(tensor), 1))
    elif names := LFM2_NAMES | GRANITE_NAMES | SHARED_NAMES:
        if module not in names or (module == "ffn_norm" and not architecture.startswith("lfm2")):
            return
        tensor = tensor.squeeze(1) if tensor.ndim == 3 else tensor
        groups = (config.mamba_n_groups, -1) if module == "mamba.norm" else tensor.shape
        shape = tuple(tensor.view(groups).shape)
        shift = 1.0 if architecture.startswith("qwen3") and "norm" in module else 0.0
        yield f"{prefix}{names[module]}.{last}", tensor, shape, shift


def vector(prefix: str, last: str, tensor: torch.Tensor, shape: tuple[int, ...], order: Any = None) -> Part:
    order = torch.arange(len(tensor)) if order is None else order
    kind = Rate if last == "A_log" else Rows
    name = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}[last]
    return prefix + name, kind(tensor, order), shape, 0.0


def shared(config: Any, prefix: str, module: str, tensor: torch.Tensor) -> Iterator[Part]:
    end = "_shexp" if config.num_local_experts else ""
    if module.endswith("output_linear"):
        yield f"{prefix}ffn_down{end}.weight", tensor, tuple(tensor.shape), 0.0
        return
    for stem, half in zip(("ffn_gate", "ffn_up"), tensor.chunk(2), strict=True):
        yield f"{prefix}{stem}{end}.weight", half, tuple(half.shape), 0.0


def experts(prefix: str, last: str, tensor: torch.Tensor) -> Iterator[Part]:
    if last == "down_proj":
        yield f"{prefix}ffn_down_exps.weight", tensor, tuple(tensor.shape), 0.0
        return
    for stem, half in zip(("ffn_gate_exps", "ffn_up_exps"), tensor.chunk(2, dim=1), strict=True):
        yield f"{prefix}{stem}.weight", half, tuple(half.shape), 0.0


def grouped(config: Any, prefix: str, module: str, last: str, tensor: torch.Tensor) -> Iterator[Part]:
    """Qwen3-Next: queries, keys, values and gates lie by key head, and a file has those of all heads together."""
    if module == "in_proj_qkvz":
        heads, d, v = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        each = config.linear_num_value_heads // heads * v
        index = torch.arange(len(tensor)).view(heads, -1)
        q, k, values, z = (part.flatten() for part in index.split([d, d, each, each], dim=1))
        for stem, order in (("attn_qkv", torch.cat([q, k, values])), ("attn_gate", z)):
            rows = Rows(tensor, order)
            yield f"{prefix}{stem}.weight", rows, tuple(rows.shape), 0.0
    elif last in ("A_log", "dt_bias"):
        yield vector(prefix, last, tensor, tuple(tensor.shape))
    else:
        tensor = tensor.squeeze(1) if module == "conv1d" else tensor
        yield f"{prefix}{DELTA_NAMES[module]}.{last}", tensor, tuple(tensor.shape), 0.0


def tiled(config: Any, prefix: str, module: str, last: str, tensor: torch.Tensor) -> Iterator[Part]:
    """Qwen3.5: value heads of a key head lie together, and a file has the first of each key head, then the second."""
    tensor = tensor.squeeze(1) if module == "conv1d" else tensor
    if module == "norm":
        yield f"{prefix}ssm_norm.weight", tensor, tuple(tensor.shape), 0.0
        return
    heads, v = config.linear_num_key_heads, config.linear_value_head_dim
    one = last in ("A_log", "dt_bias") or module in ("in_proj_b", "in_proj_a")
    dim = 1 if module == "out_proj" else 0
    values = config.linear_num_value_heads * (1 if one else v)
    index = torch.arange(tensor.shape[dim])
    own = index[-values:].view(heads, -1, 1 if one else v).transpose(0, 1).flatten()
    order = torch.cat([index[:-values], own])
    if last in ("A_log", "dt_bias"):
        yield vector(prefix, last, tensor, tuple(tensor.shape), order)
    else:
        yield f"{prefix}{DELTA_NAMES[module]}.{last}", Rows(tensor, order, dim), tuple(tensor.shape), 0.0


def kv_by_layer(config: Any) -> dict[str, Any]:
    full = [kind == "full_attention" for kind in config.layer_types]
    return {"attention.head_count_kv": [U32(config.num_key_value_heads if each else 0) for each in full]}


def chosen(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": U32(count), "expert_used_count": U32(config.num_experts_per_tok)}


def lfm2(config: Any) -> dict[str, Any]:
    found = kv_by_layer(config) | {
        "shortconv.l_cache": U32(config.conv_L_cache),
        "vocab_size": U32(config.vocab_size),
    }
    if getattr(config, "block_auto_adjust_ff_dim", False):
        multiple = config.block_multiple_of
        inner = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
        found["feed_forward_length"] = U32(-(-inner // multiple) * multiple)
    return found


def lfm2_moe(config: Any) -> dict[str, Any]:
    return (
        lfm2(config)
        | chosen(config)
        | {
            "expert_feed_forward_length": U32(config.moe_intermediate_size),
            "leading_dense_block_count": U32(config.num_dense_layers),
            "expert_gating_func": U32(2),
        }
    )


def granite(config: Any) -> dict[str, Any]:
    found = kv_by_layer(config) | {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": U32(config.shared_intermediate_size),
        "ssm.conv_kernel": U32(config.mamba_d_conv),
        "ssm.state_size": U32(config.mamba_d_state),
        "ssm.group_count": U32(config.mamba_n_groups),
        "ssm.inner_size": U32(config.mamba_expand * config.hidden_size),
        "ssm.time_step_rank": U32(config.mamba_n_heads),
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }
    return found | (chosen(config) if config.num_local_experts else {})


def delta(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ssm.conv_kernel": U32(config.linear_conv_kernel_dim),
        "ssm.state_size": U32(config.linear_key_head_dim),
        "ssm.group_count": U32(config.linear_num_key_heads),
        "ssm.time_step_rank": U32(config.linear_num_value_heads),
        "ssm.inner_size": U32(config.linear_value_head_dim * config.linear_num_value_heads),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": U32(4),
    }
    if hasattr(config, "num_experts"):
        found |= chosen(config) | {
            "expert_feed_forward_length": U32(config.moe_intermediate_size),
            "expert_shared_feed_forward_length": U32(config.shared_expert_intermediate_size),
        }
    return found


def axes(config: Any) -> dict[str, Any]:
    """How many frequencies turn with each axis of a picture."""
    return delta(config) | {"rope.dimension_sections": [U32(2), U32(1), U32(1), U32(0)]}


SIZES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "granitehybrid": granite,
    "qwen3next": delta,
    "qwen35": axes,
    "qwen35moe": axes,
}
