# pyright: reportMissingImports=false
"""Savings of step caching and guidance skipping for an image, in processor time, and the loss of the image.

    python -m benchmarks.pictures.diffusion [--layers 2] [--heads 4] [--width 64] [--sample 16] [--steps 20]
    python -m benchmarks.pictures.diffusion --folder FOLDER [--pictures 30] [--max-drop 0.02]

Without a folder: random weights of PixArt's architecture (16 heads of 72, 28 layers are its own). They show the cost of
the steps, and not the loss of a trained model's image. With a folder that `examples/glyphs/train_glyphs.py` wrote, its
classifier reads the digit of each image. Counted are the digits that were asked for, and those that equal the digit of
the original's image of the same prompt and seed. All rows are taken in turns in one process; a ratio is the median of
the rounds' ratios. --pictures are those of a round: 4, or all prompts of a folder.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import diffusers
import torch

from benchmarks.harness import run
from benchmarks.harness.turns import ratio
from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.sampling import Plan, steps_to_reuse
from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.step_caching import THRESHOLDS

sys.path += [str(run.ROOT / "tests"), str(run.ROOT / "examples" / "glyphs")]
from glyphs import digit_of, load_reader, read
from pixart import write_pixart


def main() -> None:
    sizes = {"layers": 2, "heads": 4, "width": 64, "sample": 16, "steps": 20, "rounds": 3}
    asked = run.options(__doc__, json=False, folder=Path, pictures=0, max_drop=0.02, **sizes)
    run.Rows(note=f"diffusers {diffusers.__version__}")
    with tempfile.TemporaryDirectory() as made, torch.inference_mode():
        if asked.folder is None:
            write_pixart(
                Path(made), layers=asked.layers, heads=asked.heads, width=asked.width, sample=asked.sample
            )
            workload = DiffusionWorkload(made, steps=asked.steps)
            compare(workload, None, asked.rounds, asked.pictures or 4, asked.max_drop)
        else:
            workload = DiffusionWorkload(
                asked.folder, steps=asked.steps, prompts=asked.folder / "prompts.txt"
            )
            reader = load_reader(asked.folder)
            compare(workload, reader, asked.rounds, asked.pictures or len(workload.texts), asked.max_drop)


def compare(
    workload: DiffusionWorkload,
    reader: torch.nn.Module | None,
    rounds: int,
    pictures: int,
    max_drop: float,
) -> None:
    """Print a row for each plan and type."""
    model = workload.build()
    half = workload.cast(workload.build(), torch.bfloat16, lambda name, module: False)
    changes, steps = workload.changes(model), workload.steps
    plans = {"all steps": Plan()}
    plans |= {f"reused within {t:g}": Plan(reused=steps_to_reuse(changes, t)) for t in THRESHOLDS}
    plans |= {f"last {s:.0%} unguided": Plan(unguided=int(s * steps)) for s in (0.7, 0.5, 0.3)}
    plans["both"] = Plan(reused=steps_to_reuse(changes, THRESHOLDS[-1]), unguided=steps // 2)
    rows = {name: Diffuser(workload.opened, model, plan=plan) for name, plan in plans.items()}
    rows |= {
        "all steps, bfloat16": Diffuser(workload.opened, half),
        "both, bfloat16": Diffuser(workload.opened, half, plan=plans["both"]),
    }
    texts = [workload.texts[i % len(workload.texts)] for i in range(pictures)]
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for _ in range(rounds):
        for name, diffuser in rows.items():
            begun = time.process_time()
            drawn = [
                diffuser.draw(text, seed=i, steps=steps, size=(workload.height, workload.width))
                for i, text in enumerate(texts)
            ]
            seconds[name].append(time.process_time() - begun)
            seen[name] = {
                "pictures": torch.stack([one.picture_3HW for one in drawn]),
                "latents": torch.stack([one.latents for one in drawn]),
            }
    size = f"{workload.height}x{workload.width}"
    print(f"{steps} steps, {size} pixels, {pictures} pictures a round, {rounds} rounds")
    for name, diffuser in rows.items():
        gain = ratio(seconds["all steps"], seconds[name])
        quality = workload.compare(seen["all steps"], seen[name])
        print(
            f"{name:22} {len(diffuser.plan.reused):3} reused {diffuser.plan.unguided:3} unguided  "
            f"{statistics.median(seconds[name]) / pictures:7.3f} s  {gain:5.2f}x  "
            f"{quality.metric} loss {quality.drop:.2%}, at most {quality.drop_high:.2%}, "
            f"{'in' if quality.drop_high <= max_drop else 'over'} the budget"
            + ("" if reader is None else f"; {_readings(reader, texts, seen['all steps'], seen[name])}")
        )


def _readings(
    reader: torch.nn.Module,
    texts: list[str],
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> str:
    """Compare the classifier's readings with the prompts and with those of the original's images."""
    first, now = read(reader, before["pictures"]), read(reader, after["pictures"])
    right = sum(digit == digit_of(text) for digit, text in zip(now, texts, strict=True))
    same = sum(a == b for a, b in zip(first, now, strict=True))
    return f"read right {right}/{len(texts)}, as the original's {same}/{len(texts)}"


if __name__ == "__main__":
    main()
