"""Numbers that ExecuTorch's quantizer makes float32, put right without its runtime."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchwright.exporter.targets.executorch.int8 import _keep_whole


def graph_of(constant: torch.Tensor, x: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    added = graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("_tensor_constant_0")))
    added.meta["val"] = x
    graph.output(added)
    root = nn.Module()
    root.register_buffer("_tensor_constant_0", constant)
    return fx.GraphModule(root, graph)


def test_whole_numbers_beside_whole_numbers_alone_are_made_whole() -> None:
    ids, floats = torch.arange(3), torch.rand(3)
    for constant, beside, wanted in (
        (torch.tensor(2.0), ids, torch.int64),
        (torch.tensor([1.0, 2.0, 3.0]), ids, torch.int64),
        (torch.tensor([1, 2, 3], dtype=torch.int32), ids, torch.int32),
        (torch.tensor(2.5), ids, torch.float32),
        (torch.tensor(2.0), floats, torch.float32),
    ):
        made = graph_of(constant, beside)
        _keep_whole(made)
        assert made.get_buffer("_tensor_constant_0").dtype == wanted
        assert torch.equal(made(beside), beside + constant)
