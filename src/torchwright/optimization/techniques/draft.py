"""A draft model next to a served language model, kept where the workload's own text is served faster with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torchwright.core import system
from torchwright.core.errors import RefusedTechnique, TechniqueFailed
from torchwright.core.process import interrupts
from torchwright.core.records import Interval
from torchwright.hub.folder import model_files, resolve
from torchwright.optimization.techniques.base import Phase, ServedGain, Target, Technique

SIZES = ("batch", "prompt_tokens", "new_tokens", "eval_text")
"""Fields of a language workload that `torchwright bench` takes."""


@dataclass(frozen=True, kw_only=True)
class Draft(Technique):
    """Native decoder: a draft model proposes tokens to the served model, whose answers stay bitwise the same."""

    name: ClassVar[str] = "draft"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"language", "decoder"})
    runs_only: ClassVar[bool] = True
    served: ClassVar[bool] = True

    folder: str | None = None
    """The draft's folder or hub id: an EAGLE-3 head, an MTP layer, or a small model with the same tokens."""

    def variants(self, target: Target) -> Iterable[Self]:
        return ()  # no draft is known that nobody names

    def refuse(self, target: Target) -> str | None:
        return None if self.folder else "it names no draft: draft:folder=DIR"

    def apply(self, target: Target) -> None:
        self.cover(target, 1, unit="draft models")

    def files(self) -> dict[str, Path]:
        """See `Technique`. Raises `ModelError` for a folder that is not there."""
        return model_files(resolve(self._folder), weights=True)

    def try_on(self, artifact: Path, workload: Mapping[str, Any], seconds: float) -> ServedGain:
        """Serve pieces of the workload's text with the draft and without, in turns, in a fresh process.

        Both may look tokens up in the text, as `torchwright serve` does.
        """
        words = ["bench", str(artifact), "--draft", self._folder, "--json"]
        for name in SIZES:
            if workload.get(name) is not None:
                words += [f"--{name.replace('_', '-')}", str(workload[name])]
        found = json.loads(_answer(words, seconds))
        name = f"{found['draft']} and n-gram"
        rows = [row for row in found["proposals"] if row["proposed_by"] == name]
        accepted, proposed = (sum(row[f"{what}_tokens"] for row in rows) for what in ("accepted", "proposed"))
        return ServedGain(
            gains={
                f"at temperature {row['temperature']:g}": Interval(
                    value=row["over_n_gram"], low=row["over_n_gram_low"], high=row["over_n_gram_high"]
                )
                for row in rows
            },
            over="n-gram look-up alone",
            note=f"{accepted} of {proposed} proposals accepted",
        )

    @property
    def _folder(self) -> str:
        if not self.folder:
            raise RefusedTechnique("no draft is named", allowed="draft:folder=DIR, or --draft DIR")
        return self.folder


def _answer(words: list[str], seconds: float) -> str:
    """Run the command line in a process of its own, and return its output; raises `TechniqueFailed`."""
    command, end = [sys.executable, "-m", "torchwright", *words], time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        **system.apart(),
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=interrupts.POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    interrupts.check()
                    if time.monotonic() > end:
                        raise TechniqueFailed(
                            "the draft was not measured", found=f"nothing after {seconds:.0f} s"
                        ) from None
        finally:
            if process.poll() is None:
                system.kill_all(process)
    if process.returncode:
        lines = " ".join(errors.split()) or f"exit code {process.returncode}"
        raise TechniqueFailed("the draft was not measured", found=lines)
    return output
