"""Contenders in Torchwright's own trial processes, so that a crash or a hang ends in a row and not in the benchmark."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchwright as tw
from benchmarks.harness.run import Row, in_short, triple
from benchmarks.harness.turns import orders
from torchwright.core.records import Interval, Quality, Step
from torchwright.hardware.devices import default_name, get_device
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.optimization.api import optimize_cli
from torchwright.optimization.artifact.folder import open_artifact
from torchwright.optimization.techniques.base import parse_step, techniques
from torchwright.optimization.trial.client import Context, TrialProcess
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.base import Workload

BY_HAND = ("compile", "freezing", "autocast", "autocast+compile")
"""torch.compile; with freezing; bf16 autocast; bf16 autocast under torch.compile."""
MAX_AUTOTUNE = "max-autotune"
"""torch.compile in that mode, which tries more and takes longer."""
CARD_GRAPHS = "autocast+reduce-overhead"
"""bf16 autocast under torch.compile that records CUDA graphs."""
ROUNDS = (5, 15)
TURN_SECONDS = 12.0
"""Paired turns go on for about this long, within ROUNDS."""
THIRD_PARTY = ("openvino", "onnxruntime")
"""Techniques that run a third-party engine."""


class ByHand(nn.Module):
    """A module sped up as its author would, in the process that calls it."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self._call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self._call = by_hand(self.inner, self.how)
        return self._call(*args, **kwargs)


def tried_by_hand() -> tuple[str, ...]:
    """Return those of BY_HAND that pay here: autocast takes many times as long on a processor without bfloat16."""
    lacks = "bfloat16" in get_device(default_name()).identify().without
    return tuple(how for how in BY_HAND if not (lacks and "autocast" in how))


def by_hand(call: Callable[..., Any], how: str) -> Callable[..., Any]:
    """Return `call` under one of BY_HAND, MAX_AUTOTUNE or CARD_GRAPHS."""
    if how == "freezing":
        from torch._inductor import config as inductor

        inductor.freezing = True
    mode = how.removeprefix("autocast+") if how in (MAX_AUTOTUNE, CARD_GRAPHS) else None
    inner = torch.compile(call, mode=mode) if how != "autocast" else call
    if "autocast" not in how:
        return inner

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(default_name(), torch.bfloat16):
            return inner(*args, **kwargs)

    return cast


class FromArtifact(nn.Module):
    """A loaded artifact, as its user calls it; `inner` replays the recipe of a module that cannot be exported."""

    def __init__(self, inner: nn.Module, path: str) -> None:
        super().__init__()
        self.inner, self.path = inner, path
        self._call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            _, manifest = open_artifact(Path(self.path))
            self._call = tw.load(self.path, model=None if manifest.self_contained else self.inner).model
        call: Any = self._call
        return call(*args, **kwargs)


@dataclass(kw_only=True)
class Contender:
    """A live process that is ready to be timed, or the reason for its absence."""

    name: str
    process: Any = None
    """A `TrialProcess`, or a third party's that answers `time` as one does."""
    quality: Quality | None = None
    ready_s: float = 0.0
    failure: str = ""

    @property
    def fits(self) -> bool:
        return self.process is not None

    def observe(self) -> Any:
        assert self.process is not None
        return self.process.ask("observe")


@dataclass(kw_only=True)
class Turns:
    """Seconds of every contender, turn by turn: contender → one {case: seconds} for each turn."""

    rows: dict[str, list[dict[str, float]]]

    def seconds(
        self, name: str, case: str | None = None, repeats: dict[str, int] | None = None
    ) -> list[float]:
        repeats = repeats or {}
        return [
            turn[case] if case else sum(value * repeats.get(key, 1) for key, value in turn.items())
            for turn in self.rows[name]
        ]

    def speedup(self, before: str, after: str, case: str | None = None, **kwargs: Any) -> Interval:
        return paired_speedup(self.seconds(before, case, **kwargs), self.seconds(after, case, **kwargs))


def context_of(workload: Workload, scratch: Path, seconds: float) -> Context:
    """Return the context of a trial process that has to be done within so many seconds."""
    return Context(
        workload=pack(workload, Path(tempfile.mkdtemp(dir=scratch))),
        device=default_name(),
        threads=torch.get_num_threads(),
        seed=0,
        scratch=scratch,
        deadline=time.monotonic() + seconds,
    )


