"""Twenty modules that no test uses: claimed, then loaded in a new process, re-timed in turns, called in other ways.

    python -m benchmarks.optimize.outside [--only NAME …] [--max-drop 0.02] [--time-budget SECONDS] [--list]

For each module of models/outside.py: `tw.optimize` here, which claims a speed-up. Then `tw.load`, as an independent
user would, in a process that knows the artifact and the module's source alone, in turns with the original. An artifact
that changes its whole process (how malloc keeps memory) has the original in another new process. Then the artifact is
called with other strides, batches, dtypes, threads and habits: whatever the original takes it must take, and agree.

The bars, and exit status 1 if one is missed: every answer right, no module under 0.98x, claims within 15% of the
re-timing on all but one in twenty.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import peers, run
from benchmarks.harness.peers import Died, Peer, Refused
from benchmarks.harness.run import Row, in_short, times, triple
from benchmarks.models import outside
from benchmarks.optimize.outside_ways import EXAMPLE, Call, Model, difference, ways

# Torchwright is imported by the functions that use it: the original's process must hold nothing of Torchwright.

SLOWEST = 0.98
CLAIM_WITHIN = 0.15
ONE_IN = 20
"""One claim in this many may be further off."""
SLACK = 1.5
"""Allowed error of other calls over the budget's, which was held on the example alone."""
TURNS, BATCH_TURNS = 21, 9
TURN_SECONDS = 0.02
"""A turn makes as many calls as last this long, and at least one."""
WARM_SECONDS = 0.3
START_SECONDS = 600.0
"""Limit of a process that loads; it may compile."""
BEYOND = 1e9
"""An error at least as large is written as this: JSON has no infinity."""
RESTARTS = 3
"""New processes for a module whose process died of a call."""
WORKER = "_worker"
HEAD = (
    *("module", "original, ms", "claim", "re-timed", "claim / re-timed", "runs as", "kept"),
    *("loss: stated, found", "right", "at other batches"),
)


def main() -> int:
    options = run.options(__doc__, only=tuple(outside.MODULES), max_drop=0.02, time_budget=60.0, list=False)
    if options.list:
        print("\n".join(outside.MODULES))
        return 0
    rows = run.Rows(
        options.json,
        HEAD,
        note=f"accuracy budget: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a module\n"
        "right: the example's own answer is off by at most the budget, and that of any other call that the "
        f"original takes (other batches' and values' too) by at most {SLACK:g} times the larger of the budget "
        "and the stated loss; off: ‖ours − original‖ / ‖original‖ of the worst output",
    )
    # An independent user's process sees nothing of what tw.optimize does to this process's environment.
    environment = dict(os.environ)
    for name in options.only:
        row = measured(name, options.max_drop, options.time_budget, environment)
        rows.add(row, cells(row))
    return summary(rows)


def measured(name: str, max_drop: float, time_budget: float, environment: dict[str, str]) -> Row:
    """Return one module's row; whatever goes wrong is its `failure`."""
    row: Row = {"module": name}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run.say(f"{name}: optimizing")
            row |= claim(name, f"{folder}/artifact", max_drop, time_budget)
            run.say(f"{name}: taking turns")
            with Field(name, f"{folder}/artifact", environment) as field:
                row |= retime(field)
                run.say(f"{name}: calling it in other ways")
                row |= call_otherwise(field, max_drop, row["loss_stated"])
        except Exception as error:  # whatever a module dies of is its row
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def claim(name: str, out: str, max_drop: float, time_budget: float) -> Row:
    """Optimize the module into the artifact `out` and return Torchwright's claims."""
    import torchwright as tw

    model, inputs = outside.make(name)
    result = tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget)
    result.save(out)
    quality = result.recipe.final.quality
    return {
        "claim": triple(result.speedup),
        "claim_ms": [1e3 * result.recipe.baseline.seconds, 1e3 * result.recipe.final.seconds],
        "kept": " + ".join(map(str, result.recipe.steps)) or "the original",
        "loss_stated": quality.drop_high if quality else 0.0,
        "search_s": round(result.recipe.search_seconds, 1),
        "notes": list(result.recipe.notes),
    }


def retime(field: Field) -> Row:
    """Return the speed-up in new processes that take turns: on the example, then at other batches."""
    speedup, timed = in_turns(field, None, TURNS)
    hello = field.ours.hello
    row: Row = {
        "retimed": triple(speedup),
        "retimed_ms": [1e3 * median(turn["seconds"] for turn in turns) for turns in timed],
        "faults": [round(median(turn["faults"] for turn in turns)) for turns in timed],
        "runs_as": hello["how"],
        "with_model": hello["with_model"],
        "notices": hello["notices"],
        "load_s": hello["seconds"],
        "batches": {},
    }
    for size in hello["batches"]:
        try:
            field.original.ask("time", size)
        except Refused:
            continue  # the original does not take this batch either
        try:
            row["batches"][str(size)] = triple(in_turns(field, size, BATCH_TURNS)[0])
        except Refused as error:
            row["batches"][str(size)] = str(error)
        except Died as error:
            row["batches"][str(size)] = str(error)
            field.restart()
    return row


