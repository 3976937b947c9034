"""The session of a run of any kind in one process: steps until the end or a signal, evaluations, checkpoints.

Each kind of run is a subclass of `RunSession`: it knows its data, its model, its step and its outcome.
`loop.in_session` gives it a folder, a lock, the other processes, a ledger and a watch.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors import SafetensorError

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.allocator import retain_where_possible
from torchwright.train.data.documents import FileReport
from torchwright.train.hang.watch import Beat
from torchwright.train.ledger import Ledger
from torchwright.train.run.config.run import AnyRun
from torchwright.train.run.config.run_file import changed_fields
from torchwright.train.run.loop.best import Best
from torchwright.train.run.objectives.precision import slow_in_bf16
from torchwright.train.run.objectives.step import StepFigures
from torchwright.train.run.observe.metrics import HELD_OUT, RunMetrics, read_figures
from torchwright.train.run.observe.page import LivePage
from torchwright.train.run.observe.profiling import StepProfiler, profile_message
from torchwright.train.run.runtime import checkpoint
from torchwright.train.run.runtime.checkpoint import CheckpointError, Checkpoints, Described
from torchwright.train.run.runtime.patience import patient
from torchwright.train.run.runtime.processes import ProcessRank, on_first
from torchwright.train.run.runtime.signals import Leaving, Signals
from torchwright.train.run.runtime.threads import RunThreads, user_chose

Outcome = TypeVar("Outcome", bound="RunOutcome", covariant=True)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The outcome of a call of `train`."""

    out: Path
    steps: int
    loss: float | None
    """Loss of the last step; None if no step was left to do."""
    effective_time: float
    """Share of this process's time that went into steps."""
    model: Path | None
    """The trained model's folder; None if the run was asked to leave before its end, or has adapters alone."""
    signal: int | None
    """The signal that asked it to leave."""


class TrainingStopped(TorchwrightError):
    """A run that cannot go on: a loss or gradient that is not finite, or a lost process."""


