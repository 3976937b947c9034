"""A world for tests of the search, made of a table: what each step is worth, what it loses, what it costs.

The clock is fake.
"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from factories import make_device, make_features, make_quality, make_recipe
from torchwright.engines.describe import Description
from torchwright.errors import RefusedTechnique
from torchwright.facts import Budget, Coverage, DeviceFacts, Event, Identity, Ranked, Recipe, Rung, Step
from torchwright.search.finish import Form, settle
from torchwright.search.loop import run
from torchwright.search.state import Outcome, Search
from torchwright.techniques.base import Phase, Technique, conversion_of, from_step, techniques
from torchwright.techniques.shared.for_parts import ForParts
from torchwright.trial.client import Candidate, Context, TrialFailed
from torchwright.trial.values import Memory, Prepared

UNSEEN_SECONDS = 0.01
"""What it takes to look at data that chooses nothing."""
ORIGINAL = frozenset(
    {"eager", "cpu", "floating", "float_weights", "float32", "range", "linear", "exportable"}
)


@dataclass(frozen=True, kw_only=True)
class Fold(Technique):
    """A change of the graph."""

    name: ClassVar[str] = "fold"
    phase: ClassVar[Phase] = Phase.GRAPH


@dataclass(frozen=True, kw_only=True)
class Trim(Technique):
    """A change of the graph that must come before its numbers and its engine change."""

    name: ClassVar[str] = "trim"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float32"})


@dataclass(frozen=True, kw_only=True)
class Half(Technique):
    """A narrower type; has two variants."""

    name: ClassVar[str] = "half"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})
    kind: str = "b"
    """Which; `short` has a smaller range and more digits, `gentle` rounds half as much as others."""

    @property
    def removed(self) -> frozenset[str]:
        return self.removes | {"range"} if self.kind == "short" else self.removes

    @property
    def epsilon(self) -> float:
        return {"short": 2.0**-10, "gentle": 2.0**-8}.get(self.kind, 2.0**-7)

    @property
    def kernel(self) -> str | None:
        return "half"


@dataclass(frozen=True, kw_only=True)
class Quantize(Technique):
    """Narrow weights; takes away what `half` takes away, and can leave layers alone."""

    name: ClassVar[str] = "quantize"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    skip: tuple[str, ...] = ()
    """Layers left alone."""

    @property
    def kernel(self) -> str | None:
        return "int8"

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)


@dataclass(frozen=True, kw_only=True)
class Static(Technique):
    """Needs the type that `half` takes away."""

    name: ClassVar[str] = "static"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})


@dataclass(frozen=True, kw_only=True)
class Tiles(Technique):
    """Takes types of the whole range, in a compiled model."""

    name: ClassVar[str] = "tiles"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"range", "compiled"})


@dataclass(frozen=True, kw_only=True)
class Fuse(Technique):
    """A compiler."""

    name: ClassVar[str] = "fuse"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})
    level: int = 1
    """How hard it tries."""

    @property
    def conversion(self) -> Step:
        return self.step()


@dataclass(frozen=True, kw_only=True)
class Weave(Technique):
    """Another compiler."""

    name: ClassVar[str] = "weave"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})


@dataclass(frozen=True, kw_only=True)
class Whole(Technique):
    """Gains nothing, and lets others do so."""

    name: ClassVar[str] = "whole"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"one_graph"})
    enables: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Ahead(Technique):
    """A compiler of which one variant takes whole graphs alone."""

    name: ClassVar[str] = "ahead"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})
    late: bool = False
    """Compiles at the first call, parts of graphs, too."""

    @property
    def required(self) -> frozenset[str]:
        return self.needs if self.late else self.needs | {"one_graph"}


@dataclass(frozen=True, kw_only=True)
class Engine(Technique):
    """Runs the model on code of its own."""

    name: ClassVar[str] = "engine"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"engine", "packed"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "float_weights", "linear"})


@dataclass(frozen=True, kw_only=True)
class Foreign(Technique):
    """An engine for models of another kind."""

    name: ClassVar[str] = "foreign"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"language"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})


@dataclass(frozen=True, kw_only=True)
class Library(Technique):
    """Hands the whole model to a library of others; has variants."""

    name: ClassVar[str] = "library"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "exportable", "float32"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "float_weights", "linear"})
    kind: str = "f32"
    """Which; those called `shared…` convert the model alike."""

    skip: tuple[str, ...] = ()
    """Layers that `int8`, shared or not, leaves alone."""

    @property
    def epsilon(self) -> float:
        rounding = {"gentle": 0.6 * 2.0**-8, "bf16": 2.0**-8, "int8": 2.0**-6}
        return rounding.get(self.kind.removeprefix("shared-"), 0.0)

    @property
    def conversion(self) -> Step | None:
        return Step(name=self.name) if self.kind.startswith("shared") else None

    @property
    def calibrates(self) -> bool:
        return self.kind.endswith("int8")

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names) if self.calibrates else None


@dataclass(frozen=True, kw_only=True)
class Repack(Technique):
    """Narrow weights for that code."""

    name: ClassVar[str] = "repack"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"packed"})
    removes: ClassVar[frozenset[str]] = frozenset({"packed"})


@dataclass(frozen=True, kw_only=True)
class Tune(Technique):
    """Needs a compiled model and comes in the phase before the compiler's."""

    name: ClassVar[str] = "tune"
    phase: ClassVar[Phase] = Phase.ATTENTION
    needs: ClassVar[frozenset[str]] = frozenset({"compiled"})


