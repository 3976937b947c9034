"""A hundred architectures: optimized, loaded in a new process, held against the original, torch.compile and OpenVINO.

    python benchmarks/hundred.py [--only NAME …] [--again] [--rows FILE] [--time-budget 90] [--max-drop 0.01]
                                 [--recipes DIR]
    python benchmarks/hundred.py --check [--only NAME …]
    python benchmarks/hundred.py --page FILE [--rows FILE]

Each architecture of hundred_models.py has a process of its own, and a line of JSON in FILE (hundred.jsonl here) for the
machine, the number of threads and the commit. Without `--again` only what has no line on this machine is run, so that
a run that was stopped goes on; with it, what has none of this commit. An artifact is loaded in a new process and must
agree with the original on fresh inputs in another batch. It takes turns with the original, with torch.compile as its
author would use it, and with OpenVINO where that is installed: whoever leaves the budget, or is not ready in the
time that the whole search has, does not count. `--recipes` keeps what each search found for experience.py. `--check`
builds and calls the originals only; `--page` makes a page of the lines.
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
from collections.abc import Callable, Iterator
from itertools import starmap, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hundred_check
import hundred_models
import torchwright as tw
import turns
from hundred_page import BY_HAND, OPENVINO, ORIGINAL, OURS, Row, as_line, faults, page, read_rows
from torchwright.core.records import Interval, Recipe
from torchwright.hardware.devices import default_name
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

Peers = dict[str, Iterator[tuple[str, nn.Module]]]
"""Group → its contenders by name, of which the fastest within the budget counts."""
ONE = "_one"
PRECISIONS = ("f32", "bf16")
GLANCES = 3
"""Timings by which the fastest of the peers is chosen."""
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "diffusers", "openvino", "nncf", "onnxruntime")
"""Those that have a model, an engine or a peer here."""
SEARCHES = 10
"""Times its search that one architecture may take in all."""


def main() -> int:
    options = arguments()
    if options.page:
        options.page.write_text(page(read_rows(options.rows)))
        return 0
    names = options.only or varied()
    if options.list:
        print("\n".join(names))
        return 0
    if options.check:
        return hundred_check.main(names)
    machine = turns.machine()
    here = {
        "cpu": machine.get("card", machine["cpu"]),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
    key = tuple(here) if options.again else ("cpu", "threads")
    done = {row["model"] for row in read_rows(options.rows) if all(row[name] == here[name] for name in key)}
    failed = False
    for name in names:
        if name not in done:
            row = run(name, options) | here
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(as_line(row), flush=True)
            failed |= bool(faults(row))
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, rows = list(hundred_models.MODELS), Path(__file__).with_suffix(".jsonl")
    parser.add_argument("--only", nargs="+", action="extend", choices=names, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also what has a line of another commit")
    parser.add_argument("--rows", type=Path, default=rows, metavar="FILE")
    parser.add_argument("--max-drop", type=float, default=0.01, help="accuracy budget (default: %(default)s)")
    parser.add_argument(
        "--time-budget", type=float, default=90.0, help="seconds of search (default: %(default)s)"
    )
    parser.add_argument(
        "--recipes", type=Path, metavar="DIR", help="keep each search, as experience.py reads it"
    )
    parser.add_argument("--alone", action="store_true", help="beside the original only, which is quick")
    parser.add_argument(
        "--check", action="store_true", help="build and call the originals, and say what is off"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the page of the lines that are there"
    )
    parser.add_argument("--list", action="store_true", help="name the architectures and stop")
    return parser.parse_args()


def varied() -> list[str]:
    """All names, one of each kind in turn, so that few lines already show every kind."""
    kinds: dict[str, list[str]] = {}
    for name, entry in hundred_models.MODELS.items():
        kinds.setdefault(entry.kind, []).append(name)
    return [name for names in zip_longest(*kinds.values()) for name in names if name]


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    installed = {found.name for found in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in LIBRARIES if name in installed}


def run(name: str, options: argparse.Namespace) -> Row:
    """One architecture's row; whatever goes wrong is its `failure`."""
    entry, begun = hundred_models.MODELS[name], time.perf_counter()
    turns.say(name)
    settings = [name, str(options.max_drop), str(options.time_budget), str(int(options.alone))]
    settings += [str(options.recipes.resolve())] if options.recipes else []
    row: Row = {"model": name, "kind": entry.kind, "cut": entry.cut}
    limit = SEARCHES * options.time_budget
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, ONE, folder, *settings]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            row |= json.loads(out.read_text()) if out.is_file() else {"failure": death(done)}
        except subprocess.TimeoutExpired:
            row["failure"] = f"not done in {limit / 60:.0f} minutes"
    return row | {"seconds": round(time.perf_counter() - begun, 1), "versions": versions()}


