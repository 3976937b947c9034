"""LSTM and GRU layers: torch's own, and the same on packed weights (`packed_recurrent`), in turns.

    python -m benchmarks.optimize.recurrent [--turns 15] [--json FILE]

Float32 layers in eager code. The first shapes are those of Silero VAD, of g2p-en's reader, and of Resemblyzer with one
piece of speech and with several; the others are for the trend.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks.harness import run
from benchmarks.harness.run import times
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.optimization.techniques.packed_recurrent import PackedLayers

COLUMNS = ("layers", "rows", "steps", "inputs", "units", "torch, ms", "packed, ms", "speed-up")
SHAPES: list[tuple[Any, int, int, int, int, int]] = [
    (nn.LSTM, 1, 1, 200, 128, 128),
    (nn.GRU, 1, 4, 12, 256, 256),
    (nn.LSTM, 3, 1, 160, 40, 256),
    (nn.LSTM, 3, 13, 160, 40, 256),
    *((kind, 1, rows, 100, 256, 512) for kind in (nn.LSTM, nn.GRU) for rows in (1, 4, 32)),
    *((kind, 1, 1, 50, 512, 1024) for kind in (nn.LSTM, nn.GRU)),
    (nn.GRU, 1, 1, 200, 128, 128),
]


def main() -> None:
    options = run.options(__doc__, turns=15)
    if fault := build.load_fault():
        raise SystemExit(fault)
    rows = run.Rows(options.json, COLUMNS)
    for kind, layers, count, steps, inputs, units in SHAPES:
        theirs = kind(inputs, units, layers, batch_first=True).eval()
        ours, x = PackedLayers(theirs), torch.randn(count, steps, inputs)
        seconds = in_turns((theirs, ours), x, options.turns)
        found, (before, after) = paired_speedup(*seconds), (sorted(each)[len(each) // 2] for each in seconds)
        name = f"{layers} {kind.__name__}"
        figures = (f"{before * 1e3:.2f}", f"{after * 1e3:.2f}", times(found))
        row = {"layers": name, "rows": count, "steps": steps, "inputs": inputs, "units": units}
        rows.add(row | {"torch_s": before, "packed_s": after}, (*row.values(), *figures))


@torch.inference_mode()
def in_turns(models: tuple[nn.Module, ...], x: torch.Tensor, turns: int) -> list[list[float]]:
    """Return each model's seconds, turn by turn, after one that warms up; a turn is as many calls as take 20 ms."""
    calls, seconds = [1] * len(models), [list[float]() for _ in models]
    for turn in range(-1, turns):
        for number, model in enumerate(models):
            begun = time.perf_counter()
            for _ in range(calls[number]):
                model(x)
            spent = (time.perf_counter() - begun) / calls[number]
            if turn < 0:
                model(x)
                calls[number] = max(1, int(0.02 / spent))
            else:
                seconds[number].append(spent)
    return seconds


if __name__ == "__main__":
    main()
