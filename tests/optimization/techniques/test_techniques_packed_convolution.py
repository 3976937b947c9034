"""Convolutions on our kernels: which are taken, what follows them in the graph, and rows left free."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import (
    FreeSizes,
    compile_program,
    export,
    export_one,
    functional,
    read_programs,
    write_programs,
)
from torchwright.optimization.engines.dispatch.call import parameters_of, spec_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.module import OptimizedModule
from torchwright.optimization.engines.dispatch.spec import InputCapabilities
from torchwright.optimization.techniques.packed_convolution import PackedConv2d, PackedConvolution
from torchwright.optimization.techniques.shared.convolution_graph import fuse_convolutions
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.skipif(bool(build.load_fault()), reason="the kernels are not built here")
STEPS = (Step(name="packed_convolution"), Step(name="compile"))
ERROR = 1e-5


class Residual(nn.Module):
    """MobileNetV3's block between a stem and a head: expand, depthwise, squeeze and excite, project, add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.expand, self.norm = nn.Conv2d(24, 72, 1, bias=False), nn.BatchNorm2d(72)
        self.depth = nn.Conv2d(72, 72, 5, padding="same", groups=72)
        self.squeeze, self.excite = nn.Conv2d(72, 8, 1), nn.Conv2d(8, 72, 1)
        self.project = nn.Conv2d(72, 24, 1)
        self.grouped, self.dilated = (
            nn.Conv2d(24, 24, 1, groups=4),
            nn.Conv2d(24, 24, 3, dilation=2, groups=24),
        )
        assert self.norm.running_mean is not None
        self.norm.running_mean.normal_()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        y = F.relu6(self.depth(F.hardswish(self.norm(self.expand(x)))))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = self.project(y * scale) + x
        return self.dilated(self.grouped(x))


def reads_planes() -> bool:
    """Whether a picture's first layer is one of ours."""
    return torch.ops.torchwright.isa() in ("amx", "avx512")


def applied(model: nn.Module, x: torch.Tensor, *steps: Step) -> Any:
    target = make_target(ModuleWorkload(model.eval(), (x,)), get_device("cpu").identify())
    apply_steps(target, steps or STEPS)
    return target


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    exact = wanted.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


def test_which_layers_are_taken_and_why_others_are_not() -> None:
    model, x = Residual(), torch.randn(2, 3, 33, 29)
    wanted = model.eval()(x)
    target = applied(model, x)
    (coverage,) = [c for c in target.coverage if c.technique == "packed_convolution"]
    first = reads_planes()
    assert (coverage.changed, coverage.total) == (5 + first, 8)
    reasons = {name.split(".")[-1]: reason for name, reason in coverage.skipped.items()}
    assert set(reasons) == {"grouped", "dilated"} | (set() if first else {"stem"})
    assert first or "over all channels" in reasons["stem"]
    assert "groups" in reasons["grouped"]
    assert "dilated" in reasons["dilated"]
    with torch.no_grad():
        assert relative(target.model(x), wanted) < ERROR


