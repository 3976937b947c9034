# pyright: basic
"""The reference of a package: the original's answers to calls of several sizes, and the graph that was converted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_json, typed
from torchwright.exporter.base import Run
from torchwright.exporter.subject import CALL, Subject
from torchwright.exporter.verification.probes import ZERO_ROWS
from torchwright.optimization.artifact.tree import read_tree, write_tree
from torchwright.optimization.engines.compiled.program import read_programs, write_programs
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of, with_tensors
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.profile.breaks import FRAME, is_users

CALLS, LAYERS, SETTINGS = "calls", "layers.json", "settings.json"
EXAMPLE, SMALLEST, LARGEST, PAST = "example", "smallest", "largest", "one past"
KIN: dict[str, str] = {
    "aten.native_layer_norm": "aten.layer_norm",
    "aten.native_group_norm": "aten.group_norm",
    "aten._native_batch_norm_legit_no_training": "aten.batch_norm",
} | {f"aten.conv{dims}d": "aten.convolution" for dims in (1, 2, 3)}
"""Operators that converters rewrite before they convert → one name for both."""
UNBOUNDED = 3
"""The largest size tried of one without a bound, in multiples of the example's."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, and what the original answers."""

    name: str
    sizes: dict[str, int]
    """Free sizes by name."""
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]


def calls_of(subject: Subject) -> list[Call]:
    """The example's call, both ends of its free sizes, and one past the larger; those that the original answers."""
    spec = subject.graph.spec
    tensors = tensors_of(subject.case)
    example = spec.bind([tensor.shape for tensor in tensors])
    if example is None:  # the smallest that torch.export takes is 2
        example = {name: _example(spec, tensors, name) for name in spec.sizes}
    wished = [(EXAMPLE, example)]
    if spec.sizes:
        smallest = {name: max(1, low) for name, (low, _) in spec.sizes.items()}
        largest = {
            name: UNBOUNDED * example[name] if high is None else high
            for name, (_, high) in spec.sizes.items()
        }
        past = {name: size + 1 for name, size in largest.items()}
        wished += [(SMALLEST, smallest), (LARGEST, largest), (PAST, past)]
    found: list[Call] = []
    for name, sizes in wished:
        case = with_tensors(
            subject.case, [resized(t, s.shape, sizes) for t, s in zip(tensors, spec.tensors, strict=True)]
        )
        try:
            outputs = subject.answer(case, spec.results)
        except Exception:  # of the model, which takes no such size itself
            if name == EXAMPLE:
                raise
            continue
        found.append(Call(name=name, sizes=sizes, tensors=tensors_of(case), outputs=outputs))
    return found


def without_rows(subject: Subject) -> list[Call]:
    """Return the call with zero rows, if the batch size is dynamic and the original refuses zero."""
    spec, tensors = subject.graph.spec, tensors_of(subject.case)
    rows = {tensor.shape[0] for tensor in spec.tensors if tensor.shape and isinstance(tensor.shape[0], str)}
    bound = spec.bind([tensor.shape for tensor in tensors])
    if not rows or bound is None:
        return []
    sizes = bound | {str(name): 0 for name in rows}
    case = with_tensors(
        subject.case, [resized(t, s.shape, sizes) for t, s in zip(tensors, spec.tensors, strict=True)]
    )
    try:
        return [
            Call(
                name=ZERO_ROWS,
                sizes=sizes,
                tensors=tensors_of(case),
                outputs=subject.answer(case, spec.results),
            )
        ]
    except Exception:  # of the model, which takes no such call itself
        return []


def resized(tensor: torch.Tensor, shape: Sequence[int | str], sizes: dict[str, int]) -> torch.Tensor:
    """The tensor with its free sizes as they are said, its own values repeated."""
    for dim, size in enumerate(shape):
        if isinstance(size, str):
            tensor = tensor.index_select(dim, torch.arange(sizes[size]) % tensor.shape[dim])
    return tensor


def free_dims(spec: CallSpec, tensors: Sequence[torch.Tensor]) -> Any:
    """The call's free sizes in torch.export's form, for a graph that is made from its graph."""
    dims = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in spec.sizes.items()}
    shapes = torch.export.ShapesCollection()
    for tensor, said in zip(tensors, spec.tensors, strict=True):
        if named := {at: dims[size] for at, size in enumerate(said.shape) if isinstance(size, str)}:
            shapes[tensor] = named
    return shapes


