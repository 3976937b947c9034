"""Sixteen pictures, sounds and encoders on a CPU: eager fp32, Torchwright, OpenVINO fp32, bf16 and int8.

    python benchmarks/vision_cpu.py [--only NAME:BATCH …] [--max-drop 0.02] [--engines] [--openvino-python PATH]
        [--json FILE]

Torchwright stands alone here; with --engines its search asks OpenVINO and ONNX Runtime, too. The accuracy budget
(relative error of the outputs) is one for all: OpenVINO's best is the fastest of those within it, and the fastest of
all is printed beside it. A peer that fails says of what. Random weights; every ratio from turns of one run. Some models
are torchvision's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import modules
import torchwright as tw
import turns
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

CASES = (
    "resnet50:1",
    "resnet50:16",
    "vit_b16:1",
    "vit_b16:8",
    "minilm_shape:1",
    "minilm_shape:32",
    "mobilenet_v3_small:1",
    "efficientnet_b0:1",
    "efficientnet_b0:8",
    "shufflenet_v2:8",
    "convnext_tiny:1",
    "swin_t:1",
    "detr:1",
    "unet3d:1",
    "transformer_encoder:8",
    "wav2vec2:1",
)
PEERS = ("openvino", "onnxruntime")
"""Techniques that would be the peers themselves."""
PRECISIONS = ("fp32", "bf16", "int8")
PEER_SECONDS = 180


class Peer:
    """openvino_peer.py in its interpreter."""

    def __init__(self, python: str, name: str, batch: int, precision: str, folder: str) -> None:
        script = Path(__file__).with_name("openvino_peer.py")
        arguments = [name, str(batch), precision, folder, str(torch.get_num_threads())]
        self.words = Path(folder) / f"{precision}.log"
        with self.words.open("w") as words:
            self.process = subprocess.Popen(
                [python, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
            )
        self.built = self.answer()

    def ask(self, _: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"turn\n")
        self.process.stdin.flush()
        return {"forward": self.answer()["seconds"]}

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(PEER_SECONDS):
                self.close()
                raise RuntimeError(f"no answer in {PEER_SECONDS} s{self.last_words()}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with exit code {self.process.wait()}{self.last_words()}")
        return json.loads(line)

    def last_words(self) -> str:
        """The last line that it wrote on standard error, which is where Python says what it died of."""
        lines = self.words.read_text(errors="replace").splitlines()
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Eager, Torchwright and OpenVINO on vision and encoder shapes."
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME:BATCH", help=f"of {', '.join(CASES)}, or others"
    )
    parser.add_argument(
        "--max-drop", type=float, default=0.02, help="relative error allowed (default: %(default)s)"
    )
    parser.add_argument("--time-budget", type=float, default=150.0, help="seconds of search for each case")
    parser.add_argument("--engines", action="store_true", help="let the search ask engines of others, too")
    here = sys.executable if importlib.util.find_spec("openvino") else None
    parser.add_argument(
        "--openvino-python", metavar="PATH", default=here, help="interpreter that has openvino and nncf"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    turns.print_machine()
    print(f"relative error allowed: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a case\n")
    print("| case | contender | ms | over eager | relative error | top-1 | within budget |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for case in options.only or CASES:
        name, _, batch = case.partition(":")
        row = run(name, int(batch or 1), options)
        rows.append(row)
        for contender, entry in row["contenders"].items():
            print(as_line(case, contender, entry), flush=True)
        for what in ("within_budget", "of_all"):
            if f"ratio_{what}" in row:
                ratio = "{:.2f}x [{:.2f}, {:.2f}]".format(*row[f"ratio_{what}"])
                print(
                    f"| {case} | against OpenVINO's best {what.replace('_', ' ')}: {row[what]} | | {ratio} | | | |"
                )
        turns.write_json(options.json, rows)


def run(name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    model, inputs = modules.make(modules.VISION[name], batch)
    with tempfile.TemporaryDirectory() as folder, turns.contenders() as start:
        turns.say(f"{name} batch {batch}: optimizing")
        out = f"{folder}/artifact"
        result = tw.optimize(
            model,
            inputs,
            max_drop=options.max_drop,
            time_budget=options.time_budget,
            without=() if options.engines else PEERS,
        )
        result.save(out)
        torch.save(model.state_dict(), f"{folder}/state.pt")
        torch.save(list(inputs), f"{folder}/inputs.pt")
        eager = start("eager fp32", ModuleWorkload(model, inputs))
        reference = turns.observe(eager)
        ours = ModuleWorkload(turns.FromArtifact(model, out), inputs)
        field: list[Any] = [eager, start("torchwright", ours, reference=reference)]
        outputs = {c.name: turns.observe(c)[0].outputs[0] for c in field if c.process}
        original = outputs["eager fp32"]
        peers = []
        for precision in PRECISIONS if options.openvino_python else ():
            turns.say(f"{name} batch {batch}: OpenVINO {precision}")
            contender = turns.Contender(name=f"OpenVINO {precision}")
            try:
                contender.process = peer = Peer(options.openvino_python, name, batch, precision, folder)
                peers.append(peer)
                outputs[contender.name] = torch.load(f"{folder}/{precision}.pt", weights_only=True)
                contender.quality = relative_error([original], [outputs[contender.name]])
                contender.ready_s = peer.built["ready_s"]
            except Exception as error:  # whatever a peer dies of is its row
                contender.failure = f"{type(error).__name__}: {error}"[:200]
            field.append(contender)
        try:
            timed = turns.take_turns(field)
        finally:
            for peer in peers:
                peer.close()
        row: dict[str, Any] = {"case": f"{name}:{batch}", "recipe": turns.recipe_of(out), "contenders": {}}
    for contender in field:
        entry: dict[str, Any] = {"failure": contender.failure}
        if contender.process and timed.rows[contender.name]:
            seconds = sorted(timed.seconds(contender.name))
            speedup = timed.speedup("eager fp32", contender.name)
            top1 = outputs[contender.name].argmax(-1) == original.argmax(-1)
            error = contender.quality.drop if contender.quality else 0.0
            entry = {
                "ms": 1e3 * seconds[len(seconds) // 2],
                "versus_eager": [speedup.value, speedup.low, speedup.high],
                "error": error,
                "top1": top1.double().mean().item() if original.ndim == 2 else None,
                "within_budget": error <= options.max_drop,
                "ready_s": round(contender.ready_s, 1),
            }
            if contender.name == "torchwright":
                entry["recipe"] = row["recipe"]
        row["contenders"][contender.name] = entry
    theirs = {k: v for k, v in row["contenders"].items() if k.startswith("OpenVINO") and "ms" in v}
    if "ms" not in row["contenders"]["torchwright"]:
        return row
    for what, among in (
        ("within_budget", [name for name, entry in theirs.items() if entry["within_budget"]]),
        ("of_all", list(theirs)),
    ):
        if among:
            best = min(among, key=lambda name: theirs[name]["ms"])
            ratio = timed.speedup(best, "torchwright")
            row |= {what: best, f"ratio_{what}": [ratio.value, ratio.low, ratio.high]}
    return row


def as_line(case: str, contender: str, entry: dict[str, Any]) -> str:
    if "ms" not in entry:
        return f"| {case} | {contender} | failed: {entry['failure']} | | | | |"
    name = f"{contender} ({entry['recipe']})" if "recipe" in entry else contender
    speedup = "{:.2f}x [{:.2f}, {:.2f}]".format(*entry["versus_eager"])
    top1 = "" if entry["top1"] is None else f"{entry['top1']:.3f}"
    within = "yes" if entry["within_budget"] else "no"
    return f"| {case} | {name} | {entry['ms']:.2f} | {speedup} | {entry['error']:.4f} | {top1} | {within} |"


if __name__ == "__main__":
    main()
