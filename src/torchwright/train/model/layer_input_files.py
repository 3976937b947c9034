"""Names in files of Gemma 4's parts; the rest of a model's are in `weights.py`."""

from __future__ import annotations

from collections.abc import Iterator

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.family import Names
from torchwright.train.model.stacked import Stack, expert_stacks

Named = tuple[str, tuple[str, ...], Stack | None]
"""A tensor's name in the file, our parameters that it holds, and how where it is of all experts."""


def token_input_tensors(config: DecoderConfig) -> Iterator[Named]:
    """Yield the tensors of `TokenInputs`."""
    if config.layer_inputs is not None and config.layer_inputs.width:
        yield "model.embed_tokens_per_layer.weight", ("inputs.table.weight",), None
        yield "model.per_layer_model_projection.weight", ("inputs.project.weight",), None
        yield "model.per_layer_projection_norm.weight", ("inputs.norm.weight",), None


def input_layer_tensors(config: DecoderConfig, names: Names, layer: int) -> Iterator[Named]:
    """Yield the tensors of an `InputLayer`."""
    file, ours = f"model.layers.{layer}.", f"layers.{layer}."
    yield f"{file}{names.layer_scale}", (f"{ours}layer_scale",), None
    for name, part in _norms(config.at(layer), names).items():
        yield f"{file}{name}.weight", (f"{ours}{part}.weight",), None
    for name, part, bias in _linears(config.at(layer), names):
        for kind in ("weight", "bias") if bias else ("weight",):
            yield f"{file}{name}.{kind}", (f"{ours}{part}.{kind}",), None
    if config.experts is not None:
        yield f"{file}{names.router_scale}", (f"{ours}router_norm.weight",), None
        yield f"{file}{names.expert_scale}", (f"{ours}mixture.scale.weight",), None
        for name, parts, stack in expert_stacks(config.experts, names):
            yield f"{file}{name}", tuple(f"{ours}mixture.experts.{part}" for part in parts), stack


def _norms(config: DecoderConfig, names: Names) -> dict[str, str]:
    """Return name in the file → module, for the sizes of one layer."""
    parts = ["pre_attention", "post_attention", "pre_mlp", "post_mlp"]
    parts += ["post_dense", "pre_experts", "post_experts"] if config.experts is not None else []
    parts += ["post_input"] if config.layer_inputs is not None and config.layer_inputs.width else []
    found = {getattr(names, part): part for part in parts} | {names.q_norm: "attention.q_norm"}
    return found | ({names.k_norm: "keys_values.k_norm"} if config.kv_heads else {})


def _linears(config: DecoderConfig, names: Names) -> Iterator[tuple[str, str, bool]]:
    """Yield name in the file, module, and whether it has a bias, for the sizes of one layer."""
    q, k, v = names.qkv
    yield q, "attention.q", config.qkv_bias
    if config.kv_heads:
        yield k, "keys_values.k", config.qkv_bias
    if config.kv_heads and not config.keys_as_values:
        yield v, "keys_values.v", config.qkv_bias
    yield names.o, "attention.o", config.o_bias
    for name, part in zip((*names.gate_up, names.down), ("gate", "up", "down"), strict=True):
        yield name, f"mlp.{part}", False
    if config.experts is not None:
        yield names.router, "mixture.router", False
    if config.layer_inputs is not None and config.layer_inputs.width:
        yield names.input_gate, "own_input.gate", False
        yield names.input_out, "own_input.down", False
