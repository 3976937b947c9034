"""What batch invariance costs: our bfloat16 linear layer, whose rows do not depend on each other, beside PyTorch's.

    python benchmarks/determinism.py [--json FILE]

2048 → 8192 features, as in a model of 1.2 B parameters; weights are rotated, so that they come from memory. Both are
timed in turn, and the ratio is the median of the paired ones with its interval. It also prints in how many of 64 rows
PyTorch's result alone differs from its result among others: what the promise is worth.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import turns
from torchwright.core.scheme import BF16
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.linear import PackedLinear

K, N, COPIES, ROUNDS = 2048, 8192, 6, 40
ROWS = (1, 4, 16, 64, 256, 512)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="What batch invariance costs a bfloat16 linear layer.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    if fault := build.load_fault():
        raise SystemExit(fault)
    torch.manual_seed(0)
    weights = [torch.randn(N, K, dtype=torch.bfloat16) / K**0.5 for _ in range(COPIES)]
    layers = [PackedLinear(weight_NK, None, BF16) for weight_NK in weights]
    rows = []
    for count in ROWS:
        x_BK = torch.randn(count, K, dtype=torch.bfloat16)
        ours, theirs = _by_turns(x_BK, layers, weights)
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        rows.append(
            {
                "rows": count,
                "invariant_ms": 1000 * statistics.median(ours),
                "pytorch_ms": 1000 * statistics.median(theirs),
                "pytorch_over_invariant": ratio,
            }
        )
        ours_ms, theirs_ms = rows[-1]["invariant_ms"], rows[-1]["pytorch_ms"]
        print(
            f"{count:4} rows: {ours_ms:.2f} ms, F.linear {theirs_ms:.2f} ms; {ratio:.2f} of its speed",
            flush=True,
        )
    x_BK = torch.randn(64, K, dtype=torch.bfloat16)
    for name, call in (("invariant", layers[0]), ("F.linear", lambda x: F.linear(x, weights[0]))):
        print(f"{name}: {_changed(call, x_BK)} of 64 rows differ alone from among others")
    turns.write_json(options.json, rows)


def _by_turns(
    x_BK: torch.Tensor, layers: list[PackedLinear], weights: list[torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Seconds of each call, ours and PyTorch's, one after the other."""
    pairs = itertools.cycle(zip(layers, weights, strict=True))
    ours, theirs = list[float](), list[float]()
    for turn in range(ROUNDS + COPIES):
        layer, weight_NK = next(pairs)
        times = []
        for call in (lambda layer=layer: layer(x_BK), lambda weight_NK=weight_NK: F.linear(x_BK, weight_NK)):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        if turn >= COPIES:  # the first ones find out how to compute
            ours.append(times[0])
            theirs.append(times[1])
    return ours, theirs


def _changed(call: nn.Module | Callable[[torch.Tensor], torch.Tensor], x_BK: torch.Tensor) -> int:
    together_BN = call(x_BK)
    alone = [call(row_K[None])[0] for row_K in x_BK]
    return sum(not torch.equal(a_N, b_N) for a_N, b_N in zip(alone, together_BN, strict=True))


if __name__ == "__main__":
    main()
