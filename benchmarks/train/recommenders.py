# pyright: reportMissingImports=false
"""Recommenders by `torchwright train` on generated clicks: quality and drift by how often copies of the tables meet.

    python -m benchmarks.train.recommenders [--rows N] [--processes 4] [--json FILE]

A DLRM learns N rows of `examples/clicks/clicks.py` once, in one process and in several: one copy of the tables that all
share, and two copies that meet every 1, 8 and 64 steps. Reported are AUC and normalized entropy on later rows of the
same world. Drift is that of a run's first steps from those of a single copy, from its report.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.run import Row
from torchwright.train.run.observe.metrics import read_figures

sys.path.append(str(run.ROOT / "examples" / "clicks"))
from clicks import generate

HELD_OUT, FIRST = 50_000, 100_000_000
LAYOUTS = {"one process": (1, 1), "one copy": (1, 1)} | {
    f"two copies, sync every {n}": (2, n) for n in (1, 8, 64)
}
RUN = """kind = "recommender"
out = "{out}"
samples = {rows}
batch = 512
threads = 1
[dlrm]
rows = 10_000
[data]
train = ["train.tsv.gz"]
validation = ["held.tsv.gz"]
[embeddings]
groups = {groups}
sync_every = {every}
"""


def train(folder: Path, name: str, rows: int, processes: int) -> Row:
    """Train in fresh processes."""
    groups, every = LAYOUTS[name]
    out = name.replace(" ", "-").replace(",", "")
    path = folder / f"{out}.toml"
    path.write_text(RUN.format(out=out, rows=rows, groups=groups, every=every))
    command = [sys.executable, "-m"]
    if name != "one process":
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["torchwright", "train", str(path), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    figures = read_figures(folder / out)
    last = figures[max(figures)]
    report = json.loads((folder / out / "report.json").read_text())
    return {
        "layout": name,
        "auc": last["auc"],
        "normalized_entropy": last["normalized_entropy"],
        "steps": report["steps"],
        **report.get("drift", {}),
    }


def main() -> None:
    options = run.options(__doc__, rows=400_000, processes=4)
    columns = ("layout", "AUC", "normalized entropy", "drift: loss", "tables", "dense layers")
    rows = run.Rows(options.json, columns)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generate(folder / "train.tsv.gz", "criteo", options.rows)
        generate(folder / "held.tsv.gz", "criteo", HELD_OUT, first=FIRST)
        for name in LAYOUTS:
            row = train(folder, name, options.rows, options.processes)
            drift = ("", "", "")
            if "loss_mean" in row:
                drift = (f"{row['loss_mean']:.4f}", f"{row['tables_mean']:.0%}", f"{row['dense']:.0%}")
            rows.add(row, (name, f"{row['auc']:.4f}", f"{row['normalized_entropy']:.4f}", *drift))


if __name__ == "__main__":
    main()
