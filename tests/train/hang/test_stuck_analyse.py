"""Dumps written by hand: NCCL's forms, pickles, damaged files, and kinds of hangs that gloo cannot have."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchwright.cli import main
from torchwright.train.hang.analyse import analyse
from torchwright.train.hang.calls import DumpError, Frame, RankCall, conflict
from torchwright.train.hang.finding import Finding
from torchwright.train.hang.read import dump_of, read_dumps

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND
LINES = {"loss": 10, "grad": 20, "log": 30}


def entry(
    seq: int, op: str = "all_reduce", *, at: float = 0, line: str = "", group: str = "0", **more: Any
) -> dict[str, Any]:
    """As NCCL's recorder writes it."""
    fields: dict[str, Any] = {
        "record_id": seq - 1, "pg_id": 0, "process_group": [group, "default_pg"], "collective_seq_id": seq,
        "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"nccl:{op}", "time_created_ns": T0 + int(at * SECOND),
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
        "state": "completed", "retired": True, "is_p2p": False,
    }  # fmt: skip
    if line:
        fields["frames"] = [
            {"filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 1, "name": op},
            {"filename": "/home/someone/train.py", "line": LINES[line], "name": line},
        ]
    return fields | more


def content(entries: Sequence[dict[str, Any]], world: int = 2, **groups: list[int]) -> dict[str, Any]:
    config = {"0": list(range(world))} | groups
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else name, "ranks": str(ranks)}
            for name, ranks in config.items()
        },
        "entries": list(entries),
    }


def finding(*ranks: Sequence[dict[str, Any]], **groups: list[int]) -> Finding:
    return analyse({
        rank: dump_of(content(entries, len(ranks), **groups), rank) for rank, entries in enumerate(ranks)
    })  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"torchwright": {"world": 10**12}},
        {"torchwright": {"rank": -1}},
        {"pg_config": {"0": {"name": "0", "ranks": "[0, 999999999999]"}}},
    ],
    ids=["world", "rank", "members"],
)
def test_numbers_of_ranks_that_no_job_has_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "rank_0.json").write_text(json.dumps(content([entry(1)]) | wrong))
    with pytest.raises(DumpError, match="as a rank, or as the number of ranks"):
        read_dumps(tmp_path)


def test_a_rank_in_a_files_name_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "rank_999999999999.json").write_text(json.dumps(content([entry(1)])))
    with pytest.raises(DumpError, match="rank 999999999999 in its name"):
        read_dumps(tmp_path)


def test_calls_of_any_number_are_compared_at_once() -> None:
    """All numbers between two calls were looked at, which for a damaged one did not end."""
    found = finding([entry(1), entry(2**62, retired=False, state="started")], [entry(1)])
    assert (found.kind, found.ranks, found.seq) == ("never came", (1,), 2**62)


def test_without_stacks_a_crosswise_next_call_tells_a_swap_from_a_shape() -> None:
    big: dict[str, Any] = {"input_sizes": [[8]]}
    swapped = finding([entry(1), entry(2, **big)], [entry(1, **big), entry(2)], [entry(1), entry(2, **big)])
    assert (swapped.kind, swapped.ranks) == ("order", (1,))
    assert "the two calls are swapped" in swapped.answer
    other = finding([entry(1)], [entry(1, **big)], [entry(1)])
    assert (other.kind, other.ranks) == ("shape", (1,))


def test_a_call_left_out_and_one_too_many_are_said() -> None:
    usual = [entry(1, "all_gather"), entry(2, "reduce_scatter"), entry(3, "broadcast")]
    left_out = finding(usual, usual, [entry(1, "all_gather"), entry(2, "broadcast")])
    assert (left_out.kind, left_out.ranks, left_out.seq) == ("order", (2,), 2)
    assert "Rank 2 left out a call" in left_out.answer
    extra = finding(usual, usual, [entry(1, "all_gather"), entry(2, "barrier"), entry(3, "reduce_scatter")])
    assert (extra.kind, extra.ranks) == ("order", (2,))
    assert "one call more" in extra.answer


def program(*lines: str) -> list[dict[str, Any]]:
    """All-reduces of one shape, one after another, from these lines."""
    return [entry(seq, at=seq, line=line) for seq, line in enumerate(lines, 1)]


