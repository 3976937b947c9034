# pyright: basic
"""Targets whose files an engine of the search writes and runs, too: one conversion for both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchwright.core.errors import TorchwrightError
from torchwright.exporter.base import GraphTarget, Run, Written
from torchwright.exporter.verification.operators import refused_graph
from torchwright.optimization.engines.compiled.program import ignore_library_warnings
from torchwright.optimization.engines.converted import Converted

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target


class ConvertedTarget(GraphTarget):
    """The file of an engine that is `Converted`."""

    engine: ClassVar[type[Converted]]
    file: ClassVar[str]
    """The files that the engine's converter writes."""

    @classmethod
    def unavailable(cls) -> str | None:
        return cls.engine.unavailable()

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        target.settings.options = cls.options(precision)
        try:
            with ignore_library_warnings():
                cls.engine.write(program, spec, folder / cls.file, target)
                cls.engine.finish(spec, folder / cls.file, target)
        except (TorchwrightError, OSError):
            raise
        except Exception as error:  # of the other library, at what it does not know
            raise refused_graph(f"{cls.runtime} cannot take this model", program, error) from error
        return cls.written(folder)

    @classmethod
    def options(cls, precision: str) -> dict[str, Any]:
        """Return the engine's options for a precision."""
        return {}

    @classmethod
    def written(cls, folder: Path) -> Written:
        """Return the package's description."""
        raise NotImplementedError

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        infer = cls.engine.reader(folder / cls.file, spec)(threads)

        def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [
                torch.from_numpy(array)
                for array in infer([tensor.detach().contiguous().numpy() for tensor in tensors])
            ]

        return run
