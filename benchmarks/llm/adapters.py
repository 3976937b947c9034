"""A decode step of 16 rows with adapters for single rows, next to the same step of a decoder that knows none.

    python -m benchmarks.llm.adapters [--shape llama-3.2-1b] [--rank 16] [--rounds 12] [--models DIR]

Random weights of a published shape in bfloat16, and random adapters on all linear layers of its blocks. All cases take
turns in one process. Printed are the median milliseconds of a step, and its speed over that of batches which are not
asked for adapters: the median within rounds. The last column tells if the bar is reached.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.turns import ratio, timed
from benchmarks.llm import shapes
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.batch import with_adapters
from torchwright.models.decoder.low_rank import Adapter

sys.path.insert(0, str(run.ROOT / "tests"))
write_adapter: Any = importlib.import_module("lora_files").write_adapter

ROWS, PROMPT = 16, 32
PLAIN, NONE, SIXTEEN = "not asked for", "none", "sixteen"
BARS = {NONE: 0.99, SIXTEEN: 0.8}
"""Least speed of a step, over that of one that is not asked for adapters."""


def main() -> int:
    options = run.options(__doc__, shape="llama-3.2-1b", rank=16, rounds=12, models=str)
    rows = run.Rows(options.json, ("adapters", "step, ms", "speed", "bar"))
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(shapes.make(options.shape, Path(options.models or scratch)), Path(scratch), options)
    for name, seconds in found.items():
        speed, bar = ratio(found[PLAIN], seconds), BARS.get(name)
        row = {"adapters": name, "seconds": seconds, "speed": speed, "load": os.getloadavg()[0]}
        held = "" if bar is None else f"{bar}x: {'held' if speed >= bar else 'missed'}"
        rows.add(row, (name, f"{1e3 * median(seconds):.1f}", f"{speed:.3f}x", held))
    return 0


def measured(base: Path, scratch: Path, options: Any) -> dict[str, list[float]]:
    loaded = load_decoder(base, torch.bfloat16)
    adapters = list[Adapter | None]()
    for seed in range(ROWS):
        folder = write_adapter(base, scratch / f"adapter{seed}", r=options.rank, seed=seed)
        adapters.append(found := read_adapter(folder, loaded.decoder, base))
        if not seed:
            run.say(f"{found.bytes / 1e6:.1f} MB for each adapter")
    owners: dict[str, Sequence[Adapter | None] | None] = {
        PLAIN: None,
        NONE: [None] * ROWS,
        "one for all rows": [adapters[0]] * ROWS,
        "eight, for half of the rows": [*adapters[:8], *[None] * 8],
        SIXTEEN: [*adapters],
    }
    cache = loaded.new_cache([PROMPT + (options.rounds + 1) * len(owners)] * ROWS)
    sequences = [cache.sequence(PROMPT) for _ in range(ROWS)]

    @torch.inference_mode()
    def step(own: Sequence[Adapter | None] | None) -> None:
        batch = cache.append([(one, [5]) for one in sequences])
        if own is not None:
            batch = with_adapters(batch, [(one, 1) for one in own])
        loaded.decoder.answer(batch, cache, batch.last_rows_B)

    with torch.inference_mode(), loaded.on_threads():
        loaded.decoder(cache.append([(one, [*range(3, 3 + PROMPT)]) for one in sequences]), cache)
        contenders: dict[str, Callable[[], Any]] = {
            name: lambda own=own: step(own) for name, own in owners.items()
        }
        for contender in contenders.values():
            contender()
        return timed(contenders, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
