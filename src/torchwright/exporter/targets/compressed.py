"""Weights in the compressed-tensors format: integers with a scale for each row or group, symmetric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

WORD = 32
SHRINKS = tuple(1 - 0.02 * step for step in range(16))
"""Shares of a 4-bit group's largest weight to try as the end of its range: clipping it often costs less."""
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Each row of activations rounded to 8 bits by its own largest."""


@dataclass(frozen=True, kw_only=True)
class LinearFormat:
    """One way to keep a linear layer."""

    bits: int
    group: int | None = None
    """Inputs that share a scale; None is the whole row."""
    inputs: bool = False
    """True if activations are rounded to 8 bits, too."""

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == 2 and (self.group is None or shape[1] % self.group == 0)

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of a model all of whose linear layers but `ignore` are kept so."""
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group" if self.group else "channel", "group_size": self.group}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": INPUTS if self.inputs else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.bits < 8 else "int-quantized",
            "quantization_status": "compressed",
            "ignore": list(ignore),
            "config_groups": {"group_0": group},
        }

    def tensors(self, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts that stand for a weight, by what follows the layer's name. Scales are bfloat16."""
        groups_NGK = weight_NK.float().unflatten(1, (-1, self.group or weight_NK.shape[1]))
        scales_NG = scales(groups_NGK, self.bits)
        codes_NK = _rounded(groups_NGK, scales_NG, self.bits).flatten(1)
        parts = {"weight_scale": scales_NG}
        if self.bits == 8:
            return parts | {"weight": codes_NK.to(torch.int8)}
        shape = torch.tensor(weight_NK.shape, dtype=torch.int64)
        return parts | {"weight_packed": packed(codes_NK, self.bits), "weight_shape": shape}


def scales(groups_NGK: torch.Tensor, bits: int) -> torch.Tensor:
    """bfloat16 (N, G): of 8 bits the largest weight's, of fewer those of least squared error among `SHRINKS`."""
    ends_NG = groups_NGK.abs().amax(-1) / (2 ** (bits - 1) - 1)
    if bits == 8:
        return _scale(ends_NG)
    best_NG, least_NG = _scale(ends_NG), torch.full_like(ends_NG, torch.inf)
    for shrink in SHRINKS:
        tried_NG = _scale(ends_NG * shrink)
        wrong_NGK = _rounded(groups_NGK, tried_NG, bits) * tried_NG.float().unsqueeze(-1) - groups_NGK
        error_NG = wrong_NGK.square().sum(-1)
        better = error_NG < least_NG
        best_NG, least_NG = torch.where(better, tried_NG, best_NG), torch.where(better, error_NG, least_NG)
    return best_NG


def packed(codes_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (N, K·bits/32): the values + 2^(bits−1), one after the other from a word's lowest bits on."""
    each = WORD // bits
    room_NK = torch.nn.functional.pad(codes_NK.long() + 2 ** (bits - 1), (0, -codes_NK.shape[1] % each))
    words = (room_NK.unflatten(1, (-1, each)) << torch.arange(0, WORD, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _scale(ends_NG: torch.Tensor) -> torch.Tensor:
    """Return the scale as stored; a group of zeros has scale one, for readers that divide by it."""
    return torch.where(ends_NG == 0, 1.0, ends_NG).to(torch.bfloat16)


def _rounded(groups_NGK: torch.Tensor, scales_NG: torch.Tensor, bits: int) -> torch.Tensor:
    end = 2 ** (bits - 1)
    return (groups_NGK / scales_NG.float().unsqueeze(-1)).round().clamp(-end, end - 1)
