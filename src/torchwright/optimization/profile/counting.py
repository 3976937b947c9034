# pyright: basic
"""Operations and bytes of one call of an operator, from what the profiler has seen of its inputs: sizes and types."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.optimization.profile.kinds import is_pointwise
from torchwright.optimization.profile.values import Kind

DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Half": ("float16", 2),
    "unsigned char": ("int8", 1),
    "signed char": ("int8", 1),
    "c10::qint8": ("int8", 1),
    "c10::quint8": ("int8", 1),
    "bool": ("bool", 1),
    "short int": ("int16", 2),
    "int": ("int32", 4),
    "long int": ("int64", 8),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
}
"""C++'s names of types, as the profiler has them → ours and their bytes."""
COMPUTING = ("matmul", "convolution", "attention")
"""Kinds whose operations are counted; for other kinds only bytes are."""
FIRST = re.compile(
    r"^(native_layer_norm|layer_norm|native_group_norm|native_batch_norm|_?softmax|_log_softmax|cumsum|rms_norm"
    r"|_fused_rms_norm|masked_fill|fill_|zero_|roll|flip|hardswish|hardsigmoid|hardtanh)$"
)
"""Operators whose output is as large as their first input."""
REDUCTIONS = re.compile(r"^(sum|mean|amax|amin|argmax|argmin|max|min|any|all|prod|std|var)$")
"""Operators whose output is small; of two tensors some of them take the larger values."""


@dataclass(frozen=True)
class Tensor:
    """The known facts of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class CountedWork:
    """The work of one call; None where it is not known."""

    operations: int | None
    bytes: int | None
    dtype: str


def count(
    name: str, kind: Kind, shapes: Sequence[Any], dtypes: Sequence[str], values: Sequence[Any]
) -> CountedWork | None:
    """Return the operations and bytes of one call of `name`; None where the profiler recorded too little."""
    tensors = [_tensor(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    there = [tensor for tensor in tensors if tensor and tensor.count]  # an output yet to be made is empty
    if not there:
        return None
    try:
        if kind in COMPUTING:
            return _computed(name, kind, there, _named(name, values))
        if kind in ("memory-bound", "casts", "copies"):
            return _moved(name, there)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
        return None  # an operator of this name that has other inputs than the one that was meant
    return None


def _computed(name: str, kind: Kind, there: list[Tensor], given: dict[str, Any]) -> CountedWork | None:
    moved = sum(tensor.bytes for tensor in there)
    base = name.rpartition("::")[2]
    if kind == "attention":
        q, k, v = there[:3]
        if "paged" in base or q.shape[-1] != k.shape[-1]:
            return None
        rows, columns = q.count // q.shape[-1], k.shape[-2]
        operations = 2 * rows * columns * (q.shape[-1] + v.shape[-1])
        moved = sum(tensor.bytes for tensor in (q, k, v)) + rows * v.shape[-1] * q.itemsize
    elif kind == "convolution":
        x, w = there[:2] if there[0].shape and len(there[1].shape) >= 3 else _image_and_filter(there)
        if "transpose" in base or given.get("transposed"):
            operations, moved = 2 * x.count * (w.count // w.shape[0]), None
        else:
            out = math.prod(_output(x, w, given))
            operations = 2 * out * (w.count // w.shape[0])
            moved += out * x.itemsize
    else:
        rows, inner, columns = _product(base, there, given)
        operations = 2 * rows * inner * columns
        out = rows * columns * there[0].itemsize
        moved = sum(tensor.bytes for tensor in there) + out
        if base == "_mkl_linear":  # which is given its weight twice
            moved -= there[1].bytes
    return CountedWork(operations, moved, _computing_dtype(base, there))


def _product(base: str, there: list[Tensor], given: dict[str, Any]) -> tuple[int, int, int]:
    """(rows, inner size, columns) of a matrix product; a batch counts as rows."""
    if "features" in given:  # Torchwright's own, whose weights are packed
        x = there[0]
        return x.count // x.shape[-1], x.shape[-1], int(given["features"])
    if base.startswith(("addmm", "_addmm", "baddbmm", "addmv")):
        a, b = there[1:3]
    elif base == "_mkl_linear":
        a, b = there[0], there[2]
    else:
        a = there[0]
        b = next(tensor for tensor in there[1:] if len(tensor.shape) > 1) if "linear" in base else there[1]
    inner = a.shape[-1]
    if len(b.shape) == 3 and len(a.shape) == 3:
        return a.count // inner, inner, b.shape[-1]
    return a.count // inner, inner, b.count // inner


def _image_and_filter(there: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The input and the weight of a quantized convolution, which has scales between the two."""
    x, w = [tensor for tensor in there if len(tensor.shape) >= 3][:2]
    return x, w


def _output(x: Tensor, w: Tensor, given: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a convolution's output."""
    sizes = len(w.shape) - 2
    stride, padding, dilation = (_numbers(given[key], sizes) for key in ("stride", "padding", "dilation"))
    batch = x.shape[0] if len(x.shape) == sizes + 2 else 1
    places = [
        (x.shape[i - sizes] + 2 * padding[i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(sizes)
    ]
    return batch, w.shape[0], *places


def _moved(name: str, there: list[Tensor]) -> CountedWork | None:
    base = name.rpartition("::")[2]
    inputs = sum(tensor.bytes for tensor in there)
    if base == "copy_":  # which is given its output
        return CountedWork(None, inputs, there[0].dtype)
    if REDUCTIONS.match(base) and (len(there) == 1 or not is_pointwise(name)):
        return CountedWork(None, inputs, there[0].dtype)
    if is_pointwise(name):
        size = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in there)))
        return CountedWork(None, inputs + size * max(tensor.itemsize for tensor in there), there[0].dtype)
    if FIRST.match(base):
        return CountedWork(None, inputs + there[0].bytes, there[0].dtype)
    if base == "embedding":
        row = there[0].shape[-1] * there[0].itemsize
        return CountedWork(None, 2 * there[1].count * row, there[0].dtype)
    return None


def _computing_dtype(base: str, there: list[Tensor]) -> str:
    """The type that products are made in, by which the machine's rates are named."""
    if base.endswith("a8"):
        return "int8"
    if base.endswith(("a16", "linear_bf16")):
        return "bfloat16"
    return there[0].dtype


def dtype_name(dtype: str) -> str:
    """Our name of a type that the profiler names as C++ does."""
    return DTYPES[dtype][0] if dtype in DTYPES else dtype


@functools.cache
def _names(name: str, count: int) -> tuple[str, ...]:
    """The names of an operator's arguments, of its overload that has so many."""
    for schema in torch._C._jit_get_schemas_for_operator(name) if "::" in name else ():
        if len(schema.arguments) == count:
            return tuple(argument.name for argument in schema.arguments)
    return ()


def _named(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Arguments other than tensors, by their names."""
    return {key: _parsed(value) for key, value in zip(_names(name, len(values)), values, strict=False)}


def _parsed(value: Any) -> Any:
    """Numbers come as they are, or as text."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value) if value else None
    except (SyntaxError, ValueError):
        return None


def _numbers(value: Any, count: int) -> list[int]:
    """One number for each dimension, of which torch also takes one for all."""
    found = [int(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return found * count if len(found) == 1 else found


def _tensor(shape: Any, dtype: str) -> Tensor | None:
    if dtype not in DTYPES or not all(isinstance(size, int) for size in shape):
        return None
    name, itemsize = DTYPES[dtype]
    return Tensor(tuple(shape), name, itemsize)
