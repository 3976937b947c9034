"""SAM's attention with decomposed positions: transformers' layer beside Torchwright's kernel, in turns.

    python benchmarks/grid_attention.py [--rounds 5] [--only windows|whole] [--device cpu|cuda]

A layer of ViT-B at 1024 x 1024 pixels: 25 windows of 14 x 14 places, or the whole picture of 64 x 64. Both have the
layer's two linear layers, whose time alone is the last column. On a CPU one thread, and its processor time; on a card
(the default where there is one) the time of calls one after another, as a model makes them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

import turns
from torchwright.hardware.devices import default_name
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.gpu import operators
from torchwright.optimization.techniques.grid_attention import AttentionOverGrid

FORMS = {"windows": (25, 14), "whole": (1, 64)}
"""Batch and places of a side."""
CALLS = 20
"""Of a turn on a card."""


class LinearAlone(nn.Module):
    """The layer's linear layers, with values in the place of what is attended to."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.qkv, self.proj = original.qkv, original.proj

    def forward(self, x_BYXE: torch.Tensor) -> torch.Tensor:
        return self.proj(self.qkv(x_BYXE)[..., : x_BYXE.shape[-1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=FORMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_name())
    options = parser.parse_args()
    on_card = options.device == "cuda"
    if fault := operators.load_fault() if on_card else build.load_fault():
        raise SystemExit(fault)
    torch.set_num_threads(1)
    turns.print_machine()
    print("| layer | type | matrix products | SDPA | ours | SDPA's by ours | linear layers alone |")
    print("|---|---|---|---|---|---|---|")
    for form in [options.only] if options.only else FORMS:
        for dtype in (torch.float32, torch.bfloat16):
            print(row(form, dtype, options.rounds, options.device), flush=True)


@torch.inference_mode()
def row(form: str, dtype: torch.dtype, rounds: int, device: str) -> str:
    batch, side = FORMS[form]
    plain, fused = (kind(SamVisionConfig(), side) for kind in (SamVisionAttention, SamVisionSdpaAttention))
    fused.load_state_dict(plain.state_dict())
    layers = [
        layer.to(device, dtype).eval()
        for layer in (plain, fused, AttentionOverGrid(fused), LinearAlone(fused))
    ]
    x_BYXE = torch.randn(batch, side, side, 768).to(device, dtype)
    clock = seconds_on_card if device == "cuda" else processor_seconds
    seconds = [list[float]() for _ in layers]
    for layer in layers:
        layer(x_BYXE)
    for _, order in zip(range(rounds), turns.orders(range(len(layers))), strict=False):
        for number in order:
            seconds[number].append(clock(layers[number], x_BYXE))
    ratio = statistics.median(a / b for a, b in zip(seconds[1], seconds[2], strict=True))
    products, sdpa, ours, linear = (
        f"{statistics.median(each) * 1e3:,.{2 if device == 'cuda' else 0}f} ms" for each in seconds
    )
    name = str(dtype).removeprefix("torch.")
    return f"| {form} | {name} | {products} | {sdpa} | {ours} | {ratio:.2f}x | {linear} |"


def processor_seconds(layer: Callable[[torch.Tensor], Any], x_BYXE: torch.Tensor) -> float:
    begun = time.thread_time()
    layer(x_BYXE)
    return time.thread_time() - begun


def seconds_on_card(layer: Callable[[torch.Tensor], Any], x_BYXE: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        layer(x_BYXE)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / CALLS


if __name__ == "__main__":
    main()
