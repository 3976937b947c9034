# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Lines that break a graph, rewritten in the syntax tree of their function.

Each way raises `NotRewritten` with the reason where the code does not show that the line means the same afterwards.
"""

from __future__ import annotations

import ast
import copy
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import _numpy as arrays

from torchwright.optimization.techniques.shared import stand_ins
from torchwright.optimization.techniques.shared.purity import FUNCTIONS, Scope, require_pure, stored
from torchwright.optimization.techniques.shared.source import NotRewritten, empty_function

ITEM, BRANCH, MESSAGE, NUMPY = "item()", "data-dependent branch", ("print", "warning or logging"), "NumPy"
"""Causes, as the profile names them."""
PREFIX = "_whole_"
OUTLIVES = "changes what outlives the call"
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
FROM_ARRAY = (torch.from_numpy, torch.tensor, torch.as_tensor, torch.Tensor)


class Unbreak:
    """Changes one function's tree at lines of known causes; `names` is what the new tree needs."""

    def __init__(self, scope: Scope, lines: dict[int, set[str]]) -> None:
        self.scope, self.lines = scope, lines
        self.names: dict[str, Any] = {}
        self._count = 0

    def __call__(self, tree: ast.FunctionDef) -> dict[str, Any]:
        """Change `tree`; every line must find its way."""
        self._tree, self._left = copy.deepcopy(tree), set(self.lines)
        if any(NUMPY in causes for causes in self.lines.values()):
            Arrays(self).visit(tree)
            self._left -= {line for line, causes in self.lines.items() if NUMPY in causes}
        parameters = {argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)}
        tree.body = self._block(tree.body, parameters, last=True)
        if self._left:
            raise NotRewritten("the line is of no form that is rewritten")
        if any(ITEM in causes for causes in self.lines.values()):
            require_arithmetic(tree, self.scope)
        return self.names

    def call(self, function: Callable[..., Any], *arguments: ast.expr, like: ast.AST) -> ast.Call:
        """A call of a stand-in."""
        name = PREFIX + function.__name__
        self.names[name] = function
        node = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
        return ast.fix_missing_locations(ast.copy_location(node, like))

    def _block(self, statements: Sequence[ast.stmt], bound: set[str], *, last: bool) -> list[ast.stmt]:
        """Statements that run one after another, `bound` before them; `last` says that the function ends with them."""
        found: list[ast.stmt] = []
        for index, statement in enumerate(statements):
            rest = statements[index + 1 :]
            if isinstance(statement, ast.If) and self._causes(statement.test) & {BRANCH}:
                changed = self._branch(statement, rest, bound, last=last)
                found += changed
                if isinstance(changed[-1], ast.Return):
                    return found
            else:
                found.append(self._statement(statement, bound, last=last and not rest))
            bound = bound | {*stored(statement)}
        return found

    def _statement(self, statement: ast.stmt, bound: set[str], *, last: bool) -> ast.stmt:
        if not self._causes(statement):
            return statement
        bodies = [name for name in ("body", "orelse", "finalbody") if getattr(statement, name, None)]
        if not bodies:
            return self._simple(statement)
        if isinstance(statement, ast.While) and self._causes(statement.test):
            raise NotRewritten("how often the loop runs depends on a tensor's values")
        for name, value in ast.iter_fields(statement):
            if isinstance(value, ast.expr) and self._causes(value):
                setattr(statement, name, self._expression(value))
        for name in bodies:
            within = last and isinstance(statement, ast.If)
            setattr(statement, name, self._block(getattr(statement, name), bound, last=within))
        return statement

    def _simple(self, statement: ast.stmt) -> ast.stmt:
        if isinstance(statement, ast.Expr) and self._is_message(statement.value):
            self._settle(statement)
            return ast.copy_location(ast.Pass(), statement)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            raise NotRewritten("it is in a function within the function")
        return self._expression(statement)

    def _expression(self, node: Any) -> Any:
        """An expression, or a statement that has no others in it, with what breaks in it replaced."""
        causes = self._causes(node)
        changer = Numbers(self, causes)
        changed = changer.visit(node)
        if changer.changed:
            self._settle(node)
        return changed

    def _is_message(self, node: ast.expr) -> bool:
        """Check whether it only prints, warns or logs."""
        if not isinstance(node, ast.Call):
            return False
        values = self.scope.values(node.func)
        if not values or not all(_says(value) for value in values):
            return False
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            require_pure(argument, self.scope)
        return True

    def _branch(
        self, branch: ast.If, rest: Sequence[ast.stmt], bound: set[str], *, last: bool
    ) -> list[ast.stmt]:
        """Both sides as functions, and the choice between what they give."""
        self._settle(branch.test)
        test = self._expression(branch.test) if self._causes(branch.test) & {ITEM} else branch.test
        then, other = branch.body, branch.orelse
        returns = any(isinstance(node, ast.Return) for s in (*then, *other) for node in ast.walk(s))
        if returns:
            if not last:
                raise NotRewritten("it returns from within a loop")
            other = [*other, *rest] if not _ends(other) else other
            then = [*then, *rest] if not _ends(then) else then
        then, other = self._side(then, bound), self._side(other, bound)
        if not (returns or then or other):
            return [ast.copy_location(ast.Pass(), branch)]
        names = sorted({*stored(*then), *stored(*other)})
        if returns:
            given = [name for name in names if name in bound]
            results = None
        else:
            one_sided = ({*stored(*then)} ^ {*stored(*other)}) - bound
            needed = sorted(one_sided & self._read_outside(branch))
            if needed:
                raise NotRewritten(f"'{needed[0]}' is set on one side alone")
            names = [name for name in names if name not in one_sided]
            given, results = [name for name in names if name in bound], names
        self._count += 1
        within = bound | {*names}
        sides = [
            _function(
                f"{PREFIX}{side}_{self._count}",
                given,
                self._block(body, within, last=returns),
                results,
                branch,
            )
            for side, body in (("then", then), ("other", other))
        ]
        arguments = [ast.Name(name, ast.Load()) for name in (*(side.name for side in sides), *given)]
        call = self.call(stand_ins.choose, test, *arguments, like=branch.test)
        if results is None:
            return [*sides, ast.copy_location(ast.Return(call), branch)]
        targets = ast.Tuple([ast.Name(name, ast.Store()) for name in results], ast.Store())
        assign = ast.copy_location(ast.Assign([targets], call), branch)
        return [*sides, ast.fix_missing_locations(assign)]

    def _side(self, body: Sequence[ast.stmt], bound: set[str]) -> list[ast.stmt]:
        """A side of a branch that may run though it is not taken: without messages, and copied."""
        found = []
        for statement in body:
            if isinstance(statement, ast.Expr) and self._is_message(statement.value):
                self._left -= {*_span(statement)}
            elif not isinstance(statement, ast.Pass):
                self._require_harmless(statement)
                found.append(copy.deepcopy(statement))
        return found

    def _require_harmless(self, statement: ast.stmt) -> None:
        where = f"(line {statement.lineno})"
        if isinstance(statement, ast.If):
            require_pure(statement.test, self.scope)
            for inner in (*statement.body, *statement.orelse):
                self._require_harmless(inner)
        elif isinstance(statement, ast.Return) or _is_assignment(statement):
            require_pure(statement, self.scope)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            raise NotRewritten(f"'{ast.unparse(statement)}' {OUTLIVES} {where}")
        elif isinstance(statement, ast.AugAssign):
            kind = "may change a tensor in place" if _is_local(statement.target) else OUTLIVES
            raise NotRewritten(f"'{ast.unparse(statement)}' {kind} {where}")
        elif isinstance(statement, ast.Raise | ast.Assert):
            raise NotRewritten(f"one side raises {where}")
        elif not isinstance(statement, ast.Pass):
            raise NotRewritten(f"'{ast.unparse(statement).splitlines()[0]}' has an effect of its own {where}")

    def _read_outside(self, branch: ast.If) -> set[str]:
        """Names that the function reads elsewhere than in a branch."""
        lines = _span(branch)
        loads = (
            node for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node.lineno not in lines
        )
        return {node.id for node in loads if isinstance(node.ctx, ast.Load)}

    def _causes(self, node: ast.AST) -> set[str]:
        """Causes of the lines that a node spans."""
        return {cause for line in _span(node) for cause in self.lines.get(line, ())}

    def _settle(self, node: ast.AST) -> None:
        self._left -= {*_span(node)}


class Numbers(ast.NodeTransformer):
    """`item()`, `float()` and `int()` kept tensors, `max` and `min` of them, and `a if condition else b`."""

    def __init__(self, unbreak: Unbreak, causes: set[str]) -> None:
        self._unbreak, self._causes, self.changed = unbreak, causes, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = self._visited(node)
        if ITEM not in self._causes or node.keywords:
            return node
        value, function = self._plain(node.func), None
        arguments = node.args
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            function, arguments = stand_ins.item, [node.func.value]
        elif value in (float, int) and len(node.args) == 1:
            function = stand_ins.to_float if value is float else stand_ins.to_int
        elif value in (max, min) and any(_is_number(part) for arg in node.args for part in ast.walk(arg)):
            function = stand_ins.largest if value is max else stand_ins.smallest
        if function is None:
            return node
        self.changed = True
        return self._unbreak.call(function, *arguments, like=node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if BRANCH not in self._causes:
            return self._visited(node)
        for side in (node.body, node.orelse):
            require_pure(side, self._unbreak.scope)
        node = self._visited(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        sides = [ast.Lambda(nothing, side) for side in (node.body, node.orelse)]
        self.changed = True
        return self._unbreak.call(stand_ins.choose, node.test, *sides, like=node)

    def _visited(self, node: Any) -> Any:
        return self.generic_visit(node)

    def _plain(self, node: ast.expr) -> Any:
        values = self._unbreak.scope.values(node) if isinstance(node, ast.Name) else []
        return values[0] if values else None


class Arrays(ast.NodeTransformer):
    """NumPy's names taken from torch's own arrays, which are tensors."""

    def __init__(self, unbreak: Unbreak) -> None:
        self._unbreak = unbreak

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        values = self._unbreak.scope.values(node.value)
        if values and isinstance(values[0], types.ModuleType) and values[0].__name__.startswith("numpy"):
            own = arrays if values[0] is numpy else getattr(arrays, values[0].__name__[6:], None)
            if values[0].__name__ == "numpy.random" or not hasattr(own, node.attr) or node.attr == "random":
                raise NotRewritten(f"torch has nothing for '{ast.unparse(node)}' (line {node.lineno})")
            if isinstance(node.value, ast.Name):
                self._unbreak.names[node.value.id] = own
            return node if isinstance(node.value, ast.Name) else self.generic_visit(node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = self._unbreak.scope.values(node.func)
        node = self._visited(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "numpy":
            return self._unbreak.call(stand_ins.to_array, node.func.value, like=node)
        if function and function[0] in FROM_ARRAY:
            called = self._unbreak.call(stand_ins.from_array, node.func, *node.args, like=node)
            called.keywords = node.keywords
            return called
        return node

    def _visited(self, node: Any) -> Any:
        return self.generic_visit(node)


def require_arithmetic(tree: ast.FunctionDef, scope: Scope) -> None:
    """Raise `NotRewritten` where what was a number is used as more than an operand."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    waiting = [node for node in ast.walk(tree) if _is_number(node)]
    seen: set[str] = set()
    while waiting:
        node, number = waiting.pop(), True
        while isinstance(parent := parents[node], ast.BinOp | ast.UnaryOp) or _is_number(parent):
            if isinstance(parent, ast.BinOp):
                if not isinstance(parent.op, ARITHMETIC):
                    raise NotRewritten(f"'{ast.unparse(parent)}' is no arithmetic (line {parent.lineno})")
                other = parent.left if node is parent.right else parent.right
                number = number and (_is_number(other) or isinstance(other, ast.Constant))
            node = parent
        if not number or isinstance(parent, ast.Compare):
            continue  # with a tensor, or what cannot be told from one, it is one
        if isinstance(parent, ast.Call) and (_is_function_of_torch(parent, scope) or _is_choice(parent)):
            continue
        target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
        if not isinstance(target, ast.Name):
            raise NotRewritten(f"its number goes into '{ast.unparse(parent)[:60]}' (line {node.lineno})")
        if target.id not in seen:
            seen.add(target.id)
            waiting += [use for use in ast.walk(tree) if _is_load(use, target.id)]


def _is_function_of_torch(call: ast.Call, scope: Scope) -> bool:
    known = scope.values(call.func)
    if known:
        return all(
            str(getattr(value, "__module__", "")).partition(".")[0] in ("torch", "None") for value in known
        )
    return isinstance(call.func, ast.Attribute) and call.func.attr in FUNCTIONS


def _is_choice(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == PREFIX + stand_ins.choose.__name__


def _is_number(node: ast.AST) -> bool:
    """Check for a call of a stand-in for a number."""
    numbers = (stand_ins.item, stand_ins.to_float, stand_ins.to_int, stand_ins.largest, stand_ins.smallest)
    names = {PREFIX + function.__name__ for function in numbers}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _says(value: Any) -> bool:
    if value is print or value is warnings.warn:
        return True
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__name__", "")
    levels = ("debug", "info", "warning", "error", "critical", "log", "exception", "warn", "warning_once")
    return name in levels and (isinstance(owner, logging.Logger) or getattr(logging, name, None) is value)


def _function(
    name: str, given: Iterable[str], body: list[ast.stmt], results: list[str] | None, like: ast.AST
) -> ast.FunctionDef:
    """One side of a branch: takes the names that it may change, and returns them, or what it returned itself."""
    if results is not None:
        values = ast.Tuple([ast.Name(result, ast.Load()) for result in results], ast.Load())
        body = [*body, ast.Return(values)]
    return empty_function(name, given, body, like)


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Check whether it is the last statement to run."""
    if not body:
        return False
    final = body[-1]
    if isinstance(final, ast.If):
        return _ends(final.body) and _ends(final.orelse)
    return isinstance(final, ast.Return | ast.Raise)


def _is_assignment(statement: ast.stmt) -> bool:
    """Check whether it binds only names of its function."""
    return isinstance(statement, ast.Assign) and all(map(_is_local, statement.targets))


def _is_local(target: ast.expr) -> bool:
    names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return all(isinstance(name, ast.Name) for name in names)


def _is_load(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _span(node: ast.AST) -> range:
    first = getattr(node, "lineno", 0)
    return range(first, (getattr(node, "end_lineno", None) or first) + 1)
