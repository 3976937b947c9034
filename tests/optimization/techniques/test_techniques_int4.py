"""4-bit weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.engines.compiled.program import export, read_programs, write_programs
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.dtype import Dtype
from torchwright.optimization.techniques.int4_weight_only import (
    Int4Linear,
    Int4WeightOnly,
    dequantize,
    quantize,
)
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(model: nn.Module, *inputs: torch.Tensor) -> Target:
    workload = ModuleWorkload(model, inputs)
    return Target(model=workload.build(), workload=workload, device=CPU, properties={"eager"})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([32, 64, 128]),
    st.floats(-2, 2),
    st.integers(0, 2**31),
)
def test_codes_are_the_nearest(N: int, G: int, group: int, shift: float, seed: int) -> None:
    """Each weight is off by at most half a step, and what bfloat16 takes from the ends of the range."""
    w_NK = torch.randn(N, G * group, generator=torch.Generator().manual_seed(seed)) + shift
    codes, scales = quantize(w_NK, group)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 15
    step = scales[..., 0].float().T.repeat_interleave(group, 1)
    ends = 2**-8 * (w_NK.abs().amax() + 16 * step)
    assert bool(((dequantize(codes, scales, group) - w_NK).abs() <= step / 2 + ends).all())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_half_quadratic_rounding_gives_way_to_outliers(group: int) -> None:
    """Weights with heavy tails, as trained ones have: by both norms it is nearer than from a group's ends."""
    pytest.importorskip("torchao")
    w_NK = torch.distributions.StudentT(4.0).sample(torch.Size((64, 512)))
    errors = {}
    for rounding in ("nearest", "hqq"):
        codes, scales = quantize(w_NK, group, rounding)
        assert int(codes.max()) <= 15
        difference = (dequantize(codes, scales, group) - w_NK).abs()
        errors[rounding] = torch.stack((difference.pow(0.7).mean(), difference.square().mean()))
    assert bool((errors["hqq"] < 0.995 * errors["nearest"]).all()), errors


def test_constant_groups_are_kept() -> None:
    w_NK = torch.full((16, 64), 0.5)
    torch.testing.assert_close(dequantize(*quantize(w_NK, 64), 64), w_NK)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_against_reference(group: int, bias: bool, dtype: torch.dtype) -> None:
    """The packed kernel against the dequantized weights in float32: what is left is bfloat16's rounding, 1%."""
    layer = nn.Linear(256, 48, bias=bias, dtype=dtype)
    packed = Int4Linear.of(layer, group)
    x = torch.randn(2, 5, 256, dtype=dtype)
    reference = dequantize(*quantize(layer.weight.detach().float(), group), group)
    with torch.no_grad():
        expected = F.linear(x.float(), reference, layer.bias.float() if bias else None)
        found = packed(x)
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_may_read_the_weight(dtype: torch.dtype) -> None:
    """As text encoders do, to cast what they pass in: it is what the codes stand for, in the layer's own type."""
    layer = nn.Linear(128, 32, dtype=dtype)
    packed = Int4Linear.of(layer, 64)
    expected = dequantize(*quantize(layer.weight.detach().float(), 64), 64).to(dtype)
    assert packed.weight.dtype == dtype
    assert torch.equal(packed.weight, expected)


