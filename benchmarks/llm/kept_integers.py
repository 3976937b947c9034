"""Weights that stay as a checkpoint has them (integers, MXFP4, FP8), against our own 4-bit schemes and bfloat16.

    python -m benchmarks.llm.kept_integers [--parts 2880x5760 2048x8192] [--rows 1 4 16] [--rounds N] [--json FILE]

A part is a layer's input and output features. One thread's processor time, in turns; copies of the random weights are
rotated, so that they come from memory. Ratios are medians over rounds, above one where the kept integers are faster.
`w4a16` and `w4a8` have groups of 32, as where nobody asks for others. Scales are float16 numbers and zeros whole, as in
AWQ and GPTQ; "float32" has other offsets, as GGUF's Q4_K has. `fp8` is in blocks of 128 x 128.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.turns import in_turns, ratio, seconds
from torchwright.core.scheme import BF16, FP8, MXFP4, W4A8, W4A16, W4BF16, Scheme, scheme_of
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.weight import SmallFloats

SHAPES = ["2880x5760", "2048x8192"]
ROWS = [1, 2, 4, 8, 16, 32, 128]
COPIES = 6
"""Copies in 4 bits are 53 MB: more than the last level of cache that one core is given."""
OWN = (W4A16, W4A8, BF16)
KEPT = tuple(scheme_of(W4BF16.name, group) for group in (32, 64, 128))
FLOATS = (MXFP4, scheme_of(FP8.name, 128))


@torch.inference_mode()
def main() -> None:
    options = run.options(__doc__, parts=SHAPES, rows=ROWS, rounds=40)
    run.need_kernels()
    torch.set_num_threads(1)
    rows = run.Rows(options.json)
    run.head(("layer", "scheme", "rows", "ms", "MB", "GB/s", *(f"over {scheme}" for scheme in OWN)))
    for shape in options.parts:
        K, N = map(int, shape.split("x"))
        kinds = {str(scheme): partial(_own, scheme) for scheme in OWN}
        kinds |= {f"{scheme}": partial(_kept, scheme, 8) for scheme in KEPT}
        kinds |= {f"{scheme}, float32": partial(_kept, scheme, 7.5) for scheme in KEPT}
        kinds |= {str(scheme): partial(_floats, scheme) for scheme in FLOATS}
        layers = {name: [make(K, N, seed) for seed in range(COPIES)] for name, make in kinds.items()}
        for count in options.rows:
            _compare(rows, shape, layers, torch.randn(count, K, dtype=torch.bfloat16), options.rounds)


def _compare(
    rows: run.Rows, shape: str, layers: dict[str, list[PackedLinear]], x_BK: torch.Tensor, rounds: int
) -> None:
    turns = {name: itertools.cycle(copies) for name, copies in layers.items()}
    calls = {name: partial(_time_next, copies, x_BK) for name, copies in turns.items()}
    taken = {name: found[COPIES:] for name, found in in_turns(calls, rounds + COPIES).items()}
    for name, found in taken.items():
        ms, size = 1000 * statistics.median(found), layers[name][0].packed.nbytes
        against = {str(own): ratio(taken[str(own)], found) for own in OWN}
        row = {"layer": shape, "scheme": name, "rows": len(x_BK), "ms": ms, "bytes": size, "over": against}
        cells = (shape, name, len(x_BK), f"{ms:.3f}", f"{size / 1e6:.1f}", f"{size / ms / 1e6:.1f}")
        rows.add(row, (*cells, *(f"{x:.2f}x" for x in against.values())))


def _time_next(layers: Any, x_BK: torch.Tensor) -> float:
    return seconds(partial(next(layers), x_BK), clock=time.process_time)


def _own(scheme: Scheme, K: int, N: int, seed: int) -> PackedLinear:
    random = torch.Generator().manual_seed(seed)
    return PackedLinear(torch.randn(N, K, generator=random).bfloat16() / K**0.5, None, scheme)


def _kept(scheme: Scheme, zero: float, K: int, N: int, seed: int) -> PackedLinear:
    random = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (N, K), generator=random, dtype=torch.uint8)
    scale = (torch.rand(N, -(-K // (scheme.group or 1)), generator=random) / 300).half().float()
    return PackedLinear.from_groups(integers, scale, -zero * scale, None, scheme)


def _floats(scheme: Scheme, K: int, N: int, seed: int) -> PackedLinear:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.weight_bits, (N, K), generator=random, dtype=torch.uint8)
    groups = -(-K // (scheme.group or 1))
    if scheme is MXFP4:
        scales = torch.randint(116, 122, (N, groups), generator=random, dtype=torch.uint8)
    else:
        codes[codes & 127 == 127] = 0  # NaN
        scales = (torch.rand(-(-N // 128), groups, generator=random) / 1000).repeat_interleave(128, 0)[:N]
    floats = SmallFloats(codes_NK=codes, scales_NG=scales, bits=scheme.weight_bits)
    return PackedLinear.from_floats(floats, None, scheme)


if __name__ == "__main__":
    sys.exit(main())
