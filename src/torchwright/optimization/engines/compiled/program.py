# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Exported graphs: made with torch.export, kept as JSON and safetensors, compiled by AOTInductor. No pickle.

programs = export(model, cases)              one graph for each case
program = functional(program)                the graph without operators that write in place
write_programs(folder, programs)             programs.json, programs.safetensors
programs = read_programs(folder)             the same graphs, from a file that may be hostile
compile_program(program, path, inductor)     → a .pt2 package of native code
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import math
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._export.serde import serialize as serde
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, RefusedTechnique, TorchwrightError, first_line
from torchwright.core.json_file import read_json
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.optimization.engines.rewrites.tables import keep_tables
from torchwright.optimization.engines.rewrites.traceable import named_arguments, sizes_by_len
from torchwright.optimization.engines.safety.graph_check import TensorEntry, checked
from torchwright.workloads.base import Case

CHECK_LEAST = "aot_inductor.check_lowerbound"
"""Inductor's setting; such checks are made where AOTI_RUNTIME_CHECK_INPUTS=1 is set."""
WRAPPER_FLAGS = "aot_inductor.compile_wrapper_opt_level"
"""Inductor's setting: flags of the C++ compiler for the code that also allocates the weights."""
ALIGNED = Path(__file__).with_name("aligned_constants.h")
GRAPHS, TENSORS = "programs.json", "programs.safetensors"
LARGEST = 512 * 2**20
"""Bytes of GRAPHS."""
DEEPEST = 100
"""The limit on nested lists and objects: graphs within graphs."""
LARGEST_INPUT = 2**34
"""Bytes of the inputs that are made up for a graph that is compiled again."""
ALIGNMENT = 64
"""Bytes, of what PyTorch allocates on the CPU."""
SPARSEST = 64
"""The factor by which a tensor may spread beyond its own size, as a part of a larger one does."""
UNBOUNDED = 2**20
"""A free size that may be larger takes the one it was exported with."""


def export(model: nn.Module, cases: Sequence[Case]) -> dict[str, ExportedProgram]:
    """One exported graph for each case.

    Raises `RefusedTechnique` with torch.export's reason when the model is not one graph.
    """
    return {case.name: export_one(model, case, dynamic_shapes(model, case)) for case in cases}


def export_one(model: nn.Module, case: Case, dynamic_shapes: Any) -> ExportedProgram:
    """One call as a graph; its inputs are dense, so that compiled code reads them as callers mostly have them."""
    given = (case.args if case.example is None else case.example, case.kwargs)
    args, kwargs = nested.opened(nested.map_tensors(_dense, given))
    if isinstance(dynamic_shapes, FreeSizes):
        dynamic_shapes = dynamic_shapes.of(args, kwargs)
    with (
        torch.no_grad(),
        ignore_library_warnings(),
        nested.takes_records(model),
        named_arguments(model, kwargs),
        sizes_by_len(model),
    ):
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        except Exception as error:
            raise RefusedTechnique(
                "torch.export cannot take this model as one graph",
                found=f"{type(error).__name__}: {first_line(error)}",
                next="engine=jit compiles it with graph breaks",
            ) from error
    _drop_metadata_checks(program.graph_module)
    keep_tables(program)
    return program


def functional(program: ExportedProgram) -> ExportedProgram:
    """The same graph without an operator that writes to its arguments, and otherwise of the same operators.

    A rewrite may then join and move what computes a value, and ask nothing but who reads it. What the call changes in
    place (inputs, buffers) is named in the signature. Raises `RefusedTechnique` where torch cannot.
    """
    with torch.no_grad(), ignore_library_warnings():
        try:
            program = program.run_decompositions({})
        except Exception as error:
            raise RefusedTechnique(
                "the exported graph cannot be rewritten: it has no form without operators that write in place",
                found=f"{type(error).__name__}: {first_line(error)}",
            ) from error
    _drop_metadata_checks(program.graph_module)
    return program


