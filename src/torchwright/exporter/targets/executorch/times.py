# pyright: basic, reportMissingImports=false
"""Time the undelegated operators: each in a program of its own, in ExecuTorch's runtime.

The wheel's runtime counts no times (it is built without event tracing), so that its kernels are called one by one.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx

PIECES = ("aten.slice_copy.Tensor", "aten.select_copy.int")
SECONDS, LEAST = 0.02, 5
"""Seconds to time the calls of one operator, and the least number of calls."""


def fallen_back(program: Any) -> tuple[dict[str, float], list[str]]:
    """Seconds that a call's own portable kernels take, by kind of operator, and the kinds that could not be timed.

    `program` is the lowered one, in the edge dialect. Sizes are those of the example.
    """
    alike: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta["val"], torch.SymInt) and _kernel(node):
            alike[_signature(node)].append(node)
    seconds: defaultdict[str, float] = defaultdict(float)
    untimed: set[str] = set()
    nothing = _seconds_of(_alone(None), [torch.zeros(1)]) if alike else 0.0
    for nodes in alike.values():
        kind = str(_kernel(nodes[0])).rpartition(".")[0].removesuffix("_copy")
        try:
            took = _seconds_of(_alone(nodes[0]), _inputs(nodes[0]))
        except Exception:  # of its exporter or its runtime, in whatever way they refuse an operator alone
            untimed.add(kind)
            continue
        seconds[kind] += len(nodes) * max(took - nothing, 0.0)
    return dict(seconds), sorted(untimed)


def _kernel(node: fx.Node) -> Any:
    """torch's operator of one in the edge dialect; None for a delegate's call."""
    return getattr(node.target, "_op", None)


def _signature(node: fx.Node) -> str:
    """The same for operators that compute the same of tensors of the same sizes."""
    kernel = str(_kernel(node))
    if kernel in PIECES:  # wherever the piece begins
        return f"{kernel}{[_said(one.meta['val']) for one in (node, *_tensors(node))]}"
    return f"{kernel}{fx.map_arg((node.args, node.kwargs), lambda one: _said(one.meta['val']))}"


def _said(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{[_plain(size) for size in value.shape]}"
    return _plain(value)


def _plain(size: Any) -> Any:
    """A free size's number in the example, without its being fixed to that."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [one for one in node.all_input_nodes if isinstance(one.meta["val"], torch.Tensor)]


def _inputs(node: fx.Node) -> list[torch.Tensor]:
    values = [one.meta["val"] for one in _tensors(node)]
    return [
        torch.ones([_plain(size) for size in value.shape], dtype=value.dtype).contiguous() for value in values
    ]


def _alone(node: fx.Node | None) -> fx.GraphModule:
    """A module of this operator alone, or of one that copies a number."""
    graph = fx.Graph()
    if node is None:
        made = graph.call_function(torch.ops.aten.clone.default, (graph.placeholder("x"),))
    else:
        given: dict[fx.Node, Any] = {one: graph.placeholder(one.name) for one in _tensors(node)}
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda one: given.get(one, _plain(one.meta["val"]))
        )
        made = graph.call_function(_kernel(node), args, kwargs)
    if node is not None and isinstance(node.meta["val"], tuple | list):
        made = graph.call_function(operator.getitem, (made, 0))  # each that is given to Python takes its time
    graph.output(made)
    return fx.GraphModule({}, graph)


def _seconds_of(module: fx.GraphModule, inputs: list[torch.Tensor]) -> float:
    """The median of some calls in ExecuTorch's runtime, without any delegate."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.runtime import Runtime

    program = torch.export.export(module, tuple(inputs))
    # Inputs are read where they lie.
    planning = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))
    lowered = to_edge(
        program, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    ).to_executorch(planning)
    with TemporaryDirectory() as folder:
        file = Path(folder, "alone.pte")
        file.write_bytes(lowered.buffer)
        method = Runtime.get().load_program(file).load_method("forward")
        assert method is not None
        method.execute(inputs)
        seconds: list[float] = []
        while sum(seconds) < SECONDS or len(seconds) < LEAST:
            begun = time.perf_counter()
            method.execute(inputs)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
