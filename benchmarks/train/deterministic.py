"""The effect and the cost of `deterministic = true`: two runs compared bitwise, and the times of their steps in turns.

    python -m benchmarks.train.deterministic [--steps N] [--turns N] [--seconds S] [--threads T] [--json FILE]

The bundled model from random weights on its own texts, as in speed.py. Each run is `python -m torchwright train` in a
process of its own; compared are every step's loss and the bytes of the trained model. Ratios are medians over turns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.harness.turns import ratios
from benchmarks.train import speed
from torchwright.core.paths import file_digest
from torchwright.train.run.observe.metrics import read_figures

NAMES = ("torchwright", "torchwright, deterministic")


def trained(folder: Path, steps: int, **how: Any) -> tuple[list[float], str]:
    """Train in a process of its own; return the losses, and the SHA-256 of the trained weights."""
    folder.mkdir()
    run.torchwright("train", speed.run_file(folder, tokens=steps * speed.BATCH_TOKENS, log_every=1, **how))
    losses = [line["loss"] for line in read_figures(folder / "out").values() if "loss" in line]
    return losses, file_digest(folder / "out" / "model" / "model.safetensors")


def main() -> None:
    options = run.options(__doc__, steps=6, turns=7, seconds=3.0, threads=2)
    rows = run.Rows(options.json)
    with tempfile.TemporaryDirectory() as scratch:
        for deterministic in (True, False):
            how = {"threads": options.threads, "deterministic": deterministic}
            names = (f"{deterministic}-one", f"{deterministic}-other")
            one, other = (trained(Path(scratch) / name, options.steps, **how) for name in names)
            same = {"losses": one[0] == other[0], "weights": one[1] == other[1]}
            words = ", ".join(f"{what} {'equal' if equal else 'differ'}" for what, equal in same.items())
            text = f"deterministic = {str(deterministic).lower()}: {options.steps} steps twice, {words}"
            row = {"deterministic": deterministic, "losses": [one[0], other[0]]}
            rows.add(row | {f"same_{key}": equal for key, equal in same.items()}, text)
    found = speed.rates(NAMES, options)
    wall, cpu = ratios(found[NAMES[1]], found[NAMES[0]])
    text = f"a deterministic step has {wall:.2f} of the speed of the other, {cpu:.2f} by processor time"
    rows.add({"wall": wall, "processor": cpu, "tokens_per_s": found}, text)


if __name__ == "__main__":
    main()
