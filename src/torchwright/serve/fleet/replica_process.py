"""A replica's process: `python -m torchwright.serve.fleet.replica_process`, which reads from its input what it serves.

It is `torchwright serve` on sockets that the fleet holds out and on processors of its own; it ends with the fleet.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from torchwright.core.errors import TorchwrightError
from torchwright.core.process.interrupts import Interrupted, handled
from torchwright.serve.command import check, run, url_of
from torchwright.serve.options import EngineOptions, ServerOptions


def main() -> int:
    begun = time.perf_counter()
    given = json.loads(sys.stdin.buffer.read())
    os.sched_setaffinity(0, given["processors"])
    listening = [socket.socket(fileno=number) for number in given["listening"]]
    options = ServerOptions(**given["server"] | {"engine": EngineOptions.from_json(given["engine"])})
    try:
        with handled():
            run(check(options), listening, url_of(listening[0]), begun=begun, say=_say)
    except TorchwrightError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except Interrupted as interrupt:
        return interrupt.exit_code
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
