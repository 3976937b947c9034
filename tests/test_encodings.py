"""Text in any locale: what is written is UTF-8, and what a terminal cannot show is shown in ASCII."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchwright

SOURCES = Path(torchwright.__file__).parent
OPENING = re.compile(r"\b(write_text|read_text|open|fdopen|NamedTemporaryFile|TemporaryFile)\b|\btext\s*=")
"""Only files that contain one of these are parsed."""


def without_encoding(source: str) -> list[int]:
    """Return the lines of calls that open text in the encoding of the locale."""
    if not OPENING.search(source):
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if takes_the_locale(call)]


def takes_the_locale(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given or None in given:
        return False
    if isinstance(text := given.get("text"), ast.Constant) and text.value is True:
        return True  # of a subprocess
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "write_text":
        return len(call.args) < 2
    if name == "read_text":
        return not call.args
    place = {"open": 0 if method else 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}.get(name)
    if place is None:
        return False
    mode = given.get("mode", call.args[place] if len(call.args) > place else None)
    if mode is None:  # the default is text, of temporary files bytes
        return name in ("open", "fdopen") and len(call.args) == place
    # Another library's `open` takes something else: `Image.open(path)`, `os.open(path, flags)`.
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) <= set("rwaxt+")


def test_every_file_is_opened_in_utf_8_and_not_in_the_encoding_of_the_locale():
    found = {
        str(path.relative_to(SOURCES)): lines
        for path in SOURCES.rglob("*.py")
        if (lines := without_encoding(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_the_check_of_encodings_sees_calls_that_take_the_locale():
    assert without_encoding("file.write_text(x)\nopen(path)\npath.open('w')\nrun(c, text=True)") == [
        1,
        2,
        3,
        4,
    ]
    assert without_encoding("open(path, 'rb')\nos.open(path, flags)\nopen(path, encoding='utf-8')") == []


LOCALES = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
SHOWN = """
import sys, time
from torchwright.cli.streams import tolerate_encodings
tolerate_encodings()
from rich.table import Table
from factories import make_recipe
from torchwright.cli.printing import console, print_result
from torchwright.core.records import Event
from torchwright.report.terminal import LiveProgress, waterfall
with LiveProgress() as progress:
    progress(Event(kind="stage", text="8 → 4 bits ≤ 1% … \\u4e2d", elapsed=1.0, time_budget=9.0))
console().print(waterfall(make_recipe(), artifact="dir–é"))
table = Table("a → b", title="×")
table.add_row("1 ± 2", "\\udcff")
console().print(table)
print_result("x → y", {"note": "1 ms → 2 ms", "rows": [{"a": "≤"}]}, False)
"""


@pytest.mark.parametrize("locale", LOCALES)
def test_tables_progress_and_results_are_shown_in_any_encoding(locale: str, tmp_path: Path):
    done = in_locale(locale, script(tmp_path))
    assert done.returncode == 0, done.stderr.decode("latin-1")
    assert b"8 -> 4 bits <= 1% ... ?" in done.stderr
    assert b"1 ms -> 2 ms" in done.stdout
    assert b"\xff" in done.stdout  # the byte of a file name that has no meaning in the locale
    assert b"UnicodeEncodeError" not in done.stderr
    if locale != "latin-1":
        assert done.stdout.replace(b"\xff", b"").isascii()


@pytest.mark.plain("words0-0-ascii", "words3-2-ascii")
@pytest.mark.parametrize(
    "locale", ["ascii", *(pytest.param(name, marks=pytest.mark.slow) for name in LOCALES if name != "ascii")]
)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("optimize", "--help"), 0),
        (("optimize", "--n→"), 2),
        (("report", "n→"), 2),
        (("report", "n→", "--json"), 2),
        (("techniques",), 0),
    ],
)
def test_help_errors_and_lists_are_shown_in_any_encoding(words: tuple[str, ...], code: int, locale: str):
    done = in_locale(locale, "-m", "torchwright", *words)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert b"\xe2\x86\x92" not in done.stdout  # → in UTF-8
    if locale == "ascii":
        assert (done.stdout + done.stderr).isascii()


def test_in_utf_8_nothing_is_replaced(tmp_path: Path):
    done = in_locale("UTF-8", script(tmp_path))
    assert done.returncode == 0
    assert "8 → 4 bits ≤ 1% … 中" in done.stderr.decode()


def script(folder: Path) -> str:
    file = folder / "shown.py"
    file.write_text(SHOWN, encoding="utf-8")
    return str(file)


def in_locale(name: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    settings = LOCALES.get(name, {"PYTHONIOENCODING": name})
    paths = [str(SOURCES.parent), str(Path(__file__).parent)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), **settings}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
