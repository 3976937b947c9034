"""Matrices that FSDP gathers rounded by rows: 8 bits for a number, and 8 for the power of two of a row.

The rowwise float8 recipes round a matrix by rows for the forward pass. For the gradient of the input they round it by
columns, or as a whole. One gathered form serves both, because their scales are powers of two. Under any of them float8
keeps the same four significant bits of a number. It loses bits of numbers `LOST` times smaller than the largest
of their row or column. The layers round again as ever; by rows that changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchwright.core.quiet import quiet_import

LOST = 224 * 2**6
"""A row's largest number lies above 224 once it is scaled, and float8_e4m3 loses bits below 2^-6."""
_KEPT = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
}
"""Operators by which tensor parallelism and FSDP divide, move and copy a matrix: what they give is gathered so too."""


class GatheredByRows(torch.Tensor):
    """A matrix of which FSDP gathers the rounded rows; for everything else it is the matrix itself."""

    _matrix_NK: torch.Tensor

    @staticmethod
    def __new__(cls, matrix_NK: torch.Tensor) -> GatheredByRows:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            matrix_NK.size(),
            strides=matrix_NK.stride(),
            storage_offset=matrix_NK.storage_offset(),
            dtype=matrix_NK.dtype,
            layout=matrix_NK.layout,
            device=matrix_NK.device,
            requires_grad=matrix_NK.requires_grad,
        )

    def __init__(self, matrix_NK: torch.Tensor) -> None:
        self._matrix_NK = matrix_NK

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each._matrix_NK, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, found) if func in _KEPT else found

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_matrix_NK"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> GatheredByRows:
        return GatheredByRows(inner["_matrix_NK"])

    def __repr__(self, **_: Any) -> str:
        return f"GatheredByRows({self._matrix_NK})"

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
        return round_rows(self._matrix_NK), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, torch.Tensor],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Write the whole matrix as `dtype`, and let the 8 bits go: the layers round it again."""
        rounded_NK, unit_N1 = gathered
        if out is None:
            whole_NK = torch.empty_like(rounded_NK, dtype=dtype)
        else:
            whole_NK = out.to_local() if isinstance(out, DTensor) else out
        # The backward pass gathers what the forward pass had: autograd must not take it for another value.
        with torch.autograd._unsafe_preserve_version_counter(whole_NK):  # pyright: ignore[reportPrivateImportUsage]
            whole_NK.copy_(rounded_NK).mul_(unit_N1.to(dtype))
        for each in gathered:
            each.untyped_storage().resize_(0)
        return (whole_NK, (whole_NK,)) if out is None else None


def gather_by_rows(layer: nn.Linear) -> None:
    """Have FSDP gather a layer's matrix rounded by rows."""
    layer.weight = nn.Parameter(
        GatheredByRows(layer.weight.detach()), requires_grad=layer.weight.requires_grad
    )


def round_rows(matrix_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows in float8, as torchao rounds them, and the power of two that one of each row's units is.

    A row with a number that is not finite has NaN as its unit.
    """
    dtype, scale, saturated = _rounding()
    scale_N1 = scale(matrix_NK.abs().amax(1, keepdim=True), dtype, round_scales_to_power_of_2=True)
    return saturated(matrix_NK.float() * scale_N1, dtype), scale_N1.reciprocal().to(torch.float8_e8m0fnu)


@functools.cache
def _rounding() -> tuple[torch.dtype, Any, Any]:
    """Return torchao's type of number, how it takes a scale, and how it rounds."""
    with quiet_import():
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
    return e4m3_dtype, amax_to_scale, to_fp8_saturated
