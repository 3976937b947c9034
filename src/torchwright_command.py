"""The command `torchwright`: signals end it in words from its first line on, before anything else is imported.

Outside of the package, because Python runs the package's own imports first: 0.1 s in which Ctrl-C was a traceback.
"""

import os
import signal
import sys


def main() -> int:
    """Run the command line; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and a shell's background jobs have it
            signal.signal(number, _leave)
    from torchwright.cli import main as command

    return command()


def _leave(number: int, frame: object) -> None:
    """End at once, as the command line does later: nothing is held yet."""
    os.write(2, b"interrupted\n" if number == signal.SIGINT else b"ended by SIGTERM\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