@pytest.mark.parametrize("nested", [True, False])
def test_torchs_encoder_calls_the_packed_layers(nested: bool) -> None:
    """Its fused path would read the weights of its layers and never call them."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    target = make(encoder, torch.randn(2, 5, 64))
    Int4WeightOnly().apply(target)
    called: list[nn.Module] = []
    packed = [module for module in target.model.modules() if isinstance(module, Int4Linear)]
    for module in packed:
        module.register_forward_pre_hook(lambda module, _: called.append(module))
    with torch.no_grad():
        target.model(torch.randn(2, 5, 64))
    assert len(packed) == 4
    assert set(called) == set(packed)


def test_weights_take_a_little_over_half_a_byte() -> None:
    packed = Int4Linear.of(nn.Linear(1024, 1024, bias=False), 64)
    stored = sum(t.nbytes for t in packed.state_dict().values())
    assert stored / 1024**2 == pytest.approx(0.5 + 4 / 64)


def test_layers_that_cannot_be_packed_are_listed() -> None:
    model = nn.ModuleDict(
        {
            "good": nn.Linear(64, 32),
            "rows": nn.Linear(64, 10),
            "columns": nn.Linear(48, 64),
            "asked": nn.Linear(64, 64),
        }
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.attention = model, nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["good"](self.attention(x, x, x)[0])

    target = make(Model(), torch.randn(2, 3, 64))
    Int4WeightOnly(skip=("layers.asked",)).apply(target)
    coverage = target.coverage[0]
    assert coverage.skipped == {
        "layers.rows": "10 outputs are not a multiple of 16",
        "layers.columns": "48 inputs are not a multiple of the group of 64",
        "layers.asked": "left alone by option",
        "attention.out_proj": "a NonDynamicallyQuantizableLinear is read by its owner, not called",
    }
    assert (coverage.changed, coverage.total) == (1, 5)
    assert target.model(torch.randn(2, 3, 64)).shape == (2, 3, 32)


def test_nothing_to_pack_is_refused() -> None:
    target = make(nn.Linear(10, 10), torch.randn(1, 10))
    assert "not a multiple" in (Int4WeightOnly().refuse(target) or "")
    with pytest.raises(RefusedTechnique, match="not a multiple"):
        Int4WeightOnly().apply(target)


def test_retreat_adds_to_what_is_skipped() -> None:
    technique = Int4WeightOnly(group_size=32, skip=("b",)).retreat(("inner.a", "b"))
    assert technique == Int4WeightOnly(group_size=32, skip=("a", "b"))


def test_skip_finds_a_layer_that_has_been_wrapped() -> None:
    target = make(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(1, 64))
    Dtype().apply(target)
    Int4WeightOnly(skip=("1",)).apply(target)
    assert set(target.coverage[-1].skipped) == {"1"}


def test_module_error_is_that_of_the_layer() -> None:
    layer, x = nn.Linear(128, 64), torch.randn(32, 128)
    estimate = Int4WeightOnly().module_error(layer, x)
    with torch.no_grad():
        real = (Int4Linear.of(layer, 64)(x) - layer(x)).norm() / (layer(x) - layer.bias).norm()
    assert estimate == pytest.approx(float(real), rel=0.1)
    assert Int4WeightOnly().module_error(nn.ReLU(), x) is None
    assert Int4WeightOnly().module_error(nn.Linear(128, 10), x) is None
    stand_in = Int4WeightOnly().stand_in(layer)
    assert stand_in is not None  # by which its effect on all that comes out is measured
    assert torch.equal(stand_in(x), Int4Linear.of(layer, 64)(x))
    assert Int4WeightOnly().stand_in(nn.ReLU()) is Int4WeightOnly().stand_in(nn.Linear(128, 10)) is None


def test_a_tied_head_is_packed_and_its_embedding_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    target = make(Tied(), torch.randint(0, 32, (2, 4)))
    Int4WeightOnly().apply(target)
    assert isinstance(target.model.head, Int4Linear)
    kept, original = (m.get_parameter("embedding.weight") for m in (target.model, target.workload.build()))
    torch.testing.assert_close(kept, original)


def test_exported_graph_holds_plain_codes_and_survives_a_file(tmp_path: Path) -> None:
    """What is stored must not depend on this machine's instruction set: the kernel's order is made in the graph."""
    target = make(nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32)), torch.randn(3, 64))
    Int4WeightOnly(group_size=32).apply(target)
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = target.model(x)
    program = export(target.model, target.workload.cases(torch.float32))["forward"]
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("aten._convert_weight_to_int4pack_for_cpu.default") == 2
    assert names.count("aten._weight_int4pack_mm_for_cpu.default") == 2
    assert {t.dtype for t in program.state_dict.values()} == {torch.uint8, torch.bfloat16, torch.float32}
    write_programs(tmp_path, {"forward": program})
    with torch.no_grad():
        torch.testing.assert_close(read_programs(tmp_path)["forward"].module()(x), expected)


def test_off_the_cpu_it_is_not_available() -> None:
    assert Int4WeightOnly.available(DeviceFacts(kind="cuda", name="test")) is not None
