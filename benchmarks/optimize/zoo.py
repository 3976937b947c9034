"""The model zoo benchmark: each architecture optimized, then compared with the original, torch.compile and OpenVINO.

    python -m benchmarks.optimize.zoo [--only NAME …] [--again] [--rows FILE] [--time-budget 90] [--max-drop 0.01]
                                      [--recipes DIR]
    python -m benchmarks.optimize.zoo --check [--only NAME …]
    python -m benchmarks.optimize.zoo --page FILE [--rows FILE]

Each architecture of models/zoo.py has a process of its own. FILE (benchmarks/hundred.jsonl) has a line of JSON for
each, with the machine, the number of threads and the commit. Without `--again` only those without a line on this
machine are run, so that a stopped run goes on; with it, those without one of this commit. An artifact is loaded in a
new process and must agree with the original on fresh inputs in another batch. It takes turns with the original, with
torch.compile as its author would use it, and with OpenVINO if that is installed. A peer that leaves the budget, or is
not ready in the time of the whole search, does not count. `--recipes` keeps each search for experience.py, and
`--alone` leaves out peers. `--check` builds and calls the originals only; `--page` makes a page of the lines; `--list`
names the architectures.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import starmap, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchwright as tw
from benchmarks.harness import contenders, run
from benchmarks.harness.contenders import Contender
from benchmarks.harness.engines import ByOpenVino
from benchmarks.harness.run import Row, in_short, last_line, triple
from benchmarks.models import zoo
from benchmarks.optimize import zoo_check
from benchmarks.optimize.zoo_page import BY_HAND, OPENVINO, ORIGINAL, OURS, as_line, faults, page, read_rows
from torchwright.core.records import Recipe
from torchwright.hardware.devices import default_name
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

ONE = "_one"
ROWS = run.ROOT / "benchmarks" / "hundred.jsonl"
PRECISIONS = ("f32", "bf16")
GLANCES = 3
"""Timings by which the fastest of the peers is chosen."""
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "diffusers", "openvino", "nncf", "onnxruntime")
"""Libraries of the models, the engines and the peers."""
SEARCHES = 10
"""Limit of one architecture, in times of its search."""


def main() -> int:
    options = run.options(
        __doc__,
        json=False,
        only=tuple(varied()),
        again=False,
        rows=run.Option(type=Path, default=ROWS),
        max_drop=0.01,
        time_budget=90.0,
        recipes=Path,
        alone=False,
        check=False,
        page=Path,
        list=False,
    )
    if options.page:
        options.page.write_text(page(read_rows(options.rows)))
        return 0
    if options.list:
        print("\n".join(options.only))
        return 0
    if options.check:
        return zoo_check.main(options.only)
    machine = run.machine()
    cpu = machine.get("card", machine["cpu"])
    here = {"cpu": cpu, "threads": torch.get_num_threads(), "commit": run.commit()}
    key = tuple(here) if options.again else ("cpu", "threads")
    done = {row["model"] for row in read_rows(options.rows) if all(row[name] == here[name] for name in key)}
    failed = False
    for name in options.only:
        if name not in done:
            row = in_process(name, options) | here
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(as_line(row), flush=True)
            failed |= bool(faults(row))
    return int(failed)


def varied() -> list[str]:
    """Return all names, one of each kind in turn, so that few lines already show every kind."""
    kinds: dict[str, list[str]] = {}
    for name, entry in zoo.MODELS.items():
        kinds.setdefault(entry.kind, []).append(name)
    return [name for names in zip_longest(*kinds.values()) for name in names if name]


def versions() -> dict[str, str]:
    installed = {found.name for found in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in LIBRARIES if name in installed}


def in_process(name: str, options: argparse.Namespace) -> Row:
    """Return one architecture's row; whatever goes wrong is its `failure`."""
    entry, begun = zoo.MODELS[name], time.perf_counter()
    run.say(name)
    row: Row = {"model": name, "kind": entry.kind, "cut": entry.cut}
    limit = SEARCHES * options.time_budget
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        asked = {"name": name, "max_drop": options.max_drop, "time_budget": options.time_budget}
        asked |= {"alone": options.alone, "recipes": options.recipes and str(options.recipes.resolve())}
        command = [sys.executable, "-m", "benchmarks.optimize.zoo", ONE, folder, json.dumps(asked)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            row |= json.loads(out.read_text()) if out.is_file() else {"failure": death(done)}
        except subprocess.TimeoutExpired:
            row["failure"] = f"not done in {limit / 60:.0f} minutes"
    return row | {"seconds": round(time.perf_counter() - begun, 1), "versions": versions()}


def death(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a process left no row: its signal, or the last line that it wrote."""
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    return last_line(done.stderr)[:300] or f"exit code {done.returncode}"


# In the architecture's own process


def one(folder: str, name: str, max_drop: float, time_budget: float, alone: bool, recipes: str | None) -> Row:
    model, inputs = zoo.make_several(name)
    artifact = f"{folder}/artifact"
    begun = time.perf_counter()
    result = tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget)
    optimize_s = round(time.perf_counter() - begun, 1)
    result.save(artifact)
    if recipes:
        keep(name, result.recipe, Path(recipes))
    _, fresh = zoo.make(name, zoo.OTHER_BATCH, inputs=2)
    loaded = contenders.FromArtifact(model, artifact)
    with contenders.contenders() as start:
        original = start(ORIGINAL, ModuleWorkload(model, inputs))
        if not original.fits:
            return {"failure": original.failure}
        reference = original.observe()

        def ready(name: str, made: nn.Module) -> Contender:
            return start(name, ModuleWorkload(made, inputs), reference=reference, seconds=time_budget)

        row: Row = {
            "batch": zoo.BATCH,
            "inputs": len(inputs),
            "budget": max_drop,
            "kept": contenders.recipe_of(artifact),
            "verdict": result.verdict,
            "claim": triple(result.speedup),
            "search_s": round(result.recipe.search_seconds, 1),
            "optimize_s": optimize_s,
            "tried": tried(result),
            "wrong": [str(rung.step) for rung in result.steps if rung.wrong],
            "fresh_loss": fresh_loss(start, model, loaded, fresh),
        }
        ours = ready(OURS, loaded)
        if not ours.fits:
            return row | {"failure": f"loaded: {ours.failure}"}
        peers: dict[str, Contender] = {}
        groups = {} if alone else {BY_HAND: by_hand(model), OPENVINO: by_openvino(model)}
        for group, members in groups.items():
            row[group], fastest = best(starmap(ready, members), max_drop)
            if fastest:
                peers[group] = fastest
        return row | timed(original, ours, peers)


def keep(name: str, recipe: Recipe, folder: Path) -> None:
    """Write a search for the table of experience."""
    found = {"model": name, "commit": run.commit(), "recipe": dataclasses.asdict(recipe)}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.with_suffix(".part").write_text(json.dumps(found))
    file.with_suffix(".part").rename(file)


def by_hand(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    graphs = (contenders.CARD_GRAPHS,) if default_name() == "cuda" else ()
    for how in (*contenders.tried_by_hand(), *graphs, contenders.MAX_AUTOTUNE):
        yield how, contenders.ByHand(model, how)


def by_openvino(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for precision in PRECISIONS if "openvino" in versions() else ():
        yield precision, ByOpenVino(model, precision)


def best(field: Iterator[Contender], max_drop: float) -> tuple[dict[str, Row], Contender | None]:
    """Return a row of each contender, and the fastest within the budget, the only one that stays alive."""
    found: dict[str, Row] = {}
    fastest: Contender | None = None
    for each in field:
        if not each.fits:
            found[each.name] = {"failure": each.failure}
            continue
        loss = each.quality.drop_high if each.quality else 0.0  # as the search is judged
        ms = min(1e3 * sum(each.process.ask("time").values()) for _ in range(GLANCES))
        found[each.name] = {"ms": ms, "loss": loss, "ready_s": round(each.ready_s, 1)}
        slower = loss > max_drop or (fastest and found[fastest.name]["ms"] <= ms)
        for other in [each] if slower else [fastest] if fastest else []:
            other.process.close()
        fastest = fastest if slower else each
    return found, fastest


def tried(result: Any) -> list[str]:
    """Return every step that was measured or failed, with its gain over the original."""
    return [
        f"{rung.step}: {rung.status}"
        + (f", {rung.total_speedup.value:.2f}x" if rung.total_speedup else "")
        + (f", {rung.reason}"[:150] if rung.status in ("failed", "untried") else "")
        for rung in result.steps
        if rung.status != "refused"
    ]


def fresh_loss(start: Any, model: nn.Module, ours: nn.Module, fresh: zoo.Inputs) -> float | str:
    """Return the relative error on new inputs of another batch size, in a new process; or the error that it raised."""
    wanted, found = (
        start(name, ModuleWorkload(each, fresh)) for name, each in (("wanted", model), ("found", ours))
    )
    try:
        if not wanted.fits or not found.fits:
            return wanted.failure or found.failure
        pairs = zip(wanted.observe(), found.observe(), strict=True)
        return max(relative_error(list(one.outputs), list(other.outputs)).drop for one, other in pairs)
    except Exception as error:  # the artifact did not take what the original takes
        return in_short(error)
    finally:
        for contender in (wanted, found):
            if contender.fits:
                contender.process.close()


def timed(original: Contender, ours: Contender, peers: dict[str, Contender]) -> Row:
    """Time the artifact in turns with the original and with the best of each group."""
    begun = time.perf_counter()
    rounds = contenders.take_turns([original, ours, *peers.values()])
    return {
        "loss": ours.quality.drop if ours.quality else 0.0,
        "ms": {each.name: 1e3 * statistics.median(rounds.seconds(each.name)) for each in (original, ours)},
        "over": {ORIGINAL: triple(rounds.speedup(ORIGINAL, OURS))}
        | {group: triple(rounds.speedup(peer.name, OURS)) for group, peer in peers.items()},
        "best": {group: peer.name for group, peer in peers.items()},
        "turns_s": round(time.perf_counter() - begun, 1),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        found = one(sys.argv[2], **json.loads(sys.argv[3]))
        (Path(sys.argv[2]) / "row.json").write_text(json.dumps(found))
    else:
        sys.exit(main())
