"""Gloo processes on this machine: started, watched, and their answers collected."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from torchwright.core import system
from torchwright.core.errors import TorchwrightError
from torchwright.core.process import folders

LIMIT = 600.0
"""Seconds after which processes are given up."""
DYING_S = 10.0
"""A process whose answer is closed has ended by then, its core dump included."""
LAST_LINES = 4
WHERE = signal.SIGUSR2
"""Asks a process for its stack."""
STANDING_S = 0.5
"""A process has written its stack by then: writing takes milliseconds."""
CALL = re.compile(r'File "(.*)", line (\d+) in (\S+)')
NEAREST = 8
"""Calls of a stack that are named: enough to leave PyTorch's own."""
PRELOADED = ["torchwright.train.prove.steps", "torchwright.train.prove.compare", "torch._dynamo"]

Answer = TypeVar("Answer")


class ProveError(TorchwrightError):
    """The processes of a proof failed before there was anything to compare."""

    exit_code = 1


def on_processes(
    count: int, function: Callable[..., Answer], *arguments: Any, limit: float = LIMIT
) -> list[Answer]:
    """Run `function(*arguments)` on `count` new processes of one gloo group; return their answers by rank.

    The function, found by name in its module, and arguments and answers travel by pickle between our own processes.
    Raises `ProveError` with the process's own error or its last output where one fails, and where they take longer
    than `limit` seconds.
    """
    # Processes are forked from one that has imported torch and done nothing else: a fork takes milliseconds, the import
    # seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _start_forkserver()
    with tempfile.TemporaryDirectory(prefix="torchwright-prove-") as folder:
        processes: list[Any] = []
        ends: list[Connection] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_process,
                    args=(theirs, folder, rank, count, function, arguments),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _collect(ends, time.monotonic() + limit, processes, folder)
        except ProveError:
            raise
        except BaseException as interruption:  # a test's limit, or Ctrl-C
            interruption.add_note(f"it waited for {_standing(range(count), processes, folder)}")
            raise
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in ends:
                end.close()


def _start_forkserver() -> None:
    """Start Python's fork server where its socket's path is short enough: a long TMPDIR would end the server."""
    listener = "listener-" + "x" * folders.RANDOM
    if len(os.fsencode(f"{util.get_temp_dir()}/{listener}")) > system.longest_socket_path():
        short = folders.make_for_sockets(listener)
        util.Finalize(None, short.remove, exitpriority=-100)  # as multiprocessing removes its own folder
        multiprocessing.current_process()._config["tempdir"] = str(short.path)  # type: ignore[attr-defined]
    forkserver.ensure_running()


def _death(process: Any, folder: str, rank: int) -> str:
    """Return how a process ended that gave no answer, and the last lines that it wrote."""
    process.join(DYING_S)
    code = process.exitcode
    how = "it closed its answer" if code is None else f"it ended with code {code}"
    if code is not None and code < 0:
        how = f"it was ended by {signal.Signals(-code).name}"
    written = _output(folder, rank).read_text(encoding="utf-8", errors="replace")
    last = [line for line in written.splitlines() if line.strip()][-LAST_LINES:]
    return f"{how}; its last output: {' | '.join(last)}" if last else f"{how}, and wrote nothing"


def _output(folder: str, rank: int) -> Path:
    """The file that holds what a process writes to its standard output and error."""
    return Path(folder) / f"output-{rank}"


def _collect(ends: Sequence[Connection], deadline: float, processes: Sequence[Any], folder: str) -> list[Any]:
    """Return each process's answer. Raises `ProveError` for the first failure."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ends):
        missing = [place for place in range(len(ends)) if place not in answers]
        ready = wait([ends[place] for place in missing], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ProveError(
                f"{len(missing)} of {len(ends)} processes did not finish in time",
                found=f"no answer from {_standing(missing, processes, folder)}",
                next="a collective that not every process calls hangs like this",
            )
        for place in missing:
            if ends[place] not in ready:
                continue
            try:
                failure, answers[place] = ends[place].recv()
            except EOFError:
                failure = _death(processes[place], folder, place)
            if failure:
                raise _failed(place, failure, processes, folder)
    return [answers[place] for place in range(len(ends))]


def _standing(ranks: Iterable[int], processes: Sequence[Any], folder: str) -> str:
    """Return what each of these processes is executing, innermost call first."""
    alive = [rank for rank in ranks if processes[rank].is_alive()]
    written = {rank: _output(folder, rank).stat().st_size for rank in alive}
    for rank in alive:
        os.kill(processes[rank].pid, WHERE)
    time.sleep(STANDING_S)
    found = []
    for rank in alive:
        said = _output(folder, rank).read_bytes()[written[rank] :].decode("utf-8", errors="replace")
        # The main thread is the last one of the list.
        calls = CALL.findall(said.rpartition("(most recent call first)")[2])
        near = (f"{name} ({Path(file).name}:{line})" for file, line, name in calls[:NEAREST])
        found.append(f"process {rank} in {' < '.join(near) or 'native code'}")
    return "; ".join(found) or "processes that have ended"


def _failed(place: int, failure: str, processes: Sequence[Any], folder: str) -> ProveError:
    """Return the error of a process that failed, or of one that died: the others then fail because it is gone."""
    died = next((rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)), None)
    if died is not None and died != place:
        place, failure = died, _death(processes[died], folder, died)
    return ProveError(f"process {place} of {len(processes)} failed", found=failure)


def _process(
    end: Connection,
    folder: str,
    rank: int,
    count: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    # Native code that aborts says why on its standard error alone.
    with _output(folder, rank).open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    torch.set_num_threads(1)
    faulthandler.register(WHERE)
    try:
        file = dist.FileStore(str(Path(folder) / "store"), count)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=file, rank=rank, world_size=count)
        answer = function(*arguments)
        # Nobody leaves while others still talk to it.
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        end.send((f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})", None))
    else:
        end.send(("", answer))
    finally:
        end.close()
