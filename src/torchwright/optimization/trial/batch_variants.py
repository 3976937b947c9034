"""Further forms of a recipe's model: dynamic batch size, and dynamic shapes.

What the search times is compiled for the example's sizes. Once it has found its recipe, the same model is exported
twice more: with a dynamic batch size, which is compiled, and with dynamic shapes, which is kept as a graph.
`choose_variants` measures the cost of the dynamic batch size, and the best form for each batch size. Where batch size
1 is answered slower than by the original, it gets a package of its own (`build_batch_of_one`); where no form takes it,
it gets a graph of its own (`export_one_graph`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from torchwright.core.errors import TorchwrightError, WorkloadError, first_line
from torchwright.core.process.limits import TimeIsUp, time_limit
from torchwright.optimization.artifact.folder import (
    GENERAL,
    ONE,
    ONE_GRAPH,
    ONE_PACKAGE,
    ROWS,
    ROWS_PACKAGE,
)
from torchwright.optimization.engines.compiled.graphs import GraphCall
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import described, guarded, rewritten
from torchwright.optimization.engines.compiled.program import (
    FreeSizes,
    compile_program,
    export,
    export_one,
    ignore_library_warnings,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of, with_rows, with_tensors
from torchwright.optimization.engines.dispatch.results import layout_of
from torchwright.optimization.engines.dispatch.spec import CallSpec, InputCapabilities, package_file
from torchwright.optimization.techniques.base import Target
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case

ROWS_COST = 1.03
"""Limit on a form's slowdown before another is built: dynamic at the example's batch size, any at batch size 1."""
ROUNDS = 9
TURN_SECONDS = 0.02
NUMBER_SECONDS = 1.0
"""Turns with one batch size end after this, when each form had one."""
ORIGINAL = "the original"
ROUNDING = 1e-3
"""Error that other sizes may add to the recipe's own by their rounding alone."""

BatchStrategy = Literal["free", "both", "pieces", "fixed"]
"""One package with a dynamic batch size; that and one for the example's; the example's for others too; or for no other.

A package for one row may come on top.
"""


@dataclass(frozen=True, kw_only=True)
class BatchVariants:
    """The forms that could be built, and the reasons for the others."""

    calls: tuple[CallSpec, ...] = ()
    rows: CallSpec | None = None
    one_row: CallSpec | None = None
    general: CallSpec | None = None
    one_graph: CallSpec | None = None
    fewest: int = 0
    """Rows that compiled code may be asked for."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChosenVariants:
    """The forms that answer other batch sizes, and the memory layout of the original's outputs."""

    rows: BatchStrategy = "fixed"
    by_rows: tuple[tuple[int, str], ...] = ()
    """Batch sizes and forms as the manifest has them."""
    any_rows: CallSpec | None = None
    one_row: CallSpec | None = None
    any_sizes: CallSpec | None = None
    """Graphs with the smallest batch size for which they answered correctly."""
    calls: tuple[CallSpec, ...] = ()
    """The examples' calls, those with a dynamic batch size likewise."""
    one_graph: CallSpec | None = None
    """The graph for batch size 1, where no other call takes it."""
    slower_alone: bool = False
    """True if batch size 1 is slower than the original in every form."""
    layouts: tuple[tuple[int, ...] | None, ...] = ()
    notes: tuple[str, ...] = ()


