"""SQL over what runs leave, on files written by hand, where every figure is known, and on a run of two processes."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runs import make_run, run_processes

from torchwright.cli.group import cli
from torchwright.core.errors import UnknownName
from torchwright.train.ledger import read_account
from torchwright.train.query import lines, page, show
from torchwright.train.query.collect import collect
from torchwright.train.query.database import Database
from torchwright.train.query.questions import QUESTIONS, named
from torchwright.train.query.tables import TABLES, QueryError

pytest.importorskip("duckdb", reason="the extra `query` is not installed")

S = 1_000_000_000
ESCAPE = "\x1b[2J"


def ledger(run: Path, rank: int, at: float, *spent: dict[str, Any], world: int = 2) -> None:
    """A ledger of buckets in seconds, with marks beside them."""
    (run / "ledger").mkdir(parents=True, exist_ok=True)
    header = {
        "ledger": 1,
        "rank": rank,
        "world": world,
        "wall": int(at * S),
        "every": 2 * S,
        "launch": f"at{at}",
    }
    now, written = 0, [header]
    for line in spent:
        seconds = {name: int(value * S) for name, value in line.items() if name in BUCKETS_USED}
        now += sum(seconds.values())
        marks = {name.rstrip("_"): value for name, value in line.items() if name not in BUCKETS_USED}
        written.append({"t": now, "s": seconds} | marks)
    path = run / "ledger" / f"rank{rank:05d}-{int(at * S)}-1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in written))


BUCKETS_USED = frozenset({"start", "step", "data_wait", "checkpoint", "idle"})


def dump(run: Path, rank: int, created: list[float], *, done: bool = True) -> None:
    """A flight record of all-reduces made at these seconds; the last has ended if `done`."""
    folder = run / "stuck"
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        {
            "process_group": ["0", "default"],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": number,
            "time_created_ns": int(at * S),
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "retired": done or number < len(created),
            "frames": [{"filename": "/job/train.py", "line": 7, "name": "step"}],
        }
        for number, at in enumerate(created, 1)
    ]
    own = {"rank": rank, "world": 2, "taken_ns": 2000 * S, "reason": f"no progress{ESCAPE}"}
    (folder / f"rank_{rank}.json").write_text(json.dumps({"entries": entries, "torchwright": own}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks and two attempts, its figures, a checkpoint, dumps and a server's log."""
    folder = tmp_path / "run"
    ledger(
        folder,
        0,
        1000,
        {"start": 2},
        {"step": 8, "data_wait": 1, "step_": 8},
        {"checkpoint": 1, "checkpoint_": 8},
    )
    ledger(folder, 1, 1000, {"start": 2}, {"step": 6, "data_wait": 3, "step_": 8}, {"step": 1})
    ledger(folder, 0, 1020, {"start": 3, "resume": 8}, {"step": 4, "step_": 12}, {"idle": 0, "end": True})
    ledger(folder, 1, 1020, {"start": 3, "resume": 8}, {"step": 4, "step_": 12}, {"idle": 0, "end": True})
    figures = [
        {"event": "start", "at": 0, "torch": "2.13"},
        *({"step": step, "loss": 5 - step, "tokens_per_s": 100.0 * step} for step in range(1, 5)),
        {"event": "evaluation", "at": 4, "validation_loss": float("nan")},
        {"event": "stopped", "at": 4, "reason": f"x{ESCAPE}"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
    saved = folder / "checkpoints" / "step-00000008"
    saved.mkdir(parents=True)
    (saved / "a.safetensors").write_bytes(b"12345")
    content = {"format": 1, "step": 8, "tokens": 80, "run": {}, "facts": {}, "files": {"a.safetensors": "0"}}
    (saved / "checkpoint.json").write_text(json.dumps(content))
    dump(folder, 0, [1001, 1002, 1003], done=False)
    dump(folder, 1, [1001.5, 1002.25, 1002.5])
    log = [
        f"2026-11-29 10:00:{second:02d},000 torchwright.serve INFO req-{second:024x}: POST /v1/completions 200, done, "
        f"10 prompt tokens, 2 new, {0.1 * (second + 1):.3f} s"
        for second in range(20)
    ]
    log += [
        f"2026-11-29 10:00:30,000 torchwright.serve WARNING req-{'f' * 24}: GET /ready 503, done, 99.000 s",
        "2026-11-29 10:01:00,000 torchwright.serve ERROR a fault",
        "    Traceback (most recent call last):",
    ]
    (folder / "server.log").write_text("\n".join(log) + "\n")
    return folder


def ask(run: Path, question: str) -> list[dict[str, Any]]:
    rows = collect([run])
    known = named(question)
    answer = Database(rows).ask(known.sql if known else question, rows=1000)
    return show.plain(answer, rows)["rows"]


def test_lost_time_is_the_time_reports(run: Path) -> None:
    account = read_account(run)
    found = {row["cause"]: row["seconds"] for row in ask(run, "lost time by cause")}
    expected = {cause: seconds for cause, seconds in account.seconds().items() if seconds and cause != "step"}
    assert found == pytest.approx(expected)
    (everything,) = ask(run, "SELECT sum(seconds / ranks) AS wall FROM ledger")
    assert everything["wall"] == pytest.approx(account.wall)


def test_every_question_has_rows_of_this_run(run: Path) -> None:
    assert len(QUESTIONS) == 10
    for name in QUESTIONS:
        assert ask(run, name), name


def test_the_slowest_rank_comes_last_to_collectives(run: Path) -> None:
    first, second = ask(run, "slowest-rank")
    assert (first["rank"], first["came_last"], first["calls"]) == (1, 2, 3)
    assert first["late_ms"] == pytest.approx((500 + 250 + 0) / 3)
    assert first["data_wait_s"] == 3
    assert (second["rank"], second["came_last"]) == (0, 1)


def test_restarts_have_what_they_cost(run: Path) -> None:
    first, second = ask(run, "restarts")
    assert (first["how_ended"], first["saved_step"], first["lost_work_s"]) == ("died", 8, 0.5)
    assert (second["resumed_step"], second["reached_step"], second["recovery_s"]) == (8, 12, 3)


def test_steps_requests_and_checkpoints_are_what_the_files_say(run: Path) -> None:
    assert [row["tokens_per_s"] for row in ask(run, "tokens per second by step")] == [100, 200, 300, 400]
    assert [row["step"] for row in ask(run, "slowest steps")] == [1, 2, 3, 4]
    assert ask(run, "SELECT validation_loss FROM steps WHERE step = 4") == [{"validation_loss": "NaN"}]
    (slow,) = ask(run, "requests over p99")
    assert (slow["seconds"], slow["prompt_tokens"], slow["new_tokens"]) == (2.0, 10, 2)
    path, probe = ask(run, "requests by path")
    assert (probe["path"], probe["failed"]) == ("/ready", 1)
    assert (path["requests"], path["failed"], path["new_tokens"]) == (20, 0, 40)
    (saved,) = ask(run, "checkpoints")
    assert (saved["step"], saved["tokens"], saved["bytes"]) == (8, 80, 5)
    assert ask(run, "SELECT count(*) AS n FROM log WHERE time IS NULL") == [{"n": 1}]


def test_calls_that_have_not_ended_are_named_with_their_ranks(run: Path) -> None:
    (call,) = ask(run, "calls not ended")
    assert (call["seq"], call["ranks"], call["place"]) == (3, [0], "job/train.py:7 step")


def test_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text((run / "server.log").read_text())
    rows = collect([run, other, run])
    answer = Database(rows).ask("SELECT run, count(*) FROM requests GROUP BY run ORDER BY run", rows=9)
    assert answer.rows == [(str(other), 21), (str(run), 21)]


DAMAGE = {
    "cut": (b'{"step": 5, "loss": 1', "not JSON"),
    "list": (b"[1]", "not an object"),
    "deep": (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "deep"),
    "step": (b'{"step": 1e999, "loss": 1}', "no step"),
    "huge step": (b'{"step": 99999999999999999999999, "loss": 1}', "no step"),
    "bytes": (b"\xff\xfe\x00", "not JSON"),
    "long": (b"x" * (lines.LONGEST_LINE + 5), "longer than"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_lines_are_counted_and_named_and_the_others_read(run: Path, name: str) -> None:
    line, fault = DAMAGE[name]
    whole = (run / "metrics.jsonl").read_bytes()
    first, rest = whole.split(b"\n", 1)
    (run / "metrics.jsonl").write_bytes(first + b"\n" + line + b"\n" + rest)
    rows = collect([run])
    assert rows.problems == 1
    ((_, file, number, found),) = rows.of["problems"]
    assert (file, number) == ("metrics.jsonl", 2)
    assert fault in found
    assert [row["step"] for row in ask(run, "tokens per second by step")] == [1, 2, 3, 4]
    assert "metrics.jsonl, line 2" in show.notes(rows)[1]


def test_files_that_are_damaged_leave_the_others(run: Path) -> None:
    (run / "stuck" / "rank_1.json").write_text("{")
    (run / "stuck" / "nccl_trace_rank_7").write_bytes(b"\x80\x04.")
    (run / "checkpoints" / "step-00000009").mkdir()
    (run / "checkpoints" / "step-00000010.new").mkdir()
    os.mkfifo(run / "pipe.log")
    (run / "ledger" / "rank00001-1-1.jsonl").write_text('{"ledger": 99}\n')
    rows = collect([run])
    files = {row[1] for row in rows.of["problems"]}
    assert files == {
        "stuck/rank_1.json",
        "stuck/nccl_trace_rank_7",
        "checkpoints/step-00000009",
        "checkpoints/step-00000010.new",
        "pipe.log",
        "ledger/rank00001-1-1.jsonl",
    }
    assert len(rows.of["dumps"]) == 1
    assert len(rows.of["attempts"]) == 2


def test_numbers_beyond_a_column_are_infinite_or_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 5, "loss": {10**400}, "odd": "text", "\\ud800": 1}}\n')
    assert ask(run, "SELECT loss FROM steps WHERE step = 5") == [{"loss": "Infinity"}]
    assert ask(run, "SELECT name FROM metrics WHERE step = 5 ORDER BY 1") == [{"name": "?"}, {"name": "loss"}]


def test_a_table_has_an_end(run: Path) -> None:
    rows = collect([run], most=3)
    assert len(rows.of["metrics"]) == 3
    assert any("more than 3 rows" in row[3] for row in rows.of["problems"])


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM '{file}'",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_json('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM glob('/*')",
        "FROM sniff_csv('{file}')",
        "SELECT * FROM rows",
        "SELECT 1; ATTACH '{folder}/x.db'",
        "WITH a AS (SELECT 1) INSERT INTO steps (step) SELECT 2",
        "EXPLAIN ANALYZE COPY steps TO '{folder}/out.csv'",
        "FROM duckdb_extensions() WHERE loaded AND install_mode = 'REPOSITORY' AND error('x')",
    ],
)
def test_sql_reaches_nothing_but_the_tables(run: Path, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("word\nhidden\n")
    database = Database(collect([run]))
    with pytest.raises(QueryError):
        assert not database.ask(sql.format(file=secret, folder=tmp_path), rows=10).rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret.csv"]


def test_the_configuration_is_locked(run: Path) -> None:
    database = Database(collect([run]))
    for setting in ("enable_external_access = true", "memory_limit = '64GB'", "lock_configuration = false"):
        with pytest.raises(Exception, match="locked"):
            database._connection.execute(f"SET {setting}")


def test_a_query_stops_at_its_limits(run: Path) -> None:
    database = Database(collect([run]))
    with pytest.raises(QueryError, match=r"longer than 0\.2 seconds"):
        database.ask("SELECT count(*) FROM range(1000000000000) a, range(1000000) b", rows=1, seconds=0.2)
    with pytest.raises(QueryError, match="holds more than"):
        database.ask("SELECT list(x) FROM range(10000000000) t(x)", rows=1)
    endless = database.ask("SELECT * FROM range(100000000000)", rows=2)
    assert (endless.rows, endless.cut) == ([(0,), (1,)], True)
    with pytest.raises(QueryError, match="too long"):
        database.ask("SELECT 1" + " " * 200_000, rows=1)


def test_words_that_are_no_question_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'slowest rank'"):
        named("slow rank")


def test_a_path_without_anything_is_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "no ledger"), (tmp_path / "none", "no such folder")):
        with pytest.raises(QueryError, match=words):
            collect([path])


