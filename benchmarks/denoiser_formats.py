"""A denoiser's step in the formats that a card has: milliseconds, and the relative error of what it predicts.

    python benchmarks/denoiser_formats.py [--model SD3Transformer2DModel] [--layers 6] [--size 1024] [--batch 2]
        [--rounds 9] [--only RUNG …] [--json FILE]

The transformer of a published pipeline with random weights and fewer layers. Each rung is a process of its own, timed
in turns; guidance makes two rows of a picture. Formats that the card has no products for are refused with the reason.
Published beside them: Flux on an H100 1.54x by float8; on a B200 1.26x in MXFP8 and 1.68x in NVFP4 (Flux, QwenImage,
LTX-Video), by the authors of torchao and diffusers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import hundred_models
import turns
from segment_anything import BF16, COMPILE, GRAPHS, refused, started
from torchwright.optimization.trial.client import TrialProcess
from torchwright.workloads.module import ModuleWorkload

FORMATS = ("float8_dynamic", "int8_dynamic", "mxfp8", "nvfp4", "float8_weight_only", "int8_weight_only")
RUNGS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bf16": (BF16,),
    "bf16, compiled": (BF16, COMPILE),
    "bf16, CUDA graphs": (BF16, COMPILE, GRAPHS),
    **{each: (BF16, f"torchao:config={each}", COMPILE, GRAPHS) for each in FORMATS},
    "2:4 sparsity": (BF16, "sparse24", COMPILE, GRAPHS),
    "2:4 sparsity, int8": (BF16, "sparse24:bits=8", COMPILE, GRAPHS),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    denoisers = [name for name, entry in hundred_models.MODELS.items() if entry.kind == "denoiser"]
    parser.add_argument("--model", default="SD3Transformer2DModel", choices=denoisers)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=list(RUNGS), metavar="RUNG", default=list(RUNGS))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    turns.print_machine()
    hundred_models.LATENT = options.size // 8
    torch.manual_seed(0)
    fields = {"num_layers": options.layers, "sample_size": hundred_models.LATENT}
    model, inputs = hundred_models.MODELS[options.model].make(options.batch, **fields)
    model.eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measured(ModuleWorkload(model, inputs), options, Path(scratch))
    print("| rung | ms a step | over bf16 compiled | over float32 | relative error |\n|---|---|---|---|---|")
    for row in rows:
        print(as_line(row, {other["rung"]: other for other in rows}), flush=True)
    turns.write_json(options.json, rows)


def measured(workload: ModuleWorkload, options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    rows, live = list[dict[str, Any]](), dict[int, TrialProcess]()
    reference = None
    try:
        for number, rung in enumerate(dict.fromkeys(("float32", *options.only))):
            turns.say(f"{rung} …")
            rows.append({"rung": rung, "steps": RUNGS[rung]})
            try:
                if reason := refused(RUNGS[rung]):
                    raise RuntimeError(reason)
                live[number], rows[-1]["ready_s"] = started(workload, RUNGS[rung], scratch)
                if reference is None:
                    reference = live[number].ask("observe")
                rows[-1]["error"] = live[number].ask("compare", reference=reference).drop
            except Exception as error:  # whatever a rung dies of is its row
                rows[-1]["failure"] = str(error)[:200]
                if process := live.pop(number, None):
                    process.close()
        for _, order in zip(range(options.rounds), turns.orders(list(live)), strict=False):
            for number in order:
                seconds = sum(live[number].ask("time").values())
                rows[number].setdefault("ms", []).append(1e3 * seconds)
    finally:
        for process in live.values():
            process.close()
    return rows


def as_line(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    if "failure" in row:
        return f"| {row['rung']} | {row['failure']} | | | |"
    ratios = [
        f"{statistics.median(a / b for a, b in zip(rows[base]['ms'], row['ms'], strict=True)):.2f}x"
        if "ms" in rows.get(base, {})
        else ""
        for base in ("bf16, compiled", "float32")
    ]
    return (
        f"| {row['rung']} | {statistics.median(row['ms']):.2f} | {' | '.join(ratios)} | {row['error']:.2%} |"
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
