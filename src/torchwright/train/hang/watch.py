"""In the training process: notices that it is stuck, has every rank dump, and prints the answer.

    turn_on()                                            # before init_process_group
    dist.init_process_group(...)
    with Watch(run_dir / "stuck", rank=rank, world=world, silence=600) as watch:
        for step in ...:
            watch.beat()
            ...

Three things make a rank dump: no `beat` for `silence` seconds, an exception that leaves the block, and C++ about to
abort the process (gloo does where sizes disagree). The other ranks see the first dump in the folder, which they share,
and dump at once; the lowest rank that dumped waits until all have or `GRACE` is over, and says why.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchwright.core.errors import TorchwrightError
from torchwright.train.hang.analyse import PATIENCE, analyse
from torchwright.train.hang.calls import Dump, DumpError
from torchwright.train.hang.finding import Finding
from torchwright.train.hang.read import FINISHED, read_dumps
from torchwright.train.hang.record import is_on, turn_on, write_dump
from torchwright.train.hang.show import plain_text

__all__ = ["Beat", "Watch", "turn_on"]

Beat = Callable[..., None]
"""`Watch.beat`, or what does nothing."""

GRACE = 5.0
"""Seconds that the analysis waits for the dumps of other ranks."""
POLL = 0.2
"""Seconds between two looks at the folder."""
MOMENT = 1.0
"""Seconds in which an error that all ranks meet ends them all."""
LAST_SECONDS = 30
"""A process that C++ is about to abort dies after these, whatever its dump does."""

_LOG = logging.getLogger(__name__)
_TERMINATE = ctypes.CFUNCTYPE(None)


class Watch:
    """Watches one rank; a context manager around training. See the module."""

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        world: int,
        silence: float,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`folder`: one that all ranks see. `silence`: seconds without a `beat`. `say` gets the answer, else stderr."""
        if not is_on():
            _LOG.warning(
                "the flight recorder is off: call turn_on() before torch.distributed.init_process_group()"
            )
        self.folder, self.rank, self.world = Path(folder), rank, world
        self.finding: Finding | None = None
        """The answer, where this rank was the one to look for it."""
        self._silence, self._say = silence, say if say is not None else _to_stderr
        self._started = time.time_ns()
        self._old = self._stale()
        self._beaten = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._dumped = False
        self._thread = threading.Thread(target=self._watch, name="torchwright-stuck", daemon=True)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (self.folder, self.folder / FINISHED):
            (old / f"rank_{self.rank}.json").unlink(missing_ok=True)
        self._beaten = time.monotonic()
        self._hook = _on_terminate(self._aborted)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            with _terminate_later():
                self._dump(f"{type(error).__name__}: {error}", failed=True)
                # An error that says itself what is to be done is raised by all ranks mostly, and then none is stuck;
                # if not, those that this one leaves behind say so.
                if not isinstance(error, TorchwrightError):
                    self._answer()
        self._stop.set()
        self._thread.join()
        if error is None:
            self._dump("finished", finished=True)
        self._hook()

    def beat(self, patience: float = 0.0) -> None:
        """Say that this rank goes on: once in each step, and before anything that takes `patience` seconds longer."""
        self._beaten = time.monotonic() + patience

    def _aborted(self) -> None:
        self._dump("C++ aborted the process: see its last words", failed=True)
        self._answer()

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            silent = time.monotonic() - self._beaten
            if silent >= self._silence:
                reason = f"no progress for {silent:.0f} s"
            elif not self._others():
                continue
            elif self._stop.wait(MOMENT):  # they all ended, this one too
                return
            else:
                reason = "another rank dumped"
            self._dump(reason)
            self._answer()
            return

    def _others(self, *folders: str) -> set[str]:
        """Names of the dumps of this run by other ranks; also in `folders` of the folder."""
        places = [self.folder, *(self.folder / name for name in folders)]
        found = {path.name for place in places for path in place.glob("rank_*.json") if self._is_new(path)}
        return found - {f"rank_{self.rank}.json"}

    def _stale(self) -> dict[Path, tuple[int, int]]:
        """Return the stamps of dumps that an earlier run left: the clock may be set back while this one goes on."""
        paths = [path for name in ("", FINISHED) for path in (self.folder / name).glob("rank_*.json")]
        stamps = {path: _stamp(path) for path in paths}
        return {path: stamp for path, stamp in stamps.items() if stamp and stamp[1] < self._started}

    def _is_new(self, path: Path) -> bool:
        stamp = _stamp(path)
        return stamp is not None and stamp != self._old.get(path)

    def _dump(self, reason: str, *, failed: bool = False, finished: bool = False) -> None:
        with self._lock:
            if self._dumped:
                return
            self._dumped = True
            try:
                write_dump(
                    self.folder / FINISHED if finished else self.folder,
                    rank=self.rank,
                    world=self.world,
                    started_ns=self._started,
                    reason=reason,
                    failed=failed,
                    finished=finished,
                )
            except OSError as error:
                _LOG.warning("rank %d cannot write its flight-recorder dump: %s", self.rank, error)

    def _answer(self) -> None:
        """On the lowest rank that dumped: wait for the others, say why the job is stuck."""
        with self._lock:
            if self.finding is not None:
                return
            until = time.monotonic() + GRACE
            while len(self._others(FINISHED)) < self.world - 1 and time.monotonic() < until:
                time.sleep(POLL / 2)
            try:
                dumps = _of_world(read_dumps(self.folder)[0], self.world)
            except DumpError as error:
                _LOG.warning("the flight-recorder dumps cannot be read: %s", error)
                return
            if self.rank != min((rank for rank, dump in dumps.items() if not dump.finished), default=-1):
                return
            self.finding = analyse(dumps, patience=min(PATIENCE, self._silence / 2))
            self._say(plain_text(self.finding) + f"\n(dumps: torchwright why-stuck {self.folder})")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the inode and the time of the last change; None where the file's rank has cleared it away."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _of_world(dumps: dict[int, Dump], world: int) -> dict[int, Dump]:
    """Without ranks that only an earlier, larger run had."""
    return {rank: dump for rank, dump in dumps.items() if rank < world}


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _terminate_later() -> Generator[None]:
    """A launcher terminates the ranks left as soon as one has failed; the answer is worth a few seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_terminate(dump: Callable[[], None]) -> Callable[[], None]:
    """Call `dump` when C++ is about to abort the process; returns what undoes it.

    An exception that leaves a thread of gloo ends in std::terminate, on that thread and outside any signal handler,
    so that Python may run. Where the C++ library has another name nothing is installed.
    """
    try:
        set_handler: Any = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return lambda: None
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    @_TERMINATE
    def handler() -> None:
        signal.alarm(LAST_SECONDS)
        dump()
        if before:
            _TERMINATE(before)()

    before = set_handler(ctypes.cast(handler, ctypes.c_void_p))

    def undo() -> None:
        set_handler(before)
        _ = handler  # alive until here

    return undo
