"""A hundred architectures: optimized, loaded in a new process, held against the original, torch.compile and OpenVINO.

    python benchmarks/hundred.py [--only NAME …] [--rows FILE] [--time-budget 90] [--max-drop 0.01] [--list]
    python benchmarks/hundred.py --page FILE [--rows FILE]

Each architecture of hundred_models.py has a process of its own, and a line of JSON in FILE (hundred.jsonl) for the
machine and the commit; what has one already is passed over, so that a run that was stopped goes on. An artifact is
loaded in a new process and must agree with the original on fresh inputs in another batch. It takes turns with the
original, with torch.compile as its author would use it, and with OpenVINO where that is installed; whoever leaves the
budget does not count. `--page` makes a page of the lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import hundred_models
import torchwright as tw
import turns
from torchwright.facts import Interval
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

ONE = "_one"
ORIGINAL, OURS = "original", "torchwright"
BY_HAND = (*turns.BY_HAND, turns.MAX_AUTOTUNE)
OPENVINO = ("OpenVINO f32", "OpenVINO bf16")
SLACK = 1.5
"""Fresh inputs may be off by the budget times this: it was held on others."""
SLOWEST = 0.98
MINUTES = 20
"""What one architecture may take in all."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(hundred_models.MODELS)
    parser.add_argument("--only", nargs="+", action="extend", choices=names, metavar="NAME")
    parser.add_argument("--rows", type=Path, default=Path("hundred.jsonl"), metavar="FILE")
    parser.add_argument("--max-drop", type=float, default=0.01, help="accuracy budget (default: %(default)s)")
    parser.add_argument(
        "--time-budget", type=float, default=90.0, help="seconds of search (default: %(default)s)"
    )
    parser.add_argument("--alone", action="store_true", help="beside the original only, which is quick")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the page of the lines that are there"
    )
    parser.add_argument("--list", action="store_true", help="name the architectures and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(names))
        return 0
    rows = read_rows(options.rows)
    if options.page:
        options.page.write_text(page(rows))
        return 0
    here = turns.machine()["cpu"], commit()
    done = {row["model"] for row in rows if (row["cpu"], row["commit"]) == here}
    failed = False
    for name in options.only or names:
        if name not in done:
            row = run(name, options) | {"cpu": here[0], "commit": here[1]}
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(as_line(row), flush=True)
            failed |= bool(faults(row))
    return int(failed)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One architecture's row; whatever goes wrong is its `failure`."""
    entry, begun = hundred_models.MODELS[name], time.perf_counter()
    turns.say(name)
    settings = [name, str(options.max_drop), str(options.time_budget), str(int(options.alone))]
    row: dict[str, Any] = {"model": name, "kind": entry.kind, "cut": entry.cut}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, ONE, folder, *settings]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
            last = "".join(done.stderr.strip().splitlines()[-1:])
            row |= json.loads(out.read_text()) if out.is_file() else {"failure": last[:300] or "no answer"}
        except subprocess.TimeoutExpired:
            row["failure"] = f"not done in {MINUTES} minutes"
    return row | {"seconds": round(time.perf_counter() - begun, 1), "torch": torch.__version__}


# In the architecture's own process


def one(folder: str, name: str, max_drop: float, time_budget: float, alone: bool) -> dict[str, Any]:
    model, inputs = hundred_models.make(name)
    artifact = f"{folder}/artifact"
    result = tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget)
    result.save(artifact)
    _, fresh = hundred_models.make(name, hundred_models.BATCH - 1, inputs=1)
    ours = turns.FromArtifact(model, artifact)
    with turns.contenders() as start:
        original = start(ORIGINAL, ModuleWorkload(model, inputs))
        if not original.fits:
            return {"failure": original.failure}
        reference = turns.observe(original)
        row: dict[str, Any] = {
            "claim": triple(result.speedup),
            "kept": turns.recipe_of(artifact),
            "search_s": round(result.recipe.search_seconds, 1),
            "fresh_loss": fresh_loss(start, model, ours, fresh),
            "budget": max_drop,
        }
        field = [original, start(OURS, ModuleWorkload(ours, inputs), reference=reference)]
        for how in () if alone else BY_HAND:
            field.append(start(how, ModuleWorkload(turns.ByHand(model, how), inputs), reference=reference))
        for how in OPENVINO if not alone and importlib.util.find_spec("openvino") else ():
            field.append(start(how, ModuleWorkload(ByOpenVino(model, how), inputs), reference=reference))
        return row | timed(field, max_drop)


def fresh_loss(start: Any, model: nn.Module, ours: nn.Module, fresh: hundred_models.Inputs) -> float | str:
    """The relative error on inputs that the search never saw, one row fewer, in a new process; or what went wrong."""
    wanted, found = (
        start(name, ModuleWorkload(each, fresh)) for name, each in (("wanted", model), ("found", ours))
    )
    if not wanted.fits or not found.fits:
        return wanted.failure or found.failure
    try:
        pairs = zip(turns.observe(wanted), turns.observe(found), strict=True)
        return max(relative_error(list(one.outputs), list(other.outputs)).drop for one, other in pairs)
    except Exception as error:  # the artifact did not take what the original takes
        return f"{type(error).__name__}: {error}"[:200]


