"""torchao's safetensors: each quantized tensor in parts, and its class and block size in the files' headers.

_weight_qdata (N, K) int8 or float8, _weight_scale, _weight_zero_point where it is not symmetric
"""

from __future__ import annotations

import json

import torch

from torchwright.core.json_file import decode_json
from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import READABLE, TensorFormat
from torchwright.hub.formats.scaled import FLOAT8, scaled
from torchwright.hub.weight import Weight

CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
PARTS = {"qdata", "scale", "zero_point"}
LONGEST = 1 << 16
"""Characters of one tensor's description."""


class TorchAOFormat(TensorFormat):
    name = "torchao"
    main, others = "_weight_qdata", ("_weight_scale", "_weight_zero_point")

    @classmethod
    def check(cls, settings: Fields) -> None:
        """Accept all settings: the files' headers describe the weights."""

    def __str__(self) -> str:
        described = set(self.files.metadata().values())
        kinds = [kind for kind in CLASSES if any(json.dumps(kind) in text for text in described)]
        return f"torchao {' and '.join(kinds)}"

    def quantized(self, base: str) -> Weight:
        block = self._block(base)
        values, scale = self.files.get(f"{base}._weight_qdata"), self.files.get(f"{base}._weight_scale")
        if values.dtype not in (torch.int8, FLOAT8) or scale.dtype not in READABLE:
            raise ValueError(f"it holds {values.dtype} with scales of {scale.dtype}")
        name = f"{base}._weight_zero_point"
        zeros = self.files.get(name) if name in self.files else None
        if zeros is not None and not bool(zeros.any()):
            zeros = None
        # A block may be said to be larger than the weight, which is one of its size.
        extents = None if block is None else [min(pair) for pair in zip(block, values.shape, strict=True)]
        return scaled(values, scale, None if extents is None else (extents[0], extents[1]), zeros)

    def _block(self, base: str) -> tuple[int, int] | None:
        """Rows and columns of a block, where the description of a weight has them."""
        text = self.files.metadata().get(f"{base}.weight", "")
        if len(text) > LONGEST:
            raise ValueError(f"its description has {len(text):,} characters")
        described = decode_json((text or "{}").encode())
        found = Fields("the description", described if isinstance(described, dict) else {})
        if found.text("_type", "") not in CLASSES:
            raise found.wrong("_type", ", ".join(CLASSES))
        parts = found.data.get("_tensor_data_names")
        if not isinstance(parts, list) or not PARTS.issuperset(map(str, parts)):
            raise found.wrong("_tensor_data_names", ", ".join(sorted(PARTS)))
        data = found.section("_data")
        if not data.data.get("block_size"):
            return None
        rows, columns = (int(size) for size in data.numbers("block_size", 2))
        if min(rows, columns) < 1:
            raise data.wrong("block_size", "two whole numbers")
        return rows, columns
