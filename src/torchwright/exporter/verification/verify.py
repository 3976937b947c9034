# pyright: basic
"""The verifier: a package in its own runtime, in a fresh process, against the original in eager float32."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torchwright.core.errors import WorkloadError
from torchwright.core.process import folders
from torchwright.exporter.base import ExportTarget, exports
from torchwright.exporter.package import PACKAGE, REFERENCE, Export, size_of
from torchwright.exporter.verification.locate import keep_errors, locate
from torchwright.exporter.verification.probes import (
    PATIENCE,
    ZERO_ROWS,
    Limit,
    Probe,
    ProbeOutputs,
    holds_for,
    limit_at,
    limits_of,
    unknown,
)
from torchwright.exporter.verification.process import RunFailed, Runner
from torchwright.exporter.verification.reference import EXAMPLE, PAST, Call, read_calls
from torchwright.hardware.measure.clock import DISTURBED_SHARE, paired_speedup
from torchwright.optimization.artifact.tree import read_tree
from torchwright.optimization.engines.compiled.program import GRAPHS
from torchwright.workloads.accuracy import relative_error

TURNS = 7
EXACT = 1e-3
"""An error of a precision that rounds nothing beyond float32."""
DELEGATES = "delegates and all else"
SMALL = 5e-3
"""Shares of the time below which kinds of operators are reported together."""
NOT_RUN = "not run here"
"""The verdict on what is lowered to something that is not here."""
RIGHT, WRONG, REFUSED, CRASHED = "right", "wrong", "refused", "crashed"
Tell = Callable[[str], None]
Start = Callable[..., Runner]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One call."""

    call: str
    sizes: dict[str, int]
    outcome: str
    error: float | None = None
    why: str = ""


def verify(
    folder: Path,
    export: Export,
    changed: Sequence[str],
    tell: Tell,
    allowed: float | None = None,
    *,
    as_written: bool = False,
    artifact: Path | None = None,
    start: Start | None = None,
    turns: int = TURNS,
) -> dict[str, Any]:
    """Return the report: numerics at every size, size and speed against eager, and where outputs diverge.

    `allowed` is the relative error up to which the verdict holds, by default the target's own for its precision. The
    operators' errors of a package `as_written` that rounds are kept next to the reference. `artifact` is the export's
    source: Torchwright's own engine, which is timed alongside. `start` makes the process that runs a package, and each
    side is timed in `turns` turns.
    """
    start = start or Runner
    target = exports.get(export.target)
    allowed = target.tolerances[export.precision] if allowed is None else allowed
    if reason := elsewhere(target, export.delegate):
        return {
            "size_bytes": size_of(folder / PACKAGE),
            "calls": [],
            "largest_error": None,
            "findings": [f"lowered, not run here: {reason}", *([export.parting] if export.parting else [])],
            "parting": None,
            "verdict": NOT_RUN,
        }
    calls = read_calls(folder / REFERENCE)
    report: dict[str, Any] = {"allowed": allowed, "size_bytes": size_of(folder / PACKAGE)}
    parting, limits, domain = None, list[Limit](), dict[str, Any]()
    with folders.temporary() as scratch, Package(folder, scratch, start) as package:
        tell(f"running it in {target.runtime}, in a process of its own")
        tried = [package.tried(0, calls[0], allowed)]
        if tried[0].outcome in (RIGHT, WRONG):
            tell("timing it, and the graph operator by operator, in turn")
            report |= _measured(package, folder, scratch, turns)
            if artifact is not None and _has_graph(folder):
                tell("timing the artifact that it comes from")
                report |= _beside(package, folder, scratch, artifact, turns)
            # After its memory was read, since counting takes some.
            report |= _shares(package, export, report["call_s"])
            if _has_graph(folder) and (tried[0].outcome == WRONG or changed):
                tell("looking for the first layer at which outputs part")
                parting = locate(folder, package.ask, scratch, allowed, named=target.named)
            elif _has_graph(folder) and as_written and allowed > EXACT:
                keep_errors(folder, package.ask, scratch, named=target.named)
        if tried[0].outcome != CRASHED:
            tell("calling it at both ends of its sizes, and one past them")
            tried += [
                package.tried(index, call, allowed)
                for index, call in enumerate(calls)
                if index and call.name != ZERO_ROWS
            ]
        if tried[0].outcome == RIGHT and _has_graph(folder):
            tell("probing it with NaN, infinity, large integers and indices out of range")
            limits = _limits(package, folder, scratch, calls, allowed)
            domain = {"holds_for": holds_for(limits), "limits": [str(limit) for limit in limits]}
    wrong = [row for row in tried if row.outcome != RIGHT and (row.call, row.outcome) != (PAST, REFUSED)]
    findings = [*(f"{name} is not as it was written" for name in changed), *_sizes(tried)]
    if parting is not None:
        findings.append(str(parting))
    elif tried[0].outcome == WRONG and export.parting:
        findings.append(f"{export.parting} (in the graph that was converted)")
    said = {
        "calls": [asdict(row) for row in tried],
        "largest_error": max((row.error for row in tried if row.error is not None), default=None),
        "findings": findings,
        "parting": asdict(parting) if parting else None,
        "verdict": "differs" if wrong or changed else "holds",
    }
    return report | said | domain


