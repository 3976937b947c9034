# pyright: basic, reportMissingImports=false
"""OpenVINO as an engine: an artifact keeps its intermediate representation (IR), XML and a file of constants.

An IR is data: a graph of OpenVINO's own operators. An untrusted one is checked before OpenVINO sees it, and is read
from memory, so that it cannot name a file. No extension is ever loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from xml.etree import ElementTree

import torch
from torch import fx
from torch.export import ExportedProgram

from torchwright.core.cpu_load import affinity
from torchwright.core.errors import ArtifactError, RefusedTechnique, first_line
from torchwright.core.json_file import read_bytes, read_json
from torchwright.core.process.files import replacing
from torchwright.core.quiet import import_openvino, openvino_core, quiet_libraries, unreported
from torchwright.optimization.engines.converted import Converted, Infer
from torchwright.optimization.engines.dispatch.messages import say_slower
from torchwright.optimization.engines.dispatch.spec import CallSpec, NumberDomain
from torchwright.optimization.engines.openvino_executors import compile_for
from torchwright.optimization.engines.openvino_int8 import quantized
from torchwright.optimization.engines.rewrites.openvino_graph import PRODUCTS, check_ir, keep_float32
from torchwright.optimization.techniques.openvino import LIBRARIES

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target

GRAPH, CONSTANTS, OPTIONS = "graph.xml", "graph.bin", "options.json"
MODULES = "modules.json"
"""The record that a conversion leaves for the next; it is not part of an artifact."""
LARGEST = 256 * 2**20
"""Bytes of GRAPH."""
PRECISION = "INFERENCE_PRECISION_HINT"
ONE_THREAD = "one_thread"
"""In OPTIONS the OpenVINO and the processor for which the file was compiled for one thread; null if it was not. There
OpenVINO 2025.3 to 2026.4 can divide by zero as it compiles a model in a narrower type (openvino#33300), which ends the
process. A file that was moved is not believed; one that was forged is read only if the caller trusts it."""
HINTS = ("LATENCY", "THROUGHPUT")
CAPABILITIES = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
"""The required processor features."""
NARROWER = {"bf16": torch.bfloat16, "f16": torch.float16}


class OpenVino(Converted):
    """Runs the model by OpenVINO, in float32, a narrower type or, by NNCF, 8-bit integers."""

    name: ClassVar[str] = "openvino"
    how: ClassVar[str] = "OpenVINO"
    libraries: ClassVar[tuple[str, ...]] = LIBRARIES
    # Its plugin for CPUs computes integers in float32 (products, remainders, comparisons, minima, maxima): exact up to
    # 25 bits. It drops NaN in ReLU, Clamp, Maximum and Softmax. For indices out of range it reads zeros or wrong rows.
    domain: ClassVar[NumberDomain] = NumberDomain(integer_bits=25, values="finite", checks_indices=False)

    @classmethod
    def convert(cls, program: ExportedProgram, spec: CallSpec, file: Path, target: Target) -> None:
        ov = import_openvino()

        _run_in(target)
        with quiet_libraries(), unreported():
            decoder = _decoder(program)
            model = _in_order(ov.convert_model(decoder), decoder, spec)
        file.mkdir(exist_ok=True)
        ov.save_model(model, file / GRAPH, compress_to_fp16=False)
        (file / MODULES).write_text(json.dumps(_modules(decoder.pt_module)), encoding="utf-8")
        _write_options(file, "f32", "LATENCY")

    @classmethod
    def finish(cls, spec: CallSpec, file: Path, target: Target) -> None:
        ov = import_openvino()

        options, narrow = _options(target), _run_in(target)
        modules = read_json(file / MODULES)
        (file / MODULES).unlink()
        if options["precision"] == "int8":
            with quiet_libraries(), unreported():
                model, constants = _read(openvino_core(), file)
                model = quantized(model, spec, target, modules, options["skip"])
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                ov.save_model(model, Path(folder) / GRAPH, compress_to_fp16=False)
                for name in (GRAPH, CONSTANTS):
                    (Path(folder) / name).replace(file / name)
            del model, constants
        if narrow != "f32":
            skip = options["skip"] if options["autocast"] else ()  # of int8 they stay in the narrow type
            kept = {name for name, module in modules.items() if module in skip}
            marked = keep_float32((file / GRAPH).read_bytes(), autocast=options["autocast"], kept=kept)
            with replacing(file / GRAPH) as beside:
                beside.write_bytes(marked)
        _write_options(file, narrow, options["hint"])

    def widen_others(self) -> bool:
        narrow = [
            file for file in self._files() if read_settings(file / OPTIONS, others=True)[PRECISION] != "f32"
        ]
        for file in narrow:
            _write_options(file, **read_json(file / OPTIONS) | {"others": "f32"})
        return bool(narrow)

    @classmethod
    def reader(cls, file: Path, spec: CallSpec) -> Callable[[int], Infer]:
        ov = import_openvino()

        settings = read_settings(file / OPTIONS, others=bool(spec.sizes))
        core = openvino_core()
        model, constants = _read(core, file)
        wrong = spec.graph_results not in (None, len(model.outputs))
        if wrong or len(model.inputs) != len(spec.tensors):
            raise ArtifactError(
                f"{file} is damaged", found="a graph of other inputs or results than its call's"
            )
        shapes = [[-1 if isinstance(size, str) else size for size in tensor.shape] for tensor in spec.tensors]
        try:
            model.reshape(dict(zip(model.inputs, map(ov.PartialShape, shapes), strict=True)))
        except RuntimeError as error:
            raise ArtifactError(f"{file} is damaged", found=first_line(error)) from error
        _keep_finite(model, settings[PRECISION])
        proven = read_json(file / OPTIONS).get(ONE_THREAD) == _runtime()

        def compiled(threads: int) -> Infer:
            usable = settings | {"INFERENCE_NUM_THREADS": threads}
            if settings[PRECISION] != "f32" and not proven and min(threads, len(affinity())) == 1:
                say_slower("in float32, since OpenVINO can end the process in a narrower type on one thread")
                usable |= {PRECISION: "f32"}
            return _Compiled(model, constants, usable)

        return compiled


# --------------------------------------------------------------------------------------------------- conversion


def _write_options(file: Path, precision: str, hint: str, **others: Any) -> None:
    """Written in addition to what other trials keep of the file; `others` are options that it has already.

    Calls with dynamic shapes compute in `others["others"]`. Trials run the file on torch's present number of threads.
    """
    options: dict[str, Any] = {"precision": precision, "hint": hint}
    options |= {ONE_THREAD: _runtime() if torch.get_num_threads() == 1 else None} | others
    with replacing(file / OPTIONS) as beside:
        beside.write_text(json.dumps(options), encoding="utf-8")


def _runtime() -> str:
    """Return the version of OpenVINO and the processor that it has found."""
    version: str = import_openvino().__version__
    return f"{version} on {openvino_core().get_property('CPU', 'FULL_DEVICE_NAME')}"


def _options(target: Target) -> dict[str, Any]:
    return {"precision": "f32", "hint": "LATENCY", "skip": (), "autocast": False} | target.settings.options


def _run_in(target: Target) -> str:
    """The type of what is computed in floating point. Raises `RefusedTechnique` where the processor has none such."""
    able = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = _options(target)["precision"]
    if precision == "int8":
        return "bf16" if "BF16" in able else "f32"
    if CAPABILITIES[precision] not in able:
        raise RefusedTechnique(
            f"OpenVINO has no {precision} arithmetic on this processor", found=", ".join(able)
        )
    return precision


def _decoder(program: ExportedProgram) -> Any:
    """OpenVINO's view of an exported graph, with each result that is a value of the graph's once."""
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    class Decoder(TorchFXPythonDecoder):
        @staticmethod
        def unpack_containers(arg: Any) -> list[tuple[str, fx.Node]]:
            return [("", node) for node in _computed(arg)]

    return Decoder.from_exported_program(program, dynamic_shapes=False)


def _computed(results: Any) -> list[fx.Node]:
    """The results that are neither inputs nor constants, each once."""
    return list(
        dict.fromkeys(node for node in results[0] if isinstance(node, fx.Node) and node.op != "placeholder")
    )


def _in_order(model: Any, decoder: Any, spec: CallSpec) -> Any:
    """The model with the inputs and results of the call, in its order."""
    ov = import_openvino()
    from openvino import opset15 as operators

    graph = decoder.pt_module.graph
    placeholders, given = graph.find_nodes(op="placeholder"), model.get_parameters()
    if len(placeholders) != len(given):  # for text, OpenVINO makes a parameter in some graphs alone
        placeholders = [node for node in placeholders if not isinstance(node.meta.get("val"), str)]
    parameters = dict(zip(placeholders, given, strict=True))
    inputs = [node for node in placeholders if getattr(node.meta.get("val"), "shape", None) is not None]
    output = next(iter(reversed(graph.nodes)))
    values = {
        node: result.input_value(0)
        for node, result in zip(_computed(output.args), model.results, strict=True)
    }
    values |= {node: parameter.output(0) for node, parameter in parameters.items()}
    results = [operators.result(values[node]) for node in output.args[0] if isinstance(node, fx.Node)]
    make: Any = ov.Model  # whose stub knows another class of models
    return make(results, [parameters[node] for node in inputs], "graph")


def _modules(module: fx.GraphModule) -> dict[str, str]:
    """Return each operator's name → the name of the module that calls it. OpenVINO names its own operators `NAME/…`."""
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        if stack := list((node.meta.get("nn_module_stack") or {}).values()):
            found[node.name] = stack[-1][0]
    return found


# ------------------------------------------------------------------------------------------------------ reading


def read_settings(file: Path, *, others: bool = False) -> dict[str, Any]:
    """Return the precision and the hint to compile a graph with; `others` stands for graphs with dynamic shapes.

    Raises `ArtifactError`.
    """
    options = read_json(file)
    match options:
        case {"precision": str(precision), "hint": str(hint)} if hint in HINTS:
            if others:
                precision = options.get("others", precision)
            if isinstance(precision, str) and precision in CAPABILITIES:
                return {PRECISION: precision, "PERFORMANCE_HINT": hint}
    raise ArtifactError(f"{file} is damaged", found="options that are none")


def _read(core: Any, file: Path) -> tuple[Any, Any]:
    """The IR in a folder, checked, and from memory; and its constants, as the file has them, which must outlive it.

    Raises `ArtifactError`.
    """
    import numpy as np

    ov = import_openvino()
    text = read_bytes(file / GRAPH, LARGEST)
    try:
        size = (file / CONSTANTS).stat().st_size
        check_ir(text, size)
        # A file of no bytes cannot be mapped. What is mapped is read where it lies: of GPT-Neo's 1.2 GB no second copy.
        constants = np.memmap(file / CONSTANTS, dtype=np.uint8, mode="c") if size else None
        shared = None if constants is None else ov.Tensor(constants, shared_memory=True)
        return core.read_model(text, shared), constants
    except (OSError, ValueError, RuntimeError, ElementTree.ParseError) as error:
        raise ArtifactError(f"the graph in {file} cannot be read", found=first_line(error)) from error


def _keep_finite(model: Any, precision: str) -> None:
    """Clamp constants to the range of a narrower type, so that they do not become infinite.

    float32's least number, with which masks hide keys, is -inf in bfloat16: a query without visible keys gave NaN
    (DeBERTa v2, for a fixed batch size).
    """
    import numpy as np
    from openvino import opset15 as operators

    if precision not in NARROWER:
        return
    largest = torch.finfo(NARROWER[precision]).max
    for constant in model.get_ordered_ops():
        if constant.get_type_name() != "Constant" or constant.get_element_type().get_type_name() != "f32":
            continue
        readers = list(constant.output(0).get_target_inputs())
        if all(reader.get_node().get_type_name() in PRODUCTS for reader in readers):
            continue  # weights
        values = constant.data  # of an embedding no copy is made
        ends = np.fmin.reduce(values, axis=None, initial=0), np.fmax.reduce(values, axis=None, initial=0)
        if -largest <= ends[0] and ends[1] <= largest:
            continue
        beyond = (np.abs(values) > largest) & np.isfinite(values)
        if beyond.any():
            finite = operators.constant(np.where(beyond, np.copysign(np.float32(largest), values), values))
            for reader in readers:
                reader.replace_source_output(finite.output(0))


class _Compiled:
    """A model compiled for this processor; each thread that calls has a request of its own."""

    def __init__(self, model: Any, constants: Any, settings: dict[str, Any]) -> None:
        self._compiled = compile_for(self, model, settings)
        self._constants = constants  # OpenVINO reads them and does not keep them
        self._tensor = import_openvino().Tensor
        self._idle: list[Any] = []
        self._results = range(len(self._compiled.outputs))

    def __call__(self, arrays: list[Any]) -> list[Any]:
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        for index, array in enumerate(arrays):
            request.set_input_tensor(index, self._tensor(array, shared_memory=True))
        request.start_async()
        request.wait()
        found = [request.get_output_tensor(index).data.copy() for index in self._results]
        self._idle.append(request)
        return found
