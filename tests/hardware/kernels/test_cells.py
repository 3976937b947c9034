"""LSTM and GRU layers against their reference, for every instruction set.

Neither the other rows nor the threads change a bit of a row; a NaN stays in its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import cells

TOLERANCE = 2e-6
"""Absolute and relative, for outputs within one: exponentials are exact to a few units in the last place."""
SIZES = [(1, 1, 1), (5, 3, 16), (4, 2, 37), (3, 7, 20), (2, 70, 24), (6, 5, 160), (3, 1, 400)]
"""Steps, rows and units: none that fills a block, rows that fill no group, and more than lie on the stack at once."""
SHAPES = pytest.mark.parametrize(("steps", "rows", "units"), SIZES)


@dataclass
class Layer:
    """A layer's arguments; `gates` is the number of a unit's."""

    gates: int
    inputs: torch.Tensor
    weight: torch.Tensor
    rest: list[torch.Tensor]
    """An LSTM's state and cell; a GRU's bias and state."""

    @property
    def name(self) -> str:
        return {4: "lstm_layer", 3: "gru_layer"}[self.gates]

    def run(self, of: Any, *, batch_first: bool = True, backwards: bool = False) -> tuple[torch.Tensor, ...]:
        inputs = self.inputs if batch_first else self.inputs.transpose(0, 1)
        packed = cells.pack_cells(self.weight, self.gates)
        return getattr(of, self.name)(inputs, packed, *self.rest, batch_first, backwards)

    def of_rows(self, rows: slice) -> Layer:
        rest = [part[rows] if part.dim() == 2 else part for part in self.rest]
        return Layer(self.gates, self.inputs[rows], self.weight, rest)


def layer(gates: int, steps: int, rows: int, units: int) -> Layer:
    bias = [cells.pack_units(torch.randn(units))] if gates == 3 else []
    states = [torch.randn(rows, units) for _ in range(2 if gates == 4 else 1)]
    weight = torch.randn(gates * units, units) / units**0.5
    return Layer(gates, torch.randn(rows, steps, gates * units), weight, [*bias, *states])


@SHAPES
@pytest.mark.parametrize("gates", [4, 3])
def test_against_the_reference(native: Any, isa: str, gates: int, steps: int, rows: int, units: int) -> None:
    one = layer(gates, steps, rows, units)
    before = [part.clone() for part in one.rest]
    for batch_first in (True, False):
        for backwards in (True, False):
            found = one.run(native, batch_first=batch_first, backwards=backwards)
            wanted = one.run(cells, batch_first=batch_first, backwards=backwards)
            for here, there in zip(found, wanted, strict=True):
                torch.testing.assert_close(here, there, rtol=TOLERANCE, atol=TOLERANCE)
    assert all(map(torch.equal, one.rest, before)), "states are read, and new ones returned"


@pytest.mark.parametrize("gates", [4, 3])
def test_the_reference_is_torchs_own_layer(gates: int) -> None:
    kind = {4: torch.nn.LSTM, 3: torch.nn.GRU}[gates]
    theirs, x = kind(10, 20, bidirectional=True, batch_first=True).eval(), torch.randn(3, 7, 10)
    with torch.no_grad():
        wanted, _ = theirs(x)
        for backwards, end in enumerate(("l0", "l0_reverse")):
            weights: dict[str, torch.Tensor] = {
                name: getattr(theirs, f"{name}_{end}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }
            bias, within, zeros = weights["bias_hh"].clone(), [], torch.zeros(3, 20)
            if gates == 3:
                within, bias[40:] = [cells.pack_units(weights["bias_hh"][40:])], 0.0
            inputs = x @ weights["weight_ih"].t() + weights["bias_ih"] + bias
            states = [zeros] * (2 if gates == 4 else 1)
            found = Layer(gates, inputs, weights["weight_hh"], [*within, *states]).run(
                cells, backwards=bool(backwards)
            )
            torch.testing.assert_close(found[0], wanted[..., 20 * backwards :][..., :20])


@pytest.mark.parametrize("gates", [4, 3])
@pytest.mark.parametrize(("rows", "units"), [(9, 40), (3, 300), (9, 300)])
def test_company_and_threads_change_no_bit(native: Any, isa: str, gates: int, rows: int, units: int) -> None:
    one, threads = layer(gates, 4, rows, units), torch.get_num_threads()
    together = one.run(native)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(map(torch.equal, one.run(native), together))
    finally:
        torch.set_num_threads(threads)
    for row in range(rows):
        alone = one.of_rows(slice(row, row + 1)).run(native)
        assert all(torch.equal(here[0], there[row]) for here, there in zip(alone, together, strict=True))


@pytest.mark.parametrize("gates", [4, 3])
def test_extremes_and_what_is_not_a_number(native: Any, isa: str, gates: int) -> None:
    one = layer(gates, 3, 4, 37)
    one.inputs[0] = torch.tensor([-1e30, 1e30, float("inf"), -float("inf"), 80.0, -80.0, 0.0]).repeat(
        3, one.inputs.shape[2] // 7 + 1
    )[:, : one.inputs.shape[2]]
    one.inputs[2, 1, 5] = float("nan")
    found, wanted = one.run(native), one.run(cells)
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here[[0, 1, 3]], there[[0, 1, 3]], rtol=TOLERANCE, atol=TOLERANCE)
    for outputs in (found[0], wanted[0]):
        assert outputs[2, 1].isnan().any()
        assert outputs[2, 2].isnan().all()
        assert outputs[2, 0].isfinite().all()


@pytest.mark.parametrize("gates", [4, 3])
@pytest.mark.parametrize(("steps", "rows"), [(0, 3), (4, 0)])
def test_no_steps_and_no_rows(native: Any, gates: int, steps: int, rows: int) -> None:
    one = layer(gates, steps, rows, 20)
    for here, there in zip(one.run(native), one.run(cells), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("units", [1, 16, 37])
@pytest.mark.parametrize("gates", [4, 3])
def test_packing_keeps_every_weight(gates: int, units: int) -> None:
    weight = torch.randn(gates * units, units)
    assert torch.equal(cells.unpack_cells(cells.pack_cells(weight, gates), units, gates), weight)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    one = layer(4, 3, 2, 20)
    with pytest.raises(ValueError, match="4 gates"):
        native.lstm_layer(one.inputs[..., :79], cells.pack_cells(one.weight, 4), *one.rest, True, False)
    with pytest.raises(ValueError, match="is not that of 2"):
        Layer(4, one.inputs, one.weight, [torch.zeros(3, 20)] * 2).run(native)
    with pytest.raises(ValueError, match="is not like its state"):
        Layer(4, one.inputs, one.weight, [one.rest[0], torch.zeros(2, 19)]).run(native)
    with pytest.raises(ValueError, match="weight must be"):
        Layer(4, one.inputs, torch.randn(76, 19), one.rest).run(native)
    with pytest.raises(ValueError, match="bias must be"):
        Layer(3, one.inputs[..., :60], torch.randn(60, 20), [torch.zeros(20), one.rest[0]]).run(native)
    with pytest.raises(ValueError, match="gates must be a contiguous float32"):
        Layer(4, one.inputs.double(), one.weight, one.rest).run(native)
