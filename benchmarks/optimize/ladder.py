"""Torchwright compared with eager and with the hand-tuned baseline, on eight modules; ratios are of turns in one run.

    python -m benchmarks.optimize.ladder [--only NAME …] [--max-drop 0.02] [--time-budget SECONDS] [--json FILE]

By hand: torch.compile, torch.compile with freezing, bf16 autocast, bf16 autocast under torch.compile, each in a
process of its own. Those over the same accuracy budget are timed and marked, and do not count as the best.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import nn

import torchwright as tw
from benchmarks.board import rows as board
from benchmarks.harness import contenders, run
from benchmarks.harness.contenders import BY_HAND, ByHand, by_hand, optimize_command
from benchmarks.harness.run import Row, times, triple
from benchmarks.models import shapes
from torchwright.core.errors import TorchwrightError
from torchwright.workloads.base import Case, Run, Workload
from torchwright.workloads.language import LanguageWorkload
from torchwright.workloads.module import ModuleWorkload

SIZES: dict[str, Any] = {"prompt_tokens": 128, "new_tokens": 64}
BUNDLED = "bundled"
COLUMNS = ("module", "eager, ms", "Torchwright", "best by hand", "over that", "error: ours, theirs", "recipe")


class ByHandLanguage(LanguageWorkload):
    """The bundled language model under one of BY_HAND: eager with a growing cache, compiled with a fixed one."""

    how = "autocast"

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return super().cases(self._cache_dtype(dtype))

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return super().observe(run, self._cache_dtype(dtype))

    def _cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the keys that autocast writes into the cache."""
        return torch.bfloat16 if "autocast" in self.how else dtype

    def adapt(self, model: nn.Module) -> nn.Module:
        return ByHand(super().adapt(model), self.how)

    def original_run(self, model: nn.Module) -> Run:
        if self.how == "autocast":
            return by_hand(super().original_run(model), self.how)
        call = self.adapt(model)
        return lambda case: call(*case.args, **case.kwargs)


def main() -> None:
    names = (BUNDLED, *shapes.MODULES)
    options = run.options(__doc__, only=names, max_drop=0.02, time_budget=75.0)
    note = f"accuracy budget: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a module"
    rows = run.Rows(options.json, COLUMNS, note=note)
    for name in options.only:
        row = measured(name, options.max_drop, options.time_budget)
        rows.add(row, cells(row))
        if figures := ratios(row):
            limits = f"budget {options.max_drop:.0%}, search of {options.time_budget:.0f} s"
            rows.measured(name, figures, limits, kept=row["recipe"])
    finished = [row for row in rows if "versus_hand" in row]
    never_slower = sum(row["versus_eager"][2] >= 1 for row in finished)
    near = sum(row["versus_hand"][0] >= 0.95 for row in finished)
    above = sum(row["versus_hand"][0] > 1 for row in finished)
    print(
        f"\nof {len(rows)} modules: not slower than eager {never_slower}, at least 0.95 of the best by hand {near}, "
        f"above that {above}"
    )


