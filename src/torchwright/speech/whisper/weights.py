"""The two stacks of a Whisper's checkpoint as parts of `decoder/`, which knows no LayerNorm and needs none.

A LayerNorm of x is the RMSNorm of x without its mean, times a weight, plus a shift. Whatever is added to the residual
stream is therefore read without its mean over the stream's dimensions: the stream never has one, and the norm's own
subtraction is done (Ashkboos et al., SliceGPT, 2024, section 3.1). The shift goes into the bias of the layer behind
the norm. Both are sums of weights in float32, before they are rounded to anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.weights import MakeLinear
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh"}
EPS = 1e-5
"""Of all of its norms."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """A linear layer by its tensors: one below the other those of `names`, behind the norm of `norm`."""

    names: Sequence[str]
    norm: str | None = None
    without_bias: str | None = None
    into_stream: bool = False


NORMS = {
    "pre_attention": "self_attn_layer_norm",
    "pre_memory": "encoder_attn_layer_norm",
    "pre_mlp": "final_layer_norm",
}
LINEARS = {
    "qkv": Reads(
        names=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        norm=NORMS["pre_attention"],
        without_bias="self_attn.k_proj",
    ),
    "o": Reads(names=("self_attn.out_proj",), into_stream=True),
    "memory_q": Reads(names=("encoder_attn.q_proj",), norm=NORMS["pre_memory"]),
    "memory_kv": Reads(
        names=("encoder_attn.k_proj", "encoder_attn.v_proj"), without_bias="encoder_attn.k_proj"
    ),
    "memory_o": Reads(names=("encoder_attn.out_proj",), into_stream=True),
    "up": Reads(names=("fc1",), norm=NORMS["pre_mlp"]),
    "down": Reads(names=("fc2",), into_stream=True),
}


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


class StackParts:
    """One stack's parts, in `dtype`; linear layers as `make_linear` makes them of float32 weights."""

    device = torch.device("cpu")

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        side: str,
        dtype: torch.dtype,
        make_linear: MakeLinear,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._checkpoint, self._make_linear, self._at = checkpoint, make_linear, f"model.{side}."

    def embedding(self) -> torch.Tensor:
        table_VE = self._tensor("embed_tokens.weight", self.config.vocabulary, self.config.model)
        return centered(table_VE, -1).to(self.dtype)

    def positions(self) -> torch.Tensor:
        """(P, E), what is added at each position."""
        table_PE = self._tensor("embed_positions.weight", self.config.context, self.config.model)
        return centered(table_PE, -1).to(self.dtype)

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        """The output layer (V, E) behind the last norm: of the embedding as the file has it, with its mean."""
        shape = self.config.vocabulary, self.config.model
        tied = self.config.tied
        weight_VE = (
            self._tensor("embed_tokens.weight", *shape) if tied else self._read("proj_out.weight", *shape)
        )
        return self._make_linear(weight_VE, weight_VE @ self.final_shift())

    def final_norm(self) -> torch.Tensor:
        return self._tensor("layer_norm.weight", self.config.model)

    def final_shift(self) -> torch.Tensor:
        """What the last norm adds."""
        return self._tensor("layer_norm.bias", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        if part not in NORMS:
            return None
        return self._tensor(f"layers.{layer}.{NORMS[part]}.weight", self.config.model)

    def linear(self, layer: int, part: str) -> nn.Module:
        config, reads, at = self.config, LINEARS[part], f"layers.{layer}."
        rows = config.feed_forward if part == "up" else config.model
        columns = config.feed_forward if part == "down" else config.model
        weight_NK = torch.cat([self._tensor(f"{at}{name}.weight", rows, columns) for name in reads.names])
        bias_N = torch.cat(
            [
                torch.zeros(rows) if name == reads.without_bias else self._tensor(f"{at}{name}.bias", rows)
                for name in reads.names
            ]
        )
        if reads.norm is not None:
            bias_N = bias_N + weight_NK @ self._tensor(f"{at}{reads.norm}.bias", columns)
        if reads.into_stream:
            weight_NK, bias_N = centered(weight_NK, 0), centered(bias_N, 0)
        return self._make_linear(weight_NK, bias_N)

    def convolution(self, name: str, channels: int) -> nn.Module:
        """conv1 or conv2 over three frames, as a linear layer of their channels one frame after another."""
        E = self.config.model
        weight_EC3, bias_E = self._tensor(f"{name}.weight", E, channels, 3), self._tensor(f"{name}.bias", E)
        return self._make_linear(weight_EC3.transpose(1, 2).flatten(1), bias_E)

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        raise AssertionError("no Whisper has experts")

    def router(self, layer: int) -> torch.Tensor:
        raise AssertionError("no Whisper has experts")

    def expert_bias(self, layer: int) -> None:
        """No Whisper has experts."""

    def attention_bias(self) -> None:
        """None: positions are added to what is embedded."""

    def release(self) -> None:
        self._checkpoint.close()

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._read(self._at + name, *shape)

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        """In float32 and memory of its own."""
        return self._checkpoint.weight(name, shape).rows(0, shape[0]).to(torch.float32, copy=True)


def centered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Without its mean along a dimension."""
    return x - x.mean(dim, keepdim=True)
