"""The least and the largest of 8-bit integers, compiled (pytorch#191499)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import torchwright as tw
from engine_calls import Calls, dispatcher_of
from torchwright.optimization.engines.compiled.byte_reductions import (
    SETTING,
    WideReductions,
    exact_reductions,
)
from torchwright.optimization.engines.jit import Jit
from torchwright.optimization.techniques.base import Settings
from torchwright.workloads.base import Case

MIXED = torch.tensor([[-1, 1] * 9] * 4, dtype=torch.int8) * torch.arange(3, 21, dtype=torch.int8)
"""Numbers of both signs: zeros that are not among them do not change the example's own result."""


def extremes(x: torch.Tensor) -> list[torch.Tensor]:
    pairs = [*x.min(1), *torch.max(x, 1, keepdim=True), *x.aminmax()]
    return [x.amin(-1), x.amax(-1), x.min(), x.max(), x.argmin(1), torch.argmax(x), *pairs]


def check(run: Any) -> None:
    for x in (MIXED, MIXED.abs(), -MIXED.abs()):
        for found, wanted in zip(run(x), extremes(x), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


@pytest.mark.slow
def test_a_package_finds_the_extremes_of_bytes(tmp_path: Path) -> None:
    check(dispatcher_of(Calls(extremes), MIXED, to=tmp_path / "package.pt2"))


def test_torch_compile_finds_the_extremes_of_bytes() -> None:
    engine = Jit(Calls(extremes), Settings())
    check(lambda x: engine(Case("forward", args=(x,))))


@pytest.mark.slow
def test_numpy_functions_find_the_extremes_of_bytes() -> None:
    compiled = tw.compile_numpy(lambda x: np.argmax(x, axis=1), measure=False, progress=False)
    mixed = np.tile(MIXED.numpy(), (4, 4))
    compiled(mixed)
    assert "compiled serves" in str(compiled.report)
    np.testing.assert_array_equal(compiled(-np.abs(mixed)), np.argmax(-np.abs(mixed), axis=1))


class Counted(CustomGraphPass):
    calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counted"


def test_a_users_own_pass_still_runs_and_is_in_the_caches_key() -> None:
    own = Counted()
    graph = make_fx(nn.Identity(), tracing_mode="fake")(torch.zeros(2)).graph
    with inductor_config.patch({SETTING: own}):
        ours = exact_reductions()[SETTING]
        with inductor_config.patch({SETTING: ours}):  # a compilation within one
            assert exact_reductions()[SETTING].others == ours.others
    ours(graph)
    assert own.calls == 1
    assert ours.uuid() == (*WideReductions().uuid(), "counted")


@pytest.mark.parametrize("others", [[print], [Counted(), print]])
def test_a_pass_without_a_key_keeps_compiled_code_out_of_the_cache(others: list[Any]) -> None:
    assert WideReductions(others).uuid() is None
