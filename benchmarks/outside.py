"""Twenty modules that no test uses: claimed, then loaded in a new process, re-timed in turns, and called in other ways.

    python benchmarks/outside.py [--only NAME …] [--max-drop 0.02] [--time-budget SECONDS] [--json FILE] [--list]

For each module of outside_modules.py: `tw.optimize` here, which claims a speed-up; then, as a stranger would, `tw.load`
in a process that knows the artifact and the module's source alone, where the original takes turns with it. An artifact
that changes its whole process (how malloc keeps memory) has the original in another new one. Then the artifact
is called with other strides, batches, dtypes, threads and habits: whatever the original takes it must take, and agree.

The bars, and exit status 1 where one is missed: every answer right, no module under 0.98x, claims within 15% of the
re-timing on all but one in twenty.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import outside_modules
from outside_ways import EXAMPLE, Call, Model, difference, ways

# Torchwright is imported by the functions that use it: the original's process must hold nothing of it.

SLOWEST = 0.98
CLAIM_WITHIN = 0.15
ONE_IN = 20
"""One claim in this many may be further off."""
SLACK = 1.5
"""Calls other than the example's own may be off by the budget times this: the budget was held on the example alone."""
TURNS, BATCH_TURNS = 21, 9
TURN_SECONDS = 0.02
"""A turn makes as many calls as last this long, and at least one."""
WARM_SECONDS = 0.3
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
"""What a process may take to load (it may compile), and to answer."""
BEYOND = 1e9
"""An error at least as large is written as this: JSON has no infinity."""
RESTARTS = 3
"""New processes for a module whose process died of a call."""
HEAD = (
    "module",
    "original, ms",
    "claim",
    "re-timed",
    "claim / re-timed",
    "runs as",
    "kept",
    "loss: stated, found",
    "right",
    "at other batches",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Claims on modules that no test uses, held against a stranger's use."
    )
    names = list(outside_modules.MODULES)
    parser.add_argument(
        "--only", nargs="+", action="extend", choices=names, metavar="NAME", help="run these modules"
    )
    parser.add_argument("--max-drop", type=float, default=0.02, help="accuracy budget (default: %(default)s)")
    parser.add_argument("--time-budget", type=float, default=60.0, help="seconds of search for each module")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    parser.add_argument("--list", action="store_true", help="name the modules and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(names))
        return 0
    import turns

    chosen = options.only or names
    turns.print_machine()
    print_head(options.max_drop, options.time_budget)
    # What tw.optimize does to this process's environment is nothing that a stranger's process would see.
    environment = dict(os.environ)
    rows: list[dict[str, Any]] = []
    for name in chosen:
        rows.append(run(name, options.max_drop, options.time_budget, environment))
        print(as_line(rows[-1]), flush=True)
        turns.write_json(options.json, rows)
    return summary(rows)


def print_head(max_drop: float, time_budget: float) -> None:
    print(f"accuracy budget: {max_drop:.1%}; search: {time_budget:.0f} s a module")
    print(
        "right: the example's own answer is off by at most the budget, and that of any other call that the "
        f"original takes (other batches' and values' too) by at most {SLACK:g} times the larger of the budget "
        "and the stated loss; off: ‖ours − original‖ / ‖original‖ of the worst output\n"
    )
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD), flush=True)


# One module


def run(name: str, max_drop: float, time_budget: float, environment: dict[str, str]) -> dict[str, Any]:
    """One module's row; whatever goes wrong is its `failure`."""
    import turns

    row: dict[str, Any] = {"module": name}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            turns.say(f"{name}: optimizing")
            row |= claim(name, f"{folder}/artifact", max_drop, time_budget)
            turns.say(f"{name}: taking turns")
            with Field(name, f"{folder}/artifact", environment) as field:
                row |= retime(field)
                turns.say(f"{name}: calling it in other ways")
                row |= call_otherwise(field, max_drop, row["loss_stated"])
        except Exception as error:  # whatever a module dies of is its row
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def claim(name: str, out: str, max_drop: float, time_budget: float) -> dict[str, Any]:
    """What Torchwright says of the artifact that it writes to `out`."""
    import torchwright as tw

    model, inputs = outside_modules.make(name)
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


def retime(field: Field) -> dict[str, Any]:
    """The speed-up in new processes that take turns: on the example, then at other batches."""
    speedup, timed = in_turns(field, None, TURNS)
    row: dict[str, Any] = {
        "retimed": triple(speedup),
        "retimed_ms": [1e3 * median(turn["seconds"] for turn in turns) for turns in timed],
        "faults": [round(median(turn["faults"] for turn in turns)) for turns in timed],
        "runs_as": field.ours.hello["how"],
        "with_model": field.ours.hello["with_model"],
        "notices": field.ours.hello["notices"],
        "load_s": field.ours.hello["seconds"],
        "batches": {},
    }
    for size in field.ours.hello["batches"]:
        try:
            field.original.ask("time", size)
        except Refused:
            continue  # a batch that the original does not take is nobody's loss
        try:
            row["batches"][str(size)] = triple(in_turns(field, size, BATCH_TURNS)[0])
        except Refused as error:
            row["batches"][str(size)] = str(error)
        except Died as error:
            row["batches"][str(size)] = str(error)
            field.restart()
    return row


