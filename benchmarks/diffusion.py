# pyright: reportMissingImports=false
"""What step caching and guidance skipping save of a picture, in processor time, and what the picture loses.

    python benchmarks/diffusion.py [--layers 2] [--heads 4] [--width 64] [--sample 16] [--steps 20] [--rounds 3]
    python benchmarks/diffusion.py --folder FOLDER [--pictures 30] [--max-drop 0.02]

Without a folder: random weights of PixArt's architecture (16 heads of 72, 28 layers are its own); they say what the
steps cost, and how much a picture of a trained model loses they do not. With one that
`examples/glyphs/train_glyphs.py` wrote, its classifier reads what each row drew: how often it is the digit that was
asked for, and how often what is read off the original's picture of the same prompt and seed. All rows are taken in
turns in one process; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import diffusers
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "glyphs"))
from glyphs import digit_of, load_reader, read
from pixart import write_pixart
from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.sampling import Plan, steps_to_reuse
from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.step_caching import THRESHOLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 2, "heads": 4, "width": 64, "sample": 16, "steps": 20, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, help="a pipeline of glyphs, its classifier beside it")
    parser.add_argument("--pictures", type=int, default=0, help="a round; 4, of glyphs 30")
    parser.add_argument("--max-drop", type=float, default=0.02, help="the budget that a row is in or over")
    asked = parser.parse_args()
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
    machine = platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    print(f"{machine}, {torch.get_num_threads()} threads, {versions}")
    size = f"{workload.height}x{workload.width}"
    print(f"{steps} steps, {size} pixels, {pictures} pictures a round, {rounds} rounds")
    for name, diffuser in rows.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["all steps"], seconds[name], strict=True))
        quality = workload.compare(seen["all steps"], seen[name])
        print(
            f"{name:22} {len(diffuser.plan.reused):3} reused {diffuser.plan.unguided:3} unguided  "
            f"{statistics.median(seconds[name]) / pictures:7.3f} s  {ratio:5.2f}x  "
            f"{quality.metric} loss {quality.drop:.2%}, at most {quality.drop_high:.2%}, "
            f"{'in' if quality.drop_high <= max_drop else 'over'} the budget"
            + ("" if reader is None else f"; {_told(reader, texts, seen['all steps'], seen[name])}")
        )


def _told(
    reader: torch.nn.Module,
    texts: list[str],
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> str:
    """What the classifier reads, against what was asked for and against the original's pictures."""
    first, now = read(reader, before["pictures"]), read(reader, after["pictures"])
    right = sum(digit == digit_of(text) for digit, text in zip(now, texts, strict=True))
    same = sum(a == b for a, b in zip(first, now, strict=True))
    return f"read right {right}/{len(texts)}, as the original's {same}/{len(texts)}"


if __name__ == "__main__":
    main()
