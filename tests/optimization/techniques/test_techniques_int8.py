"""8-bit layers: what they compute, what a whole graph makes of them, and that Inductor fuses it."""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from calibrated_layers import calibrated_on
from torchwright.core.errors import UnknownName
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import compile_program, export, functional
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.engines.rewrites.layout import ROW_BY_ROW
from torchwright.optimization.engines.sensitivity import rank_modules
from torchwright.optimization.techniques.int8_static import Int8Static
from torchwright.optimization.techniques.shared.int8 import (
    STEPS,
    Int8Layer,
    activation_range,
    largest_weight,
    quantize_weight,
)
from torchwright.optimization.techniques.shared.int8_graph import (
    DEQUANTIZE,
    QUANTIZE,
    keep_not_finite,
    share_integers,
)
from torchwright.workloads.module import ModuleWorkload

aten = torch.ops.aten


class Residual(nn.Module):
    """A convolution's output plus what it read, as residual networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 32, 3, padding=1)
        self.first, self.norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.second, self.third, self.head = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1), nn.Linear(32, 10)
        assert self.norm.running_mean is not None
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + x)
        return self.head(torch.relu(self.third(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def target_of(model: nn.Module, x: torch.Tensor, *steps: Step) -> Any:
    target = make_target(ModuleWorkload(model.eval(), (x,)), get_device("cpu").identify())
    apply_steps(target, steps)
    return target


STATIC = (Step(name="int8_static"), Step(name="compile"))


class AddsToItsInput(nn.Module):
    """A transformer block's form: a linear layer's output is added to the model's own input."""

    def __init__(self, shaped: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.shaped = nn.LayerNorm(64), nn.Linear(64, 64), shaped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1) if self.shaped else x
        return x + self.layer(self.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize("shaped", [False, True])
def test_a_compiled_sum_does_not_overwrite_the_callers_input(shaped: bool, tmp_path: Path) -> None:
    """Inductor writes such a sum over the other operand: the input, by the time that a NaN asks for another answer."""
    model, x = AddsToItsInput(shaped), torch.randn(4, 16, 64)
    target = target_of(model, x, *STATIC)
    program = rewritten(
        export(target.model, target.workload.cases(torch.float32))["forward"], target.settings
    )
    compile_program(program, tmp_path / "model.pt2", target.settings.inductor)
    package = Package(tmp_path / "model.pt2", spec_of("forward", program))
    given = x.clone()
    with torch.inference_mode():
        answered, expected = package.run([given]), target.model(x)
    assert torch.equal(given, x)
    assert (answered - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(48, 40), (6, 48)), (nn.Conv2d(8, 24, 3, 2, 1), (2, 8, 9, 9))]
)
def test_a_layer_computes_on_rounded_weights_and_inputs(
    layer: nn.Module, shape: Any, dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    low, high = (end.item() for end in x.float().aminmax())
    scale, zero = activation_range(low, high)
    wide: Any = layer.double()
    integers, weight_scale = quantize_weight(wide.weight, largest_weight())
    weight = integers.double() * weight_scale.double().view(-1, *[1] * (integers.dim() - 1))
    rounded = (torch.round(x.double() / scale + zero).clamp(0, STEPS) - zero) * scale
    with torch.no_grad():
        original = wide.weight.clone()
        wide.weight.copy_(weight)
        expected = wide(rounded)
        wide.weight.copy_(original)
        layer.to(dtype)
        got = Int8Layer(layer, (scale, zero))(x)
    assert got.dtype == dtype
    # One step of the input for ties that fall the other way, and the body's own rounding.
    tolerance = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}[dtype]
    assert ((got.double() - expected).norm() / expected.norm()).item() < tolerance