def timed(field: list[turns.Contender], max_drop: float) -> dict[str, Any]:
    """Every contender's milliseconds and speed-up over the original, and ours over the best of the others."""
    rounds = turns.take_turns(field)
    found: dict[str, dict[str, Any]] = {}
    for contender in field:
        if not contender.fits:
            found[contender.name] = {"failure": contender.failure}
            continue
        loss = contender.quality.drop if contender.quality else 0.0
        seconds = sorted(rounds.seconds(contender.name))
        found[contender.name] = {
            "ms": 1e3 * seconds[len(seconds) // 2],
            "over_original": triple(rounds.speedup(ORIGINAL, contender.name)),
            "loss": loss,
            "within": loss <= max_drop,
        }
    row: dict[str, Any] = {"contenders": found}
    for what, names in (("by_hand", BY_HAND), ("openvino", OPENVINO)):
        fair = [name for name in names if found.get(name, {}).get("within")]
        if fair and found[OURS].get("ms"):
            best = min(fair, key=lambda name: found[name]["ms"])
            row[what] = {"best": best, "ours_over_it": triple(rounds.speedup(best, OURS))}
    return row


class ByOpenVino(nn.Module):
    """A module in OpenVINO's runtime, converted from its exported program at the first call."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.precision = inner, how.rpartition(" ")[2]
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


# What is printed


def faults(row: dict[str, Any]) -> list[str]:
    """What a user would be right to complain of."""
    if "failure" in row:
        return [row["failure"]]
    loss, ours = row["fresh_loss"], row["contenders"][OURS]
    found = []
    if isinstance(loss, str):
        found.append(f"another batch: {loss}")
    elif loss > SLACK * row["budget"]:
        found.append(f"off by {loss:.2%} on fresh inputs")
    if "failure" in ours:
        found.append(f"loaded: {ours['failure']}")
    elif ours["over_original"][2] < SLOWEST:
        found.append(f"{ours['over_original'][0]:.2f}x of the original's speed")
    return found


def as_line(row: dict[str, Any]) -> str:
    name = row["model"] + (f" ({row['cut']})" if row["cut"] else "")
    if "contenders" not in row or "ms" not in row["contenders"][OURS]:
        return f"| {name} | {row['kind']} | | | | | {'; '.join(faults(row)).replace('|', '/')} |"
    contenders = row["contenders"]
    cells = (
        name,
        row["kind"],
        f"{contenders[ORIGINAL]['ms']:.2f}",
        "{:.2f}x [{:.2f}, {:.2f}]".format(*contenders[OURS]["over_original"]),
        _over(row.get("by_hand")),
        _over(row.get("openvino")),
        "; ".join(faults(row)).replace("|", "/") or f"right: {row['fresh_loss']:.4f}",
    )
    return "| " + " | ".join(cells) + " |"


def _over(peer: dict[str, Any] | None) -> str:
    return f"{peer['ours_over_it'][0]:.2f}x {peer['best']}" if peer else ""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The newest line of each architecture and machine, and what they say together."""
    newest = list({(row["cpu"], row["model"]): row for row in rows}.values())
    lines = [
        "# A hundred architectures",
        "",
        "Made by `python benchmarks/hundred.py --page docs/hundred.md`.",
        "",
    ]
    for cpu in dict.fromkeys(row["cpu"] for row in newest):
        here = [row for row in newest if row["cpu"] == cpu]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in here))
        lines += [f"## {cpu}, torch {here[-1]['torch']}, commit {commits}", "", *_totals(here), ""]
        lines += [
            "| model | kind | original, ms | over it | over the best by hand | over OpenVINO's best | answers |"
        ]
        lines += ["|---|---|---|---|---|---|---|", *map(as_line, here), ""]
    return "\n".join(lines)


def _totals(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    right, of = sum(not faults(row) for row in rows), len(hundred_models.MODELS)
    yield f"{len(rows)} architectures of {of}; right and never slower: {right}. Geometric means:"
    yield ""
    yield "| kind | models | over the original | over the best by hand | over OpenVINO's best | not behind OpenVINO |"
    yield "|---|---|---|---|---|---|"
    for kind in [*dict.fromkeys(row["kind"] for row in rows), ""]:
        some = [
            row
            for row in rows
            if kind in ("", row["kind"]) and "ms" in row.get("contenders", {}).get(OURS, {})
        ]
        original = [row["contenders"][OURS]["over_original"][0] for row in some]
        hand, theirs = (
            [row[what]["ours_over_it"][0] for row in some if what in row] for what in ("by_hand", "openvino")
        )
        level = f"{sum(ratio >= 0.97 for ratio in theirs)} of {len(theirs)}" if theirs else ""
        yield f"| {kind or 'all'} | {len(some)} | {_mean(original)} | {_mean(hand)} | {_mean(theirs)} | {level} |"


def _mean(ratios: Sequence[float]) -> str:
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x" if ratios else ""


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        folder, name, drop, seconds, alone = sys.argv[2:]
        row = one(folder, name, float(drop), float(seconds), alone == "1")
        (Path(folder) / "row.json").write_text(json.dumps(row))
    else:
        sys.exit(main())
