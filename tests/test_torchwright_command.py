"""Ctrl-C before the command line has begun: words and 130, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from torchwright_command import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
        return None

sys.meta_path.insert(0, Interrupting())
sys.argv = ["torchwright", "techniques"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module", ["torchwright", "torchwright.cli", "torchwright.core.process.interrupts", "click"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_first_imports_is_told_in_words(module: str, number: signal.Signals) -> None:
    program = PROGRAM.format(module=module, number=int(number))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 128 + number
    assert ended.stderr == ("interrupted\n" if number == signal.SIGINT else "ended by SIGTERM\n")


def test_both_ways_to_start_are_the_same() -> None:
    import torchwright.__main__ as module
    import torchwright_command

    assert module.main is torchwright_command.main
