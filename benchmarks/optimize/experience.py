"""The table of experience, and the time to 95% of a search's gain with and without it.

    python -m benchmarks.optimize.experience search DIR [--only NAME …] [--time-budget 150] [--max-drop 0.02]
    python -m benchmarks.optimize.experience table DIR
    python -m benchmarks.optimize.experience apart DIR [--only NAME …]

`search` records exhaustive searches, each in a process of its own and a file of DIR; existing files are kept.
`zoo.py --recipes DIR` records its own there, which end with their time. `table` puts these files into
src/torchwright/optimization/search/experience.json, each in place of the same model's entry for that kind of machine.
`apart` searches each model once more, with a table of all the others (leave one out), and prints both searches side by
side. The gain is the speed-up less one, as measured when a step was kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.models import outside, shapes, zoo
from benchmarks.optimize.recorded import TRIED, reached, record, wait
from benchmarks.optimize.zoo import keep
from torchwright.core.json_file import read_json, typed
from torchwright.core.records import Budget, Recipe
from torchwright.optimization.optimize import optimize
from torchwright.optimization.search import experience
from torchwright.optimization.search.experience import SearchRecord
from torchwright.optimization.search.state import Request
from torchwright.report.terminal import LiveProgress
from torchwright.workloads.module import ModuleWorkload

APART = "apart"
"""Folder of the searches with experience, inside that of those without."""
# fmt: off
MODELS = [
    "resnet18", "squeezenet1_1", "mobilenet_v2", "mnasnet1_0", "vit_b_32", "unet",
    "DistilBertForSequenceClassification", "ElectraForTokenClassification", "causal_tagger", "PatchTSTForPrediction",
    "temporal_conv", "separable", "pointnet", "keyword_gru",
]
# fmt: on
SHARE = 0.95
LEAST = 1.1
"""A search that ends with a smaller speed-up has no gain to wait for."""
COLUMNS = (
    *("model", "gain without, with", "to 95%, s", "ratio", "trials to 95%"),
    *("trials in all", "search, s"),
)


def main() -> None:
    options = run.options(
        __doc__, "what", "folder", json=False, only=MODELS, time_budget=150.0, max_drop=0.02, table=Path
    )
    options.folder = Path(options.folder)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "one":
        one(options.only[0], options)
    elif options.what == "search":
        for name in options.only:
            in_process(name, options.folder / f"{name}.json", options)
    elif options.what == "table":
        both = (*experience.read(), *records(options.folder))
        found = {(each.model, each.instructions): each for each in both}
        experience.TABLE.write_text(as_text([found[key] for key in sorted(found)]))
    elif options.what == APART:
        apart(options)
    else:
        raise SystemExit(f"{options.what!r} is not one of search, table and apart")


# Searches


def in_process(name: str, file: Path, options: argparse.Namespace, table: Path | None = None) -> None:
    """Search once in a process of its own, unless the file exists."""
    if file.is_file():
        return
    run.say(name)
    words = ["one", file.parent, "--only", name, "--time-budget", options.time_budget]
    words += ["--max-drop", options.max_drop, *(["--table", table] if table else [])]
    command = [sys.executable, "-m", "benchmarks.optimize.experience", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {run.last_line(done.stderr)[:200]}", flush=True)


def one(name: str, options: argparse.Namespace) -> None:
    model, inputs = make(name)
    budget = Budget(max_drop=options.max_drop, time_seconds=options.time_budget)
    request = Request(workload=ModuleWorkload(model, inputs), budget=budget, experience=options.table)
    with tempfile.TemporaryDirectory() as folder, LiveProgress(quiet=True) as progress:
        recipe = optimize(request, Path(folder) / "artifact", progress)
    keep(name, recipe, options.folder)


def make(name: str) -> tuple[Any, Any]:
    if name in zoo.MODELS:
        return zoo.make_several(name)
    return outside.make(name) if name in outside.MODULES else shapes.make(*shapes.MODULES[name])


# The table


def read(file: Path) -> tuple[str, Recipe]:
    found = read_json(file)
    return found["commit"], typed(found["recipe"], Recipe, str(file))


def records(folder: Path, without: str | None = None) -> list[SearchRecord]:
    """Return an entry for each file of the folder, except for one model and searches that tried nothing."""
    found: list[SearchRecord] = []
    for file in sorted(folder.glob("*.json")):
        commit, recipe = read(file)
        try:
            found += [record(recipe, file.stem, commit)] if file.stem != without else []
        except ValueError as error:
            run.say(str(error))
    return found


def as_text(found: list[SearchRecord]) -> str:
    return json.dumps({"searches": [dataclasses.asdict(each) for each in found]}, indent=1) + "\n"


# With and without


def apart(options: argparse.Namespace) -> None:
    run.Rows(columns=COLUMNS)
    ratios: list[float] = []
    for name in options.only:
        file = options.folder / APART / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        if not (options.folder / f"{name}.json").is_file():
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".json") as table:
            table.write(as_text(records(options.folder, without=name)))
            table.flush()
            in_process(name, file, options, Path(table.name))
        if file.is_file():
            ratios += side_by_side(name, read(options.folder / f"{name}.json")[1], read(file)[1])
    if ratios:
        middle = statistics.median(ratios)
        print(f"\n{len(ratios)} models with a gain: time to 95%, with over without: median {middle:.2f}")


def side_by_side(name: str, without: Recipe, having: Recipe) -> list[float]:
    """Print a line of the page; return the ratio of the times, if there is a gain to wait for."""
    both = (without, having)
    waits = [wait(recipe, SHARE) for recipe in both]
    ratios = [waits[1][0] / waits[0][0]] if min(reached(recipe) for recipe in both) >= LEAST else []
    cells = [name, ", ".join(f"{reached(recipe):.2f}x" for recipe in both)]
    if ratios:
        cells += [", ".join(f"{seconds:.0f}" for seconds, _ in waits), f"{ratios[0]:.2f}"]
        cells.append(", ".join(str(count) for _, count in waits))
    else:
        cells += [""] * 3
    cells += [", ".join(str(sum(rung.status in TRIED for rung in recipe.rungs)) for recipe in both)]
    cells += [", ".join(f"{recipe.search_seconds:.0f}" for recipe in both)]
    print(run.line(cells), flush=True)
    return ratios


if __name__ == "__main__":
    main()
