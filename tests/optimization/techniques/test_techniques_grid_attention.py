"""Attention with decomposed positions swapped in, against transformers' own layers in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.grid_attention import AttentionOverGrid, GridAttention
from torchwright.workloads.module import ModuleWorkload

ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative (Frobenius): sums in another order; weights and every step rounded to bfloat16."""


class Windows(nn.Module):
    """Two attention layers over windows of 5 x 5 places, heads of `size` features."""

    def __init__(self, kind: type[SamVisionAttention], size: int = 16, positions: bool = True) -> None:
        super().__init__()
        config = SamVisionConfig(hidden_size=2 * size, num_attention_heads=2, use_rel_pos=positions)
        self.layers = nn.ModuleList(kind(config, 5) for _ in range(2))
        for name, value in self.named_parameters():
            nn.init.normal_(value, std=1.0 if "rel_pos" in name else value.shape[-1] ** -0.5)

    def forward(self, x_BYXE: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BYXE = layer(x_BYXE)[0]
        return x_BYXE


def target_of(model: nn.Module, x: torch.Tensor) -> Any:
    return make_target(ModuleWorkload(model, x), get_device("cpu").identify())


@pytest.fixture(autouse=True)
def kernels() -> None:
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("kind", [SamVisionAttention, SamVisionSdpaAttention])
def test_it_computes_what_the_layers_did(kind: type[SamVisionAttention], dtype: torch.dtype) -> None:
    model, x = Windows(kind).eval(), torch.randn(7, 5, 5, 32)
    target = target_of(model, x)
    steps = [GridAttention().step()]
    if dtype == torch.bfloat16:
        steps.append(Step(name="dtype", options={}))
    apply_steps(target, steps)
    assert sum(isinstance(module, AttentionOverGrid) for module in target.model.modules()) == 2
    assert (target.coverage[-1].changed, target.coverage[-1].total) == (2, 2)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
        found = target.model(x)
    assert float((found.double() - wanted).norm() / wanted.norm()) <= ERROR[dtype]


def test_what_it_refuses() -> None:
    x = torch.randn(1, 5, 5, 32)
    for model, words in (
        (nn.Linear(32, 32), "no attention of the model has relative positions"),
        (Windows(SamVisionAttention, positions=False), "it knows no positions"),
        (Windows(SamVisionAttention, size=8), "heads of 8 features"),
    ):
        given = x[..., :16] if "8 features" in words else x
        assert words in str(GridAttention().refuse(target_of(model.eval(), given)))
    target = target_of(Windows(SamVisionAttention).eval(), x)
    with pytest.raises(RefusedTechnique, match="float16"):
        apply_steps(target, [Step(name="dtype", options={"dtype": "float16"}), GridAttention().step()])
