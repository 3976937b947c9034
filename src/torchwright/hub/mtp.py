"""Folders that hold a model's multi-token prediction (MTP) layer alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

JOINS = ("mtp.fc.weight", ".eh_proj.weight")
"""Ends of the tensors that join a token's embedding and the model's state, by family."""
TRUNK = ("model.layers.0.", "model.language_model.layers.0.")
"""Beginnings of tensors that only whole models have."""


def is_mtp_layer(names: Iterable[str]) -> bool:
    """Check whether tensors of these names are an MTP layer without its model."""
    names = list(names)
    return any(name.endswith(JOINS) for name in names) and not any(name.startswith(TRUNK) for name in names)