def build_batch_variants(
    target: Target,
    cases: list[Case],
    takes: InputCapabilities,
    folder: Path,
    *,
    packages: bool,
    rows_seconds: float | None,
    general_seconds: float,
) -> BatchVariants:
    """Export `target`'s model in all forms, and write the graphs into `folder`.

    With `packages` the example's calls are compiled, too. A dynamic batch size is compiled as well, unless
    `rows_seconds`, its time limit, is None. Raises `RefusedTechnique` where the model does not export at all.
    """
    programs = {
        name: rewritten(program, target.settings) for name, program in export(target.model, cases).items()
    }
    own = {case.name: case for case in cases}
    forms = BatchVariants(
        calls=tuple(
            guarded(described(name, program), program, own[name], target)
            for name, program in programs.items()
        )
    )
    wanted: list[tuple[str, FreeSizes, float]] = []
    if len(cases) == 1 and cases[0].dynamic is None:
        if takes.batched and rows_seconds is not None:
            wanted.append((ROWS, FreeSizes(rows=takes.batched), rows_seconds))
        wanted.append((GENERAL, FreeSizes(), general_seconds))
    found: dict[str, CallSpec] = {}
    for name, free, seconds in wanted:
        begun = time.monotonic()
        try:
            with time_limit(seconds):
                program = rewritten(
                    export_one(target.model, _several(cases[0], takes), free), target.settings
                )
                found[name], programs[name] = described(name, program), program
                if name == ROWS:
                    found[name] = guarded(found[name], program, cases[0], target)
                    rows_seconds = seconds - (time.monotonic() - begun)
        except TimeIsUp:
            forms = _with_note(forms, f"{name}: the export was not done after {seconds:.0f} s")
        except TorchwrightError as error:
            forms = _with_note(forms, f"{name}: {error.found or error.summary}")
    general = None if GENERAL not in found else GraphCall(programs[GENERAL], found[GENERAL])
    answers = [GraphCall(programs[spec.name], spec) for spec in forms.calls if spec.sizes]
    if _needs_one_graph(target.model, cases[0], takes, [*answers, *([general] if general else [])]):
        try:
            with time_limit(general_seconds):
                one, programs[ONE_GRAPH] = export_one_graph(target, cases[0], takes)
                forms = replace(forms, one_graph=one)
        except TimeIsUp:
            forms = _with_note(forms, f"{ONE_GRAPH}: the export was not done after {general_seconds:.0f} s")
        except TorchwrightError as error:
            forms = _with_note(forms, f"{ONE_GRAPH}: {error.found or error.summary}")
    write_programs(folder, programs)
    inductor = target.settings.inductor
    if packages:
        for index, case in enumerate(cases):
            compile_program(programs[case.name], folder / package_file(index), inductor)
    if ROWS in found:
        try:
            with time_limit(rows_seconds or 0.0):
                compile_program(programs[ROWS], folder / ROWS_PACKAGE, inductor)
        except (TimeIsUp, Exception) as error:
            reason = "no time left" if isinstance(error, TimeIsUp) else type(error).__name__
            forms = _with_note(forms, f"{ROWS}: not compiled ({reason})")
            del found[ROWS]
    # Inductor's C++ templates for matrix products divide by the batch size: with 0 the process dies (torch 2.13).
    fewest = 1 if "CPP" in inductor.get("max_autotune_gemm_backends", "") else 0
    return replace(forms, rows=found.get(ROWS), general=found.get(GENERAL), fewest=fewest)


def _needs_one_graph(
    model: nn.Module, case: Case, takes: InputCapabilities, answers: Sequence[CompiledCall]
) -> bool:
    """Check whether a graph has to be exported for batch size 1: torch.export supposes two rows at least.

    `answers` are the calls with dynamic sizes.
    """
    if not takes.batched or len(tensors_of(case)[takes.batched[0]]) == 1:
        return False
    one = with_rows(case, takes.batched, 1)
    try:
        wanted = _answer(model, one)
    except Exception:  # whatever the model says of such a call
        return False
    return not any(_differs(wanted, call, one) <= ROUNDING for call in answers)


def export_one_graph(
    target: Target, case: Case, takes: InputCapabilities
) -> tuple[CallSpec, ExportedProgram]:
    """Export `target`'s model for one row; its other sizes are dynamic where the model allows it.

    Raises `RefusedTechnique`.
    """
    one = with_rows(case, takes.batched, 1)
    try:
        program = rewritten(export_one(target.model, one, FreeSizes()), target.settings)
    except TorchwrightError:
        program = rewritten(export_one(target.model, one, None), target.settings)
    return described(ONE_GRAPH, program), program


def build_batch_of_one(
    target: Target, case: Case, takes: InputCapabilities, folder: Path, seconds: float
) -> tuple[CallSpec | None, str | None]:
    """Compile `target`'s model for one row into `folder`: what that takes, or None and the reason.

    Only its package is kept: who cannot load that has a graph which takes one row.
    """
    try:
        with time_limit(seconds):
            program = rewritten(
                export_one(target.model, with_rows(case, takes.batched, 1), None), target.settings
            )
            spec = guarded(described(ONE, program), program, case, target)
            compile_program(program, folder / ONE_PACKAGE, target.settings.inductor)
    except TimeIsUp:
        return None, f"{ONE}: not compiled after {seconds:.0f} s"
    except Exception as error:  # of Inductor, or a model that takes no single row
        return None, f"{ONE}: not compiled ({first_line(error)})"
    return spec, None


