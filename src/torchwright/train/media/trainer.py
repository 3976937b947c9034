"""One process's part of a run over pictures, sounds or conversations about pictures."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.hub.folder import model_files, resolve
from torchwright.hub.run_folder import ADAPTER, MODEL
from torchwright.train.data.shards import DataError
from torchwright.train.ledger import Ledger
from torchwright.train.media.adapt import write_adapters
from torchwright.train.media.chats import Chats, ChatTask, list_conversations
from torchwright.train.media.config import (
    FREE,
    AnyRun,
    ImageRun,
    MediaRun,
    SpeechRun,
    VisionRun,
    read_images,
    read_speech,
    read_vision,
)
from torchwright.train.media.images import ImageTask, Pictures, list_pictures
from torchwright.train.media.learner import MediaLearner
from torchwright.train.media.model import Media, classifier, recognizer
from torchwright.train.media.samples import MediaBatch, Samples, Task
from torchwright.train.media.shown import shown_media
from torchwright.train.media.sounds import SpeechTask, Spoken, list_spoken
from torchwright.train.media.words import word_error_rate
from torchwright.train.model.foreign import save_foreign
from torchwright.train.run.loop.session import RunOutcome, RunSession
from torchwright.train.run.loop.train import in_session, refuse
from torchwright.train.run.objectives.adapt import base_digests
from torchwright.train.run.objectives.not_finite import first_not_finite, not_finite_message
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.step import StepFigures, counted_everywhere
from torchwright.train.run.observe.metrics import HELD_OUT
from torchwright.train.run.runtime.processes import ProcessRank, on_first
from torchwright.train.run.runtime.source import write_files

BROKEN_TOLD = 100
"""Broken files of one source that are listed with their reasons; all are counted."""


@dataclass(frozen=True, kw_only=True)
class MediaOutcome(RunOutcome):
    """The outcome of `train_images`, `train_speech` or `train_vision`."""

    samples: int
    held_out: dict[str, float]
    """Figures of the last evaluation."""
    best_validation_loss: float | None
    best_step: int | None
    """The step with the best validation loss."""
    broken: int
    """Files that could not be read."""
    adapter: Path | None
    """The adapters' folder, if the run has [lora]."""


def train_images(path: Path, **how: Any) -> MediaOutcome:
    """Like `train` for language models, without `merge`, and without compiled code to `trust`."""
    return train_media(read_images(path), path.parent, **how)


def train_speech(path: Path, **how: Any) -> MediaOutcome:
    """Like `train_images`, for speech models."""
    return train_media(read_speech(path), path.parent, **how)


def train_vision(path: Path, **how: Any) -> MediaOutcome:
    """Like `train_images`, for adapters of vision-language models."""
    return train_media(read_vision(path), path.parent, **how)


def train_media(
    run: AnyRun, folder: Path, *, merge: bool = False, trust: bool = False, **how: Any
) -> MediaOutcome:
    """Train as `train_run`, over pictures or sounds."""
    refuse(run.kind, merge=merge, trust=trust)
    return in_session(MediaTrainer, run, folder, **how)