def write_reference(folder: Path, program: ExportedProgram | None, calls: Sequence[Call]) -> None:
    if program is not None:
        write_programs(folder, {CALL: program})
        (folder / LAYERS).write_text(json.dumps(asdict(layers_of(program))), encoding="utf-8")
    write_tree(folder / CALLS, [vars(call) for call in calls])


def read_calls(folder: Path) -> list[Call]:
    """Raises `ArtifactError` for anything but calls."""
    kept = read_tree(folder / CALLS)
    match kept:
        case [{"name": str(), "sizes": dict(), "tensors": list(), "outputs": list()}, *_]:
            return [Call(**call) for call in kept]
    raise ArtifactError(f"{folder} holds no calls of a model", next="export again")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The data with which a package was written in place of a graph."""

    values: dict[str, Any]


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Keep the data with which a package was written, except weights."""
    if settings:
        (folder / SETTINGS).write_text(json.dumps(asdict(Settings(values=settings))), encoding="utf-8")


def read_settings(folder: Path) -> dict[str, Any]:
    """Empty where none were kept. Raises `ArtifactError` for what is something else."""
    if not (folder / SETTINGS).is_file():
        return {}
    return typed(read_json(folder / SETTINGS), Settings, SETTINGS).values


def read_graph(folder: Path, *, trust: bool) -> ExportedProgram:
    return read_programs(folder, trust=trust)[CALL]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Facts about operators that the graph's file does not keep, by their keys."""

    modules: dict[str, str]
    """Path of the module that calls it."""
    lines: dict[str, str]
    """The line of the model's own source."""


def layers_of(program: ExportedProgram) -> Layers:
    named = operator_keys(program)
    return Layers(
        modules={key: module_of(node) for node, key in named.items()},
        lines={key: line_of(node) for node, key in named.items()},
    )


def operator_keys(program: ExportedProgram) -> dict[fx.Node, str]:
    """Every operator that gives a tensor, and its key, in order."""
    nodes = [
        node
        for node in program.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return keys((node, operator_of(node)) for node in nodes)


def read_layers(folder: Path) -> Layers:
    """Raises `ArtifactError`."""
    return typed(read_json(folder / LAYERS), Layers, str(folder / LAYERS))


def graph_values(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every operator's value in a call, by `keys` and in order."""
    args, kwargs = _arguments(program, tensors)
    found = node_values(program.module(), nested.leaves((args, kwargs)))
    names = keys((node, operator_of(node)) for node in found)
    return {names[node]: value for node, value in found.items()}


def node_values(module: Any, flat: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """Every operator's value in a call of a graph's module, in order; `flat` are the call's leaves."""
    found: dict[fx.Node, torch.Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n.op == "call_function" and isinstance(value, torch.Tensor):
                found[n] = value.clone()  # a later operator may write into it
            return value

    assert len(flat) == sum(node.op == "placeholder" for node in module.graph.nodes)
    with torch.no_grad():
        Recorder(module).run(*flat)
    return found


def keys(operators: Any) -> dict[Any, str]:
    """Something for each operator in the order of the graph, and the operator's name → name and number of its kind.

    Conversions keep the order of operators and rename what they give; so the third linear stays the third.
    """
    count: Counter[str] = Counter()
    found: dict[Any, str] = {}
    for node, name in operators:
        kind: str = KIN.get(name) or name
        found[node] = f"{kind}#{count[kind]}"
        count[kind] += 1
    return found


def operator_of(node: fx.Node) -> str:
    """Such as `aten.linear`."""
    return str(node.target).rpartition(".")[0]


def module_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) or "the model itself" if stack else "the model itself"


def line_of(node: fx.Node) -> str:
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    mine = [(file, line) for file, line in frames if is_users(file)]
    return f"{mine[-1][0]}, line {mine[-1][1]}" if mine else ""


def _arguments(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> Any:
    """The graph's own example call with these tensors, its instances as records."""
    example: Any = program.example_inputs
    remaining = iter(tensors)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), example)


def eager(program: ExportedProgram) -> Run:
    """The graph, operator by operator."""
    return calling(program.module(), program)


def calling(model: Callable[..., Any], program: ExportedProgram) -> Run:
    """Return a callable with the graph's signature, such as the model that it was made from."""

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = _arguments(program, tensors)
        with torch.no_grad():
            return nested.tensors(model(*args, **kwargs))

    return run


def _example(spec: CallSpec, tensors: Sequence[torch.Tensor], name: str) -> int:
    for tensor, given in zip(spec.tensors, tensors, strict=True):
        for size, extent in zip(tensor.shape, given.shape, strict=True):
            if size == name:
                return max(extent, spec.sizes[name][0])
    raise AssertionError(name)
