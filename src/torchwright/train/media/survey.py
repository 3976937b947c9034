"""Survey a run's pictures or sounds before training: read every file and report broken ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import WorkloadError
from torchwright.hub.folder import resolve
from torchwright.train.data.shards import DataError
from torchwright.train.media.chats import Chats, ChatTask, list_conversations
from torchwright.train.media.config import AnyRun, ImageRun, VisionRun
from torchwright.train.media.images import ImageTask, Pictures, list_pictures
from torchwright.train.media.listing import Item, refuse
from torchwright.train.media.samples import Samples, Task
from torchwright.train.media.sounds import SpeechTask, Spoken, list_spoken
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.observe.survey import FileSurvey


@dataclass(frozen=True, kw_only=True)
class MediaSample:
    """A training sample as the model sees it."""

    sample: int
    file: Path
    shape: list[int]
    """The shape of the pixels or features."""
    mean: float
    std: float
    target: str
    """The class, or the tokens' text."""
    labels: list[int]

    @property
    def lines(self) -> list[str]:
        """For people."""
        size = " x ".join(map(str, self.shape))
        return [
            f"sample {self.sample}: {self.file}",
            f"input {size}, mean {self.mean:.4f}, deviation {self.std:.4f}",
            f"target {self.target}",
            f"labels {' '.join(map(str, self.labels))}",
        ]


def survey(run: AnyRun, folder: Path) -> list[FileSurvey]:
    """Each folder and table of the run, and all files that they name read as training reads them."""
    holds = "pictures" if isinstance(run, ImageRun) else "sounds"
    holds = "conversations" if isinstance(run, VisionRun) else holds
    try:
        listed, task = _opened(run, folder)
    except DataError as error:
        named = folder / run.data.train[0]
        return [FileSurvey(file=named, source="train", holds=holds, refused=str(error))]
    found: list[FileSurvey] = []
    for part, listing in (("train", listed.train), ("validation", listed.validation)):
        for source, items in listing.by_source():
            seen = FileSurvey(file=Path(source), source=part, holds=holds, report=listing.reports[source])
            for item in items:
                _read(task, item, seen)
            if not seen.report.documents:
                seen.refused = f"{source} holds nothing that can be read"
            found.append(seen)
    return found


def sample(run: AnyRun, folder: Path, number: int) -> MediaSample:
    """Training sample `number` of the run. Raises `DataError` for one that is broken."""
    listed, task = _opened(run, folder)
    samples = Samples(listed.train.items, task, run.data.seed, strict=True)
    item, batch = samples.item(number), samples.batch(number, 1)
    assert item is not None
    inputs: Any = next(value for value in batch.inputs.values() if isinstance(value, torch.Tensor))
    labels = batch.labels.flatten().tolist()
    target = str(item.target)
    if isinstance(task, SpeechTask):
        target = task.tokenizer.decode(labels, skip_special_tokens=False)
    if isinstance(task, ChatTask):
        labels = [label for label in labels if label != IGNORE]
        target = task.tokenizer.decode(labels, skip_special_tokens=False)
        inputs = inputs.float()
    return MediaSample(
        sample=number,
        file=item.path,
        shape=list(inputs.shape[1:]),
        mean=float(inputs.mean()),
        std=float(inputs.std()),
        target=target,
        labels=labels,
    )


def _opened(run: AnyRun, folder: Path) -> tuple[Pictures | Spoken | Chats, Task]:
    model = resolve(str(folder / run.model.folder))
    if isinstance(run, ImageRun):
        listed = list_pictures(run, folder, strict=False)
        return listed, ImageTask(model, run.data, listed.labels)
    if isinstance(run, VisionRun):
        return list_conversations(run, folder, strict=False), ChatTask(model, run.data)
    return list_spoken(run, folder, strict=False), SpeechTask(model, run.data)


def _read(task: Task, item: Item, seen: FileSurvey) -> None:
    try:
        task.prepare(item, None)
    except WorkloadError as error:
        refuse(seen.report, item, f"{item.path.name}: {error}")