@contextlib.contextmanager
def contenders() -> Iterator[Callable[..., Contender]]:
    """Yield a function that starts contenders; end them all with the block."""
    started: list[TrialProcess] = []
    with tempfile.TemporaryDirectory() as scratch:

        def start(
            name: str,
            workload: Workload,
            *,
            steps: Sequence[str] = (),
            artifact: str | None = None,
            reference: Any = None,
            seconds: float = 120.0,
        ) -> Contender:
            """Start `workload` with these steps, or the artifact; `reference` is the answer it is judged against."""
            begun = time.perf_counter()
            found = Contender(name=name)
            try:
                if reason := refused(steps):
                    raise RuntimeError(reason)
                context = context_of(workload, Path(scratch), seconds)
                process = TrialProcess(context)
                started.append(process)
                if artifact:
                    process.ask("load_artifact", path=artifact, trust=False)
                else:
                    _prepare(process, context, tuple(map(parse_step, steps)))
                found.ready_s = time.perf_counter() - begun
                if reference is not None:
                    found.quality = process.ask("compare", reference=reference)
                context.deadline = time.monotonic() + 10 * seconds
                found.process = process
            except Exception as error:  # whatever a contender dies of is its row
                found.failure = in_short(error)
            return found

        try:
            yield start
        finally:
            for process in started:
                process.close()


def refused(steps: Sequence[str]) -> str | None:
    """Return a technique's reason why it cannot run on this device."""
    device = get_device().identify()
    reasons = (techniques.get(parse_step(step).name).available(device) for step in steps)
    return next((reason for reason in reasons if reason), None)


def _prepare(process: TrialProcess, context: Context, steps: tuple[Step, ...]) -> None:
    """Prepare ahead-of-time code and third-party graphs in one process, load them in this one, as the search does."""
    ahead = any(step.name == "compile" and step.options.get("engine", "aot") == "aot" for step in steps)
    if not ahead and not any(step.name in THIRD_PARTY for step in steps):
        process.ask("prepare", steps=steps)
        return
    folder = tempfile.mkdtemp(dir=context.scratch)
    compiler = TrialProcess(context)
    try:
        prepared = compiler.ask("prepare", steps=steps, folder=folder)
    finally:
        compiler.close()
    process.ask("load", steps=steps, folder=folder, prepared=prepared)


def take_turns(all_of_them: Sequence[Contender]) -> Turns:
    """Time every live contender once a round."""
    live = [(each.name, each.process) for each in all_of_them if each.process]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name, _ in live}
    begun = time.perf_counter()
    for turn, order in zip(range(ROUNDS[1]), orders(live), strict=False):
        for name, process in order:
            rows[name].append(process.ask("time"))
        if turn + 1 >= ROUNDS[0] and time.perf_counter() - begun > TURN_SECONDS:
            break
    return Turns(rows=rows)


def entry_of(each: Contender, turns: Turns, original: str, max_drop: float) -> Row:
    """Return a contender's figures next to the original's, or the reason for their absence."""
    if not each.fits:
        return {"failure": each.failure}
    loss = each.quality.drop if each.quality else 0.0
    return {
        "ms": 1e3 * statistics.median(turns.seconds(each.name)),
        "versus_eager": triple(turns.speedup(original, each.name)),
        "loss": loss,
        "within_budget": loss <= max_drop,
        "ready_s": round(each.ready_s, 1),
    }


def recipe_of(path: str) -> str:
    """Return the steps of an artifact as text."""
    recipe, _ = open_artifact(Path(path))
    return " + ".join(map(str, recipe.steps)) or "the original"


def optimize_command(target: str | None, out: str, max_drop: float, time_budget: float, **more: Any) -> Any:
    """Optimize a target of the command line; `more` are further arguments of `optimize_cli`."""
    given: dict[str, Any] = dict.fromkeys(("batch", "prompt_tokens", "new_tokens", "tokens", "eval_text"))
    given |= {"with_steps": (), "without": (), "device": None, "seed": 0, "on_event": lambda event: None}
    return optimize_cli(
        target,
        max_drop=max_drop,
        time_budget=time_budget,
        objective="latency",
        out=out,
        command="a benchmark",
        **given | more,
    )
