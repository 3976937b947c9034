"""Rebuild the workload that a recipe was tuned on, and open a trial to measure it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.process import folders, interrupts
from torchwright.core.records import Recipe
from torchwright.hub.folder import WEIGHTS
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.compiled.program import GRAPHS, read_programs
from torchwright.optimization.trial.client import Context, TrialFailed
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.base import Workload, class_of
from torchwright.workloads.detect import from_description
from torchwright.workloads.factory import names_factory
from torchwright.workloads.module import ModuleWorkload

MEASURE_SECONDS = 600.0
"""The time limit of a trial."""


def workload_of(
    path: Path, recipe: Recipe, *, trust: bool, cases_only: bool = False, **options: Any
) -> Workload:
    """The workload that a recipe describes. Its factory, being code, runs only if it is the user's own or trusted.

    `cases_only` makes do with the self-test's inputs where only calls are needed; `options` replace the recipe's.
    """
    if class_of(recipe.workload).from_code:
        has_calls = (path / "selftest.json").is_file()
        if cases_only and has_calls:
            return CallsOnly(path)
        if has_calls and not recipe.steps and not from_factory(recipe) and (path / GRAPHS).is_file():
            return KeptGraph(path, recipe, trust=trust)
        if not (trust or artifact.is_own(path)):
            raise ArtifactError(
                f"{path} names a factory to run ({recipe.workload.get('model')}), and somebody else made it",
                next="--trust runs it",
            )
    folder = path / artifact.MODEL
    label = str(recipe.workload.get("model"))
    has_weights = folder.is_dir() and any(file for pattern in WEIGHTS for file in folder.glob(pattern))
    return from_description(
        recipe.workload,
        folder if has_weights else None if Path(label).exists() or label == "bundled" else folder,
        trust=trust or artifact.is_own(path),
        **options,
    )


def from_factory(recipe: Recipe) -> bool:
    """Check whether a recipe's module comes from a factory that can be called again."""
    return names_factory(str(recipe.workload.get("model"))) and not recipe.workload.get("metric")


class CallsOnly(ModuleWorkload):
    """The inputs of an artifact's self-test, for timing what the artifact runs."""

    has_model = False

    def __init__(self, path: Path) -> None:
        from torchwright.optimization.artifact.tree import read_self_test

        kept = read_self_test(path / "selftest")
        super().__init__(nn.Identity(), [kept["args"] if kept["args"] else kept["kwargs"]])


class KeptGraph(CallsOnly):
    """The original as the artifact keeps it, its exported graph: nothing else of a module is in a file."""

    def __init__(self, path: Path, recipe: Recipe, *, trust: bool) -> None:
        super().__init__(path)
        self.label, self.task = (
            str(recipe.workload.get("model")),
            str(recipe.workload.get("task") or self.task),
        )
        self._path, self._trust = path, trust or artifact.is_own(path)

    def build(self) -> nn.Module:
        programs = read_programs(self._path, trust=self._trust)
        return _WithInstances(programs.get(artifact.GENERAL) or next(iter(programs.values())))


class _WithInstances(nn.Module):
    """An exported graph that takes and returns instances of the original's classes, or records of these."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.exported, self._spec = program.module(check_guards=False), program.call_spec.in_spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A class of a script is `__main__`'s where it was exported, and another module's here.
        leaves, spec = nested.flatten((args, kwargs))
        if self._spec is not None and nested.has_records(spec):
            names = self._spec.child(1).context
            leaves = nested.leaves((args, {name: kwargs[name] for name in names}))
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return nested.closed(self.exported(*args, **kwargs))


@contextlib.contextmanager
def trials(
    what: str | Path, workload: Workload, device: str, recipe: Recipe | None, seconds: float = MEASURE_SECONDS
) -> Iterator[Context]:
    """Open a trial on `device` for `what`; a process that dies is reported as the workload's fault."""
    with interrupts.deferred(), folders.temporary() as scratch:
        context = Context(
            workload=pack(workload, scratch),
            device=device,
            threads=recipe.fingerprint.threads if recipe else torch.get_num_threads(),
            seed=0,
            scratch=scratch,
            deadline=time.monotonic() + seconds,
        )
        try:
            with context:
                yield context
        except TrialFailed as failure:
            raise TorchwrightError(f"{what} could not be measured", found=failure.reason) from failure
