"""Artifacts of an engine without a search: what the engine writes of a model, in a folder that `tw.load` opens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchwright.core import nested
from torchwright.core.records import Budget, CaseTime, Coverage, Interval, Measurement, Recipe, Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.fingerprint import fingerprint_here
from torchwright.optimization.artifact.tree import write_tree
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.base import Engine, ShippingForm, engines
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import GRAPHS, TENSORS, read_programs
from torchwright.optimization.engines.dispatch.input_capabilities import probe
from torchwright.optimization.engines.dispatch.spec import InputCapabilities, package_file
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.trial.batch_variants import build_batch_variants, check_graphs
from torchwright.workloads.accuracy import flatten
from torchwright.workloads.base import Workload

NOTHING = Interval(value=1.0, low=1.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class RunsBy(Technique):
    """Runs the model by one engine, and changes nothing else."""

    name: ClassVar[str] = "runs_by"
    phase: ClassVar[Phase] = Phase.COMPILE
    engine: str = "eager"
    """Which."""

    def apply(self, target: Target) -> None:
        target.settings.engine = self.engine
        target.coverage.append(Coverage(technique=self.name, changed=1, total=1))


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A model that an engine has prepared, and runs."""

    workload: Workload
    steps: tuple[Step, ...]
    target: Target
    takes: InputCapabilities
    engine: Engine
    folder: Path
    """The folder that an engine with `apart` has written."""


def prepared(workload: Workload, steps: Sequence[Step], name: str | None, folder: Path) -> Ready:
    """Prepare the model with these steps by the engine `name`, or by the one that the steps ask for.

    An engine that is `apart` is opened from its files.
    """
    target = make_target(workload, get_device("cpu").identify())
    takes = probe(target.model, workload.cases(torch.float32)[0])
    apply_steps(target, steps)
    cls = engines.get(name or target.settings.engine)
    engine = cls.prepare(target, folder if cls.apart else None)
    if cls.apart:
        engine = cls.opened(folder, engine.calls, "cpu")
    return Ready(
        workload=workload, steps=tuple(steps), target=target, takes=takes, engine=engine, folder=folder
    )


def ship(ready: Ready, way: ShippingForm, path: Path) -> Path:
    """An artifact in one of the engine's ways, whole and signed, with a self-test."""
    (path / artifact.NATIVE).mkdir(parents=True)
    manifest: dict[str, Any] = {
        "way": way,
        "engine": ready.engine.name,
        "dtype": str(ready.target.compute_dtype).removeprefix("torch."),
        "self_contained": way != "module",
        "takes": ready.takes,
        "calls": ready.engine.calls,
    }
    if way in ("package", "graphs"):
        manifest |= _write_graphs(ready, path, compiled=way == "package")
    else:
        ready.engine.keep(path)
    if not any((path / artifact.NATIVE).iterdir()):
        (path / artifact.NATIVE).rmdir()
    for name, file in ready.workload.files(weights=way == "rebuild").items():
        (path / artifact.MODEL / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, path / artifact.MODEL / name)
    _write_self_test(ready, path)
    artifact.finish(path, _recipe(ready), manifest)
    return path


def _write_graphs(ready: Ready, path: Path, *, compiled: bool) -> dict[str, Any]:
    (case,) = ready.workload.graphs(ready.target.compute_dtype)
    written = path.parent / f"{path.name}-graphs"
    written.mkdir()
    forms = build_batch_variants(
        ready.target,
        [case],
        ready.takes,
        written,
        packages=False,
        rows_seconds=None,
        general_seconds=60.0,
    )
    for name in (GRAPHS, TENSORS):
        shutil.copy2(written / name, path / name)
    fixed = None
    if compiled:
        package = path / artifact.NATIVE / package_file(0)
        shutil.copy2(ready.folder / package_file(0), package)
        fixed = Package(package, forms.calls[0])
    chosen = check_graphs(
        ready.workload.build(), case, ready.takes, forms, read_programs(written, trust=True), fixed
    )
    return {
        "calls": chosen.calls,
        "rows": chosen.rows,
        "by_rows": chosen.by_rows,
        "any_sizes": chosen.any_sizes,
        "one_graph": chosen.one_graph,
        "layouts": chosen.layouts,
    }


def _write_self_test(ready: Ready, path: Path) -> None:
    case = ready.workload.cases(ready.target.compute_dtype)[0]
    inputs = {"name": case.name, "args": case.args, "kwargs": case.kwargs, "fixed": case.fixed}
    kept = nested.map_tensors(lambda t: t.clone(), inputs)
    torch.manual_seed(0)
    with torch.inference_mode():
        write_tree(path / "selftest", {**kept, "seed": 0, "output": flatten(ready.engine(case))})


def _recipe(ready: Ready) -> Recipe:
    names = [case.name for case in ready.workload.cases(ready.target.compute_dtype)]
    measured = Measurement(
        seconds=1.0,
        cases=tuple(CaseTime(name=name, seconds=1.0) for name in names),
        peak_memory_bytes=1,
        weight_bytes=1,
    )
    return Recipe(
        created="2026-01-01T00:00:00+00:00",
        workload=ready.workload.describe(),
        steps=ready.steps,
        budget=Budget(),
        baseline=measured,
        final=measured,
        speedup=NOTHING,
        rungs=(),
        fingerprint=fingerprint_here("cpu", measured=False),
        search_seconds=1.0,
        engine=ready.engine.name,
    )