STEP = ["loss", "grad", "grad", "log"]


def test_a_skip_is_found_by_lines_where_shapes_are_equal() -> None:
    """By numbers alone the rank never came to the last call."""
    usual = program(*STEP * 6)
    for before, left_out, words in (
        (
            STEP * 2 + ["loss", "grad"],
            ["grad"],
            "Rank 2 left out a call: what it made is the others' next one",
        ),
        (STEP * 2 + ["loss"], ["grad"] * 2, "Rank 2 left out 2 calls: what it made is the others' call 12"),
        (STEP * 5 + ["loss", "grad"], ["grad"], "Rank 2 left out a call"),
    ):
        rest = (STEP * 6)[len(before) + len(left_out) :]
        result = finding(usual, usual, program(*before, *rest), usual)
        # Of two calls from one line the second counts as left out.
        seq = len(before) + 1
        assert (result.kind, result.ranks, result.seq) == ("order", (2,), seq), result.answer
        assert words in result.answer
        assert f"train.py:{LINES[rest[0]]} {rest[0]}, where ranks 0, 1 and 3" in result.answer
    extra = program(*STEP * 2, "log", *STEP * 3)
    result = finding(extra, usual[:20], usual[:20], usual[:20])
    assert (result.kind, result.ranks, result.seq) == ("order", (0,), 9)
    assert "Rank 0 made one call more than the others" in result.answer


def test_a_skip_is_not_taken_for_the_circle_that_it_ends_in() -> None:
    """Rank 1 left out a call on the world; later it waits in its half, and the others for it on the world."""
    usual, groups = program(*STEP * 3), {"half": [0, 1]}
    short = program(*STEP, *STEP[1:], *STEP)
    result = finding(usual, [*short, entry(1, at=30, group="half", line="loss")], usual, **groups)
    assert (result.kind, result.ranks, result.seq) == ("order", (1,), 5)
    assert "left out a call" in result.answer


def test_other_lines_are_no_skip() -> None:
    """Rank 0 logs from a line of its own; rank 2 did not come to the last call, or its ring has lost the place."""
    usual, first = program(*STEP * 6), program(*["loss", "log", "grad", "log"] * 6)
    result = finding(first, usual, usual[:-1])
    assert (result.kind, result.ranks, result.seq) == ("never came", (2,), 24)
    late = [call | {"record_id": call["record_id"] + 100} for call in usual]
    shifted = [call | {"collective_seq_id": call["collective_seq_id"] - 1} for call in late[1:]]
    assert finding(late, late, shifted).kind == "never came"


def test_another_line_with_another_shape_is_another_call() -> None:
    result = finding(
        [entry(1, line="loss")], [entry(1, line="loss")], [entry(1, line="grad", input_sizes=[[9]])]
    )
    assert (result.kind, result.ranks) == ("order", (2,))
    assert "someone/train.py:20 grad" in result.answer
    assert "someone/train.py:10 loss" in result.answer


def test_two_sides_of_equal_number_are_both_named() -> None:
    assert finding([entry(1)], [entry(1, input_dtypes=["BFloat16"])]).ranks == (0, 1)


def test_a_rank_that_waits_elsewhere_is_not_the_culprit() -> None:
    """In a 2 by 2 mesh rank 3 stands still; ranks 2, 1 and 0 come to wait one after another."""
    groups = {"tp01": [0, 1], "tp23": [2, 3], "dp02": [0, 2], "dp13": [1, 3]}

    def calls(*made: tuple[int, str, float]) -> list[dict[str, Any]]:
        return [entry(seq, group=group, at=at) for seq, group, at in made]

    result = finding(
        calls((1, "tp01", 0), (1, "dp02", 1), (2, "tp01", 2), (2, "dp02", 5)),
        calls((1, "tp01", 0), (1, "dp13", 1), (2, "tp01", 2), (2, "dp13", 5)),
        calls((1, "tp23", 0), (1, "dp02", 1), (2, "tp23", 3)),
        calls((1, "tp23", 0), (1, "dp13", 1)),
        **groups,
    )
    assert (result.kind, result.ranks, result.group) == ("never came", (3,), "group tp23")


