# pyright: basic, reportArgumentType=false
"""Which code may run although its branch is not taken: it changes nothing, and fails for no values of its tensors."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchwright.core.layer_types import deviation
from torchwright.optimization.techniques.shared.source import NotRewritten, bound_names

OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.BitAnd, ast.BitOr, ast.BitXor
)  # fmt: skip
"""Not `//` and `%`, which fail for an integer zero."""
FUNCTIONS = frozenset(
    [
        "abs",
        "add",
        "all",
        "amax",
        "amin",
        "any",
        "arange",
        "argmax",
        "argmin",
        "atan2",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bmm",
        "broadcast_to",
        "cat",
        "ceil",
        "celu",
        "chunk",
        "clamp",
        "clip",
        "clone",
        "concat",
        "contiguous",
        "cos",
        "cosh",
        "cummax",
        "cumsum",
        "detach",
        "diff",
        "dim",
        "div",
        "divide",
        "einsum",
        "elu",
        "eq",
        "erf",
        "exp",
        "exp2",
        "expand",
        "expand_as",
        "expm1",
        "eye",
        "flatten",
        "flip",
        "float",
        "floor",
        "full",
        "full_like",
        "ge",
        "gelu",
        "gt",
        "hardsigmoid",
        "hardswish",
        "half",
        "bfloat16",
        "double",
        "long",
        "int",
        "bool",
        "isfinite",
        "isinf",
        "isnan",
        "isclose",
        "layer_norm",
        "le",
        "leaky_relu",
        "lerp",
        "linear",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_softmax",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "logsumexp",
        "lt",
        "masked_fill",
        "matmul",
        "max",
        "maximum",
        "mean",
        "min",
        "minimum",
        "mish",
        "mm",
        "movedim",
        "mul",
        "multiply",
        "nan_to_num",
        "narrow",
        "ne",
        "neg",
        "norm",
        "normalize",
        "numel",
        "ones",
        "ones_like",
        "outer",
        "pad",
        "permute",
        "pow",
        "prod",
        "reciprocal",
        "relu",
        "relu6",
        "repeat",
        "reshape",
        "roll",
        "round",
        "rsqrt",
        "scaled_dot_product_attention",
        "select",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "sinh",
        "size",
        "softmax",
        "softplus",
        "sort",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "stack",
        "std",
        "sub",
        "subtract",
        "sum",
        "t",
        "tan",
        "tanh",
        "tensor",
        "tile",
        "to",
        "topk",
        "transpose",
        "tril",
        "triu",
        "type_as",
        "unbind",
        "unflatten",
        "unsqueeze",
        "var",
        "view",
        "view_as",
        "where",
        "zeros",
        "zeros_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "item",
        "logit",
        "interpolate",
    ]
)
"""Functions of torch, and methods of tensors: what they refuse depends on dtypes and shapes, which the trace shows."""
BUILTINS = (len, abs, float, int, bool, str, repr, isinstance, tuple, list, dict, round, format, min, max)
STATEFUL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""In training."""
FAILING = (nn.Embedding, nn.EmbeddingBag)
"""For an index out of range."""


@dataclass(frozen=True)
class Scope:
    """Return the values of names in a function; `self` is each of the modules whose method it is."""

    function: types.FunctionType
    modules: Sequence[nn.Module]

    def values(self, node: ast.AST) -> list[Any]:
        """Everything that a dotted name may stand for; nothing for a local one or any other expression."""
        if isinstance(node, ast.Attribute):
            found = self.values(node.value)
            known = [getattr(value, node.attr, None) for value in found]
            return known if all(value is not None for value in known) else []
        if not isinstance(node, ast.Name):
            return []
        code = self.function.__code__
        if self.modules and node.id == code.co_varnames[0]:
            return list(self.modules)
        if node.id in (*code.co_varnames, *code.co_cellvars):
            return []
        names = bound_names(self.function)
        outer = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
        return [names[node.id]] if node.id in names else [outer[node.id]] if node.id in outer else []


def require_pure(node: ast.AST, scope: Scope) -> None:
    """Raise `NotRewritten` with the reason where an expression may do more than compute its value, or may fail."""
    for part in ast.walk(node):
        reason = _reason(part, scope)
        if reason:
            raise NotRewritten(f"{reason} (line {getattr(part, 'lineno', getattr(node, 'lineno', 0))})")


def _reason(node: ast.AST, scope: Scope) -> str | None:
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda):
        return f"'{ast.unparse(node)}' is no plain expression"
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return f"'{ast.unparse(node)}' is a loop"
    if isinstance(node, ast.BinOp) and not isinstance(node.op, OPERATORS):
        divisor = node.right
        if not (isinstance(divisor, ast.Constant) and divisor.value):
            return f"'{ast.unparse(node)}' may fail for a zero"
    if isinstance(node, ast.Subscript) and not _is_fixed(node.slice):
        return f"'{ast.unparse(node)}' may be out of range on the side that is not taken"
    if isinstance(node, ast.Call):
        return _call_reason(node, scope)
    return None


def _call_reason(call: ast.Call, scope: Scope) -> str | None:
    if any(keyword.arg == "out" for keyword in call.keywords):
        return f"'{ast.unparse(call)}' writes into a tensor"
    known = scope.values(call.func)
    for value in known:
        if isinstance(value, nn.Module):
            reason = _module_reason(value)
            if reason:
                return f"'{ast.unparse(call.func)}' {reason}"
        elif not (value in BUILTINS or _is_torchs(value)):
            return f"what '{ast.unparse(call.func)}' does is not known"
    if not known and not (isinstance(call.func, ast.Attribute) and call.func.attr in FUNCTIONS):
        return f"what '{ast.unparse(call.func)}' does is not known"
    return None


def _is_torchs(value: Any) -> bool:
    module = getattr(value, "__module__", None) or getattr(
        type(getattr(value, "__self__", None)), "__module__", ""
    )
    ours = str(module).partition(".")[0] in ("torch", "builtins") or isinstance(
        value, types.BuiltinFunctionType
    )
    return ours and getattr(value, "__name__", "") in FUNCTIONS


def _module_reason(module: nn.Module) -> str | None:
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules"):
            return f"runs the code of {type(part).__name__}, which is not looked into"
        if reason := deviation(part, (type(part),)):
            return f"is called with more around it: {reason}"
        if isinstance(part, FAILING):
            return "fails for an index out of range"
        if isinstance(part, STATEFUL) and part.training:
            return "changes with each call in training"
    return None


def _is_fixed(index: ast.expr) -> bool:
    """Check whether an index consists only of numbers, slices and names of sizes."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(isinstance(part, ast.Slice) or _is_constant(part) for part in parts)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_constant(node.operand))


def stored(*statements: ast.stmt) -> Iterator[str]:
    """Names that statements bind."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
