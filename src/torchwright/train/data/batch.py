"""Batches of windows: rows of tokens, their labels, and where documents begin in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WindowBatch:
    """Whole windows, int64 (B, T) each, before they are divided over processes."""

    ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    """The token that follows each; `IGNORE` where none does, or where it is not trained on."""
    documents_BT: torch.Tensor | None = None
    """For each token the place in its row at which its document begins, never falling along a row. A token attends to
    its own document alone, and its position is counted from there. None: a row is one text."""
    reference_BT: torch.Tensor | None = None
    """float32: at each place the log-probability of its document's labels by the model that a run of preferences
    starts from, all of them together."""


def of_windows(windows_BT: torch.Tensor) -> WindowBatch:
    """Return rows (B, T + 1) of one text each as inputs and, one place further, their labels.

    `IGNORE` stands for padding: it is not predicted, and read as any token.
    """
    return WindowBatch(ids_BT=windows_BT[:, :-1].clamp_min(0), labels_BT=windows_BT[:, 1:])
