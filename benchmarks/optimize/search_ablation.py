"""The search's mechanisms and constants, each off, halved and doubled, on recorded searches; no model is run.

    python benchmarks/optimize/search_ablation.py [--only PATTERN] [--every N] [--time-budget 90 300] [--json FILE]

Each model of the table of experience becomes a world: gains, losses and times of its steps as its exhaustive search and
its row of hundred.jsonl (torch.compile, autocast, OpenVINO) have measured them. Steps that nobody measured on a model
have the median of the models on which they were. The real search runs in that world on a fake clock, once as it is and
once with each change. Its table of experience has all other models (leave one out).

First comes the unchanged search: its gain, also after each sixth of the time budget, and the shares of searches that
left steps untried for lack of time.

Columns, with the change over without: the time until 95% of the unchanged search's gain is kept, the final speed-up,
the same of the worst model, the seconds of the search. They are geometric means. A search that never comes there counts
with its whole time. The last column counts the models whose time or gain changed. What leaves the time under 1.05
without it, and no gain lower, does not pay for itself.

A modelled part: layers' errors fall off geometrically (the retreat), and gains of our own steps multiply unless they
were measured together. Components of pipelines, fresh pages, busy machines and the proof are not replayed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchwright.optimization.search as room
from torchwright.core import intervals
from torchwright.core.records import RELATIVE_ERROR, Budget, Step
from torchwright.optimization.search import choose, estimate, experience
from torchwright.optimization.search.experience import Experience, SearchRecord
from torchwright.optimization.techniques import base
from torchwright.optimization.techniques.base import from_step, parse_step

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from factories import make_device  # pyright: ignore[reportMissingImports]
from search_world import ORIGINAL, World, answer_from  # pyright: ignore[reportMissingImports]

ROWS = Path(__file__).parents[1] / "hundred.jsonl"
SHARE = 0.95
SHOWN = 6
"""Untried steps that are named."""
LAYERS, FALL = 20, 0.7
"""Layers that a retreat may leave alone, and the error of each over the one before."""
EXPORTS = 11.0
"""A conversion in exports of the model, as it was on four models."""
OTHERS = 2.0
"""Seconds of a trial's cost that are its comparison, which the world counts itself."""
COMMON = ("compile", "max_autotune", "dtype", "dtype:autocast=true", "openvino", "openvino:precision=bf16")
"""Steps of which each row of hundred.jsonl knows something."""
CALIBRATION = 0.5
"""Finding 8-bit ranges in conversions."""
LEAST = 0.3
"""Seconds to prepare what nobody has timed."""
DEVICE = make_device(name="AMD EPYC", isa=("avx2", "avx512f", "avx512_vnni"), cores=1)

Change = Callable[[pytest.MonkeyPatch], None]


@dataclass(kw_only=True)
class Truth:
    """The measurements of a step on one model."""

    gain: float | None = None
    """Over the original of an engine, over the recipe before of any other step."""
    drop: float | None = None
    seconds: float | None = None
    """To prepare it."""


