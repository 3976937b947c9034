"""Tables of a graph that are filled at every call: what they hold in the end is kept, where that is sure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.optimization.engines.compiled.program import (
    export,
    functional,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.rewrites.tables import KEPT, keep_tables
from torchwright.workloads.base import Case

Forward = Callable[["Model", torch.Tensor], object]


class Model(nn.Module):
    """Computes what it is given, with a weight of its own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight, self._forward = nn.Parameter(torch.randn(6)), forward

    def forward(self, x: torch.Tensor) -> object:
        return self._forward(self, x)


def windows(model: Model, x: torch.Tensor) -> torch.Tensor:
    """As torchvision's Swin makes its mask."""
    mask = x.new_zeros((4, 6))
    count = 0
    for rows in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        for columns in (slice(0, -4), slice(-4, None)):
            mask[rows, columns] = count
            count += 1
    mask = mask.view(2, 2, 6).permute(1, 0, 2).reshape(4, 6)
    apart = mask.unsqueeze(1) - mask.unsqueeze(2)[:, :1]
    return x * model.weight + apart.masked_fill(apart != 0, -100.0).sum(1) + mask


def by_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = windows(model, x)
        with torch.autocast("cpu", enabled=False):
            y = y + windows(model, x)
        return y + nn.functional.linear(x, torch.eye(6))


def filled(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, 6)
    mask[1] = 3.0
    return mask


def of_the_input(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = filled(x)
    mask[0] = x[0]
    return x + mask


def by_a_view(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = filled(x)
    y = x + mask
    mask[: x.shape[0] - 1].add_(x[:3])
    return y + mask


def read_before(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = filled(x)
    y = x * mask
    mask[2] = 7.0
    return y + mask


def returned(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = filled(x)
    return x + mask, mask


def by_chance(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = filled(x)
    return x + torch.zeros_like(mask.bernoulli_(0.5))


def filled_by_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    mask = filled(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mask[2] = x[2]
        return x * mask


def multiplied_by_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + filled(x) @ torch.full((6, 6), 1 / 3)


def exported(forward: Forward) -> tuple[nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    model = Model(forward).eval()
    case = Case(name="forward", args=(torch.randn(4, 6),), kwargs={})
    return model, export(model, [case])["forward"]


def kept(program: torch.export.ExportedProgram) -> list[str]:
    return [name for name in program.constants if name.startswith(KEPT)]


def read_again(program: torch.export.ExportedProgram, folder: Path) -> torch.export.ExportedProgram:
    write_programs(folder, {"forward": program})
    return read_programs(folder)["forward"]


def assert_the_same(model: nn.Module, *programs: torch.export.ExportedProgram) -> None:
    """To the bit, on an input of its own."""
    x = torch.randn(4, 6)
    with torch.no_grad():
        for program in programs:
            torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


def test_what_is_filled_of_numbers_alone_is_kept_as_it_is_in_the_end(tmp_path: Path) -> None:
    model, program = exported(windows)
    assert len(kept(program)) == 2  # the mask, and what is made of it
    assert not any(
        "_" in str(node.target).split(".")[1][-1:]
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    assert set(program.constants) == set(kept(program))
    assert_the_same(model, program, functional(program), read_again(program, tmp_path))


@pytest.mark.slow
def test_what_runs_under_autocast_keeps_its_tables_too(tmp_path: Path) -> None:
    model, program = exported(by_autocast)
    assert len(kept(program)) == 4
    assert set(program.constants) == set(kept(program))
    assert_the_same(model, program, functional(program), read_again(program, tmp_path))


@pytest.mark.parametrize(
    "forward",
    [of_the_input, by_a_view, read_before, returned, by_chance, filled_by_autocast, multiplied_by_autocast],
)
def test_what_may_hold_something_else_is_made_at_every_call(forward: Forward) -> None:
    model, program = exported(forward)
    assert kept(program) == []
    assert_the_same(model, program)


def test_a_table_that_is_larger_than_an_artifact_should_keep_is_made() -> None:
    model = Model(windows).eval()
    program = torch.export.export(model, (torch.randn(4, 6),))
    keep_tables(program, largest=4 * 6 * 4)
    assert kept(program) == []
    assert_the_same(model, program)
    keep_tables(program)
    assert kept(program) != []
