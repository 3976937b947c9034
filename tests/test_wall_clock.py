"""Only stamps come from the wall clock, which may be set back or forward; durations and deadlines are monotonic."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "torchwright"
CLOCKS = {"time.time", "time.time_ns", "time.ctime", "datetime.now", "datetime.utcnow", "os.utime"}
NAMED = re.compile(r"\btime\.c?time|\bdatetime\.(utc)?now|\bos\.utime|from (time|datetime|os) import")
"""Only files that contain one of these are parsed."""
ALLOWED = {
    "serve/http/service.py": "`created` of an answer",
    "serve/http/scoring.py": "`created` of an answer",
    "serve/http/painting.py": "`created` of an answer",
    "serve/fleet/status.py": "a time of day in a gateway's form",
    "serve/batches/records.py": "times of files and batches, which outlive the server",
    "map/output.py": "the age of files that killed runs left",
    "serve/http/about.py": "a time of day in a gateway's form",
    "serve/openai/response_answer.py": "`completed_at` of an answer",
    "serve/openai/answers.py": "`created` of an answer",
    "hub/template_sandbox.py": "`strftime_now`, which templates call",
    "optimization/proof/recipe.py": "`created` of a recipe",
    "train/run/observe/page.py": "the time of day at which a page was written",
    "train/ledger/launcher.py": "when a process began, from its age by the boot clock",
    "train/hang/record.py": "stamps that ranks compare; the beginning follows a clock that is set back",
    "train/hang/watch.py": "the beginning, beside the stamps of dumps that lay there before",
    "hardware/kernels/cpu/build.py": "age of a failure: out of its range either way, the compiler is asked again",
    "hardware/devices/base.py": "age of a disturbed measurement: out of its range either way, it is measured again",
}


def test_no_duration_is_measured_by_the_wall_clock() -> None:
    found = {name for path in SOURCE.rglob("*.py") if (name := str(path.relative_to(SOURCE))) and _asks(path)}
    assert found == set(ALLOWED), "use time.monotonic, or add the file with its reason"


def _asks(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if not NAMED.search(text):
        return False
    tree = ast.parse(text)
    names = {
        f"{ast.unparse(node.value)}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and any(clock.endswith(f".{node.attr}") for clock in CLOCKS)
    }
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return bool(CLOCKS & (names | imported))