def choose_variants(
    model: nn.Module,
    case: Case,
    takes: InputCapabilities,
    forms: BatchVariants,
    folder: Path,
    *,
    seconds: float,
    threads: int | None = None,
) -> ChosenVariants:
    """Choose how an artifact with these packages and graphs answers other calls. `model` is the original.

    After `seconds` no other batch size is begun. `threads` is the number that the packages and graphs use; the
    original has this process's.
    """
    fixed = Package(folder / package_file(0), forms.calls[0])
    programs = read_programs(folder, trust=True, names=(GENERAL, ONE_GRAPH))
    chosen = replace(
        check_graphs(model, case, takes, forms, programs, fixed), rows="pieces" if takes.pieces else "fixed"
    )
    if len(forms.calls) > 1 or case.dynamic is not None or not takes.batched:
        return chosen
    given = tensors_of(case)
    own = _error(_answer(model, case), _flat(lambda: fixed.run([t.clone() for t in given])))
    apart = replace(takes, pieces=False)
    dispatchers: dict[str, CallDispatcher] = {}
    if forms.rows is not None:
        free = Package(folder / ROWS_PACKAGE, forms.rows)
        spec = _checked(model, free, case, takes, own, forms.fewest)
        if spec is None:
            chosen = _with_choice_note(chosen, f"{ROWS}: not used, the compiled code answers some wrongly")
        else:
            chosen, free.spec = replace(chosen, any_rows=spec), spec
            dispatchers[ROWS] = CallDispatcher([free], takes=apart, threads=threads)
    if forms.one_row is not None:
        one = Package(folder / ONE_PACKAGE, forms.one_row)
        if _is_right(model, one, with_rows(case, takes.batched, 1), own):
            dispatchers[ONE] = CallDispatcher([one], takes=apart, threads=threads)
    if chosen.any_sizes is not None:
        general = GraphCall(programs[GENERAL], chosen.any_sizes)
        dispatchers[GENERAL] = CallDispatcher([], takes=apart, general=[general], threads=threads)
    example = CallDispatcher([fixed], takes=takes, threads=threads)
    if ROWS in dispatchers:
        share = _time_ratios(
            {case.name: lambda: example.run(case), ROWS: lambda: dispatchers[ROWS].run(case)}
        )[ROWS]
        if share <= ROWS_COST:
            return _by_rows(model, case, takes, replace(chosen, rows="free"), dispatchers, seconds)
        rows = len(given[takes.batched[0]])
        note = f"{ROWS}: {share:.2f} of the time at {rows} rows, which keep code of their own"
        chosen = _with_choice_note(chosen, note)
    return _by_rows(model, case, takes, chosen, {case.name: example, **dispatchers}, seconds)


