"""The number format of a recipe's step, where a target can express it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step

PARTS = {
    "attention.qkv": "qkv",
    "attention.o": "o",
    "attention.conv_in": "conv_in",
    "attention.conv_out": "conv_out",
    "attention.delta_in": "delta_in",
    "attention.delta_out": "delta_out",
    "attention.mamba_in": "mamba_in",
    "attention.mamba_out": "mamba_out",
    "mlp.gate_up": "gate_up",
    "mlp.down": "down",
}
"""Layers of the native decoder → fields of its family's `Names`."""
DECODER = "decoder."
"""The prefix of their names in a recipe: the module in the workload's wrapper."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A step's choice for the weights."""

    step: Step
    precision: str
    """The target's precision."""

    @property
    def group(self) -> int | None:
        return self.step.options.get("group_size")

    @property
    def skip(self) -> tuple[str, ...]:
        """Layers that keep more bits, by the recipe's names."""
        return tuple(self.step.options.get("skip", ()))


def stored_names(layers: Sequence[str], folder: Path) -> set[str]:
    """Return the native decoder's layer names as the model's folder has them: one of ours may be two or three there.

    Raises `RefusedTechnique` for a name that is not a layer.
    """
    from torchwright.models.decoder.families import FAMILIES, read_decoder_config

    names: Any = FAMILIES[read_decoder_config(folder).architecture].names
    found: set[str] = set()
    for layer in layers:
        start, _, rest = layer.removeprefix(DECODER).partition(".")
        number, _, part = rest.partition(".")
        if start == "head":
            found.add("lm_head")
        elif part in PARTS:
            said = getattr(names, PARTS[part])
            found |= {f"model.layers.{number}.{name}" for name in ([said] if isinstance(said, str) else said)}
        else:
            raise RefusedTechnique(f"the recipe leaves out '{layer}', which is no layer of {folder}'s")
    return found
