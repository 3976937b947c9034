"""LayerNorm and RMSNorm forward and backward at the speed of memory, with PyTorch's own and torch.compile's.

    python -m benchmarks.train.norms [--widths 64 1024 4096] [--dtypes bfloat16] [--rounds N] [--json FILE]

A table by width. One thread's processor time, in turns, on tensors of 4 million numbers (8 or 16 MB). The limit
reads and writes the same bytes and computes nothing: a copy for forward, a sum of two tensors for backward, both into
memory that is there. Results of all contenders are new tensors. Ratios are medians over rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import run
from benchmarks.harness.turns import in_turns, ratio, seconds
from torchwright.hardware.kernels import norm

NUMBERS = 2**22
WIDTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EPS = 1e-6
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def of_torch(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The norm in float32, as a trainer computes it: with weights in float32 and a result in x's type."""
    if kind == "layer":
        return F.layer_norm(x.float(), weight.shape, weight, bias, EPS).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, weight, EPS).to(x.dtype)


def ours(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return norm.layer_norm(x, weight, bias, EPS) if kind == "layer" else norm.rms_norm(x, weight, EPS)


def main() -> None:
    options = run.options(__doc__, widths=WIDTHS, dtypes=DTYPES, rounds=15)
    run.need_kernels()
    torch.set_num_threads(1)
    rows = run.Rows(options.json)
    run.head(("norm", "type", "width", "pass", "GB/s", "of the limit", "over torch", "over torch.compile"))
    for kind in ("rms", "layer"):
        for name in options.dtypes:
            for width in options.widths:
                _table(rows, kind, name, width, options.rounds)


def _table(rows: run.Rows, kind: str, name: str, width: int, rounds: int) -> None:
    torch.compiler.reset()
    x = torch.randn(NUMBERS // width, width).to(DTYPES[name]).requires_grad_()
    parts = x, torch.rand(width).requires_grad_(), torch.rand(width).requires_grad_()
    grad, room = torch.randn_like(x), torch.empty_like(x)
    contenders: dict[str, Norm] = {
        "ours": partial(ours, kind),
        "torch": partial(of_torch, kind),
        "compiled": torch.compile(partial(of_torch, kind), dynamic=False),
    }
    limits = {"forward": lambda: room.copy_(x), "backward": lambda: torch.add(x, grad, out=room)}
    calls = {"forward": {who: partial(_forward, one, parts) for who, one in contenders.items()}}
    calls["backward"] = {
        who: partial(_backward, one(*parts), parts[: 3 if kind == "layer" else 2], grad)
        for who, one in contenders.items()
    }
    streams = {"forward": 2, "backward": 3}
    for step, named in calls.items():
        timed = {
            who: partial(_without_gradients, seconds, call, clock=time.process_time)
            for who, call in {"limit": limits[step], **named}.items()
        }
        taken = {who: found[2:] for who, found in in_turns(timed, rounds + 2).items()}
        moved = streams[step] * x.numel() * x.element_size()
        rate = moved / statistics.median(taken["ours"]) / 1e9
        over = {who: ratio(taken[who], taken["ours"]) for who in ("limit", "torch", "compiled")}
        row = {"norm": kind, "dtype": name, "width": width, "pass": step, "gb_per_s": rate, "over": over}
        rows.add(row, (kind, name, width, step, f"{rate:.1f}", *(f"{one:.2f}" for one in over.values())))


def _without_gradients(function: Any, *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return function(*args, **options)


def _forward(one: Norm, parts: tuple[torch.Tensor, ...]) -> None:
    with torch.enable_grad():  # with what backward needs
        one(*parts)  # type: ignore[call-arg]


def _backward(out: torch.Tensor, parts: tuple[torch.Tensor, ...], grad: torch.Tensor) -> None:
    torch.autograd.grad(out, parts, grad, retain_graph=True)


if __name__ == "__main__":
    sys.exit(main())