def in_turns(field: Field, batch: int | None, turns: int) -> tuple[Any, list[list[dict[str, float]]]]:
    """(speed-up, the turns of the original and of the artifact) of one kind of call, A B A B …"""
    from torchwright.hardware.measure.clock import paired_speedup

    timed: list[list[dict[str, float]]] = [[], []]
    # The original is timed beside the artifact, in its process, unless the artifact has changed that whole process.
    alone = field.ours.hello["settles_process"]
    for _ in range(turns):
        timed[0].append(
            field.original.ask("time", batch) if alone else field.ours.ask("time_original", batch)
        )
        timed[1].append(field.ours.ask("time", batch))
    before, after = ([turn["seconds"] for turn in column] for column in timed)
    return paired_speedup(before, after), timed


def call_otherwise(field: Field, max_drop: float, stated: float) -> dict[str, Any]:
    """Every way to call the module that the original knows, and whether the artifact agrees."""
    checks: dict[str, dict[str, Any]] = {}
    for way in field.ours.hello["ways"]:
        allowed = max_drop if way == EXAMPLE else SLACK * max(max_drop, stated)
        try:
            checks[way] = judged(field.ours.ask("check", way), allowed)
        except Died as error:
            checks[way] = {"status": "wrong", "why": str(error)}
            field.restart()
    return {"checks": checks, "loss_found": checks[EXAMPLE].get("error")}


def judged(check: dict[str, Any], allowed: float) -> dict[str, Any]:
    """A check's status with its error held against what is allowed."""
    if check["status"] == "right" and not check["error"] <= allowed:
        why = f"off by {check['error']:.2g}, allowed {allowed:.2g}"
        return {"status": "wrong", "why": why, "error": min(check["error"], BEYOND)}
    return check


# Two new processes


class Refused(Exception):
    """A process could not do what was asked, and goes on."""


class Died(Exception):
    """A process ended, or did not answer in time."""


class Contender:
    """A new Python process that runs the original, or what `tw.load` makes of an artifact."""

    def __init__(self, name: str, artifact: str, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, WORKER, name, artifact]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        try:
            self.hello = self._answer(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, *question: Any) -> dict[str, Any]:
        """Raises `Refused` where the call failed, `Died` where the process did."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died("ended") from error
        return self._answer(ANSWER_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            raise self._died(f"did not answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died("ended")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _died(self, how: str) -> Died:
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return Died(f"the process {how} (status {status}): {''.join(last)[:150]}")


class Field:
    """The original and the artifact, each in a process of its own."""

    def __init__(self, name: str, artifact: str, environment: dict[str, str]) -> None:
        self._name, self._artifact, self._environment = name, artifact, environment
        self._restarts = 0

    def __enter__(self) -> Field:
        self.original = Contender(self._name, "", self._environment)
        try:
            self.ours = Contender(self._name, self._artifact, self._environment)
        except BaseException:
            self.original.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.original.close()
        self.ours.close()

    def restart(self) -> None:
        """Another process for the artifact. Raises `Died` after RESTARTS of them."""
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise Died(f"the artifact's process died {self._restarts} times")
        self.ours.close()
        self.ours = Contender(self._name, self._artifact, self._environment)


# In the new process


WORKER = "_worker"


def serve(name: str, artifact: str) -> None:
    """Load, say what was loaded, and answer questions until the asker is gone."""
    # What libraries print must not come between the answers.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    served = Served(name, artifact)
    print(json.dumps(served.hello), file=replies)
    for line in sys.stdin:
        question, argument = json.loads(line)
        try:
            answer = getattr(served, question)(argument)
        except Exception as error:  # the original or the artifact does not take this call; others it may
            answer = {"refused": in_short(error)}
        print(json.dumps(answer), file=replies)
    os._exit(0)  # what the artifact has running in the background is nobody's any more


class Served:
    """The module or the artifact, and the answers to what is asked about it."""

    def __init__(self, name: str, artifact: str) -> None:
        model, inputs = outside_modules.make(name)
        self._call = Call.of(inputs)
        self._original: nn.Module = model
        self._model: Model = model
        self._repeats: dict[tuple[int, int | None], int] = {}
        self._ways = ways(model, self._call)
        self.hello: dict[str, Any] = {
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

    def time(self, batch: int | None) -> dict[str, float]:
        """Seconds and page faults of one call, over a turn."""
        return self._turn(self._model, batch)

    def time_original(self, batch: int | None) -> dict[str, float]:
        """The same of the original in this process."""
        return self._turn(self._original, batch)

    def _turn(self, model: Model, batch: int | None) -> dict[str, float]:
        """Before short calls one is made that is not counted, as in Torchwright's own turns."""
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

    def check(self, way: str) -> dict[str, Any]:
        """Whether the artifact takes what the original takes, and how far apart the answers are."""
        try:
            expected = self._ways[way](self._original)
        except Exception as error:  # then it is nobody's right to call it so
            return {"status": "not taken", "why": in_short(error)}
        try:
            fault, error = difference(expected, self._ways[way](self._model))
        except Exception as error:  # the original took it
            return {"status": "wrong", "why": in_short(error)}
        return {"status": "wrong", "why": fault} if fault else {"status": "right", "error": error}


