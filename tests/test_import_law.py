"""The import law of `[tool.importlinter]`, and what must be cheap to import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchwright

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[1]


def test_rooms_import_only_what_lies_below_them():
    pytest.importorskip("importlinter", reason="holds the import law")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "core.records",
        "core.errors",
        "core.registry",
        "report.terminal",
        "report.html",
        "cli",
        "hardware.devices",
    ],
)
def test_no_torch_comes_with(module):
    code = f"import sys, torchwright.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_page_costs_nothing_before_it_is_written():
    """Searches and training runs import these at their start. No plotting library is needed at all."""
    code = (
        "import sys, torchwright.report.html, torchwright.train.ledger.timeline; "
        "import torchwright.optimization.profile.html; "
        "sys.exit(', '.join({'jinja2', 'matplotlib', 'PIL'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


POSIX_ONLY = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd"}
POSIX_ONLY |= {"syslog", "termios", "tty"}
"""Modules of the standard library that Python for Windows does not bring."""


def imports_at_import(node: ast.AST) -> Iterator[str]:
    """The first name of every module that is imported while the file itself is."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0]
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_import(child)


@pytest.mark.slow
def test_files_can_be_imported_on_windows():
    """What a POSIX system alone has is imported by the function that uses it."""
    package = Path(torchwright.__file__).parent
    at_the_top = {
        str(path.relative_to(package)): names
        for path in package.rglob("*.py")
        if (names := POSIX_ONLY & set(imports_at_import(ast.parse(path.read_text()))))
    }
    assert at_the_top == {}
