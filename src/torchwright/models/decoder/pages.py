"""Pages of keys and values: what a cache hands to the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, in the layouts of `hardware/kernels/reference.py`; scales only where they are int8."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def copy(self, source: int, target: int) -> None:
        for pages in (self.k, self.v, self.k_scale, self.v_scale):
            if pages is not None:
                pages[target] = pages[source]