class RunSession(ABC, Generic[AnyRun, Outcome]):
    """One process's part of a run."""

    unit: ClassVar[str]
    """The unit that the run counts in, and the field of its file that says how many."""
    free: ClassVar[tuple[str, ...]]
    """Fields that may change when a run is continued."""
    learner: Any
    """The model, its loss and its optimizers: `gradients`, `prepare` and `tensors`."""

    def __init__(
        self,
        run: AnyRun,
        out: Path,
        place: ProcessRank,
        ledger: Ledger,
        *,
        steps: int,
        live: bool,
        profile: range = range(0),
    ) -> None:
        """`steps` is the run's last; those in `profile` are made under torch's profiler."""
        self.run, self.out, self.place, self.ledger, self.last = run, out, place, ledger, steps
        if place.device == "cpu":
            retain_where_possible()  # activations and gradients come back in the same sizes every step
        self.checkpoints = Checkpoints(out, run.checkpoint.keep, ledger.checkpointed)
        self.metrics = RunMetrics(out if place.first else None, steps=steps, live=live, wandb=run.wandb)
        self.page = LivePage(out if place.first else None)
        self.profiler = StepProfiler(profile, out, rank=place.rank, device=place.device)
        self.signals, self.device = Signals(), get_device(place.device)
        self.threads = RunThreads(fixed=user_chose(run, place))
        self._told_threads = self.threads.look()
        self.best = Best()
        self.done = 0
        self._since = time.perf_counter(), 0

    @abstractmethod
    def data_facts(self) -> dict[str, Any]:
        """Return facts about the run's data, for its page."""

    @abstractmethod
    def begin(self) -> None:
        """Report what is known before the first step."""

    @abstractmethod
    def read(self) -> Any:
        """Return this process's batches of the next step."""

    @abstractmethod
    def update(self, figures: StepFigures, batches: Any) -> None:
        """Move the parameters by their gradients. Raises `TrainingStopped` for numbers that are not finite."""

    def progress(self, units_per_s: float) -> dict[str, float | None]:
        """Return further figures of a step, for `show`."""
        return {}

    @abstractmethod
    def evaluate(self) -> None:
        """Measure the held-out data, and report it."""

    @abstractmethod
    def finish(self, figures: StepFigures | None) -> Outcome:
        """Write a checkpoint, and at the run's end the model; `figures` are the last step's."""

    def prepare(self) -> None:
        """Create the optimizers' state, for a checkpoint to fill."""
        self.learner.prepare()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that a step changes, by name."""
        return self.learner.tensors()

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return facts that a run needs to continue, for `described`."""

    def unlike(self, saved: Described, now: Described) -> list[str]:
        """Return further differences to a checkpoint's run. Raises `CheckpointError` if they cannot be compared."""
        return []

    @property
    def counted(self) -> int:
        """Units that the run was trained on so far."""
        return self.done * self.run.per_step

    def described(self) -> Described:
        """Return the description of a checkpoint."""
        return Described(
            step=self.done,
            tokens=self.counted,
            run=self.run.model_dump(mode="json"),
            facts={"torch": torch.__version__, **self.facts()},
        )

    def show(self, figures: StepFigures) -> None:
        """Report the figures of a step; those that are not finite are left out."""
        if figures.finite:
            self.best.trained(figures.loss)
        units_per_s = self.steps_per_s() * self.run.per_step
        # A kind's own figures take the places of the empty ones.
        common = {
            self.unit: self.counted,
            "epoch": None,
            **({"loss": figures.loss, **figures.more} if figures.finite else {}),
            "lr": None,
            "grad_norm": figures.grad_norm if figures.finite else None,
            f"{self.unit}_per_s": units_per_s,
            "memory_bytes": self.device.peak_memory_bytes(),
            "effective_time": self.ledger.effective(),
        }
        self.metrics.figures(self.done, common | self.progress(units_per_s))

    def advance(self) -> StepFigures:
        """Make one step; return its figures, and report them where they are due."""
        with self.ledger.phase("data_wait"):
            batches = self.read()
        with self.ledger.phase("step", step=self.done + 1):
            with self.computing():
                figures = self.learner.gradients(
                    batches, leave=self.signals.number is not None, failed=self.checkpoints.failed
                )
            if figures.failed:
                self.checkpoints.wait()  # raises its reason
            self.update(figures, batches)
        self.done += 1
        if self.done % self.run.log_every == 0 or self.done == self.last or figures.leave:
            self.show(figures)
        return figures

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which a step's gradients are computed."""
        return self.dropping()

    def resume(self) -> None:
        """Take the state of the last checkpoint. Raises `CheckpointError` if it is damaged or of another run."""
        folder = checkpoint.whole(self.checkpoints.folder)[-1]
        saved, now = checkpoint.describe(folder), self.described()
        unlike = self.unlike(saved, now)
        different = changed_fields(saved.run, now.run, ignore=self.free)
        different += [*changed_fields(saved.facts, now.facts, ignore=("torch",)), *unlike]
        if self.run.deterministic:
            different += changed_fields({"threads": saved.run["threads"]}, {"threads": now.run["threads"]})
        if different:
            raise CheckpointError(
                f"the checkpoint {folder} is of another run",
                found="; ".join(different),
                allowed=f"changes of {', '.join(self.free)}",
                next="set the old values, or another `out` for a run of its own, or begin anew with --fresh",
            )
        if saved.step > self.last:
            raise CheckpointError(
                f"the checkpoint {folder} has gone further than the run file asks for",
                found=f"{saved.tokens:,} {self.unit}; the run file has {getattr(self.run, self.unit):,}",
                next=f"set `{self.unit}` to more, or train from an earlier checkpoint by moving this one away",
            )
        self.prepare()
        checkpoint.load(folder, self.tensors())
        self.done = saved.step
        self.ledger.resumed(step=self.done)

    def go(self, beat: Beat) -> Outcome:
        """Make steps until the end, or until a signal asks to leave; both end in a checkpoint.

        `beat` is called after each step, and with the patience for it before what may take long.
        """
        self.profiler.check(self.done, self.last)
        figures = None
        with ExitStack() as left, self.metrics, self.signals.noted():
            left.callback(self.threads.restore)
            left.callback(self.checkpoints.settle)
            self.metrics.begin(
                self.done,
                world=self.place.world,
                torch=torch.__version__,
                threads=torch.get_num_threads(),
                steps=self.last,
                data=self.data_facts(),
                run=self.run.model_dump(mode="json"),
            )
            self._tell_threads(self._told_threads)
            self.begin()
            self._tell_precision()
            self._since = time.perf_counter(), self.done
            with suppress(Leaving):
                while self.done < self.last and not (figures and figures.leave):
                    with self.profiler.step(self.done + 1):
                        figures = self.advance()
                    self.page.refresh()
                    beat()
                    if self.profiler.ready():
                        beat(math.inf)
                        self._write_profile()
                        beat()
                    if self.done < self.last and not figures.leave:
                        beat(math.inf)
                        self._tell_threads(self.threads.look())
                        self._between()
                        beat()
            beat(math.inf)
            with patient(self.run.timeout_s):
                self._write_profile()
                outcome = self.finish(figures)
            self.metrics.event("end" if self.done == self.last else "left", at=self.done)
            return outcome

    def dropping(self) -> AbstractContextManager[None]:
        """A block that a signal breaks off with `Leaving`, where this process is alone."""
        return self.signals.dropping() if self.place.world == 1 else nullcontext()

    def evaluated(self) -> bool:
        """Evaluate at the end; return False if a signal broke the evaluation off."""
        try:
            with self.dropping():
                self.evaluate()
        except Leaving:
            return False
        return True

    def _tell_precision(self) -> None:
        """Tell of a run in bfloat16 on a processor that has no instructions for it."""
        precision = getattr(self.run, "precision", None)
        if precision not in (None, "fp32") and slow_in_bf16(self.place.device):
            self.metrics.show(
                f"precision = '{precision}': this processor has no instructions for bfloat16, "
                "and a step in 'fp32' may take a fraction of the time"
            )

    def _tell_threads(self, text: str | None) -> None:
        """Record that the number of threads changed, where it did."""
        if text is not None:
            self.metrics.event("threads", at=self.done, threads=torch.get_num_threads(), reason=text)
            self.metrics.show(text)

    def _write_profile(self) -> None:
        """Write the profile of the profiled steps, if there are any; it takes longer than a step."""
        found = self.profiler.finish()
        if found is not None:
            self.metrics.event("profile", at=self.done, **dataclasses.asdict(found))
            self.metrics.show(profile_message(found))
            self._since = time.perf_counter(), self.done

    def tell_rows(self, reports: Mapping[str, FileReport], *, numbered: str) -> None:
        """Report by file what its rows are read as, how labels were found, and the rows that are left out.

        `numbered` is what a report's numbers count.
        """
        for file, report in reports.items():
            if report.layout is not None:
                self.metrics.show(f"{file}: read as {report.layout} ({report.rows:,} rows)")
            for note, count in report.notes.items():
                self.metrics.event("labels", file=file, note=note, documents=count)
                self.metrics.warn(f"{file}: {note} ({count:,} of {report.documents:,} documents)")
            if report.broken:
                number, reason = report.listed[0]
                self.metrics.event("broken_rows", file=file, broken=report.broken, rows=report.listed)
                self.metrics.warn(
                    f"{file}: {report.broken:,} of {report.rows:,} rows are broken and left out, the first in "
                    f"{numbered} {number}: {reason}"
                )

    def recall_best(self) -> None:
        """Take the best validation loss of a run that goes on from its own figures."""
        figures = read_figures(self.out) if self.place.first else {}
        self.best.recall(
            (step, found.get("loss"), found.get(f"{HELD_OUT}loss")) for step, found in sorted(figures.items())
        )
        self.checkpoints.best = self.best.step or None

    def judge(self, loss: float) -> None:
        """Take the validation loss after this step: keep the checkpoint of the best one, warn of memorizing."""
        warning = self.best.judge(self.done, loss)
        self.checkpoints.best = self.best.step
        if warning is not None:
            self.metrics.event("memorizes", at=self.done, best=self.best.step, loss=self.best.loss)
            self.metrics.warn(warning)

    def tell_held_out(self, held: int, trained_on: int) -> None:
        """Report what is held out of the training data, in the run's unit."""
        self.metrics.show(
            f"held out for validation: {held:,} {self.unit}, {trained_on:,} are trained on"
            if held
            else "nothing is held out for validation: the data are too few"
        )

    def leave_signal(self, finished: bool) -> int | None:
        """Return the signal that asked the run to leave before its end; another process may have had it."""
        return None if finished else (self.signals.number or signal.SIGTERM)

    def tell_best(self, loss: float | None) -> None:
        """Compare the last validation loss with the best at the end of the run."""
        if loss is not None and self.best.step not in (0, self.done):
            self.metrics.show(
                f"validation loss {loss:.4f}; the best was {self.best.loss:.4f} at step {self.best.step}"
            )

    def not_finite(self, figures: StepFigures, *, found: str, rates: str) -> TrainingStopped:
        """Return the fault of the next step; `found` names its data, `rates` the fields that may be lowered."""
        self.checkpoints.wait()
        good = checkpoint.whole(self.checkpoints.folder)
        return TrainingStopped(
            f"step {self.done + 1} has a loss of {figures.loss} and a gradient norm of {figures.grad_norm}",
            found=found,
            allowed=f"the last good checkpoint is {good[-1]}" if good else "no checkpoint was written yet",
            next=f"look at the batch, lower {rates}, and start the same command again",
        )

    def save(self, *, last: bool = False) -> None:
        """Begin to write a checkpoint of the present state; no step comes after the `last` one."""
        leaving = last and (
            self.done < self.last or (self.place.world == 1 and self.signals.number is not None)
        )
        self.checkpoints.save(self.tensors(), self.described(), last=last, leaving=leaving)

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Write RUN/`name`; an older one is replaced when the new one is whole."""
        folder, new = self.out / name, self.out / f"{name}.new"
        on_first(lambda: shutil.rmtree(new, ignore_errors=True))
        try:
            save(new)
        except SafetensorError as error:  # as which safetensors raises what the disk says
            shutil.rmtree(new, ignore_errors=True)
            raise CheckpointError(
                f"{folder} could not be written",
                found=str(error),
                allowed=f"the checkpoint of step {self.done} is whole",
                next="free some space, then start the same command again: no step is made twice",
            ) from error

        def swap() -> None:
            if folder.exists():
                shutil.rmtree(folder)
            new.rename(folder)

        on_first(swap)

    def steps_per_s(self) -> float:
        """Return steps per second since the last call, or since the last evaluation or checkpoint."""
        (since, counted), now = self._since, time.perf_counter()
        self._since = now, self.done
        return (self.done - counted) / (now - since)

    def _between(self) -> None:
        """Evaluate and save a checkpoint at their intervals; their time does not count as steps."""
        evaluate, save = (
            bool(every) and self.done % every == 0
            for every in (self.run.evaluate_every, self.run.checkpoint.every_steps)
        )
        if evaluate:
            with self.dropping():
                self.evaluate()
        if save:
            with self.ledger.phase("checkpoint"):
                self.save()
        if evaluate or save:
            self._since = time.perf_counter(), self.done
