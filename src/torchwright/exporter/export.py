# pyright: basic
"""`tw.export` and `torchwright export`: a model into another runtime's package, verified."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, RegressionFound, TrainingMode, WorkloadError
from torchwright.core.process import folders, interrupts
from torchwright.core.records import Event
from torchwright.exporter.base import ExportTarget, exports
from torchwright.exporter.budget import Budget
from torchwright.exporter.package import (
    PACKAGE,
    REFERENCE,
    Export,
    empty_export,
    finish,
    open_export,
    size_of,
    writing_export,
)
from torchwright.exporter.subject import Subject, check_repeats, make_plain, make_subject
from torchwright.exporter.verification.reference import (
    calls_of,
    without_rows,
    write_reference,
    write_settings,
)
from torchwright.exporter.verification.verify import elsewhere, verify
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.open_model import is_artifact
from torchwright.optimization.rebuild import workload_of
from torchwright.workloads.base import Workload
from torchwright.workloads.detect import from_target, settings_of
from torchwright.workloads.module import ModuleWorkload

SECONDS = 600.0
Tell = Callable[[Event], None]


@dataclass(frozen=True)
class Exported:
    """A package, and what the verifier found."""

    path: Path
    export: Export

    @property
    def report(self) -> dict[str, Any]:
        """Numerics at every size; load time, latency and memory against eager; findings; verdict."""
        return self.export.report

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the package's answer in its own runtime, in this process; a list where there are several outputs.

        The arguments are those of the model, nested as it takes them, or their tensors alone.
        """
        target = exports.get(self.export.target)
        _check_runs(self.path, self.export)
        _, named = self.export.call.structure["tuple"]
        order = [*named["dict"], *kwargs]  # the package has the tensors in the example's order
        kwargs = {name: kwargs[name] for name in dict.fromkeys(order) if name in kwargs}
        tensors = nested.tensors((args, kwargs))
        outputs = target.open(self.path / PACKAGE, self.export.call, self.export.threads)(tensors)
        return outputs[0] if len(outputs) == 1 else outputs


def export(
    model: nn.Module | str | Path,
    inputs: Any = None,
    *,
    to: str,
    out: str | Path | None = None,
    precision: str | None = None,
    max_batch: int | None = None,
    max_context: int | None = None,
    march: str | None = None,
    delegate: str | None = None,
    dynamic: Any = None,
    max_error: float | None = None,
    max_size: int | None = None,
    max_memory: int | None = None,
    trust: bool = False,
    settings: Sequence[str] = (),
    on_event: Tell = lambda event: None,
) -> Exported:
    """Write a model as the package of another runtime, and verify it there.

    `model` is a module with its `inputs` as `tw.optimize` takes them, or a name as on the command line: a folder, a
    hub id, `package.module:factory`, or an artifact, whose recipe's steps are kept where the runtime knows their
    operators. `to` is a target, `precision` one of its own. The batch size is dynamic if the model allows it, up to
    `max_batch`; `dynamic` is torch.export's `dynamic_shapes`. A language model's cache holds `max_context` tokens,
    where the runtime plans memory ahead. Machine code is for this kind of processor, or for a level of its family
    given by `march` ("x86-64-v3"). `delegate` is one of the target's delegates; a delegate that does not run here is
    lowered to, and not verified. `max_error` is the relative error up to which the verdict holds. By default the
    precision is the recipe's. Given `max_size` bytes on disk or `max_memory` bytes of a process, all precisions
    are written and verified, and the one of least error is kept.

    Raises `UnknownName` for a target that does not exist. Raises `RefusedTechnique` for one that cannot run here or
    cannot take the model, with the line of the model's own source at fault. Raises `ModelError` for a model whose
    outputs are not numbers. Outputs that differ are in the report, and raise nothing. A model in training mode is
    exported as its `eval()` copy, with a `TrainingMode` warning and a note in the report.
    """
    target = exports.get(to)
    if reason := target.unavailable() or target.unwritable():
        raise WorkloadError(f"the export target '{to}' cannot run here", found=reason)
    if max_context is not None and not target.largest_context:
        raise WorkloadError(
            f"a package of {to} holds no cache of so many tokens", next="leave --max-context out"
        )
    if march is not None and march not in target.levels:
        raise WorkloadError(
            f"{to} writes nothing for '{march}'",
            allowed=", ".join(target.levels) or "packages that are code: aoti",
        )
    delegate = target.check_delegate(delegate)
    budget = Budget(size=max_size, memory=max_memory)
    if budget and (reason := elsewhere(target, delegate)):
        raise WorkloadError(f"a budget is kept by what runs here, and '{delegate}' does not", found=reason)
    tried = (
        list(target.precisions(delegate))
        if budget and precision is None
        else [target.check_precision(precision, delegate)]
    )
    fixed = target.delegates[delegate].fixed if delegate else target.fixed
    path = Path(out) if out is not None else Path(f"{_name(model)}-{to}")
    tell = _teller(on_event)
    with interrupts.deferred(), writing_export(path) as folder, folders.temporary() as scratch:
        tell("building the model")
        workload, steps = _workload(model, inputs, dynamic, trust, settings)
        for notice in workload.notices():
            on_event(Event(kind="notice", text=notice, elapsed=0.0, time_budget=SECONDS))
        own = _loadable(model, trust)
        format = target.format_of(steps) if precision is None else None
        if format is not None and format.precision not in target.precisions(delegate):
            format = None
        if format is not None and not budget:
            tried = [format.precision]
        made: dict[str, Export] = {}
        reports: dict[str, Any] = {}
        for chosen in tried:
            fitting = format if format is not None and format.precision == chosen else None
            subject = make_subject(
                workload,
                steps,
                max_batch,
                fitting,
                max_context,
                march,
                ahead=target.largest_batch,
                fixed=fixed,
                delegate=delegate,
            )
            place = empty_export(scratch / chosen) if budget else folder
            try:
                written = _write(place, subject, target, chosen, tell)
            except RefusedTechnique as error:
                if not budget:
                    raise
                reports[chosen] = error.reason
                continue
            if excess := budget.too_large(size_of(place / PACKAGE)):
                reports[chosen] = excess
                continue
            tell(f"verifying {chosen}")
            reports[chosen] = verify(place, written, [], tell, max_error, as_written=True, artifact=own)
            made[chosen] = replace(written, report=reports[chosen])
        chosen = budget.choose(reports) if budget else tried[0]
        if budget:
            shutil.copytree(scratch / chosen, folder, dirs_exist_ok=True)
        return Exported(path, finish(folder, made[chosen]))


