"""NumPy's operations in a graph of Dynamo: what each computes, of which dtypes, in a form that can be probed."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchwright.optimization.numpy.tree import map_leaves

OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "divmod": "divmod",
    "matmul": "matmul",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "iand": "bitwise_and",
    "ior": "bitwise_or",
    "ixor": "bitwise_xor",
    "neg": "negative",
    "pos": "positive",
    "abs": "absolute",
    "invert": "invert",
    "inv": "invert",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
"""Python's operators → the ufuncs that they call. ``pow`` has shortcuts of its own."""
FUNCTIONS = frozenset(
    {
        "all",
        "any",
        "count_nonzero",
        "argmax",
        "argmin",
        "max",
        "min",
        "ptp",
        "median",
        "percentile",
        "quantile",
    }
    | {"sum", "prod", "mean", "std", "var", "cumsum", "cumprod", "diff", "sort", "argsort"}
    | {"fix", "round", "clip", "nan_to_num", "sinc", "i0", "angle"}
    | {"iscomplex", "isreal", "isneginf", "isposinf"}
)
"""Functions of one array whose results depend on its values. Others move values, or are compared as a whole only."""
ALIASES = {"amax": "max", "amin": "min", "around": "round", "round_": "round"}
UNPROBED_UFUNCS = frozenset({"matmul"})
NEUTRAL = frozenset({"keepdims", "out"})
"""Arguments that change no value."""


@dataclass(frozen=True)
class Operation:
    """An expression of the operands a, b, c, and their dtypes."""

    expression: str
    dtypes: tuple[str, ...]

    @property
    def key(self) -> str:
        """The operation's name in the table."""
        return f"{self.expression}: {', '.join(self.dtypes)}"


@dataclass(frozen=True)
class Step:
    """One node of a graph that computes values."""

    name: str
    general: Operation | None = None
    special: Operation | None = None
    """The same with a Python value in place: it decides where the general operation differs."""
    dtype_difference: str = ""
    """Return where NumPy would return another dtype."""
    refusal: str = ""


def steps(graph: torch.fx.Graph) -> Iterator[Step]:
    """Every NumPy operation of a graph that Dynamo traced."""
    for node in graph.nodes:
        named = _named(node.target) if node.op == "call_function" else None
        if named is not None:
            yield _step(node, *named)


def _named(target: Any) -> tuple[str, Callable[..., Any]] | None:
    """NumPy's name and callable for the target of a node; None for what is not NumPy's."""
    from torch._dynamo import utils

    if isinstance(target, utils.numpy_to_tensor_wrapper):
        name = _function_names().get(id(target.f))
        return (name, functools.reduce(getattr, name.split("."), np)) if name else None
    if isinstance(target, utils.numpy_method_wrapper):
        return target.method, _method(target.method)
    if isinstance(target, utils.numpy_operator_wrapper):
        name = target.op.__name__
        plain = name if name in OPERATORS else name.removeprefix("i")
        return OPERATORS.get(plain, plain), target.op
    return None


def _method(name: str) -> Callable[..., Any]:
    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, name)(*args, **kwargs)

    return call


@functools.cache
def _function_names() -> dict[int, str]:
    """Identities of torch's functions → their names: several have the name of another (fix is called round)."""
    import torch._numpy as tnp

    found = {id(value): name for name, value in vars(tnp).items() if callable(value) and hasattr(np, name)}
    for part in ("linalg", "fft", "random"):
        members = vars(getattr(tnp, part)).items()
        found |= {id(value): f"{part}.{name}" for name, value in members if hasattr(getattr(np, part), name)}
    return found


def _step(node: torch.fx.Node, name: str, function: Callable[..., Any]) -> Step:
    name = ALIASES.get(name, name)
    ufunc = getattr(np, name, None) if name != "pow" else np.power
    if name == "astype":
        operations = (_cast(node.args[0], _dtype_of(node)),)
    elif name == "__setitem__":
        operations = (_cast(node.args[2], _dtype_of(node.args[0])),)
    elif isinstance(ufunc, np.ufunc) and name not in UNPROBED_UFUNCS:
        if _is_narrower_than_a_varying_integer(node):
            return Step(name, refusal=f"a Python integer of {name} varies, and NumPy checks its range")
        operations = _of_ufunc(node, name, ufunc)
    else:
        operations = (_of_function(node, name),)
    return Step(name, *operations, dtype_difference=_dtype_difference(node, name, function))


def _cast(source: Any, to: str | None) -> Operation | None:
    given = _dtype_of(source)
    if given is None or to is None or given == to:
        return None
    return Operation(f"a.astype('{to}')", (given,))


def _of_ufunc(node: torch.fx.Node, name: str, ufunc: np.ufunc) -> tuple[Operation, ...]:
    """The ufunc of the dtypes that NumPy casts its operands to, and the same with Python's value in place."""
    operands = node.args[: ufunc.nin]
    dtypes = _loop_dtypes(ufunc, operands)
    arrays = [index for index, operand in enumerate(operands) if _dtype_of(operand) is not None]
    if len(operands) < ufunc.nin or dtypes is None or not arrays:
        return ()
    letters = "abc"[: ufunc.nin]
    name = name if name == "pow" else ufunc.__name__
    form = "a ** b" if name == "pow" else f"np.{name}({', '.join(letters)})"
    general = Operation(form, dtypes)
    if len(arrays) != 1 or ufunc.nin != 2:
        return (general,)
    place = arrays[0]
    parts = [repr_of(operand) for operand in operands]
    parts[place] = "a"
    if None in parts:
        return (general,)
    form = " ** ".join(map(str, parts)) if name == "pow" else f"np.{name}({', '.join(map(str, parts))})"
    special = Operation(form, (dtypes[place],))
    # A constant power has a shortcut on each side, which the general one says nothing of.
    return (special,) if ufunc is np.power else (general, special)


