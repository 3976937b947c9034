"""The tensors of a model folder, whatever format they are kept in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.core.scheme import ASKED
from torchwright.hub.fields import Fields
from torchwright.hub.files import TOGETHER
from torchwright.hub.formats.base import READABLE, Format, formats
from torchwright.hub.formats.plain import Unquantized
from torchwright.hub.tensor_names import file_names
from torchwright.hub.weight import Plain, Weight, fill

QUANTIZATION = "quantization_config"


def check_format(path: Path | str, config: dict[str, Any]) -> None:
    """Raises `ModelError` where a config.json asks for a format, or a kind of one, that is not read here."""
    kind, settings = _format(path, config)
    kind.check(settings)


class Checkpoint:
    """A folder's tensors, by the model's names for them.

    Raises `ModelError`, naming the file and the tensor, for a shard that is missing, cut short or damaged. So it does
    for a tensor that is missing, of another shape, or of a dtype that is neither a float nor the format's.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        kind, settings = _format(folder / "config.json", config)
        self.folder = folder
        self.format: Format = kind(folder, settings)
        self.quantized = kind is not Unquantized
        self._file_names = file_names(self.format.names(), config.get("model_type"))

    def __contains__(self, name: str) -> bool:
        return name in self._file_names

    def holds(self, name: str) -> bool:
        """Check whether a tensor is quantized."""
        return self.format.holds(self._file_name(name))

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a tensor of this shape; its memory is good until `close`."""
        name = self._file_name(name)
        found = self._weight(name)
        if found.shape != shape:
            raise ModelError(
                f"the tensor '{name}' in {self.format.where(name)} has another shape than config.json says",
                found=str(list(found.shape)),
                allowed=str(list(shape)),
                next=TOGETHER,
            )
        return found

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors under the model's names, wide and in memory of their own."""
        for name, file_name in self._file_names.items():
            found = self._weight(file_name)
            if isinstance(found, Plain):
                yield name, found.tensor.to(dtype, copy=True)
            else:
                out = torch.empty(found.shape, dtype=dtype)
                fill(out, found)
                yield name, out
            self.close()

    def close(self) -> None:
        """Let go of the files' memory; they open again when they are read."""
        self.format.close()

    def _file_name(self, name: str) -> str:
        return self._file_names.get(name, name)

    def _weight(self, name: str) -> Weight:
        found = self.format.weight(name)
        if isinstance(found, Plain) and found.tensor.dtype not in READABLE:
            raise ModelError(
                f"the tensor '{name}' in {self.format.where(name)} holds {found.tensor.dtype}",
                allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in READABLE),
                next="take the model's original, unquantized checkpoint",
            )
        return found


def _format(path: Path | str, config: dict[str, Any]) -> tuple[type[Format], Fields]:
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return Unquantized, Fields(path, {})
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in formats.names():
        raise ModelError(
            f"{path} describes a checkpoint quantized by {method or 'an unnamed method'}, which is not read here",
            found=f"{QUANTIZATION}.quant_method: {method}",
            allowed=f"{', '.join(formats.names())}; or weights in float32, bfloat16 or float16",
            next=f"take the model's original checkpoint and quantize it here with --quantize {'|'.join(ASKED)}",
        )
    return formats.get(method), Fields(path, quantization, f"{QUANTIZATION}.")
