"""The two stacks of a Whisper's checkpoint: those of a text model, and two convolutions before the encoder."""

from __future__ import annotations

from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.seq2seq.stacks import ACTIVATIONS, BART_LINEAR, BART_NORM, StackFamily

EPS = 1e-5
"""Epsilon of all norms."""


def stack_config(fields: Fields, side: str) -> DecoderConfig:
    """The stack "encoder" or "decoder" of a config.json; raises `ModelError` for what it cannot be."""
    decoder = side == "decoder"
    model, heads = fields.integer("d_model"), fields.integer(f"{side}_attention_heads")
    layers = fields.integer(f"{side}_layers")
    if model % heads:
        raise fields.wrong(f"{side}_attention_heads", f"a divisor of d_model, {model}")
    activation = fields.text("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise fields.wrong("activation_function", ", ".join(ACTIVATIONS))
    return DecoderConfig(
        architecture="WhisperForConditionalGeneration",
        vocabulary=fields.integer("vocab_size"),
        model=model,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=model // heads,
        feed_forward=fields.integer(f"{side}_ffn_dim"),
        context=fields.integer("max_target_positions" if decoder else "max_source_positions"),
        eps=EPS,
        activation=ACTIVATIONS[activation],
        tied=fields.flag("tie_word_embeddings", True),
        ropes=(None,) * layers,
        windows=(0,) * layers,
        sparse=(False,) * layers,
        scale=(model // heads) ** -0.5,
        gated=False,
        causal=decoder,
        remembers=decoder,
    )


WHISPER = StackFamily(
    read=stack_config,
    norms="layer",
    biased=True,
    unbiased=frozenset({"self_attn.k_proj", "encoder_attn.k_proj"}),
    norm=BART_NORM,
    linear=BART_LINEAR,
    positions="embed_positions.weight",
    head="proj_out.weight",
)
