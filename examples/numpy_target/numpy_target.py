"""An export target of another package: chains of linear layers as JSON and weights, which NumPy runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from torchwright.core.errors import RefusedTechnique
from torchwright.exporter.base import GraphTarget, Run, Written
from torchwright.optimization.engines.dispatch.spec import CallSpec

GRAPH, WEIGHTS = "graph.json", "weights.safetensors"
OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.linear.default": lambda x, weight, bias=0: x @ weight.T + bias,
    "aten.relu.default": lambda x: numpy.maximum(x, 0),
    "aten.gelu.default": lambda x: x * (1 + numpy.vectorize(math.erf)(x / math.sqrt(2)).astype(x.dtype)) / 2,
    "aten.add.Tensor": lambda x, y: x + y,
}


class NumPyTarget(GraphTarget):
    """JSON and safetensors, which NumPy runs: linear layers, ReLU, GELU and sums."""

    name: ClassVar[str] = "numpy"
    runtime: ClassVar[str] = "NumPy"
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-4}

    @classmethod
    def convert(cls, program: Any, spec: CallSpec, target: Any, precision: str, folder: Path) -> Written:
        signature = program.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        for node in calls:
            plain = not node.kwargs and all(isinstance(value, torch.fx.Node) for value in node.args)
            if str(node.target) not in OPERATORS or not plain:
                raise RefusedTechnique(
                    f"numpy does not run {node.format_node()}", allowed=", ".join(OPERATORS)
                )
        graph = {
            "inputs": signature.user_inputs,
            "weights": stored,
            "calls": [(node.name, str(node.target), [value.name for value in node.args]) for node in calls],
            "outputs": signature.user_outputs,
        }
        (folder / GRAPH).write_text(json.dumps(graph), encoding="utf-8")
        weights = {name: program.state_dict[name].detach().clone() for name in set(stored.values())}
        save_file(weights, folder / WEIGHTS)
        return Written(operators={"NumPy": len(calls)})

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        graph = json.loads((folder / GRAPH).read_text("utf-8"))
        weights = load_file(folder / WEIGHTS)
        constants = {node: weights[name] for node, name in graph["weights"].items()}

        def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            arrays = (tensor.numpy() for tensor in tensors)
            values = constants | dict(zip(graph["inputs"], arrays, strict=True))
            for name, operator, arguments in graph["calls"]:
                values[name] = OPERATORS[operator](*(values[each] for each in arguments))
            return [torch.from_numpy(values[name]) for name in graph["outputs"]]

        return run
