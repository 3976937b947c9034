"""Linear layers over packed weights: the modules that hold them, and what they compute in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.scheme import GROUPS, Scheme, scheme_of
from torchwright.hardware.kernels import ops, pack, pack_floats, pack_grouped, reference
from torchwright.hardware.kernels.cpu.memory import lasting
from torchwright.hardware.kernels.gptq import gptq_w4
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.pack_grouped import Layout
from torchwright.hub.weight import SmallFloats


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """The form of a packed layer, without its numbers."""

    scheme: Scheme
    in_features: int
    out_features: int
    layout: Layout = Layout.LANES
    """The layout of a checkpoint's integers. Other weights have only one."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read the result of `as_dict`, which may be untrusted; raises `ValueError` for an impossible layer."""
        values = {**data}
        scheme = scheme_of(values.pop("scheme"), values.pop("group_size"))
        layout = Layout(values.pop("layout", Layout.LANES))
        if layout and not pack_grouped.fits_tiles(scheme):
            raise ValueError(f"layout is {layout}; weights of {scheme} have no tiles")
        return cls(scheme=scheme, layout=layout, **values)

    def as_dict(self) -> dict[str, Any]:
        """Plain data. A layer without groups has a size of them too, because readers of this form ask for one."""
        return {
            "scheme": self.scheme.name,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "group_size": self.scheme.group or GROUPS[0],
            **({"layout": int(self.layout)} if self.layout else {}),
        }

    @property
    def depth(self) -> int:
        """Input features as the kernels count them."""
        return pack.padded_depth(self.in_features, self.scheme.group or 0)

    def check(self) -> None:
        """Raise `ValueError` for an impossible layer."""
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(
                f"{self.in_features} input and {self.out_features} output features; both must be positive"
            )

    def shapes(self, *, bias: bool) -> dict[str, tuple[int, torch.dtype]]:
        """Tensor → number of elements and type."""
        rows = -(-self.out_features // pack.PANEL) * pack.PANEL
        found = {"packed": (pack_grouped.bytes_of(self.scheme, rows * self.depth, self.layout), torch.uint8)}
        if self.scheme.scaled:
            found["scale"] = (rows, torch.float32)
        if bias:
            found["bias"] = (self.out_features, torch.float32)
        return found


class PackedLinear(nn.Module):
    """y = x Wᵀ + b on a packed weight; x is float32 or bfloat16 (..., K), y has x's type.

    A row of y depends, bitwise, only on its own row of x (on the compiled kernels). The bytes are laid out for
    the device that the layer is made for; on any other it computes in plain PyTorch.
    """

    for_gpu: bool
    """The layout of the bytes."""
    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: Scheme,
        *,
        importance: torch.Tensor | None = None,
        device: torch.device | None = None,
        columns: range | None = None,
    ) -> None:
        """`device` is where the layer will run, by default that of the weight; its tensors stay where they are.

        `importance`, for 4-bit weights: mean squares (K,) of the input features over calibration data, or the means of
        their products (K, K), which correct errors (`gptq.py`). `columns` are the input features that the layer keeps,
        all by default; they are rounded as in the whole weight. Raises `ValueError` where they cut a group.
        """
        super().__init__()
        if scheme.kept:
            raise ValueError(f"no weight is rounded to {scheme}: it keeps numbers that were chosen elsewhere")
        N, K = weight_NK.shape
        columns = range(K) if columns is None else columns
        own = slice(columns.start, columns.stop)
        if scheme.group and (own.start % scheme.group or (own.stop % scheme.group and own.stop < K)):
            raise ValueError(f"input features {own.start} to {own.stop} cut a group of {scheme.group}")
        form = PackedForm(scheme=scheme, in_features=len(columns), out_features=N)
        self._begin(form, for_gpu=gpu.takes(device or weight_NK.device))
        scale = None
        if scheme.weight_bits == 16:
            packed = self.layout.pack_bf16(weight_NK[:, own])
        elif scheme.weight_bits == 8:
            integers, scale_N = pack.quantize_w8(weight_NK)
            packed, scale = self.layout.pack_w8(integers[:, own].contiguous()), _padded(scale_N)
        else:
            assert scheme.group
            if importance is not None and importance.ndim == 2:
                integers, multipliers, scale_N = gptq_w4(weight_NK, scheme.group, importance)
            else:
                integers, multipliers, scale_N = pack.quantize_w4(weight_NK, scheme.group, importance)
            groups = slice(own.start // scheme.group, -(-own.stop // scheme.group))
            packed = self.layout.pack_w4(integers[:, own].contiguous(), multipliers[:, groups], scheme.group)
            scale = _padded(scale_N)
        self.register_buffer("packed", lasting(packed))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias_N is None else bias_N.detach().float())

    def _begin(self, form: PackedForm, *, for_gpu: bool) -> None:
        """Everything but the tensors."""
        form.check()
        scheme = form.scheme
        self.scheme, self.for_gpu, self._form = scheme, for_gpu, form
        self.in_features, self.out_features = form.in_features, form.out_features
        # What the operator is given besides its input, settled here: a small layer takes but a few microseconds.
        self._operator = scheme.operator
        self._tensors = ("packed", "scale", "bias") if scheme.scaled else ("packed", "bias")
        self._numbers = (form.out_features, *([scheme.group] if scheme.group else []))
        if scheme.kept:
            self._numbers += (scheme.weight_bits, scheme.floats, int(form.layout))

    @classmethod
    def from_integers(
        cls,
        integers_NK: torch.Tensor,
        scale_N: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: Scheme,
        *,
        device: torch.device,
    ) -> Self:
        """The layer of a weight that is integers of the scheme's bits · scale, one float a row.

        No number is rounded. `device` is where the layer will run.
        """
        N, K = integers_NK.shape
        form = PackedForm(scheme=scheme, in_features=K, out_features=N)
        for_gpu = gpu.takes(device)
        layout = ops.layout(for_gpu=for_gpu)
        if scheme.group is None:
            packed = layout.pack_w8(integers_NK)
        else:
            multipliers = torch.ones(N, -(-K // scheme.group), dtype=torch.int8)
            packed = layout.pack_w4(integers_NK, multipliers, scheme.group)
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
        scheme: Scheme,
    ) -> Self:
        """The layer, for a CPU, of a weight that is integers (uint8, from 0 on) · scale + offset.

        `scheme` is one of `INTEGERS`.
        """
        layout = pack_grouped.layout_here(scheme, scale_NG, offset_NG)
        packed = pack_grouped.pack_grouped((integers_NK, scale_NG, offset_NG), scheme, layout)
        return cls._kept(packed, integers_NK.shape, bias_N, scheme, layout)

    @classmethod
    def from_floats(cls, floats: SmallFloats, bias_N: torch.Tensor | None, scheme: Scheme) -> Self:
        """The layer, for a CPU, of a weight of small floats that are `packable`; `scheme` is one of `FLOATS`."""
        return cls._kept(pack_floats.pack_floats(floats, scheme), floats.codes_NK.shape, bias_N, scheme)

    @classmethod
    def _kept(
        cls,
        packed: torch.Tensor,
        shape: Sequence[int],
        bias_N: torch.Tensor | None,
        scheme: Scheme,
        layout: Layout = Layout.LANES,
    ) -> Self:
        form = PackedForm(scheme=scheme, in_features=shape[1], out_features=shape[0], layout=layout)
        tensors = {"packed": lasting(packed)}
        if bias_N is not None:
            tensors["bias"] = bias_N.detach().float()
        return cls.from_packed(form, tensors)

    @classmethod
    def from_packed(
        cls, form: PackedForm, tensors: dict[str, torch.Tensor], *, for_gpu: bool = False
    ) -> Self:
        """The layer around tensors packed before: `packed`, and `scale` and `bias` where it has them.

        Integers that were laid out for another processor are laid out again. Raises `ValueError` where tensors do not
        fit the form: a kernel would read beyond them.
        """
        form.check()
        expected = form.shapes(bias="bias" in tensors)
        found = {name: (tensor.numel(), tensor.dtype) for name, tensor in tensors.items()}
        if expected != found:
            raise ValueError(f"tensors {found} are not those of {form}: {expected}")
        if bool(form.layout) != pack_grouped.wants_tiles(form.scheme):
            packed, layout = pack_grouped.repack_here(tensors["packed"], form.depth, form.scheme, form.layout)
            form, tensors = replace(form, layout=layout), {**tensors, "packed": lasting(packed)}
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._begin(form, for_gpu=for_gpu)
        for name in ("packed", "scale", "bias"):
            layer.register_buffer(name, tensors.get(name))
        return layer

    @property
    def layout(self) -> ModuleType:
        """The module that packs and unpacks its bytes."""
        return ops.layout(for_gpu=self.for_gpu)

    @property
    def form(self) -> PackedForm:
        return self._form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(-1) != self.in_features:
            # The kernel counts in whole groups and would take a row that ends in the padding.
            raise ValueError(f"x has {x.shape[-1]} features; the layer takes {self.in_features}")
        kernels = ops.on(x.device, x.dtype)
        if kernels is None or (kernels is ops.triton) != self.for_gpu:
            return self.reference(x)
        # `self.packed` takes half a microsecond, because `nn.Module` searches for it.
        tensors = self._buffers
        operator = getattr(kernels, self._operator)
        return operator(x, *[tensors[name] for name in self._tensors], *self._numbers)

    def planned(self) -> tuple[Any, ...]:
        """Return the tensors and numbers of `DecodePlan.add_linear` for the plan of a decode step."""
        scheme = self.scheme
        sizes = self.in_features, self.out_features, scheme.group or 0, scheme.weight_bits, scheme.digits
        return self.packed, self.scale, self.bias, *sizes, scheme.floats, int(self._form.layout)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch: the weight made wide, activations rounded as the scheme rounds them."""
        wide = x.float() if x.dtype != torch.float64 else x
        if self.scheme.input_bits is None:
            wide = x.bfloat16().to(wide.dtype)
        else:
            peak = wide.abs().amax(-1, keepdim=True)
            levels = reference.LEVELS[self.scheme.input_bits]
            wide = torch.round(wide * reference.steps(peak, levels)) * (peak / levels)
        y = nn.functional.linear(wide, self.wide_weight().to(wide.dtype))
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)

    def wide_weight(self) -> torch.Tensor:
        """The weight that the integers stand for, as the layer computes with it, float32 (N, K)."""
        scheme, depth = self.scheme, self.form.depth
        if scheme.kept:
            wide = self._wide_kept().bfloat16().float()
        elif scheme.weight_bits == 16:
            wide = self.layout.unpack_bf16(self.packed, self.out_features, depth).float()
        elif scheme.weight_bits == 8:
            wide = self.layout.unpack_w8(self.packed, self.out_features, depth).float()
        else:
            integers, times = self.layout.unpack_w4(self.packed, self.out_features, depth, scheme.group)
            wide = integers.float() * times.float().repeat_interleave(scheme.group, 1)
        if self.scale is not None:
            wide *= self.scale[: self.out_features, None]
        return wide[:, : self.in_features]

    def _wide_kept(self) -> torch.Tensor:
        """The numbers of a checkpoint (N, depth), before they are rounded to bfloat16."""
        scheme, depth = self.scheme, self.form.depth
        assert scheme.group
        if scheme.floats:
            floats = pack_floats.unpack_floats(self.packed, self.out_features, depth, scheme)
            return floats.wide(scheme.group)
        integers, *heads = pack_grouped.unpack_grouped(
            self.packed, self.out_features, depth, scheme, self._form.layout
        )
        scale, offset = (head.repeat_interleave(scheme.group, 1) for head in heads)
        return integers * scale + offset

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme}"


def _padded(scale_N: torch.Tensor) -> torch.Tensor:
    """Scales of whole panels."""
    return nn.functional.pad(scale_N, (0, -len(scale_N) % pack.PANEL))
