"""Names in files of Gemma 4's parts; the rest of a model's are in `weights.py`."""

from __future__ import annotations

from collections.abc import Iterator

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.family import Names
from torchwright.train.model.file_tensor import FileTensor, expert_stacks


def token_input_tensors(config: DecoderConfig) -> Iterator[FileTensor]:
    """Yield the tensors of `TokenInputs`."""
    if config.layer_inputs is not None and config.layer_inputs.width:
        yield FileTensor(name="model.embed_tokens_per_layer.weight", parameters=("inputs.table.weight",))
        yield FileTensor(
            name="model.per_layer_model_projection.weight", parameters=("inputs.project.weight",)
        )
        yield FileTensor(name="model.per_layer_projection_norm.weight", parameters=("inputs.norm.weight",))


def input_layer_tensors(config: DecoderConfig, names: Names, layer: int) -> Iterator[FileTensor]:
    """Yield the tensors of an `InputLayer`."""
    file, ours = f"model.layers.{layer}.", f"layers.{layer}."
    yield FileTensor(name=f"{file}{names.layer_scale}", parameters=(f"{ours}layer_scale",))
    for name, part in _norms(config.at(layer), names).items():
        yield FileTensor(name=f"{file}{name}.weight", parameters=(f"{ours}{part}.weight",))
    for name, part, bias in _linears(config.at(layer), names):
        for kind in ("weight", "bias") if bias else ("weight",):
            yield FileTensor(name=f"{file}{name}.{kind}", parameters=(f"{ours}{part}.{kind}",))
    if config.experts is not None:
        yield FileTensor(name=f"{file}{names.router_scale}", parameters=(f"{ours}router_norm.weight",))
        yield FileTensor(name=f"{file}{names.expert_scale}", parameters=(f"{ours}mixture.scale.weight",))
        yield from expert_stacks(config.experts, names, file, f"{ours}mixture.experts.")


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
