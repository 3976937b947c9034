# pyright: basic
"""The subject of an export: a model with one call, the steps of its recipe that are kept, and its graph."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from torchwright.core import nested
from torchwright.core.errors import ModelError, RefusedTechnique, TorchwrightError
from torchwright.core.records import Step
from torchwright.exporter.formats import Format
from torchwright.exporter.obstacles import ChangesState, changing, explained
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.packaging import changed
from torchwright.optimization.engines.compiled.program import FreeSizes, drop_text_results, export_one
from torchwright.optimization.engines.converted import handed_over
from torchwright.optimization.engines.dispatch.call import written
from torchwright.optimization.engines.dispatch.input_capabilities import (
    perhaps_batched,
    tensors_of,
    with_rows,
)
from torchwright.optimization.engines.dispatch.spec import SIZE, TENSOR, CallSpec
from torchwright.optimization.techniques.base import Phase, Target, from_step, in_order
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case, Workload
from torchwright.workloads.language import LanguageWorkload
from torchwright.workloads.module import ModuleWorkload

CALL = "forward"
CHANCE = 1e-3
"""The largest difference between two answers to one call."""
MOST = 16
"""Rows, where a runtime plans memory ahead and the example has fewer."""
PROMPT = 16
"""Tokens of a language model's example prompt."""
TRAVELS = (Phase.GRAPH, Phase.WEIGHTS, Phase.ATTENTION)
"""Steps that change the model itself, in operators that other runtimes may know."""


@dataclass(frozen=True)
class Graph:
    """The exported graph of the one call."""

    program: ExportedProgram
    spec: CallSpec
    frozen: str | None
    """The reason if the batch size is fixed."""


@dataclass(kw_only=True)
class Subject:
    """A model on its way into another runtime."""

    name: str
    target: Target
    """The model with the steps that travel, and what calibrates it."""
    original: nn.Module
    """The user's model in float32: the reference for outputs."""
    case: Case
    folder: Path | None = None
    """The Hugging Face folder that it comes from, if there is one."""
    most: int | None = None
    """The largest batch size."""
    ahead: bool = False
    """True if the runtime plans memory ahead, so that a largest batch size is always needed."""
    context: int | None = None
    """Tokens that a language model's cache is to hold, for a runtime that plans memory ahead."""
    march: str | None = None
    """The level of the processor's family that code is for, where it is not for this processor alone."""
    delegate: str = ""
    """The delegate, if the runtime has several."""
    fixed: str | None = None
    """Why the graph is for the example's sizes alone, where the runtime takes no others."""
    format: Format | None = None
    """The recipe's settings that the target has to express."""
    carried: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    """Steps of the recipe that stay behind, each with its reason."""
    notices: tuple[str, ...] = ()
    """The workload's notices, such as that the model was in training mode."""

    @cached_property
    def graph(self) -> Graph:
        """Raise `RefusedTechnique`, with the line of the model's own source, if there is no such graph."""
        try:
            if self.fixed is not None:
                return Graph(*_exported(self.target, self.case, None), self.fixed)
            return _graph(self.target, self.case, self.most, self.ahead)
        except ChangesState:
            raise
        except RefusedTechnique as error:
            raise explained(self.target.model, self.case, error) from error

    @property
    def language(self) -> nn.Module | None:
        """The causal language model with the steps that travel, where it is one."""
        model = self.target.model
        return model.model if isinstance(model, PromptLogits) else None

    def answer(self, tensors: Case, results: Sequence[str] = ()) -> list[torch.Tensor]:
        """Return the original's results, flat; those that `results` of the call says are constants are left out."""
        with torch.no_grad():
            found = nested.leaves(self.original(*tensors.args, **tensors.kwargs))
        if results:
            found = [leaf for leaf, kind in zip(found, results, strict=True) if kind in (TENSOR, SIZE)]
        return flatten(found)


def make_subject(
    workload: Workload,
    steps: Sequence[Step] = (),
    most: int | None = None,
    format: Format | None = None,
    context: int | None = None,
    march: str | None = None,
    *,
    ahead: bool = False,
    fixed: str | None = None,
    delegate: str = "",
) -> Subject:
    """Return the export's subject for a workload's first call, with those of `steps` that are kept, or whose format
    is.

    A language model is exported as prompt → logits. Raises `ModelError` for a model whose outputs are NaN. `fixed` is
    the reason why the graph is for the example's sizes alone.
    """
    folder = getattr(workload, "folder", None)
    name, notices = workload.label, workload.notices()
    if isinstance(workload, LanguageWorkload):
        workload = _prompt(workload)
    device = get_device("cpu").identify()
    original = make_target(workload, device).model
    case = _at_most(most, workload.cases(torch.float32)[0])
    own = None if format is None else format.step
    carried, left = _carried(workload, [step for step in steps if step is not own], case)
    target = make_target(workload, device)
    apply_steps(target, carried)
    if not carried:
        target.model = workload.adapt(target.model)
    subject = Subject(
        name=name,
        target=target,
        original=workload.adapt(original),
        case=case,
        folder=folder,
        most=most,
        ahead=ahead,
        context=context,
        march=march,
        delegate=delegate,
        fixed=fixed,
        format=format,
        carried=tuple(map(str, carried if own is None else [*carried, own])),
        left=left,
        notices=notices,
    )
    _check_numbers(subject)
    return subject


