"""The other end of a trial: a process that answers requests by its session, which builds the model, applies steps,
compiles, times and judges.

Forked by `fork_server`, or started as `python -m torchwright.optimization.trial.worker FD PARENT`; requests and
answers are tuples over the socket FD, whose other end only the search holds.
"""

from __future__ import annotations

import errno
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from torchwright.core.errors import TorchwrightError
from torchwright.core.process.orphans import be_killed_first, die_with_parent

if TYPE_CHECKING:
    from torchwright.optimization.trial.session import TrialSession


def _failed(error: BaseException) -> tuple[str, tuple[str, str, str]]:
    """The answer for an error that is the trial's: its type, its first line, and where it came from."""
    line = str(error).strip().splitlines()
    text = "".join(traceback.format_exception(error))
    return "failed", (type(error).__name__, line[0][:300] if line else "", text)


def work(connection: int, parent: int, session: TrialSession | None = None) -> None:
    """Answer requests until the other end hangs up or the process `parent`, that started this one, ends."""
    die_with_parent(parent)
    be_killed_first()
    if session is None:
        from torchwright.optimization.trial.session import TrialSession

        session = TrialSession()
    serve(session, Connection(connection))


def serve(session: TrialSession, connection: Connection) -> None:
    """Answer requests until the other end hangs up."""
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("ok", getattr(session, method)(**arguments))
        except TorchwrightError as error:
            answer = ("refused", error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # nothing that another trial would do better
            answer = ("refused", error) if full else _failed(error)
        except BaseException as error:
            answer = _failed(error)
        # Plain pickle, not Connection.send: torch's reductions would pass tensors by shared memory of two processes
        # that have no common ancestor to authenticate them.
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
