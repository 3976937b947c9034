"""Checks in a child of `fork`."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import pytest

SECONDS = 60
"""A child that waits for a thread of its parent's never ends; a busy machine may take long for a small call."""
FAILED = 3


def check_in_child(check: Callable[[], None]) -> None:
    """Run `check` in a child of `fork`, and fail where it raises, crashes or does not end."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        code = FAILED
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        pytest.fail(f"the child of a fork still waited after {SECONDS} s")
    assert os.waitstatus_to_exitcode(status) == 0