@dataclass(frozen=True, kw_only=True)
class Pool(Technique):
    """A setting of the process."""

    name: ClassVar[str] = "pool"
    phase: ClassVar[Phase] = Phase.RUNTIME
    size: int = 1
    """How large."""


@dataclass(frozen=True, kw_only=True)
class Settle(Technique):
    """A setting that comes before everything else."""

    name: ClassVar[str] = "settle"
    phase: ClassVar[Phase] = Phase.PROCESS
    runs_only: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Stay(Technique):
    """A setting by which memory stays in the process."""

    name: ClassVar[str] = "stay"
    phase: ClassVar[Phase] = Phase.PROCESS
    runs_only: ClassVar[bool] = True
    keeps_pages: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Skip(Technique):
    """Leaves calls out, of which only measuring says how many."""

    name: ClassVar[str] = "skip"
    phase: ClassVar[Phase] = Phase.GRAPH

    calls: int = 0

    @property
    def is_open(self) -> bool:
        return not self.calls

    @property
    def expected_gain(self) -> float:
        return 1.0 + self.calls


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Technique):
    """For another machine."""

    name: ClassVar[str] = "elsewhere"
    phase: ClassVar[Phase] = Phase.RUNTIME

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return f"not on a {device.kind}"


@dataclass(frozen=True, kw_only=True)
class Round(ForParts):
    """A narrower type, for all components or for some."""

    name: ClassVar[str] = "round"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})


FAKES: tuple[type[Technique], ...] = (
    Fold,
    Trim,
    Half,
    Quantize,
    Static,
    Tiles,
    Fuse,
    Weave,
    Whole,
    Ahead,
    Engine,
    Foreign,
    Library,
    Repack,
    Tune,
    Pool,
    Settle,
    Stay,
    Skip,
    Elsewhere,
    Round,
)


# ---------------------------------------------------------------------------------------- the fake world


