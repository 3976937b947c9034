"""The interface of a checkpoint format, and the table of formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

from torchwright.core.errors import ModelError
from torchwright.core.registry import Registry
from torchwright.hub.fields import Fields
from torchwright.hub.files import TOGETHER, TensorFiles
from torchwright.hub.weight import Plain, Weight

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Format(ABC):
    """A way in which checkpoints keep their weights, opened from a folder and its `quantization_config`.

    Tensors go by the names that the model has for them. Raises `ModelError` for settings and tensors that are not
    understood: a weight is read right or not at all.
    """

    name: ClassVar[str]
    """Its `quantization_config.quant_method`, under which it is registered."""

    @classmethod
    @abstractmethod
    def check(cls, settings: Fields) -> None:
        """Refuse settings that are not read here, before any tensor is."""

    @abstractmethod
    def __init__(self, folder: Path, settings: Fields) -> None: ...

    @abstractmethod
    def __str__(self) -> str:
        """In words for the user: "AWQ int4, group 128"."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The model's tensors."""

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Check whether this tensor is quantized."""

    @abstractmethod
    def weight(self, name: str) -> Weight:
        """A tensor; its memory is good until `close`."""

    @abstractmethod
    def where(self, name: str) -> Path:
        """The file of a tensor."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files' memory."""


class TensorFormat(Format):
    """A format that keeps each quantized weight as several tensors of safetensors files."""

    main: ClassVar[str]
    """The last part of the name of a tensor that every quantized weight has, and no other."""
    others: ClassVar[tuple[str, ...]]
    """And of those that belong to it."""

    def __init__(self, folder: Path, settings: Fields) -> None:
        self.check(settings)
        self.settings = settings
        self.files = TensorFiles(folder)

    @abstractmethod
    def quantized(self, base: str) -> Weight:
        """The weight of the module `base` ("model.layers.0.mlp.down_proj"); a `ValueError` says what is wrong."""

    def names(self) -> Iterable[str]:
        for name in self.files.names():
            base, _, part = name.rpartition(".")
            if part == self.main:
                yield f"{base}.weight"
            elif part not in ("weight", *self.others) or not self.holds(f"{base}.weight"):
                yield name

    def holds(self, name: str) -> bool:
        base, _, part = name.rpartition(".")
        return part == "weight" and f"{base}.{self.main}" in self.files

    def weight(self, name: str) -> Weight:
        if not self.holds(name):
            return Plain(self.files.get(name))
        with as_format_says(name, self.where(name)):
            return self.quantized(name.removesuffix(".weight"))

    def where(self, name: str) -> Path:
        quantized = name.removesuffix("weight") + self.main if self.holds(name) else name
        return self.files.path(quantized)

    def close(self) -> None:
        self.files.close()


@contextmanager
def as_format_says(name: str, file: Path) -> Iterator[None]:
    """Raise `ModelError`, naming the weight and its file, for a `ValueError` of the block."""
    try:
        yield
    except ValueError as error:
        raise ModelError(
            f"the weight '{name}' in {file} is not as its format says", found=str(error), next=TOGETHER
        ) from error


def expect(what: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor; raises `ValueError` where it has another shape or type."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{what} is {list(tensor.shape)} of {tensor.dtype}, and {list(shape)} of {wanted} is wanted"
        )
    return tensor


formats = Registry[type[Format]](
    "checkpoint format",
    group="torchwright.formats",
    builtins={
        "awq": "torchwright.hub.formats.awq:Awq",
        "gptq": "torchwright.hub.formats.gptq:Gptq",
        "compressed-tensors": "torchwright.hub.formats.compressed:CompressedTensors",
        "fp8": "torchwright.hub.formats.fp8:Fp8",
        "mxfp4": "torchwright.hub.formats.mxfp4:Mxfp4",
        "bitsandbytes": "torchwright.hub.formats.bitsandbytes:BitsAndBytes",
        "torchao": "torchwright.hub.formats.torchao:TorchAOFormat",
        "gguf": "torchwright.hub.formats.gguf:Gguf",
    },
)
"""By `quantization_config.quant_method`."""
