"""Refusal of weights that cannot fit into memory, before any of them is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.core.scheme import ASKED, Scheme
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.hub.checkpoint import QUANTIZATION
from torchwright.hub.gguf.folder import FILE
from torchwright.hub.language_part import loaded_tensors
from torchwright.hub.tensor_header import Stored, read_header


@dataclass(frozen=True)
class WeightCount:
    """The numbers in a folder's weights."""

    matrices: int
    """In weights of linear layers, which a scheme rounds."""
    others: int
    """In embeddings and norms."""

    def bytes_of(self, scheme: Scheme | None, dtype: torch.dtype, ways: int = 1) -> int:
        """Bytes in memory, in a scheme or in the model's dtype; of one process among `ways` that divide matrices."""
        own = self.matrices // ways
        matrices = own * dtype.itemsize if scheme is None else scheme.bytes_of(own)
        return matrices + self.others * dtype.itemsize


def count_weights(folder: Path, described: dict[str, Any]) -> WeightCount:
    """Count the numbers in a folder's safetensors by their headers; in a multimodal one the language model's alone."""
    loaded = loaded_tensors(described)
    matrices = others = 0
    for tensors in _headers(folder):
        for name, tensor in tensors.items():
            if not loaded(name):
                continue
            if len(tensor.shape) > 1 and "embed" not in name:
                matrices += math.prod(tensor.shape)
            else:
                others += math.prod(tensor.shape)
    return WeightCount(matrices, others)


def stored_bytes(folder: Path, described: dict[str, Any]) -> int:
    """Return the bytes of a folder's tensors as they lie in its files; a GGUF file counts whole."""
    loaded = loaded_tensors(described)
    gguf = folder / FILE
    total = gguf.stat().st_size if gguf.is_file() else 0
    for tensors in _headers(folder):
        total += sum(tensor.end - tensor.begin for name, tensor in tensors.items() if loaded(name))
    return total


def _headers(folder: Path) -> Iterator[dict[str, Stored]]:
    """The tensors of each safetensors file; a header that cannot be read has none: reading it says what is wrong."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            yield read_header(file)
        except (OSError, ValueError):
            continue


def require_memory(
    folder: Path,
    described: dict[str, Any],
    scheme: Scheme | None,
    dtype: torch.dtype,
    *,
    schemes: bool = True,
    available: int | None = None,
    ways: int = 1,
) -> None:
    """Raise `ModelError` where a folder's weights, or the part of one of `ways` processes, exceed the free memory.

    With `schemes` the error names one that fits. A quantized checkpoint whose numbers stay as they are takes at least
    the bytes of its files; any other is not counted.
    """
    quantized = described.get(QUANTIZATION) is not None
    available = available_memory_bytes() if available is None else available
    if quantized and (scheme is not None or dtype != torch.bfloat16):
        return
    count = count_weights(folder, described)
    needed = stored_bytes(folder, described) if quantized else count.bytes_of(scheme, dtype, ways)
    if needed <= available:
        return
    schemes &= not quantized
    fitting = [
        other for other in ASKED.values() if schemes and count.bytes_of(other, dtype, ways) <= available
    ]
    best = max(fitting, key=lambda other: other.weight_bits, default=None)
    raise ModelError(
        f"the weights of {folder} do not fit into memory",
        found=f"about {_gb(needed)} needed, {_gb(available)} free",
        next="take a smaller model, or a machine with more memory"
        if best is None
        else f"--quantize {best.name} takes about {_gb(count.bytes_of(best, dtype, ways))}",
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
