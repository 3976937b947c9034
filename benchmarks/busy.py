"""Searches beside busy neighbours: do they end, in what time, and does what they claim hold?

    python benchmarks/busy.py [CASE …] [--processes 12] [--threads 2] [--verify 10] [--json FILE]

Each case is optimized by the command line alone and then beside processes that multiply matrices. `verify` follows
once they have ended. Exit status 1 where a command failed, took more than five times as long, kept a step whose
interval spans more than a factor of two, claimed more than twice what the quiet run did, or does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwright.optimization.artifact.folder import read_recipe

TIMES, WIDEST, FACTOR = 5.0, 2.0, 2.0
"""Limits of issue 57: times of the quiet run, the ends of an interval, and claims."""
NEIGHBOUR = "import torch; torch.set_num_threads({}); a = torch.randn(1024, 1024)\nwhile True: a @ a"
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
HEAD = ("case", "quiet", "busy", "times", "claim, quiet", "claim, busy", "kept, busy", "verify", "says")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--processes", type=int, default=12, help="neighbours (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each neighbour (default: %(default)s)")
    parser.add_argument(
        "--verify", type=int, default=10, help="times that verify runs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    if strange := set(options.cases) - CASES.keys():
        parser.error(f"no case is called {strange.pop()!r}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "modules.py").write_text(MODULES)
        for name in options.cases:
            quiet = optimized(name, Path(folder), "quiet")
            with neighbours(options.processes, options.threads):
                busy = optimized(name, Path(folder), "busy")
            row = {"case": name, "quiet": quiet, "busy": busy}
            if busy["exit"] == 0:
                row["verify"] = verified(Path(folder), options.verify)
            rows.append(row | {"faults": faults(row, options.verify)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD), sep="\n")
    for row in rows:
        print("| " + " | ".join(cells(row)) + " |")
    return int(any(row["faults"] for row in rows))


@contextlib.contextmanager
def neighbours(count: int, threads: int) -> Iterator[None]:
    """Processes that multiply matrices until the block ends."""
    command = [sys.executable, "-c", NEIGHBOUR.format(threads)]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(20)  # they import torch first
        yield
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


def optimized(name: str, folder: Path, out: str) -> dict[str, Any]:
    """One search by the command line: its seconds, exit status, claim and kept steps."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "torchwright", "optimize", *CASES[name], "-o", out]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1), "exit": done.returncode}
    if done.returncode != 0:
        return found | {"error": done.stderr.strip().splitlines()[-1:]}
    recipe = read_recipe(folder / out)
    kept = {
        str(rung.step): [rung.speedup.value, rung.speedup.low, rung.speedup.high]
        for rung in recipe.rungs
        if rung.kept and rung.speedup
    }
    claim = [recipe.speedup.value, recipe.speedup.low, recipe.speedup.high]
    notes = [note for note in recipe.notes if "stretched" in note or "busy" in note]
    return found | {"claim": claim, "kept": kept, "notes": notes}


def verified(folder: Path, times: int) -> dict[str, int]:
    """Verdict → how often `verify` gave it."""
    command = [sys.executable, "-m", "torchwright", "verify", "busy", "--trust"]
    codes = [subprocess.run(command, cwd=folder, capture_output=True).returncode for _ in range(times)]
    return dict(Counter(VERDICTS.get(code, f"exit {code}") for code in codes))


def faults(row: dict[str, Any], times: int) -> list[str]:
    quiet, busy = row["quiet"], row["busy"]
    if quiet["exit"] or busy["exit"]:
        return [f"exit {quiet['exit']}, {busy['exit']}"]
    found = []
    if busy["seconds"] > TIMES * quiet["seconds"]:
        found.append("too slow")
    found += [f"{step} spans" for step, (_, low, high) in busy["kept"].items() if high > WIDEST * low]
    if busy["claim"][0] > FACTOR * quiet["claim"][0]:
        found.append("claims too much")
    if row["verify"].get("holds", 0) < times:
        found.append("verify")
    return found


def cells(row: dict[str, Any]) -> list[str]:
    quiet, busy = row["quiet"], row["busy"]

    def claim(found: dict[str, Any]) -> str:
        return "{:.2f}x [{:.2f}, {:.2f}]".format(*found["claim"]) if "claim" in found else "none"

    return [
        row["case"],
        f"{quiet['seconds']:.0f} s",
        f"{busy['seconds']:.0f} s",
        f"{busy['seconds'] / quiet['seconds']:.1f}",
        claim(quiet),
        claim(busy),
        " + ".join(busy.get("kept", ())) or "nothing",
        ", ".join(f"{count} {verdict}" for verdict, count in row.get("verify", {}).items()),
        "; ".join(row["faults"]) or "right",
    ]


if __name__ == "__main__":
    sys.exit(main())