def test_the_first_layer_reads_a_picture_as_it_comes() -> None:
    """In planes no pass puts them side by side; however they lie the result is the same to the bit."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.Hardswish()),
        torch.randn(2, 3, 33, 29),
    )
    if not reads_planes():
        with pytest.raises(RefusedTechnique, match="no 1x1 or depthwise"):
            applied(model, x)
        return
    wanted = model(x)
    target = applied(model, x)
    cases = target.workload.cases(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    fuse_convolutions(program.graph_module)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == ["torchwright.conv_dense.default"]
    got = program.module()(x)
    assert relative(got, wanted) < ERROR
    assert torch.equal(program.module()(x.contiguous(memory_format=torch.channels_last)), got)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linear_layers_of_few_rows_are_taken(rows: int) -> None:
    """Behind a mean of pictures, and among places that are no pictures."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Conv2d(16, 40, 1), nn.Linear(40, 10)
            self.shared = nn.Linear(10, 10, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(F.hardswish(self.layer(x)).mean((2, 3)))
            return self.shared(self.shared(y)[:, None, None])

    model, x = Headed(), torch.randn(rows, 16, 6, 5)
    wanted = model(x)
    target = applied(model, x)
    (coverage,) = [c for c in target.coverage if c.technique == "packed_convolution"]
    taken = reads_planes() and rows <= 8
    assert coverage.changed == 1 + 2 * taken
    assert taken or set(coverage.skipped) == {"head", "shared"}
    with torch.no_grad():
        got = target.model(x)
        assert relative(got, wanted) < ERROR
        more = torch.randn(11, 16, 3, 4)
        assert relative(target.model(more), model(more)) < ERROR
    assert got.shape == wanted.shape
    if taken:
        assert torch.equal(target.model.get_submodule("head").weight, model.head.weight)


def test_what_follows_a_layer_joins_it() -> None:
    model, x = Residual(), torch.randn(2, 3, 33, 29)
    target = applied(model, x)
    cases = target.workload.cases(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    before = program.module()(x)
    fuse_convolutions(program.graph_module)
    found = [node for node in program.graph.nodes if "torchwright" in str(node.target)]
    dense = [n.args[6:8] + tuple(map(bool, n.args[8:])) for n in found if "conv_dense" in str(n.target)]
    assert dense == [
        *[(24, "none", False)] * reads_planes(),
        (72, "hardswish", False),
        (8, "relu", False),
        (72, "hardsigmoid", False),
        (24, "none", True, True),  # adds the block's input, and scales its own
    ]
    assert not any(node.target is torch.ops.aten.mul.Tensor for node in program.graph.nodes)
    assert [n.args[6] for n in found if "depthwise" in str(n.target)] == ["relu6"]
    assert sum("image_mean" in str(node.target) for node in found) == 1
    assert relative(program.module()(x), before) < ERROR


@pytest.mark.plain("<lambda>2", "<lambda>3")
@pytest.mark.parametrize(
    "pool",
    [
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d(2),
        lambda y: y.mean((2, 3)),
        lambda y: y.mean([-1, -2], keepdim=True),
        lambda y: y.mean(3),
        lambda y: y.mean((1, 2)),
    ],
)
def test_the_mean_over_an_image_is_ours_and_no_other_is(pool: Any) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 20, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pool(self.layer(x))

    model, x = Pooled(), torch.randn(2, 16, 6, 5)
    wanted = model(x)
    target = applied(model, x)
    cases = target.workload.cases(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    fuse_convolutions(program.graph_module)
    ours = [node for node in program.graph.nodes if "image_mean" in str(node.target)]
    assert len(ours) == (wanted[0].numel() == 20)
    got = program.module()(x)
    assert got.shape == wanted.shape
    assert relative(got, wanted) < ERROR


def test_a_value_that_others_read_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return F.relu(y) - y + self.layer(x) * 2

    model, x = Twice(), torch.randn(1, 16, 5, 5)
    wanted = model(x)
    target = applied(model, x)
    cases = target.workload.cases(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    fuse_convolutions(program.graph_module)
    found = [node for node in program.graph.nodes if "conv_dense" in str(node.target)]
    assert [node.args[7] for node in found] == ["none"] * len(found)
    assert relative(program.module()(x), wanted) < ERROR


@pytest.mark.slow
def test_a_graph_from_a_file_takes_any_number_of_images_in_any_layout(tmp_path: Any) -> None:
    model, x, fresh = Residual(), torch.randn(2, 3, 33, 29), torch.randn(5, 3, 33, 29)
    wanted = model.eval()(fresh)
    free = ({0: torch.export.Dim.AUTO},)
    with torch.no_grad():
        program = functional(torch.export.export(applied(model, x).model, (x,), dynamic_shapes=free))
    fuse_convolutions(program.graph_module)
    write_programs(tmp_path, {"forward": program})
    kept = read_programs(tmp_path)["forward"].module()
    with torch.no_grad():
        for given in (fresh, fresh.contiguous(memory_format=torch.channels_last)):
            assert relative(kept(given), wanted) < ERROR


@pytest.mark.slow
def test_a_compiled_package_takes_any_number_of_images_in_any_layout(tmp_path: Any) -> None:
    model, x, path = Residual(), torch.randn(2, 3, 33, 29), tmp_path / "model.pt2"
    target = applied(model, x)
    (case,) = target.workload.cases(target.compute_dtype)
    program = rewritten(export_one(target.model, case, FreeSizes(rows=(0,))), target.settings)
    compile_program(program, path, target.settings.inductor)
    dispatcher = CallDispatcher(
        [Package(path, spec_of("forward", program))],
        takes=InputCapabilities(parameters=parameters_of(model.forward)),
    )
    for images in (2, 5, 8):
        fresh = torch.randn(images, 3, 33, 29)
        strided = torch.randn(2 * images, 4, 34, 29)[::2, 1:, :33]
        flipped = torch.randn(images, 3, 29, 33).transpose(2, 3)
        for given in (fresh, fresh.contiguous(memory_format=torch.channels_last), strided, flipped):
            assert relative(OptimizedModule(dispatcher)(given), model(given)) < ERROR


def test_weights_that_models_read_are_those_of_the_convolution() -> None:
    for layer in (nn.Conv2d(5, 37, 1), nn.Conv2d(40, 40, 3, groups=40, padding=1), nn.Conv2d(4, 7, 1)):
        assert torch.equal(PackedConv2d(layer, tiles=False).weight, layer.weight)
        torch.testing.assert_close(
            PackedConv2d(layer, tiles=True).weight, layer.weight, rtol=2.0**-17, atol=0
        )
        for dtype in (torch.bfloat16, torch.float16):
            narrow = layer.to(dtype)
            assert torch.equal(PackedConv2d(narrow, tiles=False).weight, narrow.weight)


def test_float16_comes_before_and_stays_the_type_of_images() -> None:
    model, x = Residual().eval(), torch.randn(2, 3, 33, 29)
    with torch.no_grad():
        wanted = model.double()(x.double())
    half = Step(name="dtype", options={"dtype": "float16"})
    target = applied(model.float(), x, half, *STEPS)
    packed = [layer for layer in target.model.modules() if isinstance(layer, PackedConv2d)]
    assert {layer.dtype for layer in packed} == {torch.float16}
    # Without tiles dense layers of float16 are oneDNN's.
    assert len(packed) == (5 if torch.ops.torchwright.isa() == "amx" else 1)
    with torch.no_grad():
        assert relative(target.model(x.half()), wanted) < 3e-3


def test_a_model_without_such_a_layer_is_refused_without_a_call() -> None:
    """A spectrogram transformer's calls take two seconds."""

    class Silent(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it was called")

    model = nn.Sequential(Silent(16, 16, 1))
    target = make_target(ModuleWorkload(model, (torch.randn(1, 16, 4, 4),)), get_device("cpu").identify())
    assert "no 1x1 or depthwise" in (PackedConvolution().refuse(target) or "")


def test_a_model_that_would_gain_nothing_is_refused_with_the_number() -> None:
    device = get_device("cpu").identify()

    def refusal(model: nn.Module, x: torch.Tensor, **options: Any) -> str:
        return str(
            PackedConvolution(**options).refuse(make_target(ModuleWorkload(model.eval(), (x,)), device))
        )

    image = torch.randn(1, 16, 8, 8)
    assert "no 2-D convolution" in refusal(nn.Linear(4, 4), torch.randn(1, 4))
    small = nn.Sequential(nn.Conv2d(16, 16, 1))
    device = dataclasses.replace(device, tflops={"float32": 1e-4})
    large = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1))
    at_any_size = reads_planes()  # the same instruction sets
    assert (refusal(small, image, most_products=1000) == "None") == at_any_size
    if torch.ops.torchwright.isa() == "amx":  # its tiles gain on large layers, too
        assert refusal(large, image) == "None"
    else:
        assert "save 0.02 ms of more than" in refusal(large, torch.randn(1, 16, 64, 64))
        headed = nn.Sequential(*large, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
        saved = "0.04" if reads_planes() else "0.02"
        assert f"save {saved} ms of more than" in refusal(headed, torch.randn(1, 16, 64, 64))
    small.bfloat16()
    assert "no 1x1 or depthwise" in refusal(small, image.bfloat16(), most_products=1000)
    with pytest.raises(RefusedTechnique, match="no 1x1 or depthwise"):
        applied(nn.Sequential(nn.Conv2d(8, 16, 5)), image[:, :8])