@dataclass(frozen=True, kw_only=True)
class FreeSizes:
    """Which sizes of a call's tensors may vary: the first of `rows`, as one; or all that the model lets vary."""

    rows: tuple[int, ...] | None = None
    """Tensors, in their order; None is all sizes of all of them."""
    least: int = 2
    most: int | None = None
    """Rows, for who plans memory ahead; None is any number."""

    def of(self, args: Any, kwargs: Any) -> torch.export.ShapesCollection:
        """In torch.export's form."""
        shapes = torch.export.ShapesCollection()
        rows = torch.export.Dim("rows", min=self.least, max=self.most)
        tensors = nested.tensors((args, kwargs))
        for index, tensor in enumerate(tensors):
            if self.rows is None:
                shapes[tensor] = dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
            elif index in self.rows:
                shapes[tensor] = {0: rows}
        return shapes


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    # Of a tensor that leaves no gaps and overlaps nowhere an empty copy has the same strides.
    return (
        tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()
    )


def _drop_metadata_checks(graph_module: torch.fx.GraphModule) -> None:
    """Remove export's checks that a tensor has the dtype it was traced with, one at every `.to()`.

    They can never fail in the exported graph. As an additional reader of a value they keep Inductor's patterns, which
    count readers, from fusing into the layers around them.
    """
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def dynamic_shapes(model: nn.Module, case: Case) -> Any:
    """The case's dynamic shapes; of what is given by place a wrapper that takes `*args` has all in one argument."""
    if case.dynamic is None or not case.args:
        return case.dynamic
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return (case.dynamic,) if inspect.Parameter.VAR_POSITIONAL in kinds else case.dynamic


def compile_program(program: ExportedProgram, path: Path, inductor: dict[str, Any]) -> None:
    """Compile a graph ahead of time into the package `path` (.pt2).

    Unless `inductor` asks for it, the code does not refuse sizes of one, which torch.export takes to be none of a size
    left free; whether it answers them is seen by whoever calls it (`CallSpec.sizes`).
    """
    if any(str(node.target).startswith("quantized_decomposed.") for node in program.graph.nodes):
        from torchwright.optimization.techniques.shared.int8 import (
            register_patterns,  # loading a package does not need this import
        )

        register_patterns()
    # Loading a package does not need Inductor.
    from torchwright.optimization.engines.compiled.byte_reductions import exact_reductions

    use_private_caches()
    with (
        torch.no_grad(),
        ignore_library_warnings(),
        _without_text(program),
        torch._inductor.config.patch(
            {CHECK_LEAST: False} | _aligned_constants() | exact_reductions() | inductor
        ),
    ):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def _aligned_constants() -> dict[str, Any]:
    """Return the setting with which a package's weights start on a page.

    On AVX2 a call of MiniLM with packed weights takes 349 ms with it and 414 to 455 ms without.
    """
    if sys.platform != "linux":
        return {}
    flags = torch._inductor.config.aot_inductor.compile_wrapper_opt_level
    return {WRAPPER_FLAGS: f"{flags} -include {shlex.quote(str(ALIGNED))}"}


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
        with ignore_library_warnings(), _without_example(program):
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
    text = json.dumps(graphs, cls=serde.EnumEncoder)
    try:
        checked(json.loads(text), trust=True)
    except (ValueError, TorchwrightError) as error:  # a name, say, that would be taken for code
        raise RefusedTechnique(
            "the exported graph cannot be kept in a file", found=first_line(error)
        ) from error
    (folder / GRAPHS).write_text(text, encoding="utf-8")
    save_file(tensors, folder / TENSORS)