class MediaTrainer(RunSession[MediaRun, MediaOutcome]):
    """One process's part of a run."""

    unit, free = "samples", FREE

    def __init__(
        self,
        run: MediaRun,
        folder: Path,
        out: Path,
        place: ProcessRank,
        ledger: Ledger,
        *,
        live: bool,
        profile: range = range(0),
    ) -> None:
        super().__init__(run, out, place, ledger, steps=run.steps, live=live, profile=profile)
        model = resolve(str(folder / run.model.folder))
        files = model_files(model, weights=False)
        self.source = on_first(
            lambda: write_files(out, {name: file.read_bytes() for name, file in files.items()})
        )
        self.listed = _listed(run, folder)
        task: Task
        classes = None
        if isinstance(self.listed, Pictures):
            assert isinstance(run, ImageRun)
            task = ImageTask(model, run.data, self.listed.labels)
            media = Media(classifier(model, self.listed.labels, run.seed))
            classes = len(self.listed.labels)
        elif isinstance(run, VisionRun):
            task, media = ChatTask(model, run.data), shown_media(model)
        else:
            assert isinstance(run, SpeechRun)
            task, media = SpeechTask(model, run.data), Media(recognizer(model))
        held_out = self.listed.validation.items[: run.evaluation.samples]
        self.train = Samples(self.listed.train.items, task, run.data.seed, strict=run.data.strict)
        self.validation = Samples(held_out, task, None, strict=run.data.strict)
        self.learner = MediaLearner(run, media, place.device, classes=classes)
        self.base = str(model)
        self.held_out: dict[str, float] = {}
        self._broken: dict[str, str] = {}

    def data_facts(self) -> dict[str, Any]:
        listings = {"train": self.listed.train, "validation": self.listed.validation}
        return {
            name: {"files": len(listing.reports), "samples": len(listing.items)}
            for name, listing in listings.items()
            if listing.items
        }

    def begin(self) -> None:
        for listing in (self.listed.train, self.listed.validation):
            self.tell_rows(listing.reports, numbered="row")
        self.recall_best()
        if self.run.data.hold_out is not None:
            self.tell_held_out(len(self.listed.validation.items), len(self.listed.train.items))

    def computing(self) -> contextlib.AbstractContextManager[None]:
        # Batch norms note their statistics as they go: a step that was begun is ended.
        return contextlib.nullcontext() if self.learner.model.statistics() else self.dropping()

    def update(self, figures: StepFigures, batches: list[MediaBatch]) -> None:
        if figures.finite:
            self.learner.update(self.done)
        elif counted_everywhere(self.learner.objective, batches, 1):
            raise self._no_number(figures, batches)
        else:
            self._pass_over()

    def read(self) -> list[MediaBatch]:
        """Return this process's part of a step; if `strict`, a broken file raises `DataError` on all processes."""
        batches, fault = list[MediaBatch](), None
        self.learner.begin(self.done)
        try:
            batches = self.learner.of_step(self.done, self.train)
        except DataError as error:
            fault = error
        if self.run.data.strict:
            everyones: list[Any] = [None] * self.place.world
            dist.all_gather_object(everyones, fault)
            fault = next(filter(None, everyones), None)
        if fault is not None:
            raise fault
        return batches

    def _pass_over(self) -> None:
        """A step of which no sample can be read moves nothing. Raises `DataError` where none of all can."""
        self._tell_files()
        for parameter in self.learner.model.parameters():
            parameter.grad = None
        if all(str(item.path) in self._broken for item in self.listed.train.items):
            file, reason = next(iter(self._broken.items()))
            raise DataError(
                f"none of the {len(self.train):,} samples can be read",
                found=f"{file}: {reason}",
                next="`torchwright data check` reads every file and names the broken ones",
            )

    def _no_number(self, figures: StepFigures, batches: list[MediaBatch]) -> Exception:
        learner, step = self.learner, self.done
        places = learner.places()
        sighting = first_not_finite(learner.model, partial(learner.again, step, batches), places)
        begin = step * self.run.batch
        return self.not_finite(
            figures,
            found=not_finite_message(sighting, begin, self.run.batch, self.train.describe),
            rates="optimizer.lr or clip",
        )

    @torch.no_grad()
    def evaluate(self) -> None:
        run, learner = self.run, self.learner
        if not len(self.validation):
            return
        size = learner.own // run.micro_batches
        everywhere = size * run.parallel.batch_ways
        sums = torch.zeros(3, dtype=torch.float64, device=self.place.device)
        with self.ledger.phase("evaluation"), learner.evaluating():
            for first in range(0, len(self.validation), everywhere):
                batch = learner.on_device(self.validation.batch(first + learner.part * size, size))
                with autocast(run.precision, self.place.device):
                    loss, right = learner.objective(batch)
                sums += torch.stack(
                    [learner.objective.count(batch).double(), loss.double(), right[0].double()]
                )
            if self.place.world > 1:
                dist.all_reduce(sums)
        labels, loss, right = sums.tolist()
        self._tell_files()
        if labels:
            self.held_out = {f"{HELD_OUT}loss": loss / labels, f"{HELD_OUT}accuracy": right / labels}
            self.metrics.figures(self.done, self.held_out, event="evaluation")
            self.judge(loss / labels)

    def finish(self, figures: StepFigures | None) -> MediaOutcome:
        finished = self.done == self.last and self.evaluated()
        if finished:
            self.tell_best(self.held_out.get(f"{HELD_OUT}loss"))
        with self.ledger.phase("checkpoint"):
            self.save(last=True)
            self.checkpoints.wait()
            if finished and self.run.lora is not None:
                self.write(ADAPTER, self._save_adapters)
            if finished:
                self.write(MODEL, self._save_model)
        if finished and isinstance(self.run, SpeechRun):
            self._transcribe(self.run)
        return MediaOutcome(
            out=self.out,
            steps=self.done,
            samples=self.counted,
            loss=figures.loss if figures is not None and figures.finite else None,
            held_out=self.held_out,
            best_validation_loss=self.best.loss if self.best.step else None,
            best_step=self.best.step or None,
            broken=len(self._broken),
            effective_time=self.ledger.effective(),
            model=self.out / MODEL if finished else None,
            adapter=self.out / ADAPTER if finished and self.run.lora is not None else None,
            signal=self.leave_signal(finished),
        )

    def _save_model(self, folder: Path) -> None:
        save_foreign(self.learner.model.network, folder, source=self.source, writes=self.place.first)

    def _save_adapters(self, folder: Path) -> None:
        assert self.run.lora is not None
        write_adapters(self.learner.model, self.run.lora, self.base, folder if self.place.first else None)

    def _transcribe(self, run: SpeechRun) -> None:
        """The word error rate of the model as it was written, on the first process."""
        items = self.validation.items[: run.evaluation.transcribed]
        if not items:
            return
        with self.ledger.phase("evaluation"):
            rate = on_first(lambda: word_error_rate(self.out / MODEL, items, run.data.language))
        if rate is not None:
            self.held_out["word_error_rate"] = rate
            self.metrics.figures(self.done, self.held_out, event="evaluation")

    def facts(self) -> dict[str, Any]:
        return {
            "train_samples": len(self.train),
            "train_files": self.listed.train.digest(),
            **({"base": base_digests(Path(self.base))} if self.run.lora is not None else {}),
        }

    def _tell_files(self) -> None:
        """Report the files that any process failed to read since the last report. Collective."""
        everyones: list[Any] = [None] * self.place.world
        mine = {**self.train.broken, **self.validation.broken}
        dist.all_gather_object(
            everyones, {file: why for file, why in mine.items() if file not in self._broken}
        )
        new = {file: why for others in everyones for file, why in others.items() if file not in self._broken}
        self._broken |= new
        for file, reason in sorted(new.items()):
            if len(self._broken) <= BROKEN_TOLD:
                self.metrics.event("broken_rows", file=file, broken=1, rows=[(1, reason)], at=self.done)
                self.metrics.show(f"{file} is left out: {reason}")

    def show(self, figures: StepFigures) -> None:
        self._tell_files()
        super().show(figures)

    def progress(self, units_per_s: float) -> dict[str, float | None]:
        return {
            "lr": self.learner.rate(self.done - 1) * self.run.optimizer.lr,
            "broken_files": len(self._broken) or None,
        }


def _listed(run: MediaRun, folder: Path) -> Pictures | Spoken | Chats:
    """The run's data by name, the same on every process; faults on all alike."""

    def listed() -> Pictures | Spoken | Chats:
        if isinstance(run, ImageRun):
            return list_pictures(run, folder)
        if isinstance(run, VisionRun):
            return list_conversations(run, folder)
        assert isinstance(run, SpeechRun)
        return list_spoken(run, folder)

    return on_first(listed)