def in_turns(field: Field, batch: int | None, turns: int) -> tuple[Any, list[list[dict[str, float]]]]:
    """Return the speed-up and the turns of the original and of the artifact for one kind of call, A B A B …"""
    from torchwright.hardware.measure.clock import paired_speedup

    timed: list[list[dict[str, float]]] = [[], []]
    # The original is timed in the artifact's process, unless the artifact has changed that whole process.
    alone = field.ours.hello["settles_process"]
    for _ in range(turns):
        before = field.original.ask("time", batch) if alone else field.ours.ask("time_original", batch)
        timed[0].append(before)
        timed[1].append(field.ours.ask("time", batch))
    return paired_speedup(*([turn["seconds"] for turn in column] for column in timed)), timed


def call_otherwise(field: Field, max_drop: float, stated: float) -> Row:
    """Call the module in every way that the original takes, and judge the artifact's answers."""
    checks: dict[str, Row] = {}
    for way in field.ours.hello["ways"]:
        allowed = max_drop if way == EXAMPLE else SLACK * max(max_drop, stated)
        try:
            checks[way] = judged(field.ours.ask("check", way), allowed)
        except Died as error:
            checks[way] = {"status": "wrong", "why": str(error)}
            field.restart()
    return {"checks": checks, "loss_found": checks[EXAMPLE].get("error")}


def judged(check: Row, allowed: float) -> Row:
    """Return a check's status with its error held against the allowed one."""
    if check["status"] == "right" and not check["error"] <= allowed:
        why = f"off by {check['error']:.2g}, allowed {allowed:.2g}"
        return {"status": "wrong", "why": why, "error": min(check["error"], BEYOND)}
    return check


class Field:
    """The original and the artifact, each in a process of its own."""

    def __init__(self, name: str, artifact: str, environment: dict[str, str]) -> None:
        self._name, self._artifact, self._environment = name, artifact, environment
        self._restarts = 0

    def __enter__(self) -> Field:
        self.original = self._started("")
        try:
            self.ours = self._started(self._artifact)
        except BaseException:
            self.original.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.original.close()
        self.ours.close()

    def restart(self) -> None:
        """Start another process for the artifact. Raises `Died` after RESTARTS of them."""
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise Died(f"the artifact's process died {self._restarts} times")
        self.ours.close()
        self.ours = self._started(self._artifact)

    def _started(self, artifact: str) -> Peer:
        arguments = ("benchmarks.optimize.outside", WORKER, self._name, artifact)
        return Peer(*arguments, environment=self._environment, seconds=START_SECONDS)


# In the new process


class Served:
    """The module or the artifact, and the answers to questions about it."""

    def __init__(self, name: str, artifact: str) -> None:
        model, inputs = outside.make(name)
        self._call = Call.of(inputs)
        self._original: nn.Module = model
        self._model: Model = model
        self._repeats: dict[tuple[int, int | None], int] = {}
        self._ways = ways(model, self._call)
        self.hello: Row = {
            "ways": list(self._ways),
            "batches": [size for size in self._call.sizes() if size != 3],
        }
        if artifact:
            begun = time.perf_counter()
            loaded, with_model = load(name, artifact)
            self._model = loaded.model
            self.hello |= {
                "how": loaded.how,
                "with_model": with_model,
                "notices": loaded.notices,
                "settles_process": any(step.name == "allocator" for step in loaded.recipe.steps),
                "seconds": round(time.perf_counter() - begun, 1),
            }

    def answer(self, question: str, argument: Any) -> Row:
        """Answer a question: `time` or `time_original` of a batch size or None, or `check` of a way to call."""
        if question == "check":
            return self._check(argument)
        return self._turn(self._model if question == "time" else self._original, argument)

    def _turn(self, model: Model, batch: int | None) -> dict[str, float]:
        """Return seconds and page faults of one call, over a turn; short calls follow one that is not counted."""
        call, key = self._call.rows(batch) if batch else self._call, (id(model), batch)
        with torch.inference_mode():
            if key not in self._repeats:
                self._repeats[key] = warm_up(model, call)
            count = self._repeats[key]
            if count > 1:
                model(*call.args, **call.kwargs)
            faults, begun = page_faults(), time.perf_counter()
            for _ in range(count):
                model(*call.args, **call.kwargs)
            seconds = time.perf_counter() - begun
        return {"seconds": seconds / count, "faults": (page_faults() - faults) / count}

    def _check(self, way: str) -> Row:
        """Check that the artifact takes what the original takes, and compare the answers."""
        try:
            expected = self._ways[way](self._original)
        except Exception as error:  # the original refuses such a call, so the artifact may
            return {"status": "not taken", "why": in_short(error)}
        try:
            fault, error = difference(expected, self._ways[way](self._model))
        except Exception as error:  # the original took it
            return {"status": "wrong", "why": in_short(error)}
        return {"status": "wrong", "why": fault} if fault else {"status": "right", "error": error}


