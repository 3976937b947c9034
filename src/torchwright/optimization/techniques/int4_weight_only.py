"""4-bit weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import deviation, overridden
from torchwright.core.quiet import quiet_import
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.wrapping import known_names, named, plain_name, replace_module

Rounding = Literal["nearest", "hqq"]
ROWS = 16
"""The kernel takes weights whose output rows are a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Int4WeightOnly(ForParts):
    """Keep the weights of linear layers in 4 bits, a scale and a minimum per group; arithmetic stays in bfloat16."""

    name: ClassVar[str] = "int4_weight_only"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    tolerance: ClassVar[float] = 0.25

    group_size: Literal[32, 64, 128] = 64
    """Weights of one row that share a scale and a minimum."""
    rounding: Rounding = "nearest"
    """Scale and minimum from a group's ends, or by half-quadratic quantization, which gives way to outliers (torchao's;
    Badri and Shaji, 2023)."""
    skip: tuple[str, ...] = ()
    """Names of linear layers that keep their weights."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cpu":
            return f"its kernel is the CPU's; this device is {device.kind}"
        return None

    @property
    def epsilon(self) -> float:
        return 2.0**-1  # as of 8 bits, of 7 steps

    @property
    def kernel(self) -> str | None:
        return "int4"

    def variants(self, target: Target) -> Iterable[Self]:
        return self.by_parts(target)

    def refuse(self, target: Target) -> str | None:
        fault = super().refuse(target) or self.lacks(target, nn.Linear)
        if fault:
            return fault
        skipped = skips(target.model, self)
        total = sum(self.covers(name) for name, _ in named(target.model, nn.Linear))
        if total and len(skipped) == total:
            return f"none of {total} linear layers can be packed: {'; '.join(sorted(set(skipped.values())))}"
        return None

    def retreat(self, names: tuple[str, ...]) -> Self:
        return replace(self, skip=tuple(sorted({*self.skip, *map(plain_name, names)})))

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        layer: Any = module
        if overridden(layer, (nn.Linear,)) or _shape_fault(layer, self.group_size):
            return None
        w_NK = layer.weight.detach().float()
        error_NK = dequantize(*quantize(w_NK, self.group_size, self.rounding), self.group_size) - w_NK
        exact = F.linear(x.float(), w_NK)
        return float(F.linear(x.float(), error_NK).norm() / exact.norm().clamp_min(1e-12))

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        layer: Any = module
        if overridden(layer, (nn.Linear,)) or _shape_fault(layer, self.group_size):
            return None
        return Int4Linear.of(layer, self.group_size, self.rounding)

    def apply(self, target: Target) -> None:
        layers = {name: each for name, each in named(target.model, nn.Linear) if self.covers(name)}
        skipped = skips(target.model, self)
        for name, layer in layers.items():
            if name not in skipped:
                replace_module(target.model, layer, Int4Linear.of(layer, self.group_size, self.rounding))
        if len(skipped) == len(layers):
            raise RefusedTechnique(
                "int4_weight_only changes nothing", found="; ".join(sorted(set(skipped.values())))
            )
        self.cover(
            target,
            len(layers),
            unit="linear layers",
            kernel=f"aten int4, groups of {self.group_size}",
            skipped=skipped,
        )


class Int4Linear(nn.Module):
    """A linear layer whose weight is `(code - 8) * scale + zero`, codes of 4 bits, scale and zero per group.

    The buffers hold the plain form: `codes_NK` with two codes in a byte (even column in the low nibble) and
    `scales_GN2` (scale, zero) in bfloat16. The kernel needs its own packed order, which depends on the instruction
    set. It is packed once per process in eager mode, and inside the graph when exporting, where freezing folds it
    into a constant of the compiled package. So saved files run everywhere, and compiled packages start at once.
    """

    codes_NK: torch.Tensor
    scales_GN2: torch.Tensor

    def __init__(
        self,
        codes_NK: torch.Tensor,
        scales_GN2: torch.Tensor,
        bias: torch.Tensor | None,
        group: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.register_buffer("codes_NK", codes_NK)
        self.register_buffer("scales_GN2", scales_GN2)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.group, self.dtype = group, dtype
        self.out_features, self.in_features = codes_NK.shape[0], codes_NK.shape[1] * 2
        self._packed: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Linear, group: int, rounding: Rounding = "nearest") -> Int4Linear:
        """The quantized form of a linear layer."""
        codes_NK, scales_GN2 = quantize(layer.weight.detach().float(), group, rounding)
        low, high = codes_NK[:, 0::2], codes_NK[:, 1::2]
        return cls((low | (high << 4)).contiguous(), scales_GN2, layer.bias, group, layer.weight.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """Return the dequantized codes, in the layer's own dtype: models read it to cast what they pass in."""
        return dequantize(self._codes(), self.scales_GN2, self.group).to(self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input
        x_MK = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        y_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, self._pack(), self.group, self.scales_GN2)
        y = y_MN.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"

    def _pack(self) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return self._packed_now()
        if self._packed is None:
            self._packed = self._packed_now()
        return self._packed

    def _packed_now(self) -> torch.Tensor:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(self._codes().to(torch.int32), 2)

    def _codes(self) -> torch.Tensor:
        """Codes 0 to 15 as uint8 [N, K]."""
        pairs = torch.stack((self.codes_NK & 15, self.codes_NK >> 4), dim=-1)
        return pairs.reshape(self.out_features, self.in_features)


