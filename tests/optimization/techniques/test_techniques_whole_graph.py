"""Lines that break a graph, rewritten: what is computed stays, and what cannot be proven is refused."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import strangers
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.shared import stand_ins
from torchwright.optimization.techniques.shared.real_pairs import real_pairs
from torchwright.optimization.techniques.whole_graph import WholeGraph
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own, of its trees
CPU = DeviceFacts(kind="cpu", name="test")
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (lambda: strangers.Llama(layers=1), lambda: torch.randint(0, 100, (2, 6))),
    "detection": (strangers.DetectionHead, lambda: torch.randn(2, 10, 32)),
    "early return": (strangers.EarlyReturn, lambda: torch.randn(2, 16)),
    "printing": (strangers.Chatty, lambda: torch.randn(4, 16)),
    "numpy": (strangers.WithNumpy, lambda: torch.rand(2, 3, 8, 8)),
    "inherited helper": (strangers.Inheriting, lambda: torch.randn(4, 16)),
}
REFUSED: dict[str, tuple[nn.Module, list[torch.Tensor], str]] = {
    "side effect": (strangers.SideEffect(), [torch.ones(4, 16)], r"'self.hits \+= 1' changes what outlives"),
    "in place": (strangers.InPlace(), [torch.ones(4)], r"'x \+= 1' may change a tensor in place"),
    "raises": (strangers.Raises(), [torch.ones(4)], "one side raises"),
    "leaks": (strangers.NumberLeaks(), [torch.ones(4)], r"its number goes into '\[loss\]'"),
    "index": (strangers.Looked(), [torch.ones(3), torch.tensor([0, 1, 2])], "may be out of range"),
    "random": (strangers.Random(), [torch.ones(3)], "random numbers"),
    "generator": (strangers.Generator(), [torch.ones(3)], "called again"),
}


def target_of(model: nn.Module, *inputs: Any) -> Target:
    workload = ModuleWorkload(model.eval(), inputs)
    return Target(model=workload.build(), workload=workload, device=CPU, properties={"eager"})


def exported(model: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (x,), strict=False).run_decompositions({})


@pytest.mark.plain("early return")
@pytest.mark.parametrize("name", WHOLE)
def test_strangers_models_become_one_graph_that_computes_the_same(
    name: str, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    build, inputs = WHOLE[name]
    model = build()
    forward, state = type(model).forward, copy.deepcopy(vars(model))
    target = target_of(model, inputs())
    WholeGraph().apply(target)
    (row,) = target.coverage
    assert row.changed > 0
    assert not row.skipped
    capsys.readouterr()
    for scale in (1.0, -1.0, 0.01, 0.0):
        x = inputs()
        x = x * scale if x.is_floating_point() else x
        with torch.no_grad(), caplog.at_level(logging.DEBUG, logger="strangers"):
            expected = model(x)
            speaks = isinstance(model, strangers.Chatty)
            assert bool(capsys.readouterr().out) == bool(_said(caplog)) == speaks
            caplog.clear()
            torch.testing.assert_close(target.model(x), expected, rtol=1e-4, atol=1e-5)
        assert capsys.readouterr().out == ""
        assert not _said(caplog)
    graph = exported(target.model, inputs()).graph_module
    for rewrite in target.settings.rewrites:
        rewrite(graph)
    assert not any(_is_complex(node) for node in graph.graph.nodes if node.op == "call_function")
    assert type(model).forward is forward
    assert vars(model).keys() == state.keys()


def _said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "strangers"]


def _is_complex(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_complex()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proven_is_refused_by_its_line(name: str) -> None:
    model, inputs, reason = REFUSED[name]
    target = target_of(model, *inputs)
    with pytest.raises(RefusedTechnique) as refusal:
        WholeGraph().apply(target)
    assert re.search(reason, refusal.value.found or "")
    assert "forward" not in vars(target.model)
    assert target.coverage == []


def test_a_model_without_breaks_is_refused() -> None:
    with pytest.raises(RefusedTechnique, match="rewriting lines"):
        WholeGraph().apply(target_of(nn.Linear(4, 4), torch.ones(2, 4)))
    target = target_of(nn.Linear(4, 4), torch.ones(2, 4))
    target.properties |= WholeGraph.gives
    assert "already" in (WholeGraph().refuse(target) or "")


class Complex(nn.Module):
    """Every rule for complex numbers once."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = z * torch.polar(torch.full_like(z.real, 2.0), z.imag) + 1j * z - 0.5
        ratio = turned / (z + 2) / 3.0
        both = torch.cat([ratio, z.conj() * 2], dim=-1).transpose(0, 1)
        joined = torch.stack([both, torch.exp(both * 0.1)])
        chosen = torch.where(joined.real > 0, joined, -joined)
        product = chosen[0] @ chosen[1].transpose(0, 1)
        return product.abs(), torch.view_as_real(chosen.sum(-1)), product.angle().cos(), chosen.mean(dim=1)


@pytest.mark.slow
def test_complex_arithmetic_by_real_pairs_against_float64() -> None:
    torch.manual_seed(0)
    model, x = Complex(), torch.randn(3, 8)
    with torch.no_grad():
        program = exported(model, x)
        real_pairs(program.graph_module)
        for _ in range(3):
            x = torch.randn(3, 8)
            for found, expected in zip(program.module()(x), model(x.double()), strict=True):
                wanted = expected.to(torch.complex64 if expected.is_complex() else torch.float32)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    complexes = [n for n in program.graph.nodes if n.op == "call_function" and _is_complex(n)]
    assert [node.target for node in complexes] == [torch.ops.aten.view_as_complex.default]  # the result's


def test_complex_arithmetic_without_a_rule_is_refused_by_its_line() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    with pytest.raises(RefusedTechnique) as refusal:
        real_pairs(exported(Spectrum(), torch.randn(8)).graph_module)
    assert "rfft" in str(refusal.value.found)
    assert "line" in str(refusal.value.found)


@pytest.mark.parametrize(
    "values", [(1.0, 2.0), (2.0, 1.0), (float("nan"), 1.0), (1.0, float("nan")), (3, 3.0)]
)
def test_stand_ins_follow_python(values: tuple[float, float]) -> None:
    tensors = [torch.tensor(float(value)) for value in values]
    for stand_in, plain in ((stand_ins.largest, max), (stand_ins.smallest, min)):
        torch.testing.assert_close(
            stand_in(tensors[0], values[1]), torch.tensor(float(plain(values))), equal_nan=True
        )
        assert stand_in(3, 4) == plain(3, 4)
    assert stand_ins.to_int(torch.tensor([-1.7])) == int(-1.7)
    assert stand_ins.choose(False, lambda: 1, lambda: 2) == 2
    with pytest.raises(stand_ins.Unlike, match="float32"):
        stand_ins.choose(torch.tensor(True), lambda: torch.ones(2), lambda: torch.ones(3))
    with pytest.raises(stand_ins.Unlike):
        stand_ins.choose(torch.tensor(True), lambda: "a", lambda: "b")
