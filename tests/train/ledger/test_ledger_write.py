"""The ledger of running processes: phases, nesting, kills, a full disk; and what is shown of it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchwright.cli import main
from torchwright.core.errors import UnknownName
from torchwright.train.ledger import Ledger, process_started, read_account, torchrun
from torchwright.train.ledger.read import read_sessions
from torchwright.train.ledger.show import how_ended
from torchwright.train.ledger.timeline import render


class Clock:
    """Passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self.now

    def time_ns(self) -> int:
        return self.now + 1_700_000_000_000_000_000


class SetBack:
    """The clock of a machine, an hour ago."""

    monotonic_ns = staticmethod(time.monotonic_ns)

    def time_ns(self) -> int:
        return time.time_ns() - 3600 * 10**9


def test_sleeps_appear_where_they_were_put_and_all_time_is_counted(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger(tmp_path, write_every=0.05, clock=clock) as ledger:
        with ledger.phase("start"):
            clock.sleep(2)
        for number in range(40):
            with ledger.phase("data_wait"):
                clock.sleep(0.1)
            with ledger.phase("step"):
                clock.sleep(0.125)
                if number == 0:
                    with ledger.phase("compile"):
                        clock.sleep(3)
                clock.sleep(0.125)
        with ledger.phase("evaluation"):
            clock.sleep(1)
            with ledger.phase("checkpoint"):
                clock.sleep(2)
        clock.sleep(0.5)
    expected = {
        "start": 2,
        "data_wait": 4,
        "step": 10,
        "compile": 3,
        "evaluation": 1,
        "checkpoint": 2,
        "idle": 0.5,
    }
    account = read_account(tmp_path)
    assert {bucket: time for bucket, time in account.seconds().items() if time} == expected
    assert account.wall == sum(expected.values())
    assert account.attempts[0].reached == 40
    assert {bucket: time for bucket, time in ledger.seconds().items() if time} == expected
    assert ledger.effective() == account.effective == pytest.approx(10 / 22.5)


def test_steps_are_numbered_and_a_failed_one_is_not_done(tmp_path: Path) -> None:
    def train() -> None:
        with Ledger(tmp_path) as ledger:
            ledger.resumed(step=7)
            with ledger.phase("step"):
                pass
            with ledger.phase("step", step=20):
                pass
            ledger.checkpointed(step=20)
            with ledger.phase("step"):
                raise FloatingPointError("not a number")

    with pytest.raises(FloatingPointError):
        train()
    (attempt,) = read_account(tmp_path).attempts
    assert (attempt.resumed, attempt.reached, attempt.saved, attempt.finished) == (7, 20, 20, False)
    assert how_ended(attempt, last=True) == "failed"


def test_a_phase_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path) as ledger,
        pytest.raises(UnknownName, match="did you mean 'checkpoint'"),
        ledger.phase("checkpont"),
    ):
        pass


def test_the_time_before_the_ledger_counts_as_start(tmp_path: Path) -> None:
    with Ledger(tmp_path, started=time.time() - 5):
        pass
    assert read_account(tmp_path).seconds()["start"] == pytest.approx(5, abs=0.5)
    assert 0 < process_started() < time.time()


_CHILD = """
import sys, time
from torchwright.train.ledger import Ledger, process_started
ledger = Ledger(sys.argv[1], started=process_started(), write_every=0.1)
resumed, steps = int(sys.argv[2]), int(sys.argv[3])
if resumed:
    ledger.resumed(step=resumed)
for _ in range(steps):
    with ledger.phase("step"):
        time.sleep(0.05)
with ledger.phase("checkpoint"):
    time.sleep(0.05)
ledger.checkpointed(step=resumed + steps)
if sys.argv[4] == "die":
    for _ in range(4):
        with ledger.phase("step"):
            time.sleep(0.05)
    print("ready", flush=True)
    with ledger.phase("step"):
        time.sleep(60)
ledger.close()
"""


def test_attempts_keep_their_order_when_the_clock_is_set_back_between_them(tmp_path: Path) -> None:
    with Ledger(tmp_path, launch="a") as ledger, ledger.phase("step", step=3):
        pass
    with Ledger(tmp_path, launch="b", clock=SetBack()) as ledger:
        ledger.resumed(step=3)
        with ledger.phase("step", step=5):
            pass
    account = read_account(tmp_path)
    assert [attempt.reached for attempt in account.attempts] == [3, 5]
    assert [session.launch for session in read_sessions(tmp_path)] == ["a", "b"]
    assert account.wall < 60


