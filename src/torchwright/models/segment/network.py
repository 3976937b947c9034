"""A model of transformers as two calls: a picture through the encoder, and prompts on what it gave."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.workloads.base import to_dtype

NO_POINT, OUTSIDE, INSIDE, LEFT_TOP, RIGHT_BOTTOM = -1, 0, 1, 2, 3
"""Labels of a prompt's coordinates."""


class Network(nn.Module):
    """forward(pixels=…) → embeddings; forward(embeddings=…, points=…, labels=…, several=…) → mask logits and scores.

    What goes in and comes out is float32. So are the coordinates in between, whatever the rest computes in: bfloat16
    has nothing between pixel 648 and pixel 652.
    """

    narrowed: ClassVar[tuple[str, ...]] = ("vision_encoder", "mask_decoder")
    """The modules that compute in `dtype`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.dtype = model, torch.float32

    def forward(
        self,
        pixels: torch.Tensor | None = None,
        embeddings: Any = None,
        points: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        several: bool = True,
    ) -> Any:
        """pixels (B, 3, S, S); points (1, P, T, 2) in pixels of the square, labels (1, P, T) int32.

        Mask logits (1, P, M, S/4, S/4) and scores (1, P, M): with `several` three masks of each prompt, else one.
        """
        if pixels is not None:
            return self.encode(pixels)
        return tuple(out.float() for out in self.decode(embeddings, points, labels, several))

    def cast(self, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> None:
        """Compute in `dtype`, but for the modules that `keep` names."""
        parts = tuple(f"model.{name}" for name in self.narrowed)
        to_dtype(self, dtype, lambda name, module: not _within(name, parts) or keep(name, module))
        self.dtype = dtype

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> Any:
        """Return the inputs of `decode`, in float32."""

    @abstractmethod
    def decode(
        self, embeddings: Any, points: Any, labels: Any, several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits and scores, in any type."""

    def dense(self) -> torch.Tensor:
        """Return the embedding for a missing mask prompt, (1, C, S/16, S/16)."""
        prompts = self.model.prompt_encoder
        return prompts.no_mask_embed.weight.reshape(1, -1, 1, 1).expand(1, -1, *prompts.image_embedding_size)


def network_in(model: nn.Module) -> Network:
    """The network that `model` is, or that techniques have put something around."""
    found: Iterator[Network] = (module for module in model.modules() if isinstance(module, Network))
    return next(found)


def _within(name: str, parts: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in parts)