def test_a_ring_that_was_full_accuses_nobody_of_what_it_lost() -> None:
    early = [entry(seq, at=seq) for seq in range(1, 6)]
    late = [entry(seq, at=seq, record_id=seq + 100) for seq in range(4, 6)]
    assert finding(early, late).kind == "nothing"
    assert finding(early, [entry(1, group="other", record_id=200)], other=[1]).kind == "nothing"
    assert finding(early, []).kind == "never came"


def test_a_missing_dump_is_a_dead_rank() -> None:
    dumps = {rank: dump_of(content([entry(1)], 4), rank) for rank in (0, 1, 3)}
    result = analyse(dumps)
    assert (result.kind, result.ranks) == ("dead", (2,))
    waiting = content([entry(1), entry(2, at=1, state="started", retired=False)], 4)
    result = analyse({rank: dump_of(waiting, rank) for rank in (0, 1, 3)})
    assert (result.kind, result.ranks, result.seq) == ("dead", (2,), 2)
    assert [row.rank for row in result.rows] == [2, 0, 1, 3]


def test_a_call_that_all_made_and_none_ended_is_the_network() -> None:
    hung = [entry(1), entry(2, at=1, state="started", retired=False)]
    own = {"torchwright": {"rank": 0, "world": 2, "taken_ns": T0 + 100 * SECOND}}
    result = analyse(
        {
            rank: dump_of(content(hung) | {"torchwright": own["torchwright"] | {"rank": rank}}, rank)
            for rank in (0, 1)
        }
    )
    assert (result.kind, result.seq) == ("not ended", 2)


def test_who_was_waited_for_a_moment_only_is_not_accused() -> None:
    def dump(rank: int, seqs: Sequence[int], taken: float) -> Any:
        own = {"torchwright": {"rank": rank, "world": 2, "taken_ns": T0 + int(taken * SECOND)}}
        return dump_of(content([entry(seq, at=seq) for seq in seqs]) | own, rank)

    running = {0: dump(0, [1, 2, 3], 3.5), 1: dump(1, [1, 2], 3.4)}
    assert analyse(running).kind == "nothing"
    assert analyse(running, patience=0.3).kind == "never came"
    assert analyse({0: dump(0, [1, 2, 3], 9), 1: dump(1, [1, 2], 9)}).ranks == (1,)


def test_a_rank_that_failed_is_not_given_patience() -> None:
    def dump(rank: int, seqs: Sequence[int], **own: Any) -> Any:
        facts = {"rank": rank, "world": 2, "taken_ns": T0 + 4 * SECOND} | own
        return dump_of(content([entry(seq, at=seq) for seq in seqs]) | {"torchwright": facts}, rank)

    failure = {"failed": True, "reason": "ValueError: no such token"}
    result = analyse({0: dump(0, [1, 2, 3, 4]), 1: dump(1, [1, 2, 3], **failure)})
    assert (result.kind, result.ranks) == ("never came", (1,))
    assert "It ended by ValueError: no such token" in result.answer
    result = analyse({0: dump(0, [1, 2]), 1: dump(1, [1, 2], **failure)})
    assert (result.kind, result.ranks) == ("failed", (1,))
    result = analyse({0: dump(0, [1, 2, 3, 4]), 1: dump(1, [1, 2, 3], finished=True)})
    assert (result.kind, result.ranks) == ("never came", (1,))
    assert "had finished its program" in result.answer


def call(
    op: str, inputs: list[int], outputs: list[list[int]] | None = None, dtype: str = "Float"
) -> RankCall:
    return RankCall(
        "g",
        1,
        op,
        (tuple(inputs),) if inputs else (),
        (dtype,) if inputs else (),
        tuple(map(tuple, outputs or [])),
        ("Float",),
        0,
        False,
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (call("all_reduce", [2, 6]), call("all_reduce", [12]), None),
        (call("all_reduce", [2, 6]), call("all_reduce", [13]), "shape"),
        (call("all_reduce", [4]), call("all_reduce", [4], dtype="Half"), "dtype"),
        (call("all_reduce", [4]), call("broadcast", [4]), "op"),
        (call("all_to_all", [4]), call("all_to_all", [9]), None),
        (call("all_to_all", [4]), call("all_to_all", [4], dtype="Half"), "dtype"),
        (call("scatter", [4], [[4]]), call("scatter", [], [[4]]), None),
        (call("scatter", [], [[4]]), call("scatter", [], [[5]]), "shape"),
        (call("all_gather", [3], [[3], [5]]), call("all_gather", [5], [[3], [5]]), None),
        (call("all_gather", [3], [[2, 3]]), call("all_gather", [5], [[2, 5]]), "shape"),
        (call("barrier", []), call("barrier", [1]), None),
    ],
)  # fmt: skip
def test_what_contradicts_what(one: RankCall, other: RankCall, expected: str | None) -> None:
    assert conflict(one, other) == conflict(other, one) == expected