def read_programs(
    folder: Path, *, trust: bool = False, names: Collection[str] | None = None
) -> dict[str, ExportedProgram]:
    """The graphs that `write_programs` kept, all of them or those of these names.

    With `trust` they may call operators of any library that is loaded. Raises `ArtifactError` for files that are
    damaged or that hold anything but plain graphs and tensors.
    """
    try:
        graphs = checked(read_json(folder / GRAPHS, largest=LARGEST, deepest=DEEPEST), trust=trust)
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = {key: _aligned(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118, not a dict
        programs = {}
        for name, entry in graphs.items():
            if names is not None and name not in names:
                continue
            _register_operators(entry["graph"])
            texts = _without_text_results(entry["graph"]["graph_module"])
            with ignore_library_warnings():
                programs[name] = serde.ExportedProgramDeserializer().deserialize(
                    serde._dict_to_dataclass(serde.ExportedProgram, entry["graph"]),
                    {key: _tensor(tensors, value) for key, value in entry["state"].items()},
                    {key: _tensor(tensors, value) for key, value in entry["constants"].items()},
                    None,
                )
                _put_constants(programs[name], texts)
                programs[name]._example_inputs = _example_inputs(programs[name])
            _check_state(programs[name])
        return programs
    except Exception as error:  # torch's deserializer raises whatever a hostile file makes it stumble over
        raise ArtifactError(
            f"the graphs in {folder} cannot be read", found=f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor at an address that PyTorch's allocator could have given it.

    A file keeps tensors one after the other, so that 8-bit ones begin at any byte. torch's CPU kernels load them as if
    they were allocated: `_weight_int8pack_mm` ends the process with a segmentation fault (torch 2.13). Wider types lie
    at multiples of their own size, which their kernels accept.
    """
    return tensor.clone() if tensor.element_size() == 1 and tensor.data_ptr() % ALIGNMENT else tensor


@contextlib.contextmanager
def ignore_library_warnings() -> Iterator[None]:
    """torch's exporter and Inductor warn about their own internals; a user can do nothing about those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _without_text_results(graph_module: dict[str, Any]) -> dict[int, str]:
    """Replace text among a graph's results by None, in place: torch writes such results and cannot read them.

    Return the texts by their place.
    """
    outputs, specs = graph_module["graph"]["outputs"], graph_module["signature"]["output_specs"]
    texts = {index: each["as_string"] for index, each in enumerate(outputs) if "as_string" in each}
    for index in texts:
        outputs[index] = {"as_none": True}
        specs[index] = {"user_output": {"arg": {"as_none": True}}}
    return texts


def drop_text_results(program: ExportedProgram) -> None:
    """Replace text among the results by None, in place, for runtimes that have no text."""
    _put_constants(program, dict.fromkeys(_texts(program)))


def drop_constant_results(program: ExportedProgram) -> None:
    """Leave the results out that are neither tensors nor sizes, in place: the rest is a flat tuple."""
    node: Any = program.graph.output_node()
    kept = [index for index, value in enumerate(node.args[0]) if isinstance(value, torch.fx.Node)]
    if len(kept) == len(node.args[0]):
        return
    specs = program.graph_signature.output_specs
    specs[:] = [specs[index] for index in kept]
    node.args = (tuple(node.args[0][index] for index in kept),)
    signature = program.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = pytree.tree_structure(tuple(range(len(kept))))
    signature.outputs = [each.arg for each in specs]


@contextlib.contextmanager
def _without_text(program: ExportedProgram) -> Iterator[None]:
    """Meanwhile None stands for text among the results: Inductor takes numbers and None, and no text."""
    texts = _texts(program)
    _put_constants(program, dict.fromkeys(texts))
    try:
        yield
    finally:
        _put_constants(program, texts)


@contextlib.contextmanager
def _without_example(program: ExportedProgram) -> Iterator[None]:
    """Meanwhile the graph has no example inputs: torch pickles them, and a trial cannot import a script's classes."""
    example, program._example_inputs = program._example_inputs, None
    try:
        yield
    finally:
        program._example_inputs = example


def _texts(program: ExportedProgram) -> dict[int, str]:
    """The texts among a graph's results, by their place."""
    node: Any = program.graph.output_node()
    return {index: value for index, value in enumerate(node.args[0]) if isinstance(value, str)}


def _put_constants(program: ExportedProgram, constants: Mapping[int, str | None]) -> None:
    """Put constants in the place of a graph's results."""
    node: Any = program.graph.output_node()
    node.args = (tuple(constants.get(index, value) for index, value in enumerate(node.args[0])),)
    for index, value in constants.items():
        program.graph_signature.output_specs[index].arg = ConstantArgument(name="", value=value)


def _check_state(program: ExportedProgram) -> None:
    """Raise `ValueError` where a tensor is not what the graph takes it for: code may be compiled from its word."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    held = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        meant, found = values[spec.arg.name], held[str(spec.target)]
        if (meant.dtype, list(meant.shape)) != (found.dtype, list(found.shape)):
            raise ValueError(f"{spec.target} is {found.dtype} {list(found.shape)}, not as its graph says")


def _register_operators(graph: dict[str, Any]) -> None:
    """Make the operators known that the graph calls and torch does not bring."""
    targets = set(_targets(graph["graph_module"]["graph"]))
    if any(target.startswith("torch.ops.torchwright.") for target in targets):
        build.load_fault()  # without them torch names the first
    if any(target.startswith("torch.ops.torchwright_gpu.") for target in targets):
        gpu.load_fault()
    if any(target.startswith("torch.ops.quantized_decomposed.") for target in targets):
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    if any(target.startswith("torch.ops.prims.inductor_") for target in targets):
        importlib.import_module("torch._inductor.inductor_prims")


def _targets(value: Any) -> Iterator[str]:
    """Return the targets of all nodes, including those of nested graphs: a block under autocast is one."""
    if isinstance(value, dict):
        if isinstance(value.get("target"), str):
            yield value["target"]
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _targets(each)


def _example_inputs(program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the right shapes: compilation asks for some, and the file keeps none.

    A free size takes its largest value, or the one that it was exported with where it has no bound.
    """

    def size(value: Any) -> int:
        if isinstance(value, int):
            return value
        bounds = program.range_constraints.get(value.node.expr)
        if bounds is not None and bounds.upper <= UNBOUNDED:
            return int(bounds.upper)
        return int(value.node.hint)

    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    leaves, room = [], LARGEST_INPUT
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
        if isinstance(value, torch.Tensor):
            shape = [size(n) for n in value.shape]
            room -= math.prod(shape) * value.dtype.itemsize
            if room < 0:
                raise ValueError(f"inputs of more than {LARGEST_INPUT:,} bytes")
            value = torch.zeros(shape, dtype=value.dtype, device=value.device)
        elif isinstance(value, torch.SymInt):
            value = size(value)
        leaves.append(value)
    in_spec = program.call_spec.in_spec
    assert in_spec is not None
    args, kwargs = pytree.tree_unflatten(leaves, in_spec)
    return args, kwargs


def _tensor_entry(tensor: torch.Tensor, keep: Any) -> dict[str, Any]:
    return {
        "tensor": keep(tensor),
        "stride": list(tensor.stride()),
        "device": tensor.device.type,
        "parameter": isinstance(tensor, nn.Parameter),
    }


def _tensor(tensors: dict[str, torch.Tensor], entry: TensorEntry) -> torch.Tensor:
    tensor = tensors[entry["tensor"]]
    if list(tensor.stride()) != entry["stride"]:
        tensor = _strided(tensor, entry["stride"])
    tensor = tensor.to(entry.get("device", "cpu"))
    return nn.Parameter(tensor, requires_grad=False) if entry["parameter"] else copy.copy(tensor)


def _strided(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """`tensor` laid out in memory as it was, which must not take much more memory than its values do."""
    if len(strides) != tensor.ndim or any(stride < 0 for stride in strides):
        raise ValueError(f"strides {strides} for a tensor of shape {list(tensor.shape)}")
    spread = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, strides, strict=True))
    if spread > SPARSEST * max(1, tensor.numel()):
        raise ValueError(f"a tensor of {tensor.numel()} values spread over {spread}")
    repeated = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    once = tensor[repeated]
    restored = torch.empty_strided(once.shape, strides, dtype=tensor.dtype).copy_(once)
    return restored.expand(tensor.shape)
