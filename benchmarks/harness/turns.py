"""Timing in turns: contenders run once a round in an order that changes, and are compared by ratios within rounds."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Each = TypeVar("Each")


def orders(contenders: Sequence[Each]) -> Iterator[list[Each]]:
    """Yield the contenders in another order each time: what one leaves behind falls on all the others."""
    shuffled = random.Random(0)
    while True:
        yield shuffled.sample(contenders, len(contenders))


def in_turns(contenders: Mapping[Each, Callable[[], Any]], rounds: int) -> dict[Each, list[Any]]:
    """Return the answers of every contender, each called once a round."""
    found: dict[Each, list[Any]] = {name: [] for name in contenders}
    for _, order in zip(range(rounds), orders(list(contenders)), strict=False):
        for name in order:
            found[name].append(contenders[name]())
    return found


def seconds(call: Callable[[], Any], calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one of so many calls."""
    begun = clock()
    for _ in range(calls):
        call()
    return (clock() - begun) / calls


def timed(
    contenders: Mapping[Each, Callable[[], Any]],
    rounds: int,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Each, list[float]]:
    """Return the seconds of a call of every contender, one for each round."""
    clocked = {
        name: lambda call=call: seconds(call, calls, clock)  # type: ignore[misc]
        for name, call in contenders.items()
    }
    return in_turns(clocked, rounds)


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median over rounds of one contender's figure divided by another's."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def both_clocks() -> tuple[float, float]:
    """Return the wall clock and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds of both clocks since `begun`."""
    now = both_clocks()
    return now[0] - begun[0], now[1] - begun[1]


def ratios(over: Sequence[tuple[float, float]], under: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return `ratio` by the wall clock and by processor time."""
    wall, cpu = (ratio([a[clock] for a in over], [b[clock] for b in under]) for clock in (0, 1))
    return wall, cpu


@contextlib.contextmanager
def processes(
    target: Callable[..., None], names: Sequence[str], *arguments: Any, preload: Sequence[str] = ()
) -> Iterator[dict[str, Connection]]:
    """Start `target(name, *arguments, pipe)` for each name; yield the pipes when each has reported that it is warm.

    A process works whenever True arrives, answers, and ends after False. `preload` is imported once for all of them.
    """
    context: Any = get_context("forkserver" if preload else "spawn")
    context.set_forkserver_preload(list(preload))
    pipes: dict[str, Connection] = {}
    started = []
    try:
        for name in names:
            pipes[name], far = context.Pipe()
            started.append(context.Process(target=target, args=(name, *arguments, far), daemon=True))
            started[-1].start()
            far.close()
            pipes[name].recv()
        yield pipes
        for process in started:
            process.join(30)
    finally:
        for process in started:
            process.kill()


def ask(pipe: Connection, go_on: bool = True) -> Any:
    """Return a process's answer to one request."""
    pipe.send(go_on)
    return pipe.recv()