@pytest.mark.slow
def test_a_kill_loses_no_more_than_the_time_between_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    with subprocess.Popen([*command, "0", "6", "die"], stdout=subprocess.PIPE) as child:
        begun = process_started_of(child.pid)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(1)  # in the middle of a step that writes nothing by itself
        child.send_signal(signal.SIGKILL)
        killed = time.time()
    (attempt,) = read_account(tmp_path).attempts
    counted = (attempt.end - attempt.start) / 1e9
    assert killed - begun - 0.5 < counted < killed - begun + 0.05
    assert (attempt.reached, attempt.saved, attempt.finished) == (10, 6, False)
    assert how_ended(attempt, last=True) == "running or dead"
    subprocess.run([*command, "6", "8", "live"], check=True)
    account = read_account(tmp_path)
    seconds = account.seconds()
    assert sum(seconds.values()) == pytest.approx(account.wall, rel=1e-12)
    assert seconds["lost_work"] > 4 * 0.05 + 0.5  # four steps, and the one that it died in
    assert seconds["step"] >= 14 * 0.05
    assert seconds["recovery"] > 0  # the second process's own start
    assert seconds["idle"] >= account.between > 0


def test_a_kill_loses_one_step_at_most_and_steps_add_no_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, write_every=60)
    for _ in range(50):
        with ledger.phase("data_wait"):
            pass
        with ledger.phase("step"):
            pass
    with ledger.phase("step"):  # a kill now leaves the file as it is
        (attempt,) = read_account(tmp_path).attempts
        assert attempt.reached == 50
    with pytest.raises(ValueError, match="stop"), ledger.phase("step"):
        raise ValueError("stop")
    ledger.close()
    (attempt,) = read_account(tmp_path).attempts
    assert attempt.reached == 51
    assert len(ledger.path.read_text().splitlines()) == 2


def test_two_starts_by_torchruns_own_default_are_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are called alike; the first ended by a kill, and of the second another rank came up first."""
    for name, value in (("RUN_ID", "none"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    clock = Clock()
    for rank, named in ((0, None), (1, None), (0, "of train's own")):
        clock.sleep(100)
        with Ledger(tmp_path, rank=rank, world=2, launch=named, clock=clock) as ledger:
            clock.sleep(1)
        os.utime(ledger.path, (2e9, 2e9))  # a disk's times may be too coarse to tell them apart
    account = read_account(tmp_path)
    assert [sorted(attempt.lanes) for attempt in account.attempts] == [[0], [1], [0]]


def test_a_process_says_which_torchrun_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert torchrun() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with Ledger(tmp_path, launcher=torchrun()):
        pass
    (session,) = read_sessions(tmp_path)
    assert session.launcher is not None
    assert (session.launcher.pid, session.launcher.restarts) == (os.getppid(), 3)
    assert session.launcher.wall / 1e9 == pytest.approx(process_started_of(os.getppid()), abs=1)
    assert torchrun(parent=1) is None, "it has died, and its children are the first process's"


def process_started_of(pid: int) -> float:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def test_a_full_disk_costs_neither_training_nor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really, full = os.pwrite, True

    def scarce(file: int, data: bytes, place: int) -> int:
        if not full:
            return really(file, data, place)
        if len(data) > 40:  # there is room for a part of the line, then for nothing
            return really(file, data[:20], place)
        raise OSError(28, "No space left on device")

    ledger = Ledger(tmp_path, write_every=60)
    monkeypatch.setattr(os, "pwrite", scarce)
    with caplog.at_level(logging.WARNING), ledger.phase("evaluation"):
        time.sleep(0.1)
    ledger.checkpointed(1)
    full = False
    ledger.close()
    account = read_account(tmp_path)
    assert account.seconds()["evaluation"] == pytest.approx(0.1, abs=0.05)
    assert account.notes == []
    assert account.attempts[0].finished


def test_a_disk_that_refuses_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, write_every=60)

    def refuse(file: int, data: bytes, place: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "pwrite", refuse)
        for step in range(3):
            ledger.checkpointed(step)
    ledger.close()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


def test_phases_belong_to_one_thread_and_marks_to_any(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def other() -> None:
        ledger.checkpointed(3)
        try:
            with ledger.phase("checkpoint"):
                pass
        except AssertionError as error:
            failed.append(error)

    with Ledger(tmp_path) as ledger:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(failed) == 1
    assert read_account(tmp_path).attempts[0].saved == 3


def test_the_verb_prints_the_account_in_three_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        with Ledger(tmp_path, rank=rank, world=2, started=time.time() - 3) as ledger, ledger.phase("step"):
            time.sleep(0.05)
    page = tmp_path / "pages" / "<ett>.html"
    assert main(["time-report", str(tmp_path), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"Effective training time: \d+\.\d% of 3\.\d+ s", text)
    assert re.search(r"^start +3\.\d+ s +9\d\.\d+% +[01]: 3\.\d+ s", text, re.MULTILINE)
    assert main(["ett", str(tmp_path), "--json"]) == 0  # its earlier name
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["wall_seconds"])
    assert facts["attempts"][0]["ranks"].keys() == {"0", "1"}
    html = page.read_text()
    assert html == render(read_account(tmp_path))
    assert "http" not in html.replace("http-equiv", "")
    assert html.count("<path") == 2 * len([time for time in facts["seconds"].values() if time])
    assert list(page.parent.iterdir()) == [page]
    assert main(["time-report", str(tmp_path / "nothing")]) == 2
    assert "no ledger in" in capsys.readouterr().err