def verb(*words: str) -> Any:
    return CliRunner().invoke(cli, ["query", *words], catch_exceptions=False)


def test_nothing_that_a_terminal_acts_on_is_printed(run: Path) -> None:
    hostile = run.rename(run.with_name(f"run{ESCAPE}"))
    (hostile / f"odd{ESCAPE}.log").write_text(f"x{ESCAPE}\u202e\n")
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 5, "{ESCAPE}": }}\n')
    for form in ((), ("--json",), ("--csv",)):
        done = verb(
            str(hostile), "SELECT message, file, run FROM log WHERE time IS NULL ORDER BY file", *form
        )
        assert done.exit_code == 0
        assert "\x1b" not in done.output
        assert "\u202e" not in done.output


def test_forms_of_an_answer(run: Path) -> None:
    question = (str(run), "SELECT step, loss FROM steps ORDER BY step", "--rows", "2")
    assert verb(*question, "--csv").stdout == "step,loss\n1,4.0\n2,3.0\n"
    found = json.loads(verb(*question, "--json").stdout)
    assert found["rows"] == [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}]
    assert found["cut"]
    assert "the first 2 rows" in verb(*question).stdout
    assert "comes from stuck/rank_*.json" in verb(str(run / "server.log"), "calls not ended").stderr


def test_list_and_schema_name_everything() -> None:
    assert [each["name"] for each in json.loads(verb("--list", "--json").stdout)] == list(QUESTIONS)
    assert list(json.loads(verb("--schema", "--json").stdout)) == list(TABLES)
    for words in ((), ("run",), ("--list", "run"), ("run", "SELECT 1", "--json", "--csv")):
        assert verb(*words).exit_code == 2


