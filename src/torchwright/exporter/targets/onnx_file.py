# pyright: basic, reportMissingImports=false
"""ONNX: one file with its weights inside, float32 or 8-bit integers, which ONNX Runtime runs."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchwright.core.errors import RefusedTechnique, first_line
from torchwright.core.json_file import read_json
from torchwright.core.quiet import quiet_libraries
from torchwright.exporter.base import PROFILED, Values, Written
from torchwright.exporter.calibration import calibrating
from torchwright.exporter.targets.converted import ConvertedTarget
from torchwright.exporter.verification.reference import keys
from torchwright.optimization.engines.converted import Converted
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.optimization.engines.onnxruntime import OnnxRuntime
from torchwright.optimization.techniques.shared.int8 import largest_weight

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target
    from torchwright.workloads.base import Case

MODEL = "model.onnx"
OF = re.compile(r"%(\w+) .*?target=torch\.ops\.([\w.]+)\.\w+\]")
"""A node of torch's graph, as the exporter notes it at each of ONNX's: its name and its operator."""
KEY, OWN_KEY = "pkg.torch.onnx.fx_node", "torchwright.key"
ATTENDS = ("Softmax", "Attention", "LayerNormalization", "RMSNormalization")
"""Operators that 8 bits for all tensors alike do great harm to."""
PRODUCTS = ["Conv", "Gemm", "MatMul", "Gather"]
"""The operators to quantize in a network that has such: of the bundled language model 0.29 was lost, and 0.03 is."""


class Onnx(ConvertedTarget):
    """An ONNX file by torch's own exporter: float32, or 8-bit integers by ONNX Runtime's quantizer."""

    name: ClassVar[str] = "onnx"
    runtime: ClassVar[str] = "ONNX Runtime"
    libraries: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx", "onnxscript")
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-3, "int8": 0.1}
    formats: ClassVar[dict[str, str]] = {"int8_static": "int8"}
    engine: ClassVar[type[Converted]] = OnnxRuntime
    file: ClassVar[str] = MODEL

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        written = super().convert(program, spec, target, precision, folder)
        _write_keys(folder / MODEL)
        if precision != "int8":
            return written
        _quantize(folder / MODEL, calibrating(target, spec))
        return cls.written(folder)

    @classmethod
    def written(cls, folder: Path) -> Written:
        import onnx

        graph = onnx.load(folder / MODEL).graph
        return Written(operators=dict(Counter(node.op_type for node in graph.node).most_common()))

    @classmethod
    def values(cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor]) -> Values:
        import onnx
        import onnxruntime
        import torch

        model = onnx.load(folder / MODEL)
        names = _outputs(model)
        there = {value.name for value in model.graph.output}
        for name in names.values():
            if name not in there:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {
            value.name: tensor.contiguous().numpy()
            for value, tensor in zip(model.graph.input, tensors, strict=True)
        }
        found: list[Any] = list(session.run(list(names.values()), given))
        return {key: torch.from_numpy(value) for key, value in zip(names, found, strict=True)}

    @classmethod
    def times(
        cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor], threads: int
    ) -> list[dict[str, float]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, threads
        options.enable_profiling = True
        with tempfile.TemporaryDirectory() as scratch:
            options.profile_file_prefix = str(Path(scratch, "profile"))
            session = onnxruntime.InferenceSession(
                folder / MODEL, options, providers=["CPUExecutionProvider"]
            )
            names = [value.name for value in session.get_inputs()]
            given = {name: tensor.contiguous().numpy() for name, tensor in zip(names, tensors, strict=True)}
            for _ in range(1 + PROFILED):
                session.run(None, given)
            events = read_json(Path(session.end_profiling()))
        return _by_kind(events)


def _by_kind(events: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Microseconds of each kind of operator in each call but the first."""
    seen: Counter[str] = Counter()
    calls: list[Counter[str]] = []
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        if len(calls) == seen[event["name"]]:
            calls.append(Counter())
        calls[seen[event["name"]]][event["args"]["op_name"]] += event["dur"]
        seen[event["name"]] += 1
    return [dict(call) for call in calls[1:]]


def _quantize(file: Path, calls: Sequence[Case]) -> None:
    """8-bit weights, one scale a channel, and activations, their ranges from the calls.

    Weights have 7 bits where this processor sums products of 8 in 16 bits, as those without VNNI do.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    graph = onnx.load(file).graph
    names = [value.name for value in graph.input]
    attends = any(node.op_type in ATTENDS for node in graph.node)

    class Calls(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(calls)

        def get_next(self) -> Any:
            case = next(self.left, None)
            if case is None:
                return None
            arrays = [tensor.contiguous().numpy() for tensor in tensors_of(case)]
            return dict(zip(names, arrays, strict=True))

    whole = file.with_suffix(".float32")
    file.rename(whole)
    try:
        with quiet_libraries():
            quantize_static(
                whole,
                file,
                Calls(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=largest_weight() < 127,
                op_types_to_quantize=PRODUCTS if attends else None,
            )
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # of the quantizer, at what it does not know
        raise RefusedTechnique(
            "ONNX Runtime's quantizer cannot take this model", found=first_line(error)
        ) from error
    finally:
        whole.unlink()


def _write_keys(file: Path) -> None:
    """Have each node know the key of torch's operator that it is of: the quantizer puts nodes in another order."""
    import onnx

    model = onnx.load(file)
    of: dict[int, tuple[str, str]] = {}
    for place, node in enumerate(model.graph.node):
        noted = {item.key: item.value for item in node.metadata_props}.get(KEY, "")
        if match := OF.search(noted):
            of[place] = match[1], match[2]
    named = keys((operator, operator[1]) for operator in dict.fromkeys(of.values()))
    for place, operator in of.items():
        model.graph.node[place].metadata_props.add(key=OWN_KEY, value=named[operator])
    onnx.save(model, file)


def _outputs(model: Any) -> dict[str, str]:
    """Key of an operator of torch's → the name of what its last node here gives."""
    found: dict[str, str] = {}
    for node in model.graph.node:
        if key := {item.key: item.value for item in node.metadata_props}.get(OWN_KEY):
            found[key] = node.output[0]
    return found
