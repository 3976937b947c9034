"""A layer's parts in a file: rows of linear layers and their order, and the other parts of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchwright.hub.checkpoint import Checkpoint
from torchwright.models.decoder.config import (
    DecoderConfig,
    DeltaConfig,
    LatentConfig,
    MambaConfig,
    ShortConvConfig,
)
from torchwright.models.decoder.family import Names


class Rows(NamedTuple):
    """A linear layer's rows, one tensor of the file below the other."""

    names: Sequence[str]
    """In the file."""
    counts: Sequence[int]
    columns: int
    bias: bool = False


def linear_rows(config: DecoderConfig, names: Names, part: str) -> Rows:
    """The rows of one of a layer's linear layers, in the order of this decoder."""
    mixer, E, F = config.mixer, config.model, config.feed_forward
    q = config.heads * config.head_dim
    parts = {
        "qkv": _query_key_value(config, names),
        "o": Rows((names.o,), (E,), q, config.o_bias),
        "gate_up": Rows(names.gate_up, (F, F), E, config.mlp_bias),
        "down": Rows((names.down,), (E,), F, config.mlp_bias),
    }
    if config.latent is not None:
        parts |= _latent_rows(config, config.latent, names)
    if config.layer_inputs is not None:
        width = config.layer_inputs.width
        parts |= {
            "input_gate": Rows((names.input_gate,), (width,), E),
            "input_out": Rows((names.input_out,), (E,), width),
        }
    if isinstance(mixer, ShortConvConfig):
        parts |= {
            "conv_in": Rows((names.conv_in,), (3 * E,), E, mixer.bias),
            "conv_out": Rows((names.conv_out,), (E,), E, mixer.bias),
        }
    if isinstance(mixer, DeltaConfig):
        parts |= {
            "delta_in": Rows(names.delta_in, (2 * mixer.keys + mixer.values, mixer.values), E),
            "delta_out": Rows((names.delta_out,), (E,), mixer.values),
            "decay": Rows(names.decay, (mixer.heads, mixer.heads), E),
        }
    if isinstance(mixer, MambaConfig):
        whole = Rows((names.mamba_in,), (2 * mixer.values + 2 * mixer.keys + mixer.heads,), E, mixer.bias)
        parts |= {
            "mamba_in": whole,
            "decay": whole,
            "mamba_out": Rows((names.mamba_out,), (E,), mixer.values, mixer.out_bias),
        }
    return parts[part]


def _query_key_value(config: DecoderConfig, names: Names) -> Rows:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if not kv:
        return Rows(names.qkv[:1], (q,), config.model, config.qkv_bias)
    if config.keys_as_values:
        return Rows(names.qkv[:2], (q, kv), config.model, config.qkv_bias)
    return Rows(names.qkv, (2 * q if config.output_gate else q, kv, kv), config.model, config.qkv_bias)


def _latent_rows(config: DecoderConfig, latent: LatentConfig, names: Names) -> dict[str, Rows]:
    E, q = config.model, config.heads * (latent.plain + latent.turned)
    rank = latent.query_rank
    return {
        "query_in": Rows(names.query[:1], (rank or 0,), E, config.qkv_bias),
        "query": Rows(names.query[1:] if rank else names.qkv[:1], (q,), rank or E),
        "latent": Rows((names.latent,), (latent.rank + latent.turned,), E, config.qkv_bias),
        "o": Rows((names.o,), (E,), config.heads * latent.value, config.o_bias),
    }


def row_order(config: DecoderConfig, layer: int, part: str, files: int) -> torch.Tensor | None:
    """Which of a file's rows, of so many tensors one below the other, each row here is; None where all are the same."""
    if part == "qkv" and config.interleaved:
        return _turned_first(config, layer)
    if part == "qkv" and config.output_gate:
        return _gate_last(config)
    if isinstance(config.mixer, MambaConfig) and part in ("mamba_in", "decay"):
        wide = 2 * config.mixer.values + 2 * config.mixer.keys
        return torch.arange(wide) if part == "mamba_in" else wide + torch.arange(config.mixer.heads)
    if isinstance(config.mixer, DeltaConfig) and files == 1:
        mixer = config.mixer
        keys, values = mixer.key_dim, mixer.heads // mixer.key_heads
        if part == "delta_in":
            return by_kind(mixer.key_heads, (keys, keys, values * mixer.head_dim, values * mixer.head_dim))
        if part == "decay":
            return by_kind(mixer.key_heads, (values, values))
    return None


def _turned_first(config: DecoderConfig, layer: int) -> torch.Tensor:
    """Query, key and value, whose turned dimensions alternate in the file: the first of each pair come first here."""
    rope, heads = config.ropes[layer], config.heads + config.kv_heads
    turned = 0 if rope is None else rope.rotated
    order_D = torch.cat(
        [torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, config.head_dim)]
    )
    order_N = (torch.arange(heads)[:, None] * config.head_dim + order_D).flatten()
    values = torch.arange(config.kv_heads * config.head_dim)
    return torch.cat([order_N, len(order_N) + values])


def _gate_last(config: DecoderConfig) -> torch.Tensor:
    """Each head's query and gate, then keys and values: here all queries, keys and values, then all gates."""
    q = config.heads * config.head_dim
    query, gate = by_kind(config.heads, (config.head_dim, config.head_dim)).split(q)
    return torch.cat([query, 2 * q + torch.arange(2 * config.kv_heads * config.head_dim), gate])


def by_kind(heads: int, sizes: Sequence[int]) -> torch.Tensor:
    """Rows that lie together by head, parts of these sizes in each: here by part, all heads of one together."""
    start_H1 = torch.arange(heads)[:, None] * sum(sizes)
    begin = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [
        (start_H1 + first + torch.arange(size)).flatten() for first, size in zip(begin, sizes, strict=True)
    ]
    return torch.cat(parts)


def recurrent_part(
    config: DecoderConfig, names: Names, checkpoint: Checkpoint, layer: int, part: str
) -> torch.Tensor | None:
    """Return a convolution, norm or vector of a recurrent layer, in float32 and in memory of its own.

    The names are those of `recurrent.py`; None is a bias that is not there.
    """
    mixer = config.mixer
    assert mixer is not None
    beside = f"model.layers.{layer}.{names.conv.rpartition('.')[0]}"
    convolved = mixer.state_shape(config.model).parts[0][-1]

    def read(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.weight(name, shape).rows(0, shape[0]).float().clone()

    if part == "conv":
        weight = read(f"model.layers.{layer}.{names.conv}.weight", convolved, 1, mixer.width)
        return weight[:, 0].t().contiguous()
    if part == "conv_bias":
        biased = isinstance(mixer, MambaConfig) and mixer.conv_bias
        biased |= isinstance(mixer, ShortConvConfig) and mixer.bias
        return read(f"model.layers.{layer}.{names.conv}.bias", convolved) if biased else None
    assert not isinstance(mixer, ShortConvConfig)
    if part == "out_norm" and isinstance(mixer, MambaConfig):
        return read(f"{beside}.norm.weight", mixer.values).unflatten(0, (mixer.key_heads, -1))
    if part == "out_norm":
        return read(f"{beside}.norm.weight", mixer.head_dim).expand(mixer.heads, -1).contiguous()
    name = {"rate": "A_log", "shift": "dt_bias", "skip": "D"}[part]
    found = read(f"{beside}.{name}", mixer.heads)
    return found.exp() if part == "rate" else found
