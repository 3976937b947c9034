"""Write the rooms of the house where its documents show them, and count its files and the circles between them.

    python scripts/rooms.py            writes the marked blocks of CONTRIBUTING.md and docs/index.md
    python scripts/rooms.py --check    exit code 1 when one of them is out of step

Either way exit code 1 when files import each other in a circle.

The order is the import law's (pyproject.toml); what a room holds is its docstring's first line.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from blocks import ROOT, settle, table, with_blocks

PACKAGE = "torchwright"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when out of step")
    check = parser.parse_args().check
    source = ROOT / "src" / PACKAGE
    law = read_law(ROOT / "pyproject.toml")
    pages = {
        "CONTRIBUTING.md": {"rooms": layout(source, law)},
        "docs/index.md": {"law": picture(source, law)},
    }
    faults = [
        fault
        for name, blocks in pages.items()
        for fault in settle(ROOT / name, with_blocks(ROOT / name, blocks), check)
    ]
    imports = imports_of(modules_of(source))
    found = circles(imports)
    faults += ["files import each other in a circle: " + " -> ".join(circle) for circle in found]
    print("\n".join([*faults, f"{len(imports)} files, {len(found)} circles between them"]))
    return 1 if faults else 0


def read_law(pyproject: Path) -> dict[str, list[list[str]]]:
    """Package → its layers, the upper ones first, each the names of rooms and files that stand side by side."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [re.findall(r"\w+", layer) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    }


def layout(source: Path, law: dict[str, list[list[str]]]) -> str:
    """A row for each room and file of the law, and for the rooms inside of rooms, with what it holds."""
    rows: list[tuple[str, ...]] = []
    for layer in law[PACKAGE]:
        for name in _there(source, layer):
            rows.append(_row(source, name))
            inner = _inner(source / name, law.get(f"{PACKAGE}.{name}"))
            rows += [_row(source, f"{name}/{room}") for room in inner]
    return table(("room", "holds"), rows)


def picture(source: Path, law: dict[str, list[list[str]]]) -> str:
    """The import law as text: a line imports from the lines below it."""
    parts: list[str] = []
    for package, layers in law.items():
        inside = package.removeprefix(PACKAGE).lstrip(".")
        lines = [" · ".join(_there(source / inside, layer)) for layer in layers]
        indent = "    " if inside else ""
        parts += [f"inside {inside}/\n"] if inside else []
        parts += [f"{indent}{line}\n" for line in lines if line]
    return f"```text\n{''.join(parts)}```\n"


def modules_of(source: Path) -> dict[str, Path]:
    """Dotted name → file, of every module of the package."""
    found: dict[str, Path] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Module → the modules of the package that it imports: anywhere, inside functions and for types alone too."""
    return {
        name: {other for other in _imported(ast.parse(path.read_text()), modules) if other != name}
        for name, path in modules.items()
    }


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in a circle; each circle found is cut at one import before the next is sought."""
    left = {name: set(others) for name, others in imports.items()}
    found: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
            left[circle[0]].discard(circle[1])
            found.append(circle)
        else:
            return found


def _imported(tree: ast.Module, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [name for name in (inner, node.module) if name in modules][:1]
        elif isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names if alias.name in modules]


def _there(folder: Path, layer: list[str]) -> list[str]:
    """Those of a layer's names that the folder holds: the law may name rooms that are still to come."""
    return [name for name in layer if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]


def _inner(folder: Path, layers: list[list[str]] | None) -> list[str]:
    """The rooms inside of a room, in the order of the law where it has one for them."""
    rooms = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    return rooms if layers is None else [name for layer in layers for name in layer if name in rooms]


def _row(source: Path, name: str) -> tuple[str, str]:
    folder = (source / name).is_dir()
    path = source / name / "__init__.py" if folder else source / f"{name}.py"
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    if not summary:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring that says what it holds")
    return f"`{name}/`" if folder else f"`{name}.py`", summary


if __name__ == "__main__":
    sys.exit(main())
