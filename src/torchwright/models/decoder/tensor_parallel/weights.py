"""One process's part of a decoder's weights: rows of the layers that go into a block, columns of those that leave it.

Column-wise, then row-wise (Shoeybi et al., 2019): queries, keys, values, gate and up are divided by heads and features,
so that what a block computes with them needs no other process; the output projection and down take the inputs that the
process has, and give its part of a sum. A bias of theirs is in the first process alone, because sums add it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.pack import finite
from torchwright.hub.checkpoint import Checkpoint
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.tensor_parallel.shape import Place
from torchwright.models.decoder.weight_rows import Rows, linear_rows, row_order
from torchwright.models.decoder.weights import DecoderWeights

WHOLE = ("query_in", "latent")
"""Linear layers of latent attention that every process has: what all heads share."""
LEAVING = ("o", "down")


class MakePart(Protocol):
    """`MakeLinear` that can keep some input features of a weight, rounded as in the whole."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, columns: range | None = None, /
    ) -> nn.Module: ...


class DividedWeights(DecoderWeights):
    """`DecoderWeights` of the whole configuration, whose linear layers are one process's part."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        make_part: MakePart,
        device: torch.device,
        place: Place,
        *,
        rounded: bool,
    ) -> None:
        super().__init__(config, checkpoint, dtype, make_part, device, rounded=rounded)
        self.make_part, self.place = make_part, place

    def linear(self, layer: int, part: str) -> nn.Module:
        rows = linear_rows(self.config, self.names, part)
        order_N = row_order(self.config, layer, part, len(rows.names))
        wide_NK, bias_N = self._whole(layer, rows, order_N)
        if part in WHOLE:
            return self._rows(rows.names[0], wide_NK, bias_N, [range(len(wide_NK))])
        if part in LEAVING:
            return self._columns(rows.names[0], wide_NK, bias_N)
        if part == "qkv":
            return self._rows(rows.names[0], wide_NK, bias_N, self._heads())
        return self._rows(rows.names[0], wide_NK, bias_N, self._blocks(rows.counts))

    def sinks(self, layer: int) -> torch.Tensor:
        own = self.place.of(self.config.heads)
        return super().sinks(layer)[own.start : own.stop].clone()

    def from_latent(self, layer: int, part: str) -> HeadLinears:
        own = self.place.of(self.config.heads)
        return HeadLinears(self._from_latent(layer, part)[own.start : own.stop], device=self.device)

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        """The output layer of this process's part of the vocabulary."""
        name, wide_VE = self._output(embedding_VE)
        if wide_VE is None:
            wide_VE = self._stack([name], [(self.config.vocabulary, self.config.model)])
        return self._rows(name, wide_VE, None, self._blocks([self.config.vocabulary]))

    def _linear(self, layer: int, rows: Rows, order_N: torch.Tensor | None = None) -> nn.Module:
        """A linear layer of an expert: gate and up are two blocks of rows, down is one."""
        wide_NK, bias_N = self._whole(layer, rows, order_N)
        if len(rows.counts) == 1:
            return self._columns(rows.names[0], wide_NK, bias_N)
        return self._rows(rows.names[0], wide_NK, bias_N, self._blocks(rows.counts))

    def _made(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Module:
        """A linear layer of an expert, where a file holds those of all in one tensor."""
        if name == self.names.expert_down:
            return self._columns(name, weight_NK, bias_N)
        return self._rows(name, weight_NK, bias_N, self._blocks([len(weight_NK) // 2] * 2))

    def _heads(self) -> list[range]:
        """Its rows of queries, keys and values, and of the gate of the output where queries come with one."""
        config, D = self.config, self.config.head_dim
        q, kv = self.place.of(config.heads * D), self.place.of_heads(config.kv_heads, D)
        starts = [0, config.heads * D, (config.heads + config.kv_heads) * D]
        blocks = [_moved(part, start) for part, start in zip((q, kv, kv), starts, strict=True)]
        gate = _moved(q, (config.heads + 2 * config.kv_heads) * D)
        return [*blocks, gate] if config.output_gate else blocks

    def _blocks(self, counts: Sequence[int]) -> list[range]:
        """Its rows of blocks of so many, one below the other."""
        return [_moved(self.place.of(count), sum(counts[:block])) for block, count in enumerate(counts)]

    def _rows(
        self, name: str, wide_NK: torch.Tensor, bias_N: torch.Tensor | None, blocks: Sequence[range]
    ) -> nn.Module:
        self._check(name, wide_NK)
        parts = [wide_NK[block.start : block.stop] for block in blocks]
        # A tied output layer stays a view of the embedding.
        own_NK = parts[0] if len(parts) == 1 else torch.cat(parts)
        bias = None if bias_N is None else torch.cat([bias_N[block.start : block.stop] for block in blocks])
        return self.make_part(own_NK, bias)

    def _columns(self, name: str, wide_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Module:
        self._check(name, wide_NK)
        bias = bias_N if self.place.rank == 0 else None
        return self.make_part(wide_NK, bias, self.place.of(wide_NK.shape[1]))

    def _check(self, name: str, wide_NK: torch.Tensor) -> None:
        if self.rounded:
            finite(wide_NK, name)


def _moved(part: range, start: int) -> range:
    return range(part.start + start, part.stop + start)
