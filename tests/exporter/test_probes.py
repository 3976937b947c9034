"""Probes: an export says for which numbers it holds, in the report of its verifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchwright as tw
from torchwright.exporter.base import ExportTarget, exports
from torchwright.exporter.export import check
from torchwright.exporter.subject import make_subject
from torchwright.exporter.verification.probes import (
    ALL,
    LARGEST,
    ROW_OF_ZEROS,
    SUBNORMAL,
    WIDE,
    ZERO_ROWS,
    Limit,
    Probe,
    ProbeOutputs,
    holds_for,
    limit_at,
    limits_of,
    parting,
    probes_of,
)
from torchwright.testing.models import Numbers
from torchwright.workloads.module import ModuleWorkload

MAKE = torch.Generator().manual_seed(0)
X = torch.randn(4, 8, generator=MAKE)
IDS = torch.randint(0, 100, (4, 3), generator=MAKE)


class Table(nn.Module):
    """Looks up rows of a table of 100, and adds numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)

    def forward(self, x_BE: torch.Tensor, ids_BT: torch.Tensor, flags_B: torch.Tensor) -> torch.Tensor:
        return torch.where(flags_B[:, None], self.table(ids_BT + 1).sum(1), x_BE)


class Holes(nn.Module):
    """Counts the NaN that ReLU has let through."""

    def forward(self, x_BE: torch.Tensor) -> torch.Tensor:
        return F.relu(x_BE).isnan().float() + x_BE.nan_to_num()


def probed(*inputs: torch.Tensor) -> list[Probe]:
    return probes_of(torch.export.export(Table(), inputs), inputs)


def answered(model: Callable[..., Any], *inputs: torch.Tensor) -> Callable[[Probe], ProbeOutputs]:
    def answer(probe: Probe) -> ProbeOutputs:
        try:
            with torch.no_grad():
                answer = model(*probe.applied(inputs))
            return ProbeOutputs(outputs=[answer] if isinstance(answer, torch.Tensor) else answer)
        except Exception as error:
            return ProbeOutputs(refused=f"{type(error).__name__}: {error}")

    return answer


def limits(eager: Any, exported: Any, *inputs: torch.Tensor, **options: float) -> list[Limit]:
    found = probes_of(torch.export.export(Whole(eager), inputs), inputs)
    return limits_of(found, answered(eager, *inputs), answered(exported, *inputs), 1e-3, **options)


