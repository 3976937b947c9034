# pyright: basic
"""The forms in which a recipe ships, written as the files of an artifact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.base import ShippingForm, engines
from torchwright.optimization.engines.compiled.program import GRAPHS, TENSORS
from torchwright.optimization.engines.dispatch.spec import CallSpec, InputCapabilities
from torchwright.optimization.search import estimate
from torchwright.optimization.search.state import DOUBTFUL, PATIENCE, Search
from torchwright.optimization.trial.batch_variants import BatchVariants, ChosenVariants
from torchwright.optimization.trial.client import Candidate, TrialFailed, TrialProcess
from torchwright.workloads.base import Workload

OTHER_SIZES = "other sizes"
GRAPHS_SECONDS = 20.0
"""Limit for what serves other sizes alone: most models take a second for it, and a few take minutes."""
OF_GRAPHS = ("calls", "rows", "by_rows", "any_rows", "one_row", "any_sizes", "one_graph", "takes", "layouts")
"""Fields of the manifest that say how graphs are called."""


def ways(best: Candidate, workload: Workload) -> dict[ShippingForm, str]:
    """The ways in which the recipe may ship, those that need less of the caller first, each with its engine's name."""
    own: ShippingForm = "rebuild" if workload.files(weights=True) else "module"
    return engines.get(best.prepared.engine).ways(own)


@dataclass(kw_only=True)
class Contents:
    """The written content of one form: the manifest's fields, and notes for the recipe."""

    manifest: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def write_contents(
    folder: Path,
    scratch: Path,
    search: Search,
    workload: Workload,
    way: ShippingForm,
    graphs: tuple[Path, Contents] | None = None,
) -> Contents:
    """Write one form of an artifact, all but its recipe, report and manifest.

    `scratch` is a folder for compiled code. `graphs` is the same recipe's form of that name, if it was written. Raises
    `RefusedTechnique` for a form that the model does not allow, `TrialFailed` if it cannot be made.
    """
    best = search.best
    native = folder / artifact.NATIVE
    native.mkdir()
    _ask(best, "self_test", path=str(folder / "selftest"))
    engine = ways(best, workload)[way]
    contents = Contents(
        manifest={
            "way": way,
            "engine": engine,
            "dtype": best.prepared.dtype,
            "threads": best.prepared.threads,
            "self_contained": way != "module",
        }
    )
    if way in ("package", "graphs") and workload.called_as_is():
        _write_forms(folder, scratch, search, contents, compiled=way == "package")
    elif way == "package":
        calls = best.prepared.calls
        if best.folder is None:
            calls = best.process.ask("package", engine=engine, folder=str(scratch))
        contents.manifest["calls"] = calls
        _copy_packages(best.folder or scratch, folder)
    else:
        if way == "native" and best.prepared.calls:
            contents.manifest["calls"] = calls = _judged_calls(search, contents)
            if workload.called_as_is():
                contents.manifest["takes"] = takes = _takes(search)
                # Without a call for every size, that of the one example answers other numbers of rows in pieces.
                pieces = takes.pieces and len(calls) == 1
                contents.manifest["rows"] = "pieces" if pieces else "fixed"
                if not pieces and _refuse_one_row(calls, takes):
                    _answer_others_by_graphs(folder, scratch, search, contents)
        contents.notes += _kept(best, folder, needed=way == "native")
        if way == "module" and workload.called_as_is():
            _carry_graphs(folder, scratch, search, contents, graphs)
    if not any(native.iterdir()):
        native.rmdir()
    for name, file in workload.files(weights=way == "rebuild").items():
        (folder / artifact.MODEL / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, folder / artifact.MODEL / name)
    return contents


def _carry_graphs(
    folder: Path,
    scratch: Path,
    search: Search,
    contents: Contents,
    graphs: tuple[Path, Contents] | None,
    write: Callable[..., None] | None = None,
) -> None:
    """Add the exported graphs to a recipe for the caller's module: the artifact then answers without the module.

    `graphs` were written before, or `write` writes them, by default `_write_forms`. A model that torch.export does not
    take is noted.
    """
    if graphs is not None:
        written, earlier = graphs
        for name in (GRAPHS, TENSORS):
            shutil.copy2(written / name, folder / name)
        contents.manifest |= {name: earlier.manifest[name] for name in OF_GRAPHS}
    else:
        try:
            if not search.best.steps:
                _bound_graphs(search)
            (write or _write_forms)(folder, scratch, search, contents, compiled=False)
        except (RefusedTechnique, TrialFailed) as failure:
            contents.notes.append(f"no graph of the model is in the artifact: {failure.reason}")
            return
    contents.manifest["self_contained"] = True


