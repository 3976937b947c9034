"""Starts device processes: this one imports PyTorch once, and each device is its fork.

python -m torchwright_sim.nursery FD       the host sends it the device's end of a connection over the socket FD
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from torchwright_sim.process import serve


def main(host: socket.socket) -> None:
    """Fork a device process for each connection that comes, until the host is gone."""
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # nobody waits for them: their connection says when they end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host, whose end is theirs
    while True:
        said, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not said:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            host.close()
            try:
                serve(connection)
            finally:
                os._exit(0)  # the nursery's own end is not this process's
        connection.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
