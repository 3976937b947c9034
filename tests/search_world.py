"""A world for tests of the search, made of a table: what each step is worth, what it loses, what it costs.

The clock is fake.
"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from factories import make_device, make_features, make_quality, make_recipe
from search_techniques import FAKES
from torchwright.core.cpu_load import Load
from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import (
    Budget,
    Coverage,
    DeviceFacts,
    Event,
    Features,
    Identity,
    Ranked,
    Recipe,
    Step,
    StepResult,
)
from torchwright.optimization.engines.describe import Description
from torchwright.optimization.proof.settle import ShippingAttempt, settle
from torchwright.optimization.search import judging
from torchwright.optimization.search.finish import outcome_now
from torchwright.optimization.search.loop import run
from torchwright.optimization.search.state import Outcome, Search
from torchwright.optimization.techniques.base import conversion_of, from_step, techniques
from torchwright.optimization.trial.client import Candidate, Context, TrialFailed
from torchwright.optimization.trial.values import Memory, Prepared
from torchwright.workloads.base import FURTHER

UNSEEN_SECONDS = 0.01
"""What it takes to look at data that chooses nothing."""
ORIGINAL = frozenset(
    {"eager", "cpu", "floating", "float_weights", "float32", "range", "linear", "exportable"}
)


@dataclass
class World:
    """What is true of every recipe, and a record of what the search did."""

    gain: Callable[[frozenset[str]], float] = lambda names: 1.0
    """Names of the steps of a recipe, also with their options → how many times faster it is than the original."""
    drop: Callable[[tuple[Step, ...]], float | tuple[float, float]] = lambda steps: 0.0
    """Steps → drop, or (drop, its upper end)."""
    unseen_drop: Callable[[tuple[Step, ...]], float | tuple[float, float]] | None = None
    """The same on data that chooses nothing, where there is some."""
    further_drop: Callable[[tuple[Step, ...]], float | tuple[float, float]] | None = None
    """The same on more of the data, seen and held out, where there is more."""
    varied_drop: Callable[[tuple[Step, ...]], float] | None = None
    """The same on other values than those that calibrate, where they can be varied."""
    samples: int = 64
    """By which it is judged."""
    memory: Callable[[frozenset[str]], int] = lambda names: 1000 * 2**20
    faulting: Callable[[frozenset[str]], float] = lambda names: 0.0
    """Seconds of a recipe's pass that fresh pages take."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name of a step → why the model, once it is built, does not allow it."""
    fails: dict[str, Exception] = field(default_factory=dict)
    """Name of a step → what starting a recipe with it raises."""
    cost: dict[str, float] = field(default_factory=dict)
    """Name of a step → seconds to prepare a recipe with it, beyond one."""
    later: Callable[[frozenset[str], int], float] = lambda names, turn: 1.0
    """Factor on the time of a recipe's n-th turn: noise, or a machine that changes its mind."""
    waited: Callable[[frozenset[str], int], float] = lambda names, turn: 0.0
    """Share of a recipe's n-th turn in which others ran."""
    repeats: Callable[[frozenset[str]], int] = lambda names: 1
    """How often a pass of a recipe makes the call."""
    sampled: Load = field(default_factory=lambda: Load(running=0, cores=2))
    """The load of other programs."""
    seconds: float = 0.01
    """Of the original's call."""
    parts: dict[str, float] = field(default_factory=dict)
    """Component → the share of the original's time that its calls take; the call is of no component without any."""
    part_gain: Callable[[frozenset[str], str], float] = lambda names, part: 1.0
    """Names of the steps of a recipe and a component → how many times faster its calls are, beside `gain`."""
    export_seconds: float = 0.1
    properties: frozenset[str] = ORIGINAL
    """Of the original."""
    start_seconds: float = 1.0
    """Until a process with the original can be called."""
    import_seconds: float = 0.0
    """The same of a process that is not forked, in addition."""
    device: DeviceFacts = field(default_factory=make_device)
    features: Features = field(default_factory=make_features)
    metric: str = "error"
    called_as_is: bool = False
    kernels: dict[str, float] = field(default_factory=dict)
    ranking: list[tuple[str, float]] = field(default_factory=list)
    original: Identity = field(default_factory=lambda: Identity(structure="layers", weights="values"))
    now: float = 0.0
    load: Load = field(default_factory=lambda: Load(running=0, cores=2))
    """Of the machine: how far it stretches limits, and what the search says of it."""
    converting: float = 0.0
    """Seconds that converting the model for a library takes, until it was done once."""
    converted: set[str] = field(default_factory=set)
    started: list[tuple[Step, ...]] = field(default_factory=list)
    looked: list[tuple[Step, ...]] = field(default_factory=list)
    """Recipes that were judged in eager code before they were compiled."""
    asked: list[tuple[str, ...] | None] = field(default_factory=list)
    """Techniques that the original was asked about."""
    observing: float = 0.0
    """Seconds that the original takes to be observed on the sample."""
    observed_further: list[bool] = field(default_factory=list)
    """For each time that the original was asked for more of the data, whether these are held out."""
    alive: list[tuple[Step, ...]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    budget: Budget = field(default_factory=lambda: Budget(max_drop=0.01, time_seconds=100.0))

    def search(self, *tried: Step | tuple[Step, str], **options: Any) -> Outcome:
        self.variants = [item if isinstance(item, tuple) else (item, None) for item in tried]
        context = Context(
            workload=Path(),
            device="cpu",
            threads=2,
            seed=0,
            scratch=Path(),
            deadline=self.now + self.budget.time_seconds,
            clock=lambda: self.now,
            load=lambda: self.load,
            sampled_load=lambda: self.sampled,
        )
        self.searching = Search(context=context, budget=self.budget, watch=self.events.append, **options)
        return run(self.searching)

    def stretched(self) -> float:
        """Return the seconds by which the time budget was stretched."""
        return self.searching.end - self.searching.start - self.budget.time_seconds

    def ship(self, *tried: Step | tuple[Step, str], **options: Any) -> Outcome:
        """The same with its last comparison, in a form that is what the search timed, but in a process of its own."""
        self.search(*tried, **options)
        search = self.searching
        search.context.deadline = search.last_moment = 1e9
        steps = search.best.steps
        if not steps:
            return outcome_now(search)
        form = ShippingAttempt(
            name="itself",
            start=lambda: self.start(search.context, steps),
            prove=lambda candidate: judging.measure(search, candidate),
        )
        outcome, _, shipped = settle(search, [form])
        if shipped is not None:
            shipped.close()
        return outcome

    def resume(self, outcome: Outcome, *tried: Step | tuple[Step, str], **options: Any) -> Outcome:
        """Another search, which goes on where the one with this outcome ended."""
        self.started.clear()
        self.alive.clear()
        self.converted.clear()
        return self.search(*tried, earlier=self.recipe(outcome), **options)

    def recipe(self, outcome: Outcome) -> Recipe:
        return make_recipe(
            steps=outcome.best.steps,
            budget=self.budget,
            baseline=outcome.baseline,
            final=outcome.final,
            speedup=outcome.speedup,
            rungs=outcome.rungs,
            original=self.original,
        )

    def spend(self, context: Context, seconds: float, *, essential: bool = False) -> None:
        """Let time pass, but never beyond what a request may take."""
        allowed = context.allowed(essential=essential)
        self.now += min(seconds, allowed)
        if seconds > allowed:
            raise TrialFailed("not done in the time that was left", timed_out=True)

    def speed(self, steps: tuple[Step, ...]) -> float:
        """How many times faster than the original a recipe is."""
        return self.gain(frozenset(step.name for step in steps) | frozenset(map(str, steps)))

    def cost_of(self, step: Step) -> float:
        return self.cost.get(str(step), self.cost.get(step.name, 0.0))

    def start(self, context: Context, steps: tuple[Step, ...], *, essential: bool = False) -> Candidate:
        self.started.append(steps)
        name = conversion_of(steps)
        compilers = [step for step in steps if name and "compiled" in from_step(step).gives]
        making = sum(map(self.cost_of, compilers)) if compilers else self.converting
        spared = making if name in self.converted else 0.0
        converted = making if name is not None and not spared else 0.0
        seconds = (
            self.start_seconds
            + converted
            + sum(self.cost_of(step) for step in steps if step not in compilers)
        )
        self.spend(context, seconds, essential=essential)
        self.converted |= {name} if name else set()
        for step in steps:
            if step.name in self.fails:
                raise self.fails[step.name]
        prepared = self.prepared(steps, seconds + spared, converted=converted, spared=spared)
        self.alive.append(steps)
        return Candidate(
            steps=steps,
            process=Process(self, context, steps, essential),  # pyright: ignore[reportArgumentType]
            folder=None,
            prepared=prepared,
        )

    def prepared(self, steps: tuple[Step, ...], seconds: float, **converting: float) -> Prepared:
        properties = _applied(self.properties, steps)
        return Prepared(
            seconds=seconds,
            engine="aot" if "compiled" in properties else "eager",
            dtype="float32",
            threads=None,
            allocator=None,
            coverage=tuple(Coverage(technique=step.name, changed=1, total=1) for step in steps),
            weight_bytes=10,
            properties=properties,
            repeats=dict.fromkeys(
                self.parts or ["forward"], self.repeats(frozenset(step.name for step in steps))
            ),
            parts={part: part for part in self.parts},
            **converting,
        )


def _applied(properties: frozenset[str], steps: tuple[Step, ...]) -> frozenset[str]:
    """The properties that steps leave; one that does not find what it needs refuses, as in `apply_steps`."""
    promised = frozenset[str]().union(*(from_step(step).gives for step in steps))
    for step in steps:
        technique = from_step(step)
        missing = technique.needs - properties - promised
        if missing:
            raise RefusedTechnique(f"{step} cannot be applied here", found=f"the model lacks: {missing}")
        properties = (properties - technique.removed) | technique.gives
    return properties


class Process:
    """Answers like a trial process, from the table."""

    def __init__(self, world: World, context: Context, steps: tuple[Step, ...], essential: bool) -> None:
        self.world, self.context, self.steps, self.essential = world, context, steps, essential
        self.names = frozenset(step.name for step in steps) | frozenset(map(str, steps))
        self.turns = 0

    def ask(self, method: str, **arguments: Any) -> Any:
        return getattr(self, method)(**arguments)

    def warm_seconds(self) -> dict[str, float]:
        seconds = self.world.seconds / self.world.speed(self.steps) * self.world.later(self.names, self.turns)
        parts = {
            part: seconds * share / self.world.part_gain(self.names, part)
            for part, share in self.world.parts.items()
        }
        return parts or {"forward": seconds}

    def time(self) -> dict[str, float]:
        self.turns += 1
        calls = self.warm_seconds()
        self.world.spend(self.context, 2 * sum(calls.values()), essential=self.essential)
        return calls

    def waited(self) -> float:
        return self.world.waited(self.names, self.turns)

    def memory(self) -> Memory:
        faulting = {name: self.world.faulting(self.names) for name in self.world.parts or ("forward",)}
        return Memory(peak=self.world.memory(self.names), recompiles=0, faulting=faulting)

    def further_times(self, *, unseen: bool) -> float:
        return FURTHER if self.world.further_drop else 0.0

    def observe(self, *, unseen: bool = False, varied: bool = False, further: bool = False) -> str | None:
        if further:
            self.world.spend(self.context, FURTHER * UNSEEN_SECONDS, essential=self.essential)
            self.world.observed_further.append(unseen)
            return "further"
        if varied:
            return "varied" if self.world.varied_drop else None
        self.world.spend(
            self.context, UNSEEN_SECONDS if unseen else self.world.observing, essential=self.essential
        )
        return "observed" if not unseen else "unseen" if self.world.unseen_drop else None

    def pictures(self) -> list[Any]:
        return []

    def compare(
        self,
        *,
        reference: str,
        itself: bool = False,
        unseen: bool = False,
        varied: bool = False,
        further: bool = False,
        show: bool = False,
    ) -> Any:
        assert reference == (
            "further" if further else "unseen" if unseen else "varied" if varied else "observed"
        )
        other = (
            self.world.further_drop
            if further
            else self.world.unseen_drop
            if unseen
            else self.world.varied_drop
            if varied
            else None
        )
        drop = (other or self.world.drop)(self.steps)
        drop, high = drop if isinstance(drop, tuple) else (drop, drop)
        return make_quality(drop, high, metric=self.world.metric, samples=self.world.samples)

    def refusals(self, *, steps: tuple[Step, ...], given: frozenset[str]) -> list[tuple[Step, str | None]]:
        assert self.turns == 0, "what was asked for is checked before the original is timed"
        reasons = {str(step): reason for step, reason in self.world.variants} | self.world.refused
        return [
            (step, reasons.get(str(step)) or from_step(step).available(self.world.device)) for step in steps
        ]

    def describe(self, *, names: tuple[str, ...] | None) -> Description:
        self.world.asked.append(names)
        return Description(
            device=self.world.device,
            original=self.world.original,
            export_seconds=self.world.export_seconds,
            called_as_is=self.world.called_as_is,
            properties=self.world.properties,
            variants=tuple(self.world.variants),
            counts={},
            kernel_seconds=self.world.kernels,
            features=self.world.features,
        )

    def close(self) -> None:
        if self.steps in self.world.alive:
            self.world.alive.remove(self.steps)


def fake_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose techniques and processes stand in the places of the real ones."""
    techniques.names()
    monkeypatch.setattr(techniques, "_targets", {cls.name: "tests:fake" for cls in FAKES})
    monkeypatch.setattr(techniques, "_loaded", {cls.name: cls for cls in FAKES})
    made = World()
    answer_from(made, monkeypatch)
    return made


def answer_from(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials run in the world instead of in processes."""

    class Short:
        """A process that is asked one thing and ends: to rank layers, or what a recipe loses in eager code."""

        def __init__(self, context: Context, environment: Any = None) -> None:
            made.spend(context, made.start_seconds)
            self.context = context

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: Any) -> None:
            return None

        def ask(self, method: str, **arguments: Any) -> Any:
            return getattr(self, method)(**arguments)

        def sensitivity(self, *, steps: tuple[Step, ...]) -> list[Ranked]:
            if not made.ranking:
                raise TrialFailed("no layer has inputs")
            return [Ranked(name=name, error=error) for name, error in made.ranking]

        def prepare(self, *, steps: tuple[Step, ...], compiled: bool) -> Prepared:
            assert not compiled
            made.looked.append(steps)
            eager = [step for step in steps if "compiled" not in from_step(step).gives]
            made.spend(self.context, sum(map(made.cost_of, eager)))
            self.process = Process(made, self.context, steps, essential=False)
            return made.prepared(steps, 1.0)

        def compare(self, *, reference: str) -> Any:
            return self.process.compare(reference=reference)

    def warm_up(context: Context) -> None:
        made.spend(context, made.import_seconds, essential=True)

    monkeypatch.setattr(Context, "warm_up", warm_up)
    monkeypatch.setattr("torchwright.optimization.trial.client.start_candidate", made.start)
    monkeypatch.setattr("torchwright.optimization.trial.client.TrialProcess", Short)


def product(**factors: float) -> Callable[[frozenset[str]], float]:
    """Each step multiplies the speed."""

    def gain(names: frozenset[str]) -> float:
        result = 1.0
        for name in names:
            result *= factors.get(name, 1.0)
        return result

    return gain


def lossy(**drops: float) -> Callable[[tuple[Step, ...]], float]:
    return lambda steps: sum(drops.get(step.name, 0.0) for step in steps)


def step(name: str, **options: Any) -> Step:
    return Step(name=name, options=options)


def names(outcome: Outcome) -> list[str]:
    return [str(step) for step in outcome.best.steps]


def tried(world: World) -> list[str]:
    """The last step of each recipe that was started, in the order of trials."""
    order: list[str] = []
    for steps in world.started:
        order += [str(each) for each in steps if str(each) not in order]
    return order


def rows(outcome: Outcome) -> dict[str, str]:
    return {str(rung.step): rung.status for rung in outcome.rungs}


def row(outcome: Outcome, name: str) -> StepResult:
    (found,) = [rung for rung in outcome.rungs if str(rung.step) == name]
    return found
