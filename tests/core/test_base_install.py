"""A base install, without extras, imports all departments but those that serve and map."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torchwright"
OPTIONAL = ("serve", "map")
"""Departments that need their extras. The import law keeps others from them."""
DEVELOPERS = {"test", "docs", "wheel", "load"}
"""Extras of people who work on Torchwright."""
MODULES = {
    "pyzmq": "zmq",
    "pillow": "PIL",
    "python-multipart": "python_multipart",
    "ai-edge-litert": "ai_edge_litert",
}
"""Distribution → module, where the name is not the same."""


def extras() -> set[str]:
    """Modules that extras bring and a base install does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        found = (re.match(r"[\w.-]+", each) for each in requirements)
        return {name.group().lower() for name in found if name is not None}

    brought = project["optional-dependencies"]
    optional = set[str]().union(*(names(each) for name, each in brought.items() if name not in DEVELOPERS))
    optional -= names(project["dependencies"]) | {"torchwright"}
    return {MODULES.get(name, name.replace("-", "_")) for name in optional}


def imported(text: str) -> set[str]:
    """Packages that a module imports as it is imported itself."""
    names = list[str]()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import):
            names += [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names.append(statement.module or "")
    return {name.partition(".")[0] for name in names}


def test_a_base_install_imports_no_extra() -> None:
    forbidden = extras()
    assert {"msgspec", "zmq", "openvino", "PIL"} <= forbidden
    wrong = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        used = imported(path.read_text(encoding="utf-8")) & forbidden
        if place.parts[0] not in OPTIONAL and used:
            wrong[str(place)] = sorted(used)
    assert wrong == {}, "import extras where they are used"


def test_imports_are_found() -> None:
    assert imported("import msgspec.json\nfrom PIL import Image\ndef f(): import zmq") == {"msgspec", "PIL"}