@dataclass(kw_only=True)
class Model:
    record: SearchRecord
    steps: dict[str, Truth] = field(default_factory=dict[str, Truth])
    together: dict[frozenset[str], Truth] = field(default_factory=dict[frozenset[str], Truth])
    """Own recipes that were measured whole."""
    seconds: float = 0.05
    start: float = 3.0
    importing: float = 2.0
    """Seconds of a process that is not forked, beyond its start."""
    converting: float = 15.0

    def gain(self, steps: Iterable[Step]) -> float:
        """The speed-up of a recipe over the original."""
        left = dict(map(named, steps))
        for name, share in left.items():
            if is_engine(parse_step(name)):
                return power(self.steps[name].gain or 1.0, share)
        result = 1.0
        for together, truth in self.together.items():
            if together <= left.keys() and truth.gain:
                result = truth.gain
                left = {name: share for name, share in left.items() if name not in together}
        return result * math.prod(power(self.steps[name].gain or 1.0, share) for name, share in left.items())

    def drop(self, steps: Iterable[Step]) -> float:
        """The loss of a recipe; errors of several steps are independent."""
        return math.hypot(*((self.steps[name].drop or 0.0) * share for name, share in map(named, steps)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="changes whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="search every n-th model alone")
    parser.add_argument("--time-budget", type=float, nargs="+", default=[90.0, 300.0])
    parser.add_argument("--constants", action="store_true", help="halve and double every constant, too")
    parser.add_argument("--json", type=Path, help="keep the unchanged search's figures there")
    options = parser.parse_args()
    found = models()
    begun = time.monotonic()
    plain = replay(found, options, lambda patch: None)
    print(f"{len(plain)} searches, {time.monotonic() - begun:.0f} s")
    finals = math.exp(statistics.fmean(math.log(each.final) for each in plain))
    print(
        f"unchanged: gain {finals:.4f}x, "
        f"95% of it after {statistics.fmean(each.wait(each.final) for each in plain):.2f} s, "
        f"search {statistics.fmean(each.seconds for each in plain):.2f} s"
    )
    for budget in options.time_budget:
        describe(budget, [each for each in plain if each.budget == budget])
    print()
    if options.json:
        text = json.dumps([vars(each) for each in plain])
        options.json.write_text(text)
    print("| change | time to 95% | final gain | worst | search | models |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, change in changes(with_constants=options.constants):
        if options.only in name:
            print(f"| {name} | {against(plain, replay(found, options, change))} |", flush=True)


# Searches


@dataclass(kw_only=True)
class Run:
    """One search, as its gain rose."""

    model: str
    budget: float
    final: float
    seconds: float
    untried: list[str]
    """Steps that the time was too short for."""
    rows: int
    original: float
    """Seconds until the time budget began."""
    reached: list[tuple[float, float]]
    """When, and the speed-up kept by then."""

    def wait(self, final: float) -> float:
        target = 1.0 + SHARE * (final - 1.0)
        return next((when for when, gain in self.reached if gain >= target), self.seconds)

    def gain_by(self, seconds: float) -> float:
        return max((gain for when, gain in self.reached if when - self.original <= seconds), default=1.0)


def describe(budget: float, runs: Sequence[Run]) -> None:
    """Print how the gain of the unchanged search rises, and how often its steps stay untried."""
    times = [budget * sixth / 6 for sixth in range(1, 7)]
    gains = [math.exp(statistics.fmean(math.log(each.gain_by(when)) for each in runs)) for when in times]
    print(
        f"{budget:.0f} s: {', '.join(f'{gain:.2f}x by {t:.0f} s' for gain, t in zip(gains, times, strict=True))}"
    )
    untried = Counter(name for each in runs for name in each.untried)
    share = sum(untried.values()) / sum(each.rows for each in runs)
    names = ", ".join(f"{name} in {count}" for name, count in untried.most_common(SHOWN))
    print(f"{budget:.0f} s: {share:.1%} of the rows untried; of {len(runs)} searches {names}")


def replay(found: list[Model], options: argparse.Namespace, change: Change) -> list[Run]:
    runs: list[Run] = []
    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        change(patch)
        for budget in options.time_budget:
            for model in found[:: options.every]:
                others = tuple(each.record for each in found if each is not model)
                runs.append(search(model, others, budget))
    return runs


def remember(patch: pytest.MonkeyPatch) -> None:
    """Make each technique of a step once: a replay asks for it ten thousand times."""
    for function in (base.from_step, base.conversion_of, base.compiles, estimate.runners, base.in_order):
        memo = remembered(function)
        for module in (base, *rooms(), sys.modules[__name__], sys.modules["search_world"]):
            if vars(module).get(function.__name__) is function:
                patch.setattr(module, function.__name__, memo)
    patch.setattr(intervals, "_beta_share", functools.cache(intervals._beta_share))


INTERNED: dict[int, tuple[Step, str]] = {}
"""Steps by identity, kept so that no other takes it, each with its text."""


def text_of(step: Step) -> str:
    if id(step) not in INTERNED:
        INTERNED[id(step)] = step, repr(step)
    return INTERNED[id(step)][1]


def remembered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[Any, Any] = {}

    def answer(steps: Any) -> Any:
        steps = steps if isinstance(steps, Step) else tuple(steps)
        key = text_of(steps) if isinstance(steps, Step) else tuple(map(text_of, steps))
        if key not in known:
            known[key] = function(steps)
        return known[key]

    return answer


def search(model: Model, others: tuple[SearchRecord, ...], budget: float) -> Run:
    world = Recorded(model)
    world.budget = Budget(max_drop=model.record.max_drop, time_seconds=budget)
    with pytest.MonkeyPatch.context() as patch:
        answer_from(world, patch)
        outcome = world.search(*map(parse_step, model.steps), records=others)
    begun, kept = world.searching.begun, ("kept", "removed")
    rows = sorted(outcome.rungs, key=lambda rung: rung.ended_seconds or 0.0)
    reached = [
        (rung.ended_seconds or 0.0, rung.total_speedup.value)
        for rung in rows
        if rung.status in kept and rung.total_speedup
    ]
    best = model.gain(outcome.best.steps)
    return Run(
        model=model.record.model,
        budget=budget,
        final=max(best, 1.0),
        seconds=world.now - begun,
        untried=[named(rung.step)[0] for rung in outcome.rungs if rung.status == "untried"],
        rows=len(outcome.rungs),
        original=world.searching.start - begun,
        reached=reached,
    )


def against(plain: list[Run], changed: list[Run]) -> str:
    times, gains, seconds, moved = [], [], [], set[str]()
    for one, other in zip(plain, changed, strict=True):
        times.append(max(other.wait(one.final), 1.0) / max(one.wait(one.final), 1.0))
        gains.append(other.final / one.final)
        seconds.append(other.seconds / one.seconds)
        if abs(times[-1] - 1) > 1e-6 or abs(gains[-1] - 1) > 1e-6:
            moved.add(one.model)
    means = [math.exp(statistics.fmean(map(math.log, values))) for values in (times, gains, seconds)]
    return f"{means[0]:.3f} | {means[1]:.4f} | {min(gains):.2f} | {means[2]:.3f} | {len(moved)}"


# Worlds


def models() -> list[Model]:
    rows: dict[str, dict[str, Any]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        rows[row["model"]] = row
    found = [made(each, rows.get(each.model)) for each in experience.read()]
    impute(found)
    return found


def made(record: SearchRecord, row: dict[str, Any] | None) -> Model:
    model = Model(record=record)
    if row is not None:
        measured_by_hand(model, row)
        for name, gain in trials_of(row).items():
            truth = model.steps.setdefault(name, Truth())
            truth.gain = gain or truth.gain
    unit = model.importing + model.start
    for name, trial in record.trials.items():
        truth = model.steps.setdefault(name, Truth())
        truth.gain = truth.gain or trial.gain
        truth.drop = trial.drop if trial.drop is not None else truth.drop
        own = max(trial.cost * unit - model.start - OTHERS, 0.3)
        truth.seconds = truth.seconds or (None if from_step(parse_step(name)).conversion else own)
    for name in COMMON:
        model.steps.setdefault(name, Truth())
    return model


def measured_by_hand(model: Model, row: dict[str, Any]) -> None:
    original, by_hand, theirs = row["ms"]["original"], row["by_hand"], row["openvino"]
    model.seconds = original / 1e3
    base = by_hand["autocast"].get("ready_s", 5.0)
    model.start = max(0.6 * base, 0.5)
    model.importing = max(base - model.start, 0.5)

    def of(found: dict[str, Any]) -> Truth:
        seconds = max(found.get("ready_s", 2 * base) - base, 1.0)
        return Truth(
            gain=original / found["ms"] if "ms" in found else None, drop=found.get("loss"), seconds=seconds
        )

    compiled, half, both, tuned = (
        of(by_hand[name]) for name in ("compile", "autocast", "autocast+compile", "max-autotune")
    )
    model.steps["compile"] = compiled
    model.steps["dtype:autocast=true"] = Truth(gain=half.gain, drop=half.drop, seconds=0.3)
    model.together[frozenset({"compile", "dtype:autocast=true"})] = both
    ratio = tuned.gain / compiled.gain if tuned.gain and compiled.gain else None
    model.steps["max_autotune"] = Truth(
        gain=ratio, drop=tuned.drop, seconds=max((tuned.seconds or 0) - (compiled.seconds or 0), 5.0)
    )
    for precision, name in (("f32", "openvino"), ("bf16", "openvino:precision=bf16")):
        model.steps[name] = Truth(gain=of(theirs[precision]).gain, drop=of(theirs[precision]).drop)
    model.converting = of(theirs["f32"]).seconds or 15.0


def trials_of(row: dict[str, Any]) -> dict[str, float | None]:
    """Return the gain of each proposed step, None if it was not timed, without forms that leave layers alone."""
    found: dict[str, float | None] = {}
    before = 1.0
    for text in row["tried"]:
        name, said = text.split(": ", 1)
        if "skip=" in name or "keep_float32=" in name:
            continue
        step, (status, *rest) = parse_step(name), said.split(", ")
        name = str(step)  # int8_rows is a name of int8_dynamic
        total = float(rest[0].removesuffix("x")) if rest and rest[0].endswith("x") else None
        if total is None or is_engine(step):
            found[name] = total
            continue
        found[name] = total / before
        before = total if status in ("kept", "removed") else before
    return found


def impute(found: list[Model]) -> None:
    """Give what nobody measured on a model the median of the models on which it was.

    The two engines in float32 are alike: 0.85 to 1.19 times each other's speed on the 14 models that have both.
    """
    for model in found:
        theirs = model.steps.get("openvino", Truth()), model.steps.get("onnxruntime", Truth())
        for one, other in (theirs, theirs[::-1]):
            one.gain = one.gain or other.gain
    names = sorted({name for model in found for name in model.steps})
    for name in names:
        known = [model.steps[name] for model in found if name in model.steps]
        for part, otherwise in (("gain", 1.0), ("drop", 0.0), ("seconds", 0.3)):
            values = [getattr(each, part) for each in known if getattr(each, part) is not None]
            middle = statistics.median(values) if values else otherwise
            for each in known:
                if getattr(each, part) is None:
                    setattr(each, part, middle)


def is_engine(step: Step) -> bool:
    technique = from_step(step)
    return "eager" in technique.removed and "compiled" not in technique.gives


def named(step: Step) -> tuple[str, float]:
    """The step without the layers that it leaves alone, and the share of the layers' error that remains."""
    options = {key: value for key, value in step.options.items() if not isinstance(value, list | tuple)}
    alone = max((len(value) for value in step.options.values() if isinstance(value, list | tuple)), default=0)
    return str(Step(name=step.name, options=options)), FALL**alone


def power(gain: float, share: float) -> float:
    """The gain that remains where layers with this share of the error, fewer of the time, are still changed."""
    alone = 0.0 if share == 1.0 else math.log(share) / math.log(FALL) / LAYERS
    return gain ** max(1.0 - alone, 0.0)


class Recorded(World):
    """The world of one model."""

    def __init__(self, model: Model) -> None:
        changes = [from_step(parse_step(name)) for name in model.steps]
        given = frozenset[str]().union(*(each.gives for each in changes))
        needed = frozenset[str]().union(*(each.needs for each in changes))
        worst = max(truth.drop or 0.0 for truth in model.steps.values())
        scale = worst * math.sqrt(1 - FALL**2)
        cost = {name: truth.seconds or LEAST for name, truth in model.steps.items()}
        super().__init__(
            drop=model.drop,
            seconds=model.seconds,
            start_seconds=model.start,
            import_seconds=model.importing,
            export_seconds=model.converting / EXPORTS,
            converting=model.converting,
            cost=cost | {"openvino:precision=int8": CALIBRATION * model.converting},
            properties=ORIGINAL | (needed - given),
            metric=RELATIVE_ERROR,
            called_as_is=True,
            device=DEVICE,
            features=model.record.features,
            ranking=[(f"layer{number}", scale * FALL**number) for number in range(LAYERS)],
        )
        self.model = model

    def speed(self, steps: tuple[Step, ...]) -> float:
        return self.model.gain(steps)


# Changes


def changes(*, with_constants: bool) -> Iterator[tuple[str, Change]]:
    """Every mechanism off, and every constant halved and doubled; what is a gain, as a logarithm."""
    for name, change in MECHANISMS.items():
        yield f"{name}: off", change
    for module in rooms() if with_constants else ():
        for name in constants(module):
            for word, factor in (("halved", 0.5), ("doubled", 2.0)):
                value = scaled(name, getattr(module, name), factor)
                yield (
                    f"{module.__name__.rpartition('.')[2]}.{name}: {word}",
                    set_in(module, name, value),
                )


@functools.cache
def rooms() -> list[ModuleType]:
    """The search's modules."""
    files = sorted(Path(room.__file__ or "").parent.glob("*.py"))
    return [
        importlib.import_module(f"{room.__name__}.{file.stem}") for file in files if file.stem != "__init__"
    ]


@functools.cache
def constants(module: ModuleType) -> list[str]:
    """Names in capitals that a module assigns numbers to."""
    source = Path(module.__file__ or "").read_text()
    found: list[str] = []
    for node in ast.parse(source).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            found += [each.id for each in names if isinstance(each, ast.Name) and each.id.isupper()]
    return [name for name in found if is_numeric(getattr(module, name))]


def is_numeric(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return bool(value) and all(map(is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def scaled(name: str, value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: scaled(name, each, factor) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(scaled(name, each, factor) for each in value)
    if "GAIN" in name:
        return value**factor
    return max(round(value * factor), 1) if isinstance(value, int) else value * factor


def set_in(home: ModuleType, name: str, value: Any) -> Change:
    """In the module that has the constant, and in those that import it from there."""

    def change(patch: pytest.MonkeyPatch) -> None:
        for module in rooms():
            if module is home or (name in vars(module) and name not in constants(module)):
                patch.setattr(module, name, value)

    return change


def nothing(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: value


def replaced(name: str, value: Any) -> Change:
    """`module.function` by what always answers `value`, wherever the search calls it."""
    module, function = name.split(".")

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(importlib.import_module(f"{room.__name__}.{module}"), function, nothing(value))

    return change


def same_gains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choose, "GAINS", dict.fromkeys(choose.GAINS, 1.5))


def other_order(patch: pytest.MonkeyPatch) -> None:
    """The largest gain first, whatever its trial takes."""
    patch.setattr(choose, "expected_seconds", nothing(1.0))


MECHANISMS: dict[str, Change] = {
    "experience": replaced("experience.near", Experience()),
    "experience.given": lambda patch: patch.setattr(Experience, "given", lambda self, losses: self),
    "experience.cost": lambda patch: patch.setattr(Experience, "cost", lambda self, step, unit, guess: guess),
    "choose.GAINS, one for all": same_gains,
    "choose.expected_seconds": other_order,
    "choose._too_coarse": replaced("choose._too_coarse", False),
    "choose.second_chances": replaced("choose.second_chances", []),
    "choose.in_company": replaced("choose.in_company", None),
    "attempt._lost_uncompiled": replaced("attempt._lost_uncompiled", None),
    "attempt._retreat": replaced("attempt._retreat", False),
    "finish.ablate": replaced("loop.ablate", None),
    "estimate.proof_seconds": replaced("estimate.proof_seconds", 0.0),
    "compare.spares_original": replaced("compare.spares_original", False),
    "loop._try_at_least_one": replaced("loop._try_at_least_one", None),
}


if __name__ == "__main__":
    main()
