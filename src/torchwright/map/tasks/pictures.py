"""Picture files through a classifier of pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.hub.folder import find_object
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.texts import NOT_NUMBERS, text_fault
from torchwright.models.vision.picture import read_picture
from torchwright.optimization.artifact.load import load
from torchwright.workloads.huggingface import open_picture_processor
from torchwright.workloads.image import ImageWorkload

FOLDER_BATCH = 16
"""Pictures of one call of a model that is not optimized, as many as `torchwright optimize` takes by default."""


class PictureTask(Task):
    """Classifies pictures, in calls of the batch size that the artifact was optimized for."""

    def __init__(self, spec: TaskSpec) -> None:
        self._call, self._batch = self._open(spec)
        folder = Path(spec.folder)
        self._processor = open_picture_processor(folder)
        named = find_object(folder / "config.json").get("id2label") or {}
        self._names = lambda count: [named.get(str(place), f"LABEL_{place}") for place in range(count)]
        self._all = spec.options.all_labels
        assert spec.options.text_column is not None, "the plan names the column"
        self._column = spec.options.text_column

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        waiting = list[tuple[int, torch.Tensor]]()
        for place, row in enumerate(rows):
            try:
                if fault := text_fault(row, self._column):
                    raise WorkloadError(fault)
                waiting.append((place, self._pixels(Path(row[self._column]))))
            except TorchwrightError as error:
                yield place, Rejected(str(error))
            if len(waiting) == self._batch:
                yield from self._classified(waiting)
                waiting = []
        if waiting:
            yield from self._classified(waiting)

    def _classified(self, waiting: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, Answer]]:
        with torch.inference_mode():
            logits_BN = self._call(torch.stack([pixels_CHW for _, pixels_CHW in waiting])).float().cpu()
        names = self._names(logits_BN.shape[1])
        for (place, _), scores_N in zip(waiting, logits_BN.softmax(1), strict=True):
            if not torch.isfinite(scores_N).all():
                yield place, Rejected(NOT_NUMBERS)
                continue
            best = int(scores_N.argmax())
            found: dict[str, Any] = {"label": names[best], "score": scores_N[best].item()}
            if self._all:
                found["scores"] = dict(zip(names, scores_N.tolist(), strict=True))
            yield place, found

    def _pixels(self, path: Path) -> torch.Tensor:
        picture_HWC = read_picture(path)
        try:
            return self._processor(images=picture_HWC, return_tensors="pt")["pixel_values"][0]
        except (ValueError, ZeroDivisionError) as error:  # of sides that its sizes do not take
            raise WorkloadError(f"the preprocessor does not take {path}", found=str(error)) from error

    def _open(self, spec: TaskSpec) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
        if spec.artifact is None:
            self.notices = ["not optimized: `torchwright optimize` makes an artifact, which answers faster"]
            workload = ImageWorkload(spec.folder, batch=FOLDER_BATCH)
            return workload.build(), FOLDER_BATCH
        loaded = load(spec.artifact, trust=spec.model.trust)
        self.notices = loaded.notices
        return loaded.model, int(loaded.recipe.workload.get("batch") or FOLDER_BATCH)
