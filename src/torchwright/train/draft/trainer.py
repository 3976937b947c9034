"""One process's part of a draft head's run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.hub.run_folder import MODEL
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.data.shards import Shards
from torchwright.train.data.streams import ORDER
from torchwright.train.draft.config import FREE, DraftRun, check_merge, read_draft
from torchwright.train.draft.feed import Feed
from torchwright.train.draft.learner import DraftLearner
from torchwright.train.draft.mtp_files import check_mergeable
from torchwright.train.draft.objective import COLUMNS, DraftBatch
from torchwright.train.draft.producers import Producers
from torchwright.train.draft.regenerate import regenerated
from torchwright.train.draft.report import REPORT, Acceptance
from torchwright.train.draft.run_head import RunHead, located
from torchwright.train.draft.served import Measure, measure_served, served_lines
from torchwright.train.draft.target import TargetModel
from torchwright.train.hang.watch import Beat
from torchwright.train.ledger import Ledger
from torchwright.train.run.config.schedule import plan_step, steps
from torchwright.train.run.loop.session import RunOutcome, RunSession
from torchwright.train.run.loop.train import in_session, refuse
from torchwright.train.run.objectives.adapt import base_digests
from torchwright.train.run.objectives.objective import MicroBatch
from torchwright.train.run.objectives.step import StepFigures
from torchwright.train.run.observe.metrics import HELD_OUT
from torchwright.train.run.runtime.corpus import (
    Corpus,
    check_context,
    epochs,
    held_out,
    open_data,
    wait_until_visible,
    walk_of,
)
from torchwright.train.run.runtime.processes import ProcessRank, on_first
from torchwright.train.run.runtime.signals import Leaving

ANSWERS = "answers"
"""The part of a run folder that holds data whose answers the target wrote."""
HELD = "held-out"
"""The part of these that is held out."""
MERGED = "merged"
"""The part of a run folder that holds a copy of the target with its MTP layer in it."""


@dataclass(frozen=True, kw_only=True)
class DraftOutcome(RunOutcome):
    """The outcome of `train_draft`."""

    tokens: int
    validation_loss: float | None
    acceptance: list[dict[str, float]]
    """Held-out figures by the position of a proposal: `agree`, `overlap` and `chain`."""
    accepted_tokens: float | None
    """Proposals of a chain that are right one after the other, in the mean, of `head.steps`."""
    served: list[dict[str, Any]]
    """Ratios to serving without the head, with their intervals, by batch and temperature."""
    merged: Path | None
    """The copy of the target with its MTP layer in it, with `merge`."""


def train_draft(
    path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    merge: bool = False,
    trust: bool = False,
    **how: Any,
) -> DraftOutcome:
    """Train as `train` for language models, a draft head; there is nothing compiled to `trust`.

    `merge` puts an MTP layer into a copy of its model. `measure` is the engine's `served_gain`, by which the target is
    served with the head and without at the end; nothing is served without it.
    """
    run = read_draft(path, settings)
    inside = (path.parent / run.out).resolve() == path.parent.resolve()
    text = path.read_text(encoding="utf-8") if inside else None
    return train_draft_run(run, path.parent, text=text, merge=merge, trust=trust, **how)


def train_draft_run(
    run: DraftRun,
    folder: Path,
    *,
    merge: bool = False,
    trust: bool = False,
    measure: Measure | None = None,
    **how: Any,
) -> DraftOutcome:
    """Train as `train_run`, a draft head; see `train_draft`."""
    refuse(run.kind, trust=trust)
    if merge:
        check_merge(run)
    return in_session(partial(DraftTrainer, merge=merge, measure=measure), run, folder, **how)


class DraftTrainer(RunSession[DraftRun, DraftOutcome]):
    """One process's part of a run."""

    unit, free = "tokens", FREE

    def __init__(
        self,
        run: DraftRun,
        folder: Path,
        out: Path,
        place: ProcessRank,
        ledger: Ledger,
        *,
        live: bool,
        profile: range = range(0),
        merge: bool = False,
        measure: Measure | None = None,
    ) -> None:
        super().__init__(run, out, place, ledger, steps=steps(run.text), live=live, profile=profile)
        self.folder, self.merge, self.measure = folder, merge, measure
        wanted = run.target
        self.target = TargetModel(located(wanted.folder, folder), wanted.dtype, wanted.quantize, place.device)
        config = self.target.decoder.config
        if merge:
            check_mergeable(self.target)
        self.text = run.text
        check_context(self.text, config)
        self.corpus = self._corpus(config)
        self.made = RunHead(run, folder, self.target, self.corpus)
        head = self.made.head
        self.ids = hashlib.sha256(head.ids.cpu().numpy().tobytes()).hexdigest()[:16]
        self.learner = DraftLearner(run, head, self.target, place.device)
        self.held = held_out(self.text, self.corpus, config.bos)
        self.base = on_first(lambda: base_digests(self.target.folder))
        self.acceptance: Acceptance | None = None
        self.validation_loss: float | None = None
        self._walk = walk_of(self.text, self.corpus, run.context, config.bos, 0)
        self.feed = Feed(self._windows, run.micro_batches, self.last, self.target, head.observed)

    def _corpus(self, config: DecoderConfig) -> Corpus:
        """The run's data, with the target's own answers if they are wanted."""
        corpus = open_data(self.text, config, self.folder, self.target.folder, self.out)
        how = self.run.regenerate
        if how is None:
            return corpus
        parts = {**corpus.train, **({HELD: corpus.validation} if corpus.validation else {})}

        def written(name: str, shards: Shards) -> list[Path]:
            def tell(done: int, total: int) -> None:
                self.metrics.show(f"answers of {name}: {done:,} of {total:,} documents")

            folder, seed = self.out / ANSWERS / name, self.run.data.seed
            return regenerated(shards, folder, how, self.target, seed=seed, end=corpus.end, told=tell)

        made = on_first(lambda: {name: written(name, shards) for name, shards in parts.items()})
        wait_until_visible({path: path.stat().st_size for paths in made.values() for path in paths})
        opened = {name: Shards(paths, config.vocabulary) for name, paths in made.items()}
        held = opened.pop(HELD, None)
        return replace(corpus, train=opened, validation=held, packed=True)

    def go(self, beat: Beat) -> DraftOutcome:
        run = self.run
        try:
            if run.features.producers and self.done < self.last:
                name = str(self.target.folder)
                self.feed.produce_by(
                    Producers(run, name, self.learner.model.head.observed, self.place.device)
                )
            return super().go(beat)
        finally:
            self.feed.close()

    def data_facts(self) -> dict[str, Any]:
        return self.corpus.facts()

    def begin(self) -> None:
        self.tell_rows(self.corpus.reports, numbered="row")
        if self.made.begun and not self.done:
            self.metrics.show(f"begins with {self.made.begun}")
        self.recall_best()
        if self.run.data.hold_out is not None:
            held = self.corpus.validation
            self.tell_held_out(0 if held is None else held.tokens, self.corpus.tokens)

    def read(self) -> list[DraftBatch]:
        return self.feed.of_step(self.done)

    def _windows(self, step: int) -> list[MicroBatch]:
        return self.learner.batches.of_step(plan_step(self.text, step), self._walk)

    def update(self, figures: StepFigures, batches: list[DraftBatch]) -> None:
        if not figures.finite:
            step = plan_step(self.text, self.done)
            raise self.not_finite(
                figures,
                found=f"its batch: {self._walk.describe(step.first, step.rows)}",
                rates="optimizer.lr or clip",
            )
        self.learner.update(self.done)

    def progress(self, units_per_s: float) -> dict[str, float | None]:
        step = plan_step(self.text, self.done - 1)
        return {
            "epoch": epochs(self._walk, step.first + step.rows),
            "lr": step.rate * self.run.optimizer.lr,
        }

    def evaluate(self) -> None:
        run, learner, held = self.run, self.learner, self.held
        if held is None:
            return
        rows = learner.batches.rows(run.batch_tokens // run.context) // run.micro_batches
        everywhere = rows * run.parallel.batch_ways
        sums_S5 = torch.zeros(run.head.steps, len(COLUMNS), dtype=torch.float64, device=self.place.device)
        with self.ledger.phase("evaluation"), learner.measuring():
            for first in range(0, held.count, everywhere):
                windows = learner.batches.prepare(held.batch(first + learner.batches.part * rows, rows))
                sums_S5 += learner.model.loss(self.feed.with_states(windows))[1]
            if self.place.world > 1:
                dist.all_reduce(sums_S5)
        if not sums_S5[0, 0]:
            return
        self.acceptance = Acceptance.of(sums_S5.cpu())
        self.validation_loss = float(learner.model.weighted(sums_S5[:, 1]) / sums_S5[0, 0])
        figures = {
            "loss": self.validation_loss,
            "accuracy": self.acceptance.positions[0].agree,
            "accepted_tokens": self.acceptance.accepted,
        }
        found = {f"{HELD_OUT}{name}": value for name, value in figures.items()}
        self.metrics.figures(self.done, found, event="evaluation")
        self.judge(self.validation_loss)

    def finish(self, figures: StepFigures | None) -> DraftOutcome:
        finished = self.done == self.last and self.evaluated()
        if finished:
            self.tell_best(self.validation_loss)
        with self.ledger.phase("checkpoint"):
            self.save(last=True)
            self.checkpoints.wait()
            if finished:
                self.write(MODEL, self._save_head)
                if self.merge:
                    self.write(MERGED, self._save_merged)
        for line in self.acceptance.lines() if finished and self.acceptance else ():
            self.metrics.show(line)
        served = self._serve() if finished else []
        report = self.acceptance.as_dict() if self.acceptance else {"positions": [], "accepted_tokens": None}
        if finished:
            self.metrics.event("acceptance", at=self.done, positions=report["positions"], served=served)
        return DraftOutcome(
            out=self.out,
            steps=self.done,
            tokens=self.counted,
            loss=None if figures is None else figures.loss,
            validation_loss=self.validation_loss,
            acceptance=report["positions"],
            accepted_tokens=report["accepted_tokens"],
            served=served,
            merged=self.out / MERGED if finished and self.merge else None,
            effective_time=self.ledger.effective(),
            model=self.out / MODEL if finished else None,
            signal=self.leave_signal(finished),
        )

    def _save_head(self, folder: Path) -> None:
        tensors = self.made.tensors()
        if self.place.first:
            self.made.write(tensors, folder)
            self._write_report(folder, [])

    def _save_merged(self, folder: Path) -> None:
        tensors = self.made.tensors()
        if self.place.first:
            self.made.write_merged(tensors, folder)

    def _write_report(self, folder: Path, served: list[dict[str, Any]]) -> None:
        if self.acceptance is not None:
            text = json.dumps(self.acceptance.as_dict() | {"served": served}, indent=1)
            (folder / REPORT).write_text(text + "\n", encoding="utf-8")

    def _serve(self) -> list[dict[str, Any]]:
        """Serve the target with the head and without; empty where that is left out, or broken off by a signal."""
        run, measure, held = self.run, self.measure, self.corpus.validation
        if measure is None or not run.evaluation.served_s or held is None or self.acceptance is None:
            return []
        first, head = self.acceptance.positions[0], self.out / MODEL

        def serve() -> list[dict[str, Any]]:
            self.metrics.show(f"serving with the head and without, for about {run.evaluation.served_s:.0f} s")
            rows = measure_served(measure, run, self.target, head, held, self.corpus.end, first)
            self._write_report(head, rows)
            return rows

        try:
            with self.ledger.phase("evaluation"), self.dropping():
                rows = on_first(serve)
        except Leaving:
            return []
        for line in served_lines(rows):
            self.metrics.show(line)
        return rows

    def facts(self) -> dict[str, Any]:
        return {
            "order": ORDER,
            "train_tokens": self.corpus.tokens,
            "train_files": self.corpus.digest(),
            "draft_tokens": self.ids,
            "base": self.base,
        }
