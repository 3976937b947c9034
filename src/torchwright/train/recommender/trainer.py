"""One process's part of a recommender's run."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.process.files import replacing
from torchwright.hub.run_folder import MODEL
from torchwright.train.ledger import Ledger
from torchwright.train.recommender.config import FREE, RecommenderRun, read_recommender
from torchwright.train.recommender.layout import placement, topology_of
from torchwright.train.recommender.learner import RecommenderLearner
from torchwright.train.recommender.losses import make_loss
from torchwright.train.recommender.quality import Figures, measure_quality
from torchwright.train.recommender.report import make_report, report_lines
from torchwright.train.recommender.saved import save_recommender
from torchwright.train.recommender.store import ClickBatch, open_clicks
from torchwright.train.run.loop.session import RunOutcome, RunSession
from torchwright.train.run.loop.train import in_session, refuse
from torchwright.train.run.objectives.step import StepFigures
from torchwright.train.run.runtime.processes import ProcessRank

REPORT = "report.json"
"""The part of a run folder that says how the layout did."""


@dataclass(frozen=True, kw_only=True)
class RecommenderOutcome(RunOutcome):
    """The outcome of `train_recommender`."""

    samples: int
    quality: Figures | None
    """Of the held-out rows at the end."""


def train_recommender(
    path: Path, *, merge: bool = False, trust: bool = False, **how: Any
) -> RecommenderOutcome:
    """Train as `train`, a recommender."""
    run = read_recommender(path)
    refuse(run.kind, merge=merge, trust=trust)
    return in_session(RecommenderTrainer, run, path.parent, **how)


class RecommenderTrainer(RunSession[RecommenderRun, RecommenderOutcome]):
    """One process's part of a run."""

    unit, free = "samples", FREE

    def __init__(
        self,
        run: RecommenderRun,
        folder: Path,
        out: Path,
        place: ProcessRank,
        ledger: Ledger,
        *,
        live: bool,
        profile: range = range(0),
    ) -> None:
        super().__init__(run, out, place, ledger, steps=run.steps, live=live, profile=profile)
        self.clicks = open_clicks(run, folder, out)
        self.plan = placement(run, self._batch(0), out)
        self.learner = RecommenderLearner(
            run,
            topology_of(run.embeddings, place.world),
            self.plan,
            make_loss(run, self.clicks, place.device),
            place.device,
        )
        self.quality: Figures | None = None

    def data_facts(self) -> dict[str, Any]:
        return {"train": {"files": len(self.clicks.reports), "samples": len(self.clicks.train)}}

    def begin(self) -> None:
        self.tell_rows(self.clicks.reports, numbered="line")

    def read(self) -> ClickBatch:
        return self._batch(self.done)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()  # rows of tables move with their gradients: a step that was begun is ended

    def update(self, figures: StepFigures, batches: ClickBatch) -> None:
        if not figures.finite:
            first = self.done * self.run.batch
            raise self.not_finite(
                figures,
                found=f"its batch: rows {first:,} to {first + self.run.batch - 1:,} of {len(self.clicks.train):,}, "
                "counted on from file to file",
                rates="optimizer.lr or embeddings.lr",
            )
        self.learner.update(self.done)

    def evaluate(self) -> None:
        with self.ledger.phase("evaluation"):
            self.quality = measure_quality(self.run, self.learner, self.clicks, self.place.device)
            if self.quality is not None:
                self.metrics.figures(self.done, self.quality, event="evaluation")

    def finish(self, figures: StepFigures | None) -> RecommenderOutcome:
        finished = self.done == self.last
        with self.ledger.phase("checkpoint"):
            self.save(last=True)
            self.checkpoints.wait()
        if finished:
            # After the checkpoint: a longer run goes on with the copies as they are.
            self.learner.tables.sync()
            finished = self.evaluated()
        if finished:
            with self.ledger.phase("checkpoint"):
                self.write(MODEL, self._save_model)
            with self.ledger.phase("evaluation"):
                self._report()
        return RecommenderOutcome(
            out=self.out,
            steps=self.done,
            samples=self.counted,
            loss=None if figures is None else figures.loss,
            quality=self.quality,
            effective_time=self.ledger.effective(),
            model=self.out / MODEL if finished else None,
            signal=self.leave_signal(finished),
        )

    def facts(self) -> dict[str, Any]:
        return {
            "processes": self.place.world,
            "train_rows": len(self.clicks.train),
            "train_files": self.clicks.digest,
            "placement": [[s.table, s.owner, list(s.rows), list(s.columns)] for s in self.plan.shards],
        }

    def _batch(self, number: int) -> ClickBatch:
        """This process's part of a step's rows, which follow those of the step before."""
        own = self.run.batch // self.place.world
        return self.clicks.train.batch(
            number * self.run.batch + self.place.rank * own, own, self.place.device
        )

    def _report(self) -> None:
        report = make_report(self.run, self.plan, self.clicks.train, self.learner.loss, self.place.device)
        if report is None or not self.place.first:
            return
        report["seconds"] = self.ledger.seconds()
        with replacing(self.out / REPORT) as new:
            new.write_text(json.dumps(report, indent=1), "utf-8")
        for line in report_lines(report):
            self.metrics.show(line)

    def _save_model(self, folder: Path) -> None:
        save_recommender(self.run, self.learner, folder if self.place.first else None)
