"""Lost work, recovery and the merging of ranks, on ledgers written by hand, where every second is known."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from torchwright.train.ledger import BUCKETS, LedgerError, read_account

S = 1_000_000_000


class Hand:
    """Writes one process's ledger, second by second."""

    def __init__(
        self,
        run: Path,
        rank: int = 0,
        world: int = 1,
        at: float = 1000,
        launch: str = "",
        launcher: tuple[int, float, int] | None = None,
    ) -> None:
        """`launcher` is its pid, when it began, and how often it had started its processes again."""
        (run / "ledger").mkdir(parents=True, exist_ok=True)
        self.path = run / "ledger" / f"rank{rank:05d}-{int(at * S)}-1.jsonl"
        self.t = 0
        header = {"rank": rank, "world": world, "wall": int(at * S), "every": 2 * S, "launch": launch}
        if launcher is not None:
            header |= {
                "launcher": {"pid": launcher[0], "wall": int(launcher[1] * S), "restarts": launcher[2]}
            }
        self.lines: list[dict[str, Any]] = [{"ledger": 1, "host": "h", "pid": 1} | header]
        self._save()

    def __call__(self, **fields: Any) -> Hand:
        """A line: buckets with their seconds, and `step_`, `checkpoint_`, `resume`, `end`."""
        spent = {name: int(fields.pop(name) * S) for name in list(fields) if name in BUCKETS}
        self.t += sum(spent.values())
        marks = {name.rstrip("_"): value for name, value in fields.items()}
        self.lines.append({"t": self.t, "s": spent} | marks)
        self._save()
        return self

    def _save(self) -> None:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def seconds(run: Path) -> dict[str, float]:
    account = read_account(run)
    assert sum(account.seconds().values()) == pytest.approx(account.wall, rel=1e-12)
    for attempt in account.attempts:
        for lane in attempt.lanes.values():  # no hole, no overlap: each moment is in one piece
            assert lane[0][1] == attempt.start
            assert lane[-1][2] == attempt.end
            assert all(before[2] == after[1] for before, after in itertools.pairwise(lane))
    return {bucket: time for bucket, time in account.seconds().items() if time}


def test_a_ledger_that_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    os.mkfifo(tmp_path / "ledger" / "rank00000-1-1.jsonl")
    with pytest.raises(LedgerError, match="a FIFO"):
        read_account(tmp_path)


def test_one_attempt_is_what_its_lines_say(tmp_path: Path) -> None:
    Hand(tmp_path)(start=3)(compile=4)(step=10, data_wait=1, step_=5)(evaluation=2)(checkpoint=1)(end=True)
    assert seconds(tmp_path) == {
        "start": 3, "compile": 4, "step": 10, "data_wait": 1, "evaluation": 2, "checkpoint": 1,
    }  # fmt: skip
    account = read_account(tmp_path)
    assert account.effective == pytest.approx(10 / 21)
    assert account.notes == []


def test_a_restart_loses_the_steps_after_the_checkpoint_and_recovers(tmp_path: Path) -> None:
    first = Hand(tmp_path)(start=3)(step=10, step_=10)(checkpoint=1)(idle=0, checkpoint_=10)
    first(step=6, data_wait=1, step_=16)
    Hand(tmp_path, at=1000 + 21 + 5)(start=4)(idle=0, resume=10)(step=3, data_wait=1, step_=13)(
        step=3, data_wait=0.5, step_=16
    )(step=8, data_wait=2, step_=24)(end=True)
    assert seconds(tmp_path) == {
        "start": 3,
        "step": 10 + 3 + 3 + 8,  # each of the 24 steps once
        "checkpoint": 1,
        "data_wait": 1 + 2,
        "lost_work": 6,
        "recovery": 4 + 1 + 0.5,
        "idle": 5,
    }
    first_attempt, second = read_account(tmp_path).attempts
    assert (first_attempt.saved, first_attempt.reached, first_attempt.finished) == (10, 16, False)
    assert (second.resumed, second.reached, second.finished) == (10, 24, True)


def test_a_line_across_the_checkpoint_is_divided_by_steps(tmp_path: Path) -> None:
    Hand(tmp_path)(step=8, step_=8)
    Hand(tmp_path, at=1010)(idle=0, resume=6)(step=4, data_wait=2, step_=10)(end=True)
    # Two of the first line's eight steps are lost; of the second's four steps two lead back to where the job had been.
    assert seconds(tmp_path) == {"step": 6 + 4, "lost_work": 2, "data_wait": 1, "recovery": 1, "idle": 2}


