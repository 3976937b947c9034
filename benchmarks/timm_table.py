"""A table of timm's models: ours beside the best of OpenVINO (float32, bfloat16) and ONNX Runtime, within one budget.

    python benchmarks/timm_table.py [NAME …] [--max-drop 0.02] [--time-budget 120]

Names are timm's own. For each, in a process of its own: a search, the artifact loaded in a new process, then turns with
the original and with the fastest peer that stays within the budget (the harness of hundred.py). Exit status 1 where
ours is behind (under 0.97x), wrong, or failed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hundred
import hundred_models
from hundred_page import LEVEL, ORIGINAL, OURS, Row, wrong
from timm_import import import_timm

DEFAULT = (
    "ghostnetv2_100",
    "tf_efficientnetv2_b0",
    "mobilenetv4_conv_small",
    "resnetv2_50",
    "tf_mixnet_s",
    "convnextv2_tiny",
)
ONE = "_one"
PEERS = "peers"
HEAD = (
    "model",
    "kept",
    "original, ms",
    "ours, ms",
    "over the original",
    "best peer",
    "over it",
    "error",
    "says",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=DEFAULT, metavar="NAME")
    parser.add_argument("--max-drop", type=float, default=0.02, help="accuracy budget (default: %(default)s)")
    parser.add_argument(
        "--time-budget", type=float, default=120.0, help="seconds of search (default: %(default)s)"
    )
    options = parser.parse_args()
    known = set(import_timm().list_models())
    if strange := [name for name in options.names if name not in known]:
        parser.error(f"timm has no model {strange[0]!r}")
    print("| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD), sep="\n", flush=True)
    failed = False
    for name in options.names:
        row = run(name, options.max_drop, options.time_budget)
        says = faults(row)
        print(as_line(name, row, says), flush=True)
        failed |= bool(says)
    return int(failed)


def run(name: str, max_drop: float, time_budget: float) -> Row:
    """One model's row, made in a process of its own; whatever goes wrong is its `failure`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, ONE, folder, name, str(max_drop), str(time_budget)]
        try:
            limit = hundred.SEARCHES * time_budget
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failure": f"not done in {limit:.0f} s"}
        out = Path(folder) / "row.json"
        return json.loads(out.read_text()) if out.is_file() else {"failure": hundred.death(done)}


def faults(row: Row) -> list[str]:
    says = wrong(row)
    if "over" in row and PEERS not in row["over"]:
        says.append("no peer is within the budget")
    elif "over" in row and row["over"][PEERS][0] < LEVEL:
        says.append("behind")
    return says


def as_line(name: str, row: Row, says: list[str]) -> str:
    cells = [name, *[""] * 7, "; ".join(says) or "level or ahead"]
    if "over" in row:
        best = row["best"].get(PEERS, "")
        peer = row["over"].get(PEERS)
        cells[1:8] = [
            row["kept"],
            f"{row['ms'][ORIGINAL]:.2f}",
            f"{row['ms'][OURS]:.2f}",
            "{:.2f}x [{:.2f}, {:.2f}]".format(*row["over"][ORIGINAL]),
            best,
            "{:.2f}x [{:.2f}, {:.2f}]".format(*peer) if peer else "",
            f"{row['fresh_loss']:.2%}" if isinstance(row["fresh_loss"], float) else "",
        ]
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


# In the model's own process


def one(folder: str, name: str, max_drop: float, time_budget: float) -> Row:
    key = f"{hundred_models.TIMM}{name}"
    if key not in hundred_models.MODELS:
        hundred_models.add_timm(name)
    return hundred.one(folder, key, max_drop, time_budget, alone=False, peers_of=peers)


def peers(model: nn.Module) -> hundred.Peers:
    return {PEERS: _each(model)}


def _each(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for precision, made in hundred.by_openvino(model):
        yield f"OpenVINO {precision}", made
    yield "ONNX Runtime", ByOnnxRuntime(model)


class ByOnnxRuntime(nn.Module):
    """A module in ONNX Runtime, exported at the first call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._session: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._session is None:
            self._session = self._opened(x)
        (name,) = (given.name for given in self._session.get_inputs())
        return torch.from_numpy(self._session.run(None, {name: x.numpy()})[0])

    def _opened(self, x: torch.Tensor) -> Any:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        exported = torch.onnx.export(self.inner, (x,), dynamo=True, verbose=False)
        assert exported is not None
        content = exported.model_proto.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        folder, name, drop, seconds = sys.argv[2:]
        (Path(folder) / "row.json").write_text(json.dumps(one(folder, name, float(drop), float(seconds))))
    else:
        sys.exit(main())
