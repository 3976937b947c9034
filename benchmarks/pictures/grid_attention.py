"""SAM's attention with decomposed positions: transformers' layer and Torchwright's kernel, in turns.

    python -m benchmarks.pictures.grid_attention [--rounds 5] [--only windows|whole] [--device cpu|cuda]

A layer of ViT-B at 1024 x 1024 pixels: 25 windows of 14 x 14 places, or the whole picture of 64 x 64. Both have the
layer's two linear layers, whose time alone is the last column. On a CPU it is the processor time of one thread; on a
card (the default if there is one) the time of calls one after another, as a model makes them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from transformers import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

from benchmarks.harness import run
from benchmarks.harness.turns import ratio, timed
from torchwright.hardware.devices import default_name
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.gpu import operators
from torchwright.optimization.techniques.grid_attention import AttentionOverGrid

FORMS = {"windows": (25, 14), "whole": (1, 64)}
"""Batch and places of a side."""
CALLS = 20
"""Calls of a turn on a card."""
COLUMNS = (
    *("layer", "type", "matrix products", "SDPA", "ours"),
    *("SDPA's by ours", "linear layers alone"),
)


class LinearAlone(nn.Module):
    """The layer's linear layers, with values in place of the attention's result."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.qkv, self.proj = original.qkv, original.proj

    def forward(self, x_BYXE: torch.Tensor) -> torch.Tensor:
        return self.proj(self.qkv(x_BYXE)[..., : x_BYXE.shape[-1]])


def main() -> None:
    device = run.Option(choices=("cpu", "cuda"), default=default_name())
    options = run.options(__doc__, json=False, rounds=5, only=tuple(FORMS), device=device)
    if fault := operators.load_fault() if options.device == "cuda" else build.load_fault():
        raise SystemExit(fault)
    torch.set_num_threads(1)
    run.Rows(columns=COLUMNS)
    for form in options.only:
        for dtype in (torch.float32, torch.bfloat16):
            print(run.line(row(form, dtype, options.rounds, options.device)), flush=True)


@torch.inference_mode()
def row(form: str, dtype: torch.dtype, rounds: int, device: str) -> list[str]:
    batch, side = FORMS[form]
    plain, fused = (kind(SamVisionConfig(), side) for kind in (SamVisionAttention, SamVisionSdpaAttention))
    fused.load_state_dict(plain.state_dict())
    modules = {
        "products": plain,
        "sdpa": fused,
        "ours": AttentionOverGrid(fused),
        "linear": LinearAlone(fused),
    }
    layers = {name: module.to(device, dtype).eval() for name, module in modules.items()}
    x_BYXE = torch.randn(batch, side, side, 768).to(device, dtype)
    calls = {name: lambda layer=layer: layer(x_BYXE) for name, layer in layers.items()}
    for call in calls.values():
        call()
    card = device == "cuda"
    found = timed(calls, rounds, CALLS if card else 1, _card_clock if card else time.thread_time)
    ms = {
        name: f"{statistics.median(each) * 1e3:,.{2 if device == 'cuda' else 0}f} ms"
        for name, each in found.items()
    }
    gain = f"{ratio(found['sdpa'], found['ours']):.2f}x"
    kind = str(dtype).removeprefix("torch.")
    return [form, kind, ms["products"], ms["sdpa"], ms["ours"], gain, ms["linear"]]


def _card_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
