"""MXFP4 experts, as gpt-oss has them (Open Compute Project, 2023): 4-bit floats with a power of two for each 32.

NAME_blocks   (X, N, K/32, 16) uint8: two numbers a byte, the first in the lower half
NAME_scales   (X, N, K/32) uint8: the exponent, 127 for 1
NAME          (X, K, N), as the model calls it: each expert's weight transposed
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from torchwright.hub.fields import Fields
from torchwright.hub.files import TensorFiles
from torchwright.hub.formats.base import Format, as_format_says, expect
from torchwright.hub.weight import Plain, Weight, Wide

BLOCK, BIAS = 32, 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The number of each three low bits; the highest bit is the sign."""
MAIN, OTHER = "_blocks", "_scales"


class Mxfp4(Format):
    name = "mxfp4"

    @classmethod
    def check(cls, settings: Fields) -> None:
        pass  # it has no settings but the layers that it leaves out, which the file shows

    def __init__(self, folder: Path, settings: Fields) -> None:
        self.files = TensorFiles(folder)

    def __str__(self) -> str:
        return "MXFP4"

    def names(self) -> Iterable[str]:
        for name in self.files.names():
            if name.endswith(MAIN):
                yield name.removesuffix(MAIN)
            elif not (name.endswith(OTHER) and self.holds(name.removesuffix(OTHER))):
                yield name

    def holds(self, name: str) -> bool:
        return name + MAIN in self.files

    def weight(self, name: str) -> Weight:
        if not self.holds(name):
            return Plain(self.files.get(name))
        with as_format_says(name, self.where(name)):
            return self._quantized(name)

    def where(self, name: str) -> Path:
        return self.files.path(name + MAIN if self.holds(name) else name)

    def close(self) -> None:
        self.files.close()

    def _quantized(self, name: str) -> Weight:
        blocks, scales = self.files.get(name + MAIN), self.files.get(name + OTHER)
        if blocks.ndim != 4 or not blocks.numel():
            raise ValueError(f"its blocks are {list(blocks.shape)}, and four dimensions are wanted")
        experts, rows, groups, _ = blocks.shape
        expect("its blocks", blocks, (experts, rows, groups, BLOCK // 2), torch.uint8)
        expect("its scales", scales, (experts, rows, groups), torch.uint8)
        return Wide(
            (experts, groups * BLOCK, rows),
            lambda begin, end: _wide(blocks[begin:end], scales[begin:end]).transpose(1, 2),
        )


def _wide(blocks_XNGB: torch.Tensor, scales_XNG: torch.Tensor) -> torch.Tensor:
    """The numbers (X, N, K) in float32."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    pairs = torch.stack([blocks_XNGB & 15, blocks_XNGB >> 4], dim=-1).flatten(-2)
    exponents = (scales_XNG.int() - BIAS)[..., None]
    return torch.ldexp(table[pairs.long()], exponents).flatten(-2)
