"""The reports of a run while it runs: lines of JSON, a live line in the terminal, TensorBoard if it is installed.

Weights & Biases gets the figures if the run asks for it.

RUN/metrics.jsonl   {"step": 40, "tokens": 327680, "loss": 5.1, …}, each step once: what a restart does again goes first
                    {"event": "evaluation", "at": 40, "validation_loss": 5.2, …}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from torchwright.core.duration import written
from torchwright.core.errors import TorchwrightError
from torchwright.core.process.files import open_own, replacing
from torchwright.report.console import SafeConsole, moves
from torchwright.train.run.config.run import Wandb
from torchwright.train.run.observe.wandb_run import wandb_run

FILE = "metrics.jsonl"
UNITS = {
    "epoch": ".2f",
    "loss": ".4f",
    "lr": ".2e",
    "grad_norm": ".3f",
    "expert_load": ".2f",
    "auc": ".4f",
    "normalized_entropy": ".4f",
    "reward_margin": ".3f",
    "reward_accuracy": ".1%",
    "accuracy": ".1%",
    "recall_at_1": ".1%",
    "accepted_tokens": ".2f",
    "word_error_rate": ".1%",
    "broken_files": ",.0f",
}
HELD_OUT = "validation_"
RATES = {"tokens_per_s": "tok/s", "samples_per_s": "rows/s"}


def is_run(folder: Path) -> bool:
    """Check whether a folder is that of a training run."""
    return (folder / FILE).is_file()


class RunMetrics:
    """The run's figures, on the first process; a process that shows nothing makes one with `folder=None`."""

    def __init__(
        self,
        folder: Path | None,
        *,
        steps: int,
        live: bool,
        console: Console | None = None,
        wandb: Wandb | None = None,
    ) -> None:
        """`live`: show a line that moves in the terminal, or in a file one line for each set of figures."""
        self._folder, self._file, self._board = folder, None, None
        self._wandb, self._wandb_run = wandb, None
        self._console = console or SafeConsole(stderr=True, highlight=False)
        self._live, self._steps = live and folder is not None, steps
        self._since: tuple[float, int] | None = None
        self._first = True
        self._validation = ""
        self._samples = 0
        self._at = 0
        self._progress: Progress | None = None
        if self._live and moves(self._console):
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=steps, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TorchwrightError):
            with contextlib.suppress(OSError):  # the fault itself reports a full disk
                self.event("stopped", at=self._at, reason=str(error))
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=0 if error is None else 1)
        if self._file is not None:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                self._file.close()

    def begin(self, at: int, **facts: Any) -> None:
        """Go on after step `at`; remove lines of later steps, which come again, but keep why an attempt stopped."""
        if self._folder is not None:
            path = self._folder / FILE
            kept = [
                text
                for text, line in _lines(path)
                if line.get("step", line.get("at", 0)) <= at or line.get("event") == "stopped"
            ]
            with replacing(path) as new:
                new.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
            self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "a", 1, encoding="utf-8")
            self._board = _tensorboard(self._folder, at)
            if self._wandb is not None:
                self._wandb_run = wandb_run(self._folder, self._wandb, facts)
        self._at, self._since = at, (time.monotonic(), at)
        self._samples = facts.get("data", {}).get("train", {}).get("samples", 0)
        self.event("start", at=at, **facts)

    def event(self, name: str, **facts: Any) -> None:
        """Record an event."""
        self._write({"event": name, **facts})

    def show(self, text: str) -> None:
        """Print a line, unless the run is quiet; it is never read as markup."""
        if self._live:
            self._console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line in a quiet run as well: the run differs from what its user may think."""
        if self._folder is not None:
            self._console.print(text, markup=False, soft_wrap=True, style="yellow")

    def figures(self, step: int, values: Mapping[str, float | None], *, event: str | None = None) -> None:
        """Record figures after `step` steps, its own or those of an event; unknown ones (None) are left out."""
        self._at = step
        known = {name: value for name, value in values.items() if value is not None}
        if self._samples and "samples" in known:
            known = {"epoch": known["samples"] / self._samples} | known
        self._write({**({"event": event, "at": step} if event else {"step": step}), **known})
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
        if self._wandb_run is not None:
            self._wandb_run.log(known, step=step)
        if not self._live:
            return
        text = metrics_message(known)
        if event is None:
            text += self._validation
        elif f"{HELD_OUT}loss" in known:
            self._validation = f"  validation loss {known[f'{HELD_OUT}loss']:.4f} at step {step}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=text)
        else:
            left = self._left(step)
            self._console.print(f"step {step} of {self._steps}  {text}{left}", markup=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        """Return the time that is left, by the pace since the first figures: evaluations and checkpoints included.

        The first figures go by the pace since the start, which holds what only the first step does.
        """
        now = time.monotonic()
        since, first = self._since or (now, step)
        if self._first:
            self._since, self._first = (now, step), False
        if step <= first or step >= self._steps:
            return ""
        return f"  {written((now - since) / (step - first) * (self._steps - step))} left"

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, default=str) + "\n")


def read_figures(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the figures of each step of a run folder, those of an evaluation after it included."""
    found: dict[int, dict[str, Any]] = {}
    for _, line in _lines(folder / FILE):
        if line.get("event") == "evaluation":
            line = {"step": line["at"]} | {name: line[name] for name in line if name not in ("event", "at")}
        if "event" not in line:
            found.setdefault(line["step"], {}).update(line)
    return found


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each whole line of the figures, as text and as values; nothing before the file exists."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):  # the last line of a process that was killed
            yield text, json.loads(text)


def metrics_message(values: Mapping[str, float]) -> str:
    """Return the figures in words."""
    words: list[str] = []
    for name, value in values.items():
        if unit := UNITS.get(name.removeprefix(HELD_OUT)):
            words.append(f"{name.replace('_', ' ')} {value:{unit}}")
        if name.startswith("recall@"):
            words.append(f"{name} {value:.3f}")
    words += [f"{values[name]:,.0f} {unit}" for name, unit in RATES.items() if name in values]
    if "mfu" in values:
        words.append(f"MFU {values['mfu']:.0%}")
    if "memory_bytes" in values:
        words.append(f"{values['memory_bytes'] / 2**30:.2f} GiB")
    if "effective_time" in values:
        words.append(f"effective {values['effective_time']:.0%}")
    return "  ".join(words)


def perplexity(nll: float) -> float:
    """Return exp(nll), infinite beyond the largest float."""
    return math.exp(nll) if nll < 700 else math.inf


def _tensorboard(folder: Path, at: int) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=at + 1)