ROWS = {
    "plain": 1.0,
    "100x": 100.0,
    "1e30": 1e30,
    "1e-30": 1e-30,
    "zeros": 0.0,
    "NaN": float("nan"),
    "infinity": float("inf"),
}
"""Name → factor of one row."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(512, 64), (8, 512)), (nn.Conv2d(16, 24, 3, 2, 1), (8, 16, 9, 9))]
)
def test_every_row_has_a_scale_of_its_own(
    layer: nn.Module, shape: Any, factor: float, dtype: torch.dtype
) -> None:
    x = torch.randn(shape)
    x[2] *= factor
    layer, x = layer.to(dtype), x.to(dtype)
    with torch.no_grad():
        exact, got = layer(x).double(), Int8Layer(layer, None)(x).double()
    for row, wanted in zip(got, exact, strict=True):
        assert row.isfinite().all() == wanted.isfinite().all()
        assert not wanted.isfinite().all() or (row - wanted).norm() <= 0.03 * wanted.norm()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(48, 40), (6, 48)), (nn.Conv2d(8, 24, 3, 2, 1), (6, 8, 9, 9))]
)
def test_a_calibrated_layer_keeps_nan_and_infinity_as_nan(layer: nn.Module, shape: Any, value: float) -> None:
    x = torch.randn(shape)
    static = calibrated_on(layer, x)
    x[2, 1] = value
    with torch.no_grad():
        got, exact = static(x), layer(x)
    assert torch.equal(got.isfinite(), exact.isfinite())
    assert not got[2].isinf().any()


def test_static_layers_are_ranked_by_the_scale_of_the_whole_input() -> None:
    """A token of large values takes the resolution from its neighbours, as in the calibrated layer."""
    layer, x = nn.Linear(64, 16), torch.randn(8, 64)
    even = Int8Static().module_error(layer, x)
    x[0] *= 100
    error = Int8Static().module_error(layer, x)
    with torch.no_grad():
        found, wanted = calibrated_on(layer, x)(x), layer(x)
    assert even is not None
    assert error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-3)
    assert (found[1:] - wanted[1:]).norm() > 10 * even * wanted[1:].norm()


def test_who_reads_a_layers_weight_finds_its_type_and_its_values() -> None:
    """transformers' ViT casts its pixels to the type of the first layer's weight: integers there ruin the image."""
    layer = nn.Linear(16, 16).bfloat16()
    packed = Int8Layer(layer, (0.1, 3))
    assert packed.weight.dtype == torch.bfloat16
    assert (packed.weight - layer.weight).abs().max() <= layer.weight.abs().max() / 100


def test_batch_norms_are_folded_first() -> None:
    x = torch.randn(2, 8, 12, 12)
    target = target_of(Residual(), x, *STATIC)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in target.model.modules())
    with torch.no_grad():
        expected = target.workload.build()(x)
        assert ((target.model(x) - expected).norm() / expected.norm()).item() < 0.05


@pytest.mark.plain("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_residual_addition_reads_the_integers_of_the_next_layer(dtype: str) -> None:
    x = torch.randn(2, 8, 12, 12)
    steps = (Step(name="dtype"),) if dtype == "bfloat16" else ()
    target = target_of(Residual(), x, *steps, *STATIC)
    cases = target.workload.graphs(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    before = program.module()(x)
    share_integers(program.graph_module)
    nodes = list(program.graph_module.graph.nodes)
    additions = [node for node in nodes if node.target is aten.add.Tensor]
    assert any(DEQUANTIZE in [getattr(arg, "target", None) for arg in node.args] for node in additions)
    for node in nodes:
        assert sum(user.target is QUANTIZE for user in node.users) <= 1
    after = program.module()(x)
    assert after.dtype == before.dtype
    assert ((after - before).norm() / before.norm()).item() < 0.03  # the residual is rounded to 8 bits now


class Columns(nn.Module):
    """Residual additions of what lies feature after feature, as a convolution leaves a picture's patches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x_BCT: torch.Tensor) -> torch.Tensor:
        x = x_BCT.transpose(1, 2)
        x = x + self.up(torch.relu(x))
        return self.down(torch.relu(x)) + x


@pytest.mark.plain("False")
@pytest.mark.parametrize("free", [False, True])
def test_what_is_added_to_an_8_bit_layer_is_handed_to_it_row_after_row(free: bool) -> None:
    """oneDNN takes its reference kernel for anything else."""
    x = torch.randn(2, 32, 12)
    target = target_of(Columns(), x, *STATIC)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(target.model, (x,), dynamic_shapes=({2: tokens} if free else None,))
    program = functional(program)
    before = program.module()(x)
    program = rewritten(program, target.settings)
    additions = [node for node in program.graph_module.graph.nodes if node.target is aten.add.Tensor]
    assert [sum(arg.target is ROW_BY_ROW for arg in node.args) for node in additions] == [1, 1]
    assert torch.equal(program.module()(x), before)
    for node in program.graph_module.graph.nodes:
        assert node.target is not ROW_BY_ROW or node.meta["val"].is_contiguous()
    other = torch.randn(2, 32, 20 if free else 12)
    wanted = target.model(other)
    assert ((program.module()(other) - wanted).norm() / wanted.norm()).item() < 1e-6


