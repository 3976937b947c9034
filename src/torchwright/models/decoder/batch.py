"""The input of one forward call: new tokens of several sequences, laid out one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchwright.models.decoder.low_rank import AdaptedRows, Adapter
from torchwright.models.decoder.pages import LayerPages


@dataclass(frozen=True)
class Remembered:
    """The memory of each sequence of a batch (`memory.py`)."""

    layers: Sequence[LayerPages]
    """Its keys and values, a layer of the decoder after the other."""
    block_tables_BP: torch.Tensor
    """int32, as in a `Batch`."""
    lengths_B: torch.Tensor
    """int32."""


@dataclass(frozen=True)
class StateRows:
    """The slots of a batch's states, and of copies that layers make on the way (`kernels/recurrent.py`); all int64."""

    slots_B: torch.Tensor
    mark_rows_N: torch.Tensor
    mark_slots_N: torch.Tensor


@dataclass(frozen=True)
class WholePictures:
    """Rows whose attention reaches to the end of their picture, as sequences of their own (Gemma 3)."""

    rows_N: torch.Tensor
    """int64, one picture after the other."""
    block_tables_BP: torch.Tensor
    query_starts: torch.Tensor
    context_lens_B: torch.Tensor
    """int32, as in a `Batch`."""


@dataclass(frozen=True)
class PictureRows:
    """Rows of a batch that begin with embeddings of pictures, in place of a token's."""

    rows_N: torch.Tensor
    """int64."""
    embeddings_NE: torch.Tensor
    deep: Sequence[torch.Tensor] = ()
    """(N, E) each: what is added behind the first layers (deepstack of Qwen3-VL)."""
    whole: WholePictures | None = None


@dataclass(frozen=True)
class FeatureRows:
    """The inputs of some layers, which a forward call writes for a draft (`draft/`)."""

    layers: tuple[int, ...]
    """The number of layers stands for the final norm's output."""
    values_TF: torch.Tensor
    """(T, observed layers · E) in the type of the residual stream."""

    def note(self, layer: int, delta_TE: torch.Tensor | None, stream_TE: torch.Tensor) -> None:
        """Write a layer's input, the sum of its two parts, where it is observed."""
        for place, observed in enumerate(self.layers):
            if observed == layer:
                E = stream_TE.shape[1]
                self.values_TF[:, place * E : place * E + E] = (
                    stream_TE if delta_TE is None else stream_TE + delta_TE
                )


@dataclass(frozen=True)
class Batch:
    """T new tokens of B sequences, and where their keys and values lie."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    """int64, as are ids and slots."""
    slots_T: torch.Tensor
    """page · 16 + place: where each token's key and value go."""
    lengths_T: torch.Tensor
    """The length that a length-dependent rotary embedding reads for each token (`rope.py`), int64."""
    block_tables_BP: torch.Tensor
    """Pages of each sequence in order, int32; places past its end are 0 and not read."""
    query_starts: torch.Tensor
    """(B + 1,) int32: sequence b's tokens are rows `query_starts[b]` to `query_starts[b + 1]`."""
    context_lens_B: torch.Tensor
    """Length of each sequence after these tokens, int32."""
    last_rows_B: torch.Tensor
    """The row of each sequence's last token, int64."""
    longest: int
    """The largest length, or the largest position of a picture's token and one more, known without reading a tensor."""
    memory: Remembered | None = None
    """For a decoder that attends to one."""
    states: StateRows | None = None
    """For a model with layers that keep a state of each sequence."""
    axes_AT: torch.Tensor | None = None
    """Positions (3, T) in time, height and width, int64, by which rotary embeddings with sections turn; None where all
    three are `positions_T`. None is beyond the context."""
    pictures: PictureRows | None = None
    inputs_TLI: torch.Tensor | None = None
    """Each token's input of each layer, for a model whose layers have one (`layer_inputs.py`)."""
    adapted: AdaptedRows | None = None
    """Rows that adapters change."""
    features: FeatureRows | None = None
    """The layers' inputs that are wanted."""


def with_adapters(batch: Batch, pieces: Sequence[tuple[Adapter | None, int]]) -> Batch:
    """Return the batch with its adapted rows; a piece is a sequence's adapter and how many tokens it has, in order."""
    if not any(adapter for adapter, _ in pieces):
        return batch
    return replace(batch, adapted=AdaptedRows.of(pieces, batch.ids_T.device))
