"""Sixteen image, sound and text encoders on a CPU: eager fp32, Torchwright, OpenVINO fp32, bf16 and int8.

    python -m benchmarks.optimize.vision [--only NAME:BATCH …] [--max-drop 0.02] [--time-budget SECONDS] [--engines]
        [--openvino-python PATH] [--json FILE]

Torchwright stands alone here; with --engines its search may use OpenVINO and ONNX Runtime, too. The accuracy budget
(relative error of the outputs) is one for all: OpenVINO's best is the fastest of those within it, and the fastest of
all is printed as well. A peer that fails gives the reason. Random weights; every ratio is of turns in one run. Some
models are torchvision's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from typing import Any

import torch

import torchwright as tw
from benchmarks.board import rows as board
from benchmarks.harness import contenders, peers, run
from benchmarks.harness.run import Row, in_short, times, triple
from benchmarks.models import shapes
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

# fmt: off
CASES = [
    "resnet50:1", "resnet50:16", "vit_b16:1", "vit_b16:8", "minilm_shape:1", "minilm_shape:32", "mobilenet_v3_small:1",
    "efficientnet_b0:1", "efficientnet_b0:8", "shufflenet_v2:8", "convnext_tiny:1", "swin_t:1", "detr:1", "unet3d:1",
    "transformer_encoder:8", "wav2vec2:1",
]
# fmt: on
PRECISIONS = ("fp32", "bf16", "int8")
COLUMNS = ("case", "contender", "ms", "over eager", "relative error", "top-1", "within budget")


class OpenVino(peers.Peer):
    """vision_peer.py in an interpreter that has OpenVINO, as a contender's process."""

    def ask(self, *question: Any) -> dict[str, float]:
        return {"forward": super().ask()}


def main() -> None:
    here = sys.executable if importlib.util.find_spec("openvino") else None
    options = run.options(
        __doc__,
        only=CASES,
        max_drop=0.02,
        time_budget=150.0,
        engines=False,
        openvino_python=run.Option(default=here, metavar="PATH", help="interpreter with openvino and nncf"),
    )
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
        if name != "eager fp32" and entry.get("within_budget"):
            found[board.WHOLE if name == "torchwright" else name, board.ORIGINAL] = entry["versus_eager"]
    return found


def measured(name: str, batch: int, options: argparse.Namespace) -> Row:
    model, inputs = shapes.make(shapes.VISION[name], batch)
    without = () if options.engines else contenders.THIRD_PARTY
    with tempfile.TemporaryDirectory() as folder, contenders.contenders() as start:
        run.say(f"{name} batch {batch}: optimizing")
        out = f"{folder}/artifact"
        limits = {"max_drop": options.max_drop, "time_budget": options.time_budget}
        tw.optimize(model, inputs, without=without, **limits).save(out)
        torch.save(model.state_dict(), f"{folder}/state.pt")
        torch.save(list(inputs), f"{folder}/inputs.pt")
        eager = start("eager fp32", ModuleWorkload(model, inputs))
        ours = ModuleWorkload(contenders.FromArtifact(model, out), inputs)
        field = [eager, start("torchwright", ours, reference=eager.observe())]
        outputs = {each.name: each.observe()[0].outputs[0] for each in field if each.process}
        original = outputs["eager fp32"]
        for precision in PRECISIONS if options.openvino_python else ():
            run.say(f"{name} batch {batch}: OpenVINO {precision}")
            peer = contenders.Contender(name=f"OpenVINO {precision}")
            try:
                arguments = (name, batch, precision, folder, torch.get_num_threads())
                module = "benchmarks.optimize.vision_peer"
                peer.process = OpenVino(module, *arguments, python=options.openvino_python)
                outputs[peer.name] = torch.load(f"{folder}/{precision}.pt", weights_only=True)
                peer.quality = relative_error([original], [outputs[peer.name]])
                peer.ready_s = peer.process.hello["ready_s"]
            except Exception as error:  # whatever a peer dies of is its row
                peer.failure = in_short(error)
            field.append(peer)
        try:
            timed = contenders.take_turns(field)
        finally:
            for each in field:
                if isinstance(each.process, OpenVino):
                    each.process.close()
        row: Row = {"case": f"{name}:{batch}", "recipe": contenders.recipe_of(out), "contenders": {}}
    for each in field:
        entry: Row = {"failure": each.failure}
        if each.process and timed.rows[each.name]:
            seconds = sorted(timed.seconds(each.name))
            top1 = outputs[each.name].argmax(-1) == original.argmax(-1)
            error = each.quality.drop if each.quality else 0.0
            entry = {
                "ms": 1e3 * seconds[len(seconds) // 2],
                "versus_eager": triple(timed.speedup("eager fp32", each.name)),
                "error": error,
                "top1": top1.double().mean().item() if original.ndim == 2 else None,
                "within_budget": error <= options.max_drop,
                "ready_s": round(each.ready_s, 1),
            }
            if each.name == "torchwright":
                entry["recipe"] = row["recipe"]
        row["contenders"][each.name] = entry
    theirs = {k: v for k, v in row["contenders"].items() if k.startswith("OpenVINO") and "ms" in v}
    if "ms" not in row["contenders"]["torchwright"]:
        return row
    within = [name for name, entry in theirs.items() if entry["within_budget"]]
    for what, among in (("within_budget", within), ("of_all", list(theirs))):
        if among:
            best = min(among, key=lambda name: theirs[name]["ms"])
            row |= {what: best, f"ratio_{what}": triple(timed.speedup(best, "torchwright"))}
    return row


def cells(case: str, contender: str, entry: Row) -> tuple[str, ...]:
    if "ms" not in entry:
        return case, contender, f"failed: {entry['failure']}", "", "", "", ""
    name = f"{contender} ({entry['recipe']})" if "recipe" in entry else contender
    top1 = "" if entry["top1"] is None else f"{entry['top1']:.3f}"
    within = "yes" if entry["within_budget"] else "no"
    gain = times(entry["versus_eager"])
    return case, name, f"{entry['ms']:.2f}", gain, f"{entry['error']:.4f}", top1, within


if __name__ == "__main__":
    main()