def load(name: str, artifact: str) -> tuple[Any, bool]:
    """(what was loaded, whether it asked for the caller's own module)"""
    import torchwright as tw
    from torchwright.core.errors import ArtifactError

    try:
        return tw.load(artifact), False
    except ArtifactError as error:
        if "model=" not in str(error.next):
            raise
    return tw.load(artifact, model=outside_modules.make(name)[0]), True


def warm_up(model: Model, call: Call) -> int:
    """How many calls last a turn, after as many as caches and compilers need."""
    once, begun = math.inf, time.perf_counter()
    calls = 0
    while calls < 3 or (time.perf_counter() - begun < WARM_SECONDS and calls < 10_000):
        start = time.perf_counter()
        model(*call.args, **call.kwargs)
        once = min(once, time.perf_counter() - start)
        calls += 1
    return max(1, math.ceil(TURN_SECONDS / once))


def page_faults() -> int:
    """Pages that the kernel had to hand to this process, and clear: what malloc gave back costs again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


# What is printed


def as_line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['module']} | failed: {row['failure'].replace('|', '/')} |" + " |" * (len(HEAD) - 2)
    checks = row["checks"]
    wrong = wrong_ways(row)
    taken = sum(check["status"] != "not taken" for check in checks.values())
    found = "none" if row["loss_found"] is None else f"{row['loss_found']:.4f}"
    batches = [f"{size}: {at_batch(speedup)}" for size, speedup in row["batches"].items()]
    cells = (
        row["module"],
        f"{row['retimed_ms'][0]:.3f}",
        interval(row["claim"]),
        interval(row["retimed"]),
        f"{row['claim'][0] / row['retimed'][0]:.2f}",
        row["runs_as"] + (" (own module)" if row["with_model"] else ""),
        row["kept"],
        f"{row['loss_stated']:.4f}, {found}",
        f"{taken - len(wrong)}/{taken}" + (f"; wrong: {', '.join(wrong)}" if wrong else ""),
        ", ".join(batches) or "none",
    )
    return "| " + " | ".join(cells) + " |"


def wrong_ways(row: dict[str, Any]) -> list[str]:
    return [way for way, check in row["checks"].items() if check["status"] == "wrong"]


def at_batch(speedup: list[float] | str) -> str:
    return "refused" if isinstance(speedup, str) else f"{speedup[0]:.2f}x"


def interval(values: Sequence[float]) -> str:
    return f"{values[0]:.2f}x [{values[1]:.2f}, {values[2]:.2f}]"


def triple(speedup: Any) -> list[float]:
    return [speedup.value, speedup.low, speedup.high]


def summary(rows: Sequence[dict[str, Any]]) -> int:
    """Print how many meet each bar, and why those that do not; returns the exit status."""
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


def reasons(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Why calls were wrong; those of one module and one reason on one line, with the first one's particulars."""
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for way in wrong_ways(row):
            by_reason.setdefault(row["checks"][way]["why"].partition(" Found:")[0], []).append(way)
        for called in by_reason.values():
            yield f"\n{row['module']}, {', '.join(called)}: {row['checks'][called[0]]['why']}"


def near_claim(row: dict[str, Any]) -> bool:
    return abs(row["claim"][0] / row["retimed"][0] - 1) <= CLAIM_WITHIN


def far_off(row: dict[str, Any]) -> str:
    """What tells whether the original or the artifact ran otherwise here than in the search."""
    (before, after), (original, ours) = row["claim_ms"], row["retimed_ms"]
    return (
        f"\n{row['module']}, claimed {row['claim'][0]:.2f}x, re-timed {row['retimed'][0]:.2f}x: the original took "
        f"{before:.3f} ms in the search and {original:.3f} ms here, the artifact {after:.3f} and {ours:.3f} ms; "
        f"page faults of a call here: {row['faults'][0]} and {row['faults'][1]}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
