"""The table of experience, and how soon a search has 95% of its gain with and without it.

    python benchmarks/experience.py search DIR [--only NAME …] [--time-budget 150] [--max-drop 0.02]
    python benchmarks/experience.py table DIR
    python benchmarks/experience.py apart DIR [--only NAME …]

`search` records exhaustive searches, each in a process of its own and a file of DIR; what has a file already is passed
over. `hundred.py --recipes DIR` records its own there, which end with their time. `table` puts these files into
src/torchwright/optimization/search/experience.json, each in the place of what that has of the same model. `apart`
searches each model once more, with a table of all the others (leave one out), and prints both searches side by side.
The gain is the speed-up less one, as measured when a step was kept.
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

import hundred
import hundred_models
import modules
import outside_modules
import turns
from torchwright.core.json_file import read_json, typed
from torchwright.core.records import Budget, Recipe
from torchwright.optimization.search import experience
from torchwright.optimization.search.experience import Record
from torchwright.optimization.search.optimize import optimize
from torchwright.optimization.search.recorded import TRIED, reached, record, wait
from torchwright.optimization.search.state import Request
from torchwright.report.terminal import LiveProgress
from torchwright.workloads.module import ModuleWorkload

APART = "apart"
"""Folder of the searches with experience, in that of those without."""
MODELS = (
    *("resnet18", "squeezenet1_1", "mobilenet_v2", "mnasnet1_0", "vit_b_32", "unet"),
    *(
        "DistilBertForSequenceClassification",
        "ElectraForTokenClassification",
        "causal_tagger",
        "PatchTSTForPrediction",
    ),
    *("temporal_conv", "separable", "pointnet", "keyword_gru"),
)
SHARE = 0.95
LEAST = 1.1
"""A search that ends with less has no gain to wait for."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["search", "table", "apart", "one"])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=MODELS)
    parser.add_argument("--time-budget", type=float, default=150.0)
    parser.add_argument("--max-drop", type=float, default=0.02)
    parser.add_argument("--table", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "one":
        one(options.only[0], options)
    elif options.what == "search":
        for name in options.only:
            in_process(name, options.folder / f"{name}.json", options)
    elif options.what == "table":
        found = {each.model: each for each in (*experience.read(), *records(options.folder))}
        experience.TABLE.write_text(as_text([found[name] for name in sorted(found)]))
    else:
        apart(options)


# Searches


def in_process(name: str, file: Path, options: argparse.Namespace, table: Path | None = None) -> None:
    """One search in a process of its own, unless its file is there."""
    if file.is_file():
        return
    turns.say(name)
    command = [sys.executable, __file__, "one", str(file.parent), "--only", name]
    command += ["--time-budget", str(options.time_budget), "--max-drop", str(options.max_drop)]
    command += ["--table", str(table)] if table else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {''.join(done.stderr.strip().splitlines()[-1:])[:200]}", flush=True)


def one(name: str, options: argparse.Namespace) -> None:
    model, inputs = make(name)
    budget = Budget(max_drop=options.max_drop, time_seconds=options.time_budget)
    request = Request(workload=ModuleWorkload(model, inputs), budget=budget, experience=options.table)
    with tempfile.TemporaryDirectory() as folder, LiveProgress(quiet=True) as progress:
        recipe = optimize(request, Path(folder) / "artifact", progress)
    hundred.keep(name, recipe, options.folder)


def make(name: str) -> tuple[Any, Any]:
    if name in hundred_models.MODELS:
        return hundred_models.make_several(name)
    return (
        outside_modules.make(name)
        if name in outside_modules.MODULES
        else modules.make(*modules.MODULES[name])
    )


# The table


def read(file: Path) -> tuple[str, Recipe]:
    found = read_json(file)
    return found["commit"], typed(found["recipe"], Recipe, str(file))


def records(folder: Path, without: str | None = None) -> list[Record]:
    """An entry for each file of the folder, but for that of one model and searches that tried nothing."""
    found: list[Record] = []
    for file in sorted(folder.glob("*.json")):
        commit, recipe = read(file)
        try:
            found += [record(recipe, file.stem, commit)] if file.stem != without else []
        except ValueError as error:
            turns.say(str(error))
    return found


def as_text(found: list[Record]) -> str:
    return json.dumps({"searches": [dataclasses.asdict(each) for each in found]}, indent=1) + "\n"


# With and without


def apart(options: argparse.Namespace) -> None:
    turns.print_machine()
    print(
        "| model | gain without, with | to 95% of it, s | ratio | trials to it | trials in all | search, s |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
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
        print(
            f"\n{len(ratios)} models with a gain: time to 95% of it, with over without: median {middle:.2f}"
        )


def side_by_side(name: str, without: Recipe, having: Recipe) -> list[float]:
    """A line of the page; the ratio of the times, where there is a gain to wait for."""
    both = (without, having)
    waits = [wait(recipe, SHARE) for recipe in both]
    cells = [name, ", ".join(f"{reached(recipe):.2f}x" for recipe in both)]
    if min(reached(recipe) for recipe in both) < LEAST:
        cells += ["", "", ""]
    else:
        cells += [
            ", ".join(f"{seconds:.0f}" for seconds, _ in waits),
            f"{waits[1][0] / waits[0][0]:.2f}",
            ", ".join(str(count) for _, count in waits),
        ]
    cells += [", ".join(str(sum(rung.status in TRIED for rung in recipe.rungs)) for recipe in both)]
    cells += [", ".join(f"{recipe.search_seconds:.0f}" for recipe in both)]
    print("| " + " | ".join(cells) + " |", flush=True)
    return [waits[1][0] / waits[0][0]] if cells[2] else []


if __name__ == "__main__":
    main()
