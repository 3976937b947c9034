"""Gloo processes on this machine: started, watched, and their answers collected."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from torchwright import system
from torchwright.errors import TorchwrightError
from torchwright.process import folders

LIMIT = 600.0
"""Seconds after which processes are given up."""
PRELOADED = ["torchwright.train.prove.steps", "torchwright.train.prove.compare", "torch._dynamo"]

Answer = TypeVar("Answer")


class ProveError(TorchwrightError):
    """The processes of a proof failed before there was anything to compare."""

    exit_code = 1


def on_processes(
    count: int, function: Callable[..., Answer], *arguments: Any, limit: float = LIMIT
) -> list[Answer]:
    """`function(*arguments)` on `count` new processes of one gloo group; their answers by rank.

    The function, found by name in its module, and arguments and answers travel by pickle between our own processes.
    Raises `ProveError` with the process's own words where one fails, and where they take longer than `limit` seconds.
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
                    args=(theirs, str(Path(folder) / "store"), rank, count, function, arguments),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _collect(ends, time.monotonic() + limit)
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


def _collect(ends: Sequence[Connection], deadline: float) -> list[Any]:
    """Each process's answer, or the first failure."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ends):
        missing = [place for place in range(len(ends)) if place not in answers]
        ready = wait([ends[place] for place in missing], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ProveError(
                f"{len(missing)} of {len(ends)} processes did not finish in time",
                found=f"no answer from process {', '.join(map(str, missing))}",
                next="a collective that not every process calls hangs like this",
            )
        for place in missing:
            if ends[place] not in ready:
                continue
            try:
                failure, answers[place] = ends[place].recv()
            except EOFError:
                failure = "it ended without a word"
            if failure:
                raise ProveError(f"process {place} of {len(ends)} failed", found=failure)
    return [answers[place] for place in range(len(ends))]


def _process(
    end: Connection,
    store: str,
    rank: int,
    count: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        file = dist.FileStore(store, count)  # pyright: ignore[reportPrivateImportUsage]
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
