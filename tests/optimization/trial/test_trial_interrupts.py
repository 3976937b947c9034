"""Signals: noted where their exception is lost, held back where something is half done, and no process left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_trial import Trap, context, hang, wait_until_gone

from torchwright.core.process import interrupts
from torchwright.core.process.interrupts import Interrupted, check, deferred, handled, importing
from torchwright.optimization.trial.client import TrialProcess

CTRL_C = signal.SIGINT


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Any:
    """A test run in the background of a shell ignores Ctrl-C, and so would everything here."""
    before = signal.signal(CTRL_C, signal.default_int_handler)
    yield
    signal.signal(CTRL_C, before)


class Interrupting:
    """Gets Ctrl-C in its destructor, where Python prints the exception and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(CTRL_C)
        time.sleep(0)


def lose_one(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    Interrupting()
    return [entry.exc_type for entry in lost]


def test_an_interrupt_whose_exception_was_lost_is_raised_at_the_next_check(monkeypatch: pytest.MonkeyPatch):
    with handled():
        assert lose_one(monkeypatch) == [Interrupted]
        with pytest.raises(Interrupted):
            check()
        with pytest.raises(Interrupted), deferred():
            pytest.fail("nothing is begun after an interrupt")


def test_a_deferred_interrupt_waits_for_a_check():
    done = []
    with handled(), pytest.raises(Interrupted) as found, deferred():  # noqa: PT012
        signal.raise_signal(CTRL_C)
        signal.raise_signal(CTRL_C)
        done.append("held back")
        check()
        done.append("too far")
    assert done == ["held back"]
    assert (found.value.exit_code, str(found.value)) == (130, "interrupted")


def test_the_end_of_the_block_checks_too():
    done = []
    with handled(), pytest.raises(Interrupted), deferred():  # noqa: PT012
        signal.raise_signal(CTRL_C)
        done.append("to the end")
    assert done == ["to the end"]


def test_an_error_of_the_block_is_not_hidden_by_an_interrupt():
    with handled(), pytest.raises(ZeroDivisionError), deferred():  # noqa: PT012
        signal.raise_signal(CTRL_C)
        raise ZeroDivisionError


def test_a_signal_by_its_number():
    with handled(), pytest.raises(Interrupted, match="ended by SIGTERM") as found:
        signal.raise_signal(signal.SIGTERM)
    assert found.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_outside_of_the_command_line_only_pythons_own_handler_is_replaced():
    with pytest.raises(Interrupted), deferred():
        signal.raise_signal(CTRL_C)
    assert signal.getsignal(CTRL_C) is signal.default_int_handler
    seen: list[int] = []
    mine: Callable[..., Any] = lambda number, frame: seen.append(number)
    signal.signal(CTRL_C, mine)
    with deferred():
        assert signal.getsignal(CTRL_C) is mine
        signal.raise_signal(CTRL_C)
        check()
    assert seen == [CTRL_C]


def test_what_is_ignored_stays_ignored():
    signal.signal(CTRL_C, signal.SIG_IGN)
    with handled(), deferred():
        signal.raise_signal(CTRL_C)
        check()
    assert signal.getsignal(CTRL_C) == signal.SIG_IGN


def test_another_thread_is_no_place_for_handlers():
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with handled(), deferred():
                check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


# ------------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
def test_a_wait_for_a_trial_ends_with_a_note_alone_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The exception is lost while the search waits; only the note says that the user wants to stop."""
    with handled(), pytest.raises(Interrupted), context(Trap(hang), tmp_path) as shared:  # noqa: PT012
        process = TrialProcess(shared)
        handler = interrupts._current()  # pyright: ignore[reportPrivateUsage]
        assert handler is not None
        timer = threading.Timer(0.5, setattr, (handler, "noted", int(CTRL_C)))
        timer.start()
        process.ask("prepare", steps=())
    assert wait_until_gone(process._process.pid)  # pyright: ignore[reportPrivateUsage]
    assert shared.processes == []


@pytest.mark.slow
def test_processes_that_nobody_holds_end_with_the_search(tmp_path: Path):
    with context(Trap(), tmp_path) as shared:
        pids = [TrialProcess(shared)._process.pid for _ in range(2)]  # pyright: ignore[reportPrivateUsage]
    assert all(map(wait_until_gone, pids))


PARENT = """
import sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_trial import Trap, context, hang
from torchwright.optimization.engines.compiled import compile_package
from torchwright.optimization.trial.fork_server import can_fork
from torchwright.optimization.trial.client import TrialProcess
if __name__ == "__main__":
    process = TrialProcess(context(Trap(hang), Path(sys.argv[1]), fork=can_fork("cpu")))
    compiling = compile_package.start(Path(sys.argv[1]), "x", 0, {})
    print(process._process.pid, compiling.pid, flush=True)
    process.ask("prepare", steps=())
"""


@pytest.mark.slow
def test_trials_and_compilations_end_with_a_process_that_is_killed(tmp_path: Path):
    words = [sys.executable, "-c", PARENT, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert all(map(wait_until_gone, pids))


def test_a_worker_whose_parent_is_gone_before_it_could_ask_ends_at_once():
    code = "from torchwright.core.process.orphans import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


# ---------------------------------------------------------------------------------------------- the command


COMMAND = """
import atexit, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from torchwright.cli import failures, group, main
def run(words):
    {deed}
group.run = run
sys.exit(main())
"""


def command(deed: str) -> subprocess.CompletedProcess[str]:
    code = COMMAND.format(deed=deed)
    return subprocess.run(
        [sys.executable, "-c", code, "verify", "x"], capture_output=True, text=True, timeout=60
    )


def test_the_command_ends_with_the_signals_code():
    done = command("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)")
    assert (done.returncode, done.stderr) == (143, "ended by SIGTERM\n")
    done = command("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_again_while_python_ends_prints_no_traceback():
    """Whoever presses it twice meets the interpreter in its destructors."""
    done = command("atexit.register(signal.raise_signal, signal.SIGINT); raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")


def test_ctrl_c_again_while_the_first_is_reported_is_only_noted():
    done = command(
        "failures.click.echo = lambda text, **_: (signal.raise_signal(signal.SIGINT), print(text, file=sys.stderr)); "
        "raise KeyboardInterrupt"
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_while_the_verbs_are_imported():
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from torchwright.cli import main
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


IMPORTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch._C":
            signal.raise_signal(signal.SIGINT)
            os._exit(99)
from torchwright.cli import main
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


def test_ctrl_c_while_torch_starts_ends_the_command_at_once_and_in_words():
    """Raised there it comes out of torch's C++ as a core dump, or of some `except` as another error."""
    words = [sys.executable, "-c", IMPORTING, "verify", "x"]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert json.loads(done.stdout) == {
        "error": {"type": "Interrupted", "message": "interrupted", "exit_code": 130}
    }
    assert subprocess.run(words, capture_output=True, text=True).stdout == ""


def test_where_it_is_not_the_command_an_import_ends_first():
    done = []
    with handled(), pytest.raises(Interrupted), importing():  # noqa: PT012
        signal.raise_signal(CTRL_C)
        done.append("imported")
    assert done == ["imported"]
