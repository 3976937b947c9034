"""Loss curves on the bundled model's shape: float8 (rowwise, emulated) and 8-bit AdamW against bfloat16 and AdamW.

    python -m benchmarks.train.curves [--steps N] [--batch-tokens N] [--seeds N] [--json FILE]

Every run is `torchwright train` on the bundled texts from random weights; a seed decides weights and order alike, so
that runs of one seed differ in nothing but the setting. The bar: the mean difference of the held-out loss lies inside
the spread (largest minus smallest) between the seeds of the baseline.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED, Row
from benchmarks.train.speed import run_file
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe.metrics import read_figures

SETTINGS: dict[str, dict[str, str]] = {
    "bf16, AdamW": {},
    "float8 rowwise, AdamW": {"precision": "float8_rowwise"},
    "bf16, 8-bit AdamW": {"optimizer": "adamw8bit"},
}
BASELINE = "bf16, AdamW"


def curve(setting: dict[str, str], seed: int, options: argparse.Namespace) -> Row:
    """Return the losses of one run: training by step, held out at the end."""
    tokens = options.steps * options.batch_tokens
    with tempfile.TemporaryDirectory() as folder:
        path = run_file(
            Path(folder),
            tokens=tokens,
            batch_tokens=options.batch_tokens,
            context=options.context,
            micro_batches=1,
            seed=seed,
            log_every=5,
            threads=options.threads,
            compile=options.compile,
            precision=setting.get("precision", "bf16"),
            data={
                "train": [str(BUNDLED / "eval.txt")],
                "validation": [str(BUNDLED / "calibration.txt")],
                "seed": seed,
            },
            optimizer={"name": setting.get("optimizer", "adamw"), "lr": options.lr},
            schedule={"warmup_tokens": tokens // 10},
            evaluation={"tokens": 8192},
        )
        outcome = train(path, live=False)
        losses = {step: line["loss"] for step, line in read_figures(outcome.out).items() if "loss" in line}
    return {"seed": seed, "validation_loss": outcome.validation_loss, "losses": losses}


def main() -> None:
    options = run.options(
        __doc__,
        steps=60,
        batch_tokens=2048,
        context=256,
        lr=2e-3,
        seeds=3,
        threads=2,
        compile=run.Option(action=argparse.BooleanOptionalAction, default=False),
    )
    columns = ("setting", "held-out loss by seed", "mean", "minus the baseline's", "inside its seeds' spread")
    rows = run.Rows(options.json, columns)
    finals: dict[str, list[float]] = {}
    for name, setting in SETTINGS.items():
        found = finals[name] = []
        for seed in range(options.seeds):
            rows.add({"setting": name, **curve(setting, seed, options)})
            found.append(rows[-1]["validation_loss"])
        base = finals[BASELINE]
        difference = statistics.mean(a - b for a, b in zip(found, base, strict=True))
        spread = max(base) - min(base)
        inside = f"{'yes' if abs(difference) <= spread else 'NO'}, {spread:.4f}"
        by_seed = ", ".join(f"{loss:.4f}" for loss in found)
        print(
            run.line((name, by_seed, f"{statistics.mean(found):.4f}", f"{difference:+.4f}", inside)),
            flush=True,
        )


if __name__ == "__main__":
    main()
