"""What the documents say of the code, held against it; `scripts/docs.py --check` does the same for help and options."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchwright.optimization.api import default_out

ROOT = Path(__file__).parents[1]


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import rooms  # pyright: ignore[reportMissingImports]

    return rooms


def written(folder: Path, files: dict[str, str]) -> Path:
    """A package called torchwright of these files."""
    for name, text in files.items():
        path = folder / "torchwright" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "torchwright"


@pytest.mark.slow  # `.ci/check` runs it beside the plain tests
def test_the_layout_is_the_laws_and_no_file_is_in_a_circle() -> None:
    command = [sys.executable, "scripts/rooms.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_circles_are_found_wherever_the_import_stands(rooms: Any, tmp_path: Path) -> None:
    source = written(
        tmp_path,
        {
            "__init__.py": "",
            "one.py": "from torchwright import two",
            "two.py": "def late():\n    from torchwright.inner.three import x",
            "inner/__init__.py": "",
            "inner/three.py": "import typing\nif typing.TYPE_CHECKING:\n    import torchwright.one\nx = 1",
            "alone.py": "import torchwright.one",
        },
    )
    imports = rooms.imports_of(rooms.modules_of(source))
    (circle,) = rooms.circles(imports)
    assert sorted(circle[1:]) == ["torchwright.inner.three", "torchwright.one", "torchwright.two"]
    for name, imported in itertools.pairwise(circle):
        assert imported in imports[name]
    imports["torchwright.two"].clear()
    assert rooms.circles(imports) == []


def test_rooms_come_in_the_laws_order_with_what_they_hold(rooms: Any, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[[tool.importlinter.contracts]]\ntype = 'layers'\ncontainers = ['torchwright']\n"
        "layers = ['(upper) | (to_come)', 'lower : beside']\n"
        "[[tool.importlinter.contracts]]\ntype = 'layers'\ncontainers = ['torchwright.upper']\n"
        "layers = ['(b)', 'a', 'file']\n"
        "[[tool.importlinter.contracts]]\ntype = 'forbidden'\n"
    )
    files = {
        f"{name}/__init__.py": f'"""About {name}.\n\nMore."""' for name in ("upper", "upper/a", "upper/b")
    }
    files |= {"upper/file.py": '"""A file."""', "lower.py": '"""Low | down."""', "beside.py": '"""Beside."""'}
    source = written(tmp_path, files)
    law = rooms.read_law(tmp_path / "pyproject.toml")
    assert rooms.layout(source, law).splitlines()[2:] == [
        "| `upper/` | About upper. |",
        "| `upper/b/` | About upper/b. |",
        "| `upper/a/` | About upper/a. |",
        "| `lower.py` | Low \\| down. |",
        "| `beside.py` | Beside. |",
    ]
    assert rooms.picture(source, law).splitlines() == [
        "```text",
        "upper",
        "lower · beside",
        "inside upper/",
        "    b",
        "    a",
        "    file",
        "```",
    ]


def test_bench_runs_what_the_readme_and_its_results_name(tmp_path: Path) -> None:
    """The line of the Makefile runs with a `python` that writes down what it is given: the scripts take long."""
    ran = tmp_path / "ran"
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$2" >> {ran}\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["make", "bench"], cwd=ROOT, env=environment, check=True, capture_output=True)
    pages = [page for page in (ROOT / "README.md", ROOT / "docs" / "results.md") if page.is_file()]
    named = {name for page in pages for name in re.findall(r"\bbenchmarks\.\w+\.\w+", page.read_text())}
    assert sorted(named) == ran.read_text().split()
    assert all((ROOT / name.replace(".", "/")).with_suffix(".py").is_file() for name in named)


def test_every_benchmark_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text() for page in pages if (ROOT / "docs" / "log") not in page.parents]
    files = {name for text in texts for name in re.findall(r"\bbenchmarks/[\w/]+\.py", text)}
    modules = {name for text in texts for name in re.findall(r"-m (benchmarks\.[\w.]+\w)", text)}
    named = files | {f"{name.replace('.', '/')}.py" for name in modules}
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("target", [None, "some/folder", "package.module:factory"])
def test_git_ignores_the_folder_that_optimize_writes_by_default(target: str | None) -> None:
    patterns = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/")]
    assert any(fnmatch.fnmatch(f"/{default_out(target)}/", pattern) for pattern in patterns)


def test_the_log_is_newest_first() -> None:
    pages = sorted((ROOT / "docs" / "log").glob("*/*.md"))
    assert pages
    for page in pages:
        dates = re.findall(r"^## (.{10})", page.read_text(), re.MULTILINE)
        assert dates == sorted(dates, reverse=True), page
        assert all(date.startswith(page.parent.name) for date in dates), page


@pytest.fixture
def site_links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_links  # pyright: ignore[reportMissingImports]

    return site_links


def test_links_out_of_the_site_become_paths(site_links: Any, tmp_path: Path) -> None:
    text = "[a](b.md) [`src/c.py`](../../src/c.py) [words](../../src/c.py#L1) [far](https://example.org/x)"
    found = site_links.without_outside_links(text, tmp_path / "docs" / "in" / "page.md", tmp_path / "docs")
    assert found == "[a](b.md) `src/c.py` words (`src/c.py`) [far](https://example.org/x)"


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"- (?:\w+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(named) == sorted(page for page in pages if not page.startswith("log/"))