def serve() -> tuple[Row, Any]:
    served = Served(*sys.argv[2:])
    return served.hello, served.answer


def load(name: str, artifact: str) -> tuple[Any, bool]:
    """Return the loaded artifact, and True if it asked for the caller's own module."""
    import torchwright as tw
    from torchwright.core.errors import ArtifactError

    try:
        return tw.load(artifact), False
    except ArtifactError as error:
        if "model=" not in str(error.next):
            raise
    return tw.load(artifact, model=outside.make(name)[0]), True


def warm_up(model: Model, call: Call) -> int:
    """Return how many calls last a turn, after as many as caches and compilers need."""
    once, begun = math.inf, time.perf_counter()
    calls = 0
    while calls < 3 or (time.perf_counter() - begun < WARM_SECONDS and calls < 10_000):
        start = time.perf_counter()
        model(*call.args, **call.kwargs)
        once = min(once, time.perf_counter() - start)
        calls += 1
    return max(1, math.ceil(TURN_SECONDS / once))


def page_faults() -> int:
    """Return the pages that the kernel had to hand to this process, and clear: returned memory costs again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# The printed lines


def cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return (row["module"], f"failed: {row['failure']}", *[""] * (len(HEAD) - 2))
    checks, wrong = row["checks"], wrong_ways(row)
    taken = sum(check["status"] != "not taken" for check in checks.values())
    found = "none" if row["loss_found"] is None else f"{row['loss_found']:.4f}"
    batches = [
        f"{size}: refused" if isinstance(speedup, str) else f"{size}: {speedup[0]:.2f}x"
        for size, speedup in row["batches"].items()
    ]
    return (
        row["module"],
        f"{row['retimed_ms'][0]:.3f}",
        times(row["claim"]),
        times(row["retimed"]),
        f"{row['claim'][0] / row['retimed'][0]:.2f}",
        row["runs_as"] + (" (own module)" if row["with_model"] else ""),
        row["kept"],
        f"{row['loss_stated']:.4f}, {found}",
        f"{taken - len(wrong)}/{taken}" + (f"; wrong: {', '.join(wrong)}" if wrong else ""),
        ", ".join(batches) or "none",
    )


def wrong_ways(row: Row) -> list[str]:
    return [way for way, check in row["checks"].items() if check["status"] == "wrong"]


def summary(rows: Sequence[Row]) -> int:
    """Print how many meet each bar and the reasons of the others; return the exit status."""
    finished = [row for row in rows if "failure" not in row]
    for line in (*reasons(finished), *(far_off(row) for row in finished if not near_claim(row))):
        print(line)
    right = sum(not wrong_ways(row) for row in finished)
    slowest = min((row["retimed"][0] for row in finished), default=math.nan)
    near = sum(map(near_claim, finished))
    needed = len(rows) - len(rows) // ONE_IN
    met = right == len(rows) and slowest >= SLOWEST and near >= needed
    print(
        f"\nof {len(rows)} modules: right {right} (bar: all), slowest {slowest:.2f}x (bar: {SLOWEST}x), "
        f"claims within {CLAIM_WITHIN:.0%} of the re-timing {near} (bar: {needed}), "
        f"failed {len(rows) - len(finished)}: {'met' if met else 'missed'}"
    )
    return 0 if met else 1


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the reasons of wrong calls, a line for each module and reason."""
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for way in wrong_ways(row):
            by_reason.setdefault(row["checks"][way]["why"].partition(" Found:")[0], []).append(way)
        for called in by_reason.values():
            yield f"\n{row['module']}, {', '.join(called)}: {row['checks'][called[0]]['why']}"


def near_claim(row: Row) -> bool:
    return abs(row["claim"][0] / row["retimed"][0] - 1) <= CLAIM_WITHIN


def far_off(row: Row) -> str:
    """Return the times that show if the original or the artifact ran otherwise here than in the search."""
    (before, after), (original, ours) = row["claim_ms"], row["retimed_ms"]
    return (
        f"\n{row['module']}, claimed {row['claim'][0]:.2f}x, re-timed {row['retimed'][0]:.2f}x: the original took "
        f"{before:.3f} ms in the search and {original:.3f} ms here, the artifact {after:.3f} and {ours:.3f} ms; "
        f"page faults of a call here: {row['faults'][0]} and {row['faults'][1]}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        peers.serve(serve)
    else:
        sys.exit(main())
