"""One tensor of a model's files, and how it holds our parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchwright.train.model.stacked import Stack


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """Whole parameters one below the other or of all experts, or one expert of a parameter."""

    name: str
    parameters: tuple[str, ...]
    expert: int | None = None
    stack: Stack | None = None
    """Given for a tensor of all experts."""
    bias: bool = False
    """True if the bias chooses experts."""

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape in the file, of parameters of these shapes."""
        if self.expert is not None:
            return shapes[0][1:]
        if self.stack is not None:
            return self.stack.shape(shapes)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def join(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that holds these whole parameters."""
        return torch.cat(values) if self.stack is None else self.stack.join(values)

    def parts(self, full: torch.Tensor, shapes: list[tuple[int, ...]]) -> Sequence[torch.Tensor]:
        """Return the whole parameters that the tensor holds."""
        if self.stack is not None:
            return self.stack.parts(full, len(shapes))
        return full.split([shape[0] for shape in shapes])
