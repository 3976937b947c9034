"""1x1 convolutions as linear layers: the same function in any layout, which are taken, and what others make of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.pointwise_linear import Pointwise
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Excited(nn.Module):
    """A depthwise-separable block with squeeze and excite, one layer shared, and what has to stay a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grow, self.norm = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.shared = nn.Conv2d(16, 16, 1, padding="same")
        self.halve, self.grouped = nn.Conv2d(16, 16, 1, stride=2), nn.Conv2d(16, 16, 1, groups=4)
        assert self.norm.running_mean is not None
        self.norm.running_mean.normal_()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.grow(self.depth(self.stem(image)))))
        x = x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.grouped(self.halve(self.shared(self.shared(x)) + x))


def applied(model: nn.Module, image: torch.Tensor, *names: str) -> Target:
    target = make_target(ModuleWorkload(model.eval(), image), get_device("cpu").facts())
    apply_steps(target, [Step(name=name) for name in names])
    return target


@pytest.mark.parametrize("steps", [(), ("channels_last",)])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_function_in_any_layout(steps: tuple[str, ...], rows: int) -> None:
    model, image = Excited(), torch.randn(rows, 3, 17, 13)
    target = applied(model, image, *steps, "pointwise_linear")
    with torch.no_grad():
        wanted = model.double()(image.double())
        torch.testing.assert_close(target.model(image).double(), wanted, rtol=1e-4, atol=1e-5)
    (coverage,) = [c for c in target.coverage if c.technique == "pointwise_linear"]
    assert (coverage.changed, coverage.total) == (4, 8)
    assert {name.split(".")[-1] for name in coverage.skipped} == {"stem", "depth", "halve", "grouped"}


def test_one_picture_without_a_batch() -> None:
    layer, image = nn.Conv2d(6, 10, 1), torch.randn(6, 5, 4)
    torch.testing.assert_close(Pointwise(layer)(image), layer(image))
    assert Pointwise(layer).weight.shape == layer.weight.shape


def test_channels_side_by_side_are_not_copied() -> None:
    x = torch.randn(2, 16, 5, 5).to(memory_format=torch.channels_last)
    layer = Pointwise(nn.Conv2d(16, 32, 1))
    seen: list[torch.Tensor] = []
    layer.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    y = layer(x)
    assert seen[0].is_contiguous()
    assert seen[0].data_ptr() == x.data_ptr()
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_batch_norms_are_folded_before() -> None:
    target = applied(Excited(), torch.randn(1, 3, 16, 16), "pointwise_linear")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in target.model.modules())


def test_they_are_layers_that_8_bit_kernels_take() -> None:
    target = applied(
        Excited(), torch.randn(1, 3, 16, 16), "channels_last", "pointwise_linear", "int8_dynamic", "compile"
    )
    (coverage,) = [c for c in target.coverage if c.technique == "int8_dynamic"]
    assert coverage.changed == coverage.total == 4


def test_nothing_to_do_is_said() -> None:
    with pytest.raises(RefusedTechnique, match="no 2-D convolution of one pixel"):
        applied(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), "pointwise_linear")