def test_the_programs_own_line_is_the_site() -> None:
    frames = tuple(
        Frame(file, 1, "f")
        for file in (
            "/x/torch/distributed/distributed_c10d.py", "/x/torch/_ops.py", "/me/torchtitan/train.py", "/x/runpy.py",
        )
    )  # fmt: skip
    assert str(RankCall("g", 1, "a", (), (), (), (), 0, False, frames).path[0]) == "torchtitan/train.py:1 f"


# ------------------------------------------------------------------------------------------------------------ files


def save(folder: Path, name: str, data: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


def test_pickles_need_trust_and_may_call_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        save(tmp_path, f"nccl_trace_rank_{rank}", pickle.dumps(content([entry(1)] * (1 - rank))))
    assert main(["why-stuck", str(tmp_path)]) == 2
    assert "--trust" in capsys.readouterr().err
    assert main(["why-stuck", str(tmp_path), "--trust"]) == 0
    assert capsys.readouterr().out.startswith("never came: Rank 1 never came")

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    save(tmp_path, "nccl_trace_rank_1", pickle.dumps(Bomb()))
    with pytest.raises(DumpError, match="a dump is plain data"):
        read_dumps(tmp_path, trust=True)
    assert not (tmp_path / "exploded").exists()


def test_dumps_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    for rank, taken, started in ((0, 100, 90), (1, 100, 91), (2, 50, 40)):
        own = {"rank": rank, "world": 2, "taken_ns": taken, "started_ns": started}
        save(tmp_path, f"rank_{rank}.json", content([entry(1)]) | {"torchwright": own})
    dumps, notes = read_dumps(tmp_path)
    assert (sorted(dumps), len(notes)) == ([0, 1], 1)
    assert "rank 2's dump is from before" in notes[0]


def test_a_run_that_began_after_every_dump_is_a_contradiction(tmp_path: Path) -> None:
    for rank in (0, 1):
        own = {"rank": rank, "world": 2, "taken_ns": 100, "started_ns": 2**80}
        save(tmp_path, f"rank_{rank}.json", content([entry(1)]) | {"torchwright": own})
    with pytest.raises(DumpError, match="contradict each other"):
        read_dumps(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"[1]", b"null", b"\x80", b"[" * 100_000, b'{"entries": [{}]}', b'{"entries": 7}',
        b'{"pg_config": {"0": {"ranks": ["x"]}}}', b'{"torchwright": {"world": "many"}}', b'{"torchwright": []}',
        json.dumps(content([entry(1, input_sizes="abc")])).encode(),
        json.dumps(content([entry(1, profiling_name=7)])).encode()[:-1],
    ],
)  # fmt: skip
def test_a_damaged_dump_is_named(tmp_path: Path, data: bytes) -> None:
    path = save(tmp_path, "rank_0.json", data)
    with pytest.raises(DumpError) as error:
        read_dumps(tmp_path, trust=True)
    assert str(path) in str(error.value)


def test_what_is_no_folder_of_dumps_is_said(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no file whose name ends in a rank"):
        read_dumps(tmp_path)
    with pytest.raises(DumpError, match="no folder of that name"):
        read_dumps(tmp_path / "nowhere")
    for name in ("rank_0.json", "nccl_trace_rank_0"):
        save(tmp_path, name, content([]))
    with pytest.raises(DumpError, match="two dumps of rank 0"):
        read_dumps(tmp_path)


def test_escapes_in_a_dump_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "rank_0.json", content([entry(1, "all\x1b[2J[red]_reduce")]))
    save(tmp_path, "rank_1.json", content([]))
    assert main(["why-stuck", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "all[red]_reduce" in out
