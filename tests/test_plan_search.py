"""The search on a world made of a table: what each step is worth, what it loses, what it costs. The clock is fake."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from factories import make_device, make_quality
from torchwright.errors import RefusedTechnique, TorchwrightError, WorkloadError
from torchwright.facts import Budget, Coverage, DeviceFacts, Event, Rung, Step
from torchwright.plan import search as search_room
from torchwright.plan.search import ROUNDS, Outcome, Search
from torchwright.plan.trial import Candidate, Context, TrialFailed
from torchwright.techniques.base import Phase, Technique, from_step, techniques

ORIGINAL = frozenset({"eager", "cpu", "floating", "float_weights", "float32", "linear", "exportable"})


# --------------------------------------------------------------------------- techniques of the fake world


@dataclass(frozen=True, kw_only=True)
class Fold(Technique):
    """A change of the graph."""

    name: ClassVar[str] = "fold"
    phase: ClassVar[Phase] = Phase.GRAPH


@dataclass(frozen=True, kw_only=True)
class Half(Technique):
    """A narrower type; has two variants."""

    name: ClassVar[str] = "half"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})
    kind: str = "b"
    """Which."""

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
class Fuse(Technique):
    """A compiler."""

    name: ClassVar[str] = "fuse"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})


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


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Technique):
    """For another machine."""

    name: ClassVar[str] = "elsewhere"
    phase: ClassVar[Phase] = Phase.RUNTIME

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return f"not on a {device.kind}"


FAKES: tuple[type[Technique], ...] = (Fold, Half, Quantize, Static, Fuse, Tune, Pool, Elsewhere)


@pytest.fixture(autouse=True)
def _fake_techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    techniques.names()
    monkeypatch.setattr(techniques, "_targets", {cls.name: "tests:fake" for cls in FAKES})
    monkeypatch.setattr(techniques, "_loaded", {cls.name: cls for cls in FAKES})


# ---------------------------------------------------------------------------------------- the fake world


@dataclass
class World:
    """What is true of every recipe, and a record of what the search did."""

    gain: Callable[[frozenset[str]], float] = lambda names: 1.0
    """Names of the steps of a recipe → how many times faster it is than the original."""
    drop: Callable[[tuple[Step, ...]], float | tuple[float, float]] = lambda steps: 0.0
    """Steps → drop, or (drop, its upper end)."""
    memory: Callable[[frozenset[str]], int] = lambda names: 1000 * 2**20
    fails: dict[str, Exception] = field(default_factory=dict)
    """Name of a step → what starting a recipe with it raises."""
    cost: dict[str, float] = field(default_factory=dict)
    """Name of a step → seconds to prepare a recipe with it, beyond one."""
    later: Callable[[frozenset[str], int], float] = lambda names, turn: 1.0
    """Factor on the time of a recipe's n-th turn: noise, or a machine that changes its mind."""
    seconds: float = 0.01
    kernels: dict[str, float] = field(default_factory=dict)
    ranking: list[tuple[str, float]] = field(default_factory=list)
    now: float = 0.0
    started: list[tuple[Step, ...]] = field(default_factory=list)
    alive: list[tuple[Step, ...]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    budget: Budget = field(default_factory=lambda: Budget(max_drop=0.01, time_seconds=100.0))

    def search(self, *tried: Step | tuple[Step, str], **options: Any) -> Outcome:
        self.variants = [item if isinstance(item, tuple) else (item, None) for item in tried]
        context = Context(
            workload=b"",
            device="cpu",
            threads=2,
            seed=0,
            scratch=Path(),
            deadline=0.0,
            clock=lambda: self.now,
        )
        self.searching = Search(context=context, budget=self.budget, watch=self.events.append, **options)
        return self.searching.run()

    def spend(self, context: Context, seconds: float) -> None:
        """Let time pass, but never beyond the deadline of a request."""
        if self.now + seconds > context.deadline:
            self.now = max(self.now, context.deadline)
            raise TrialFailed("not done in the time that was left", timed_out=True)
        self.now += seconds

    def start(self, context: Context, steps: tuple[Step, ...], case_names: Any) -> Candidate:
        self.started.append(steps)
        self.spend(context, 1.0 + sum(self.cost.get(step.name, 0.0) for step in steps))
        for step in steps:
            if step.name in self.fails:
                raise self.fails[step.name]
        self.alive.append(steps)
        properties = ORIGINAL
        for step in steps:
            properties = (properties - from_step(step).removes) | from_step(step).gives
        compiled = "compiled" in properties
        return Candidate(
            steps=steps,
            process=Process(self, context, steps),  # pyright: ignore[reportArgumentType]
            folder=None,
            engine="aot" if compiled else "eager",
            dtype="float32",
            threads=None,
            prepare_seconds=1.0 + sum(self.cost.get(step.name, 0.0) for step in steps),
            coverage=tuple(Coverage(technique=step.name, changed=1, total=1) for step in steps),
            weight_bytes=10,
            properties=properties,
        )


class Process:
    """Answers like a trial process, from the table."""

    def __init__(self, world: World, context: Context, steps: tuple[Step, ...]) -> None:
        self.world, self.context, self.steps = world, context, steps
        self.names = frozenset(step.name for step in steps)
        self.turns = 0

    def ask(self, method: str, **arguments: Any) -> Any:
        return getattr(self, method)(**arguments)

    def time(self) -> dict[str, float]:
        self.turns += 1
        seconds = self.world.seconds / self.world.gain(self.names) * self.world.later(self.names, self.turns)
        self.world.spend(self.context, 2 * seconds)
        return {"forward": seconds}

    def memory(self) -> dict[str, int]:
        return {"peak": self.world.memory(self.names), "recompiles": 0}

    def observe(self) -> str:
        return "observed"

    def compare(self, *, reference: str, itself: bool = False) -> Any:
        assert reference == "observed"
        drop = self.world.drop(self.steps)
        drop, high = drop if isinstance(drop, tuple) else (drop, drop)
        return make_quality(drop, high, metric="error")

    def describe(self) -> dict[str, Any]:
        return {
            "device": make_device(),
            "properties": ORIGINAL,
            "variants": self.world.variants,
            "operations": {},
            "kernel_seconds": self.world.kernels,
            "repeats": {"forward": 1},
            "weight_bytes": 10,
        }

    def close(self) -> None:
        if self.steps in self.world.alive:
            self.world.alive.remove(self.steps)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
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
            return made.ranking

    monkeypatch.setattr(search_room, "start_candidate", made.start)
    monkeypatch.setattr(search_room, "TrialProcess", Ranker)
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


def rows(outcome: Outcome) -> dict[str, str]:
    return {str(rung.step): rung.status for rung in outcome.rungs}


def row(outcome: Outcome, name: str) -> Rung:
    (found,) = [rung for rung in outcome.rungs if str(rung.step) == name]
    return found


# ------------------------------------------------------------------------------------------ keep and drop


def test_keeps_what_pays_and_reports_marginal_and_total(world: World):
    world.gain = product(half=2.0, fuse=1.5)
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["half", "fuse"]
    assert rows(outcome) == {"half": "kept", "fuse": "kept"}
    assert row(outcome, "fuse").speedup.value == pytest.approx(1.5)
    assert row(outcome, "fuse").total_speedup.value == pytest.approx(3.0)
    assert row(outcome, "fuse").reason == "1.50x faster"
    assert outcome.speedup.value == pytest.approx(3.0)
    assert outcome.final.seconds == pytest.approx(world.seconds / 3)
    assert outcome.notes == ()


def test_drops_what_is_slower_and_what_is_inside_the_noise(world: World):
    world.gain = product(fold=1.03, pool=0.5)
    world.later = lambda names, turn: 1.1 if "fold" in names and turn % 3 == 0 else 1.0
    outcome = world.search(step("fold"), step("pool"))
    assert rows(outcome) == {"fold": "dropped", "pool": "dropped"}
    assert "no gain outside the noise" in row(outcome, "fold").reason
    assert "slower" in row(outcome, "pool").reason
    assert outcome.best is world.searching._baseline


def test_a_gain_below_one_per_cent_is_none_however_certain(world: World):
    world.gain = product(fold=1.005)
    assert rows(world.search(step("fold"))) == {"fold": "dropped"}


def test_the_budget_is_held_against_the_upper_end_of_the_interval(world: World):
    world.gain = product(half=3.0, fold=2.0)
    world.drop = lambda steps: (0.004, 0.012) if any(s.name == "half" for s in steps) else (0.004, 0.009)
    outcome = world.search(step("fold"), step("half"))
    assert rows(outcome) == {"fold": "kept", "half": "dropped"}
    assert row(outcome, "half").reason == "error drops by 0.40% (up to 1.20%), the budget is 1.00%"
    assert row(outcome, "half").speedup is None  # accuracy first: nothing was timed


def test_an_implausible_improvement_is_refused(world: World):
    world.gain = product(half=3.0)
    world.drop = lossy(half=-0.2)
    outcome = world.search(step("half"))
    assert rows(outcome) == {"half": "dropped"}
    assert "improves by 20.00%: not the same function" in row(outcome, "half").reason


def test_a_small_improvement_is_plausible(world: World):
    world.gain = product(half=3.0)
    world.drop = lossy(half=-0.02)
    assert names(world.search(step("half"))) == ["half"]


def test_a_second_variant_is_tried_only_when_the_first_was_not_kept(world: World):
    world.gain = product(half=2.0)
    outcome = world.search(step("half"), step("half", kind="f"))
    assert names(outcome) == ["half"]
    assert list(rows(outcome)) == ["half"]

    world.started.clear()
    world.drop = lambda steps: 0.5 if step("half") in steps else 0.0
    assert names(world.search(step("half"), step("half", kind="f"))) == ["half:kind=f"]


def test_what_the_techniques_refuse_becomes_a_row_once(world: World):
    outcome = world.search((step("half"), "too slow here"), (step("half", kind="f"), "too slow here"))
    assert [(str(r.step), r.status, r.reason) for r in outcome.rungs] == [
        ("half", "refused", "too slow here")
    ]
    assert world.started == [()]


# ------------------------------------------------------------------------------------ the micro-benchmark


def test_the_micro_benchmark_refuses_with_its_numbers(world: World):
    world.gain = product(fuse=2.0, quantize=5.0)
    world.kernels = {"float32": 0.002, "int8": 0.0019999}
    outcome = world.search(step("fuse"), step("quantize"))
    assert rows(outcome) == {"fuse": "kept", "quantize": "refused"}
    reason = row(outcome, "quantize").reason
    assert reason.startswith("int8 kernels need 2.00 ms")
    assert "float32 needs 2.00 ms: nothing to gain" in reason
    assert all("quantize" not in [s.name for s in steps] for steps in world.started)


def test_the_micro_benchmark_compares_with_the_kernel_in_use(world: World):
    world.gain = product(half=1.5, fuse=1.5, quantize=1.5)
    world.kernels = {"float32": 0.008, "half": 0.002, "int8": 0.003}
    outcome = world.search(step("half"), step("fuse"), step("quantize"))
    assert "half needs 2.00 ms" in row(outcome, "quantize").reason


def test_for_memory_the_micro_benchmark_says_nothing(world: World):
    world.budget = Budget(objective="memory", time_seconds=100.0)
    world.kernels = {"float32": 0.002, "int8": 0.002}
    world.memory = lambda names: (100 if "quantize" in names else 900 if "fuse" in names else 1000) * 2**20
    assert names(world.search(step("fuse"), step("quantize"))) == ["quantize", "fuse"]


# ----------------------------------------------------------------------------------------------- retreat


LAYERS = [(f"layer{index}", 1.0 / (index + 1)) for index in range(10)]


def skipped(steps: tuple[Step, ...]) -> int | None:
    for each in steps:
        if each.name == "quantize":
            return len(each.options.get("skip", ()))
    return None


def test_retreats_from_the_most_sensitive_layers_first_and_stops_when_it_is_enough(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.001
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["quantize:skip=layer0", "fuse"]
    assert rows(outcome) == {"fuse": "kept", "quantize": "dropped", "quantize:skip=layer0": "kept"}
    assert any("without the 1 most sensitive of 10 modules" in event.text for event in world.events)


def test_retreats_further_when_the_first_step_back_is_not_enough(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: {None: 0.0, 0: 0.05, 1: 0.03}.get(skipped(steps), 0.001)
    outcome = world.search(step("fuse"), step("quantize"))
    assert outcome.best.steps[0].options == {"skip": ["layer0", "layer1", "layer2"]}


def test_gives_up_when_no_retreat_is_enough(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.0 if skipped(steps) is None else 0.03
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["fuse"]
    assert list(rows(outcome).values()) == ["kept", "dropped", "dropped", "dropped"]


def test_stops_retreating_once_within_the_budget_and_still_not_faster(world: World):
    world.gain = lambda names: 1.5 if "fuse" in names else 1.0
    world.ranking = LAYERS
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert [len(r.step.options.get("skip", ())) for r in outcome.rungs if r.step.name == "quantize"] == [0, 1]


def test_a_hopeless_drop_is_not_retreated_from(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.0 if skipped(steps) is None else 0.21
    outcome = world.search(step("fuse"), step("quantize"))
    assert list(rows(outcome)) == ["fuse", "quantize"]


def test_a_technique_that_knows_no_retreat_is_dropped_at_once(world: World):
    world.gain = product(half=2.0)
    world.drop = lossy(half=0.02)
    assert list(rows(world.search(step("half")))) == ["half"]


def test_layers_that_cannot_be_ranked_are_a_note(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.drop = lossy(quantize=0.02)
    outcome = world.search(step("fuse"), step("quantize"))
    assert outcome.notes == ("quantize: no retreat, its layers could not be ranked (no layer has inputs)",)


# ------------------------------------------------------------------------ never slower than the original


def test_a_recipe_that_is_slower_in_the_last_comparison_gives_way_to_the_original(world: World):
    world.gain = product(fuse=2.0)
    world.later = lambda names, turn: 3.0 if "fuse" in names and turn > ROUNDS[1] else 1.0
    outcome = world.search(step("fuse"))
    assert outcome.best.steps == ()
    assert outcome.speedup.value == 1.0
    assert rows(outcome) == {"fuse": "removed"}
    assert row(outcome, "fuse").reason == "slower than the original at the end"
    assert any("in the last comparison: the original is returned" in note for note in outcome.notes)
    assert outcome.final == outcome.baseline
    assert world.alive == [()]


def test_nothing_that_pays_gives_the_original_and_says_so(world: World):
    outcome = world.search(step("fold"))
    assert outcome.best.steps == ()
    assert outcome.notes == ("nothing was both faster and within the accuracy budget: this is the original",)
    assert len(outcome.best.turns) >= ROUNDS[0]


def test_nothing_that_meets_the_budget_gives_the_original(world: World):
    world.budget = Budget(max_drop=0.0, time_seconds=100.0)
    world.gain = product(half=4.0, fuse=4.0)
    world.drop = lossy(half=1e-6, fuse=1e-6)
    outcome = world.search(step("half"), step("fuse"))
    assert outcome.best.steps == ()
    assert set(rows(outcome).values()) == {"dropped"}


def test_a_recipe_that_dies_in_the_last_comparison_gives_way_to_the_original(world: World):
    world.gain = product(fuse=2.0)

    def dies(names: frozenset[str], turn: int) -> float:
        if "fuse" in names and turn > ROUNDS[1]:
            raise TrialFailed("crashed (SIGSEGV)")
        return 1.0

    world.later = dies
    outcome = world.search(step("fuse"))
    assert outcome.best.steps == ()
    assert rows(outcome) == {"fuse": "removed"}
    assert any("crashed (SIGSEGV)" in note for note in outcome.notes)
    assert world.alive == [()]


def test_an_original_that_dies_at_the_end_is_an_error_in_words(world: World):
    def dies(names: frozenset[str], turn: int) -> float:
        if turn > 2 and not names:
            raise TrialFailed("killed (signal 9): most likely out of memory")
        return 1.0

    world.later = dies
    with pytest.raises(TorchwrightError, match=r"stopped working.*out of memory"):
        world.search()
    assert world.alive == []


# --------------------------------------------------------------------------------- drop-one, swaps, order


def test_the_drop_one_pass_removes_what_no_longer_contributes_and_keeps_what_does(world: World):
    # `fold` pays alone and is worth nothing once `fuse` is there; `pool` goes on paying.
    table = {"fold": 1.2, "fuse": 2.0, "pool": 1.1}

    def gain(names: frozenset[str]) -> float:
        found = product(**table)(names)
        return found / 1.2 if {"fold", "fuse"} <= names else found

    world.gain = gain
    outcome = world.search(step("fold"), step("fuse"), step("pool"))
    assert names(outcome) == ["fuse", "pool"]
    assert rows(outcome) == {"fold": "removed", "fuse": "kept", "pool": "kept"}
    assert row(outcome, "fold").reason.startswith("without it the recipe is as good")
    assert outcome.speedup.value == pytest.approx(2.2)


def test_a_step_that_another_one_needs_is_never_dropped_alone(world: World):
    world.gain = lambda names: 1.5 if "quantize" in names else 1.1 if "fuse" in names else 1.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["quantize", "fuse"]


def test_a_wanted_step_survives_the_drop_one_pass(world: World):
    def gain(names: frozenset[str]) -> float:
        return 2.0 if "fuse" in names else 1.2 if "fold" in names else 1.0

    world.gain = gain
    outcome = world.search(step("fold"), step("fuse"), wanted=(step("fold"),))
    assert names(outcome) == ["fold", "fuse"]


@pytest.mark.parametrize("error", [TrialFailed("crashed"), WorkloadError("the metric is NaN")])
def test_a_failure_in_the_drop_one_pass_leaves_the_recipe_as_it_is(world: World, monkeypatch, error):
    world.gain = product(fold=1.2, fuse=1.25)

    def drop(steps: tuple[Step, ...]) -> float:
        if [s.name for s in steps] == ["fuse"]:
            raise error
        return 0.0

    world.drop = drop
    outcome = world.search(step("fold"), step("fuse"))
    assert names(outcome) == ["fold", "fuse"]
    assert any("without fold failed" in note for note in outcome.notes)
    assert world.alive == [outcome.best.steps]


def test_a_step_takes_the_place_of_one_that_clashes_with_it(world: World):
    world.gain = lambda names: {frozenset({"half"}): 2.0, frozenset({"static"}): 3.0}.get(names, 1.0)
    outcome = world.search(step("half"), step("static"))
    assert names(outcome) == ["static"]
    assert rows(outcome) == {"half": "removed", "static": "kept"}
    assert row(outcome, "static").reason == "1.50x faster, in place of half"
    assert row(outcome, "half").reason.endswith("then replaced by static")


def test_a_clashing_step_that_is_slower_leaves_the_recipe_alone(world: World):
    world.gain = lambda names: {frozenset({"half"}): 2.0, frozenset({"static"}): 1.5}.get(names, 1.0)
    outcome = world.search(step("half"), step("static"))
    assert names(outcome) == ["half"]
    assert rows(outcome) == {"half": "kept", "static": "dropped"}


def test_a_step_waits_for_the_one_that_gives_what_it_needs(world: World):
    world.gain = product(fuse=2.0, tune=1.2)
    outcome = world.search(step("tune"), step("fuse"))
    assert names(outcome) == ["tune", "fuse"]
    assert [str(rung.step) for rung in outcome.rungs] == ["fuse", "tune"]


def test_a_step_whose_need_nobody_gives_is_refused_in_words(world: World):
    world.gain = product(fuse=0.5, tune=1.2)
    outcome = world.search(step("tune"), step("fuse"))
    assert rows(outcome) == {"fuse": "dropped", "tune": "refused"}
    assert row(outcome, "tune").reason == "the model has no: compiled"


def test_a_step_dropped_before_compilation_gets_a_second_chance_after_it(world: World):
    world.gain = lambda names: {
        frozenset({"fuse"}): 2.0,
        frozenset({"fuse", "half"}): 4.0,
        frozenset({"half"}): 0.8,
    }.get(names, 1.0)
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["half", "fuse"]
    assert rows(outcome) == {"fuse": "kept", "half": "kept"}
    assert world.started.count((step("half"),)) == 1


def test_narrow_weights_are_tried_together_with_a_compiler_that_gained_nothing_alone(world: World):
    world.gain = lambda names: 2.0 if {"fuse", "quantize"} <= names else 1.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["quantize", "fuse"]
    assert rows(outcome) == {"fuse": "kept", "quantize": "kept"}
    assert "kept for quantize" in row(outcome, "fuse").reason


def test_a_compiler_that_failed_is_nobodys_company(world: World):
    world.gain = lambda names: 2.0 if {"fuse", "quantize"} <= names else 1.0
    world.drop = lambda steps: 0.5 if step("fuse") in steps else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert rows(outcome) == {"fuse": "dropped", "quantize": "refused"}


def test_a_step_dropped_for_accuracy_gets_no_second_chance(world: World):
    world.gain = product(half=2.0, fuse=2.0)
    world.drop = lossy(half=0.5)
    world.search(step("half"), step("fuse"))
    assert sum(step("half") in steps for steps in world.started) == 1


# ----------------------------------------------------------------------------------------- the time budget


def test_without_time_steps_are_refused_and_the_total_stays_within_ten_per_cent(world: World):
    world.gain = product(fuse=2.0, quantize=1.5, pool=1.5)
    world.cost = {"fuse": 60.0}
    outcome = world.search(step("fuse"), step("quantize"), step("pool"))
    assert rows(outcome) == {"fuse": "kept", "quantize": "refused", "pool": "refused"}
    assert row(outcome, "pool").reason.startswith("not tried: it would need about")
    assert "the time budget has" in row(outcome, "pool").reason
    assert world.now <= 1.1 * world.budget.time_seconds


def test_a_hanging_trial_is_stopped_when_the_time_ends_and_the_best_so_far_is_returned(world: World):
    world.gain = product(half=2.0, fuse=9.0)
    world.cost = {"fuse": 1e9}
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["half"]
    assert row(outcome, "fuse").status == "failed"
    assert "when the time budget ended" in row(outcome, "fuse").reason
    assert world.now <= 1.1 * world.budget.time_seconds


@pytest.mark.parametrize("cost", [float(c) for c in range(0, 100, 7)])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0])
def test_wherever_the_time_ends_there_is_a_result_in_time(world: World, cost: float, seconds: float):
    """Above all in the middle of a comparison: it must not end the original's or the best recipe's process."""
    world.gain = product(half=1.5, fuse=2.0, pool=1.2)
    world.cost = {"fuse": cost}
    world.seconds = seconds
    outcome = world.search(step("half"), step("fuse"), step("pool"))
    assert outcome.speedup.low >= 1.0
    assert outcome.seconds <= 1.1 * world.budget.time_seconds
    assert world.alive == [outcome.best.steps]


def test_a_budget_too_small_for_the_original_is_an_error_that_says_so(world: World):
    world.budget = Budget(time_seconds=0.5)
    with pytest.raises(TorchwrightError, match=r"ended before the original was measured.*--time-budget"):
        world.search(step("half"))
    assert world.alive == []


# --------------------------------------------------------------------------------- trials that go wrong


@pytest.mark.parametrize(
    "reason", ["crashed (SIGSEGV)", "killed (signal 9): most likely out of memory", "ValueError: bad shape"]
)
def test_a_trial_that_dies_becomes_a_row_with_its_reason(world: World, reason: str):
    world.gain = product(half=2.0, fuse=2.0)
    world.fails = {"half": TrialFailed(reason)}
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["fuse"]
    assert (row(outcome, "half").status, row(outcome, "half").reason) == ("failed", reason)


def test_a_trial_that_dies_while_it_is_timed_is_closed(world: World):
    def dies(names: frozenset[str], turn: int) -> float:
        if "half" in names:
            raise TrialFailed("crashed (SIGABRT)")
        return 1.0

    world.later = dies
    outcome = world.search(step("half"))
    assert row(outcome, "half").status == "failed"
    assert world.alive == [()]


def test_a_technique_that_refuses_while_applied_becomes_a_row(world: World):
    world.fails = {"half": RefusedTechnique("half cannot run here", found="no kernel for 3 channels")}
    outcome = world.search(step("half"))
    assert (row(outcome, "half").status, row(outcome, "half").reason) == (
        "refused",
        "no kernel for 3 channels",
    )


def test_an_original_that_cannot_run_is_an_error(world: World, monkeypatch):
    def broken(*args: Any) -> Candidate:
        raise TrialFailed("ValueError: bad")

    monkeypatch.setattr(search_room, "start_candidate", broken)
    with pytest.raises(TorchwrightError, match=r"the original model cannot be run.*ValueError: bad"):
        world.search()


def test_an_interrupt_closes_every_process(world: World):
    world.gain = product(half=2.0)

    def interrupted(names: frozenset[str], turn: int) -> float:
        if "fuse" in names:
            raise KeyboardInterrupt
        return 1.0

    world.later = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.search(step("half"), step("fuse"))
    assert world.alive == []


# ----------------------------------------------------------------------------------- wanted and unwanted


def test_a_wanted_step_that_cannot_run_is_an_error(world: World):
    with pytest.raises(RefusedTechnique, match=r"elsewhere was asked for.*not on a cpu.*torchwright doctor"):
        world.search(wanted=(step("elsewhere"),))
    assert world.alive == []


def test_a_wanted_step_that_this_model_refuses_is_an_error_with_the_reason(world: World):
    with pytest.raises(RefusedTechnique, match="too few layers"):
        world.search((step("fold"), "too few layers"), wanted=(step("fold"),))


def test_a_wanted_step_that_refuses_while_applied_is_an_error(world: World):
    world.fails = {"half": RefusedTechnique("half cannot run here", found="no kernel")}
    with pytest.raises(RefusedTechnique, match="no kernel"):
        world.search(wanted=(step("half"),))
    assert world.alive == []


def test_a_wanted_step_whose_needs_nobody_meets_is_an_error(world: World):
    with pytest.raises(RefusedTechnique, match="the model has no: compiled"):
        world.search(wanted=(step("tune"),), only=True)


def test_only_what_is_wanted_is_tried_and_with_its_options(world: World):
    world.gain = product(half=2.0, fuse=2.0)
    outcome = world.search(step("half"), step("fuse"), wanted=(step("half", kind="f"),), only=True)
    assert list(rows(outcome)) == ["half:kind=f"]


def test_a_technique_to_be_left_out_is_never_tried(world: World):
    world.gain = product(half=2.0, fuse=2.0)
    outcome = world.search(step("half"), step("fuse"), without=frozenset({"fuse"}))
    assert list(rows(outcome)) == ["half"]
    assert all(step("fuse") not in steps for steps in world.started)


# ---------------------------------------------------------------------------------------- memory, payback


def test_for_memory_a_step_is_kept_for_memory_and_not_for_speed(world: World):
    world.budget = Budget(objective="memory", time_seconds=100.0)
    world.gain = product(fold=5.0)
    world.memory = lambda names: (400 if "half" in names else 1000) * 2**20
    outcome = world.search(step("fold"), step("half"))
    assert rows(outcome) == {"fold": "dropped", "half": "kept"}
    assert row(outcome, "fold").reason == "1000 MiB peak memory where the best so far has 1000 MiB"
    assert row(outcome, "half").reason == "600 MiB less memory"
    assert row(outcome, "half").memory_change_bytes == -600 * 2**20


def test_for_memory_nothing_is_kept_that_is_slower_than_the_original(world: World):
    world.budget = Budget(objective="memory", time_seconds=100.0)
    world.gain = product(half=0.5)
    world.memory = lambda names: (400 if "half" in names else 1000) * 2**20
    outcome = world.search(step("half"))
    assert row(outcome, "half").reason.startswith("slower than the original")


def test_payback_is_compilation_over_the_time_saved_per_call(world: World):
    world.gain = product(fuse=2.0)
    world.cost = {"fuse": 11.0}
    found = row(world.search(step("fuse")), "fuse")
    assert found.compile_seconds == 12.0
    assert found.payback_calls == pytest.approx(12.0 / 0.005)


def test_what_saves_nothing_never_pays_back_and_what_does_not_compile_costs_nothing(world: World):
    world.gain = product(fuse=0.5, half=2.0)
    outcome = world.search(step("half"), step("fuse"))
    assert row(outcome, "fuse").payback_calls is None
    assert row(outcome, "half").compile_seconds is None


# -------------------------------------------------------------------------------------------------- events


def test_events_tell_the_whole_story_in_order(world: World):
    world.gain = product(half=2.0)
    outcome = world.search(step("half"), (step("fold"), "no layer"))
    kinds = [event.kind for event in world.events]
    assert kinds == ["baseline", "rung", "trying", "rung", "stage"]
    assert [e.rung for e in world.events if e.rung] == [row(outcome, "fold"), row(outcome, "half")]
    assert all(a.elapsed <= b.elapsed for a, b in itertools.pairwise(world.events))
    assert {event.time_budget for event in world.events} == {100.0}
    assert world.events[0].best is None
    assert world.events[-1].best == row(outcome, "half").total_speedup


def test_at_the_end_only_the_best_candidate_is_alive(world: World):
    world.gain = product(half=2.0, fuse=2.0, fold=0.9)
    outcome = world.search(step("fold"), step("half"), step("fuse"))
    assert world.alive == [outcome.best.steps]