def elsewhere(target: type[ExportTarget], delegate: str) -> str | None:
    """Why what is lowered to this delegate does not run here, or None."""
    return target.delegates[delegate].elsewhere() if delegate else None


class Package:
    """A package in a process of its own, or with `reference` its graph; it is started again after a crash."""

    def __init__(self, folder: Path, scratch: Path, start: Start, *, reference: bool = False) -> None:
        self._folder, self._scratch, self._reference, self.start = folder, scratch, reference, start
        self._runner: Runner | None = None

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Raises `RunFailed`."""
        try:
            return self.runner.ask(what, **arguments)
        except RunFailed:
            self.close()
            raise

    @property
    def runner(self) -> Runner:
        self._runner = self._runner or self.start(self._folder, self._scratch, reference=self._reference)
        return self._runner

    def tried(self, index: int, call: Call, allowed: float) -> Tried:
        """A call, and how its answer compares."""
        out = self._scratch / f"call-{index}"
        try:
            answer = self.ask("answer", call=index, out=str(out))
        except RunFailed as error:
            return Tried(call=call.name, sizes=call.sizes, outcome=CRASHED, why=str(error))
        if "refused" in answer:
            return Tried(call=call.name, sizes=call.sizes, outcome=REFUSED, why=answer["refused"])
        try:
            error = relative_error(call.outputs, read_tree(out)).value
        except WorkloadError as fault:  # of another number or shape, or NaN
            return Tried(call=call.name, sizes=call.sizes, outcome=WRONG, why=fault.reason)
        right = error <= allowed
        return Tried(call=call.name, sizes=call.sizes, outcome=RIGHT if right else WRONG, error=error)

    def answer(self, what: str, **arguments: Any) -> ProbeOutputs:
        """Return the answer to a probe, or to a call that is outside of the package's sizes."""
        out = self._scratch / ("eager" if self._reference else "exported")
        try:
            answer = self.ask(what, within=PATIENCE, out=str(out), **arguments)
        except RunFailed as error:
            return ProbeOutputs(crashed=str(error))
        return (
            ProbeOutputs(refused=answer["refused"])
            if "refused" in answer
            else ProbeOutputs(outputs=read_tree(out))
        )

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _limits(
    package: Package, folder: Path, scratch: Path, calls: Sequence[Call], allowed: float
) -> list[Limit]:
    """Probe the package, and call it with zero rows, which it may refuse: the least that it promises is one."""
    try:
        limits = _probed(package, folder, scratch, allowed)
    except RunFailed as error:  # of the graph: the package was answered
        limits = [unknown(str(error))]
    for index, call in enumerate(calls):
        if call.name == ZERO_ROWS:
            answer = package.answer("answer", call=index)
            limit = limit_at(ZERO_ROWS, (), ProbeOutputs(outputs=call.outputs), answer, allowed)
            limits += [limit] if limit is not None and not answer.refused else []
    return limits


def _probed(package: Package, folder: Path, scratch: Path, allowed: float) -> list[Limit]:
    with Package(folder, scratch, package.start, reference=True) as eager:
        probes = [Probe(**probe) for probe in eager.ask("probes")["probes"]]
        ask = lambda side: lambda probe: side.answer("probe", probe=asdict(probe))
        return limits_of(probes, ask(eager), ask(package), allowed)


