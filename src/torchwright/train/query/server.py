"""The rows of a server's log, and of the requests that it names."""

from __future__ import annotations

from pathlib import Path

from torchwright.core.request_line import read_entry, read_line
from torchwright.train.query.lines import files, text, text_lines
from torchwright.train.query.tables import Row, Rows

LOGS = "logs"
"""The folder of logs in a run folder; those in the folder itself are read too."""


def add_logs(run: str, folder: Path, rows: Rows) -> None:
    """Add the lines of every *.log in a folder and in its `logs`."""
    for place in (folder, folder / LOGS):
        for path in files(place, "*.log", lambda line, reason: rows.problem(run, LOGS, line, reason)):
            add_log(run, path, rows)


def add_log(run: str, path: Path, rows: Rows) -> None:
    """Add the lines of one log."""
    lines, requests = list[Row](), list[Row]()
    for number, raw in text_lines(path, lambda line, reason: rows.problem(run, path.name, line, reason)):
        written = raw.decode("utf-8", "replace")
        line = read_line(written)
        if line is None:
            lines.append((run, path.name, number, None, None, None, text(written)))
            continue
        lines.append((run, path.name, number, line.time, line.logger, line.level, text(line.message)))
        entry = read_entry(line.message)
        if entry is not None:
            requests.append(
                (
                    run,
                    line.time,
                    entry.id,
                    entry.method,
                    entry.path,
                    entry.status,
                    entry.reason,
                    entry.seconds,
                    entry.prompt_tokens,
                    entry.new_tokens,
                    entry.user,
                )
            )
    rows.add("log", lines)
    rows.add("requests", requests)
