"""Block FP8, as DeepSeek-V3 and Qwen3 have it: float8 weights with one float32 scale for each block.

weight            (N, K) float8_e4m3fn
weight_scale_inv  (N/128, K/128) float32: weight · scale is the value; one number where there are no blocks
"""

from __future__ import annotations

from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat
from torchwright.hub.formats.scaled import FLOAT8, scaled
from torchwright.hub.weight import Weight


class Fp8(TensorFormat):
    name = "fp8"
    main, others = "weight_scale_inv", ("input_scale", "activation_scale")

    @classmethod
    def check(cls, settings: Fields) -> None:
        if settings.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise settings.wrong("fmt", "e4m3")
        cls.block(settings)

    @staticmethod
    def block(settings: Fields) -> tuple[int, int] | None:
        """Rows and columns of a block, or None where a weight has one scale."""
        if settings.data.get("weight_block_size") is None:
            return None
        sizes = settings.numbers("weight_block_size", 2)
        if not all(size >= 1 and size == int(size) for size in sizes):
            raise settings.wrong("weight_block_size", "two whole numbers")
        return int(sizes[0]), int(sizes[1])

    def __str__(self) -> str:
        block = self.block(self.settings)
        return f"FP8, {'one scale a weight' if block is None else f'blocks of {block[0]} x {block[1]}'}"

    def quantized(self, base: str) -> Weight:
        values, scale = self.files.get(f"{base}.weight"), self.files.get(f"{base}.weight_scale_inv")
        if values.dtype != FLOAT8:
            raise ValueError(f"it holds {values.dtype}, not {FLOAT8}")
        if scale.dtype not in READABLE:
            raise ValueError(f"its scales are {scale.dtype}")
        return scaled(values, scale, self.block(self.settings))
