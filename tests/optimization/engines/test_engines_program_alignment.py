"""Weights of exported graphs, read from a file: their addresses are those of allocated tensors."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.optimization.engines.compiled.graphs import graph_in
from torchwright.optimization.engines.compiled.program import (
    ALIGNMENT,
    compile_program,
    export,
    read_programs,
    write_programs,
)
from torchwright.workloads.base import Case


class Packed(nn.Module):
    """A linear layer of 8-bit weights on torch's own kernel, whose sizes leave the file's next tensor at any byte."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first: torch.Tensor
        self.integers: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("first", torch.randint(-128, 128, (outputs,), dtype=torch.int8))
        self.register_buffer("integers", torch.randint(-128, 128, (outputs, 16), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outputs, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self.integers, self.scale) + self.first


@pytest.mark.parametrize("outputs", [1, 5, 7, 16])
def test_8_bit_weights_are_aligned_and_can_be_multiplied(outputs: int, tmp_path: Path) -> None:
    torch.manual_seed(outputs)
    model, x = Packed(outputs), torch.randn(4, 16, dtype=torch.bfloat16)
    write_programs(tmp_path, export(model, [Case("forward", (x,))]))
    (program,) = read_programs(tmp_path, trust=True).values()
    integers = [each for each in program.state_dict.values() if each.dtype == torch.int8]
    assert len(integers) == 2
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in integers)
    answer = graph_in(tmp_path, "forward").run([x])
    expected = x.double() @ (model.integers.double() * model.scale.double()[:, None]).T + model.first
    torch.testing.assert_close(answer.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.skipif(sys.platform != "linux", reason="the header is for glibc")
def test_compiled_packages_allocate_their_weights_by_pages(tmp_path: Path) -> None:
    """Their runtime's own `malloc` leaves large blocks 16 bytes past a cache line."""
    torch.manual_seed(0)
    model, x, path = nn.Linear(64, 32), torch.randn(3, 64), tmp_path / "model.pt2"
    (program,) = export(model, [Case("forward", (x,))]).values()
    compile_program(program, path, {"freezing": True})
    with zipfile.ZipFile(path) as package:
        (library,) = [name for name in package.namelist() if name.endswith(".wrapper.so")]
        imported = package.read(library).split(b"\0")
    assert b"valloc" in imported
    with torch.no_grad():
        answer = torch._inductor.aoti_load_package(str(path))(x)
        torch.testing.assert_close(answer, model(x))
