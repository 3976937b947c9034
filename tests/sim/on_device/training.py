"""Training on a simulated device gives the CPU's bits; run by tests/sim/test_sim_device.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import torchwright

BUNDLED = Path(torchwright.__file__).parent / "workloads" / "bundled"
STEPS = 10
Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
"""(model, batch, step) → loss"""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    )


def train(
    model: nn.Module,
    device: str,
    batches: list[torch.Tensor],
    loss_of: Loss,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Ten steps from one seed: the losses and the parameters after them."""
    torch.manual_seed(1)
    model = copy.deepcopy(model).to(device)
    if hasattr(model, "tie_weights"):  # PyTorch makes new parameters for a backend of another package
        model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch.to(device), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def same_training(
    model: nn.Module,
    batches: list[torch.Tensor],
    loss_of: Loss,
) -> None:
    losses, wanted = train(model, "cpu", batches, loss_of)
    found_losses, found = train(model, "sim", batches, loss_of)
    assert found_losses == losses
    assert losses[-1] != losses[0]
    different = [name for name in wanted if not wanted[name].equal(found[name])]
    assert not different


def test_a_resnet():
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 32, 32) for _ in range(STEPS)]

    def loss_of(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        labels = (torch.arange(len(batch)) + step).remainder(10).to(batch.device)
        return nn.functional.cross_entropy(model(batch), labels)

    same_training(resnet(), images, loss_of)


def test_the_bundled_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (BUNDLED / "calibration.txt").read_text(encoding="utf-8")[:20000]
    tokens = AutoTokenizer.from_pretrained(BUNDLED)(text, return_tensors="pt")["input_ids"][0]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).train()
    batches = [tokens[step * 128 : step * 128 + 128].view(2, 64) for step in range(STEPS)]
    same_training(model, batches, lambda model, batch, step: model(input_ids=batch, labels=batch).loss)
