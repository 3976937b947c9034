"""Fixtures that tests of compiled NumPy functions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run checked graphs operator by operator: for tests of the calls around them, which need no C++ compiler."""
    from functorch.compile import make_boxed_func

    def graph_itself(graph: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", graph_itself)
