# pyright: basic
"""Fingerprints that tell two originals of the same name apart."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from torchwright.core.records import Identity

SAMPLE = 256
"""Values of each tensor that are looked at, evenly spread: training changes them all."""


def identity(model: nn.Module) -> Identity:
    """The identity of a model in memory, wherever its weights are."""
    structure, weights = hashlib.sha256(), hashlib.sha256()
    for name, module in model.named_modules():
        structure.update(f"{name}: {type(module).__qualname__}\n".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        structure.update(f"{name}: {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        weights.update(_sample(tensor))
    return Identity(structure=structure.hexdigest(), weights=weights.hexdigest())


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a sample of a tensor's values; empty if it is not a plain dense tensor."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or not tensor.numel():
        return b""
    places = torch.arange(0, tensor.numel(), max(1, tensor.numel() // SAMPLE), device=tensor.device)
    values = tensor.detach()[torch.unravel_index(places, tensor.shape)] if tensor.ndim else tensor.detach()
    values = values.cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()
