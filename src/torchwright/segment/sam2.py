"""Segment Anything 2 on still pictures: the whole square is the picture, however wide it was."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from torchwright.segment.base import Segmenter
from torchwright.segment.square import normalized


class Sam2(Segmenter):
    """SAM 2 and 2.1, tiny to large (Ravi et al., 2024)."""

    model_types = ("sam2", "sam2_video")
    architecture = "Sam2Model"
    encoder = ("vision_encoder", "mask_decoder.conv_s0", "mask_decoder.conv_s1")

    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        picture_13HW = torch.from_numpy(picture_HW3).permute(2, 0, 1)[None].float()
        size = (self.side, self.side)
        square = F.interpolate(picture_13HW, size, mode="bilinear", antialias=True)
        return normalized(square.round())

    def embeddings(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        return [level.float() for level in self.model.get_image_embeddings(pixels)]

    def scale(self, height: int, width: int) -> tuple[float, float]:
        return self.side / width, self.side / height

    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return F.interpolate(logits_1NSS, (height, width), mode="bilinear")
