"""A worker process: `python -m torchwright.map.worker FD PARENT CORES`.

It keeps to its cores, opens the task and computes one part after another. Its answers go back over the socket: the
process that plans writes all files, so that a worker that is killed leaves nothing half-written.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from typing import Any

from torchwright.core import system
from torchwright.core.errors import TorchwrightError
from torchwright.core.process.orphans import be_killed_first, die_with_parent


def main(arguments: list[str]) -> int:
    end, parent = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    die_with_parent(parent)
    be_killed_first()
    cores = [int(core) for core in arguments[2].split(",") if core]
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before torch counts them
    connection = system.connection(end)
    end.close()
    try:
        spec, form, threads = pickle.loads(connection.recv_bytes())
        task = _open(spec, threads)
        connection.send_bytes(pickle.dumps(("ready", list(task.notices))))
        from torchwright.map.compute import compute

        while True:
            part = pickle.loads(connection.recv_bytes())
            if part is None:
                task.close()
                return 0
            connection.send_bytes(pickle.dumps(("computed", compute(task, part, form))))
    except (EOFError, ConnectionError):  # the other end is gone
        return 0
    except TorchwrightError as error:
        connection.send_bytes(pickle.dumps(("refused", error)))
        return error.exit_code
    except BaseException as error:
        connection.send_bytes(
            pickle.dumps(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        )
        return 1


def _open(spec: Any, threads: int | None) -> Any:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    from torchwright.map.tasks.registry import open_task

    return open_task(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