class Pooled(nn.Module):
    """Two layers read what a pooling gives, as the first block of a ResNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 16, 3), nn.MaxPool2d(3, 2, 1)
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        return self.left(x) * self.right(x)


@pytest.mark.plain("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_maximum_is_taken_of_integers_where_only_integers_are_read_of_it(dtype: str) -> None:
    x = torch.randn(2, 3, 24, 24)
    steps = (Step(name="dtype"),) if dtype == "bfloat16" else ()
    target = target_of(Pooled(), x, *steps, *STATIC)
    cases = target.workload.graphs(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    before = program.module()(x)
    share_integers(program.graph_module)
    (pool,) = [node for node in program.graph_module.graph.nodes if node.target is aten.max_pool2d.default]
    assert pool.args[0].target is QUANTIZE
    assert torch.equal(program.module()(x), before)
    module = program.module()
    keep_not_finite(module)
    assert torch.equal(module(x), before)
    x[1, 0, 5, 5] = math.nan
    assert torch.equal(module(x).isnan(), Pooled()(x).isnan())


class Neighbours(nn.Module):
    """Every way for a layer to stand beside another: after it, after a pooling, in a sum, and two that read one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 32, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.up, self.down = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.left, self.right, self.head = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(self.down(torch.relu(self.up(x))) + x)
        return self.head(torch.relu(self.left(x) + self.right(x)).mean((2, 3)))


NAMES = ("stem", "up", "down", "left", "right", "head")


def mixed(dtype: str, skip: tuple[str, ...]) -> tuple[Any, torch.Tensor]:
    """A target of `Neighbours` with some layers left in float, and its input."""
    x = torch.randn(2, 3, 24, 24)
    steps = (Step(name="dtype"),) if dtype == "bfloat16" else ()
    static = Step(name="int8_static", options={"skip": list(skip)})
    return target_of(Neighbours(), x, *steps, static, Step(name="compile")), x


@pytest.mark.slow
def test_a_residual_stays_in_float_where_the_sum_is_read_in_float() -> None:
    """Inductor takes a bfloat16 sum with dequantized integers for float32, and ruins the next layer's weight."""
    target, x = mixed("bfloat16", ("left",))
    cases = target.workload.graphs(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    before = program.module()(x)
    share_integers(program.graph_module)
    additions = [node for node in program.graph_module.graph.nodes if node.target is aten.add.Tensor]
    assert [arg for node in additions for arg in node.args if arg.target is DEQUANTIZE] == []
    assert torch.equal(program.module()(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [("left",), ("stem", "down", "right")])
def test_a_mixed_graph_computes_the_same_compiled(tmp_path, skip: tuple[str, ...]) -> None:
    check_mixed(tmp_path, "bfloat16", skip)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "skip", [s for n in range(6) for s in itertools.combinations(NAMES, n)], ids="+".join
)
def test_every_mixed_graph_computes_the_same_compiled(tmp_path, dtype: str, skip: tuple[str, ...]) -> None:
    check_mixed(tmp_path, dtype, skip)


def check_mixed(folder: Path, dtype: str, skip: tuple[str, ...]) -> None:
    """Node by node, with torch's own slow operators, against compiled code."""
    target, x = mixed(dtype, skip)
    cases = target.workload.graphs(target.compute_dtype)
    program = rewritten(export(target.model, cases)[cases[0].name], target.settings)
    with torch.no_grad():
        slow, original = program.module()(x), target.workload.build()(x)
    compile_program(program, folder / "model.pt2", target.settings.inductor)
    fast = Package(folder / "model.pt2", spec_of("forward", program)).run([x])
    assert (slow - original).norm() < 0.03 * original.norm()
    assert (fast - slow).norm() < 0.02 * slow.norm()


def test_export_leaves_no_checks_that_count_as_readers() -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.bfloat16).to(torch.float32) + 1

    workload = ModuleWorkload(Casts(), (torch.randn(4),))
    program = export(workload.build(), workload.cases(torch.float32)).popitem()[1]
    assert not [n for n in program.graph.nodes if n.target is aten._assert_tensor_metadata.default]
    x = torch.randn(4)
    torch.testing.assert_close(program.module()(x), x.bfloat16().float() + 1)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's int8 kernels are for x86 CPUs"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_fuses_activation_and_residual_into_the_layers(tmp_path, dtype: str) -> None:
    """It once fused nothing: export's own checks read every value a second time. The counters are Inductor's."""
    from torch._dynamo.utils import counters

    x = torch.randn(2, 8, 12, 12)
    steps = (Step(name="dtype"),) if dtype == "bfloat16" else ()
    target = target_of(Residual(), x, *steps, *STATIC)
    cases = target.workload.graphs(target.compute_dtype)
    program = rewritten(export(target.model, cases)[cases[0].name], target.settings)
    counters.clear()
    compile_program(program, tmp_path / "model.pt2", target.settings.inductor)
    found = counters["inductor"]
    assert found["qconv_weight_prepack_matcher_count"] == 4
    assert found["qlinear_weight_prepack_matcher_count"] == 1
    assert found["qconv_unary_matcher_count"] == 3  # the stem, `first` and `third`, each with its relu
    assert found["qconv2d_binary_matcher_count"] == 1  # `second` with the addition and the relu after it


