"""LPIPS beside a plain AlexNet, and beside the package's own number where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.models.diffusion.perceptual import BACKBONE, Backbone, find_backbone, lpips
from torchwright.models.diffusion.score import alike

CHANNELS = (64, 192, 384, 256, 256)
TAPS = (1, 4, 7, 9, 11)


def alexnet() -> nn.Sequential:
    """As torchvision builds it, without what classifies."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )


def plain_lpips(
    network: nn.Sequential, weights: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> float:
    """Of one pair (3, H, W) from 0 to 1, place by place and channel by channel as the paper writes it."""
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    total, pair = 0.0, [((2 * x - 1 - shift[:, None, None]) / scale[:, None, None])[None] for x in (a, b)]
    taps = iter(weights)
    for number, layer in enumerate(network):
        pair = [layer(x) for x in pair]
        if number in TAPS:
            one, other = (x[0].double().flatten(1).T for x in pair)
            weight = next(taps).flatten().double()
            places = [
                (weight * (p / (p.norm() + 1e-10) - q / (q.norm() + 1e-10)) ** 2).sum()
                for p, q in zip(one, other, strict=True)
            ]
            total += float(sum(places) / len(places))
    return total


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """An AlexNet with random weights, in a cache of its own as torchvision would have left it."""
    network = alexnet()
    checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    torch.save(
        {f"features.{name}": value for name, value in network.state_dict().items()}, checkpoints / BACKBONE
    )
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return network


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A package `lpips` that has weights, and code that nobody may run."""
    weights = [torch.rand(1, channels, 1, 1) for channels in CHANNELS]
    place = folder / "site" / "lpips" / "weights" / "v0.1"
    place.mkdir(parents=True)
    torch.save({f"lin{i}.model.1.weight": w for i, w in enumerate(weights)}, place / "alex.pth")
    (folder / "site" / "lpips" / "__init__.py").write_text("raise AssertionError('its code was run')")
    monkeypatch.syspath_prepend(folder / "site")
    return weights


def test_it_is_the_papers(cache: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = install(tmp_path, monkeypatch)
    before = torch.rand(2, 3, 67, 49)
    after = (before + 0.2 * torch.randn(before.shape)).clamp(0, 1)
    backbone = find_backbone((67, 49))
    assert isinstance(backbone, Backbone)
    with torch.no_grad():
        found = lpips(backbone, before, after)
        wanted = [plain_lpips(cache, weights, a, b) for a, b in zip(before, after, strict=True)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4, rel=1e-4)
    assert lpips(backbone, before, before).tolist() == [0.0, 0.0]


def test_it_is_the_packages_own_number(cache: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package runs on the AlexNet above: a torchvision of any build is not asked for."""
    if importlib.util.find_spec("lpips") is None:
        pytest.skip("the package lpips is not installed")
    models = types.ModuleType("torchvision.models")
    models.alexnet = lambda pretrained: types.SimpleNamespace(features=cache)  # type: ignore[attr-defined]
    vision = types.ModuleType("torchvision")
    vision.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    package = importlib.import_module("lpips")

    theirs = package.LPIPS(net="alex", verbose=False)
    before = torch.rand(3, 3, 96, 64)
    after = (before + torch.rand(3, 1, 1, 1) * torch.randn(before.shape)).clamp(0, 1)
    backbone = find_backbone((96, 64))
    assert isinstance(backbone, Backbone)
    with torch.no_grad():
        wanted = theirs(before, after, normalize=True).flatten().tolist()
        found = lpips(backbone, before, after).tolist()
    assert found == pytest.approx(wanted, abs=1e-4)
    assert max(wanted) > 1e-3


def test_the_budget_is_on_it(cache: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    before = {"pictures": torch.rand(3, 3, 40, 40), "latents": torch.rand(3, 4)}
    after = before | {"pictures": (before["pictures"] + 0.1 * torch.rand(3, 3, 40, 40)).clamp(0, 1)}
    found = alike(before, after)
    assert found.metric == "LPIPS"
    assert not found.higher_is_better
    assert 0 < found.drop == found.value <= found.drop_high
    assert found.extras["worst_lpips"] >= found.drop
    assert alike(before, before).drop == 0


def test_what_is_missing_is_said(
    cache: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert "31 pixels" in str(find_backbone((30, 64)))
    backbone = tmp_path / "torch" / "hub" / "checkpoints" / BACKBONE
    backbone.write_bytes(b"no file of torch")
    assert "cannot be read" in str(find_backbone((64, 64)))
    backbone.unlink()
    assert "nothing is downloaded" in str(find_backbone((64, 64)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in str(find_backbone((64, 64)))
    pictures = {"pictures": torch.rand(2, 3, 64, 64), "latents": torch.rand(2, 4)}
    assert alike(pictures, pictures).metric == "multi-scale SSIM"