def _measured(package: Package, folder: Path, scratch: Path, count: int) -> dict[str, Any]:
    """Return load time, latency and memory of the example's call, with those of the graph run operator by operator."""
    report: dict[str, Any] = {"load_s": package.runner.load_seconds}
    if not _has_graph(folder):
        turns = [package.ask("time") for _ in range(count)]
        report["call_s"] = statistics.median(turn["seconds"] for turn in turns)
        return report | {"memory_bytes": package.ask("memory")["bytes"], "disturbed": _disturbed(turns)}
    with package.start(folder, scratch, reference=True) as eager:
        turns = [(eager.ask("time"), package.ask("time")) for _ in range(count)]
        before, after = ([turn["seconds"] for turn in side] for side in zip(*turns, strict=True))
        speedup = paired_speedup(before, after)
        return report | {
            "call_s": statistics.median(after),
            "eager_call_s": statistics.median(before),
            "speedup": str(speedup),
            "memory_bytes": package.ask("memory")["bytes"],
            "eager_memory_bytes": eager.ask("memory")["bytes"],
            "disturbed": _disturbed([turn for pair in turns for turn in pair]),
        }


def _beside(package: Package, folder: Path, scratch: Path, artifact: Path, count: int) -> dict[str, Any]:
    """Latency and memory of the artifact that the package comes from, as `tw.load` runs it, in turns with it."""
    try:
        with package.start(folder, scratch, artifact=artifact) as own:
            turns = [(own.ask("time")["seconds"], package.ask("time")["seconds"]) for _ in range(count)]
            before, after = map(list, zip(*turns, strict=True))
            return {
                "artifact_call_s": statistics.median(before),
                "speedup_over_artifact": str(paired_speedup(before, after)),
                "artifact_memory_bytes": own.ask("memory")["bytes"],
            }
    except RunFailed as error:  # of the artifact: the package was answered
        return {"artifact": f"it could not be timed: {error}"}


def _shares(package: Package, export: Export, call_seconds: float) -> dict[str, Any]:
    """Return shares of the example call's time by kind of operator, if known."""
    try:
        times = _beside_delegates(export.seconds, call_seconds) or package.ask("operator_times")["times"]
    except RunFailed:  # the call itself was answered
        return {}
    whole = sum(times.values())
    if not whole:
        return {}
    shares = {kind: time / whole for kind, time in times.items()}
    told = {kind: share for kind, share in shares.items() if share >= SMALL}
    if rest := sum(share for share in shares.values() if share < SMALL):
        told["others"] = rest
    return {"time by operator": {kind: round(told[kind], 4) for kind in sorted(told, key=lambda k: -told[k])}}


def _beside_delegates(seconds: dict[str, float], call_seconds: float) -> dict[str, float]:
    """Operators that were timed one by one, and all else, which is the delegates' and the runtime's."""
    return seconds and seconds | {DELEGATES: max(call_seconds - sum(seconds.values()), 0.0)}


def _disturbed(turns: Sequence[dict[str, Any]]) -> bool:
    """Check whether other programs took the processor in most turns: the times then say nothing about the package."""
    return sum(turn["waited"] > DISTURBED_SHARE for turn in turns) * 2 > len(turns)


def _has_graph(folder: Path) -> bool:
    return (folder / REFERENCE / GRAPHS).is_file()


def _sizes(tried: list[Tried]) -> list[str]:
    """Return the findings about calls with wrong answers."""
    found = []
    for row in tried:
        sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items())
        where = row.call if row.call == EXAMPLE or not sizes else f"{row.call} ({sizes})"
        if row.outcome == CRASHED:
            found.append(f"{where}: {row.why}")
        elif row.outcome == REFUSED and row.call != PAST:
            found.append(f"{where}: refused, though the graph takes it: {row.why}")
        elif row.outcome == WRONG:
            said = (
                row.why
                if row.error is None or math.isnan(row.error)
                else f"off by {row.error:.2g} (relative)"
            )
            found.append(f"{where}: {said}")
    taken = [row for row in tried if row.outcome not in (REFUSED, CRASHED)]
    if len(taken) == 1 < len(tried):
        found.insert(
            0, f"its sizes are frozen: only those of the {taken[0].call} call are taken, {taken[0].sizes}"
        )
    return found