def test_layers_are_ranked_without_calling_their_own_hooks() -> None:
    target = make_target(
        ModuleWorkload(Residual().eval(), (torch.randn(2, 8, 12, 12),)), get_device("cpu").identify()
    )
    ranking = rank_modules(target, (Step(name="int8_static"),))
    assert {each.name for each in ranking} == {"stem", "first", "second", "third", "head"}
    errors = [each.error for each in ranking]
    assert all(0 < error < 0.2 for error in errors)
    assert errors[0] == max(errors)  # the order counts time, too


class Routed(nn.Module):
    """Layers called by name, and one to which no row is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.expert = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(input=torch.relu(self.first(input=x)))
        return torch.cat([x, self.expert(x[:0])])


@pytest.mark.parametrize(("name", "left"), [("int8_static", 1), ("int8_dynamic", 0)])
def test_layers_called_by_name_or_on_no_rows_are_calibrated(name: str, left: int) -> None:
    if name == "int8_dynamic" and (missing := build.load_fault()):
        pytest.skip(missing)
    x = torch.randn(8, 32)
    ranking = rank_modules(target_of(Routed(), x), (Step(name=name),))
    assert {each.name for each in ranking} == {"first", "second"}
    target = target_of(Routed(), x, Step(name=name), Step(name="compile"))
    assert len(target.coverage[0].skipped) == left
    with torch.no_grad():
        expected = target.workload.build()(x)
        assert ((target.model(x) - expected).norm() / expected.norm()).item() < 0.05


@pytest.mark.parametrize("name", ["int8_static", "int8_dynamic", "int4_weight_only"])
def test_a_layer_to_skip_that_is_not_there_is_refused(name: str) -> None:
    steps = Step(name=name, options={"skip": ["secnd"]}), Step(name="compile")
    with pytest.raises(UnknownName, match=f"{name}:skip 'secnd'; did you mean 'second'"):
        target_of(Routed(), torch.randn(8, 32), *steps)


ON_AVX2 = """
import torch
from torch import nn
from torchwright.optimization.techniques.shared.int8 import STEPS, Int8Layer, activation_range, largest_weight
layer = nn.Linear(64, 32, bias=False)
nn.init.constant_(layer.weight, 1.0)
packed = Int8Layer(layer, activation_range(0.0, 1.0))
(scale, zero), x = packed.activation, torch.ones(16, 64)
q = torch.round(x / scale + zero).clamp(0, STEPS).to(torch.uint8)
weight = torch.ops.onednn.qlinear_prepack(packed.integers, None)
got = torch.ops.onednn.qlinear_pointwise(
    q, scale, zero, weight, packed.weight_scale, torch.zeros(32, dtype=torch.int32), None, 1.0, 0, torch.float32,
    "none", [], "",
)
print(largest_weight(), packed.integers.max().item(), (got - packed(x)).abs().max().item() / 64)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's kernels for AVX2")
def test_without_vnni_weights_are_as_small_as_sums_in_16_bits_need() -> None:
    """What the layer says that it computes is what oneDNN computes, where it adds products in 16 bits."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", ON_AVX2], env=environment, capture_output=True, text=True, check=True
    )
    largest, integer, error = done.stdout.split()
    assert int(largest) == int(integer) == 63
    assert float(error) < 1e-5


FRESH = """
import sys
import torch
from torch import nn
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.sensitivity import rank_modules
from torchwright.optimization.techniques.base import parse_step
from torchwright.workloads.module import ModuleWorkload

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
target = make_target(ModuleWorkload(model, (torch.randn(8, 64),)), get_device("cpu").identify())
print(*(each.name for each in rank_modules(target, [parse_step(sys.argv[1])])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["int8_dynamic", "int4_weight_only"])
def test_modules_are_ranked_in_a_process_that_has_done_nothing_else(step: str) -> None:
    """A search asks in such a process, where packed 8-bit layers once found no kernels."""
    if fault := build.load_fault():
        pytest.skip(fault)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, step], capture_output=True, text=True, timeout=200, check=False
    )
    assert sorted(done.stdout.split()) == ["0", "2"], done.stderr[-2000:]