def _loop_dtypes(ufunc: np.ufunc, operands: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The dtypes of the operands in NumPy's loop; those given where the result's dtype says nothing of the loop."""
    given = tuple(_weak_dtype(operand) for operand in operands)
    if any(dtype is None for dtype in given):  # not `in`: NumPy's float64 equals None
        return None
    try:
        resolved = ufunc.resolve_dtypes((*given, *[None] * ufunc.nout))
    except (TypeError, ValueError):  # no loop: the call raises in NumPy
        return None
    inputs = resolved[: ufunc.nin]
    if any(isinstance(dtype, type) for dtype in given) or resolved[-1] != np.dtype(bool):
        return tuple(dtype.name for dtype in inputs)
    return tuple(dtype.name for dtype in given if isinstance(dtype, np.dtype))


def _weak_dtype(operand: Any) -> np.dtype | type | None:
    dtype = _dtype_of(operand)
    if dtype is not None:
        return np.dtype(dtype)
    value = _example(operand)
    for symbolic, kind in ((torch.SymInt, int), (torch.SymFloat, float)):
        if isinstance(value, symbolic):
            return kind
    if isinstance(value, bool):
        return np.dtype(bool)
    return type(value) if type(value) in (int, float, complex) else None


def _is_narrower_than_a_varying_integer(node: torch.fx.Node) -> bool:
    dtypes = [np.dtype(dtype) for dtype in map(_dtype_of, node.args) if dtype is not None]
    narrow = dtypes and all(dtype.kind in "iu" and dtype.itemsize < 8 for dtype in dtypes)
    return bool(narrow) and any(isinstance(_example(arg), torch.SymInt) for arg in node.args)


def _of_function(node: torch.fx.Node, name: str) -> Operation | None:
    if name not in FUNCTIONS or not node.args:
        return None
    try:
        bound = inspect.signature(getattr(np, name)).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    array, *_ = bound.arguments.values()
    dtype = _dtype_of(array)
    options: dict[str, str | None] = {}
    for option, value in list(bound.arguments.items())[1:]:
        if option in NEUTRAL or value is None:
            continue
        if option == "axis":
            options[option] = "-1"
        elif name == "clip" and dtype is not None and _is_plain_bound(value, np.dtype(dtype)):
            options[option] = {"a_min": "1", "min": "1"}.get(
                option, "3"
            )  # any bounds between the probe values
        else:
            options[option] = repr_of(value)
    if dtype is None or None in options.values():
        return None
    if name == "clip":
        bounds = [options.get("a_min", options.get("min")), options.get("a_max", options.get("max"))]
        return Operation(f"np.clip(a, {bounds[0]}, {bounds[1]})", (dtype,))
    called = ", ".join(["a", *(f"{option}={text}" for option, text in sorted(options.items()))])
    return Operation(f"np.{name}({called})", (dtype,))


def _is_plain_bound(value: Any, dtype: np.dtype) -> bool:
    """Check for a bound that the dtype can hold; torch wraps an integer that is out of its range."""
    if dtype.kind in "iu":
        return type(value) is int and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    return isinstance(value, int | float) and math.isfinite(value)


def repr_of(value: Any) -> str | None:
    """Python's text for plain data; None for anything else."""
    if isinstance(value, tuple | list):
        parts = [repr_of(item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "np.nan" if math.isnan(value) else "np.inf" if value > 0 else "-np.inf"
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else None


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, torch.fx.Node) else value


def _dtype_of(value: Any) -> str | None:
    example = _example(value)
    return str(example.dtype).removeprefix("torch.") if isinstance(example, torch.Tensor) else None


def _dtype_difference(node: torch.fx.Node, name: str, function: Callable[..., Any]) -> str:
    """Run NumPy on a few ones of the same dtypes; a call that needs other shapes or values says nothing."""

    def small(_: Any, value: Any) -> Any:
        example = _example(value)
        if isinstance(example, torch.Tensor):
            return np.ones((2,) * example.ndim, _dtype_of(value))
        if isinstance(example, torch.SymInt | torch.SymFloat):
            return 1 if isinstance(example, torch.SymInt) else 1.0
        return value

    try:
        with np.errstate(all="ignore"):
            args = map_leaves(tuple(node.args), small)
            result = function(*args, **map_leaves(dict(node.kwargs), small))
    except Exception:
        return ""
    found = node.meta.get("example_value")
    pairs = zip(result, found, strict=False) if isinstance(found, tuple | list) else [(result, found)]
    for one, other in pairs:
        if isinstance(other, torch.Tensor) and isinstance(one, np.ndarray | np.generic):
            wanted, got = one.dtype.name, str(other.dtype).removeprefix("torch.")
            if wanted != got:
                return f"{name}: NumPy {wanted}, compiled {got}"
    return ""
