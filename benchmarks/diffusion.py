"""What step caching and guidance skipping save of a picture, in processor time, and what the picture loses.

    python benchmarks/diffusion.py [--layers 2] [--heads 4] [--width 64] [--sample 16] [--steps 20] [--rounds 3]

Random weights of PixArt's architecture (16 heads of 72, 28 layers are its own); they say what the steps cost, and how
much a picture of a trained model loses they do not. All rows are taken in turns in one process.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import diffusers
import torch

from torchwright.diffusion.sampling import Plan, steps_to_reuse
from torchwright.diffusion.tiny import write_pixart
from torchwright.diffusion.workload import DiffusionWorkload
from torchwright.techniques.step_caching import THRESHOLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 2, "heads": 4, "width": 64, "sample": 16, "steps": 20, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_pixart(
            Path(folder), layers=asked.layers, heads=asked.heads, width=asked.width, sample=asked.sample
        )
        compare(DiffusionWorkload(folder, steps=asked.steps), asked.rounds)


def compare(workload: DiffusionWorkload, rounds: int) -> None:
    """Print a row for each plan and type."""
    model = workload.build()
    half = workload.cast(workload.build(), torch.bfloat16, lambda name, module: False)
    changes, steps = workload.changes(model), workload.steps
    plans = {"all steps": Plan()}
    plans |= {f"reused within {t:g}": Plan(reused=steps_to_reuse(changes, t)) for t in THRESHOLDS}
    plans |= {f"last {s:.0%} unguided": Plan(unguided=int(s * steps)) for s in (0.7, 0.5, 0.3)}
    plans["both"] = Plan(reused=steps_to_reuse(changes, THRESHOLDS[0]), unguided=steps // 2)
    rows = {name: (plan, model) for name, plan in plans.items()} | {
        "all steps, bfloat16": (Plan(), half),
        "both, bfloat16": (plans["both"], half),
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    seen = {}
    for _ in range(rounds):
        for name, (plan, parts) in rows.items():
            begun = time.process_time()
            seen[name] = workload.planned(plan).observe(
                lambda case, parts=parts: parts(*case.args, **case.kwargs), torch.float32
            )
            seconds[name].append(time.process_time() - begun)
    machine = platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    print(f"{machine}, {torch.get_num_threads()} threads, {versions}")
    pictures = len(seen["all steps"]["pictures"])
    print(
        f"{steps} steps, {workload.height}x{workload.width} pixels, {pictures} pictures a round, {rounds} rounds"
    )
    for name, (plan, _) in rows.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["all steps"], seconds[name], strict=True))
        quality = workload.compare(seen["all steps"], seen[name])
        print(
            f"{name:22} {len(plan.reused):3} reused {plan.unguided:3} unguided  "
            f"{statistics.median(seconds[name]) / pictures:7.3f} s  {ratio:5.2f}x  "
            f"SSIM loss {quality.drop:.2%}, at most {quality.drop_high:.2%}"
        )


if __name__ == "__main__":
    main()