def _bound_graphs(search: Search) -> None:
    """Let graphs of the original end when the user expects the artifact, a tenth later at most: nothing was found.

    Its own process writes them, which ends where they do not. Raises `TrialFailed` where they are not expected to be
    done by then.
    """
    search.context.deadline, search.best.process.essential = search.latest_end(), False
    needed, left = estimate.graphs_seconds(search, processes=0), search.context.remaining()
    if needed > left:
        raise TrialFailed(f"it would need about {needed:.0f} s, and {left:.0f} s were left")


def _refuse_one_row(calls: Sequence[CallSpec], takes: InputCapabilities) -> bool:
    """Check whether no call takes a batch of one that the original takes: torch.export supposes two rows at least."""
    if not takes.batched:
        return False
    places = slice(takes.batched[0], takes.batched[0] + 1)
    sizes = [(call, size) for call in calls for t in call.tensors[places] for size in t.shape[:1]]
    return all((call.sizes.get(size, (1,))[0] if isinstance(size, str) else size) > 1 for call, size in sizes)


def _answer_others_by_graphs(folder: Path, scratch: Path, search: Search, contents: Contents) -> None:
    """Add the graphs of the recipe's model for calls that the engine's own do not take, a batch of one above all."""
    own = dict(contents.manifest)
    try:
        _write_forms(folder, scratch, search, contents, compiled=False)
    except (RefusedTechnique, TrialFailed) as failure:
        contents.notes.append(f"{OTHER_SIZES}: no graph of the model is in the artifact: {failure.reason}")
        return
    contents.manifest |= own | {"by_rows": ()}


def _judged_calls(search: Search, contents: Contents) -> tuple[CallSpec, ...]:
    """Return the engine's prepared calls, without those for other sizes whose loss is too large.

    With its sizes free a graph is another one to a library: what it has one operator for with given sizes may be
    several then, and what lies between these is rounded (MPT in OpenVINO's bfloat16: 0.7% and 1.6%).
    """
    best, budget = search.best, search.budget.max_drop
    calls, given = best.prepared.calls, tuple(call for call in best.prepared.calls if not call.sizes)
    if given == calls or best.quality is None or best.quality.drop_high <= DOUBTFUL * budget:
        return calls
    if _room(search) < 0:
        widened = best.process.ask("widen_others")
        contents.notes.append(f"{OTHER_SIZES}: no time was left to judge them{', rounded less' * widened}")
        return calls
    found, widened = best.process.ask("compare_others", reference=search.reference, most=budget)
    if found is None or found.drop_high <= budget:
        if widened:
            contents.notes.append(f"{OTHER_SIZES}: rounded less than the examples', to be within the budget")
        return calls
    lost = f"{found.metric} {found.worsens} by up to {found.drop_high:.2%}"
    contents.notes.append(f"{OTHER_SIZES}: not answered by a call of their own, by which {lost}")
    return given


def _kept(best: Candidate, folder: Path, *, needed: bool) -> list[str]:
    """Have the engine write what it keeps, and say what is to be noted; unless it is `needed` it only saves time."""
    try:
        note = best.process.ask("keep", folder=str(folder))
    except (TrialFailed, RefusedTechnique):
        if needed:
            raise
        return []
    return [note] if note else []


