"""The counts of scripts/prose.py, and the checks of scripts/commit_message.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import prose  # pyright: ignore[reportMissingImports]

    return prose


@pytest.fixture
def commit_message(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import commit_message  # pyright: ignore[reportMissingImports]

    return commit_message


def found(prose: Any, folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    (folder / name).write_text(text)
    return [(match.line, match.pattern) for match in prose.matches(folder / name)]


def test_docstrings_and_comments_are_read_and_strings_are_not(prose: Any, tmp_path: Path) -> None:
    text = '''"""What a module is."""
X = "beside # told"  # told by a stranger
class C:
    """The class.

    Its door.
    """
    y: int = 1
    """Of attributes, too."""
    def f(self):
        if self:
            # two lines, one
            # block beside
            return f"{'#'} in vain"
'''
    assert found(prose, tmp_path, "a.py", text) == [
        (1, "docstring opening"),
        (2, "reported"),
        (2, "untrusted"),
        (6, "dispatcher, plugin point"),
        (9, "docstring opening"),
        (13, "next to, concurrently with"),
    ]


def test_code_in_markdown_is_not_counted(prose: Any, tmp_path: Path) -> None:
    text = "# Told\n\n```text\nbeside\n```\n\n    beside\n\n`told` [a door](beside.md)\n<!-- in vain -->\n"
    assert found(prose, tmp_path, "a.md", text) == [(1, "reported"), (9, "dispatcher, plugin point")]


def test_sentences_over_25_words_are_counted_with_their_line(prose: Any, tmp_path: Path) -> None:
    short, long = " ".join(["word"] * 25), " ".join(["word"] * 26)
    assert found(prose, tmp_path, "a.md", f"{short}. {short}.\n\n{long}.\n") == [(3, "long sentence")]
    method = f'class C:\n    def f(self):\n        """Return.\n\n        {long}.\n        """\n'
    assert found(prose, tmp_path, "a.py", method) == [(5, "long sentence")]
    example = '"""A module.\n\n' + "    x = f(y)\n" * 26 + '"""\n'
    assert found(prose, tmp_path, "b.py", example) == []


def test_a_file_may_get_better_and_not_worse_and_a_new_one_starts_at_none(prose: Any) -> None:
    recorded = prose.read(prose.written({"a.py": 3, "b c.md": 2, "d.py": 0}))
    assert recorded == {"a.py": 3, "b c.md": 2}
    assert prose.worse({"a.py": 2, "b c.md": 2, "new.py": 0}, recorded) == []
    worse = prose.worse({"a.py": 4, "new.py": 1}, recorded)
    assert [line.split(":")[0] for line in worse] == ["a.py", "new.py"]


def test_generated_pages_and_the_log_are_not_counted(prose: Any) -> None:
    names = {path.relative_to(ROOT).as_posix() for path in prose.files(ROOT)}
    assert {"README.md", "src/torchwright/optimization/api.py", "docs/index.md"} <= names
    assert not {"docs/cli.md", "docs/techniques.md", "docs/log.md", "docs/log/2026/search.md"} & names
    assert set(prose.read(prose.COUNTS.read_text())) <= names


@pytest.mark.parametrize(
    "message",
    [
        "search: drop slow steps\n\nThey took 5% of the time.\n",
        "serve, cli: bring two faults to an end",
        "docs/log: split it\n# Please enter the commit message\n",
        "Merge branch 'main'",
        "fixup! A docstring",
    ],
)
def test_subjects_in_the_imperative_with_an_area_are_accepted(commit_message: Any, message: str) -> None:
    assert commit_message.problems(message) == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("A docstring", "area: do something"),
        ("search: " + "x" * 65, "73 characters"),
        ("search: added a step", "'added' is not an imperative"),
        ("search: drops a step", "'drops' is not an imperative"),
        ("docs: the rung by its name", "'the' is not an imperative"),
        ("search: drop a step.", "full stop"),
        ("search: drop a step\nbecause it is slow", "second line"),
        ("", "area: do something"),
    ],
)
def test_other_subjects_are_refused_with_the_reason(commit_message: Any, message: str, said: str) -> None:
    (fault,) = commit_message.problems(message)
    assert said in fault


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("make") is None, reason="needs git and make")
def test_make_setup_installs_the_hook(tmp_path: Path) -> None:
    for name in ("Makefile", ".githooks", "scripts"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    git("init", "-q")
    made = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    refused = git("commit", "-q", "--allow-empty", "-m", "A docstring")
    assert refused.returncode != 0
    assert "area: do something" in refused.stderr
    assert git("commit", "-q", "--allow-empty", "-m", "docs: add a docstring").returncode == 0
