# pyright: basic
"""The further forms of a recipe's model: any number of rows, and any sizes at all.

What the search times is compiled for the example's sizes. Once it has found its recipe, the same model is exported
twice more: with the number of rows free, which is compiled, and with every size free, which is kept as a graph. Whether
the free number of rows costs anything, and what answers other numbers best, is measured (`choose`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchwright.engines.door import Call, Door
from torchwright.engines.graphs import GraphCall
from torchwright.engines.package import Package
from torchwright.engines.program import (
    FreeSizes,
    compile_program,
    export,
    export_one,
    ignore_library_warnings,
    read_programs,
    write_programs,
)
from torchwright.engines.results import layout_of
from torchwright.engines.runner import described, rewritten
from torchwright.engines.spec import CallSpec, Takes
from torchwright.engines.takes import tensors_of, with_rows, with_tensors
from torchwright.errors import TorchwrightError
from torchwright.plan.artifact import GENERAL, ROWS, ROWS_PACKAGE
from torchwright.process.limits import TimeIsUp, time_limit
from torchwright.techniques.base import Target
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case

ROWS_COST = 1.03
"""A free number of rows may cost so much at the example's; more, and the example's keeps code of its own."""
ROUNDS = 9
TURN_SECONDS = 0.02
ROUNDING = 1e-3
"""Error that other sizes may add to the recipe's own by their rounding alone."""

Rows = Literal["free", "both", "pieces", "fixed"]
"""One package for any number of rows; that and one for the example's; the example's for others too; or for no other."""


@dataclass(frozen=True, kw_only=True)
class Forms:
    """What could be made, and why the rest could not."""

    calls: tuple[CallSpec, ...] = ()
    rows: CallSpec | None = None
    general: CallSpec | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """How other numbers of rows are answered, and what the original's outputs look like in memory."""

    rows: Rows = "fixed"
    any_rows: CallSpec | None = None
    any_sizes: CallSpec | None = None
    """With the smallest number of rows for which they were seen to answer rightly."""
    layouts: tuple[tuple[int, ...] | None, ...] = ()
    notes: tuple[str, ...] = ()


def build_forms(
    target: Target,
    cases: list[Case],
    takes: Takes,
    folder: Path,
    *,
    packages: bool,
    rows_seconds: float | None,
    general_seconds: float,
) -> Forms:
    """Export `target`'s model in all forms, and write the graphs into `folder`.

    With `packages` the example's calls are compiled, too. The number of rows is left free, and that compiled, unless
    `rows_seconds`, its time limit, is None. Raises `RefusedTechnique` where the model does not export at all.
    """
    programs = export(target.model, cases)
    for program in programs.values():
        rewritten(program, target.settings)
    forms = Forms(calls=tuple(described(name, program) for name, program in programs.items()))
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
                    rows_seconds = seconds - (time.monotonic() - begun)
        except TimeIsUp:
            forms = _noted(forms, f"{name}: the export was not done after {seconds:.0f} s")
        except TorchwrightError as error:
            forms = _noted(forms, f"{name}: {error.found or error.summary}")
    write_programs(folder, programs)
    inductor = target.settings.inductor
    if packages:
        for index, case in enumerate(cases):
            compile_program(programs[case.name], folder / f"package-{index}.pt2", inductor)
    if ROWS in found:
        try:
            with time_limit(rows_seconds or 0.0):
                compile_program(programs[ROWS], folder / ROWS_PACKAGE, inductor)
        except (TimeIsUp, Exception) as error:
            reason = "no time left" if isinstance(error, TimeIsUp) else type(error).__name__
            forms = _noted(forms, f"{ROWS}: not compiled ({reason})")
            del found[ROWS]
    return replace(forms, rows=found.get(ROWS), general=found.get(GENERAL))


def choose(model: nn.Module, case: Case, takes: Takes, forms: Forms, folder: Path) -> Chosen:
    """How an artifact with these packages and graphs answers other calls best. `model` is the original."""
    fixed = Package(folder / "package-0.pt2", forms.calls[0])
    chosen = replace(
        check_graphs(model, case, takes, forms, folder, fixed), rows="pieces" if takes.pieces else "fixed"
    )
    if forms.rows is None:
        return chosen
    given = tensors_of(case)
    own = _error(_answer(model, case), _flat(lambda: fixed.run([t.clone() for t in given])))
    free = Package(folder / ROWS_PACKAGE, forms.rows)
    spec = _checked(model, free, case, takes, own)
    if spec is None:
        return _also(chosen, f"{ROWS}: not used, the compiled code answers some wrongly")
    rows = len(given[takes.batched[0]])
    cost = _ratio(lambda: free.run(list(given)), lambda: fixed.run(list(given)))
    if cost <= ROWS_COST:
        return replace(chosen, rows="free", any_rows=spec)
    note = f"{ROWS}: {cost:.2f} of the time at {rows} rows, which keep code of their own"
    if takes.pieces and _pieces_win(fixed, free, case, takes, rows):
        return _also(chosen, f"{note}; others are computed by it, in pieces")
    return _also(replace(chosen, rows="both", any_rows=spec), note)


