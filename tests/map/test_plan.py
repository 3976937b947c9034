"""Parts: which rows, and what their names depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchwright.map.plan import Part, cut
from torchwright.map.sources import Record, Source


def source(texts: Sequence[str], label: str = "a.txt") -> Source:
    records = [Record(line, text.encode()) for line, text in enumerate(texts, 1)]
    return Source(label, "text", lambda _: iter(records), None)


def parts(*texts: Sequence[str], identity: str = "x", **options: Any) -> list[Part]:
    return list(cut([source(each) for each in texts], identity, **{"rows": 3, **options}))


WORDS = [f"word {n}" for n in range(8)]


def test_every_row_is_in_one_part_in_order() -> None:
    found = parts(WORDS, WORDS[:4])
    assert [len(part.records) for part in found] == [3, 3, 2, 3, 1]
    assert [part.first_row for part in found] == [0, 3, 6, 8, 11]
    assert [part.name for part in found] == sorted(part.name for part in found)


def test_rows_that_are_added_leave_the_names_of_whole_parts() -> None:
    before, after = parts(WORDS), parts([*WORDS, "more", "and more"])
    assert [part.name for part in before[:2]] == [part.name for part in after[:2]]
    assert before[2].name != after[2].name


def test_the_name_depends_on_rows_and_identity_alone() -> None:
    name = parts(WORDS)[0].name
    assert parts(WORDS)[0].name == name
    assert parts(WORDS, identity="y")[0].name != name
    assert parts(["other", *WORDS[1:]])[0].name != name
    # The border between two rows is a part of what is hashed.
    assert parts(["ab", "c"])[0].name != parts(["a", "bc"])[0].name


def test_a_limit_ends_the_input_and_keeps_the_parts_before_it() -> None:
    whole, some = parts(WORDS, WORDS), parts(WORDS, WORDS, limit=4)
    assert sum(len(part.records) for part in some) == 4
    assert some[0].name == whole[0].name
    assert sum(len(part.records) for part in parts(WORDS, WORDS, limit=100)) == 16


def test_long_rows_make_smaller_parts() -> None:
    found = parts(["x" * 100, "y" * 100, "z"], rows=100, part_bytes=10)
    assert [len(part.records) for part in found] == [1, 1, 1]


def test_an_empty_input_has_no_parts() -> None:
    assert parts([]) == []
