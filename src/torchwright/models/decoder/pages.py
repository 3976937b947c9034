"""Pages of keys and values: what a cache hands to the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchwright.hardware.kernels.reference import PAGE, PAIRED


@dataclass(frozen=True)
class PageShape:
    """One layer's keys and values of a token: so many heads of one size."""

    kv_heads: int
    head_dim: int

    def bytes_of(self, dtype: torch.dtype) -> int:
        """Bytes of one page; int8 has a float32 scale for each token and head."""
        vector = self.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * self.kv_heads * PAGE * vector


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, in the layouts of `hardware/kernels/reference.py`; scales only where they are int8."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def head_dim(self) -> int:
        return self.v.shape[-2 if self.v.dim() == PAIRED else -1]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Keys, values and their scales, as the kernels take them."""
        return self.k, self.v, self.k_scale, self.v_scale

    def copy(self, source: int, target: int) -> None:
        for pages in self.tensors:
            if pages is not None:
                pages[target] = pages[source]
