"""GPTQ (Frantar et al., 2022), in AutoGPTQ's layout: integers in groups along the input, with zeros.

qweight (K·bits/32, N) int32      input features follow each other in a word
qzeros  (K/group, N·bits/32)      output features do; each less one, but in "gptq_v2"
scales  (K/group, N)              float16
g_idx   (K,) int32                each input's group; in order unless the columns were quantized by activation order
"""

from __future__ import annotations

import torch

from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat, expect
from torchwright.hub.unpack import in_order, unpack
from torchwright.hub.weight import Grouped, Integers, Weight

WIDTHS = (2, 4, 8)
"""Bits that fill a word."""


class Gptq(TensorFormat):
    name = "gptq"
    main, others = "qweight", ("qzeros", "scales", "g_idx")

    @classmethod
    def check(cls, settings: Fields) -> None:
        if settings.integer("bits") not in WIDTHS:
            raise settings.wrong("bits", " or ".join(map(str, WIDTHS)))
        if settings.integer("group_size", minimum=-1) == 0:
            raise settings.wrong("group_size", "a number of inputs, or -1 for whole rows")
        key = "checkpoint_format"
        if settings.text(key, "gptq") not in ("gptq", "gptq_v2"):
            raise settings.wrong(key, "gptq or gptq_v2: the layouts of other kernels are not read")

    def __str__(self) -> str:
        bits, group = self.settings.integer("bits"), self.settings.integer("group_size", minimum=-1)
        order = ", by activation order" if self.settings.flag("desc_act", False) else ""
        return f"GPTQ int{bits}, {'one scale a row' if group < 0 else f'group {group}'}{order}"

    def quantized(self, base: str) -> Weight:
        bits = self.settings.integer("bits")
        words, zeros = self.files.get(f"{base}.qweight"), self.files.get(f"{base}.qzeros")
        scales = self.files.get(f"{base}.scales")
        if words.ndim != 2 or scales.ndim != 2 or not words.numel() or not scales.numel():
            raise ValueError(f"qweight is {list(words.shape)}, scales are {list(scales.shape)}")
        K, N, G = len(words) * 32 // bits, words.shape[1], len(scales)
        group = self.settings.integer("group_size", minimum=-1)
        group = K if group < 0 else group
        expect("qweight", words, (K * bits // 32, N), torch.int32)
        expect("qzeros", zeros, (G, N * bits // 32), torch.int32)
        expect("scales", scales, (-(-K // group), N), *READABLE)
        less_one = int(self.settings.text("checkpoint_format", "gptq") == "gptq")
        zeros_NG = ((unpack(zeros, in_order(bits), bits) + less_one) & (2**bits - 1)).T

        def part(begin: int, end: int) -> Integers:
            return Integers.of_unsigned(
                unpack(words[:, begin:end].T, in_order(bits), bits),
                scales[:, begin:end].T,
                zeros_NG[begin:end],
                bits,
            )

        name = f"{base}.g_idx"
        order = order_of(self.files.get(name), K, G, group) if name in self.files else None
        return Grouped(shape=(N, K), bits=bits, group=group, part=part, group_of_K=order)


def order_of(index: torch.Tensor, K: int, G: int, group: int) -> torch.Tensor | None:
    """Return each input's group, or None if they are in order; raises `ValueError` for a group that does not exist."""
    order = expect("g_idx", index, (K,), torch.int32, torch.int64).long()
    if torch.equal(order, torch.arange(K) // group):
        return None
    if int(order.min()) < 0 or int(order.max()) >= G:
        raise ValueError(f"g_idx names groups from {int(order.min())} to {int(order.max())} of {G}")
    return order
