# pyright: basic
"""`torchwright train --profile A:B`: those steps under torch's profiler.

    OUT/profile/steps-10-20.rank-0.trace.json.gz    for ui.perfetto.dev
    OUT/profile/steps-10-20.rank-0.json             idle time, what time was spent on, every wait with its line

Steps are slower under the profiler, which follows every Python call as well: shares are to be read, not seconds.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from torchwright.core.process.files import replacing
from torchwright.hardware.devices import get_device
from torchwright.optimization.profile.events import read
from torchwright.optimization.profile.summing import CALL, summed
from torchwright.optimization.profile.values import CallTime, KindTime, OperatorTime
from torchwright.report import wording
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.observe.waits import Wait, waits

FOLDER = "profile"
MOST = 50
"""Steps; a trace of more is larger than what shows traces can open."""
SHOWN = 8
"""Lines of a list in the terminal."""


@dataclass(frozen=True, kw_only=True)
class StepsProfile:
    """The time of the profiled steps of one process: the mean of their quicker half, per step."""

    first: int
    last: int
    seconds: float
    """Seconds of a step under the profiler."""
    idle_share: float
    """Share of a step in which its device was idle; on a CPU, in which no operator ran on any thread."""
    kinds: tuple[KindTime, ...]
    operators: tuple[OperatorTime, ...]
    """The longest."""
    waits: tuple[Wait, ...]
    """Waits of all profiled steps."""
    trace: str


def parse_steps(text: str) -> range:
    """`10:20` as the steps 10 to 20; raises `RunError`."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last:
        raise RunError(f"--profile takes the first and the last step, as in 10:20, not {text!r}")
    if last - first >= MOST:
        raise RunError(f"--profile {text} is {last - first + 1} steps", allowed=f"at most {MOST}")
    return range(first, last + 1)


class StepProfiler:
    """Records the steps that were asked for, and writes what it saw when the last of them, or the run, is over."""

    def __init__(self, asked: range, out: Path, *, rank: int, device: str) -> None:
        self.asked, self.folder, self.rank, self.device = asked, out / FOLDER, rank, device
        self._profiler: profile | None = None
        self._recorded: list[int] = []

    def check(self, done: int, last: int) -> None:
        """Raise `RunError` where the run makes no such steps any more."""
        if self.asked and not done < self.asked[0] <= self.asked[-1] <= last:
            raise RunError(
                f"--profile {self.asked[0]}:{self.asked[-1]}: these steps are not ahead",
                found=f"the run goes from step {done + 1:,} to step {last:,}",
            )

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Record the block where it is one of those steps."""
        if number not in self.asked:
            yield
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.device == "cuda" else []
            self._profiler = profile(
                activities=activities, record_shapes=True, with_stack=True, acc_events=True
            )
            self._profiler.__enter__()
        with record_function(f"{CALL}step"):
            yield
        self._recorded.append(number)

    def ready(self) -> bool:
        """Check whether the last requested step is recorded, and nothing is written yet."""
        return self._profiler is not None and self._recorded[-1:] == [self.asked[-1]]

    def finish(self) -> StepsProfile | None:
        """End recording and write both files; None where nothing was recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.__exit__(None, None, None)
        if not self._recorded:
            return None
        self.folder.mkdir(exist_ok=True)
        name = f"steps-{self._recorded[0]}-{self._recorded[-1]}.rank-{self.rank}"
        trace = self.folder / f"{name}.trace.json.gz"
        with replacing(trace) as beside:
            packed = beside.with_name(f"{beside.name}.gz")  # by whose name torch compresses
            profiler.export_chrome_trace(str(packed))
            packed.rename(beside)
        found = self._summed(profiler, trace)
        with replacing(self.folder / f"{name}.json") as beside:
            beside.write_text(json.dumps(dataclasses.asdict(found), indent=1), encoding="utf-8")
        return found

    def _summed(self, profiler: profile, trace: Path) -> StepsProfile:
        call = CallTime(name="step", unrecorded_seconds=0.0, repeat=1, recorded=len(self._recorded))
        # A step's parts that torch.compile made have no names of their own here.
        recording = summed(read(profiler), [call], get_device(self.device).identify(), named=False)
        idle = recording.idle_share if self.device == "cpu" else _idle_share(profiler)
        return StepsProfile(
            first=self._recorded[0],
            last=self._recorded[-1],
            seconds=recording.seconds,
            idle_share=idle,
            kinds=recording.kinds,
            operators=recording.operators[: 4 * SHOWN],
            waits=tuple(waits(profiler)),
            trace=str(trace),
        )


def _idle_share(profiler: profile) -> float:
    """Return the share of the time between a card's first and last kernel in which no kernel ran."""
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    )
    if not spans:
        return 1.0
    busy, reached = 0, spans[0][0]
    for begin, end in spans:
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def profile_message(found: StepsProfile) -> str:
    """The profile for people."""
    kinds = ", ".join(f"{kind.kind} {kind.share:.0%}" for kind in found.kinds if kind.share >= 0.01)
    lines = [
        f"profile of steps {found.first} to {found.last}: device idle {found.idle_share:.1%}; {kinds}",
        f"trace: {found.trace} (open it at ui.perfetto.dev)",
    ]
    lines += [
        f"  waits {wording.seconds(wait.seconds)} in {wait.count:,} x {wait.what}, {wait.line or 'a thread of torch'}"
        for wait in found.waits[:SHOWN]
    ]
    if len(found.waits) > SHOWN:
        lines.append(f"  and {len(found.waits) - SHOWN} more lines: see the .json beside the trace")
    return "\n".join(lines)