def test_the_page_has_every_question_and_escapes_what_files_say(run: Path, tmp_path: Path) -> None:
    hostile = run.rename(run.with_name("<script>run"))
    rows = collect([hostile])
    text = page.render(Database(rows), rows, [str(hostile)])
    assert "<script" not in text
    assert text == page.render(Database(rows), rows, [str(hostile)])
    assert all(question.asks in html.unescape(text) for question in QUESTIONS.values())
    assert "<svg" in text
    done = verb(str(hostile / "server.log"), "--page", str(tmp_path / "new" / "page.html"))
    assert done.exit_code == 0
    assert "`ledger` comes from ledger/rank*.jsonl" in (tmp_path / "new" / "page.html").read_text()


@pytest.mark.slow  # two processes of torch
def test_a_run_of_two_processes_answers_by_rank(tmp_path: Path) -> None:
    file = make_run(tmp_path, layout={"dp_replicate": 2})
    assert [code for code, _ in run_processes(file, world=2)] == [0, 0]
    out = file.parent / "out"
    assert {row["rank"] for row in ask(out, "slowest rank")} == {0, 1}
    assert [row["step"] for row in ask(out, "tokens per second by step")] == [1, 2, 3, 4, 5, 6]
    assert ask(out, "calls not ended") == []
    assert {row["last_most_often"] for row in ask(out, "late at collectives")} <= {0, 1}
    rows = collect([out])
    assert rows.problems == 0
    found = sum(row["seconds"] for row in ask(out, "SELECT sum(seconds / ranks) AS seconds FROM ledger"))
    assert found == pytest.approx(read_account(out).wall)