def _by_rows(
    model: nn.Module,
    case: Case,
    takes: InputCapabilities,
    chosen: ChosenVariants,
    dispatchers: Mapping[str, CallDispatcher],
    seconds: float,
) -> ChosenVariants:
    """Return `chosen` with the fastest of `dispatchers` for each batch size, without forms that none needs."""
    example = len(tensors_of(case)[takes.batched[0]])
    found, slower = {example: ROWS if chosen.rows == "free" else case.name}, False
    begun = time.monotonic()
    # One row first, since most is made of that; then what lies between, where ranges begin.
    for rows in dict.fromkeys([1, example // 2, 2 * example, 2, 3 * example // 2]):
        if rows in (0, example) or time.monotonic() - begun > seconds:
            continue
        calls = _candidates(model, dispatchers, with_rows(case, takes.batched, rows))
        if not calls:
            continue
        if rows > 1:  # where the original is faster, a package gains nothing
            del calls[ORIGINAL]
        shares = _time_ratios(calls) if len(calls) > 1 else dict.fromkeys(calls, 1.0)
        name = min(shares.keys() - {ORIGINAL}, key=lambda name: shares[name], default=None)
        slower |= rows == 1 and (name is None or shares[name] > ROWS_COST)
        if name is not None:
            found[rows] = name
    used = set(found.values())
    if chosen.rows != "free" and ROWS in used:
        chosen = replace(chosen, rows="both")
    return replace(
        chosen,
        by_rows=_ranges(found, example),
        any_rows=chosen.any_rows if ROWS in used else None,
        one_row=dispatchers[ONE].calls[0].spec if ONE in used else None,
        slower_alone=slower,
    )


def _candidates(
    model: nn.Module, dispatchers: Mapping[str, CallDispatcher], case: Case
) -> dict[str, Callable[[], Any]]:
    """The call by the original, and by each form that takes it; none where the original does not.

    The graph for any size is asked only where nothing was compiled for such a call.
    """
    with torch.inference_mode():
        calls: dict[str, Callable[[], Any]] = {ORIGINAL: lambda: model(*case.args, **case.kwargs)}
        try:
            calls[ORIGINAL]()
        except Exception:  # whatever the original says of such a call
            return {}
        for name, dispatcher in dispatchers.items():
            if name == GENERAL and calls.keys() & {ROWS, ONE}:
                continue
            with contextlib.suppress(WorkloadError), ignore_library_warnings():
                dispatcher.run(case)
                calls[name] = lambda dispatcher=dispatcher: dispatcher.run(case)
        return calls


def _ranges(found: Mapping[int, str], example: int) -> tuple[tuple[int, str], ...]:
    """The numbers of rows from which on another call is the quickest, by those that were timed.

    Beyond the example's it is the next larger one's: one row more may take one call more.
    """
    above = min((rows for rows in found if rows > example), default=None)
    ranges: list[tuple[int, str]] = []
    for rows, name in sorted(found.items()):
        if not ranges or ranges[-1][1] != name:
            ranges.append((example + 1 if rows == above else rows, name))
    return tuple(ranges)


def check_graphs(
    model: nn.Module,
    case: Case,
    takes: InputCapabilities,
    forms: BatchVariants,
    programs: Mapping[str, ExportedProgram],
    fixed: CompiledCall | None = None,
) -> ChosenVariants:
    """Choose how graphs answer other calls, and which output layouts must be restored.

    `fixed` is what answers the example, by default its graph.
    """
    if fixed is None:
        fixed = GraphCall(programs[case.name], forms.calls[0])
    given = tensors_of(case)
    reference, found = _answer(model, case), _flat(lambda: fixed.run([t.clone() for t in given]))
    layouts = tuple(
        layout_of(a) if a.shape == b.shape and layout_of(a) != layout_of(b) else None
        for a, b in zip(reference, found, strict=True)
    )
    # Without a graph for every size, that of the one example answers other numbers of rows in pieces.
    alone = takes.pieces and len(forms.calls) == 1
    own = _error(reference, found)
    chosen = ChosenVariants(
        calls=(_from_one_row(model, fixed, case, takes, own), *forms.calls[1:]),
        rows="pieces" if alone else "fixed",
        layouts=layouts if any(layouts) else (),
    )
    if forms.one_graph is not None:
        graph, one = GraphCall(programs[ONE_GRAPH], forms.one_graph), with_rows(case, takes.batched, 1)
        if _is_right(model, graph, one, own):
            chosen = replace(chosen, one_graph=forms.one_graph)
        else:
            chosen = _with_choice_note(chosen, f"{ONE_GRAPH}: not used, the graph answers wrongly")
    if forms.general is None:
        return chosen
    general = GraphCall(programs[GENERAL], forms.general)
    spec = _checked(model, general, case, takes, own)
    if spec is None:
        return _with_choice_note(chosen, f"{GENERAL}: not used, the graph answers some wrongly")
    rows = len(given[takes.batched[0]]) if takes.batched else 0
    name = spec.tensors[takes.batched[0]].shape[0] if rows else ""
    if alone and chosen.one_graph is None and spec.sizes.get(str(name), (0, None))[0] > 1:
        # One row is padded to the example's where no graph takes it.
        by_rows = ((2, GENERAL), (rows, case.name), (rows + 1, GENERAL))
        return replace(chosen, any_sizes=spec, by_rows=by_rows[rows == 2 :])
    return replace(chosen, any_sizes=spec, rows="fixed")


def _from_one_row(
    model: nn.Module, call: CompiledCall, case: Case, takes: InputCapabilities, own: float
) -> CallSpec:
    """Return an example's call with the smallest batch size that it answers correctly: one row, or two at least."""
    spec = call.spec
    name = spec.tensors[takes.batched[0]].shape[0] if takes.batched else ""
    if name not in spec.sizes:
        return spec
    least, most = spec.sizes[str(name)]
    right = _is_right(model, call, with_rows(case, takes.batched, 1), own)
    return replace(spec, sizes=spec.sizes | {str(name): (min(least, 1) if right else max(least, 2), most)})


def _checked(
    model: nn.Module, call: CompiledCall, case: Case, takes: InputCapabilities, own: float, fewest: int = 0
) -> CallSpec | None:
    """Return `call` with the smallest batch size, at least `fewest`, that it answers correctly.

    None if it answers some calls wrongly.

    torch.export supposes sizes of two at least; what it made is mostly right for one and none, too.
    """
    rows = len(tensors_of(case)[takes.batched[0]]) if takes.batched else 0
    numbers = sorted({max(1, rows // 2), rows, 2 * rows, 3} - {1}) if rows else []
    cases = [with_rows(case, takes.batched, b) for b in numbers] or [case]
    if any(_is_right(model, call, other, own) is False for other in cases):
        return None
    least = 2
    for b in (1, 0) if rows else ():
        if b < fewest or not _is_right(model, call, with_rows(case, takes.batched, b), own):
            break
        least = b
    name = call.spec.tensors[takes.batched[0]].shape[0] if rows else ""
    return replace(
        call.spec,
        sizes={s: (least if s == name else max(2, low), high) for s, (low, high) in call.spec.sizes.items()},
    )


def _several(case: Case, takes: InputCapabilities) -> Case:
    """The call with two rows at least: torch.export takes a size of one for a constant."""
    if not takes.batched:
        return case
    return with_rows(case, takes.batched, max(2, len(tensors_of(case)[takes.batched[0]])))


def _with_note(forms: BatchVariants, note: str) -> BatchVariants:
    return replace(forms, notes=(*forms.notes, note))


def _with_choice_note(chosen: ChosenVariants, note: str) -> ChosenVariants:
    return replace(chosen, notes=(*chosen.notes, note))


def _is_right(model: nn.Module, call: CompiledCall, case: Case, own: float) -> bool | None:
    """Check whether `call` matches the original as closely as the example; None if the original refuses it."""
    try:
        wanted = _answer(model, case)
    except Exception:  # whatever the original says of such a call
        return None
    return _differs(wanted, call, case) <= max(2 * own, ROUNDING)


def _answer(model: nn.Module, case: Case) -> list[torch.Tensor]:
    """The original's outputs; it is given copies, which it may change."""
    own = with_tensors(case, [tensor.clone() for tensor in tensors_of(case)])
    return _flat(lambda: model(*own.args, **own.kwargs))


def _differs(wanted: Sequence[torch.Tensor], call: CompiledCall, case: Case) -> float:
    """Return the error of a call against the model's answer; infinite where it takes no such call."""
    try:
        return _error(wanted, _flat(lambda: call.run([tensor.clone() for tensor in tensors_of(case)])))
    except Exception:
        return float("inf")


def _flat(call: Callable[[], Any]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return flatten(call())


def _error(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    try:
        return relative_error(reference, found).value
    except TorchwrightError:
        return float("inf")


def _time_ratios(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The time of each call over that of the first, the median of turns."""
    first = next(iter(calls))
    with torch.inference_mode():
        counts = {
            name: max(1, round(TURN_SECONDS / max(_seconds(call, 1), 1e-6))) for name, call in calls.items()
        }
        turns, begun = list[dict[str, float]](), time.monotonic()
        while not turns or (len(turns) < ROUNDS and time.monotonic() - begun < NUMBER_SECONDS):
            turns.append({name: _seconds(call, counts[name]) for name, call in calls.items()})
    return {name: statistics.median(turn[name] / turn[first] for turn in turns) for name in calls}


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call; before several calls, one warms the caches."""
    if calls > 1:
        call()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls
