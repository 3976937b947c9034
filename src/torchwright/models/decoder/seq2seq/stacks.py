"""Text models of an encoder and a decoder: for each architecture one entry that says what its two stacks are.

An entry names its tensors and gives a function that reads one side's shape from config.json. To add one, add it to
`STACKS`, and a small random model to tests/models/decoder/test_seq2seq.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DecoderConfig

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh"}
POSITIONS = "embed_positions.weight"
RELATIVE_CONTEXT = 2048
"""Tokens of a model that knows distances alone, and so has no limit of its own."""

Side = Literal["encoder", "decoder"]
SIDES: tuple[Side, Side] = ("encoder", "decoder")
Positions = Callable[[Fields, int, int], torch.Tensor]
"""From the number of positions and the model size to what is added at each (P, E), float32."""


@dataclass(frozen=True, kw_only=True)
class StackFamily:
    """One architecture's two stacks; "{side}" in a name is the side, "{mlp}" the number of its feed-forward block."""

    read: Callable[[Fields, Side], DecoderConfig]
    norms: Literal["layer", "rms"]
    """The kind of norm: LayerNorm subtracts the mean, RMSNorm does not."""
    shifted: bool = True
    """True if norms that subtract the mean add a shift."""
    biased: bool
    """True if the linear layers have biases."""
    unbiased: frozenset[str] = frozenset()
    """Those that have none, where the others do."""
    stack: str = "model.{side}."
    shared: str = "model.shared.weight"
    """The embedding, where the stacks share one."""
    layer: str = "layers.{layer}."
    norm: Mapping[str, str]
    """By what reads it, or, after blocks, what it follows: attention, memory or mlp."""
    final_norm: str = "layer_norm"
    embedding_norm: str | None = None
    linear: Mapping[str, tuple[str, ...]]
    gate_below: bool = False
    """True if gate_up is one tensor whose lower half is the gate."""
    order: torch.Tensor | None = None
    """Which of the checkpoint's dimensions of a head lies at each place (D,), −1 for zeros; None where all lie as they
    do there."""
    positions: Positions | str | None = None
    """The function that makes positions, or the tensor whose last rows they are; None if the model adds none.

    A file may have them as `POSITIONS` instead."""
    skipped: int = 0
    """Rows in front of that tensor that no position reads."""
    head: str = "lm_head.weight"
    """The output layer, where it is not the embedding."""
    relative: str | None = None
    """The bias that each head adds to scores by distance."""


def sinusoids(fields: Fields, count: int, model: int) -> torch.Tensor:
    """Sines, then cosines, of `model` / 2 wavelengths from 2π to 10,000 · 2π, the last left out."""
    frequency_R = 10_000 ** (-torch.arange(0, model, 2, dtype=torch.float64) / model)
    return _waves(torch.arange(count), frequency_R)


