"""Only regular files are read, and only up to a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchwright.core.regular_file import NotRegular, open_regular, read_regular
from torchwright.core.toml_file import load_toml


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 3) == b"abc"
    with pytest.raises(ValueError, match="more than 2 bytes"):
        read_regular(tmp_path / "file", 2)


def test_nothing_else_is_opened_or_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in (
        (tmp_path / "fifo", "a FIFO"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(NotRegular, match=kind):
            open_regular(path)
    for name in ("missing", "x" * 10_000, "a\0b"):
        with pytest.raises(OSError, match=r"No such file|too long|null byte"):
            open_regular(tmp_path / name)


def test_toml_is_limited_in_depth_however_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[a.b]\nc = [[1]]")
    assert load_toml(path) == {"a": {"b": {"c": [[1]]}}}
    for text in ("a = " + "[" * 50_000, "a" + ".a" * 40 + " = 1", "a = " + "[" * 40 + "]" * 40):
        path.write_text(text)
        with pytest.raises(ValueError, match="deep"):
            load_toml(path)
