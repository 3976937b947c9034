"""The cost of batch invariance: our bfloat16 linear layer, whose rows do not depend on each other, over PyTorch's.

    python -m benchmarks.llm.batch_invariance [--json FILE]

2048 → 8192 features, as in a model of 1.2 B parameters; weights are rotated, so that they come from memory. Both are
timed in turn, and the ratio is the median of the paired ones. The last lines count the rows of 64 that differ alone
from in company, for both layers.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import run
from benchmarks.harness.turns import ratio, seconds
from torchwright.core.scheme import BF16
from torchwright.hardware.kernels.linear import PackedLinear

K, N, COPIES, ROUNDS = 2048, 8192, 6, 40
ROWS = (1, 4, 16, 64, 256, 512)


@torch.inference_mode()
def main() -> None:
    options = run.options(__doc__)
    run.need_kernels()
    rows = run.Rows(options.json)
    torch.manual_seed(0)
    weights = [torch.randn(N, K, dtype=torch.bfloat16) / K**0.5 for _ in range(COPIES)]
    layers = [PackedLinear(weight_NK, None, BF16) for weight_NK in weights]
    for count in ROWS:
        x_BK = torch.randn(count, K, dtype=torch.bfloat16)
        pairs = itertools.cycle(zip(layers, weights, strict=True))
        turns = []
        for layer, weight_NK in itertools.islice(pairs, ROUNDS + COPIES):
            turns.append([seconds(partial(layer, x_BK)), seconds(partial(F.linear, x_BK, weight_NK))])
        ours, theirs = zip(*turns[COPIES:], strict=True)  # the first ones find out how to compute
        slower = ratio(theirs, ours)
        ours_ms, theirs_ms = 1000 * statistics.median(ours), 1000 * statistics.median(theirs)
        row = {"rows": count, "invariant_ms": ours_ms, "pytorch_ms": theirs_ms}
        text = f"{count:4} rows: {ours_ms:.2f} ms, F.linear {theirs_ms:.2f} ms; {slower:.2f} of its speed"
        rows.add(row | {"pytorch_over_invariant": slower}, text)
    x_BK = torch.randn(64, K, dtype=torch.bfloat16)
    for name, call in (("invariant", layers[0]), ("F.linear", lambda x: F.linear(x, weights[0]))):
        print(f"{name}: {_changed(call, x_BK)} of 64 rows differ alone from in company")


def _changed(call: Callable[[torch.Tensor], Any], x_BK: torch.Tensor) -> int:
    together_BN = call(x_BK)
    alone = [call(row_K[None])[0] for row_K in x_BK]
    return sum(not torch.equal(a_N, b_N) for a_N, b_N in zip(alone, together_BN, strict=True))


if __name__ == "__main__":
    main()
