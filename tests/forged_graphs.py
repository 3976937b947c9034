"""Artifacts whose graphs tests forge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from factories import make_recipe
from small_artifacts import edit
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.fingerprint import fingerprint_here
from torchwright.optimization.artifact.tree import write_tree
from torchwright.optimization.engines.compiled.program import write_programs
from torchwright.workloads.module import ModuleWorkload


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor], how: str = "sum") -> dict[str, Any]:
        halves = x[: x.shape[0] // 2]
        y = self.linear(x).relu_() + more["a b"][: x.shape[0]]
        return {"y": y, "rest": (torch.einsum("ij,kj->ik", halves, y), [y.view(-1, 2, 3).sum(1)])}


def free_artifact(path: Path) -> Path:
    torch.manual_seed(0)
    model = Free().eval()
    args, kwargs = (torch.randn(8, 6),), {"more": {"a b": torch.randn(9, 6)}, "how": "sum"}
    sizes = {"x": (Dim.AUTO, Dim.AUTO), "more": {"a b": (Dim.AUTO, Dim.AUTO)}, "how": None}
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=sizes)
        output = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    workload = ModuleWorkload(model, kwargs)
    recipe = make_recipe(
        engine="eager",
        workload=workload.describe(),
        steps=(),
        fingerprint=fingerprint_here("cpu", measured=False),
    )
    with artifact.writing(path) as folder:
        write_programs(folder, {"forward": program})
        kept = {"name": "forward", "args": args, "kwargs": kwargs, "seed": 0, "output": output}
        write_tree(folder / "selftest", kept)
        artifact.finish(folder, recipe, {"engine": "eager", "dtype": "float32", "cases": ("forward",)})
    return path


def graphs(path: Path, change: Callable[[Any], Any]) -> Path:
    """Change the one graph of an artifact, as a forger can."""
    edit(path / "programs.json", lambda data: change(data["forward"]["graph"]))
    return path


def nodes(graph: Any) -> list[Any]:
    return graph["graph_module"]["graph"]["nodes"]


def call_signature(graph: Any) -> Any:
    return next(m["signature"] for m in graph["graph_module"]["module_call_graph"] if m["signature"])
