"""The tensors of recurrent layers, and of attention with a gate, as a family's files have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchwright.models.decoder.config import DecoderConfig, DeltaConfig, MambaConfig, ShortConvConfig
from torchwright.models.decoder.family import Names
from torchwright.models.decoder.weight_rows import by_kind
from torchwright.train.model.file_tensor import FileTensor

VECTORS = {"A_log": "log_rate", "dt_bias": "shift", "D": "skip"}
"""A recurrence's vectors in files, and here."""


def mixer_tensors(config: DecoderConfig, names: Names, file: str, ours: str) -> Iterator[FileTensor]:
    """Yield those of one layer's mixer; `file` and `ours` are what precedes the names there and here."""
    mixer = config.mixer
    match mixer:
        case ShortConvConfig():
            yield from _linear(f"{file}{names.conv_in}", ours, ("gate_in", "gate", "v"), bias=mixer.bias)
            yield from _taps(f"{file}{names.conv}", ours, ("conv",), bias=mixer.bias)
            yield from _linear(f"{file}{names.conv_out}", ours, ("o",), bias=mixer.bias)
        case MambaConfig():
            parts = ("gate", "v", "k", "q", "step")
            yield from _linear(f"{file}{names.mamba_in}", ours, parts, bias=mixer.bias)
            parts = ("v_conv", "k_conv", "q_conv")
            yield from _taps(f"{file}{names.conv}", ours, parts, bias=mixer.conv_bias)
            yield from _vectors(names, file, f"{ours}scan.", ("A_log", "dt_bias", "D"))
            if mixer.normed:
                yield _norm(names, file, ours)
            yield from _linear(f"{file}{names.mamba_out}", ours, ("o",), bias=mixer.out_bias)
        case DeltaConfig():
            yield from _delta_linears(mixer, names, file, ours)
            yield from _taps(f"{file}{names.conv}", ours, ("q_conv", "k_conv", "v_conv"), bias=False)
            yield from _vectors(names, file, f"{ours}delta.", ("A_log", "dt_bias"))
            yield _norm(names, file, ours)
            yield from _linear(f"{file}{names.delta_out}", ours, ("o",), bias=False)
        case None:
            raise AssertionError("a model without recurrent layers")


def gated_queries(config: DecoderConfig, names: Names, file: str, ours: str) -> Iterator[FileTensor]:
    """Yield the projection that holds each head's query and gate."""
    order_N = by_kind(config.heads, (config.head_dim, config.head_dim))
    yield from _linear(f"{file}{names.qkv[0]}", ours, ("q", "gate"), bias=config.qkv_bias, order_N=order_N)


def _delta_linears(mixer: DeltaConfig, names: Names, file: str, ours: str) -> Iterator[FileTensor]:
    """Qwen3-Next has one tensor for all, whose rows lie together by key head, and another for what decides the decay.

    Qwen3.5 has two of each, in our order.
    """
    each = mixer.heads // mixer.key_heads
    if len(names.delta_in) == 1:
        sizes = (mixer.key_dim, mixer.key_dim, each * mixer.head_dim, each * mixer.head_dim)
        order_N = by_kind(mixer.key_heads, sizes)
        parts = ("q", "k", "v", "gate")
        yield from _linear(f"{file}{names.delta_in[0]}", ours, parts, bias=False, order_N=order_N)
    else:
        yield from _linear(f"{file}{names.delta_in[0]}", ours, ("q", "k", "v"), bias=False)
        yield from _linear(f"{file}{names.delta_in[1]}", ours, ("gate",), bias=False)
    if len(names.decay) == 1:
        order_N = by_kind(mixer.key_heads, (each, each))
        yield from _linear(f"{file}{names.decay[0]}", ours, ("gain", "decay"), bias=False, order_N=order_N)
    else:
        yield from _linear(f"{file}{names.decay[0]}", ours, ("gain",), bias=False)
        yield from _linear(f"{file}{names.decay[1]}", ours, ("decay",), bias=False)


def _linear(
    name: str, ours: str, parts: Sequence[str], *, bias: bool, order_N: torch.Tensor | None = None
) -> Iterator[FileTensor]:
    for kind in ("weight", "bias") if bias else ("weight",):
        parameters = tuple(f"{ours}{part}.{kind}" for part in parts)
        yield FileTensor(name=f"{name}.{kind}", parameters=parameters, order_N=order_N)


def _taps(name: str, ours: str, parts: Sequence[str], *, bias: bool) -> Iterator[FileTensor]:
    weights, offsets = (tuple(f"{ours}{part}.{kind}" for part in parts) for kind in ("weight", "bias"))
    yield FileTensor(name=f"{name}.weight", parameters=weights, taps=True)
    if bias:
        yield FileTensor(name=f"{name}.bias", parameters=offsets)


def _vectors(names: Names, file: str, ours: str, parts: Sequence[str]) -> Iterator[FileTensor]:
    for part in parts:
        yield FileTensor(name=f"{file}{_block(names)}.{part}", parameters=(f"{ours}{VECTORS[part]}",))


def _norm(names: Names, file: str, ours: str) -> FileTensor:
    return FileTensor(name=f"{file}{_block(names)}.norm.weight", parameters=(f"{ours}out_norm.weight",))


def _block(names: Names) -> str:
    """Return the module that holds the convolution, the vectors and the norm."""
    return names.conv.rpartition(".")[0]
