"""AWQ (Lin et al., 2023), in AutoAWQ's "gemm" layout: 4-bit weights in groups along the input, with zeros.

qweight (K, N/8) int32     eight output features a word, in the order of `PLACES`
qzeros  (K/group, N/8)     the same
scales  (K/group, N)       float16
"""

from __future__ import annotations

import torch

from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat, expect
from torchwright.hub.unpack import unpack
from torchwright.hub.weight import Grouped, Integers, Weight

PLACES = (0, 16, 4, 20, 8, 24, 12, 28)
"""The position of each of the eight features' bits in a word."""
BITS, IN_A_WORD = 4, 8


class Awq(TensorFormat):
    name = "awq"
    main, others = "qweight", ("qzeros", "scales")

    @classmethod
    def check(cls, settings: Fields) -> None:
        if settings.integer("bits", BITS) != BITS:
            raise settings.wrong("bits", f"{BITS}")
        for key in ("version", "format"):
            if settings.text(key, "gemm").lower() != "gemm":
                raise settings.wrong(key, "gemm: the layouts of other kernels are not read")
        if settings.integer("group_size", 128, minimum=-1) == 0:
            raise settings.wrong("group_size", "a number of inputs, or -1 for whole rows")

    def __str__(self) -> str:
        group = self.settings.integer("group_size", 128, minimum=-1)
        return f"AWQ int{BITS}, {'one scale a row' if group < 0 else f'group {group}'}"

    def quantized(self, base: str) -> Weight:
        words, zeros = self.files.get(f"{base}.qweight"), self.files.get(f"{base}.qzeros")
        scales = self.files.get(f"{base}.scales")
        if words.ndim != 2 or scales.ndim != 2 or not words.numel() or not scales.numel():
            raise ValueError(f"qweight is {list(words.shape)}, scales are {list(scales.shape)}")
        K, N, G = len(words), scales.shape[1], len(scales)
        group = self.settings.integer("group_size", 128, minimum=-1)
        group = K if group < 0 else group
        expect("qweight", words, (K, N // IN_A_WORD), torch.int32)
        expect("qzeros", zeros, (G, N // IN_A_WORD), torch.int32)
        expect("scales", scales, (-(-K // group), N), *READABLE)

        def part(begin: int, end: int) -> Integers:
            first, last = begin // IN_A_WORD, -(-end // IN_A_WORD)
            inside = slice(begin - first * IN_A_WORD, end - first * IN_A_WORD)
            return Integers.of_unsigned(
                unpack(words[:, first:last], PLACES, BITS)[:, inside].T,
                scales[:, begin:end].T,
                unpack(zeros[:, first:last], PLACES, BITS)[:, inside].T,
                BITS,
            )

        return Grouped(shape=(N, K), bits=BITS, group=group, part=part)
