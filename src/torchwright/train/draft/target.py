"""The target of a draft: its hidden states and next-token probabilities, by the decoder that will serve it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.folder import resolve
from torchwright.models.decoder.batch import FeatureRows
from torchwright.models.decoder.config import UnsupportedArchitecture
from torchwright.models.decoder.generation.generate import PREFILL_CHUNK
from torchwright.models.decoder.load import load_decoder

ROWS = 256
"""Rows whose logits over the whole vocabulary are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """A micro-batch's hidden states by the decoder; zeros where nothing is trained on."""

    observed_BTF: torch.Tensor
    """The inputs of the observed layers, one behind the other."""
    final_BTE: torch.Tensor
    """The final norm's output, which the output layer reads."""


class TargetModel:
    """A loaded target, and what a head reads of its layers."""

    def __init__(self, folder: str, dtype: str, quantize: str | None, device: str) -> None:
        """Raises `ModelError` for a model that does not run on the native decoder."""
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        try:
            self.loaded = load_decoder(folder, kinds[dtype], quantize, device=device)
        except UnsupportedArchitecture as error:
            raise ModelError(
                f"no draft can be trained for {folder}",
                found="a model that does not run on Torchwright's own decoder, whose layers a head reads",
                allowed="the families of docs/decoder.md",
            ) from error
        self.decoder = self.loaded.decoder
        self.folder: Path = resolve(folder)

    def hidden_states(
        self,
        observed: tuple[int, ...],
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        documents_BT: torch.Tensor | None,
    ) -> HiddenStates:
        """The states of windows; `documents_BT` is as in `WindowBatch`, and `labels_BT` negative where not trained on.

        Every document is a sequence of its own. One without labels is left out.
        """
        like = self.decoder.embedding
        B, T = ids_BT.shape
        observed_NF = like.new_zeros(B * T, len(observed) * like.shape[1])
        final_NE = like.new_zeros(B * T, like.shape[1])
        spans = list(_spans(labels_BT.cpu(), None if documents_BT is None else documents_BT.cpu()))
        if spans:
            self._compute(observed, ids_BT.flatten().tolist(), spans, observed_NF, final_NE)
        return HiddenStates(
            observed_BTF=observed_NF.unflatten(0, (B, T)), final_BTE=final_NE.unflatten(0, (B, T))
        )

    @torch.inference_mode()
    def _compute(
        self,
        observed: tuple[int, ...],
        ids_N: list[int],
        spans: Sequence[range],
        observed_NF: torch.Tensor,
        final_NE: torch.Tensor,
    ) -> None:
        cache = self.loaded.new_cache([len(span) for span in spans])
        sequences = [cache.sequence(len(span)) for span in spans]
        for part in _chunks(spans, PREFILL_CHUNK):
            pieces = [(sequences[number], ids_N[places.start : places.stop]) for number, places in part]
            rows_T = torch.cat([torch.arange(places.start, places.stop) for _, places in part])
            rows_T = rows_T.to(final_NE.device)
            features = FeatureRows(observed, observed_NF.new_empty(len(rows_T), observed_NF.shape[1]))
            with self.loaded.on_threads():
                hidden_TE = self.decoder(replace(cache.append(pieces), features=features), cache)
            observed_NF[rows_T] = features.values_TF
            final_NE[rows_T] = hidden_TE
            for number, places in part:
                if places.stop == spans[number].stop:
                    cache.free(sequences[number])

    def probabilities(self, final_NE: torch.Tensor, ids_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token's probabilities (N, D) at temperature 1 of the tokens `ids_D`, and the likeliest of all."""
        chances_ND = final_NE.new_empty(len(final_NE), len(ids_D), dtype=torch.float32)
        best_N = ids_D.new_empty(len(final_NE))
        with torch.inference_mode(), self.loaded.on_threads():
            for start in range(0, len(final_NE), ROWS):
                here = slice(start, start + ROWS)
                logits_NV = self.decoder.logits(final_NE[here])
                best_N[here] = logits_NV.argmax(-1)
                some_ND = logits_NV if len(ids_D) == logits_NV.shape[1] else logits_NV[:, ids_D]
                chances_ND[here] = (some_ND - logits_NV.logsumexp(-1, keepdim=True)).exp()
        return chances_ND, best_N


def _spans(labels_BT: torch.Tensor, documents_BT: torch.Tensor | None) -> Iterator[range]:
    """The places of each document in which anything is trained on, counted over all rows."""
    B, T = labels_BT.shape
    for row in range(B):
        begins = [0] if documents_BT is None else documents_BT[row].unique_consecutive().tolist()
        for begin, end in zip(begins, [*begins[1:], T], strict=True):
            if end > begin and bool((labels_BT[row, begin:end] >= 0).any()):
                yield range(row * T + begin, row * T + end)


def _chunks(spans: Sequence[range], most: int) -> Iterator[list[tuple[int, range]]]:
    """Pieces of the spans in their order, `most` places together at the most, with the number of each one's span."""
    part, room = list[tuple[int, range]](), most
    for number, span in enumerate(spans):
        start = span.start
        while start < span.stop:
            count = min(room, span.stop - start)
            part.append((number, range(start, start + count)))
            start, room = start + count, room - count
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