def padded_sinusoids(fields: Fields, count: int, model: int) -> torch.Tensor:
    """Sines, then cosines, of wavelengths to 10,000 · 2π, the last included; they begin behind the padding's place."""
    step = math.log(10_000) / (model // 2 - 1)
    frequency_R = torch.exp(-step * torch.arange(model // 2, dtype=torch.float64))
    return _waves(torch.arange(count) + fields.integer("pad_token_id", 1, minimum=0) + 1, frequency_R)


def _waves(position_P: torch.Tensor, frequency_R: torch.Tensor) -> torch.Tensor:
    angle_PR = position_P[:, None] * frequency_R
    return torch.cat([angle_PR.sin(), angle_PR.cos()], dim=1).float()


def _common(fields: Fields, side: Side, heads: int, head_dim: int, layers: int) -> dict[str, Any]:
    """Return the fields that all families write alike."""
    vocabulary = fields.integer("vocab_size")
    return {
        "vocabulary": fields.integer("decoder_vocab_size", vocabulary) if side == "decoder" else vocabulary,
        "model": fields.integer("d_model"),
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "tied": fields.flag("tie_word_embeddings", True),
        "ropes": (None,) * layers,
        "windows": (0,) * layers,
        "sparse": (False,) * layers,
        "causal": side == "decoder",
        "remembers": side == "decoder",
        "eos": fields.ids("eos_token_id"),
    }


POSITIONED: dict[Side, str] = {"encoder": "max_position_embeddings", "decoder": "max_position_embeddings"}


def bart(
    architecture: str,
    *,
    post_norm: bool,
    embedding_norm: bool = False,
    context: Mapping[Side, str] = POSITIONED,
    scaled: bool = True,
) -> Callable[[Fields, Side], DecoderConfig]:
    """Return the reader of a stack with BART's fields.

    `context` names the field of each side's length; embeddings are multiplied where `scale_embedding` says so, if
    `scaled`.
    """

    def read(fields: Fields, side: Side) -> DecoderConfig:
        model, heads = fields.integer("d_model"), fields.integer(f"{side}_attention_heads")
        if model % heads:
            raise fields.wrong(f"{side}_attention_heads", f"a divisor of d_model, {model}")
        common = _common(fields, side, heads, model // heads, fields.integer(f"{side}_layers"))
        return DecoderConfig(
            **common,
            architecture=architecture,
            feed_forward=fields.integer(f"{side}_ffn_dim"),
            context=fields.integer(context[side]),
            eps=1e-5,
            activation=_activation(fields, "activation_function", fields.text("activation_function", "gelu")),
            scale=(model // heads) ** -0.5,
            gated=False,
            post_norm=post_norm,
            embedding_norm=embedding_norm,
            embedding_scale=model**0.5 if scaled and fields.flag("scale_embedding", False) else 1.0,
        )

    return read


def _t5(fields: Fields, side: Side) -> DecoderConfig:
    heads, key = fields.integer("num_heads"), "feed_forward_proj"
    layers = fields.integer("num_layers")
    if side == "decoder":
        layers = fields.integer("num_decoder_layers", layers)
    words = fields.text(key, "relu").split("-")
    gated = words[0] == "gated"
    # "gated-gelu" has always meant the approximation, as in the models that are called so.
    name = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    activation = _activation(fields, key, name)
    if len(words) > 1 + gated or (gated and activation not in ("silu", "gelu_tanh")):
        raise fields.wrong(key, "relu, gelu, silu, gated-gelu or gated-silu")
    return DecoderConfig(
        **_common(fields, side, heads, fields.integer("d_kv"), layers),
        architecture="T5ForConditionalGeneration",
        feed_forward=fields.integer("d_ff"),
        context=RELATIVE_CONTEXT,
        eps=fields.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        scale=1.0,
        gated=gated,
    )


def _activation(fields: Fields, key: str, name: str) -> str:
    if name not in ACTIVATIONS:
        raise fields.wrong(key, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


BART_NORM = {
    "attention": "self_attn_layer_norm",
    "memory": "encoder_attn_layer_norm",
    "mlp": "final_layer_norm",
}
BART_LINEAR = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.out_proj",),
    "memory_q": ("encoder_attn.q_proj",),
    "memory_kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "memory_o": ("encoder_attn.out_proj",),
    "up": ("fc1",),
    "down": ("fc2",),
}
T5_LINEAR = {
    "qkv": ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    "o": ("layer.0.SelfAttention.o",),
    "memory_q": ("layer.1.EncDecAttention.q",),
    "memory_kv": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "memory_o": ("layer.1.EncDecAttention.o",),
    "up": ("layer.{mlp}.DenseReluDense.wi",),
    "gate_up": ("layer.{mlp}.DenseReluDense.wi_0", "layer.{mlp}.DenseReluDense.wi_1"),
    "down": ("layer.{mlp}.DenseReluDense.wo",),
}


def _bart_family(
    architecture: str,
    positions: Positions | str,
    *,
    post_norm: bool,
    first_norm: bool = False,
    skipped: int = 0,
) -> StackFamily:
    """Return a family with BART's names; `first_norm` is that of the embeddings."""
    return StackFamily(
        read=bart(architecture, post_norm=post_norm, embedding_norm=first_norm and not post_norm),
        norms="layer",
        biased=True,
        norm=BART_NORM,
        embedding_norm="layernorm_embedding" if first_norm else None,
        linear=BART_LINEAR,
        positions=positions,
        skipped=skipped,
    )


STACKS: dict[str, StackFamily] = {
    "BartForConditionalGeneration": _bart_family(
        "BartForConditionalGeneration", POSITIONS, post_norm=True, first_norm=True, skipped=2
    ),
    "MBartForConditionalGeneration": _bart_family(
        "MBartForConditionalGeneration", POSITIONS, post_norm=False, first_norm=True, skipped=2
    ),
    "MarianMTModel": _bart_family("MarianMTModel", sinusoids, post_norm=True),
    "M2M100ForConditionalGeneration": _bart_family(
        "M2M100ForConditionalGeneration", padded_sinusoids, post_norm=False
    ),
    "PegasusForConditionalGeneration": _bart_family(
        "PegasusForConditionalGeneration", sinusoids, post_norm=False
    ),
    "T5ForConditionalGeneration": StackFamily(
        read=_t5,
        norms="rms",
        biased=False,
        stack="{side}.",
        shared="shared.weight",
        layer="block.{layer}.",
        norm={
            "attention": "layer.0.layer_norm",
            "memory": "layer.1.layer_norm",
            "mlp": "layer.{mlp}.layer_norm",
        },
        final_norm="final_layer_norm",
        linear=T5_LINEAR,
        relative="block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
}
"""Architecture, as config.json names it, → family. NLLB's folders call themselves M2M100."""


def stack_family(data: Mapping[str, Any]) -> StackFamily | None:
    """The family of a config.json, None for another kind of model."""
    return next((STACKS[name] for name in data.get("architectures") or [] if name in STACKS), None)


def start_id(fields: Fields, generation: Mapping[str, Any]) -> int:
    """The token that a decoder reads first; raises `ModelError` where neither file names it."""
    found = generation.get("decoder_start_token_id", fields.data.get("decoder_start_token_id"))
    if type(found) is not int or found < 0:
        raise ModelError(
            f"{fields.path}: 'decoder_start_token_id' cannot be used", found=repr(found), allowed="a token id"
        )
    return found