def quantize(
    w_NK: torch.Tensor, group: int, rounding: Rounding = "nearest"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 to 15 as uint8 [N, K] and (scale, zero) in bfloat16 [K / group, N, 2]."""
    N, K = w_NK.shape
    w_NGg = w_NK.reshape(N, K // group, group)
    scale, zero = (_hqq if rounding == "hqq" else _ends)(w_NGg)
    codes = ((w_NGg - zero) / scale + 8).round().clamp(0, 15)
    scales_NG2 = torch.cat((scale, zero), dim=-1).bfloat16()
    return codes.reshape(N, K).to(torch.uint8), scales_NG2.transpose(0, 1).contiguous()


def _ends(w_NGg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero [N, G, 1] with which the least and the largest weight of a group keep their place.

    Rounded to what the kernel will read before the codes are chosen, so that they make up for the rounding.
    """
    low, high = w_NGg.amin(-1, keepdim=True), w_NGg.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8).bfloat16().float()
    return scale, (low + 8 * scale).bfloat16().float()


def _hqq(w_NGg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the zero of the least sum of |error|^0.7, by torchao's half-quadratic solver."""
    with quiet_import():
        from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq as solve

    N, G, group = w_NGg.shape
    device, dtype = w_NGg.device.type, torch.float32
    _, scale, zero, _ = solve(
        w_NGg.reshape(N, -1), nbits=4, group_size=group, compute_dtype=dtype, device=device
    )
    return scale.reshape(N, G, 1).bfloat16().float(), zero.reshape(N, G, 1).bfloat16().float()


def dequantize(codes_NK: torch.Tensor, scales_GN2: torch.Tensor, group: int) -> torch.Tensor:
    """The weights that the codes stand for, in float32: the reference for the kernel."""
    N, K = codes_NK.shape
    scale, zero = scales_GN2.float().transpose(0, 1).unsqueeze(-1).unbind(2)
    return ((codes_NK.reshape(N, K // group, group).float() - 8) * scale + zero).reshape(N, K)


def skips(model: nn.Module, technique: Int4WeightOnly) -> dict[str, str]:
    """Linear layers that stay as they are, with the reason."""
    layers = dict(named(model, nn.Linear))
    asked = known_names(f"{technique.name}:skip", technique.skip, layers)
    reasons: dict[str, str] = {}
    for name, layer in layers.items():
        if not technique.covers(name):
            continue
        if name in asked:
            reasons[name] = "left alone by option"
        elif reason := deviation(layer, (nn.Linear,)):
            reasons[name] = reason
        elif fault := _shape_fault(layer, technique.group_size):
            reasons[name] = fault
    return reasons


def _shape_fault(layer: nn.Linear, group: int) -> str | None:
    N, K = layer.weight.shape
    if K % group:
        return f"{K} inputs are not a multiple of the group of {group}"
    if N % ROWS:
        return f"{N} outputs are not a multiple of {ROWS}"
    return None
