"""A vision-language model in training: its encoder stays as it is, and the language model's layers have adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.models.decoder.axes import axes_of_batch
from torchwright.models.decoder.shown import Embedded, joined
from torchwright.models.decoder.transformers_backend.pictures import (
    CannotShow,
    form_of,
    handed,
    token_arguments,
)
from torchwright.models.vision.load import LANGUAGE
from torchwright.models.vision.on_transformers import shows_on_transformers
from torchwright.train.media.model import Media, trained
from torchwright.train.media.samples import MediaBatch
from torchwright.train.model.vocabulary import IGNORE
from torchwright.workloads.huggingface import load_model


class ShownMedia(Media):
    """A model of text and pictures, whose pictures are encoded by themselves.

    Raises `ModelError` for a model that cannot be given the results of its encoder.
    """

    def __init__(self, network: Any, folder: Path) -> None:
        super().__init__(network)
        self.vision, sample = shows_on_transformers(folder)(network)
        try:
            self.form = form_of(network, self.vision, sample)
        except CannotShow as error:
            raise ModelError(
                f"{type(network).__name__} cannot be trained on pictures", found=str(error)
            ) from error

    @property
    def layers(self) -> list[nn.Module]:
        """Those of the language model."""
        base: Any = self.network.base_model
        language = next((getattr(base, name) for name in LANGUAGE if hasattr(base, name)), base)
        return [layer for stack in language.children() if isinstance(stack, nn.ModuleList) for layer in stack]

    def loss(self, batch: MediaBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = self.network(**self._arguments(batch)).logits
        labels = batch.labels.flatten()
        logits = logits_BTV.flatten(0, -2).float()
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return nll, (logits.detach().argmax(-1) == labels).sum()[None].to(nll.dtype)

    def _arguments(self, batch: MediaBatch) -> dict[str, Any]:
        """The forward call's arguments for rows with pictures."""
        ids_BT, pictures = batch.inputs["input_ids"], batch.inputs["pictures"]
        self.vision.device = ids_BT.device  # where the model has been moved
        found = token_arguments(ids_BT, self.vision.tokens, self.form)
        found |= {"attention_mask": batch.inputs["attention_mask"], "use_cache": False}
        axes = [self.vision.axes(ids, row) for ids, row in zip(ids_BT.tolist(), pictures, strict=True)]
        positions_AT = axes_of_batch((one, range(ids_BT.shape[1])) for one in axes)
        if positions_AT is not None:
            positions = torch.from_numpy(positions_AT.copy()).to(ids_BT.device)
            found["position_ids"] = positions.view(len(positions), *ids_BT.shape)
        shown = [picture for row in pictures for picture in row]
        return found | (handed(self._embedded(shown), self.form) if shown else {})

    def _embedded(self, pictures: Sequence[Any]) -> Embedded:
        embedded = joined([self.vision.embed(picture) for picture in pictures])
        # Tensors of inference mode cannot take part in a backward pass; copies of them can.
        return Embedded(embedded.rows_NE.clone(), tuple(rows.clone() for rows in embedded.deep))


def shown_media(folder: Path) -> ShownMedia:
    """Return the folder's model of text and pictures."""
    network: Any = trained(load_model(folder, "AutoModelForImageTextToText"))
    return ShownMedia(network, folder)
