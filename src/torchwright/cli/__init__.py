"""The command line: a file for each verb. It parses, calls and prints.

Only click, `torchwright.core.records` and the engine's options are imported here. A verb imports what it calls when
it runs, so that `--help` never waits for torch.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torchwright.core.process.interrupts import Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 is success, 1 a regression that `verify` found or an internal fault (with its traceback), 2 something that
    the user can mend (one paragraph, no traceback), 130 Ctrl-C. With `--json` an error is printed as JSON on
    standard output too.
    """
    from torchwright.core.process.interrupts import Interrupted, handled, importing, leave_now

    if arguments is None:
        from torchwright.cli.streams import tolerate_encodings

        tolerate_encodings()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with handled(leave=functools.partial(_leave, words) if arguments is None else None):
        try:
            with importing():  # an exception within Python's own import machinery is printed and lost
                from torchwright.cli.completion import install
                from torchwright.cli.failures import exit_code
                from torchwright.cli.group import run
        except Interrupted as interrupt:
            print(interrupt, file=sys.stderr)
            return interrupt.exit_code
        install()
        code = exit_code(run, words)
        leave_now(code)
        return code


def _leave(words: list[str], interrupt: Interrupted) -> NoReturn:
    """From within a signal's handler: past Python's own buffers, which may be in use.

    Nothing of the command line is imported here: the signal may have come while it was.
    """
    try:
        os.write(2, f"{interrupt}\n".encode())
        if "--json" in words:
            said = {"type": "Interrupted", "message": str(interrupt), "exit_code": interrupt.exit_code}
            os.write(1, json.dumps({"error": said}, indent=2).encode() + b"\n")
    finally:
        os._exit(interrupt.exit_code)
