"""The access log's entries, written and read back, with what clients choose in them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwright.core.request_line import RequestEntry, read_entry, read_line

PRINTED = st.text(st.characters(exclude_categories=("C", "Z")), max_size=60)
"""A client's text behind `one_line`, without spaces."""


def entry(**changes: object) -> RequestEntry:
    plain = RequestEntry("req-" + "0a" * 12, "POST", "/v1/completions", 200, "done", 0.125, 12, 5)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
@given(
    path=PRINTED.map("/".__add__),
    user=st.none() | st.text(max_size=60),
    tokens=st.none() | st.integers(0, 10**6),
    seconds=st.integers(0, 10**7),
)
def test_an_entry_is_read_as_it_was_written(
    path: str, user: str | None, tokens: int | None, seconds: int
) -> None:
    new = None if tokens is None else tokens // 2
    written = entry(path=path, user=user, prompt_tokens=tokens, new_tokens=new, seconds=seconds / 1000)
    assert read_entry(str(written)) == written


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/x%20200,%20done,%205.000%20s", "status": 404, "reason": "there is no such path"},
        {"user": "x', 9.000 s", "prompt_tokens": None, "new_tokens": None},
        {"user": '"\'", 5 prompt tokens, 6 new, 9.999 s'},
        {"reason": "refused, user 'root', 7.000 s, then", "status": 400},
        {"new_tokens": None},
    ],
)
def test_what_a_client_chose_passes_for_no_other_part(changes: dict[str, object]) -> None:
    assert read_entry(str(entry(**changes))) == entry(**changes)


def test_spaces_of_a_path_are_written_so_that_no_status_can_follow() -> None:
    read = read_entry(str(entry(path="/a 200, done, 1.000 s", status=404, reason="no")))
    assert read is not None
    assert (read.path, read.status) == ("/a%20200,%20done,%201.000%20s", 404)


def test_lines_have_the_loggers_format() -> None:
    line = read_line("2026-11-29 19:50:32,123 torchwright.serve WARNING 127.0.0.1: gone\tx")
    assert line is not None
    assert (line.logger, line.level, line.message) == ("torchwright.serve", "WARNING", "127.0.0.1: gone\tx")
    local = datetime(2026, 11, 29, 19, 50, 32, 123000).astimezone()
    assert line.time == local.astimezone(UTC).replace(tzinfo=None)


@pytest.mark.parametrize(
    "text", ["", "    Traceback", "2026-13-29 19:50:32,123 a INFO b", "req-0: GET / 200"]
)
def test_anything_else_is_no_line(text: str) -> None:
    assert read_line(text) is None
    assert read_entry(text) is None
