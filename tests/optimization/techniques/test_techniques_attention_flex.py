"""FlexAttention with the user's functions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import compile_program, export
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.attention import SwitchAttention
from torchwright.testing.models import SelfAttention
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")
WINDOW = 48


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(model: nn.Module, *inputs: torch.Tensor) -> Target:
    workload = ModuleWorkload(model, inputs)
    return Target(model=workload.build(), workload=workload, device=CPU, properties={"eager"})


def distance_bias(score, batch, head, query, key):
    return score - (query - key) * torch.exp2(-(head + 1.0))


def in_window(batch, head, query, key):
    return (query >= key) & (query - key < WINDOW)


class Biased(nn.Module):
    """Attention with a dense mask: a bias by distance and head (Press et al., 2022) in a causal window."""

    score_mod = staticmethod(distance_bias)
    mask_mod = staticmethod(in_window)

    def __init__(self, window: int = WINDOW) -> None:
        super().__init__()
        self.qkv, self.window = nn.Linear(64, 192), window

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q, k, v = self.qkv(x_BTE).view(B, T, 3, 4, 16).permute(2, 0, 3, 1, 4)
        distance = torch.arange(T)[:, None] - torch.arange(T)
        bias = -distance * torch.exp2(-(torch.arange(4) + 1.0))[:, None, None]
        bias = bias.masked_fill((distance < 0) | (distance >= self.window), -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(B, T, E)


def test_without_attention_nothing_is_wrapped() -> None:
    model = nn.Linear(4, 4)
    model.mask_mod = in_window  # type: ignore[assignment]
    with pytest.raises(RefusedTechnique, match="changes nothing here"):
        SwitchAttention(implementation="flex").apply(make(model, torch.randn(1, 4)))


@pytest.mark.slow
def test_functions_of_the_model_compute_what_its_mask_does(tmp_path: Path) -> None:
    """Eagerly and compiled ahead of time, with other values and another number of rows than the example's."""
    target = make(Biased(), torch.randn(2, 160, 64))
    assert [v.implementation for v in SwitchAttention().variants(target)] == ["flex", "blocked"]
    technique = SwitchAttention(implementation="flex")
    assert technique.refuse(target) is None
    original = target.model
    technique.apply(target)
    assert target.coverage[0].kernel == "FlexAttention with the model's score_mod and mask_mod"
    x = torch.randn(3, 160, 64)
    torch.testing.assert_close(target.model(x), original(x), rtol=1e-4, atol=1e-5)
    program = export(target.model, target.workload.cases(torch.float32))["forward"]
    compile_program(program, tmp_path / "model.pt2", {})
    x = torch.randn(2, 160, 64)
    got = Package(tmp_path / "model.pt2", spec_of("forward", program)).run([x])
    torch.testing.assert_close(got, original(x), rtol=1e-4, atol=1e-5)


def test_functions_that_say_something_else_are_refused() -> None:
    target = make(Biased(window=WINDOW + 1), torch.randn(2, 160, 64))
    original = target.model
    with pytest.raises(RefusedTechnique, match="computes something else here"):
        SwitchAttention(implementation="flex").apply(target)
    assert target.model is original


def test_flex_needs_functions_or_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(SelfAttention(), torch.randn(2, 16, 64))
    technique = SwitchAttention(implementation="flex")
    assert "has no score_mod or mask_mod" in (technique.refuse(target) or "")
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert "from AVX2 on" in (technique.refuse(target) or "")
