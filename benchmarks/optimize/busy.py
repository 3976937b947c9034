"""Searches next to busy neighbours: their time, their claims, and the verdict of `verify` on them.

    python -m benchmarks.optimize.busy [CASE …] [--processes 12] [--threads 2] [--verify 10] [--json FILE]

Each case (readme, getting_started, three_layers) is optimized by the command line alone and then next to processes that
multiply matrices. `verify` follows once they have ended. The exit status is 1 if a command failed or took more than
five times as long. A kept step whose interval spans more than a factor of two is a fault. So is a claim of
more than twice the quiet run's, or one that does not hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.neighbours import multiplying
from benchmarks.harness.run import Row, last_line, times, triple
from torchwright.optimization.artifact.folder import read_recipe

TIMES, WIDEST, FACTOR = 5.0, 2.0, 2.0
"""Limits: times of the quiet run, the ends of an interval, and claims."""
MODULES = """
import torch
from torch import nn

def getting_started():
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)), torch.randn(16, 256)

def three_layers():
    layers = nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers), torch.randn(32, 256)
"""
CASES = {
    "readme": [],
    "getting_started": ["modules.py:getting_started", "--max-drop", "0.02", "--time-budget", "1m"],
    "three_layers": ["modules.py:three_layers", "--time-budget", "20"],
}
VERDICTS = {0: "holds", 1: "does not hold", 3: "not decided"}
COLUMNS = ("case", "quiet", "busy", "times", "claim, quiet", "claim, busy", "kept, busy", "verify", "says")


def main() -> int:
    options = run.options(__doc__, "cases*", processes=12, threads=2, verify=10)
    if unknown := set(options.cases) - CASES.keys():
        raise SystemExit(f"no case is called {unknown.pop()!r}; there are {', '.join(CASES)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "modules.py").write_text(MODULES)
        for name in options.cases or CASES:
            quiet = optimized(name, folder, "quiet")
            with multiplying(options.processes, options.threads):
                busy = optimized(name, folder, "busy")
            row: Row = {"case": name, "quiet": quiet, "busy": busy}
            if busy["exit"] == 0:
                row["verify"] = verified(folder, options.verify)
            rows.append(row | {"faults": faults(row, options.verify)})
            run.say(json.dumps(rows[-1]))
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.head(COLUMNS)
    for row in rows:
        print(run.line(cells(row)))
    return int(any(row["faults"] for row in rows))


def optimized(name: str, folder: Path, out: str) -> Row:
    """Search once by the command line; return seconds, exit status, claim and kept steps."""
    begun = time.monotonic()
    done = run.torchwright("optimize", *CASES[name], "-o", out, cwd=folder, check=False)
    found: Row = {"seconds": round(time.monotonic() - begun, 1), "exit": done.returncode}
    if done.returncode != 0:
        return found | {"error": last_line(done.stderr)}
    recipe = read_recipe(folder / out)
    kept = {str(rung.step): triple(rung.speedup) for rung in recipe.rungs if rung.kept and rung.speedup}
    notes = [note for note in recipe.notes if "stretched" in note or "busy" in note]
    return found | {"claim": triple(recipe.speedup), "kept": kept, "notes": notes}


def verified(folder: Path, count: int) -> dict[str, int]:
    """Return the number of times that `verify` gave each verdict."""
    runs = (run.torchwright("verify", "busy", "--trust", cwd=folder, check=False) for _ in range(count))
    return dict(Counter(VERDICTS.get(done.returncode, f"exit {done.returncode}") for done in runs))


def faults(row: Row, verified: int) -> list[str]:
    quiet, busy = row["quiet"], row["busy"]
    if quiet["exit"] or busy["exit"]:
        return [f"exit {quiet['exit']}, {busy['exit']}"]
    found = []
    if busy["seconds"] > TIMES * quiet["seconds"]:
        found.append("too slow")
    found += [f"{step} spans" for step, (_, low, high) in busy["kept"].items() if high > WIDEST * low]
    if busy["claim"][0] > FACTOR * quiet["claim"][0]:
        found.append("claims too much")
    if row["verify"].get("holds", 0) < verified:
        found.append("verify")
    return found


def cells(row: Row) -> list[str]:
    quiet, busy = row["quiet"], row["busy"]
    return [
        row["case"],
        *(f"{found['seconds']:.0f} s" for found in (quiet, busy)),
        f"{busy['seconds'] / quiet['seconds']:.1f}",
        *(times(found["claim"]) if "claim" in found else "none" for found in (quiet, busy)),
        " + ".join(busy.get("kept", ())) or "nothing",
        ", ".join(f"{count} {verdict}" for verdict, count in row.get("verify", {}).items()),
        "; ".join(row["faults"]) or "right",
    ]


if __name__ == "__main__":
    sys.exit(main())
