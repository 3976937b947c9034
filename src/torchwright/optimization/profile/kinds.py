# pyright: basic
"""The kind of work of an operator, by its name and its schema."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from torchwright.optimization.profile.values import Kind

SHIM = re.compile(r"^aoti_torch_(?:cpu|cuda)?_?(?:(?:mkldnn|mkl|onednn)__)?")
"""Names of operators in ahead-of-time compiled code."""
KERNEL = re.compile(r"^(?:graph_\d+_)?(?:cpp|triton)_(?:fused_)?(.*?)(?:_\d+)?$")
"""A kernel of Inductor's, with the operators that are in it."""
MATMUL = re.compile(
    r"^(_?int_mm|_?mm|_?addmm\w*|_?bmm|_?baddbmm|dot|mv|_?addmv|_?grouped_mm|_?scaled_mm|outer|ger"
    r"|\w*linear\w*|_?weight_int\w*_?mm\w*|\w*qlinear\w*|_?mkl_linear|sparse_\w*mm|_?addmm_activation|einsum)(_out|_)?$"
)
CONVOLUTION = re.compile(r"conv", re.IGNORECASE)
ATTENTION = re.compile(r"attention")
CASTS = re.compile(r"quantize|^_?to_dtype|^int_repr$|^choose_qparams")
COPIES = re.compile(r"^(copy_?|_to_copy|clone|contiguous|_?copy_from\w*|to_mkldnn|to_dense|\w*reorder\w*)$")
MEMORY_BOUND = re.compile(
    r"norm|softmax|pool|^(sum|mean|amax|amin|max|min|argmax|argmin|any|all|var|std|cumsum|prod|logsumexp|topk|sort"
    r"|embedding\w*|index\w*|_index\w*|gather|scatter\w*|cat|stack|\w*pad\w*|roll|flip|repeat\w*|triu|tril|nonzero"
    r"|upsample\w*|_?upsample\w*|grid_sampler\w*|masked_fill\w*|where|arange|linspace|zeros\w*|ones\w*|full\w*|fill_"
    r"|zero_|gated|rope_store|hardswish|hardsigmoid|hardtanh)(_out|_)?$"
)
MOVES_ONLY = re.compile(
    r"_to_copy|copy|clone|contiguous|transpose|permute|_unsafe_view|view|reshape|expand|unsqueeze|squeeze|slice"
    r"|select|split_with_sizes|split|unbind|_|\d|\bt\b"
)


def is_operator(name: str) -> bool:
    """Check whether a profiler's event of this name is a library's work, not a label around such work."""
    if name.startswith("##"):
        return False
    return "::" in name or name.startswith("aoti_torch_") or KERNEL.match(name) is not None


@functools.cache
def kind_of(name: str) -> Kind:
    """The kind of an operator as the profiler names it."""
    kernel = KERNEL.match(name)
    if kernel:
        if MOVES_ONLY.sub("", kernel[1]) == "":
            return "casts" if "_to_copy" in kernel[1] else "copies"
        return "fused kernels"
    base = SHIM.sub("", name.rpartition("::")[2])
    if ATTENTION.search(base):
        return "attention"
    if CONVOLUTION.search(base):
        return "convolution"
    if CASTS.search(base):
        return "casts"
    if COPIES.match(base):
        return "copies"
    if MATMUL.match(base):
        return "matmul"
    if MEMORY_BOUND.search(base) or is_pointwise(name):
        return "memory-bound"
    return "dispatch" if _makes_nothing(name) or _is_composite(name) else "other"


@functools.cache
def is_pointwise(name: str) -> bool:
    """Check whether the operator is pointwise, by torch's own tag."""
    packet = _packet(name)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


@functools.cache
def _makes_nothing(name: str) -> bool:
    """Check whether the operator is a view, an allocation or a release of memory."""
    base = name.rpartition("::")[2]
    if re.match(
        r"^(empty|resize_|set_|detach|resolve_|lift_fresh|as_strided|item|is_nonzero)|^_local_scalar", base
    ):
        return True
    packet = _packet(name)
    if packet is None:
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for schema in schemas
        for result in schema.returns
    )


def _is_composite(name: str) -> bool:
    """Check whether the operator consists only of other operators, on every device."""
    packet = _packet(name)
    if packet is None:
        return False
    names = [getattr(packet, overload).name() for overload in packet.overloads()]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, "CompositeImplicitAutograd") for name in names)


def _packet(name: str) -> Any:
    """torch's object for an operator, or None."""
    space, _, base = name.rpartition("::")
    try:
        return getattr(getattr(torch.ops, space), base) if space else None
    except (AttributeError, RuntimeError):
        return None
