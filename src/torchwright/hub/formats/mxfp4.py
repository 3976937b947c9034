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
from torchwright.hub.weight import FloatStack, Plain, SmallFloats, Weight

BLOCK = 32
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

        def part(expert: int) -> SmallFloats:
            pairs_NGK = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2)
            return SmallFloats(codes_NK=pairs_NGK.flatten(1), scales_NG=scales[expert], bits=4)

        return FloatStack(shape=(experts, groups * BLOCK, rows), bits=4, group=BLOCK, part=part)
