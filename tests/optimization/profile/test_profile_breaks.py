"""Graph breaks by the user's own line, with cause and cure."""

from __future__ import annotations

import inspect
import logging

import broken
import pytest
import torch
from torch import nn

from torchwright.optimization.profile.breaks import LOGGERS, find_breaks
from torchwright.optimization.profile.causes import CAUSES, COMPLEX, TRACED_NUMPY, UNSUPPORTED, cause_of
from torchwright.optimization.profile.values import Breaks
from torchwright.workloads.base import Case


def breaks_of(model: nn.Module) -> Breaks:
    return find_breaks(
        model.eval(), lambda called: lambda case: called(*case.args), [Case("forward", args=(broken.X,))]
    )


def marked_line(model: nn.Module) -> int:
    lines, first = inspect.getsourcelines(type(model))
    return first + next(index for index, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (broken.Print(), "print"),
        (broken.Branch(), "data-dependent branch"),
        (broken.Item(), "item()"),
        (broken.Listed(), "item()"),
        (broken.Numpy(), "NumPy"),
        (broken.Chosen(), "size that depends on data"),
        (broken.Asleep(), "unsupported call"),
        (broken.ByHand(), "disabled by hand"),
        (broken.Within(), "item()"),
        (broken.Rotary(), "complex numbers"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_each_cause_is_named_at_its_line(model: nn.Module, cause: str) -> None:
    breaks = breaks_of(model)
    assert breaks.failed is None
    (found,) = breaks.found
    assert (found.cause, found.file, found.line) == (cause, broken.__file__, marked_line(model))
    assert found.text.endswith("# here")
    named = {one.name: one for one in (*CAUSES, COMPLEX, UNSUPPORTED)}[cause]
    assert (found.reason, found.cure) == (named.reason, named.cure)
    assert found.torch_says


def test_a_function_that_is_given_up_is_told_from_one_that_is_resumed() -> None:
    assert breaks_of(broken.Item()).found[0].whole_function is False
    assert breaks_of(broken.Within()).found[0].whole_function is True


def test_a_model_without_breaks_is_one_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert breaks_of(model) == Breaks(graphs=1, found=())


def test_numpy_that_is_traced_is_one_graph_and_named_all_the_same() -> None:
    breaks = breaks_of(broken.Whole())
    assert breaks.graphs == 1
    (found,) = breaks.found
    assert (found.cause, found.reason) == ("NumPy", TRACED_NUMPY.reason)


def test_a_line_that_is_met_often_is_one_break() -> None:
    (found,) = breaks_of(nn.Sequential(*(broken.Print() for _ in range(3)))).found
    assert found.line == marked_line(broken.Print())
    assert found.count >= 3


def test_a_model_that_cannot_be_traced_says_so() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 3)

    breaks = breaks_of(Fails())
    assert breaks.failed is not None
    assert "Error" in breaks.failed


def test_loggers_are_left_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    before = [(log.handlers, log.level, log.propagate) for log in map(logging.getLogger, LOGGERS)]
    breaks_of(broken.Branch())
    assert [(log.handlers, log.level, log.propagate) for log in map(logging.getLogger, LOGGERS)] == before
    assert "Graph break" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("warnings.warn('odd')", "warning or logging"),
        ("logger.info(x)", "warning or logging"),
        ("f(x)", "unsupported call"),
    ],
)
def test_the_line_says_what_torch_does_not(line: str, cause: str) -> None:
    assert cause_of("Attempted to call function marked as skipped", line).name == cause
