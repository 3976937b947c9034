"""Linear layers over packed weights: the modules that hold them, and what they compute in plain PyTorch.

Schemes: `bf16`; `w8a8`, 8-bit weights per output feature on activations quantized per row in the kernel; `w4a8` and
`w4a16`, 4-bit weights in groups along the input on activations quantized per row to 8 or 16 bits. `w4bf16` and `w8bf16`
keep the integers of a quantized checkpoint, and compute to the bit what `bf16` does with what they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Self

import torch
from torch import nn

from torchwright.kernels import ops, pack, pack_grouped, reference
from torchwright.kernels.cpu.memory import lasting
from torchwright.kernels.gptq import gptq_w4
from torchwright.kernels.gpu import operators as gpu

SCHEMES = ("bf16", "w8a8", "w4a8", "w4a16")
KEPT = {"w4bf16": 4, "w8bf16": 8}
"""Schemes of integers that were chosen elsewhere, and their bits."""


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """What a packed layer is, apart from its numbers."""

    scheme: str
    in_features: int
    out_features: int
    group_size: int

    @property
    def depth(self) -> int:
        """Input features as the kernels count them."""
        return pack.padded_depth(self.in_features, 0 if self.scheme in ("bf16", "w8a8") else self.group_size)

    def check(self) -> None:
        """Raise `ValueError` where there is no such layer."""
        if self.scheme not in (*SCHEMES, *KEPT):
            raise ValueError(f"scheme is {self.scheme}; one of {', '.join((*SCHEMES, *KEPT))} is wanted")
        allowed = pack_grouped.GROUPS if self.scheme in KEPT else pack.GROUPS
        if self.group_size not in allowed:
            raise ValueError(
                f"group_size is {self.group_size}; one of {', '.join(map(str, allowed))} is wanted"
            )
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(
                f"{self.in_features} input and {self.out_features} output features; both must be positive"
            )

    def shapes(self, *, bias: bool) -> dict[str, tuple[int, torch.dtype]]:
        """Tensor → number of elements and type."""
        rows, depth = -(-self.out_features // pack.PANEL) * pack.PANEL, self.depth
        count = rows * depth * {"bf16": 2, "w8a8": 1}.get(self.scheme, 0)
        if self.scheme in ("w4a8", "w4a16"):
            count = rows * depth // 2 + rows * depth // self.group_size
        if self.scheme in KEPT:
            count = rows * depth * KEPT[self.scheme] // 8 + rows * depth // self.group_size * 8
        found = {"packed": (count, torch.uint8)}
        if not self.scheme.endswith("bf16"):
            found["scale"] = (rows, torch.float32)
        if bias:
            found["bias"] = (self.out_features, torch.float32)
        return found


class PackedLinear(nn.Module):
    """y = x Wᵀ + b on a packed weight; x is float32 or bfloat16 (..., K), y has x's type.

    A row of y does not depend on the other rows of x, to the bit (on the compiled kernels). The bytes are laid out for
    the device that the layer is made for; on any other it computes in plain PyTorch.
    """

    for_gpu: bool
    """How its bytes lie."""
    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: str,
        *,
        group_size: int = 32,
        importance: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the layer will run, by default that of the weight; its tensors stay where they are.

        `importance`, for 4-bit weights: mean squares (K,) of the input features over calibration data, or the means of
        their products (K, K), with which errors are made up for (`gptq.py`).
        """
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.scheme, self.group_size = scheme, group_size
        self.form.check()
        self.for_gpu = gpu.takes(device or weight_NK.device)
        scale = None
        if scheme == "bf16":
            packed = self.layout.pack_bf16(weight_NK)
        elif scheme == "w8a8":
            integers, scale_N = pack.quantize_w8(weight_NK)
            packed, scale = self.layout.pack_w8(integers), _padded(scale_N)
        else:
            if importance is not None and importance.ndim == 2:
                integers, multipliers, scale_N = gptq_w4(weight_NK, group_size, importance)
            else:
                integers, multipliers, scale_N = pack.quantize_w4(weight_NK, group_size, importance)
            packed, scale = self.layout.pack_w4(integers, multipliers, group_size), _padded(scale_N)
        self.register_buffer("packed", lasting(packed))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias_N is None else bias_N.detach().float())

    @classmethod
    def from_integers(
        cls,
        integers_NK: torch.Tensor,
        scale_N: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: str,
        *,
        group_size: int = 32,
        device: torch.device,
    ) -> Self:
        """The layer of a weight that is integers · scale, one float a row: of 8 bits for w8a8, of 4 for the others.

        No number is rounded. `device` is where the layer will run.
        """
        N, K = integers_NK.shape
        form = PackedForm(scheme=scheme, in_features=K, out_features=N, group_size=group_size)
        for_gpu = gpu.takes(device)
        layout = ops.layout(for_gpu=for_gpu)
        if scheme == "w8a8":
            packed = layout.pack_w8(integers_NK)
        else:
            multipliers = torch.ones(N, -(-K // group_size), dtype=torch.int8)
            packed = layout.pack_w4(integers_NK, multipliers, group_size)
        tensors = {"packed": lasting(packed), "scale": _padded(scale_N.float())}
        if bias_N is not None:
            tensors["bias"] = bias_N.detach().float()
        return cls.from_packed(form, tensors, for_gpu=for_gpu)

    @classmethod
    def from_groups(
        cls,
        integers_NK: torch.Tensor,
        scale_NG: torch.Tensor,
        offset_NG: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: str,
        *,
        group_size: int,
    ) -> Self:
        """The layer, for a CPU, of a weight that is integers (uint8, from 0 on) · scale + offset; `scheme`: `KEPT`."""
        N, K = integers_NK.shape
        form = PackedForm(scheme=scheme, in_features=K, out_features=N, group_size=group_size)
        packed = pack_grouped.pack_grouped(integers_NK, scale_NG, offset_NG, group_size, KEPT[scheme])
        tensors = {"packed": lasting(packed)}
        if bias_N is not None:
            tensors["bias"] = bias_N.detach().float()
        return cls.from_packed(form, tensors)

    @classmethod
    def from_packed(
        cls, form: PackedForm, tensors: dict[str, torch.Tensor], *, for_gpu: bool = False
    ) -> Self:
        """The layer around tensors packed before: `packed`, and `scale` and `bias` where it has them.

        Raises `ValueError` where they do not fit the form: a kernel would read beyond them.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = form.in_features, form.out_features
        layer.scheme, layer.group_size = form.scheme, form.group_size
        layer.for_gpu = for_gpu
        form.check()
        expected = form.shapes(bias="bias" in tensors)
        found = {name: (tensor.numel(), tensor.dtype) for name, tensor in tensors.items()}
        if expected != found:
            raise ValueError(f"tensors {found} are not those of {form}: {expected}")
        for name in ("packed", "scale", "bias"):
            layer.register_buffer(name, tensors.get(name))
        return layer

    @property
    def layout(self) -> ModuleType:
        """The module that packs and unpacks its bytes."""
        return ops.layout(for_gpu=self.for_gpu)

    @property
    def form(self) -> PackedForm:
        return PackedForm(
            scheme=self.scheme,
            in_features=self.in_features,
            out_features=self.out_features,
            group_size=self.group_size,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(-1) != self.in_features:
            # The kernel counts in whole groups and would take a row that ends in the padding.
            raise ValueError(f"x has {x.shape[-1]} features; the layer takes {self.in_features}")
        kernels = ops.on(x.device, x.dtype)
        if kernels is None or (kernels is ops.triton) != self.for_gpu:
            return self.reference(x)
        # A small layer takes a few microseconds, and `self.packed` half of one: `nn.Module` searches for it.
        tensors, scheme = self._buffers, self.scheme
        if scheme == "bf16":
            return kernels.linear_bf16(x, tensors["packed"], tensors["bias"], self.out_features)
        packed, scale, bias = tensors["packed"], tensors["scale"], tensors["bias"]
        if scheme in KEPT:
            return kernels.linear_grouped(x, packed, bias, self.out_features, self.group_size, KEPT[scheme])
        if scheme == "w8a8":
            return kernels.linear_w8a8(x, packed, scale, bias, self.out_features)
        op = kernels.linear_w4a8 if scheme == "w4a8" else kernels.linear_w4a16
        return op(x, packed, scale, bias, self.out_features, self.group_size)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch: the weight made wide, activations rounded as the scheme rounds them."""
        wide = x.float() if x.dtype != torch.float64 else x
        if self.scheme.endswith("bf16"):
            wide = x.bfloat16().to(wide.dtype)
        else:
            peak = wide.abs().amax(-1, keepdim=True)
            levels = reference.LEVELS_16 if self.scheme.endswith("a16") else reference.LEVELS_8
            wide = torch.round(wide * reference.steps(peak, levels)) * (peak / levels)
        y = nn.functional.linear(wide, self.wide_weight().to(wide.dtype))
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)

    def wide_weight(self) -> torch.Tensor:
        """The weight that the integers stand for, as the layer computes with it, float32 (N, K)."""
        depth = self.form.depth
        if self.scheme == "bf16":
            wide = self.layout.unpack_bf16(self.packed, self.out_features, depth).float()
        elif self.scheme in KEPT:
            wide = pack_grouped.unpack_grouped(
                self.packed, self.out_features, depth, self.group_size, KEPT[self.scheme]
            )
            wide = wide.bfloat16().float()
        else:
            assert self.scale is not None
            if self.scheme == "w8a8":
                wide = self.layout.unpack_w8(self.packed, self.out_features, depth).float()
            else:
                integers, times = self.layout.unpack_w4(
                    self.packed, self.out_features, depth, self.group_size
                )
                wide = integers.float() * times.float().repeat_interleave(self.group_size, 1)
            wide *= self.scale[: self.out_features, None]
        return wide[:, : self.in_features]

    def extra_repr(self) -> str:
        group = "" if self.scheme in ("bf16", "w8a8") else f", group_size={self.group_size}"
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme}{group}"


def _padded(scale_N: torch.Tensor) -> torch.Tensor:
    """Scales of whole panels."""
    return nn.functional.pad(scale_N, (0, -len(scale_N) % pack.PANEL))
