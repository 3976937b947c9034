"""A decode step as one operator against the layers' own calls, for each kind of layer.

    python -m benchmarks.llm.planned [--shape NAME …] [--scheme w4a8] [--models DIR] [--rounds 15] [--busy]
        [--json FILE]

Both run in one process, in turns of STEPS steps after a prompt of 256 tokens, and give the same bits. Figures are
medians over rounds, ratios are of the same round. With --busy, for a machine that others use: processor time on one
thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.turns import ratio, timed
from benchmarks.llm import shapes
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder import LoadedDecoder, load_decoder, model
from torchwright.models.decoder.plan import MOST_ROWS

SHAPES = ("gpt-oss-20b-4-layers", "gemma-4-e2b-8-layers", "falcon-h1-0.5b", "lfm2-1.2b", "llama-3.2-1b")
PROMPT, STEPS, BATCHES = 256, 4, (1, 8)


@torch.inference_mode()
def main() -> None:
    options = run.options(__doc__, shape=list(SHAPES), scheme="w4a8", models=str, rounds=15, busy=False)
    if fault := build.load_fault():
        raise SystemExit(fault)
    if options.busy:
        torch.set_num_threads(1)
    clock = time.process_time if options.busy else time.perf_counter
    rows = run.Rows(options.json)
    run.head(("shape", "batch", "layer by layer, ms", "one operator, ms", "ratio"))
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shape:
            loaded = load_decoder(
                shapes.make(shape, Path(options.models or scratch)), torch.bfloat16, options.scheme
            )
            for batch in BATCHES:
                steps = Steps(loaded, batch, options.rounds + 1)
                both = {"layers": lambda steps=steps: steps(0), "plan": lambda steps=steps: steps(MOST_ROWS)}
                taken = {
                    name: found[1:] for name, found in timed(both, options.rounds + 1, clock=clock).items()
                }
                ms = {name: 1e3 * statistics.median(found) / STEPS for name, found in taken.items()}
                row = {"shape": shape, "scheme": options.scheme, "batch": batch, **ms}
                row["ratio"] = ratio(taken["layers"], taken["plan"])
                cells = (shape, batch, f"{ms['layers']:.2f}", f"{ms['plan']:.2f}", f"{row['ratio']:.2f}x")
                rows.add(row, cells)


class Steps:
    """Decode steps of a batch of sequences, over one cache."""

    def __init__(self, loaded: LoadedDecoder, batch: int, rounds: int) -> None:
        self._decoder = loaded.decoder
        self._cache = loaded.new_cache([PROMPT + 2 * rounds * STEPS] * batch)
        self._sequences = [self._cache.sequence(PROMPT) for _ in range(batch)]
        ids = torch.randint(10, min(8000, loaded.config.vocabulary), (PROMPT,)).tolist()
        for sequence in self._sequences:
            self._step([(sequence, ids)])

    def __call__(self, most_rows: int) -> None:
        model.MOST_ROWS = most_rows
        for _ in range(STEPS):
            self._step([(sequence, [17]) for sequence in self._sequences])
        model.MOST_ROWS = MOST_ROWS

    def _step(self, pieces: list[Any]) -> None:
        batch = self._cache.append(pieces)
        self._decoder.answer(batch, self._cache, batch.last_rows_B)


if __name__ == "__main__":
    main()
