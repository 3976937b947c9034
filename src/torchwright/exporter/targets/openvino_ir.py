# pyright: basic, reportMissingImports=false
"""OpenVINO's intermediate representation: XML and a file of constants, in float32, bfloat16 or 8-bit integers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchwright.core.quiet import import_openvino, openvino_core
from torchwright.exporter.base import PROFILED, Run, Values, Written
from torchwright.exporter.targets.converted import ConvertedTarget
from torchwright.exporter.verification.reference import keys
from torchwright.optimization.engines.converted import Converted
from torchwright.optimization.engines.openvino import CONSTANTS, GRAPH, OPTIONS, OpenVino, read_settings

if TYPE_CHECKING:
    from torch import Tensor

    from torchwright.optimization.engines.dispatch.spec import CallSpec

MODEL = "openvino"
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "int8": "int8"}
NOT_COMPUTED = ("Parameter", "Result", "Constant")


class OpenVinoIr(ConvertedTarget):
    """OpenVINO's IR (XML and constants): float32, bfloat16, or 8-bit integers by NNCF."""

    name: ClassVar[str] = "openvino"
    runtime: ClassVar[str] = "OpenVINO"
    libraries: ClassVar[tuple[str, ...]] = ("openvino", "nncf")
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-3, "bf16": 3e-2, "int8": 0.1}
    formats: ClassVar[dict[str, str]] = {"int8_static": "int8"}
    engine: ClassVar[type[Converted]] = OpenVino
    file: ClassVar[str] = MODEL

    @classmethod
    def options(cls, precision: str) -> dict[str, Any]:
        return {"precision": PRECISIONS[precision]}

    @classmethod
    def written(cls, folder: Path) -> Written:
        operators = _read(folder).get_ordered_ops()
        kinds = Counter(op.get_type_name() for op in operators)
        return Written(operators={kind: n for kind, n in kinds.most_common() if kind not in NOT_COMPUTED})

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        run, own = super().open(folder, spec, threads), [one.partial_shape for one in _read(folder).inputs]

        def within(tensors: Sequence[Tensor]) -> list[Tensor]:
            # The engine asks for the sizes of the call anew as it reads the file; others take the file as it is.
            for shape, tensor in zip(own, tensors, strict=True):
                if not shape.compatible(_shape(tensor)):
                    raise ValueError(f"the file takes {shape}, and not {list(tensor.shape)}")
            return run(tensors)

        return within

    @classmethod
    def values(cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor]) -> Values:
        import torch

        model = _read(folder)
        last: dict[tuple[str, str], Any] = {}
        for op in model.get_ordered_ops():
            name, _, rest = op.get_friendly_name().partition("/")
            operator = rest.partition("/")[0].rpartition(".")[0]
            if operator and op.get_type_name() not in NOT_COMPUTED:
                last[name, operator] = op.output(0)
        named = keys((node, node[1]) for node in last)
        for output in last.values():
            model.add_outputs(output)
        # What is an output already gets no second one.
        places = {_source(result.get_node()): index for index, result in enumerate(model.outputs)}
        compiled = openvino_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        answer = compiled(dict(enumerate(tensor.contiguous().numpy() for tensor in tensors)))
        return {
            named[node]: torch.from_numpy(answer[places[output.get_node().get_friendly_name()]].copy())
            for node, output in last.items()
        }

    @classmethod
    def times(
        cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor], threads: int
    ) -> list[dict[str, float]]:
        settings = read_settings(folder / MODEL / OPTIONS) | {
            "INFERENCE_NUM_THREADS": threads,
            "PERF_COUNT": True,
        }
        request = openvino_core().compile_model(_read(folder), "CPU", settings).create_infer_request()
        given = dict(enumerate(tensor.contiguous().numpy() for tensor in tensors))
        request.infer(given)
        before, calls = _totals(request.profiling_info, 1), []
        for count in range(2, 2 + PROFILED):
            request.infer(given)
            after = _totals(request.profiling_info, count)
            calls.append({kind: max(after[kind] - before[kind], 0.0) for kind in after})
            before = after
        return calls


def _totals(infos: Sequence[Any], calls: int) -> dict[str, float]:
    """Seconds of each kind of operator in all calls so far, of which OpenVINO gives the mean, the first one's too."""
    found: defaultdict[str, float] = defaultdict(float)
    for one in infos:
        if one.node_type not in NOT_COMPUTED:
            found[one.node_type] += calls * one.real_time.total_seconds()
    return found


def _source(result: Any) -> str:
    """The operator that gives a result."""
    return result.input_value(0).get_node().get_friendly_name()


def _shape(tensor: Tensor) -> Any:
    ov = import_openvino()

    return ov.PartialShape(list(tensor.shape))


def _read(folder: Path) -> Any:
    return openvino_core().read_model(folder / MODEL / GRAPH, folder / MODEL / CONSTANTS)
