"""LSTM and GRU layers on packed weights: torch's arguments and results, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchwright.core.records import DeviceFacts, Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.program import compile_program, functional
from torchwright.optimization.techniques.packed_recurrent import PackedLayers, PackedRecurrent
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
LAYERS = [
    pytest.param({"num_layers": 2, "batch_first": True}, id="two layers"),
    pytest.param({"bidirectional": True, "num_layers": 2}, id="both directions"),
    pytest.param({"bias": False, "bidirectional": True}, id="no bias"),
]
KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
OPTIONS = pytest.mark.parametrize("options", LAYERS)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def flat(found: Any) -> list[torch.Tensor]:
    output, states = found
    return [output, *(states if isinstance(states, tuple) else [states])]


def same(found: Any, wanted: Any) -> None:
    for here, there in zip(flat(found), flat(wanted), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=2e-6)


@KINDS
@OPTIONS
def test_results_are_torchs(kind: Any, options: dict[str, Any]) -> None:
    layer = kind(11, 20, **options).eval()
    packed, x, line = PackedLayers(layer), torch.randn(3, 4, 11), torch.randn(6, 11)
    with torch.no_grad():
        same(packed(x), layer(x))
        same(packed(line), layer(line))
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        rows = 3 if layer.batch_first else 4
        states = [torch.randn(count, rows, 20) for _ in range(2)]
        single = [state[:, 0] for state in states]
        given, alone = (tuple(states), tuple(single)) if kind is nn.LSTM else (states[0], single[0])
        same(packed(x, given), layer(x, given))
        same(packed(line, alone), layer(line, alone))
        same(packed(input=x, hx=given), layer(x, given))
    packed.flatten_parameters()


@KINDS
@OPTIONS
def test_sequences_of_several_lengths_take_torchs_own(kind: Any, options: dict[str, Any]) -> None:
    layer, x = kind(11, 20, **options).eval(), torch.randn(3, 5, 11)
    ragged = pack_padded_sequence(x, torch.tensor([5, 2, 3]), batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        found, found_states = PackedLayers(layer)(ragged)
        wanted, wanted_states = layer(ragged)
    same((pad_packed_sequence(found)[0], found_states), (pad_packed_sequence(wanted)[0], wanted_states))


class Reader(nn.Module):
    """Two layers that are replaced, a subclass, a layer with projected outputs, and a layer with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.GRU(8, 24, batch_first=True)
        self.writes = nn.LSTM(24, 16, batch_first=True)
        self.narrow = nn.LSTM(16, 12, proj_size=6, batch_first=True)
        self.odd = Odd(6, 6, batch_first=True)
        self.watched = nn.GRU(6, 6, batch_first=True)
        self.watched.register_forward_hook(lambda module, args, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.reads, self.writes, self.narrow, self.odd, self.watched):
            x = layer(x)[0]
        return x


class Odd(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(input.flip(1), hx)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_cannot_be_replaced_stays_with_a_reason() -> None:
    model, x = Reader().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        wanted = model(x)
    target = make_target(ModuleWorkload(model, x), get_device("cpu").facts())
    apply_steps(target, [Step(name="packed_recurrent")])
    with torch.no_grad():
        torch.testing.assert_close(target.model(x), wanted, rtol=1e-5, atol=2e-6)
    (coverage,) = [each for each in target.coverage if each.technique == "packed_recurrent"]
    assert (coverage.changed, coverage.total) == (2, 5)
    assert set(coverage.skipped) == {"narrow", "odd", "watched"}
    assert coverage.skipped["narrow"] == "its outputs are projected"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "the model has no nn.LSTM or nn.GRU"),
        (nn.LSTM(4, 4, proj_size=2), "its outputs are projected"),
        (nn.GRU(4, 4, dtype=torch.bfloat16), "its weights are torch.bfloat16"),
        (nn.GRU(4, 4), None),
    ],
)
def test_refusals(model: nn.Module, reason: str | None) -> None:
    x = torch.randn(3, 2, 4, dtype=next(model.parameters()).dtype)
    target = make_target(ModuleWorkload(model.eval(), x), get_device("cpu").facts())
    assert PackedRecurrent().refuse(target) == reason
    assert "CPUs" in (PackedRecurrent.available(DeviceFacts(kind="cuda", name="test")) or "")


@KINDS
def test_a_graph_of_any_length_keeps_the_layer_whole(kind: Any) -> None:
    packed, x = PackedLayers(kind(8, 20, batch_first=True)), torch.randn(2, 6, 8)
    sizes = {
        "rows": torch.export.Dim("rows", min=1, max=64),
        "steps": torch.export.Dim("steps", min=2, max=64),
    }
    shapes = ({0: sizes["rows"], 1: sizes["steps"]},)
    program = torch.export.export(Outputs(packed), (x,), dynamic_shapes=shapes)
    for shape in ((2, 6, 8), (5, 9, 8)):
        y = torch.randn(shape)
        torch.testing.assert_close(program.module()(y), packed(y)[0])


class Outputs(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


@pytest.mark.slow
@KINDS
def test_it_compiles_ahead_of_time(kind: Any, tmp_path: Path) -> None:
    model, x = Outputs(PackedLayers(kind(8, 20, batch_first=True))), torch.randn(2, 6, 8)
    compile_program(functional(torch.export.export(model, (x,))), tmp_path / "layers.pt2", {})
    compiled: Any = torch._inductor.aoti_load_package(str(tmp_path / "layers.pt2"))
    torch.testing.assert_close(compiled(x), model(x))
