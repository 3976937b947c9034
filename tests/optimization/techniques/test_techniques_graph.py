"""Folding batch norms, and channels-last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.channels_last import ChannelsLast
from torchwright.optimization.techniques.fold_batchnorm import FoldBatchNorm
from torchwright.optimization.techniques.shared.wrapping import plain_name, worst_error
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")


def make(model: nn.Module, *inputs: torch.Tensor) -> Target:
    """A target of a model whose batch norms have seen data."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_()
    workload = ModuleWorkload(model, inputs)
    workload.device = next(iter(inputs), torch.empty(0)).device.type
    return Target(model=workload.build(), workload=workload, device=CPU, properties=set())


def fold(target: Target, *fresh: torch.Tensor) -> list[str]:
    """Fold, check fresh inputs against the original, and return the names of the batch norms that are left."""
    with torch.no_grad():
        expected = target.workload.build()(*fresh)
        FoldBatchNorm().apply(target)
        torch.testing.assert_close(target.model(*fresh), expected, rtol=1e-3, atol=1e-4)
    return [
        name for name, m in target.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)), (2, 4, 16)),
        (nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)), (2, 4, 8, 8)),
        (nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8)), (2, 4, 5, 5, 5)),
        (nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.BatchNorm2d(8)), (2, 4, 5, 5)),
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), (16, 4)),
    ],
)
def test_fold_every_kind_of_layer(model: nn.Module, shape: tuple[int, ...]) -> None:
    target = make(model, torch.randn(shape))
    assert fold(target, torch.randn(shape)) == []
    assert (target.coverage[0].changed, target.coverage[0].total) == (1, 1)


def test_fold_leaves_alone_what_others_read() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm_a = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.b, self.norm_b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.norm_b(self.b(self.norm_a(y))) + y

    target = make(Skip(), torch.randn(2, 3, 4, 4))
    assert fold(target, torch.randn(2, 3, 4, 4)) == ["norm_a"]
    assert target.coverage[0].skipped == {"norm_a": "something else reads the output of the layer before it"}


def test_fold_sees_an_output_that_is_changed_in_place_or_returned() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.other, self.other_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> Any:
            y, z = self.conv(x), self.other(x)
            return self.norm(y), y, self.other_norm(z.relu_())

    target = make(Returned(), torch.randn(2, 3, 4, 4))
    with pytest.raises(RefusedTechnique, match="something else reads"):
        FoldBatchNorm().apply(target)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            nn.Sequential(nn.ConvTranspose2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)),
            "transposed convolution in groups",
        ),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), "not the output of a convolution"),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
            "statistics of the batch",
        ),
    ],
)
def test_fold_refuses_with_the_reason(model: nn.Module, reason: str) -> None:
    target = make(model, torch.randn(2, 3, 4, 4))
    before = target.model.state_dict()
    with pytest.raises(RefusedTechnique, match=reason):
        FoldBatchNorm().apply(target)
    assert list(target.model.state_dict()) == list(before)


def test_fold_refuses_a_parametrization() -> None:
    """A workload of a module has none left, one of another kind may."""
    target = make(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4))
    nn.utils.parametrizations.weight_norm(target.model.get_submodule("0"))
    with pytest.raises(RefusedTechnique, match="parametrization"):
        FoldBatchNorm().apply(target)


def test_fold_refuses_a_layer_that_is_used_twice() -> None:
    conv = nn.Conv2d(3, 3, 1)
    target = make(nn.Sequential(conv, nn.BatchNorm2d(3), conv), torch.randn(2, 3, 4, 4))
    with pytest.raises(RefusedTechnique, match="called 2 times"):
        FoldBatchNorm().apply(target)


def test_fold_restores_the_model_when_outputs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4))
    layers = list(target.model.children())
    monkeypatch.setattr(
        "torchwright.optimization.techniques.shared.batchnorm._fuse", lambda layer, norm: nn.Conv2d(3, 3, 1)
    )
    with pytest.raises(RefusedTechnique, match="outputs change by"):
        FoldBatchNorm().apply(target)
    assert list(target.model.children()) == layers


def test_linear_over_another_axis_is_not_folded() -> None:
    """A linear layer on (B, T, E) followed by a batch norm over T = E normalizes over another axis."""
    target = make(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(2, 8, 8))
    with pytest.raises(RefusedTechnique, match="another axis"):
        FoldBatchNorm().apply(target)


def test_channels_last_changes_strides_and_nothing_else() -> None:
    target = make(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 9, 9))
    technique = ChannelsLast()
    assert technique.refuse(target) is None
    technique.apply(target)
    fresh = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        found, expected = target.model(fresh), target.workload.build()(fresh)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    assert fresh.is_contiguous()
    assert target.coverage[0].changed == 2
    assert {plain_name(name) for name, _ in target.model.named_parameters()} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (nn.Conv1d(3, 3, 1), (2, 3, 8), "no 2-D convolution"),
        (nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 3, 1)), (2, 12), "no input is a 4-D tensor"),
    ],
)
def test_channels_last_refuses(model: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    assert reason in (ChannelsLast().refuse(make(model, torch.randn(shape))) or "")


def test_worst_error_sees_shapes_and_infinities() -> None:
    x = torch.tensor([1.0, float("inf")])
    assert worst_error([x], [x.clone()]) == 0
    assert worst_error([x], [torch.tensor([1.0, 2.0])]) == float("inf")
    assert worst_error([x], []) == float("inf")
    assert worst_error([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])]) == pytest.approx(0.1)
    assert worst_error([torch.tensor([1j])], [torch.tensor([1.5j])]) == pytest.approx(0.5)


@pytest.mark.cuda
def test_fold_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    target = make(model, torch.randn(2, 3, 9, 9, device="cuda"))
    assert fold(target, torch.randn(2, 3, 9, 9, device="cuda")) == []
    assert F.relu(target.model(torch.randn(2, 3, 9, 9, device="cuda"))).is_cuda
