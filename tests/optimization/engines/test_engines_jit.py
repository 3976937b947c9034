"""How often torch.compile has compiled one function, and when that is too often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.optimization.engines.jit import RECOMPILE_LIMIT, Jit, RecompileStorm
from torchwright.optimization.techniques.base import Settings
from torchwright.optimization.techniques.shared.int8 import Int8Layer
from torchwright.workloads.base import Case


class Forms(nn.Module):
    """Computes another thing for each `form`, as a model does whose call has several."""

    def forward(self, x: torch.Tensor, form: int) -> torch.Tensor:
        return x * form


@pytest.fixture
def engine() -> Iterator[Jit]:
    torch._dynamo.reset()
    torch._dynamo.utils.guard_failures.clear()
    engine = Jit(Forms(), Settings(dynamic=False))
    engine._compiled = torch.compile(Forms(), backend="eager", dynamic=False)
    # By torch's own patch: pytest 9.2 sets back by deleting, and its configuration counts what is deleted as gone.
    with torch._dynamo.config.patch(specialize_int=True):
        yield engine
    torch._dynamo.reset()
    torch._dynamo.utils.guard_failures.clear()


def ask(engine: Jit, form: int) -> Any:
    return engine(Case(name="forward", args=(torch.ones(3), form), kwargs={}))


def test_each_compilation_counts_once(engine: Jit) -> None:
    for form in range(6):
        assert torch.equal(ask(engine, form), torch.full((3,), float(form)))
        assert engine.recompiles() == form
    for form in range(6):
        ask(engine, form)
    assert engine.recompiles() == 5


def test_beyond_torchs_limit_it_is_a_storm(engine: Jit) -> None:
    for form in range(RECOMPILE_LIMIT):
        ask(engine, form)
        engine.recompiles()
    ask(engine, RECOMPILE_LIMIT)
    with pytest.raises(RecompileStorm, match="recompiled one function 8 times"):
        engine.recompiles()


@pytest.mark.parametrize("example", [1.0, math.inf])
def test_values_that_compiled_integers_drop_are_left_to_the_model(example: float) -> None:
    """Infinity as well, unless the example holds some."""
    layer = nn.Sequential(Int8Layer(nn.Linear(3, 2), (0.1, 100)), nn.ReLU())
    engine = Jit(layer, Settings(), [Case(name="forward", args=(torch.full((3,), example),), kwargs={})])
    engine._compiled = lambda x: torch.zeros(2)
    for value, compiled in ((1.0, True), (math.nan, False), (math.inf, example == math.inf)):
        found = engine(Case(name="forward", args=(torch.tensor([1.0, value, 2.0]),), kwargs={}))
        assert bool(found.isnan().all()) != compiled


@pytest.mark.parametrize("mode", ["reduce-overhead", None])
def test_what_a_recorded_graph_returned_stays_what_it_was(mode: Any) -> None:
    """CUDA graphs write into the same memory at every call; here a function does that."""
    engine = Jit(Forms(), Settings(mode=mode))
    memory = torch.zeros(3)
    engine._compiled = lambda x, form: {"y": memory.copy_(x * form), "form": form}
    first, second = ask(engine, 2), ask(engine, 5)
    assert torch.equal(second["y"], torch.full((3,), 5.0))
    assert torch.equal(first["y"], torch.full((3,), 2.0 if mode else 5.0))
    assert second["form"] == 5
