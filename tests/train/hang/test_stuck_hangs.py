"""Real hangs in four gloo processes, each named by the ranks themselves; and twenty clean programs, none accused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import hang_programs as programs
import pytest

from preloaded import forking
from torchwright.cli import main
from torchwright.train.hang.analyse import analyse
from torchwright.train.hang.read import read_dumps
from torchwright.train.hang.show import plain_text

LIMIT = 200
"""Seconds for everything together on a busy machine."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and dumps of four fresh processes for each program. A server that has torch already forks them.

    Of the programs that hang, those run whose tests do.
    """
    asked = {item.name for item in request.session.items if item.path == request.path}
    folder = tmp_path_factory.mktemp("hangs")
    context = forking()
    jobs = [(programs.run_clean, (folder,))]
    jobs += [
        (programs.hang, (folder, hang.__name__))
        for hang in programs.HANGS
        if any(f"[{hang.__name__}]" in name for name in asked)
    ]
    until = time.monotonic() + LIMIT
    for some in (jobs[:1], jobs[1:6], jobs[6:]):
        processes = [
            context.Process(target=target, args=(rank, *arguments))
            for target, arguments in some
            for rank in range(programs.WORLD)
        ]
        answers = [folder / f"{arguments[1]}.txt" for _, arguments in some if len(arguments) > 1]
        for process in processes:
            process.start()
        while time.monotonic() < until and (
            not all(answer.exists() for answer in answers) if answers else any(map(_lives, processes))
        ):
            time.sleep(0.1)
        for process in processes:
            process.kill()
            process.join()
    return folder


def _lives(process: Any) -> bool:
    return process.is_alive()


EXPECTED = {
    "rank_2_never_comes": ("never came", [2], r"hang_programs.py:\d+ reading_a_batch_for_ever instead"),
    "rank_2_has_another_shape": (
        "shape",
        [2],
        r"all_reduce of \[12\] float against all_reduce of \[8\] float",
    ),
    "rank_2_has_another_dtype": (
        "dtype",
        [2],
        r"all_reduce of \[8\] double against all_reduce of \[8\] float",
    ),
    "rank_1_swaps_two_calls": (
        "order",
        [1],
        r"rank 1 called all_gather .* where ranks 0, 2 and 3 called all_reduce",
    ),
    "rank_2_uses_the_wrong_group": ("wrong group", [2], r"on group half \(ranks 2 and 3\)"),
    "rank_2_turns_two_groups_round": (
        "order",
        [0, 2],
        r"rank (0 waits for rank 2|2 waits for rank 0) .* group pair \(ranks 0",
    ),
    "rank_1_fails": ("never came", [1], r"It ended by ValueError: token 70000 is not in the vocabulary"),
    "rank_3_has_one_batch_less": ("never came", [3], r"Rank 3 had finished its program"),
    "rank_0_does_not_send": (
        "never came",
        [0],
        r"recv from rank 0 of \[2\] float32, in which rank 1 has waited",
    ),
    "rank_1_is_killed": (
        "dead",
        [1],
        r"Rank 1 is dead or cannot run Python: of 4 ranks it alone left no dump",
    ),
}


QUICK = {"rank_2_never_comes", "rank_1_is_killed"}
"""A rank elsewhere, and one without a dump; `test_stuck_analyse` has dumps of the other kinds."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
def test_a_hang_is_named_by_its_ranks(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, ranks, words = EXPECTED[name]
    dumps = folder / name
    assert main(["why-stuck", str(dumps), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], sorted(facts["ranks"])) == (kind, ranks), facts["answer"]
    assert re.search(words, facts["answer"])
    assert facts["stuck"]
    lines = [row["line"] for row in facts["rows"] if row["call"]]
    assert lines
    # The call site of each side.
    assert all(re.search(r"\bhang/hang_programs.py:\d+ ", line) for line in lines)
    said = (folder / f"{name}.txt").read_text()
    assert said.startswith(f"{kind}: ")
    assert f"torchwright why-stuck {dumps}" in said


@pytest.mark.parametrize("number", range(programs.CLEAN))
def test_a_clean_program_is_not_accused(folder: Path, number: int) -> None:
    dumps, notes = read_dumps(folder / f"clean_{number}")
    assert notes == []
    finding = analyse(dumps, patience=30)  # a busy machine may well make a rank late
    assert finding.kind == "nothing", plain_text(finding)
    assert re.search(r"[1-9]\d* calls of ranks 0 to 3", finding.answer)


def test_a_slow_rank_is_named(folder: Path) -> None:
    finding = analyse(read_dumps(folder / f"clean_{programs.CLEAN}")[0])
    assert (finding.kind, finding.ranks) == ("slow", (3,))
    assert re.search(
        r"came to call \d+ of the whole world's group, all_reduce of \[8\] float, 1\.\d s after",
        finding.answer,
    )


def test_messages_are_recorded(folder: Path) -> None:
    """Gloo's own recorder has no sends and receives; ours has both halves of the ring's."""
    dumps, _ = read_dumps(folder / f"clean_{programs.CLEAN - 1}")
    for rank, dump in dumps.items():
        halves = {(call.op, call.peer) for call in dump.messages}
        assert {("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)} <= halves
        assert all(call.done for call in dump.messages)
