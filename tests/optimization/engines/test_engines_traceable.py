"""Calls with free sizes whose Python would fix them: they are traced free, and nothing of the model is left changed."""

from __future__ import annotations

import builtins
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.compiled import program
from torchwright.optimization.engines.compiled.program import (
    FreeSizes,
    export,
    export_one,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.rewrites.traceable import sizes_by_len
from torchwright.optimization.techniques.dtype import Autocast
from torchwright.workloads.base import Case


class Inherits(nn.Module):
    def own(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), 2) + x.sum(-1, keepdim=True) + len([x, x])


class ByLen(Inherits):
    """Takes its batch from `len`, in its own code and in what it inherits."""

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.own(x.expand(len(x), -1)) * more["scale"]


def test_a_batch_by_len_stays_free_and_a_list_keeps_its_length() -> None:
    model, x = ByLen().eval(), torch.randn(3, 4)
    case = Case("forward", args=(x,), kwargs={"scale": torch.ones(2)})
    program = export_one(model, case, FreeSizes(rows=(0,)))
    for rows in (2, 3, 7):
        given = torch.randn(rows, 4)
        torch.testing.assert_close(
            program.module()(given, scale=torch.ones(2)), model(given, scale=torch.ones(2))
        )
    assert "len" not in vars(sys.modules[__name__])


def test_a_number_has_no_length_and_a_len_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = vars(sys.modules[__name__])
    with sizes_by_len(ByLen()):
        assert source["len"](torch.ones(5, 2)) == 5
        assert source["len"]("four") == 4
        with pytest.raises(TypeError, match="0-d tensor"):
            source["len"](torch.tensor(1.0))
        assert builtins.len is not source["len"]
    monkeypatch.setitem(source, "len", builtins.len)
    with sizes_by_len(ByLen()):
        assert source["len"] is builtins.len
    assert source["len"] is builtins.len


def test_it_is_taken_back_when_tracing_fails() -> None:
    with pytest.raises(RuntimeError, match="cut"), sizes_by_len(ByLen()):
        raise RuntimeError("cut")
    assert "len" not in vars(sys.modules[__name__])


class Prompts(nn.Module):
    """Called by place or by name, with one argument that is no tensor, as a decoder of masks is."""

    def forward(self, points: torch.Tensor, labels: torch.Tensor, several: bool = False) -> torch.Tensor:
        return points.sum(1) * labels if several else points.mean(1) * labels


@pytest.mark.parametrize("by_name", [True, False])
def test_sizes_that_a_call_leaves_free_stay_so_within_autocast(by_name: bool) -> None:
    """SAM's prompts, named and free in their number, were refused by torch.export once autocast was kept."""
    marks = torch.export.Dim("marks", min=2)
    points, labels = torch.randn(2, 3, 4), torch.randn(2, 4)
    free = {"points": {1: marks}, "labels": None, "several": None}
    case = Case(name="prompt", kwargs={"points": points, "labels": labels, "several": True}, dynamic=free)
    if not by_name:
        case = Case(name="prompt", args=(points, labels, True), dynamic=tuple(free.values()))
    model = Autocast(Prompts(), torch.bfloat16, "cpu")
    run = export(model, [case])["prompt"].module()
    more = torch.randn(2, 7, 4)
    found = run(points=more, labels=labels, several=True) if by_name else run(more, labels, True)
    torch.testing.assert_close(found, more.sum(1) * labels)


class Rooted(nn.Module):
    """Calls an operator of ours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops: Any = torch.ops.torchwright
        table = torch.zeros(3, x.shape[-1])
        return ops.grid_attention(x, x, x, table, table, 1.0)


@pytest.mark.parametrize("within", [True, False])
def test_own_kernels_are_loaded_for_a_graph_within_the_graph(
    within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads the graphs of SAM under autocast had no operator for its attention, and the compiler was lost."""
    if fault := build.load_fault():
        pytest.skip(fault)
    model, x = Rooted().eval(), torch.randn(1, 1, 4, 16)
    model = Autocast(model, torch.bfloat16, "cpu") if within else model
    write_programs(tmp_path, export(model, [Case(name="forward", args=(x,))]))
    asked: list[bool] = []
    monkeypatch.setattr(program.build, "load_fault", lambda: asked.append(True))
    read = read_programs(tmp_path)["forward"].module()
    assert asked
    torch.testing.assert_close(read(x), model(x))


class RowByRow(nn.Module):
    """Calls an operator of Inductor's, as `int8_graph.py` puts it before residual additions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.prims.inductor_force_stride_order.default(x.transpose(1, 2), [20, 5, 1])


@pytest.mark.slow
def test_operators_of_inductor_are_known_to_who_reads_a_graph(tmp_path: Path) -> None:
    """torch has them once a module of Inductor's is imported, which nothing in a fresh process has done."""
    importlib.import_module("torch._inductor.inductor_prims")
    write_programs(tmp_path, export(RowByRow().eval(), [Case(name="forward", args=(torch.randn(2, 5, 4),))]))
    read = (
        "import sys; from pathlib import Path; "
        "from torchwright.optimization.engines.compiled.program import read_programs; "
        "read_programs(Path(sys.argv[1])); assert 'torch._inductor.inductor_prims' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", read, str(tmp_path)], check=True, timeout=120)
