"""Failures as exit codes.

0 is success; 1 a regression, a technique asked for that failed, or an internal fault; 2 what a user can mend; 3 a
verdict that noise does not allow; 130 Ctrl-C (128 and the signal's number for any other); 141 a reader that closed the
pipe, as `| head -1` does and as shells say it of other programs.

With `--json` an error is also printed as JSON on standard output, with the measurements.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Generator
from signal import SIGINT
from typing import Any

import click

from torchwright.cli.printing import say, to_json
from torchwright.core.errors import TorchwrightError
from torchwright.core.process import interrupts

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""Faults of the system's that lie in a path and its permissions: a user can mend them."""
CLOSED_PIPE = 141
"""Exit status that a shell reports for a program that SIGPIPE ended."""


def exit_code(run: Callable[[list[str]], int], words: list[str]) -> int:
    """Run the command line; whatever it raises is said and becomes an exit code."""
    try:
        code = run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_stdout()
        return CLOSED_PIPE
    except click.ClickException as error:
        error.show()
        return _failed(words, type(error).__name__, error.format_message(), error.exit_code)
    except TorchwrightError as error:
        say(f"torchwright: {error}", err=True)
        return _failed(words, type(error).__name__, str(error), error.exit_code, error)
    except KeyboardInterrupt as error:
        interrupts.only_note()  # the next one would end in a traceback
        interrupt = error if isinstance(error, interrupts.Interrupted) else interrupts.Interrupted(SIGINT)
        with contextlib.suppress(OSError):  # a terminal that was closed
            say(str(interrupt), err=True)
        return _failed(words, "Interrupted", str(interrupt), interrupt.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            kind, fault = "DiskFull", _disk_full(error)
        elif error.errno in REFUSED and error.filename is not None:
            kind, fault = "Refused", _refused(error)
        else:
            return _internal_fault(words, error)
        say(f"torchwright: {fault}", err=True)
        return _failed(words, kind, str(fault), fault.exit_code, fault)
    except Exception as error:
        return _internal_fault(words, error)


def _failed(
    words: list[str], kind: str, message: str, code: int, error: TorchwrightError | None = None
) -> int:
    """Say the failure on standard output too if JSON was asked for; returns the exit code."""
    if "--json" in words:
        try:
            say(as_json(kind, message, code, error))
            sys.stdout.flush()
        except OSError:  # standard output is what failed: standard error has said it
            _discard_stdout()
    return code


def as_json(kind: str, message: str, code: int, error: TorchwrightError | None = None) -> str:
    """A failure as standard output says it with `--json`."""
    said: dict[str, Any] = {"type": kind, "message": message, "exit_code": code}
    if error is None:
        return to_json({"error": said})
    said |= {"found": error.found, "allowed": error.allowed, "next": error.next}
    return to_json({**error.facts, "error": said})


def _internal_fault(words: list[str], error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    say(
        "torchwright: this is a fault in Torchwright, not in what you asked. Please report it with the lines "
        "above and the output of `torchwright doctor`.",
        err=True,
    )
    return _failed(words, type(error).__name__, f"internal fault: {error}", 1)


def _disk_full(error: OSError) -> TorchwrightError:
    where = f" while writing {error.filename}" if error.filename else ""
    return TorchwrightError(
        f"{'a file may not be so large' if error.errno == errno.EFBIG else 'the disk is full'}{where}",
        found=os.strerror(error.errno or 0),
        next="free some space, or choose another folder with `-o DIR`; nothing half-written was left behind",
    )


def _refused(error: OSError) -> TorchwrightError:
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else "a file"
    return TorchwrightError(
        f"the system does not let {name} be opened or changed",
        found=os.strerror(error.errno or 0),
        next="check its permissions, or choose another place",
    )


def _discard_stdout() -> None:
    """Keep Python from complaining about the buffer it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # standard output is not a file, as in a test
        return


@contextlib.contextmanager
def packages_of(extra: str, packages: str) -> Generator[None, None, None]:
    """Around imports of a verb's parts: a missing package is an error that names the extra which brings it."""
    try:
        with interrupts.importing():
            yield
    except ModuleNotFoundError as error:
        raise TorchwrightError(
            f"{packages} are not installed",
            found=str(error),
            next=f"`pip install 'torchwright[{extra}]'`",
        ) from error
