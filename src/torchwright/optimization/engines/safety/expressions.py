"""The two kinds of text in a graph's file that torch evaluates: shape expressions (sympy) and guards (Python).

Both are read with `ast`, held against a small grammar, and guards are written out again from what was read.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

LONGEST, MOST_PARTS = 10_000, 400
"""Characters of one expression, and operations in it."""
LARGEST_INTEGER = 2**63
LARGEST_EXPONENT, LARGEST_SHIFT = 8, 62
MOST_BITS = 16_384
"""The limit on the bits of an expression's value, with 64 bits for every size: powers of powers grow fast."""
SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,5}")
"""The pattern of torch's names for sizes. Its loader counts up to the number."""
KEY = re.compile(r"[A-Za-z0-9_.\- :/+@]{0,200}")
"""Keys of dicts in a model's inputs and outputs."""

_FUNCTIONS = """
Add Mul Max Min Mod FloorDiv CeilDiv CleanDiv PythonMod ModularIndexing Integer Rational Float Where Identity
ToFloat TruncToInt TruncToFloat RoundToInt CeilToInt FloorToInt FloatTrueDiv IntTrueDiv
Equality Unequality LessThan StrictLessThan GreaterThan StrictGreaterThan Eq Ne Le Lt Ge Gt And Or Not
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""The functions that a shape expression may call, in addition to `Symbol` and `Pow`."""
POWERS = frozenset(["Pow", "PowByNatural"])
ASSUMPTIONS = frozenset(["positive", "nonnegative", "integer", "real", "finite", "precision"])
OPERATIONS = (ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Subscript, ast.UnaryOp)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
GUARD_CALLS = frozenset(["max", "min", "int", "float", "math.ceil", "math.floor", "math.trunc", "math.sqrt"])


@functools.lru_cache(100_000)
def check_shape(text: str) -> None:
    """Raise `ValueError` for a text that is more than bounded arithmetic over integers and sizes."""
    try:
        if _bits(_parsed(text)) > MOST_BITS:
            raise ValueError("its numbers are too large")
    except ValueError as error:
        raise ValueError(f"a shape expression that is not one: {text[:80]!r} ({error})") from error


def guard(text: str) -> str:
    """A condition on the sizes of a graph's inputs, written afresh; raises `ValueError` for any other text."""
    try:
        tree = _parsed(text)
        _check_guard(tree)
    except ValueError as error:
        raise ValueError(f"a guard that is not one: {text[:80]!r} ({error})") from error
    return ast.unparse(tree)


def node_bits(operator: str, values: list[int | None], bits: list[int]) -> int:
    """Return the bits that an operator on sizes can produce, from those of its inputs; `values` holds the constants
    among them.

    Raises `ValueError` beyond what is allowed.
    """
    if operator in ("pow", "lshift") and len(values) == 2:
        most = LARGEST_EXPONENT if operator == "pow" else LARGEST_SHIFT
        exponent = values[1]
        if exponent is None or abs(exponent) > most:
            raise ValueError(f"an exponent in a graph that is not a number up to {most}")
        found = bits[0] * max(1, abs(exponent)) if operator == "pow" else bits[0] + abs(exponent)
    else:
        found = sum(bits)
    if found > MOST_BITS:
        raise ValueError("a graph whose sizes are too large")
    return found


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST or not text.isascii():
        raise ValueError("it is too long or not ASCII")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it cannot be parsed") from error
    if sum(isinstance(node, OPERATIONS) for node in ast.walk(tree)) > MOST_PARTS:
        raise ValueError("it has too many parts")
    return tree


def _bits(node: ast.expr) -> int:
    """Return the most bits that a shape expression can produce."""
    match node:
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=int() | float()):
            return _number(node.value)
        case ast.Name(id=name) if SYMBOL.fullmatch(name) or name in ("true", "false"):
            return 64
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _bits(operand)
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            return _bits(base) * _exponent(exponent)
        case ast.BinOp(left=left, right=right) if isinstance(node.op, ARITHMETIC):
            return _bits(left) + _bits(right)
        case ast.Compare(left=left, comparators=others):
            return sum(map(_bits, [left, *others]))
        case ast.Call(func=ast.Name(id=name)):
            return _call_bits(name, node)
        case _:
            raise ValueError(f"it has a {type(node).__name__}")


def _call_bits(name: str, node: ast.Call) -> int:
    for keyword in node.keywords:
        if keyword.arg not in ASSUMPTIONS or not isinstance(keyword.value, ast.Constant):
            raise ValueError(f"it has {keyword.arg}=")
        if keyword.arg == "precision" and not 0 < _number(keyword.value.value) <= 16:
            raise ValueError("it has a number of great precision")
    if name == "Symbol":
        if not (len(node.args) == 1 and _is_text(node.args[0], SYMBOL)):
            raise ValueError("it has a symbol that is none")
        return 64
    if name == "Float" and node.args and _is_text(node.args[0], re.compile(r"-?[0-9.]{1,40}")):
        return 64
    if name in POWERS and len(node.args) == 2:
        return _bits(node.args[0]) * _exponent(node.args[1])
    if name not in FUNCTIONS or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise ValueError(f"it calls {name}")
    return sum(map(_bits, node.args))


def _exponent(node: ast.expr) -> int:
    match node:
        case ast.Call(func=ast.Name(id="Integer"), args=[inner], keywords=[]):
            return _exponent(inner)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _exponent(inner)
        case ast.Constant(value=int() as value) if abs(value) <= LARGEST_EXPONENT:
            return max(1, abs(int(value)))
        case _:
            raise ValueError(f"it has an exponent that is not a number up to {LARGEST_EXPONENT}")


def _number(value: Any) -> int:
    if not isinstance(value, int | float) or not abs(value) < LARGEST_INTEGER:
        raise ValueError("it has a number beyond 64 bits")
    return max(1, int(abs(value)).bit_length())


def _check_guard(node: ast.AST) -> None:
    match node:
        case ast.BoolOp() | ast.Compare() | ast.UnaryOp():
            children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            _exponent(exponent)
            children = [base]
        case ast.BinOp(left=left, right=right) if isinstance(node.op, ARITHMETIC):
            children = [left, right]
        case ast.Constant(value=bool() | int() | float()):
            _number(node.value)
            children = []
        case ast.Call(func=func, args=args, keywords=[]) if ast.unparse(func) in GUARD_CALLS:
            children = args
        case _:
            _check_source(node)
            children = []
    for child in children:
        _check_guard(child)


def _check_source(node: ast.AST) -> None:
    """An input, or one size, stride or offset of an input: `L['x'][0].size()[1]`."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=source, attr="size" | "stride"), args=[], keywords=[]),
            slice=ast.Constant(value=int()),
        ):
            pass
        case ast.Call(func=ast.Attribute(value=source, attr="storage_offset"), args=[], keywords=[]):
            pass
        case _:
            source = node
    depth = 0
    while isinstance(source, ast.Subscript):
        index = source.slice
        if not ((isinstance(index, ast.Constant) and type(index.value) is int) or _is_text(index, KEY)):
            raise ValueError("it looks an input up by an expression")
        source, depth = source.value, depth + 1
    if not (isinstance(source, ast.Name) and source.id == "L" and depth):
        raise ValueError(f"it has a {type(node).__name__}")


def _is_text(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(pattern.fullmatch(node.value))
    )