def test_the_step_in_which_a_process_died_is_lost(tmp_path: Path) -> None:
    Hand(tmp_path)(step=8, step_=8)(checkpoint=1)(step=30)  # hung in the ninth
    Hand(tmp_path, at=1039)(start=2)(idle=0, resume=8)(step=4, step_=12)(end=True)
    assert seconds(tmp_path) == {"step": 12, "checkpoint": 1, "lost_work": 30, "recovery": 2}


def test_a_planned_continuation_recovers_nothing(tmp_path: Path) -> None:
    Hand(tmp_path)(step=8, step_=8)(idle=0, checkpoint_=8)(end=True)
    Hand(tmp_path, at=1020)(start=2)(idle=0, resume=8)(step=4, step_=12)(end=True)
    assert seconds(tmp_path) == {"step": 12, "start": 2, "idle": 12}


def test_beginning_again_without_a_checkpoint_loses_everything(tmp_path: Path) -> None:
    Hand(tmp_path)(step=8, step_=8)
    Hand(tmp_path, at=1008)(start=1)  # died before it did anything: undid nothing
    Hand(tmp_path, at=1009)(start=1)(step=8, step_=8)(step=2, step_=10)(end=True)
    assert seconds(tmp_path) == {"lost_work": 8, "recovery": 2, "step": 10}


def test_an_older_checkpoint_reaches_back_over_two_attempts(tmp_path: Path) -> None:
    Hand(tmp_path)(step=6, step_=60)
    Hand(tmp_path, at=1006)(idle=0, resume=50)(step=3, step_=80)
    Hand(tmp_path, at=1009)(idle=0, resume=40)(step=5, step_=90)(end=True)
    assert seconds(tmp_path) == {"step": 4 + 5, "lost_work": 2 + 3}


def test_a_rollback_within_an_attempt_is_lost_work_too(tmp_path: Path) -> None:
    hand = Hand(tmp_path)(step=10, step_=10)(step=5, step_=15)(idle=0, resume=10)
    hand(recovery=2, data_wait=1)(step=5, step_=15)(step=1, data_wait=1, step_=16)(end=True)
    assert seconds(tmp_path) == {"step": 16, "lost_work": 5, "recovery": 3, "data_wait": 1}


def test_ranks_are_averaged_and_the_slowest_named(tmp_path: Path) -> None:
    Hand(tmp_path, 0, 2, at=1000)(start=2)(step=8, step_=4)(end=True)
    Hand(tmp_path, 1, 2, at=1001)(start=1)(
        step=2, data_wait=4, step_=4
    )  # dead two seconds before the other ended
    assert seconds(tmp_path) == {"start": 2, "step": 5, "data_wait": 2, "idle": 1}
    account = read_account(tmp_path)
    assert account.most("data_wait") == (1, 4)
    assert not account.attempts[0].finished


def test_attempts_are_told_apart_by_launch_rank_and_time(tmp_path: Path) -> None:
    for rank, at in ((0, 1000), (1, 1000.5), (1, 1007), (0, 1007.5)):  # the second time rank 1 was first
        Hand(tmp_path / "ranks", rank, 2, at=at)(step=5, step_=5)
    assert [sorted(attempt.lanes) for attempt in read_account(tmp_path / "ranks").attempts] == [
        [0, 1],
        [0, 1],
    ]
    for rank, at, launch in ((0, 1000, "a"), (1, 1020, "a"), (2, 1021, "b")):  # one node took long to come up
        Hand(tmp_path / "launch", rank, 3, at=at, launch=launch)(step=5, step_=5)
    account = read_account(tmp_path / "launch")
    assert [sorted(attempt.lanes) for attempt in account.attempts] == [[0, 1], [2]]
    assert any("2 of its ranks left no ledger" in note for note in account.notes)


def test_another_number_of_processes_is_another_attempt(tmp_path: Path) -> None:
    """Two processes for ten seconds, then four of an equal launch, of which ranks 3 and 2 came up first."""
    for world, at, ranks in ((2, 1000, [0, 1]), (4, 1015, [3, 2, 0, 1])):
        for place, rank in enumerate(ranks):
            hand = Hand(tmp_path, rank, world, at=at + place, launch="none/host/29500/0")
            hand(step=10 - place, step_=5)
    account = read_account(tmp_path)
    assert [sorted(attempt.lanes) for attempt in account.attempts] == [[0, 1], [0, 1, 2, 3]]
    assert not account.notes[:-1]


