"""Sixteen image, sound and text encoders on a CPU: eager fp32, Torchwright, OpenVINO fp32, bf16 and int8.

    python -m benchmarks.optimize.vision [--only NAME:BATCH …] [--max-drop 0.02] [--time-budget SECONDS] [--engines]
        [--json FILE]

Torchwright stands alone here; with --engines its search may use OpenVINO and ONNX Runtime, too. The accuracy budget
(relative error of the outputs) is one for all: OpenVINO's best is the fastest of those within it, and the fastest of
all is printed as well. A peer that fails gives the reason. Random weights; every ratio is of turns in one run. Some
models are torchvision's.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from typing import Any

from torch import nn

import torchwright as tw
from benchmarks.board import rows as board
from benchmarks.harness import contenders, run
from benchmarks.harness.contenders import entry_of
from benchmarks.harness.engines import ByOpenVino
from benchmarks.harness.run import Row, times, triple
from benchmarks.models import shapes
from torchwright.workloads.module import ModuleWorkload

# fmt: off
CASES = [
    "resnet50:1", "resnet50:16", "vit_b16:1", "vit_b16:8", "minilm_shape:1", "minilm_shape:32", "mobilenet_v3_small:1",
    "efficientnet_b0:1", "efficientnet_b0:8", "shufflenet_v2:8", "convnext_tiny:1", "swin_t:1", "detr:1", "unet3d:1",
    "transformer_encoder:8", "wav2vec2:1",
]
# fmt: on
ORIGINAL, OURS = "eager fp32", "torchwright"
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "int8": "int8"}
ATTEND = ("vit_b16", "minilm_shape", "swin_t", "detr", "transformer_encoder", "wav2vec2")
"""Models that NNCF quantizes as transformers."""
SECONDS = 300.0
"""Limit until a contender can be called."""
COLUMNS = ("case", "contender", "ms", "over eager", "relative error", "top-1", "within budget")


def main() -> None:
    options = run.options(__doc__, only=CASES, max_drop=0.02, time_budget=150.0, engines=False)
    note = f"relative error allowed: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a case"
    rows = run.Rows(options.json, COLUMNS, note=note)
    for case in options.only:
        name, _, batch = case.partition(":")
        row = measured(name, int(batch or 1), options)
        for contender, entry in row["contenders"].items():
            print(run.line(cells(case, contender, entry)), flush=True)
        for what in ("within_budget", "of_all"):
            if f"ratio_{what}" in row:
                against = f"against OpenVINO's best {what.replace('_', ' ')}: {row[what]}"
                print(run.line((case, against, "", times(row[f"ratio_{what}"]), "", "", "")))
        rows.add(row)
        limits = f"budget {options.max_drop:.0%}, search of {options.time_budget:.0f} s"
        engines = "third-party engines allowed" if options.engines else "own kernels"
        if figures := ratios(row):
            rows.measured(case, figures, f"{limits}, {engines}", kept=row["recipe"])


def ratios(row: Row) -> dict[tuple[str, str], Any]:
    """Return what the board keeps of a row: ours over the original and OpenVINO, and each peer over the original."""
    over = {"ratio_within_budget": board.OPENVINO, "ratio_of_all": f"{board.OPENVINO} at any loss"}
    found = {(board.WHOLE, measure): row[key] for key, measure in over.items() if key in row}
    for name, entry in row["contenders"].items():
        if name != ORIGINAL and entry.get("within_budget"):
            found[board.WHOLE if name == OURS else name, board.ORIGINAL] = entry["versus_eager"]
    return found


def measured(name: str, batch: int, options: argparse.Namespace) -> Row:
    model, inputs = shapes.make(shapes.VISION[name], batch)
    without = () if options.engines else contenders.THIRD_PARTY
    with tempfile.TemporaryDirectory() as folder, contenders.contenders() as start:
        run.say(f"{name} batch {batch}: optimizing")
        out = f"{folder}/artifact"
        limits = {"max_drop": options.max_drop, "time_budget": options.time_budget}
        tw.optimize(model, inputs, without=without, **limits).save(out)
        original = start(ORIGINAL, ModuleWorkload(model, inputs))
        if not original.fits:
            raise SystemExit(f"{name}: {original.failure}")
        reference, field = original.observe(), [original]
        modules: dict[str, nn.Module] = {OURS: contenders.FromArtifact(model, out)}
        for title, precision in PRECISIONS.items() if importlib.util.find_spec("openvino") else ():
            modules[f"OpenVINO {title}"] = ByOpenVino(model, precision, [inputs], transformer=name in ATTEND)
        for contender, module in modules.items():
            run.say(f"{name} batch {batch}: {contender}")
            workload = ModuleWorkload(module, inputs)
            field.append(start(contender, workload, reference=reference, seconds=SECONDS))
        timed = contenders.take_turns(field)
        row: Row = {"case": f"{name}:{batch}", "recipe": contenders.recipe_of(out), "contenders": {}}
        for each in field:
            entry = entry_of(each, timed, ORIGINAL, options.max_drop)
            row["contenders"][each.name] = entry | ({"top1": top1(reference, each)} if each.fits else {})
    ours = row["contenders"][OURS]
    if "ms" not in ours:
        return row
    ours["recipe"] = row["recipe"]
    theirs = {k: v for k, v in row["contenders"].items() if k.startswith("OpenVINO") and "ms" in v}
    within = [name for name, entry in theirs.items() if entry["within_budget"]]
    for what, among in (("within_budget", within), ("of_all", list(theirs))):
        if among:
            best = min(among, key=lambda name: theirs[name]["ms"])
            row |= {what: best, f"ratio_{what}": triple(timed.speedup(best, OURS))}
    return row


def top1(reference: Any, each: contenders.Contender) -> float | None:
    """Return the share of a classifier's rows whose most likely class is the original's."""
    before, after = reference[0].outputs[0], each.observe()[0].outputs[0]
    return (before.argmax(-1) == after.argmax(-1)).double().mean().item() if before.ndim == 2 else None


def cells(case: str, contender: str, entry: Row) -> tuple[str, ...]:
    if "ms" not in entry:
        return case, contender, f"failed: {entry['failure']}", "", "", "", ""
    name = f"{contender} ({entry['recipe']})" if "recipe" in entry else contender
    top1 = "" if entry["top1"] is None else f"{entry['top1']:.3f}"
    within = "yes" if entry["within_budget"] else "no"
    gain = times(entry["versus_eager"])
    return case, name, f"{entry['ms']:.2f}", gain, f"{entry['loss']:.4f}", top1, within


if __name__ == "__main__":
    main()
