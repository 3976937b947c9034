"""Short convolutions and linear recurrences against their reference, for every instruction set.

Where a prompt is cut and which sequences keep it company change no bit; a NaN stays in its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import recurrent

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative to the largest value."""
LENGTHS = (1, 7, 33, 2)
SLOTS = 12
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Kernel:
    """One kernel's own arguments: rows of tokens, what all tokens share, and the states before them."""

    name: str
    rows: list[torch.Tensor]
    shared: list[Any]
    state: torch.Tensor
    last: list[Any]

    def run(
        self, of: Any, lengths: list[int], slots: list[int], marks: dict[int, int], first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of so many tokens from row `first` on, and the states after them."""
        state, count = self.state.clone(), sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        found = getattr(of, self.name)(
            *(row[first : first + count] for row in self.rows),
            *self.shared,
            state,
            starts,
            torch.tensor(slots),
            torch.tensor(sorted(marks), dtype=torch.int64),
            torch.tensor([marks[row] for row in sorted(marks)], dtype=torch.int64),
            *self.last,
        )
        return found, state


def short_conv(dtype: torch.dtype, *, width: int = 4, silu: bool = True, bias: bool = True) -> Kernel:
    """Rows that are parts of wider ones, and channels that fill no register."""
    tokens, channels = sum(LENGTHS), 70
    x = torch.randn(tokens, channels + 13).to(dtype)[:, 5 : 5 + channels]
    weight, offset = torch.randn(width, channels), torch.randn(channels)
    state = torch.randn(SLOTS, width - 1, channels).to(dtype).float()
    return Kernel("short_conv", [x], [weight, offset if bias else None], state, [silu])


def projections(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Queries, keys, values and `count` numbers of each head, as they come from one linear layer."""
    sizes = [3 * 40, 3 * 40, 6 * 48, *[6] * count]
    return list(torch.randn(sum(LENGTHS), sum(sizes)).to(dtype).split(sizes, dim=-1))


def gated_delta(dtype: torch.dtype) -> Kernel:
    shared = [torch.rand(6) * 3, torch.randn(6)]
    return Kernel("gated_delta", projections(dtype, 2), shared, torch.randn(SLOTS, 6, 40, 48), [3])


def selective_scan(dtype: torch.dtype) -> Kernel:
    shared = [torch.rand(6) * 3, torch.randn(6), torch.randn(6)]
    return Kernel("selective_scan", projections(dtype, 1), shared, torch.randn(SLOTS, 6, 40, 48), [3])


MAKERS: list[Callable[[torch.dtype], Kernel]] = [short_conv, gated_delta, selective_scan]


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=0, atol=tolerance * float(wanted.float().abs().max())
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_against_the_reference(native: Any, isa: str, make: Any, dtype: torch.dtype) -> None:
    kernel = make(dtype)
    marks = {3: 1, 20: 2, 40: 4, 41: 8}
    wanted, wanted_state = kernel.run(recurrent, list(LENGTHS), [3, 0, 5, 9], marks)
    found, state = kernel.run(native, list(LENGTHS), [3, 0, 5, 9], marks)
    near(found, wanted, TOLERANCE[dtype])
    near(state, wanted_state, TOLERANCE[torch.float32])
    untouched = [6, 7, 10, 11]
    assert torch.equal(state[untouched], kernel.state[untouched])


@pytest.mark.parametrize(("width", "silu", "bias"), [(2, False, False), (3, False, True), (5, True, False)])
def test_other_convolutions(native: Any, isa: str, width: int, silu: bool, bias: bool) -> None:
    kernel = short_conv(torch.float32, width=width, silu=silu, bias=bias)
    wanted, wanted_state = kernel.run(recurrent, list(LENGTHS), [3, 0, 5, 9], {2: 1})
    found, state = kernel.run(native, list(LENGTHS), [3, 0, 5, 9], {2: 1})
    near(found, wanted, TOLERANCE[torch.float32])
    assert torch.equal(state, wanted_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_neither_cuts_nor_company_change_a_bit(native: Any, isa: str, make: Any, dtype: torch.dtype) -> None:
    kernel = make(dtype)
    whole, states = kernel.run(native, list(LENGTHS), [3, 0, 5, 9], {7: 1, 8: 2})
    first, third = 8, 33
    parts, alone = [], make(dtype)
    alone.rows, alone.shared, alone.state = kernel.rows, kernel.shared, kernel.state
    done = 0
    for size in (1, 2, 13, 17):
        part, alone.state = alone.run(native, [size], [5], {}, first + done)
        parts.append(part)
        done += size
    assert done == third
    assert torch.equal(torch.cat(parts), whole[first : first + third])
    assert torch.equal(alone.state[5], states[5])
    assert torch.equal(states[1], states[0])  # a copy after a sequence's last token is its state


@pytest.mark.parametrize("make", MAKERS)
def test_a_copy_is_the_state_on_the_way(native: Any, make: Any) -> None:
    kernel = make(torch.bfloat16)
    _, states = kernel.run(native, [20], [5], {11: 7})
    _, early = kernel.run(native, [12], [5], {})
    assert torch.equal(states[7], early[5])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_no_number_stays_in_its_sequence(native: Any, isa: str, make: Any, value: float) -> None:
    kernel = make(torch.float32)
    clean, states = kernel.run(native, list(LENGTHS), [3, 0, 5, 9], {})
    kernel.rows = [row.clone() for row in kernel.rows]
    for row in kernel.rows:
        row[4] = value  # of the second sequence, rows 1 to 7
    found, after = kernel.run(native, list(LENGTHS), [3, 0, 5, 9], {})
    assert (
        value == 3e38 or not found[4].isfinite().all()
    )  # squares of 3e38 overflow, and what they divide is 0
    others = [0, *range(8, sum(LENGTHS))]
    assert torch.equal(found[others], clean[others])
    assert torch.equal(found[1:4], clean[1:4])
    assert torch.equal(after[[3, 5, 9]], states[[3, 5, 9]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(native: Any, isa: str, dtype: torch.dtype, gate_first: bool) -> None:
    x, weight = torch.randn(9, 96).to(dtype), torch.randn(3, 32)
    gate = torch.randn(9, 120).to(dtype)[:, 7:103]
    x[3] = float("nan")
    wanted = recurrent.gated_norm(x, gate, weight, 1e-6, gate_first)
    found = native.gated_norm(x, gate, weight, 1e-6, gate_first)
    assert found[3].isnan().all()
    rows = [0, 1, 2, 4, 5, 6, 7, 8]
    near(found[rows], wanted[rows], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("slots", "marks", "message"),
    [([3, 3], {}, "share a slot"), ([3, 12], {}, "beyond the 12"), ([3, 4], {0: 3}, "share a slot"),
     ([3, 4], {9: 5}, "mark_rows")],
)  # fmt: skip
def test_slots_that_would_be_overwritten_are_refused(
    native: Any, slots: list[int], marks: dict[int, int], message: str
) -> None:
    with pytest.raises((IndexError, RuntimeError), match=message):
        short_conv(torch.float32).run(native, [2, 7], slots, marks)