def check(
    path: str | Path,
    *,
    trust: bool = False,
    max_error: float | None = None,
    on_event: Tell = lambda event: None,
) -> Exported:
    """Run a package again in its own runtime against its reference; with `trust`, changed files are only reported.

    Raises `RegressionFound`, with the report in `facts`, if the answers differ, and `ArtifactError` if it is not an
    export.
    """
    path = Path(path)
    made, changed = open_export(path, trust=trust)
    if reason := exports.get(made.target).unavailable():
        raise WorkloadError(f"the export target '{made.target}' cannot run here", found=reason)
    _check_runs(path, made)
    with interrupts.deferred():
        report = verify(path, made, changed, _teller(on_event), max_error)
    if report["verdict"] != "holds":
        raise RegressionFound(
            f"{path} differs from what it was made from",
            found="; ".join(report["findings"])[:1000],
            next="export again, or look at the layer that is named",
            facts=report,
        )
    return Exported(path, replace(made, report=report))


def _write(
    folder: Path, subject: Subject, target: type[ExportTarget], precision: str, tell: Callable[[str], None]
) -> Export:
    graph = subject.graph
    check_repeats(subject)
    tell("the original's answers, at both ends of its sizes")
    calls = [*calls_of(subject), *without_rows(subject)]
    write_reference(folder / REFERENCE, graph.program, calls)
    make_plain(graph.program)
    tell(f"converting it for {target.runtime}")
    written = target.write(subject, precision, folder / PACKAGE)
    write_settings(folder / REFERENCE, target.settings(folder / PACKAGE))
    frozen = (f"the number of rows is that of the example: {graph.frozen}",) if graph.frozen else ()
    made = Export(
        target=target.name,
        precision=precision,
        model=subject.name,
        call=graph.spec,
        threads=torch.get_num_threads(),
        versions=_versions(target),
        operators=written.operators,
        carried=subject.carried,
        left=subject.left,
        notes=(*subject.notices, *frozen, *written.notes),
        planned=written.planned,
        seconds=written.seconds,
        parting=written.parting,
        delegate=subject.delegate,
    )
    return finish(folder, made)


def _check_runs(path: Path, made: Export) -> None:
    """Raises `WorkloadError` for a package that was lowered to what does not run here."""
    if reason := elsewhere(exports.get(made.target), made.delegate):
        raise WorkloadError(
            f"{path} was lowered to {made.delegate}, and does not run here",
            found=reason,
            next="open it on a device that has it; its files are as they were written",
        )


def _workload(
    model: nn.Module | str | Path, inputs: Any, dynamic: Any, trust: bool, settings: Sequence[str]
) -> tuple[Workload, Sequence[Any]]:
    """Return the exported model, and the steps of its recipe."""
    if isinstance(model, nn.Module):
        if inputs is None:
            raise WorkloadError(
                "a module is exported with example inputs", next="tw.export(model, inputs, to=…)"
            )
        workload = ModuleWorkload(model, inputs, dynamic=dynamic)
        if workload.training_notice:
            warnings.warn(workload.training_notice, TrainingMode, stacklevel=3)
        return workload, ()
    if inputs is not None or dynamic is not None:
        raise WorkloadError("inputs= and dynamic= are for a module", found=f"{model}, which has its own")
    if is_artifact(str(model)):
        recipe, _ = artifact.open_artifact(Path(model))
        return workload_of(Path(model), recipe, trust=trust), recipe.steps
    return from_target(str(model), **settings_of(settings)), ()


def _loadable(model: nn.Module | str | Path, trust: bool) -> Path | None:
    """The artifact that is exported, where its compiled code may be run: this user's own, or with `trust`."""
    if isinstance(model, nn.Module) or not is_artifact(str(model)):
        return None
    return Path(model) if trust or artifact.is_own(Path(model)) else None


def _name(model: nn.Module | str | Path) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__.lower()
    return Path(str(model).replace(":", "-")).name or "model"


def _versions(target: type[ExportTarget]) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in target.libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a module of another distribution's name
            continue
    return found


def _teller(on_event: Tell) -> Callable[[str], None]:
    begun = time.monotonic()

    def tell(text: str) -> None:
        interrupts.check()
        on_event(Event(kind="stage", text=text, elapsed=time.monotonic() - begun, time_budget=SECONDS))

    return tell
