"""Torchwright beside eager and beside the best by hand, on eight modules; every ratio from turns of one run.

    python benchmarks/ladder.py [--only NAME …] [--max-drop 0.02] [--time-budget SECONDS] [--json FILE]

By hand: torch.compile, torch.compile with freezing, bf16 autocast, bf16 autocast under torch.compile, each in a
process of its own. Those over the same accuracy budget are timed, marked, and not counted as the best.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

import modules
import torchwright as tw
import turns
from torchwright.core.errors import TorchwrightError
from torchwright.optimization.api import optimize_cli
from torchwright.workloads.base import Workload
from torchwright.workloads.language import LanguageWorkload
from torchwright.workloads.module import ModuleWorkload

PROMPT, NEW = 128, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Torchwright beside eager and beside the best by hand.")
    names = ["bundled", *modules.MODULES]
    parser.add_argument("--only", action="append", choices=names, help="run this module; may be repeated")
    parser.add_argument("--max-drop", type=float, default=0.02, help="accuracy budget (default: %(default)s)")
    parser.add_argument("--time-budget", type=float, default=75.0, help="seconds of search for each module")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    turns.print_machine()
    print(f"accuracy budget: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a module\n")
    print("| module | eager, ms | Torchwright | best by hand | against it | error: ours, theirs | recipe |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.only or names:
        row = run(name, options.max_drop, options.time_budget)
        rows.append(row)
        print(as_line(row), flush=True)
        turns.write_json(options.json, rows)
    finished = [row for row in rows if "versus_hand" in row]
    never_slower = sum(row["versus_eager"][2] >= 1 for row in finished)
    near = sum(row["versus_hand"][0] >= 0.95 for row in finished)
    above = sum(row["versus_hand"][0] > 1 for row in finished)
    print(
        f"\nof {len(rows)} modules: not slower than eager {never_slower}, at least 0.95 of the best by hand {near}, "
        f"above it {above}"
    )


def run(name: str, max_drop: float, time_budget: float) -> dict[str, Any]:
    """One module's row."""
    begun = time.perf_counter()
    row: dict[str, Any] = {"module": name}
    with tempfile.TemporaryDirectory() as folder, turns.contenders() as start:
        out = f"{folder}/artifact"
        turns.say(f"{name}: optimizing")
        try:
            workload = optimize(name, max_drop, time_budget, out)
        except TorchwrightError as error:
            return row | {"failure": str(error)[:300]}
        row |= {"recipe": turns.recipe_of(out), "search_s": round(time.perf_counter() - begun, 1)}
        eager = start("eager", workload)
        if not eager.process:
            return row | {"failure": eager.failure}
        reference = turns.observe(eager)
        if name == "bundled":
            ours = start("torchwright", workload, artifact=out, reference=reference)
        else:
            model, inputs = modules.make(*modules.MODULES[name])
            optimized = ModuleWorkload(turns.FromArtifact(model, out), inputs)
            ours = start("torchwright", optimized, reference=reference)
        field = [eager, ours]
        for how in turns.BY_HAND:
            turns.say(f"{name}: {how}")
            field.append(start(how, hand_made(name, how), reference=reference))
        turns.say(f"{name}: taking turns")
        timed = turns.take_turns(field)
        repeats = {case.name: case.repeat for case in workload.cases(torch.float32)}
    row["contenders"] = {}
    for contender in field:
        entry: dict[str, Any] = {"failure": contender.failure} if contender.failure else {}
        if contender.process:
            speedup = timed.speedup("eager", contender.name, repeats=repeats)
            entry = {
                "ms": 1e3
                * sorted(timed.seconds(contender.name, repeats=repeats))[len(timed.rows["eager"]) // 2],
                "versus_eager": [speedup.value, speedup.low, speedup.high],
                "error": contender.quality.drop if contender.quality else 0.0,
                "within_budget": contender.quality is None or contender.quality.drop_high <= max_drop,
                "ready_s": round(contender.ready_s, 1),
            }
        row["contenders"][contender.name] = entry
    result = row["contenders"]["torchwright"]
    if "ms" not in result:
        return row | {"failure": result["failure"]}
    row |= {"versus_eager": result["versus_eager"], "seconds": round(time.perf_counter() - begun, 1)}
    hand = {
        how: row["contenders"][how] for how in turns.BY_HAND if row["contenders"][how].get("within_budget")
    }
    if not hand:
        return row | {"best_by_hand": None}
    best = max(hand, key=lambda how: hand[how]["versus_eager"][0])
    ratio = timed.speedup(best, "torchwright", repeats=repeats)
    return row | {"best_by_hand": best, "versus_hand": [ratio.value, ratio.low, ratio.high]}


def optimize(name: str, max_drop: float, time_budget: float, out: str) -> Workload:
    """Let Torchwright make the artifact `out`; returns the workload that the others are timed on."""
    if name == "bundled":
        optimize_cli(
            None,
            max_drop=max_drop,
            objective="latency",
            time_budget=time_budget,
            batch=None,
            prompt_tokens=PROMPT,
            new_tokens=NEW,
            tokens=None,
            eval_text=None,
            with_steps=(),
            without=(),
            device=None,
            out=out,
            seed=0,
            on_event=lambda event: None,
            command="benchmarks/ladder.py",
        )
        return LanguageWorkload(prompt_tokens=PROMPT, new_tokens=NEW)
    function, batch = modules.MODULES[name]
    model, inputs = modules.make(function, batch)
    tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget).save(out)
    return ModuleWorkload(model, inputs)


def hand_made(name: str, how: str) -> Workload:
    if name == "bundled":
        workload = turns.ByHandLanguage(prompt_tokens=PROMPT, new_tokens=NEW)
        workload.how = how
        return workload
    function, batch = modules.MODULES[name]
    model, inputs = modules.make(function, batch)
    return ModuleWorkload(turns.ByHand(model, how), inputs)


def as_line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['module']} | failed: {row['failure']} |"
    all_of_them = row["contenders"]
    ours, best = all_of_them["torchwright"], row["best_by_hand"]
    over = [how for how in turns.BY_HAND if all_of_them[how].get("within_budget") is False]
    failed = [how for how in turns.BY_HAND if "failure" in all_of_them[how]]
    marks = "".join(
        f"; {word}: {', '.join(names)}"
        for word, names in (("over the budget", over), ("failed", failed))
        if names
    )
    hand = against = "none"
    error = f"{ours['error']:.4f}"
    if best:
        hand = f"{best}, {interval(all_of_them[best]['versus_eager'])}"
        against = interval(row["versus_hand"])
        error += f", {all_of_them[best]['error']:.4f}"
    return (
        f"| {row['module']} | {all_of_them['eager']['ms']:.2f} | {interval(ours['versus_eager'])} | {hand}{marks} "
        f"| {against} | {error} | {row['recipe']} |"
    )


def interval(values: list[float]) -> str:
    return f"{values[0]:.2f}x [{values[1]:.2f}, {values[2]:.2f}]"


if __name__ == "__main__":
    main()