def _write_forms(folder: Path, scratch: Path, search: Search, contents: Contents, *, compiled: bool) -> None:
    """Write the graphs, and the packages for the example and for a dynamic batch size; return the findings."""
    best = search.best
    search.tell("stage", "the same for any number of rows and other sizes")
    rows_seconds = _room(search)
    worth = compiled and 1.2 * best.prepared.seconds < rows_seconds
    # The original checks graphs. Without steps it is there already, in a process that has exported it once.
    own = nullcontext(best.process) if not best.steps else TrialProcess(search.context)
    with own as process:
        takes, forms = process.ask(
            "forms",
            steps=best.steps,
            folder=str(scratch),
            packages=compiled and best.folder is None,
            rows_seconds=rows_seconds if worth else None,
            general_seconds=GRAPHS_SECONDS + PATIENCE * search.description.export_seconds,
        )
        chosen = None if best.steps else _ask_choice(process, scratch, search, takes, forms, compiled=False)
    contents.notes += forms.notes
    if compiled and not worth and takes.batched:
        contents.notes.append(f"{artifact.ROWS}: no time was left to compile for it")
    if compiled and best.folder is not None:
        for package in best.folder.glob("*.pt2"):
            shutil.copy2(package, scratch / package.name)
    try:
        chosen = chosen or _choose(scratch, search, takes, forms, compiled=compiled)
    except TrialFailed as failure:
        if forms.rows is None or failure.timed_out:
            raise
        contents.notes.append(f"{artifact.ROWS}: not used, what was compiled for it {failure.reason}")
        forms = replace(forms, rows=None)
        chosen = _choose(scratch, search, takes, forms, compiled=compiled)
    if chosen.slower_alone and (one := _one_row(scratch, search, takes, contents)) is not None:
        chosen = _choose(scratch, search, takes, replace(forms, one_row=one), compiled=compiled)
    contents.notes += chosen.notes
    contents.manifest |= {
        "calls": chosen.calls or forms.calls,
        "rows": chosen.rows,
        "by_rows": chosen.by_rows,
        "any_rows": chosen.any_rows,
        "one_row": chosen.one_row,
        "any_sizes": chosen.any_sizes,
        "one_graph": chosen.one_graph,
        "takes": takes,
        "layouts": chosen.layouts,
    }
    names = [spec.name for spec in forms.calls] if compiled else []
    for _, file in artifact.packages(names, chosen.rows, chosen.one_row):
        shutil.copy2(scratch / file, folder / artifact.NATIVE / file)
    for name in (GRAPHS, TENSORS):
        shutil.copy2(scratch / name, folder / name)


def _choose(
    scratch: Path, search: Search, takes: InputCapabilities, forms: BatchVariants, *, compiled: bool
) -> ChosenVariants:
    """In a process that has compiled nothing."""
    with TrialProcess(search.context) as process:
        return _ask_choice(process, scratch, search, takes, forms, compiled=compiled)


def _ask_choice(
    process: TrialProcess,
    scratch: Path,
    search: Search,
    takes: InputCapabilities,
    forms: BatchVariants,
    *,
    compiled: bool,
) -> ChosenVariants:
    return process.ask(
        "choose_forms",
        takes=takes,
        forms=forms,
        folder=str(scratch),
        compiled=compiled,
        seconds=min(estimate.comparison_seconds(search), GRAPHS_SECONDS),
        threads=search.best.prepared.threads,
        allocator=search.best.prepared.allocator,
    )


def _room(search: Search) -> float:
    """Seconds to compile in, after which the artifact can still be proved about when the user expects it.

    Other numbers of rows come before more proof: what answers them slowly is slow for every such call.
    """
    proof = estimate.least_proof_seconds(search, search.best.steps)
    return search.latest_end() - search.context.clock() - proof


def _one_row(scratch: Path, search: Search, takes: InputCapabilities, contents: Contents) -> CallSpec | None:
    """Compile for one row, where there is time for it."""
    best, seconds = search.best, _room(search)
    if 1.2 * best.prepared.seconds > seconds:
        contents.notes.append(f"{artifact.ONE}: no time was left to compile for it")
        return None
    with TrialProcess(search.context) as process:
        one, note = process.ask(
            "one_row", steps=best.steps, takes=takes, folder=str(scratch), seconds=seconds
        )
    contents.notes += [note] if note else []
    return one


def _takes(search: Search) -> InputCapabilities:
    """Return the inputs that the original takes in addition to its example."""
    with TrialProcess(search.context) as process:
        return process.ask("takes")


def _copy_packages(source: Path, folder: Path) -> None:
    """Packages of compiled code, and the portable graphs that they were made from."""
    for package in sorted(source.glob("*.pt2")):
        shutil.copy2(package, folder / artifact.NATIVE / package.name)
    for name in (GRAPHS, TENSORS):
        shutil.copy2(source / name, folder / name)


def _ask(best: Candidate, method: str, **arguments: Any) -> bool:
    try:
        return bool(best.process.ask(method, **arguments))
    except (TrialFailed, RefusedTechnique):
        return False