class Whole(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_every_input_is_probed_with_what_its_type_can_hold() -> None:
    found = probed(X, IDS, torch.ones(4, dtype=torch.bool))
    assert [str(p.value) for p in found if p.name == "x_be"] == [
        *("nan", "inf", "-inf", SUBNORMAL, ROW_OF_ZEROS)
    ]
    assert [p.value for p in found if p.name == "ids_bt"] == [-1, 100, WIDE]
    assert {p.name for p in found} == {"x_be", "ids_bt"}


def test_an_index_of_32_bits_is_not_probed_beyond_them() -> None:
    found = probed(X, IDS.int(), torch.ones(4, dtype=torch.bool))
    assert [p.value for p in found if p.name == "ids_bt"] == [-1, 100]
    whole = torch.tensor([[3], [5]], dtype=torch.uint8)
    assert not probes_of(torch.export.export(Whole(lambda x: x * 2), (whole,)), (whole,))


def test_integers_that_index_nothing_are_probed_at_the_end_of_32_bits() -> None:
    assert [p.value for p in probes_of(torch.export.export(Whole(lambda x: x * 2), (IDS,)), (IDS,))] == [
        -1,
        LARGEST,
        WIDE,
    ]


def test_each_table_is_probed_past_its_end() -> None:
    two = Whole(lambda x: F.embedding(x, torch.ones(200, 2)) + torch.ones(150, 2)[x % 150])
    assert [probe.value for probe in probes_of(torch.export.export(two, (IDS,)), (IDS,))] == [
        -1,
        150,
        200,
        WIDE,
    ]


def test_what_the_example_holds_is_not_probed() -> None:
    own = X.clone()
    own[3, 3], own[2, 2] = math.nan, -math.inf
    found = probed(own, IDS - 50, torch.ones(4, dtype=torch.bool))
    assert [p.value for p in found] == [math.inf, SUBNORMAL, ROW_OF_ZEROS, 100, WIDE]
    own[1] = 0
    found = probed(own, IDS - 50, torch.ones(4, dtype=torch.bool))
    assert ROW_OF_ZEROS not in [p.value for p in found]


def test_a_probe_changes_the_first_row_of_a_copy() -> None:
    before = X.clone()
    changed = Probe(tensor=0, name="x", value=math.nan).applied([X, IDS])
    assert torch.equal(X, before)
    assert torch.equal(changed[0].isnan().nonzero()[:, 0], torch.zeros(4, dtype=torch.long))
    assert torch.equal(changed[0][1:], X[1:])
    assert torch.equal(changed[1], IDS)
    (alone,) = Probe(tensor=0, name="x", value=7).applied([torch.tensor(3)])
    assert alone == 7
    (small,) = Probe(tensor=0, name="x", value=SUBNORMAL).applied([X])
    assert small.any()
    assert small.abs().max() < torch.finfo(torch.float32).tiny
    assert torch.equal(small.sign(), X.sign())
    (zeros,) = Probe(tensor=0, name="x", value=ROW_OF_ZEROS).applied([X])
    assert not zeros[0].any()
    assert torch.equal(zeros[1:], X[1:])


def test_where_two_answers_part_both_numbers_are_given() -> None:
    drops = lambda x: x.nan_to_num(0.5, math.inf, -math.inf).relu()
    (found,) = limits(torch.relu, drops, X)
    assert str(found) == "for nan in x it differs: eager nan, exported 0.5"
    assert holds_for([found]) == "inputs without NaN"
    clipped = limits(torch.relu, lambda x: x.nan_to_num(0, 1, -1).relu(), X)
    assert [str(limit.value) for limit in clipped] == ["nan", "inf"]
    assert holds_for(clipped) == "finite inputs"


def test_nan_that_arises_inside_and_is_dropped_is_a_limit() -> None:
    eager = lambda x: (x / x.norm(dim=-1, keepdim=True)).relu()
    drops = lambda x: (x / x.norm(dim=-1, keepdim=True)).nan_to_num(0).relu()
    found = limits(eager, drops, X)
    (zeros,) = (limit for limit in found if limit.value == ROW_OF_ZEROS)
    assert str(zeros) == "for a row of zeros in x it differs: eager nan, exported 0"
    assert "no rows of zeros" in holds_for(found)
    rounds = lambda x: eager(x) + 0.01
    assert ROW_OF_ZEROS not in [limit.value for limit in limits(eager, rounds, X)]


def test_integers_in_32_bits_and_unchecked_indices_are_limits() -> None:
    narrow = limits(lambda x: x * 2.0, lambda x: x.int() * 2.0, IDS)
    assert [limit.value for limit in narrow] == [WIDE]
    assert holds_for(narrow) == "integers of 32 bits"
    table = torch.randn(100, 2)
    wraps = limits(lambda x: F.embedding(x, table), lambda x: table[x % 100], IDS)
    assert [str(limit) for limit in wraps] == [
        f"for {value} in x PyTorch raises IndexError, and the export answers" for value in (-1, 100, WIDE)
    ]
    assert holds_for(wraps) == "indices in range"


def test_a_crash_is_a_limit_and_two_errors_are_none() -> None:
    right, error = ProbeOutputs(outputs=[X]), ProbeOutputs(refused="IndexError: index 100 is out of range")
    crashed = ProbeOutputs(crashed="crashed (SIGABRT)")
    assert str(limit_at(-1, ("ids",), error, crashed, 0)) == (
        "for -1 in ids it crashed (SIGABRT), where PyTorch raises IndexError"
    )
    assert str(limit_at(-1, ("ids",), right, crashed, 0)) == "for -1 in ids it crashed (SIGABRT)"
    assert str(limit_at(ZERO_ROWS, (), right, error, 0)).startswith("for zero rows it refuses: IndexError")
    assert limit_at(-1, ("ids",), error, error, 0) is None
    assert limit_at(-1, ("ids",), crashed, right, 0) is None


def test_inputs_with_the_same_limit_are_told_together() -> None:
    both = [Probe(tensor=index, name=name, value=math.nan) for index, name in enumerate("ab")]
    wrong = limits_of(
        both, lambda _: ProbeOutputs(outputs=[X * math.nan]), lambda _: ProbeOutputs(outputs=[X]), 0
    )
    assert [limit.names for limit in wrong] == [("a", "b")]


def test_without_time_what_was_not_probed_is_said() -> None:
    (found,) = limits(torch.relu, torch.relu, X, seconds=-1.0)
    assert "not probed: nan in x, inf in x" in str(found)
    assert holds_for([found]) == "numbers like the example's"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (torch.tensor([1e-40, 1.0]), torch.tensor([0.0, 1.0]), ""),
        (torch.tensor([1e-40]), torch.tensor([0.0]), ""),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), ""),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), "eager inf, exported -inf"),
        (torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.5]), "eager 1, exported 1.5"),
        (torch.tensor([2, 1]), torch.tensor([2, 3]), "eager 1, exported 3"),
        (torch.tensor([1j]), torch.tensor([2j]), "eager 1, exported 2"),
        (torch.zeros(0, 2), torch.zeros(0, 2), ""),
        (torch.zeros(0, 2), torch.zeros(1, 2), "eager shapes [[0, 2]], exported [[1, 2]]"),
    ],
)
def test_parting(before: torch.Tensor, after: torch.Tensor, said: str) -> None:
    assert parting([before], [after], 1e-3) == said


