"""Segment Anything 2 on still pictures: the whole square is the picture, however wide it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from torchwright.models.segment.base import Segmenter
from torchwright.models.segment.network import Network
from torchwright.models.segment.square import normalized


class Sam2Network(Network):
    """transformers' Sam2Model."""

    def encode(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        return [level.float() for level in self.model.get_image_embeddings(pixels.to(self.dtype))]

    def decode(
        self, embeddings: Any, points: Any, labels: Any, several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model
        *fine, coarse = (level.to(self.dtype) for level in embeddings)
        sparse = model.prompt_encoder._embed_points(points, labels, pad=False)
        logits, scores, *_ = model.mask_decoder(
            image_embeddings=coarse,
            image_positional_embeddings=model.get_image_wide_positional_embeddings().to(self.dtype),
            sparse_prompt_embeddings=sparse.to(self.dtype),
            dense_prompt_embeddings=self.dense().to(self.dtype),
            multimask_output=several,
            high_resolution_features=fine,
        )
        return logits, scores


class Sam2(Segmenter):
    """SAM 2 and 2.1, tiny to large (Ravi et al., 2024)."""

    model_types = ("sam2", "sam2_video")
    architecture = "Sam2Model"
    network = Sam2Network
    ends_boxes = True

    @classmethod
    def embedding_shapes(cls, config: dict[str, Any]) -> list[tuple[int, ...]]:
        width, sizes = (
            config["mask_decoder_config"]["hidden_size"],
            config["vision_config"]["backbone_feature_sizes"],
        )
        return [(1, width // part, *size) for part, size in zip((8, 4, 1), sizes, strict=True)]

    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        picture_13HW = torch.from_numpy(picture_HW3).permute(2, 0, 1)[None].float()
        size = (self.side, self.side)
        square = F.interpolate(picture_13HW, size, mode="bilinear", antialias=True)
        return normalized(square.round())

    def scale(self, height: int, width: int) -> tuple[float, float]:
        return self.side / width, self.side / height

    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return F.interpolate(logits_1NSS, (height, width), mode="bilinear")
