"""Segment Anything: a picture's longer side becomes the encoder's, the rest of the square is empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from torchwright.segment.base import Segmenter
from torchwright.segment.square import normalized


class Sam(Segmenter):
    """SAM: ViT-B, L and H (Kirillov et al., 2023)."""

    model_types = ("sam",)
    architecture = "SamModel"

    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        from PIL import Image

        height, width = self._inside(*picture_HW3.shape[:2])
        # By Pillow, as the model was trained: its filter widens with the step.
        resized: Any = Image.fromarray(picture_HW3).resize((width, height), Image.Resampling.BILINEAR)
        pixels_3HW = normalized(torch.from_numpy(np.array(resized)).permute(2, 0, 1).float())
        return F.pad(pixels_3HW, (0, self.side - width, 0, self.side - height))[None]

    def embeddings(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.get_image_embeddings(pixels).float()

    def scale(self, height: int, width: int) -> tuple[float, float]:
        inner_height, inner_width = self._inside(height, width)
        return inner_width / width, inner_height / height

    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        inner_height, inner_width = self._inside(height, width)
        square = F.interpolate(logits_1NSS, (self.side, self.side), mode="bilinear")
        inside = square[..., :inner_height, :inner_width]
        return F.interpolate(inside, (height, width), mode="bilinear")

    def _inside(self, height: int, width: int) -> tuple[int, int]:
        """The picture's part of the square."""
        longer = max(height, width)
        return int(height * self.side / longer + 0.5), int(width * self.side / longer + 0.5)