def test_attempts_that_overlap_are_counted_once_and_noted(tmp_path: Path) -> None:
    Hand(tmp_path, at=1000)(step=10, step_=10)(end=True)
    Hand(tmp_path, at=1004)(idle=0, resume=10)(step=10, step_=20)(end=True)
    assert seconds(tmp_path) == {"step": 20}
    assert any("6.000 s before attempt 1 ends" in note for note in read_account(tmp_path).notes)


def test_what_torchrun_did_before_an_attempt_is_accounted_for(tmp_path: Path) -> None:
    """It begins at 990; its first start and later two more die while they import; at 1100 another torchrun goes on."""
    Hand(tmp_path, at=1000, launcher=(7, 990, 1))(start=5)(step=10, step_=10)(checkpoint=1, checkpoint_=10)
    Hand(tmp_path, at=1040, launcher=(7, 990.01, 4))(idle=0, resume=10)(step=10, step_=20)(end=True)
    Hand(tmp_path, at=1110, launcher=(8, 1100, 0))(idle=0, resume=20)(step=10, step_=30)(end=True)
    assert seconds(tmp_path) == {
        "start": 10 + 5 + 10,
        "step": 30,
        "checkpoint": 1,
        "recovery": 24,
        "idle": 50,
    }
    account = read_account(tmp_path)
    assert [(a.start / S, a.end / S) for a in account.attempts] == [(990, 1016), (1016, 1050), (1100, 1120)]
    assert [note.partition(" without")[0] for note in account.notes] == [
        "attempt 1: torchrun had started its processes 1 times",
        "attempt 2: torchrun had started its processes 2 times",
    ]


def test_random_jobs_always_add_up(tmp_path: Path) -> None:
    dice = random.Random(4711)
    for job in range(15):
        run, at, done = tmp_path / str(job), 1000.0, 0
        for _ in range(dice.randint(1, 5)):
            longest = 0
            base, world = dice.randint(0, done), dice.randint(1, 3)
            for rank in range(world):
                hand = Hand(run, rank, world, at=at + dice.random())
                hand(start=dice.random())(idle=dice.random(), resume=base)
                step = base
                for _ in range(dice.randint(0, 6)):
                    spent = {name: dice.random() for name in dice.sample(sorted(BUCKETS), 4)}
                    step += dice.randint(0, 9)
                    hand(**spent, step_=step)
                    if dice.random() < 0.2:
                        step = dice.randint(0, step)
                        hand(idle=0, resume=step)
                done = max(done, step)
                longest = max(longest, hand.t)
                if dice.random() < 0.5:
                    hand(end=dice.random() < 0.5)
            at += 1 + longest / S + dice.random() * 3
        assert sum(seconds(run).values()) > 0


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    hand = Hand(tmp_path)(step=10, step_=10)
    with hand.path.open("a") as file:
        file.write('{"t":120000')
    assert seconds(tmp_path) == {"step": 10}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"t": -1, "s": {}}', "t = -1"),
        ('{"t": true, "s": {}}', "t = True"),
        ('{"t": 99000000000, "s": {"lunch": 1}}', "lunch"),
        ('{"t": 99000000000, "s": [1]}', "[1]"),
        ('{"t": 99000000000, "s": {"step": 98000000000}}', "9.000 s more than passed"),
        ('{"t": 99000000000, "s": {}, "step": "many"}', "many"),
        ('"' + "x" * 70_000, "longer than 65536 bytes"),
    ],
)
def test_a_damaged_ledger_is_named(tmp_path: Path, line: str, found: str) -> None:
    hand = Hand(tmp_path)(step=10, step_=10)
    with hand.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(LedgerError) as error:
        read_account(tmp_path)
    assert str(hand.path) in str(error.value)
    assert found in str(error.value)


def test_time_in_no_line_is_idle_and_noted(tmp_path: Path) -> None:
    hand = Hand(tmp_path)(step=10, step_=10)
    hand.t += 3 * S
    hand(step=1, step_=11)(end=True)
    assert seconds(tmp_path) == {"step": 11, "idle": 3}
    assert "3.000 s are in no line" in read_account(tmp_path).notes[0]


def test_what_is_not_there_or_newer_is_said(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger in"):
        read_account(tmp_path)
    with pytest.raises(LedgerError, match="no folder of that name"):
        read_account(tmp_path / "nowhere")
    hand = Hand(tmp_path)
    hand.path.write_text('{"ledger": 2}\n')
    with pytest.raises(LedgerError, match="format 2"):
        read_account(tmp_path)
