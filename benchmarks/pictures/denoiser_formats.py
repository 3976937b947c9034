"""A denoiser's step in the formats of a card: milliseconds, and the relative error of the prediction.

    python -m benchmarks.pictures.denoiser_formats [--model SD3Transformer2DModel] [--layers 6] [--size 1024]
        [--batch 2] [--rounds 9] [--only FORMAT …] [--json FILE]

The transformer of a published pipeline with random weights and fewer layers. Each row is a process of its own, timed in
turns; guidance makes a batch of two of an image. Formats that the card has no products for are refused with the reason.
Published: Flux on an H100 1.54x by float8; on a B200 1.26x in MXFP8 and 1.68x in NVFP4 (Flux, QwenImage, LTX-Video), by
the authors of torchao and diffusers.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.harness import run
from benchmarks.harness.contenders import contenders
from benchmarks.harness.run import Row
from benchmarks.harness.turns import in_turns, ratio
from benchmarks.models import zoo
from benchmarks.pictures.segment_anything import BF16, COMPILE, GRAPHS, SECONDS
from torchwright.workloads.module import ModuleWorkload

FORMATS = ("float8_dynamic", "int8_dynamic", "mxfp8", "nvfp4", "float8_weight_only", "int8_weight_only")
STEPS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bf16": (BF16,),
    "bf16, compiled": (BF16, COMPILE),
    "bf16, CUDA graphs": (BF16, COMPILE, GRAPHS),
    **{each: (BF16, f"torchao:config={each}", COMPILE, GRAPHS) for each in FORMATS},
    "2:4 sparsity": (BF16, "sparse24", COMPILE, GRAPHS),
    "2:4 sparsity, int8": (BF16, "sparse24:bits=8", COMPILE, GRAPHS),
}


def main() -> None:
    denoisers = [name for name, entry in zoo.MODELS.items() if entry.kind == "denoiser"]
    model = run.Option(default="SD3Transformer2DModel", choices=denoisers)
    options = run.options(__doc__, model=model, layers=6, size=1024, batch=2, rounds=9, only=tuple(STEPS))
    rows = run.Rows(options.json)
    zoo.LATENT = options.size // 8
    torch.manual_seed(0)
    fields = {"num_layers": options.layers, "sample_size": zoo.LATENT}
    module, inputs = zoo.MODELS[options.model].make(options.batch, **fields)
    workload = ModuleWorkload(module.eval().requires_grad_(False), inputs)
    found: dict[str, Row] = {}
    with contenders() as start:
        live, reference = {}, None
        for name in dict.fromkeys(("float32", *options.only)):
            run.say(f"{name} …")
            row = found[name] = {"rung": name, "steps": STEPS[name]}
            each = start(name, workload, steps=STEPS[name], reference=reference, seconds=SECONDS)
            if not each.fits:
                row["failure"] = each.failure
                continue
            live[name] = each.process
            row["ready_s"] = each.ready_s
            reference = reference or each.observe()
            row["error"] = each.quality.drop if each.quality else 0.0
        times = {
            name: lambda process=process: sum(process.ask("time").values()) for name, process in live.items()
        }
        for name, seconds in in_turns(times, options.rounds).items():
            found[name]["ms"] = [1e3 * each for each in seconds]
    run.head(("rung", "ms a step", "over bf16 compiled", "over float32", "relative error"))
    for row in found.values():
        rows.add(row, cells(row, found))


def cells(row: Row, found: dict[str, Row]) -> tuple[str, ...]:
    if "failure" in row:
        return row["rung"], row["failure"], "", "", ""
    bases = [found.get(name, {}).get("ms") for name in ("bf16, compiled", "float32")]
    ratios = (f"{ratio(base, row['ms']):.2f}x" if base else "" for base in bases)
    return (row["rung"], f"{statistics.median(row['ms']):.2f}", *ratios, f"{row['error']:.2%}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
