"""DuckDB over the rows: it opens no file, loads no extension, and stops at limits of memory, time and rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchwright.train.query.tables import TABLES, QueryError, Rows

MEMORY = "1GB"
"""The most that DuckDB holds; the tables need less at their `MOST_ROWS`."""
SECONDS = 60.0
LONGEST_SQL = 100_000
"""Characters; DuckDB's parser is native code that no timer interrupts."""
BATCH = 20_000
"""Rows that are handed over at a time."""
LOCKED: dict[str, Any] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_unsigned_extensions": "false",
    "allow_persistent_secrets": "false",
    # Names in SQL are tables, never variables of this process.
    "python_enable_replacements": "false",
    "temp_directory": "",
    "memory_limit": MEMORY,
    # With several, ranks that tie take turns at being the one that an answer names.
    "threads": "1",
}
READS = frozenset({"SELECT", "EXPLAIN"})
"""Kinds of statement that are run; DESCRIBE, SUMMARIZE, SHOW and VALUES are SELECT to DuckDB."""


@dataclass(frozen=True)
class Answer:
    """The rows of an answer."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    cut: bool
    """True if there were more than were asked for."""


class Database:
    """The tables of the rows, in memory."""

    def __init__(self, rows: Rows) -> None:
        """Load the tables, then lock the configuration. Raises `QueryError` without DuckDB."""
        self._duckdb = _duckdb()
        self._connection = self._duckdb.connect(":memory:", config=LOCKED)
        for name, table in TABLES.items():
            columns = ", ".join(f"{column.name} {column.type}" for column in table.columns)
            self._connection.execute(f"CREATE TABLE {name} ({columns})")
            # A list for each column: an INSERT for each row takes a hundred times as long.
            lists = ", ".join(f"unnest(?::{column.type}[])" for column in table.columns)
            held = rows.of[name]
            for begin in range(0, len(held), BATCH):
                columns_of = [list(column) for column in zip(*held[begin : begin + BATCH], strict=True)]
                self._connection.execute(f"INSERT INTO {name} SELECT {lists}", columns_of)
        self._connection.execute("SET lock_configuration = true")

    def ask(self, sql: str, *, rows: int, seconds: float = SECONDS) -> Answer:
        """Return the first `rows` rows of an answer.

        Raises `QueryError` for what is not one SELECT, for DuckDB's own errors, and when the time is over.
        """
        self._check(sql)
        with self._limited(seconds):
            found = self._connection.execute(sql)
            columns = tuple(column[0] for column in found.description or ())
            held = found.fetchmany(rows + 1)
        return Answer(columns, held[:rows], len(held) > rows)

    def _check(self, sql: str) -> None:
        if len(sql) > LONGEST_SQL:
            raise QueryError(
                "the SQL is too long", found=f"{len(sql)} characters", allowed=f"up to {LONGEST_SQL}"
            )
        try:
            statements = self._connection.extract_statements(sql)
        except self._duckdb.Error as error:
            raise _refused(error) from None
        if len(statements) != 1 or statements[0].type.name not in READS:
            raise QueryError(
                "a query is one statement that reads",
                found=", ".join(statement.type.name for statement in statements[:5]) or "nothing",
                allowed="SELECT, WITH, FROM, VALUES, DESCRIBE, SUMMARIZE, EXPLAIN",
            )

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """Interrupt the query when its time is over, and turn DuckDB's errors into ours."""
        timer = threading.Timer(seconds, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except self._duckdb.InterruptException:
            raise QueryError(
                f"the query took longer than {seconds:g} seconds",
                next="ask for less, or give it more by --seconds",
            ) from None
        except self._duckdb.OutOfMemoryException:
            raise QueryError(
                f"the query holds more than {MEMORY}",
                next="ask for less: aggregate, or name the columns and the steps that you need",
            ) from None
        except self._duckdb.Error as error:
            raise _refused(error) from None
        finally:
            timer.cancel()


def _refused(error: Exception) -> QueryError:
    return QueryError(
        "the query cannot be answered",
        found=str(error),
        next="--schema lists the tables and columns, --list the questions with a name",
    )


def _duckdb() -> Any:
    try:
        import duckdb  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise QueryError(
            "the package that answers SQL is not installed",
            found=str(error),
            next="`pip install 'torchwright[query]'`",
        ) from error
    return duckdb