@dataclass
class World:
    """What is true of every recipe, and a record of what the search did."""

    gain: Callable[[frozenset[str]], float] = lambda names: 1.0
    """Names of the steps of a recipe, also with their options → how many times faster it is than the original."""
    drop: Callable[[tuple[Step, ...]], float | tuple[float, float]] = lambda steps: 0.0
    """Steps → drop, or (drop, its upper end)."""
    unseen_drop: Callable[[tuple[Step, ...]], float] | None = None
    """The same on data that chooses nothing, where there is some."""
    samples: int = 64
    """By which it is judged."""
    memory: Callable[[frozenset[str]], int] = lambda names: 1000 * 2**20
    faulting: Callable[[frozenset[str]], float] = lambda names: 0.0
    """Seconds of a recipe's pass that fresh pages take."""
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
    seconds: float = 0.01
    """Of the original's call."""
    parts: dict[str, float] = field(default_factory=dict)
    """Component → the share of the original's time that its calls take; the call is of no component without any."""
    part_gain: Callable[[frozenset[str], str], float] = lambda names, part: 1.0
    """Names of the steps of a recipe and a component → how many times faster its calls are, beside `gain`."""
    export_seconds: float = 0.1
    metric: str = "error"
    called_as_is: bool = False
    kernels: dict[str, float] = field(default_factory=dict)
    ranking: list[tuple[str, float]] = field(default_factory=list)
    original: Identity = field(default_factory=lambda: Identity(structure="layers", weights="values"))
    now: float = 0.0
    converting: float = 0.0
    """Seconds that converting the model for a library takes, until it was done once."""
    converted: set[str] = field(default_factory=set)
    started: list[tuple[Step, ...]] = field(default_factory=list)
    asked: list[tuple[str, ...] | None] = field(default_factory=list)
    """Techniques that the original was asked about."""
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
        )
        self.searching = Search(context=context, budget=self.budget, watch=self.events.append, **options)
        return run(self.searching)

    def ship(self, *tried: Step | tuple[Step, str], **options: Any) -> Outcome:
        """The same with its last comparison, in a form that is what the search timed, but in a process of its own."""
        self.search(*tried, **options)
        search = self.searching
        search.context.deadline = search.last_moment = 1e9
        steps = search.best.steps
        form = Form(
            name="itself",
            start=lambda: self.start(search.context, steps),
            prove=lambda candidate: candidate.settle(search.reference),
            itself=not steps,
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

    def spend(self, context: Context, seconds: float) -> None:
        """Let time pass, but never beyond the deadline of a request."""
        if self.now + seconds > context.deadline:
            self.now = max(self.now, context.deadline)
            raise TrialFailed("not done in the time that was left", timed_out=True)
        self.now += seconds

    def _cost(self, step: Step) -> float:
        return self.cost.get(str(step), self.cost.get(step.name, 0.0))

    def start(self, context: Context, steps: tuple[Step, ...]) -> Candidate:
        self.started.append(steps)
        name = conversion_of(steps)
        compilers = [step for step in steps if name and "compiled" in from_step(step).gives]
        making = sum(map(self._cost, compilers)) if compilers else self.converting
        spared = making if name in self.converted else 0.0
        converted = making if name is not None and not spared else 0.0
        seconds = 1.0 + converted + sum(self._cost(step) for step in steps if step not in compilers)
        self.spend(context, seconds)
        self.converted |= {name} if name else set()
        for step in steps:
            if step.name in self.fails:
                raise self.fails[step.name]
        properties = _applied(steps)
        self.alive.append(steps)
        compiled = "compiled" in properties
        return Candidate(
            steps=steps,
            process=Process(self, context, steps),  # pyright: ignore[reportArgumentType]
            folder=None,
            prepared=Prepared(
                seconds=seconds + spared,
                engine="aot" if compiled else "eager",
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
                converted=converted,
                spared=spared,
            ),
        )


def _applied(steps: tuple[Step, ...]) -> frozenset[str]:
    """The properties that steps leave; one that does not find what it needs refuses, as in `apply_steps`."""
    properties = ORIGINAL
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

    def __init__(self, world: World, context: Context, steps: tuple[Step, ...]) -> None:
        self.world, self.context, self.steps = world, context, steps
        self.names = frozenset(step.name for step in steps) | frozenset(map(str, steps))
        self.turns = 0

    def ask(self, method: str, **arguments: Any) -> Any:
        return getattr(self, method)(**arguments)

    def time(self) -> dict[str, float]:
        self.turns += 1
        seconds = self.world.seconds / self.world.gain(self.names) * self.world.later(self.names, self.turns)
        parts = {
            part: seconds * share / self.world.part_gain(self.names, part)
            for part, share in self.world.parts.items()
        }
        calls = parts or {"forward": seconds}
        self.world.spend(self.context, 2 * sum(calls.values()))
        return calls

    def waited(self) -> float:
        return self.world.waited(self.names, self.turns)

    def memory(self) -> Memory:
        faulting = {name: self.world.faulting(self.names) for name in self.world.parts or ("forward",)}
        return Memory(peak=self.world.memory(self.names), recompiles=0, faulting=faulting)

    def observe(self, *, unseen: bool = False) -> str | None:
        if unseen:
            self.world.spend(self.context, UNSEEN_SECONDS)
        return "observed" if not unseen else "unseen" if self.world.unseen_drop else None

    def pictures(self) -> list[Any]:
        return []

    def compare(
        self, *, reference: str, itself: bool = False, unseen: bool = False, show: bool = False
    ) -> Any:
        assert reference == ("unseen" if unseen else "observed")
        drop = (
            (self.world.unseen_drop or self.world.drop)(self.steps) if unseen else self.world.drop(self.steps)
        )
        drop, high = drop if isinstance(drop, tuple) else (drop, drop)
        return make_quality(drop, high, metric=self.world.metric, samples=self.world.samples)

    def describe(self, *, names: tuple[str, ...] | None) -> Description:
        self.world.asked.append(names)
        return Description(
            device=make_device(),
            original=self.world.original,
            export_seconds=self.world.export_seconds,
            called_as_is=self.world.called_as_is,
            properties=ORIGINAL,
            variants=tuple(self.world.variants),
            counts={},
            kernel_seconds=self.world.kernels,
            features=make_features(),
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

    class Ranker:
        """The process that ranks layers."""

        def __init__(self, context: Context, environment: Any = None) -> None:
            made.spend(context, 1.0)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: Any) -> None:
            return None

        def ask(self, method: str, **arguments: Any) -> Any:
            assert method == "sensitivity"
            if not made.ranking:
                raise TrialFailed("no layer has inputs")
            return [Ranked(name=name, error=error) for name, error in made.ranking]

    monkeypatch.setattr("torchwright.trial.client.start_candidate", made.start)
    monkeypatch.setattr("torchwright.trial.client.TrialProcess", Ranker)
    return made


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


def row(outcome: Outcome, name: str) -> Rung:
    (found,) = [rung for rung in outcome.rungs if str(rung.step) == name]
    return found