def death(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process left no row: its signal, or the last line that it wrote."""
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    return "".join(done.stderr.strip().splitlines()[-1:])[:300] or f"exit code {done.returncode}"


# In the architecture's own process


def one(
    folder: str,
    name: str,
    max_drop: float,
    time_budget: float,
    alone: bool,
    recipes: Path | None = None,
    *,
    peers_of: Callable[[nn.Module], Peers] | None = None,
) -> Row:
    model, inputs = hundred_models.make_several(name)
    artifact = f"{folder}/artifact"
    result = tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget)
    result.save(artifact)
    if recipes:
        keep(name, result.recipe, recipes)
    _, fresh = hundred_models.make(name, hundred_models.OTHER_BATCH, inputs=2)
    loaded = turns.FromArtifact(model, artifact)
    with turns.contenders() as start:
        original = start(ORIGINAL, ModuleWorkload(model, inputs))
        if not original.fits:
            return {"failure": original.failure}
        reference = turns.observe(original)

        def ready(name: str, made: nn.Module) -> turns.Contender:
            return start(name, ModuleWorkload(made, inputs), reference=reference, seconds=time_budget)

        row: Row = {
            "batch": hundred_models.BATCH,
            "inputs": len(inputs),
            "budget": max_drop,
            "kept": turns.recipe_of(artifact),
            "verdict": result.verdict,
            "claim": triple(result.speedup),
            "search_s": round(result.recipe.search_seconds, 1),
            "tried": tried(result),
            "wrong": [str(rung.step) for rung in result.steps if rung.wrong],
            "fresh_loss": fresh_loss(start, model, loaded, fresh),
        }
        ours = ready(OURS, loaded)
        if not ours.fits:
            return row | {"failure": f"loaded: {ours.failure}"}
        peers: dict[str, turns.Contender] = {}
        if not alone:
            groups = (peers_of or all_peers)(model)
            for group, members in groups.items():
                row[group], fastest = best(starmap(ready, members), max_drop)
                if fastest:
                    peers[group] = fastest
        return row | timed(original, ours, peers)


def keep(name: str, recipe: Recipe, folder: Path) -> None:
    """A search for the table of experience."""
    found = {"model": name, "commit": commit(), "recipe": dataclasses.asdict(recipe)}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.with_suffix(".part").write_text(json.dumps(found))
    file.with_suffix(".part").rename(file)


def all_peers(model: nn.Module) -> Peers:
    return {BY_HAND: by_hand(model), OPENVINO: by_openvino(model)}


def by_hand(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    graphs = (turns.CARD_GRAPHS,) if default_name() == "cuda" else ()
    for how in (*turns.BY_HAND, *graphs, turns.MAX_AUTOTUNE):
        yield how, turns.ByHand(model, how)


def by_openvino(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for precision in PRECISIONS if "openvino" in versions() else ():
        yield precision, ByOpenVino(model, precision)


def best(
    contenders: Iterator[turns.Contender], max_drop: float
) -> tuple[dict[str, Row], turns.Contender | None]:
    """What became of each, and the fastest within the budget, the only one whose process goes on."""
    found: dict[str, Row] = {}
    fastest: turns.Contender | None = None
    for each in contenders:
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
    """Every step that was measured or failed, with its gain over the original."""
    return [
        f"{rung.step}: {rung.status}"
        + (f", {rung.total_speedup.value:.2f}x" if rung.total_speedup else "")
        + (f", {rung.reason}"[:150] if rung.status in ("failed", "untried") else "")
        for rung in result.steps
        if rung.status != "refused"
    ]


def fresh_loss(start: Any, model: nn.Module, ours: nn.Module, fresh: hundred_models.Inputs) -> float | str:
    """The relative error on inputs that the search never saw, of other rows, in a new process; or what went wrong."""
    wanted, found = (
        start(name, ModuleWorkload(each, fresh)) for name, each in (("wanted", model), ("found", ours))
    )
    try:
        if not wanted.fits or not found.fits:
            return wanted.failure or found.failure
        pairs = zip(turns.observe(wanted), turns.observe(found), strict=True)
        return max(relative_error(list(one.outputs), list(other.outputs)).drop for one, other in pairs)
    except Exception as error:  # the artifact did not take what the original takes
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        for contender in (wanted, found):
            if contender.fits:
                contender.process.close()


def timed(original: turns.Contender, ours: turns.Contender, peers: dict[str, turns.Contender]) -> Row:
    """Ours in turns with the original and with the best of each group."""
    begun = time.perf_counter()
    rounds = turns.take_turns([original, ours, *peers.values()])
    return {
        "loss": ours.quality.drop if ours.quality else 0.0,
        "ms": {each.name: 1e3 * statistics.median(rounds.seconds(each.name)) for each in (original, ours)},
        "over": {ORIGINAL: triple(rounds.speedup(ORIGINAL, OURS))}
        | {group: triple(rounds.speedup(peer.name, OURS)) for group, peer in peers.items()},
        "best": {group: peer.name for group, peer in peers.items()},
        "turns_s": round(time.perf_counter() - begun, 1),
    }


class ByOpenVino(nn.Module):
    """A module in OpenVINO's runtime, converted from its exported program at the first call."""

    def __init__(self, inner: nn.Module, precision: str) -> None:
        super().__init__()
        self.inner, self.precision = inner, precision
        self._call: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self._call = self._compiled(args, kwargs)
        return self._call(*args, **kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import openvino as ov  # pyright: ignore[reportMissingImports]

        program = torch.export.export(self.inner, args, kwargs)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": self.precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        converted = ov.convert_model(program)
        request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
        spec = program.call_spec.out_spec

        def call(*args: Any, **kwargs: Any) -> Any:
            arrays = [
                leaf.numpy() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            answers = request.infer(arrays)
            outputs = [torch.from_numpy(answers[place].copy()) for place in range(len(answers))]
            assert spec is not None
            return pytree.tree_unflatten(outputs, spec)

        return call


def triple(speedup: Interval) -> list[float]:
    return [speedup.value, speedup.low, speedup.high]


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        folder, name, drop, seconds, alone, *recipes = sys.argv[2:]
        row = one(folder, name, float(drop), float(seconds), alone == "1", *map(Path, recipes))
        (Path(folder) / "row.json").write_text(json.dumps(row))
    else:
        sys.exit(main())
