"""Compiled code of a run's steps, kept with its checkpoints: a run that goes on elsewhere compiles nothing.

    RUN/compiled/rank-00000/      a bundle (optimization/caches/bundle.py) of each process, whose parts of a model may
    differ

A bundle holds machine code and pickles. One that this user packed on this machine is taken as it is, any other with
trust alone; without it the run compiles for itself, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.caches.bundle import BUNDLE, pack, unpack
from torchwright.train.run.runtime.processes import ProcessRank

FOLDER = "compiled"


class CompiledCode:
    """One process's compiled code and its place in the run's folder; `pack` writes a bundle."""

    def __init__(
        self, out: Path, place: ProcessRank, *, trust: bool, pack: Callable[..., object] = pack
    ) -> None:
        self._pack = pack
        self._folder, self._trust = out / FOLDER / f"rank-{place.rank:05}", trust
        self._calls: list[str] = []
        """Names of what was compiled and is not packed yet."""

    def restore(self) -> str | None:
        """Put what earlier attempts compiled where torch.compile looks for it; why that is not done, or None."""
        if not (self._folder / BUNDLE).is_file():
            return None
        try:
            unpack(self._folder, trust=self._trust)
        except (TorchwrightError, OSError) as error:
            return f"the run's compiled code is not used, and is made anew: {error}"
        return None

    def made(self, call: str) -> None:
        """Note that something was compiled, for the next `keep`."""
        self._calls.append(call)

    def keep(self) -> str | None:
        """Pack what this process has compiled, where there is anything new; why that failed, or None.

        A full disk does not end a run here: it costs a later run nothing but time.
        """
        if not self._calls:
            return None
        calls, self._calls = self._calls, []
        try:
            self._folder.parent.mkdir(exist_ok=True)
            self._pack(self._folder, made_by="a training run", calls=calls)
        except (TorchwrightError, OSError) as error:
            return f"what was compiled is not kept: {error}"
        return None
