# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Exported graphs: made with torch.export, kept as JSON and safetensors, compiled by AOTInductor. No pickle.

programs = export(model, cases)              one graph for each case
write_programs(folder, programs)             programs.json, programs.safetensors
programs = read_programs(folder)             the same graphs, from a file that may be hostile
compile_program(program, path, inductor)     → a .pt2 package of native code
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._export.serde import serialize as serde
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from torchwright.errors import ArtifactError, RefusedTechnique
from torchwright.kernels import build
from torchwright.workloads.base import Case

GRAPHS, TENSORS = "programs.json", "programs.safetensors"
SHAPE_FUNCTIONS = frozenset(
    [
        "Symbol",
        "Integer",
        "Rational",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "Mod",
        "FloorDiv",
        "CeilDiv",
        "CleanDiv",
        "PythonMod",
        "ModularIndexing",
    ]
)
"""All that a shape expression may call: torch's loader evaluates these texts with sympy."""


def export(model: nn.Module, cases: Sequence[Case]) -> dict[str, ExportedProgram]:
    """One exported graph for each case.

    Raises `RefusedTechnique` with torch.export's reason when the model is not one graph.
    """
    programs = {}
    for case in cases:
        args = case.args if case.example is None else case.example
        with torch.no_grad(), ignore_library_warnings():
            try:
                programs[case.name] = torch.export.export(
                    model, args, case.kwargs, dynamic_shapes=_dynamic_shapes(model, case), strict=False
                )
            except Exception as error:
                raise RefusedTechnique(
                    "torch.export cannot take this model as one graph",
                    found=f"{type(error).__name__}: {first_line(error)}",
                    next="engine=jit compiles it with graph breaks",
                ) from error
        _drop_metadata_checks(programs[case.name].graph_module)
    return programs


def _drop_metadata_checks(graph_module: torch.fx.GraphModule) -> None:
    """Remove export's checks that a tensor has the type it was traced with, one at every `.to()`.

    They can never fail in the exported graph, and as one more reader of a value they keep Inductor's patterns, which
    count readers, from fusing anything into a layer before or after them.
    """
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _dynamic_shapes(model: nn.Module, case: Case) -> Any:
    """The case's dynamic shapes; a wrapper that takes `*args` has them all in one argument."""
    if case.dynamic is None:
        return None
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return (case.dynamic,) if inspect.Parameter.VAR_POSITIONAL in kinds else case.dynamic


def compile_program(program: ExportedProgram, path: Path, inductor: dict[str, Any]) -> None:
    """Compile a graph ahead of time into the package `path` (.pt2)."""
    with torch.no_grad(), ignore_library_warnings(), torch._inductor.config.patch(inductor):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def write_programs(folder: Path, programs: dict[str, ExportedProgram]) -> None:
    """Keep graphs and their tensors; a tensor that several graphs share is written once."""
    graphs: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def keep(tensor: torch.Tensor) -> str:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.numel())
        if key not in names:
            names[key] = f"t{len(names)}"
            tensors[names[key]] = tensor.detach().contiguous().cpu().clone()
        return names[key]

    for name, program in programs.items():
        for constant, value in program.constants.items():
            if not isinstance(value, torch.Tensor):
                raise RefusedTechnique(
                    f"the exported graph holds '{constant}', a {type(value).__name__}, which no file can keep"
                )
        with ignore_library_warnings():
            serialized = serde.ExportedProgramSerializer().serialize(program)
        graphs[name] = {
            "graph": serde._dataclass_to_dict(serialized.exported_program),
            "state": {key: _tensor_entry(value, keep) for key, value in program.state_dict.items()},
            "constants": {
                key: _tensor_entry(value, keep)
                for key, value in program.constants.items()
                if isinstance(value, torch.Tensor)
            },
        }
    (folder / GRAPHS).write_text(json.dumps(graphs, cls=serde.EnumEncoder))
    save_file(tensors, folder / TENSORS)


def read_programs(folder: Path) -> dict[str, ExportedProgram]:
    """The graphs that `write_programs` kept.

    Raises `ArtifactError` for files that are damaged or that hold anything but plain graphs and tensors.
    """
    try:
        text = (folder / GRAPHS).read_text()
        if "torch.ops.torchwright." in text:
            build.load()  # registers the operators that the graph calls; without them it names the first
        graphs = json.loads(text)
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no dict
        _refuse_code(graphs)
        programs = {}
        for name, entry in graphs.items():
            with ignore_library_warnings():
                programs[name] = serde.ExportedProgramDeserializer().deserialize(
                    serde._dict_to_dataclass(serde.ExportedProgram, entry["graph"]),
                    {key: _tensor(tensors, value) for key, value in entry["state"].items()},
                    {key: _tensor(tensors, value) for key, value in entry["constants"].items()},
                    None,
                )
            programs[name]._example_inputs = _example_inputs(programs[name])
        return programs
    except Exception as error:  # torch's deserializer raises whatever a hostile file makes it stumble over
        raise ArtifactError(
            f"the graphs in {folder} cannot be read", found=f"{type(error).__name__}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


@contextlib.contextmanager
def ignore_library_warnings() -> Iterator[None]:
    """torch's exporter and Inductor warn about their own internals; a user can do nothing about those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _example_inputs(program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the right shapes: compilation asks for some, and the file keeps none. Free sizes take their largest."""
    largest = {str(symbol): int(bounds.upper) for symbol, bounds in program.range_constraints.items()}

    def size(value: Any) -> int:
        return value if isinstance(value, int) else largest[str(value)]

    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    leaves = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
        if isinstance(value, torch.Tensor):
            shape = [size(n) for n in value.shape]
            value = torch.zeros(shape, dtype=value.dtype, device=value.device)
        leaves.append(value)
    args, kwargs = torch.utils._pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return args, kwargs


def _tensor_entry(tensor: torch.Tensor, keep: Any) -> dict[str, Any]:
    return {
        "tensor": keep(tensor),
        "stride": list(tensor.stride()),
        "device": tensor.device.type,
        "parameter": isinstance(tensor, nn.Parameter),
    }


def _tensor(tensors: dict[str, torch.Tensor], entry: dict[str, Any]) -> torch.Tensor:
    tensor = tensors[entry["tensor"]]
    if list(tensor.stride()) != entry["stride"]:
        restored = torch.empty_strided(tensor.shape, entry["stride"], dtype=tensor.dtype)
        tensor = restored.copy_(tensor)
    tensor = tensor.to(entry.get("device", "cpu"))
    return nn.Parameter(tensor, requires_grad=False) if entry["parameter"] else copy.copy(tensor)


def _refuse_code(value: Any) -> None:
    """Refuse anything in a graph's JSON that torch's loader would evaluate or unpickle."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "expr_str" and not _is_shape(item):
                raise ValueError(f"a shape expression that is not one: {str(item)[:80]!r}")
            if key in ("as_custom_obj", "as_operator") and item:
                raise ValueError(f"a graph with {key}")
            _refuse_code(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_code(item)


def _is_shape(text: Any) -> bool:
    """Whether a text is arithmetic over integers and symbols and nothing else."""
    if not isinstance(text, str) or len(text) > 1000:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return False
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load, ast.keyword)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in SHAPE_FUNCTIONS):
                return False
        elif isinstance(node, ast.Name):
            if not re.fullmatch(r"[a-zA-Z]\w*", node.id):
                return False
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and not re.fullmatch(r"[a-z]\w*", node.value):
                return False
        elif not isinstance(node, allowed):
            return False
    return True
