"""compressed-tensors, as llm-compressor writes them: 4- and 8-bit integers and float8, by tensor, row, group or block.

weight_packed (N, K·bits/32) int32   "pack-quantized"; values follow each other in a word, each + 2^(bits−1)
weight        (N, K) int8, float8    "int-quantized", "float-quantized", "naive-quantized"
weight_scale                         one, (N, 1), (N, K/group) or (N/rows, K/columns)
weight_zero_point                    packed along N where the weights are; absent where they are symmetric
weight_g_idx  (K,)                   each input's group, in files from before 2026
weight_shape  (2,)                   of packed weights
"""

from __future__ import annotations

from typing import Any

import torch

from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat, expect
from torchwright.hub.formats.gptq import order_of
from torchwright.hub.formats.scaled import FLOAT8, scaled
from torchwright.hub.unpack import in_order, unpack
from torchwright.hub.weight import Grouped, Integers, Weight

PACKED = "pack-quantized"
LAYOUTS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"
"""Groups of layers each with a layout of its own."""


class CompressedTensors(TensorFormat):
    name = "compressed-tensors"
    main = "weight_scale"
    others = (
        "weight_packed",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )

    @classmethod
    def check(cls, settings: Fields) -> None:
        layout = settings.text("format", "")
        if layout not in (*LAYOUTS, MIXED):
            raise settings.wrong("format", ", ".join((*LAYOUTS, MIXED)))
        if settings.text("quantization_status", "compressed") != "compressed":
            raise settings.wrong("quantization_status", "compressed")
        for key in ("sparsity_config", "transform_config"):
            if settings.data.get(key):
                raise settings.wrong(key, "none: neither sparse weights nor rotations are read")
        for group in cls.schemes(settings):
            if group.text("format", layout) not in (*LAYOUTS, MIXED):
                raise group.wrong("format", ", ".join(LAYOUTS))
            weights = group.section("weights")
            if weights.integer("num_bits") not in (4, 8):
                raise weights.wrong("num_bits", "4 or 8")
            if weights.text("type", "int") not in ("int", "float"):
                raise weights.wrong("type", "int or float")

    @staticmethod
    def schemes(settings: Fields) -> list[Fields]:
        """The groups of layers that are quantized alike."""
        groups = settings.section("config_groups")
        if not groups.data:
            raise settings.wrong("config_groups", "at least one group of layers")
        return [groups.section(name) for name in groups.data]

    def __str__(self) -> str:
        kinds = dict.fromkeys(_scheme(group.section("weights")) for group in self.schemes(self.settings))
        return f"compressed-tensors {' and '.join(kinds)}"

    def quantized(self, base: str) -> Weight:
        scale = self.files.get(f"{base}.weight_scale")
        if scale.dtype not in READABLE:
            raise ValueError(f"its scales are {scale.dtype}")
        if f"{base}.weight_packed" in self.files:
            return self._packed(base, scale)
        values, zeros = self.files.get(f"{base}.weight"), self._optional(base, "weight_zero_point")
        if values.dtype not in (torch.int8, FLOAT8):
            raise ValueError(f"it holds {values.dtype}, not int8 or {FLOAT8}")
        dynamic = self._int8_rows() if values.dtype == torch.int8 and zeros is None else None
        return scaled(values, scale, self._block(scale, tuple(values.shape)), zeros, activations=dynamic)

    def _packed(self, base: str, scale: torch.Tensor) -> Weight:
        words = self.files.get(f"{base}.weight_packed")
        N, K = expect(
            "weight_shape", self.files.get(f"{base}.weight_shape"), (2,), torch.int64, torch.int32
        ).tolist()
        if words.ndim != 2 or len(words) != N or K < 1 or not scale.numel():
            raise ValueError(f"weight_packed is {list(words.shape)} for a weight of {[N, K]}")
        bits = next((bits for bits in (4, 8) if -(-K * bits // 32) == words.shape[1]), None)
        if bits is None:
            raise ValueError(f"{words.shape[1]} words for {K} values of 4 or 8 bits")
        expect("weight_packed", words, (N, words.shape[1]), torch.int32)
        G = max(1, scale.numel() // N)
        scales_NG = scale.reshape(-1, G).expand(N, G) if scale.numel() in (1, N * G) else None
        if scales_NG is None or K % G:
            raise ValueError(f"{list(scale.shape)} scales for {[N, K]}")
        packed = self._optional(base, "weight_zero_point")
        middle, zeros_NG = 1 << (bits - 1), None
        if packed is not None:
            expect("weight_zero_point", packed, (-(-N * bits // 32), G), torch.int32)
            zeros_NG = unpack(packed.T, in_order(bits), bits)[:, :N].T

        def part(begin: int, end: int) -> Integers:
            values = unpack(words[begin:end], in_order(bits), bits)[:, :K]
            zeros = torch.tensor(middle).expand(end - begin, G) if zeros_NG is None else zeros_NG[begin:end]
            return Integers.of_unsigned(values, scales_NG[begin:end], zeros, bits)

        order = self._optional(base, "weight_g_idx")
        return Grouped(
            shape=(N, K),
            bits=bits,
            group=K // G,
            part=part,
            group_of_K=None if order is None else order_of(order, K, G, K // G),
        )

    def _optional(self, base: str, part: str) -> torch.Tensor | None:
        name = f"{base}.{part}"
        return self.files.get(name) if name in self.files else None

    def _block(self, scale: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The block of those that the file describes whose number is that of the scales."""
        for group in self.schemes(self.settings):
            weights = group.section("weights")
            if weights.text("strategy", "") == "block":
                rows, columns = (int(size) for size in weights.numbers("block_structure", 2))
                if min(rows, columns) < 1:
                    raise weights.wrong("block_structure", "two whole numbers")
                if tuple(scale.shape) == (-(-shape[0] // rows), -(-shape[1] // columns)):
                    return rows, columns
        return None

    def _int8_rows(self) -> int | None:
        """8 where the inputs of all layers are rounded to int8, each row by its own largest."""
        inputs: list[Any] = [group.data.get("input_activations") for group in self.schemes(self.settings)]
        rounded = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
        alike = all(isinstance(item, dict) and rounded.items() <= item.items() for item in inputs)
        return 8 if alike else None


def _scheme(weights: Fields) -> str:
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "tensor")
    scales = {"tensor": "one scale a weight", "channel": "one scale a row"}.get(strategy, strategy)
    if strategy == "group":
        scales = f"group {weights.integer('group_size')}"
    return f"{'fp' if kind == 'float' else 'int'}{bits}, {scales}"
