"""Image classifiers of a Hugging Face folder, judged on pictures that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.errors import WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files, read_config
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Run,
    Workload,
    batches_to_judge,
    check_sizes,
)
from torchwright.workloads.huggingface import load_model, parameter_count
from torchwright.workloads.pictures import Pictures

SAMPLE_IMAGES = 512
CALIBRATION_SEED = 1_000_000


class ImageWorkload(Workload):
    """An image classifier: one batch of images.

    No data set is available, so the images are synthetic: smooth random fields with edges, always the same. They have
    the spectrum of photographs without their content, so that close decisions are more common than on real ones.
    Metric: top-1 agreement with the original over up to a few hundred images, with the logits' relative error next to
    it.
    """

    name = "image"
    supports = "…ForImageClassification"
    sample_operations: float = 2e12
    """The metric's sample is cut to what these operations pay for, but never below 2 batches."""

    def __init__(self, folder: str | Path, *, batch: int = 16) -> None:
        self.folder, self.label = Path(folder), str(folder)
        if batch < 1:
            raise WorkloadError(f"batch={batch}", allowed="1 or more")
        self.batch = batch
        self.pictures = Pictures(self.folder, read_config(self.folder), batch)

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return any(name.endswith("ForImageClassification") for name in config.get("architectures") or [])

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "batch")

    def called_as_is(self) -> bool:
        return True

    def build(self) -> nn.Module:
        return Logits(load_model(self.folder, "AutoModelForImageClassification")).eval()

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [Case(name="classify", args=(self._images(0),))]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        first = CALIBRATION_SEED // self.batch
        return [Case(name="classify", args=(self._images(first + i),)) for i in range(CALIBRATION_BATCHES)]

    def calibrates_apart(self) -> bool:
        return True

    def observe(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """Logits (N, C) of every sampled image, in batches of the one shape that is timed."""
        batches = [
            run(Case(name="classify", args=(self._images(i),))).float().cpu()
            for i in self.sample or range(self._rounds())
        ]
        return torch.cat(batches)

    def sampled(self) -> tuple[int, int | None]:
        return self._rounds(), None

    def unseen(self) -> Self | None:
        return self.judged_after(*self.sampled())

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.enough_answers(reference, candidate)

    def files(self, *, weights: bool) -> dict[str, Path]:
        return model_files(self.folder, weights=weights)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "batch": self.batch,
            **self.pictures.as_dict(),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"image"}

    def _rounds(self) -> int:
        """Batches of the metric's sample."""
        operations = 2.0 * parameter_count(self.folder) * self.pictures.patches * self.batch
        return batches_to_judge(
            min(SAMPLE_IMAGES / self.batch, self.sample_operations / max(operations, 1.0)), None
        )

    def _images(self, index: int) -> torch.Tensor:
        return self.pictures.images(index).to(self.device)


class Logits(nn.Module):
    """A transformers classifier as a plain module: forward(images_BCHW) → logits (B, N)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images_BCHW).logits
