"""The two stacks of a Moonshine's checkpoint: heads whose neighbours turn in pairs, norms without shifts."""

from __future__ import annotations

import torch

from torchwright.hardware.kernels.limits import LANES
from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.rope import Rope, read_rope
from torchwright.models.decoder.seq2seq.stacks import ACTIVATIONS, Side, StackFamily
from torchwright.models.speech.moonshine.windows import LONGEST, states

EPS = 1e-5
"""Epsilon of all norms."""
THETA = 10_000.0
ATTENTION = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "memory_q": ("encoder_attn.q_proj",),
    "memory_kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "memory_o": ("encoder_attn.o_proj",),
    "down": ("mlp.fc2",),
}
NORMS = {
    "encoder": {"attention": "input_layernorm", "mlp": "post_attention_layernorm"},
    "decoder": {
        "attention": "input_layernorm",
        "memory": "post_attention_layernorm",
        "mlp": "final_layernorm",
    },
}


def refuse(fields: Fields) -> str | None:
    """Return the part of the configuration that our layers do not support, or None."""
    if fields.flag("attention_bias", False):
        return "projections of attention with biases"
    for side in ("encoder", "decoder"):
        heads = _heads(fields, side)
        shared = fields.integer(f"{side}_num_key_value_heads", heads)
        if shared != heads:
            return (
                f"{heads} heads of queries and {shared} of keys, of which transformers makes nothing either"
            )
    if _act(fields, "decoder") not in ("silu", "gelu_tanh"):
        return f"a gate of {fields.text('decoder_hidden_act', 'silu')}"
    if (turned := int(_own(fields, "decoder") * _part(fields))) % 2:
        return f"heads of which {turned} dimensions turn, an odd number"
    return None


def moonshine(fields: Fields, side: Side) -> StackFamily:
    """One side's names and arrangement; raises `ModelError` for a config.json that no Moonshine has."""
    gated = side == "decoder"
    return StackFamily(
        read=stack_config,
        norms="layer",
        shifted=False,
        biased=True,
        unbiased=frozenset(name for names in ATTENTION.values() for name in names if "attn" in name),
        norm=NORMS[side],
        final_norm="norm" if gated else "layer_norm",
        linear=ATTENTION | {"gate_up" if gated else "up": ("mlp.fc1",)},
        gate_below=gated,
        head="proj_out.weight",
        order=head_order(fields, side),
    )


def stack_config(fields: Fields, side: Side) -> DecoderConfig:
    """The stack "encoder" or "decoder" of a config.json; raises `ModelError` for what it cannot be."""
    decoder = side == "decoder"
    heads, own, layers = _heads(fields, side), _own(fields, side), fields.integer(f"{side}_num_hidden_layers")
    positions = fields.integer("max_position_embeddings", 512)
    return DecoderConfig(
        architecture="MoonshineForConditionalGeneration",
        vocabulary=fields.integer("vocab_size"),
        model=fields.integer("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=-(-own // LANES) * LANES,
        feed_forward=fields.integer("intermediate_size"),
        context=positions if decoder else states(LONGEST),
        eps=EPS,
        activation=_act(fields, side),
        tied=fields.flag("tie_word_embeddings", True),
        ropes=(_rope(fields, own, positions),) * layers,
        windows=(0,) * layers,
        sparse=(False,) * layers,
        scale=own**-0.5,
        gated=decoder,
        causal=decoder,
        remembers=decoder,
    )


def head_order(fields: Fields, side: Side) -> torch.Tensor:
    """Which of the checkpoint's dimensions of a head lies where (D,), −1 for none.

    Two neighbours turn together there, here one of each half of those that turn; the kernels want a multiple of
    `LANES` dimensions, and zeros fill them up.
    """
    own, turned = _own(fields, side), int(_own(fields, side) * _part(fields))
    places = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, own)]
    return torch.tensor(places + [-1] * (-own % LANES))


def _rope(fields: Fields, own: int, positions: int) -> Rope:
    key = "rope_parameters" if fields.data.get("rope_scaling") is None else "rope_scaling"
    section = fields.section(key)
    return read_rope(
        section,
        theta=fields.number("rope_theta", THETA),
        partial=fields.optional("partial_rotary_factor"),
        head_dim=own,
        positions=positions,
        renamed={},
    )


def _part(fields: Fields) -> float:
    """The share of a head's dimensions that turn; where config.json does not say, transformers turns nine tenths."""
    section = fields.section("rope_parameters")
    return section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.9))


def _heads(fields: Fields, side: str) -> int:
    return fields.integer(f"{side}_num_attention_heads", 8)


def _own(fields: Fields, side: str) -> int:
    """Dimensions of a head in the checkpoint."""
    model, heads = fields.integer("hidden_size"), _heads(fields, side)
    if model % heads:
        raise fields.wrong(f"{side}_num_attention_heads", f"a divisor of hidden_size, {model}")
    return model // heads


def _act(fields: Fields, side: str) -> str:
    key = f"{side}_hidden_act"
    name = fields.text(key, "silu" if side == "decoder" else "gelu")
    if name not in ACTIVATIONS:
        raise fields.wrong(key, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]
