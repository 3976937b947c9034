"""A model that names what every pixel of a picture shows: one picture a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from torchwright.core.records import Quality
from torchwright.hub.folder import model_files
from torchwright.models.segment.beside import classes_beside
from torchwright.models.segment.classes import class_quality
from torchwright.models.segment.semantic import (
    ENDING,
    ClassSegmenter,
    open_classifier,
    preparation_of,
    read_preparation,
)
from torchwright.models.vision.user_pictures import UserPictures
from torchwright.report.pictures import MOST_ROWS, PictureRow
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Optimized,
    Run,
    Workload,
    batches_to_judge,
)
from torchwright.workloads.huggingface import parameter_count
from torchwright.workloads.pictures import PATCH_PIXELS, picture

SAMPLE_PICTURES = 24
SAMPLE_OPERATIONS = 4e12
"""The metric's pictures are cut to what these operations pay for; two at least."""
CALIBRATION_SEED = 1_000_000


class SemanticWorkload(Workload):
    """A semantic segmentation model (SegFormer and similar ones), which classifies every pixel: one picture per call.

    Metric: IoU with the original's maps, class by class, over pictures of a folder or made-up ones.
    """

    name = "semantic"
    supports = "…ForSemanticSegmentation"
    opens = frozenset({"images"})

    def __init__(self, folder: str | Path, *, images: str | Path | None = None) -> None:
        self.folder, self.label = Path(folder), str(folder)
        self.user = None if images is None else UserPictures(Path(images))
        self.preparation = preparation_of(self.folder)

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return any(str(name).endswith(ENDING) for name in config.get("architectures") or [])

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        read_preparation(description)

    @classmethod
    def answerer(cls, optimized: Optimized) -> ClassSegmenter:
        def ask(pixels: torch.Tensor) -> torch.Tensor:
            return optimized.run(Case(name="segment", args=(pixels.to(optimized.device),)))

        return ClassSegmenter(read_preparation(optimized.description), ask)

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        return {"pictures_per_s": 1 / seconds["segment"]}

    def build(self) -> nn.Module:
        return open_classifier(self.folder)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(self._picture(0))]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        count = len(self.user.calibration) if self.user else CALIBRATION_BATCHES
        return [self._case(self._picture(index, calibration=True)) for index in range(count)]

    def calibrates_apart(self) -> bool:
        return True

    @torch.inference_mode()
    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, Any]:
        """Every sampled picture's classes in the size of the logits, as `class_quality` takes them."""
        maps, finite = list[torch.Tensor](), True
        for index in self.sample or range(self._rounds()):
            logits_1CSS = run(self._case(self._picture(index)))
            finite = finite and bool(logits_1CSS.isfinite().all())
            maps.append(logits_1CSS[0].argmax(0).short().cpu())
        return {"maps": maps, "classes": len(self.preparation.labels), "finite": finite}

    def unseen(self) -> Self | None:
        return self.judged_after(self._rounds(), len(self.user.judged) if self.user else None)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return class_quality(reference, candidate)

    def side_by_side(self, reference: Any, candidate: Any) -> list[PictureRow]:
        """The maps with the fewest equal pixels first."""
        rows = list[tuple[float, int, torch.Tensor, torch.Tensor]]()
        pairs = zip(reference["maps"], candidate["maps"], strict=True)
        for index, (before, after) in zip(self.sample or range(self._rounds()), pairs, strict=True):
            rows.append((float((before == after).double().mean()), index, before, after))
        rows.sort(key=lambda each: each[:2])
        return [
            classes_beside(
                f"picture {index}", f"{same:.2%} of its pixels equal", self._picture(index), before, after
            )
            for same, index, before, after in rows[:MOST_ROWS]
        ]

    def files(self, *, weights: bool) -> dict[str, Path]:
        return model_files(self.folder, weights=weights)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            **self.preparation.as_dict(),
            "images": None if self.user is None else str(self.user.folder),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"image"}

    def _rounds(self) -> int:
        """Pictures of the metric's sample."""
        patches = self.preparation.height * self.preparation.width / PATCH_PIXELS
        operations = 2.0 * parameter_count(self.folder) * patches
        return batches_to_judge(
            min(SAMPLE_PICTURES, SAMPLE_OPERATIONS / max(operations, 1.0)),
            len(self.user.judged) if self.user else None,
        )

    def _picture(self, index: int, *, calibration: bool = False) -> np.ndarray:
        """RGB (H, W, 3) uint8."""
        if self.user:
            return self.user.read(index, calibration=calibration)
        shape = (3, self.preparation.height, self.preparation.width)
        made_up = picture(index + CALIBRATION_SEED * calibration, shape)
        return (made_up * 255).round().byte().permute(1, 2, 0).numpy()

    def _case(self, picture_HW3: np.ndarray) -> Case:
        return Case(name="segment", args=(self.preparation.pixels(picture_HW3).to(self.device),))