def check_graphs(
    model: nn.Module, case: Case, takes: Takes, forms: Forms, folder: Path, fixed: Call | None = None
) -> Chosen:
    """What of the outputs' layout must be mended, and whether the graph with all sizes free may be used.

    `fixed` is what answers the example, by default its graph.
    """
    programs = read_programs(folder, trust=True)
    if fixed is None:
        fixed = GraphCall(programs[case.name], forms.calls[0])
    given = tensors_of(case)
    reference, found = _answer(model, case), _flat(lambda: fixed.run([t.clone() for t in given]))
    layouts = tuple(
        layout_of(a) if a.shape == b.shape and layout_of(a) != layout_of(b) else None
        for a, b in zip(reference, found, strict=True)
    )
    chosen = Chosen(layouts=layouts if any(layouts) else ())
    if forms.general is None:
        return chosen
    general = GraphCall(programs[GENERAL], forms.general)
    spec = _checked(model, general, case, takes, _error(reference, found))
    if spec is None:
        return _also(chosen, f"{GENERAL}: not used, the graph answers some wrongly")
    return replace(chosen, any_sizes=spec)


def _checked(model: nn.Module, call: Call, case: Case, takes: Takes, own: float) -> CallSpec | None:
    """What `call` takes with the smallest number of rows that it answers rightly; None where it answers some wrongly.

    torch.export supposes sizes of two at least; what it made is mostly right for one and none, too.
    """
    rows = len(tensors_of(case)[takes.batched[0]]) if takes.batched else 0
    numbers = sorted({max(1, rows // 2), rows, 2 * rows, 3} - {1}) if rows else []
    cases = [with_rows(case, takes.batched, b) for b in numbers] or [case]
    if any(_is_right(model, call, other, own) is False for other in cases):
        return None
    least = 2
    for b in (1, 0) if rows else ():
        if not _is_right(model, call, with_rows(case, takes.batched, b), own):
            break
        least = b
    name = call.spec.tensors[takes.batched[0]].shape[0] if rows else ""
    return replace(
        call.spec,
        sizes={s: (least if s == name else max(2, low), high) for s, (low, high) in call.spec.sizes.items()},
    )


def _pieces_win(fixed: Call, free: Call, case: Case, takes: Takes, rows: int) -> bool:
    """Whether calls of the compiled number of rows answer other numbers quicker than the free form does."""
    pieces = Door([fixed], takes=takes)
    ratios = []
    for b in {max(1, rows // 2), 2 * rows} - {rows}:
        other = with_rows(case, takes.batched, b)
        given = tensors_of(other)
        with ignore_library_warnings():  # it says that it goes a slower way
            ratios.append(_ratio(lambda g=given: free.run(list(g)), lambda o=other: pieces.run(o)))
    return bool(ratios) and statistics.geometric_mean(ratios) > 1.0


def _several(case: Case, takes: Takes) -> Case:
    """The call with two rows at least: torch.export takes a size of one for a constant."""
    if not takes.batched:
        return case
    return with_rows(case, takes.batched, max(2, len(tensors_of(case)[takes.batched[0]])))


def _noted(forms: Forms, note: str) -> Forms:
    return replace(forms, notes=(*forms.notes, note))


def _also(chosen: Chosen, note: str) -> Chosen:
    return replace(chosen, notes=(*chosen.notes, note))


def _is_right(model: nn.Module, call: Call, case: Case, own: float) -> bool | None:
    """Whether `call` answers as the original does, as nearly as at the example; None where that takes no such call."""
    try:
        wanted = _answer(model, case)
    except Exception:  # whatever the original says of such a call
        return None
    try:
        return _error(wanted, _flat(lambda: call.run([t.clone() for t in tensors_of(case)]))) <= max(
            2 * own, ROUNDING
        )
    except Exception:
        return False


def _answer(model: nn.Module, case: Case) -> list[torch.Tensor]:
    """The original's outputs; it is given copies, which it may change."""
    own = with_tensors(case, [tensor.clone() for tensor in tensors_of(case)])
    return _flat(lambda: model(*own.args, **own.kwargs))


def _flat(call: Callable[[], Any]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return flatten(call())


def _error(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    try:
        return relative_error(reference, found).value
    except TorchwrightError:
        return float("inf")


def _ratio(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    """How many times the time of `other` the call `one` takes; timed in turn."""
    with torch.inference_mode():
        calls = max(1, round(TURN_SECONDS / max(_seconds(one, 2), 1e-6)))
        _seconds(other, 1)
        return statistics.median(_seconds(one, calls) / _seconds(other, calls) for _ in range(ROUNDS))


def _seconds(call: Callable[[], Any], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls
