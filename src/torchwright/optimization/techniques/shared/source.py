# pyright: basic, reportArgumentType=false, reportOperatorIssue=false
"""Functions of a model's user, found by their lines and built again from a changed syntax tree.

What is built again reads the same globals, the live ones, under the same file and line numbers; names that are changed
for it alone are closed over. It is bound to the one model's modules: classes and other models stay as they are.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARY = Path(torch.__file__).parent


class NotRewritten(Exception):
    """Why a line stays as it is."""


@dataclass(frozen=True)
class Bound:
    """A method of one module."""

    module: nn.Module
    name: str
    function: types.FunctionType
    owner: type


class Functions:
    """Return the user's code that a model's modules call: their methods, and functions that these name."""

    def __init__(self, model: nn.Module) -> None:
        self.methods = list(_methods(model))
        self._callees: dict[types.FunctionType, dict[str, types.FunctionType]] = {}
        waiting = [bound.function for bound in self.methods]
        while waiting:
            function = waiting.pop()
            if function not in self._callees:
                self._callees[function] = _named_functions(function)
                waiting += self._callees[function].values()

    def at(self, file: str, line: int) -> types.FunctionType:
        """The innermost function that holds a line; raises `NotRewritten`."""
        around = [f for f in self._callees if f.__code__.co_filename == file and line in _lines(f)]
        if not around:
            raise NotRewritten("it is in no method of a module, nor in a function that one names")
        return min(around, key=lambda function: len(_lines(function)))

    def callers(self, functions: Iterable[types.FunctionType]) -> set[types.FunctionType]:
        """These functions and all that lead to them by their names."""
        found = set(functions)
        while True:
            more = {
                f for f, callees in self._callees.items() if f not in found and found & {*callees.values()}
            }
            if not more:
                return found
            found |= more

    def rebuild(
        self, changes: Mapping[types.FunctionType, Callable[[ast.FunctionDef], dict[str, Any]]]
    ) -> list[tuple[Bound, types.FunctionType]]:
        """Apply `changes`, each of which changes a tree and returns the names that it needs.

        Returns the methods that are not what they were. Raises `NotRewritten`.
        """
        affected = self.callers(changes)
        built: dict[tuple[types.FunctionType, type | None], types.FunctionType] = {}
        underway: set[types.FunctionType] = set()

        def build(function: types.FunctionType, owner: type | None) -> types.FunctionType:
            if function in underway:
                raise NotRewritten(f"{function.__name__} calls itself")
            if (function, owner) not in built:
                underway.add(function)
                tree = tree_of(function)
                names = changes[function](tree) if function in changes else {}
                callees = self._callees[function].items()
                names |= {name: build(callee, None) for name, callee in callees if callee in affected}
                built[function, owner] = _compiled(function, tree, names, owner)
                underway.discard(function)
            return built[function, owner]

        return [
            (bound, build(bound.function, bound.owner))
            for bound in self.methods
            if bound.function in affected
        ]


def tree_of(function: types.FunctionType) -> ast.FunctionDef:
    """Its syntax tree, at the lines of its file."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise NotRewritten(f"the source of {function.__name__} cannot be read") from error
    if not isinstance(tree, ast.FunctionDef):
        raise NotRewritten(f"{function.__name__} is no plain function")
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.Await) for node in ast.walk(tree)):
        raise NotRewritten(f"{function.__name__} assigns outer names, or is a generator")
    if any(_is_private(node) for node in ast.walk(tree)):
        raise NotRewritten(f"{function.__name__} uses a name with two underscores, private to its class")
    return ast.increment_lineno(tree, first - 1)


def _is_private(node: ast.AST) -> bool:
    """Check whether Python prefixes the name with its class (name mangling)."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.startswith("__") and not name.endswith("__")


def bound_names(function: types.FunctionType) -> ChainMap[str, Any]:
    """Return the values of a function's outer names, as far as they are bound."""
    return ChainMap(_closed(function), function.__globals__)


def _closed(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return {name: cell.cell_contents for name, cell in cells}
    except ValueError as error:
        raise NotRewritten(f"{function.__name__} uses a name that is not bound yet") from error


def _compiled(
    function: types.FunctionType, tree: ast.FunctionDef, names: dict[str, Any], owner: type | None
) -> types.FunctionType:
    """A function of the tree that closes over `names`, and over what the original does."""
    if tree.decorator_list:
        raise NotRewritten(f"{function.__name__} is decorated")
    given = _closed(function) | names
    if owner is not None:
        given.setdefault("__class__", owner)
    inner = ast.Return(ast.Name(tree.name, ast.Load()))
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [d and ast.Constant(None) for d in tree.args.kw_defaults]
    for argument in ast.walk(tree):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.returns = None
    maker = empty_function("make", given, [tree, inner], tree)
    module = ast.fix_missing_locations(ast.Module([maker], []))
    scope: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, scope)
    made = scope["make"](*given.values())
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    return made


def empty_function(name: str, given: Iterable[str], body: list[ast.stmt], like: ast.AST) -> ast.FunctionDef:
    """A function of these parameters and statements, at the line of another node."""
    function = ast.parse(f"def {name}({', '.join(given)}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    for part in ast.walk(function):
        ast.copy_location(part, like)
    function.body = body
    return ast.fix_missing_locations(function)


def _methods(model: nn.Module) -> Iterator[Bound]:
    for module in model.modules():
        for owner in type(module).__mro__:
            for name, value in vars(owner).items():
                own = name in vars(module) or getattr(type(module), name) is not value
                if isinstance(value, types.FunctionType) and is_users(value) and not own:
                    yield Bound(module, name, value, owner)


def is_users(function: types.FunctionType) -> bool:
    """Check that its code is not part of torch, and is in a file."""
    file = function.__code__.co_filename
    return not file.startswith("<") and not Path(file).is_relative_to(LIBRARY)


def _named_functions(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """The user's functions among the names that its code reads."""
    known = bound_names(function)
    named = {
        name: known.get(name) for code in _codes(function) for name in (*code.co_names, *code.co_freevars)
    }
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, types.FunctionType) and is_users(value)
    }


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Its code, and that of functions within it."""
    codes = [function.__code__]
    while codes:
        yield (code := codes.pop())
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _lines(function: types.FunctionType) -> range:
    last = max(line for code in _codes(function) for *_, line in code.co_lines() if line is not None)
    return range(function.__code__.co_firstlineno, last + 1)