def measured(name: str, max_drop: float, time_budget: float) -> Row:
    """Return one module's row."""
    begun = time.perf_counter()
    row: Row = {"module": name}
    with tempfile.TemporaryDirectory() as folder, contenders.contenders() as start:
        out = f"{folder}/artifact"
        run.say(f"{name}: optimizing")
        try:
            workload = optimize(name, max_drop, time_budget, out)
        except TorchwrightError as error:
            return row | {"failure": str(error)[:300]}
        row |= {"recipe": contenders.recipe_of(out), "search_s": round(time.perf_counter() - begun, 1)}
        eager = start("eager", workload)
        if not eager.process:
            return row | {"failure": eager.failure}
        reference = eager.observe()
        if name == BUNDLED:
            ours = start("torchwright", workload, artifact=out, reference=reference)
        else:
            model, inputs = shapes.make(*shapes.MODULES[name])
            optimized = ModuleWorkload(contenders.FromArtifact(model, out), inputs)
            ours = start("torchwright", optimized, reference=reference)
        field = [eager, ours]
        for how in BY_HAND:
            run.say(f"{name}: {how}")
            field.append(start(how, hand_tuned(name, how), reference=reference))
        run.say(f"{name}: taking turns")
        timed = contenders.take_turns(field)
        repeats = {case.name: case.repeat for case in workload.cases(torch.float32)}
    row["contenders"] = {}
    for each in field:
        entry: Row = {"failure": each.failure} if each.failure else {}
        if each.process:
            seconds = sorted(timed.seconds(each.name, repeats=repeats))
            entry = {
                "ms": 1e3 * seconds[len(seconds) // 2],
                "versus_eager": triple(timed.speedup("eager", each.name, repeats=repeats)),
                "error": each.quality.drop if each.quality else 0.0,
                "within_budget": each.quality is None or each.quality.drop_high <= max_drop,
                "ready_s": round(each.ready_s, 1),
            }
        row["contenders"][each.name] = entry
    result = row["contenders"]["torchwright"]
    if "ms" not in result:
        return row | {"failure": result["failure"]}
    row |= {"versus_eager": result["versus_eager"], "seconds": round(time.perf_counter() - begun, 1)}
    hand = [how for how in BY_HAND if row["contenders"][how].get("within_budget")]
    if not hand:
        return row | {"best_by_hand": None}
    best = max(hand, key=lambda how: row["contenders"][how]["versus_eager"][0])
    ratio = timed.speedup(best, "torchwright", repeats=repeats)
    return row | {"best_by_hand": best, "versus_hand": triple(ratio)}


def optimize(name: str, max_drop: float, time_budget: float, out: str) -> Workload:
    """Write Torchwright's artifact to `out`; return the workload that the others are timed on."""
    if name == BUNDLED:
        optimize_command(None, out, max_drop, time_budget, **SIZES)
        return LanguageWorkload(**SIZES)
    model, inputs = shapes.make(*shapes.MODULES[name])
    tw.optimize(model, inputs, max_drop=max_drop, time_budget=time_budget).save(out)
    return ModuleWorkload(model, inputs)


def hand_tuned(name: str, how: str) -> Workload:
    if name == BUNDLED:
        workload = ByHandLanguage(**SIZES)
        workload.how = how
        return workload
    model, inputs = shapes.make(*shapes.MODULES[name])
    return ModuleWorkload(ByHand(model, how), inputs)


def ratios(row: Row) -> dict[tuple[str, str], Any]:
    """Return what the board keeps of a row: ours over both baselines, and each hand-tuned baseline over eager."""
    measures = {"versus_eager": board.ORIGINAL, "versus_hand": board.BY_HAND}
    found = {(board.WHOLE, measure): row[key] for key, measure in measures.items() if key in row}
    by_hand = {how: row.get("contenders", {}).get(how, {}) for how in BY_HAND}
    within = {how: entry for how, entry in by_hand.items() if entry.get("within_budget")}
    return found | {(how, board.ORIGINAL): entry["versus_eager"] for how, entry in within.items()}


def cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return row["module"], f"failed: {row['failure']}"
    field = row["contenders"]
    ours, best = field["torchwright"], row["best_by_hand"]
    over = [how for how in BY_HAND if field[how].get("within_budget") is False]
    failed = [how for how in BY_HAND if "failure" in field[how]]
    marks = "".join(
        f"; {word}: {', '.join(names)}"
        for word, names in (("over the budget", over), ("failed", failed))
        if names
    )
    hand = against = "none"
    error = f"{ours['error']:.4f}"
    if best:
        hand = f"{best}, {times(field[best]['versus_eager'])}"
        against = times(row["versus_hand"])
        error += f", {field[best]['error']:.4f}"
    eager, gain = f"{field['eager']['ms']:.2f}", times(ours["versus_eager"])
    return row["module"], eager, gain, hand + marks, against, error, row["recipe"]


if __name__ == "__main__":
    main()
