"""bitsandbytes: 4-bit codes of a table of sixteen numbers in blocks (nf4 of Dettmers et al., 2023, and fp4), and int8.

weight (N·K/2, 1) uint8                 two codes a byte, the first in the high half
weight.absmax                           one scale a block of the flat weight; or a code in `nested_quant_map`, with
weight.nested_absmax, .nested_quant_map one scale for each block of those and an offset
weight.quant_map (16,)                  what a code stands for
weight.quant_state.bitsandbytes__nf4    JSON in bytes: shape, block sizes, offset

weight (N, K) int8, SCB (N,)            weight · SCB / 127
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from torchwright.core.json_file import decode_json
from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat, expect
from torchwright.hub.formats.scaled import scaled
from torchwright.hub.weight import Weight, Wide

KINDS = ("nf4", "fp4")
STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in KINDS)
PARTS = (*STATES, "absmax", "quant_map", "nested_absmax", "nested_quant_map")
LONGEST_STATE = 4096
"""Bytes of a weight's JSON."""
CODES, BYTE_CODES = 16, 256


class BitsAndBytes(TensorFormat):
    name = "bitsandbytes"
    main, others = "SCB", ("weight_format",)

    @classmethod
    def check(cls, settings: Fields) -> None:
        four, eight = settings.flag("load_in_4bit", False), settings.flag("load_in_8bit", False)
        if four == eight:
            raise settings.wrong("load_in_4bit", "true, or load_in_8bit")
        if four and settings.text("bnb_4bit_quant_type", "fp4") not in KINDS:
            raise settings.wrong("bnb_4bit_quant_type", " or ".join(KINDS))

    def __str__(self) -> str:
        if self.settings.flag("load_in_8bit", False):
            return "bitsandbytes int8, one scale a row"
        return f"bitsandbytes {self.settings.text('bnb_4bit_quant_type', 'fp4')}"

    def names(self) -> Iterable[str]:
        """A quantized weight has the name of its own first part."""
        endings = tuple(
            f".{part}" for part in (self.main, *self.others, *(f"weight.{part}" for part in PARTS))
        )
        return (name for name in self.files.names() if not name.endswith(endings))

    def holds(self, name: str) -> bool:
        return super().holds(name) or self._state(name) is not None

    def where(self, name: str) -> Path:
        return self.files.path(name)

    def quantized(self, base: str) -> Weight:
        name = f"{base}.weight"
        key = self._state(name)
        if key is not None:
            return self._codes(name, _described(self.files.get(key)))
        values, scale = self.files.get(name), self.files.get(f"{base}.SCB")
        if values.dtype != torch.int8 or scale.dtype not in READABLE:
            raise ValueError(f"it holds {values.dtype} with scales of {scale.dtype}")
        return scaled(values, scale.float() / 127, None)

    def _state(self, name: str) -> str | None:
        return next((f"{name}.{state}" for state in STATES if f"{name}.{state}" in self.files), None)

    def _codes(self, name: str, state: Fields) -> Weight:
        N, K = (int(extent) for extent in state.numbers("shape", 2))
        size = state.integer("blocksize")
        if N < 1 or K < 2 or K % 2:
            raise ValueError(f"its shape is {[N, K]}")
        packed = expect("the codes", self.files.get(name).flatten(), (N * K // 2,), torch.uint8)
        table = expect("quant_map", self.files.get(f"{name}.quant_map"), (CODES,), torch.float32)
        largest = self._largest(name, state, -(-N * K // size))

        def make(begin: int, end: int) -> torch.Tensor:
            first, last = begin * K, end * K
            pairs = packed[first // 2 : last // 2]
            codes = torch.stack([pairs >> 4, pairs & 15], 1).flatten()
            wide = table[codes.long()] * largest[torch.arange(first, last) // size]
            return wide.view(end - begin, K)

        return Wide((N, K), make)

    def _largest(self, name: str, state: Fields, blocks: int) -> torch.Tensor:
        """The largest magnitude (blocks,) of each block, which its codes are shares of."""
        found = self.files.get(f"{name}.absmax")
        if found.dtype != torch.uint8:
            return expect("absmax", found, (blocks,), torch.float32)
        size, offset = state.integer("nested_blocksize"), state.number("nested_offset")
        expect("absmax", found, (blocks,), torch.uint8)
        table = self.files.get(f"{name}.nested_quant_map")
        scale = self.files.get(f"{name}.nested_absmax")
        expect("nested_quant_map", table, (BYTE_CODES,), torch.float32)
        expect("nested_absmax", scale, (-(-blocks // size),), torch.float32)
        return table[found.long()] * scale[torch.arange(blocks) // size] + offset


def _described(tensor: torch.Tensor) -> Fields:
    """The JSON object in a tensor of bytes."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or len(tensor) > LONGEST_STATE:
        raise ValueError(f"its description is {list(tensor.shape)} of {tensor.dtype}")
    data = decode_json(bytes(tensor.tolist()))
    if not isinstance(data, dict):
        raise ValueError(f"its description is {type(data).__name__}")
    return Fields("the description", data)
