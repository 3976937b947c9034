"""A GGUF model family: its configuration, its tensors' names, and how their rows lie in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchwright.hub.gguf.model import GgufModel

SLIDING, FULL = "sliding_attention", "full_attention"
SOFTMAX, SIGMOID = 1, 2
"""Functions from a router's scores to shares, as files number them."""
PARTNER = ""
"""The model's name for a tensor whose rows belong to another one's."""


@dataclass(frozen=True)
class Stacked:
    """A tensor of all experts that the model has as one, each expert's matrix transposed."""

    model: str
    partner: str | None = None
    """The tensor of the same layer whose rows alternate with this one's in the model."""


@dataclass(frozen=True)
class Joined:
    """A tensor that the model has with its partner's rows below it, expert by expert if it holds those of all."""

    model: str
    partner: str | None = None
    """The other tensor of the same layer; None for a stack of experts that the model has as it is."""


@dataclass(frozen=True)
class ByHead:
    """A tensor of all heads' keys, each transposed, that the model has with its partner's values, head by head."""

    model: str
    partner: str


Target = str | tuple[str, ...] | Stacked | Joined | ByHead | None
"""The counterpart of a layer's tensor in the model.

A module's name, or a tensor's where the file's name has its last part, too; with "{}" one for each expert. A tuple
names modules whose rows lie one below the other. None: the family does not have the tensor.
"""

QKV = ("attn_q", "attn_k", "attn_v")
GATED = ("ffn_gate", "ffn_up", "ffn_down")
ATTENTION_BIASES = (*QKV, "attn_qkv", "attn_output")
QK_NORMS: dict[str, Target] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS: dict[str, Target] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED: dict[str, Target] = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GEMMA: dict[str, Target] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST: dict[str, Target] = {
    "attn_norm": None,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": None,
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms that follow a block, in families without one before it."""
RENAMED: dict[str, Target] = {"ffn_norm": None, "post_attention_norm": "post_attention_layernorm"}
"""The norm before the feed-forward block under another name."""
FUSED: dict[str, Target] = {"ffn_gate": None, "ffn_up": "mlp.gate_up_proj"}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Tensors of no layer in most families."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of GGUF files."""

    architecture: str
    """The class that config.json names."""
    special: Callable[[GgufModel], dict[str, Any]] = lambda model: {}
    """Returns the fields of config.json that differ from a Llama's."""
    names: dict[str, Target] = field(default_factory=dict)
    """Tensors of a layer that differ from a Llama's."""
    recurrent: dict[str, Target] = field(default_factory=dict)
    """Tensors of a recurrent layer that differ from those of the family's other layers."""
    recurrent_layers: Callable[[GgufModel], tuple[bool, ...]] | None = None
    """Returns which layers are recurrent; None for a family without such layers."""
    whole: dict[str, str] = field(default_factory=lambda: WHOLE)
    """Tensors of no layer."""
    biases: tuple[str, ...] = ()
    """The tensors of a layer that may have a bias."""
    turned: bool = False
    """True if files have the two halves of a head's rows in turn, and the model one after the other."""
    norm_shift: float = 0.0
    """Added by files to the weights of norms, but for those of recurrent layers' outputs."""
    tiled: bool = False
    """True if files have the value heads of recurrent layers in turn by key head, and the model by key head."""
    output_gate: bool = False
    """True if each head's query rows are followed by as many rows of a gate."""
    latent: bool = False
    """True if attention keeps a latent vector, whose sizes are those of heads in files."""
    mixture: bool = False
    """True if the family has experts."""


def read_experts(
    model: GgufModel, count: str, *, normalize: bool | None = None, gating: int = SOFTMAX
) -> dict[str, Any]:
    """Return the sizes of a mixture of experts, whose number config.json calls `count`."""
    keys = model.keys
    if keys.integer("expert_gating_func", gating, minimum=0) not in (0, gating):
        raise keys.wrong("expert_gating_func", f"{gating}, as the family has it")
    found: dict[str, Any] = {count: model.experts, "num_experts_per_tok": keys.integer("expert_used_count")}
    if normalize is not None:
        found["norm_topk_prob"] = keys.flag("expert_weights_norm", normalize)
    return found


def read_granite(model: GgufModel) -> dict[str, Any]:
    """Return the factors of Granite's models."""
    keys = model.keys
    return {
        "attention_multiplier": keys.number("attention.scale", 0.0) or model.head_dim**-0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
    }


def seen(special: Callable[[GgufModel], dict[str, Any]]) -> Callable[[GgufModel], dict[str, Any]]:
    """The language model of a multimodal file: with text alone its positions are those of one axis."""

    def read(model: GgufModel) -> dict[str, Any]:
        model.keys.settle("rope.dimension_sections", "n_deepstack_layers")
        return special(model)

    return read
