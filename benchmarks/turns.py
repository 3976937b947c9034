"""What the benchmarks share: contenders in processes of their own, timed in turn, and rows as they finish.

A contender's process is Torchwright's own trial process (`torchwright.optimization.trial.client`), so a crash or a
hang ends in a row and not in the benchmark. What it runs is the contender's own: `ByHand` and `ByHandLanguage` here,
or an artifact.
"""

from __future__ import annotations

import contextlib
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import torchwright as tw
from torchwright.core.records import Interval, Quality
from torchwright.hardware.devices import default_name, get_device
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.optimization.artifact.folder import open_artifact
from torchwright.optimization.trial.client import Context, TrialProcess
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.base import Case, Run, Workload
from torchwright.workloads.language import LanguageWorkload

Each = TypeVar("Each")
BY_HAND = ("compile", "freezing", "autocast", "autocast+compile")
"""torch.compile; with freezing; bf16 autocast; bf16 autocast under torch.compile."""
MAX_AUTOTUNE = "max-autotune"
"""torch.compile in that mode: it tries more and takes longer."""
CARD_GRAPHS = "autocast+reduce-overhead"
"""bf16 autocast under torch.compile that records CUDA graphs."""
ROUNDS = (5, 15)
TURN_SECONDS = 12.0
"""Paired turns go on for about this long, within ROUNDS."""


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


def by_hand(call: Callable[..., Any], how: str) -> Callable[..., Any]:
    """`call` under one of BY_HAND, MAX_AUTOTUNE or CARD_GRAPHS."""
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
    """What the user of an artifact calls; `inner` is for those of modules that cannot be exported."""

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


class ByHandLanguage(LanguageWorkload):
    """The bundled language model through one of BY_HAND: eager with a growing cache, compiled with a fixed one."""

    how = "autocast"

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return super().cases(self._cache_dtype(dtype))

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return super().observe(run, self._cache_dtype(dtype))

    def _cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The cache has the type of the keys that autocast writes into it."""
        return torch.bfloat16 if "autocast" in self.how else dtype

    def adapt(self, model: nn.Module) -> nn.Module:
        return ByHand(super().adapt(model), self.how)

    def original_run(self, model: nn.Module) -> Run:
        if self.how == "autocast":
            return by_hand(super().original_run(model), self.how)
        call = self.adapt(model)
        return lambda case: call(*case.args, **case.kwargs)


@dataclass(kw_only=True)
class Contender:
    """A live process that is ready to be timed, or the reason why there is none."""

    name: str
    process: Any = None
    """A `TrialProcess`, or a peer's that answers `time` as one does."""
    quality: Quality | None = None
    ready_s: float = 0.0
    failure: str = ""

    @property
    def fits(self) -> bool:
        return self.process is not None


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
    """What a trial's process is started with, to be done within so many seconds."""
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
    """Starts contenders, and ends them all on the way out."""
    started: list[TrialProcess] = []
    with tempfile.TemporaryDirectory() as scratch:

        def start(
            name: str,
            workload: Workload,
            *,
            artifact: str | None = None,
            reference: Any = None,
            seconds: float = 120.0,
        ) -> Contender:
            """A contender that runs `workload` as it is, or the artifact; `reference` is what it is judged against."""
            begun = time.perf_counter()
            context = context_of(workload, Path(scratch), seconds)
            try:
                process = TrialProcess(context)
                started.append(process)
                if artifact:
                    process.ask("load_artifact", path=artifact, trust=False)
                else:
                    process.ask("prepare", steps=())
                ready = time.perf_counter() - begun
                quality = process.ask("compare", reference=reference) if reference is not None else None
                context.deadline = time.monotonic() + 10 * seconds
            except Exception as error:  # whatever a contender dies of is its row
                return Contender(name=name, failure=f"{type(error).__name__}: {error}"[:200])
            return Contender(name=name, process=process, quality=quality, ready_s=ready)

        try:
            yield start
        finally:
            for process in started:
                process.close()


def take_turns(all_of_them: Sequence[Contender]) -> Turns:
    """Time every live contender once a round, in another order each: what one leaves behind falls on all the others."""
    live = [(c.name, c.process) for c in all_of_them if c.process]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name, _ in live}
    begun = time.perf_counter()
    for turn, order in zip(range(ROUNDS[1]), orders(live), strict=False):
        for name, process in order:
            rows[name].append(process.ask("time"))
        if turn + 1 >= ROUNDS[0] and time.perf_counter() - begun > TURN_SECONDS:
            break
    return Turns(rows=rows)


def orders(contenders: Sequence[Each]) -> Iterator[list[Each]]:
    """All of them in another order each time."""
    shuffled = random.Random(0)
    while True:
        yield shuffled.sample(contenders, len(contenders))


def ask_in_turns(pipes: dict[str, Connection], rounds: int) -> dict[str, list[Any]]:
    """What processes answer that wait at their pipes, each asked once a round."""
    told: dict[str, list[Any]] = {name: [] for name in pipes}
    for _, order in zip(range(rounds), orders(list(pipes)), strict=False):
        for name in order:
            pipes[name].send(True)
            told[name].append(pipes[name].recv())
    return told


def median_ratios(
    over: Sequence[tuple[float, float]], under: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Of the wall clock and of processor time, the median over rounds of one contender's figure by another's."""
    wall, cpu = (
        statistics.median(a[clock] / b[clock] for a, b in zip(over, under, strict=True)) for clock in (0, 1)
    )
    return wall, cpu


def observe(contender: Contender) -> Any:
    assert contender.process is not None
    return contender.process.ask("observe")


def recipe_of(path: str) -> str:
    """The steps that an artifact holds, as text."""
    recipe, _ = open_artifact(Path(path))
    return " + ".join(map(str, recipe.steps)) or "the original"


def machine() -> dict[str, Any]:
    """Hardware, versions and command, for the head of every benchmark."""
    import transformers

    here = get_device().identify()
    return {
        "cpu": get_device("cpu").identify().name,
        **({} if here.kind == "cpu" else {"card": here.name}),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def print_machine() -> None:
    for key, value in machine().items():
        print(f"{key}: {value}")
    print(flush=True)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=1) + "\n")
