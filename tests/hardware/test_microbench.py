"""What linear layers take with each kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from factories import make_device
from torchwright.hardware.measure import microbench
from torchwright.hardware.measure.microbench import FEWEST_ROWS, LinearCalls, linear_kernel_seconds


@pytest.mark.parametrize(
    ("rows", "features", "timed"), [(20_000, 256, 16_384), (10, 256, 10), (300, 2048, FEWEST_ROWS)]
)
def test_many_rows_are_timed_by_some_of_them(rows: int, features: int, timed: int) -> None:
    """What a pass takes goes with its rows, however many of them are timed."""
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, features))
    with LinearCalls(model) as linears:
        model(torch.zeros(rows, features))
    shapes: list[microbench.Shape] = []

    def kernel(shape: microbench.Shape) -> Callable[[], torch.Tensor]:
        shapes.append(shape)
        return lambda: torch.empty(0)

    found = linear_kernel_seconds(
        linears,
        make_device(cores=2 if features == 256 else 1),
        kernels={"float32": kernel},
        timed=lambda calls, seconds: 1e-6 * shapes[-1][0],
    )
    assert {shape[0] for shape in shapes} == {timed}
    assert found == {"float32": pytest.approx(2e-6 * rows)}


def test_every_kernel_of_a_cpu_runs() -> None:
    model = nn.Linear(128, 128)
    with LinearCalls(model) as linears:
        model(torch.randn(3, 128))
    found = linear_kernel_seconds(linears, make_device())
    assert {"float32", "bfloat16", "int8", "int4"} <= found.keys()
    assert all(seconds > 0 for seconds in found.values())
