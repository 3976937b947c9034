"""Heads for classes and vectors of whole texts: their objective, their model, and the files written with the weights.

A text is a document whose only label stands behind its last token: its class, or that it ends there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from torchwright.hub.folder import read_config
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model import Transformer
from torchwright.train.model.classifier import classifier
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.objective_section import TEMPERATURE, Head
from torchwright.train.run.config.run import Run
from torchwright.train.run.objectives.objective import MicroBatch


class Classes:
    """Cross-entropy of the classes of texts."""

    figures: tuple[str, ...] = ("accuracy",)

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def count(self, batch: MicroBatch) -> torch.Tensor:
        """Texts."""
        return (batch.labels_BT != IGNORE).sum()

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BTE = self._model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BS)
        last_BT = batch.labels_BT != IGNORE
        score_DC, class_D = self._model.logits(hidden_BTE[last_BT]), batch.labels_BT[last_BT]
        score_DC = score_DC.to(torch.promote_types(score_DC.dtype, torch.float32))
        right = (score_DC.argmax(-1) == class_D).sum()
        return F.cross_entropy(score_DC, class_D, reduction="sum"), right[None].to(score_DC.dtype)


class Vectors:
    """InfoNCE (van den Oord et al., 2018): of a micro-batch's texts, over all processes, which belongs to the anchor.

    A text's vector is its pooled hidden states at length 1.
    """

    figures: tuple[str, ...] = ("recall_at_1",)

    def __init__(self, model: Transformer, how: Head) -> None:
        self._model, self._last = model, how.pooling == "last"
        self._temperature = how.temperature or TEMPERATURE

    def count(self, batch: MicroBatch) -> torch.Tensor:
        """Pairs."""
        return (batch.labels_BT != IGNORE).sum() // 2

    def vectors(self, batch: MicroBatch) -> torch.Tensor:
        """(D, E) of the texts, row by row; float32 or better."""
        hidden_BTE = self._model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BS)
        hidden_BTE = hidden_BTE.to(torch.promote_types(hidden_BTE.dtype, torch.float32))
        last_BT = batch.labels_BT != IGNORE
        if self._last:
            return F.normalize(hidden_BTE[last_BT], dim=-1)
        assert batch.documents_BS is not None
        B, T = batch.ids_BT.shape
        document_BT = batch.documents_BS + torch.arange(B, device=last_BT.device)[:, None] * T
        own_N, tokens_D = torch.unique_consecutive(document_BT.flatten(), return_counts=True)
        sum_DE = torch.segment_reduce(hidden_BTE.flatten(0, 1), "sum", lengths=tokens_D, axis=0, unsafe=True)
        # What is left over of a row is a document without a label. A sum has the direction of a mean.
        return F.normalize(sum_DE[torch.isin(own_N, document_BT[last_BT])], dim=-1)

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        anchor_PE, positive_PE = self.vectors(batch).unflatten(0, (-1, 2)).unbind(1)
        every_QE, first = everywhere(positive_PE)
        score_PQ = anchor_PE @ every_QE.T / self._temperature
        own_P = first + torch.arange(len(anchor_PE), device=score_PQ.device)
        found = (score_PQ.argmax(-1) == own_P).sum()
        return F.cross_entropy(score_PQ, own_P, reduction="sum"), found[None].to(score_PQ.dtype)


def everywhere(own_PE: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows of all processes one after the other, with gradients back to each, and where this one's begin."""
    if dist.get_world_size() == 1:
        return own_PE, 0
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(own_PE))
    before = sum(counts[: dist.get_rank()])
    every_QE: Any = _Gathered.apply(own_PE, before, sum(counts))
    return every_QE, before


class _Gathered(torch.autograd.Function):
    """Sums of rows that others hold as zeros: processes may have as many rows as they like."""

    @staticmethod
    def forward(ctx: Any, own_PE: torch.Tensor, first: int, count: int) -> torch.Tensor:
        ctx.own = slice(first, first + len(own_PE))
        every_QE = own_PE.new_zeros(count, own_PE.shape[1])
        every_QE[ctx.own] = own_PE
        dist.all_reduce(every_QE)
        return every_QE

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient_QE = gradients[0].clone()
        dist.all_reduce(gradient_QE)
        return gradient_QE[ctx.own], None, None


def decoder_of(run: Run, config: DecoderConfig, folder: Path) -> Transformer:
    """The decoder that the run trains, on the default device, without weights; its paths start from `folder`.

    Raises `RunError` for classes of a model that transformers has no classifier for.
    """
    if run.head is None:
        return Transformer(config)
    if run.head.labels is not None:
        assert run.model.folder is not None
        class_of_transformers(folder / run.model.folder)
        return classifier(config, len(run.head.labels))
    model = Transformer(config)
    if not config.tied:
        model.head.requires_grad_(False)  # vectors come before it
    return model


def class_of_transformers(folder: Path) -> str:
    """The name of transformers' classifier for a folder's model; raises `RunError` where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    kind = str(read_config(folder).get("model_type"))
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    if name is None:
        raise RunError(
            f"transformers has no classifier of model_type '{kind}', by which this one would be loaded"
        )
    return name


def write_head(how: Head, folder: Path) -> None:
    """Tell transformers, or sentence-transformers, what a written model is; its weights are in `folder` already."""
    config = read_config(folder)
    if how.labels is not None:
        ends = config.get("eos_token_id")
        end = ends[0] if isinstance(ends, list) else ends
        config |= {
            "architectures": [class_of_transformers(folder)],
            "id2label": dict(enumerate(how.labels)),
            "label2id": {label: place for place, label in enumerate(how.labels)},
            "problem_type": "single_label_classification",
            # By it transformers finds the last token of a padded text.
            "pad_token_id": end if config.get("pad_token_id") is None else config["pad_token_id"],
        }
        _write(folder / "config.json", config)
        return
    pooling = {
        "word_embedding_dimension": config["hidden_size"],
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": how.pooling != "last",
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": how.pooling == "last",
    }
    modules = []
    for place, (path, kind) in enumerate(
        (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    ):
        (folder / path).mkdir(exist_ok=True)
        modules.append(
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
    _write(folder / "1_Pooling" / "config.json", pooling)
    _write(folder / "modules.json", modules)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
