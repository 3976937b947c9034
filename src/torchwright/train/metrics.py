"""What a run tells while it runs: a line of JSON, TensorBoard where it is installed, and a live line in the terminal.

RUN/metrics.jsonl   {"step": 40, "tokens": 327680, "loss": 5.1, …}; after a restart a step may come twice, the
                    later line counts
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from torchwright.decoder.config import DecoderConfig

FILE = "metrics.jsonl"
UNITS = {"lr": ".2e", "loss": ".4f", "validation_loss": ".4f", "grad_norm": ".3f"}


def flops_per_token(config: DecoderConfig, context: int) -> float:
    """Operations that training takes for a token, a multiply and an add being two, recomputation not counted.

    Six for each weight that the token meets (Kaplan et al., 2020) and twelve for each head dimension and key (Chowdhery
    et al., 2022), of which a causal query meets half as many as the window has, or its sliding window.
    """
    E, D = config.model, config.head_dim
    attention = (2 * config.heads + 2 * config.kv_heads) * D * E
    total = config.vocabulary * E
    for layer, window in enumerate(config.windows):
        if config.sparse[layer] and config.experts:
            experts = config.experts
            total += attention + E * experts.count + 3 * E * experts.feed_forward * experts.chosen
        else:
            total += attention + 3 * E * config.feed_forward
        seen = context / 2 if not window or window >= context else window * (1 - window / (2 * context))
        total += 2 * config.heads * D * seen
    return 6.0 * total


class Metrics:
    """The run's figures, on the first process; a process that shows nothing makes one with `folder=None`."""

    def __init__(
        self, folder: Path | None, *, steps: int, live: bool, console: Console | None = None
    ) -> None:
        """`live`: show a line that moves in the terminal, or in a file one line for each set of figures."""
        self._folder, self._file, self._board = folder, None, None
        self._console = console or Console(stderr=True, highlight=False)
        self._live = live and folder is not None
        self._progress: Progress | None = None
        if self._live and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=steps, figures="")

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._file = (self._folder / FILE).open("a", buffering=1, encoding="utf-8")
            self._board = _tensorboard(self._folder)
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()

    def event(self, name: str, **facts: Any) -> None:
        """Something that happened once."""
        self._write({"event": name, **facts})

    def show(self, text: str) -> None:
        """A line for whoever watches; never read as markup."""
        if self._live:
            self._console.print(text, markup=False)

    def figures(self, step: int, values: Mapping[str, float | None]) -> None:
        """Figures after `step` steps; what is None is not known and left out."""
        known = {name: value for name, value in values.items() if value is not None}
        self._write({"step": step, **known})
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
        if not self._live:
            return
        text = _told(known)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=text)
        else:
            self._console.print(f"step {step}  {text}", markup=False)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, default=str) + "\n")


def read_figures(folder: Path) -> dict[int, dict[str, Any]]:
    """Step → its figures of a run folder; of a step that was done twice the later ones."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if "step" in data and "event" not in data:
            found.setdefault(data["step"], {}).update(data)
    return found


def _told(values: Mapping[str, float]) -> str:
    """The figures for people."""
    words = []
    for name in ("loss", "validation_loss", "lr", "grad_norm"):
        if name in values:
            words.append(f"{name.replace('_', ' ')} {values[name]:{UNITS[name]}}")
    if "tokens_per_s" in values:
        words.append(f"{values['tokens_per_s']:,.0f} tok/s")
    if "mfu" in values:
        words.append(f"MFU {values['mfu']:.0%}")
    if "memory_bytes" in values:
        words.append(f"{values['memory_bytes'] / 2**30:.2f} GiB")
    if "effective_time" in values:
        words.append(f"effective {values['effective_time']:.0%}")
    return "  ".join(words)


def perplexity(nll: float) -> float:
    """exp(nll), infinite where that has no float."""
    return math.exp(nll) if nll < 700 else math.inf


def _tensorboard(folder: Path) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