def _at_most(rows: int | None, case: Case) -> Case:
    """The call with its first rows, where it has more."""
    batched = next(iter(perhaps_batched(tensors_of(case))), ())
    if rows is None or not batched or len(tensors_of(case)[batched[0]]) <= rows:
        return case
    return with_rows(case, batched, rows)


class PromptLogits(nn.Module):
    """A causal language model as a function of its prompt: token ids (B, T) → logits (B, T, V), without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def _prompt(workload: LanguageWorkload) -> ModuleWorkload:
    tokens = min(PROMPT, workload.prompt_tokens)
    ids = workload.cases(torch.float32)[0].args[0].flatten()[: 2 * tokens]
    prompts = ids.repeat(2)[: 2 * tokens].view(2, tokens)
    return ModuleWorkload(PromptLogits(workload.build()).eval(), (prompts,), source=workload.label)


def _carried(workload: Workload, steps: Sequence[Step], case: Case) -> tuple[list[Step], dict[str, str]]:
    """The steps whose operators are torch's own, and why each of the others stays behind."""
    carried: list[Step] = []
    left: dict[str, str] = {}
    for step in in_order(steps):
        technique = from_step(step)
        if technique.phase not in TRAVELS:
            left[str(step)] = "the target compiles, and chooses its types, by itself"
            continue
        if "language" in technique.needs:
            left[str(step)] = "its layers are Torchwright's own, and no other runtime's"
            continue
        try:
            target = make_target(workload, get_device("cpu").identify())
            apply_steps(target, [*carried, step])
            program, _ = _exported(target, case, None)
        except TorchwrightError as error:
            left[str(step)] = error.reason
            continue
        foreign = {
            str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"
        } - {"aten", "<built-in function getitem>"}
        if foreign:
            left[str(step)] = f"its operators are of {', '.join(sorted(foreign))}, and no other runtime's"
        else:
            carried.append(step)
    return carried, left


def _graph(target: Target, case: Case, most: int | None, ahead: bool) -> Graph:
    """Return the graph with a dynamic batch size, or with the example's if the model does not allow that."""
    if case.dynamic is not None:
        return Graph(*_exported(target, case, case.dynamic), None)
    batched = next(iter(perhaps_batched(tensors_of(case))), ())
    if not batched:
        return Graph(*_exported(target, case, None), "no tensor of the call has rows")
    if most == 1:
        return Graph(*_exported(target, case, None), "one row was asked for")
    own = len(tensors_of(case)[batched[0]])
    if most is None and ahead:
        most = max(MOST, own)
    rows = max(2, own)
    try:
        several = with_rows(case, batched, rows if most is None else min(rows, most))
        program, spec = _exported(target, several, FreeSizes(rows=batched, least=1, most=most))
        if any(isinstance(tensor.shape[0], str) for tensor in spec.tensors if tensor.shape):
            return Graph(program, spec, None)
        why = "the graph holds for the example's rows alone"
    except RefusedTechnique as error:
        why = error.reason
    return Graph(*_exported(target, case, None), why)


def _exported(target: Target, case: Case, sizes: Any) -> tuple[ExportedProgram, CallSpec]:
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints the graph as far as it came
        program = export_one(target.model, case, sizes)
    program = changed(program, target.settings)
    if written(program):
        raise changing(program)
    return program, handed_over(CALL, program)


def make_plain(program: ExportedProgram) -> None:
    """Make a program one that every runtime knows, in place: dicts and tuples for records, no text among results."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    signature.in_spec, signature.out_spec = map(nested.plain_spec, (signature.in_spec, signature.out_spec))
    program.example_inputs = nested.plain(program.example_inputs)
    drop_text_results(program)


def _check_numbers(subject: Subject) -> None:
    for index, tensor in enumerate(subject.answer(subject.case)):
        bad = int(tensor.isnan().sum()) if tensor.is_floating_point() else 0
        if bad:
            raise ModelError(
                f"output {index} of {subject.name} is not a number: there is nothing to hold an export against",
                found=f"{bad} NaN of {tensor.numel()}, first in {_first_nan(subject.original, subject.case)}",
            )


def check_repeats(subject: Subject) -> None:
    """Raises `ModelError` for a model whose second answer to a call is another, though its graph changes nothing."""
    first = subject.answer(subject.case)
    again = subject.answer(subject.case)
    if any(
        one.shape == two.shape and relative_error([one], [two]).value > CHANCE
        for one, two in zip(first, again, strict=True)
    ):
        raise ModelError(
            f"{subject.name} answers the same call differently the second time, and an export can do so once alone",
            found="state that it keeps from call to call, or chance",
            next="hand the state in and give the new one back: forward(x, state) → (y, state); leave chance out",
        )


def _first_nan(model: nn.Module, case: Case) -> str:
    """The innermost module whose output is the first with NaN, and what was before it where its inputs had one."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _has_nan(output):
                called = name or "the model itself"
                own = name.rpartition(".")[0] or "the model itself"
                found.append(f"{own}'s own code, before {called}" if name and _has_nan(args) else called)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the model's inputs"


def _has_nan(values: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and bool(t.isnan().any()) for t in nested.leaves(values))
