"""Factories as targets: `package.module:factory` and `file.py:factory`."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError

ALLOWED = "package.module:factory, found from the current folder or installed, or path/to/file.py:factory"
LIKELY = ("make", "build", "create", "factory", "model", "get", "load")
"""Words in the names of functions that return a model."""


def names_factory(target: str) -> bool:
    """Check whether `target` reads as a factory, and is not a path with a colon in it."""
    module, colon, attribute = target.rpartition(":")
    dotted = all(map(str.isidentifier, module.split(".")))
    return bool(colon) and attribute.isidentifier() and (dotted or module.endswith(".py"))


def find_factory(target: str) -> Callable[[], Any]:
    """Import the factory that `target` names.

    The folder that the module is found from stays on `sys.path`: trial processes import the same modules by it. Raises
    `ModelError` with the reason if it cannot be imported.
    """
    module, _, attribute = target.rpartition(":")
    file = Path(module) if module.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ModelError(f"there is no file {file}", allowed=ALLOWED)
    folder = str(file.resolve().parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(file.stem if file else module)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"'{target}' cannot be imported",
            found=f"{type(error).__name__}: {error}",
            allowed=ALLOWED,
        ) from error
    source = Path(getattr(imported, "__file__", None) or "").resolve()
    if file is not None and source != file.resolve():
        raise ModelError(
            f"'{target}' cannot be imported",
            found=f"another module of the name '{file.stem}', {source}",
            next=f"rename {file.name}",
        )
    if not hasattr(imported, attribute):
        raise _not_in(target, module, attribute, source)
    return getattr(imported, attribute)


def _not_in(target: str, module: str, attribute: str, source: Path) -> ModelError:
    names = functions_of(source) if source.suffix == ".py" else []
    near = difflib.get_close_matches(attribute, names, n=1)
    hint = f"; did you mean '{module}:{near[0]}'?" if near else ""
    found = f"functions without required parameters: {', '.join(names)}" if names else None
    return ModelError(
        f"'{target}' cannot be imported: {module} has no '{attribute}'{hint}", found=found, allowed=ALLOWED
    )


def refuse_python_file(target: str) -> None:
    """Raise `ModelError` for a Python file without a factory, with the functions that may be meant.

    The file is parsed and not imported. A module's name without a factory counts, where the file is in this folder.
    """
    named = target if target.endswith(".py") else f"{target.replace('.', '/')}.py"
    file = Path(named)
    if not file.is_file() or Path(target).is_dir():
        return
    names = functions_of(file)
    if not names:
        raise ModelError(
            f"{file} is Python code without a function that could return a model",
            allowed=ALLOWED,
            next="write `def make(): return model, example_inputs` in it",
        )
    raise ModelError(
        f"{target} is Python code, not a model; did you mean {target}:{names[0]}?",
        found=f"functions without required parameters: {', '.join(names)}",
        allowed="a function that returns a torch.nn.Module and example inputs",
    )


def functions_of(file: Path) -> list[str]:
    """Names of a file's functions that can be called without arguments, those named like a factory first.

    Empty for a file that is not Python.
    """
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    names = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _callable_as_is(node.args)
    ]
    return sorted(names, key=lambda name: not any(word in name.lower() for word in LIKELY))


def _callable_as_is(args: ast.arguments) -> bool:
    positional = len(args.posonlyargs) + len(args.args)
    return positional <= len(args.defaults) and all(default is not None for default in args.kw_defaults)