# ------------------------------------------------------------------------------------------------ real runtimes


def available(name: str) -> type[ExportTarget]:
    target = exports.get(name)
    if reason := target.unavailable() or target.unwritable():
        pytest.skip(reason)
    return target


def exported(to: str, out: Path, model: nn.Module, *inputs: torch.Tensor) -> dict[str, Any]:
    available(to)
    return tw.export(model.eval(), inputs, to=to, out=out / "out").report


# A package is compiled, a proof that takes half a minute.
@pytest.mark.slow
def test_torchs_own_archive_holds_for_every_number(tmp_path: Path) -> None:
    report = exported("pt2", tmp_path, Numbers(), X, IDS, IDS * 99)
    assert (report["verdict"], report["holds_for"], report["limits"]) == ("holds", ALL, [])
    again = check(tmp_path / "out").report
    assert (again["holds_for"], again["limits"]) == (ALL, [])


def test_an_export_to_openvino_says_that_it_holds_for_finite_inputs(tmp_path: Path) -> None:
    """It was said to hold, and answered a plausible number for NaN."""
    report = exported("openvino", tmp_path, Numbers(), X, IDS, IDS * 99)
    assert report["verdict"] == "holds"
    assert report["holds_for"] == "finite inputs, indices in range, integers of 32 bits"
    assert "for nan in x_be it differs: eager nan, exported 0" in report["limits"]
    assert "for 100 in ids_bt PyTorch raises IndexError, and the export answers" in report["limits"]


@pytest.mark.slow  # a whole export
def test_where_the_example_holds_nan_a_difference_is_a_failure(tmp_path: Path) -> None:
    own = X.clone()
    own[0, 0] = math.nan
    assert exported("openvino", tmp_path, Holes(), own)["verdict"] == "differs"


def test_onnx_takes_negative_indices_where_pytorch_raises(tmp_path: Path) -> None:
    target, model, inputs = available("onnx"), Numbers().eval(), (X, IDS, IDS * 99)
    made = make_subject(ModuleWorkload(model, inputs))
    target.write(made, "fp32", tmp_path)
    run = target.open(tmp_path, made.graph.spec, 1)
    eager = answered(lambda *tensors: list(model(*tensors).values()), *inputs)
    found = limits_of(
        probes_of(made.graph.program, inputs), eager, answered(lambda *t: run(t), *inputs), 1e-3
    )
    assert holds_for(found) == "indices in range"
    assert [(limit.value, limit.names) for limit in found] == [(-1, ("ids_bt",))]


@pytest.mark.slow  # compiles C++
def test_compiled_code_may_crash_at_a_probe_and_is_exported(tmp_path: Path) -> None:
    report = exported("aoti", tmp_path, Numbers(), X, IDS, IDS * 99)
    assert report["verdict"] == "holds"
    assert report["holds_for"] in (ALL, "indices in range")
