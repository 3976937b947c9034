"""Helpers of techniques: compare outputs, look through wrapped models, replace modules under all their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchwright.core import nested
from torchwright.core.errors import unknown
from torchwright.workloads.base import Case

WRAPPED = "inner."
"""Wrappers that techniques and workloads put around a model call it `inner`."""


TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error of an output after a change that only reorders sums, per type of arithmetic."""


def plain_name(name: str) -> str:
    """A module's name in the model itself, whatever has been wrapped around it since."""
    while name.startswith(WRAPPED):
        name = name.removeprefix(WRAPPED)
    return name


def named(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Iterator[tuple[str, Any]]:
    """List the modules of this kind and of its subclasses under their plain names, those shared only once.

    A subclass may compute something else: ask `layer_types.deviation` before a module is replaced.
    """
    return ((plain_name(name), module) for name, module in model.named_modules() if isinstance(module, kind))


def of_classes(model: nn.Module, classes: Collection[str]) -> list[tuple[str, Any]]:
    """Every module whose class is one of these, written with its module's name, under its plain name."""
    modules = named(model, nn.Module)
    return [(name, m) for name, m in modules if f"{type(m).__module__}.{type(m).__qualname__}" in classes]


def known_names(option: str, given: Iterable[str], known: Iterable[str]) -> set[str]:
    """Strip wrappers that were added to the model since from the names `given`.

    Raises `UnknownName`, with the nearest of the `known` plain names, for a name that the model does not have.
    """
    known, asked = set(known), {plain_name(name) for name in given}
    strange = sorted(asked - known)
    if strange:
        near = difflib.get_close_matches(strange[0], known, n=6, cutoff=0.0)
        raise unknown(
            f"layer in {option}", strange[0], near, next=f"these are the nearest of {len(known)} names"
        )
    return asked


def layer_input(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the input of a linear layer's or convolution's call, by position or by torch's name; None in other
    calls.
    """
    return args[0] if args else kwargs.get("input")


def part_of(model: nn.Module, name: str) -> nn.Module:
    """The module of this name, whatever `model` was wrapped into since."""
    return next(module for found, module in model.named_modules() if plain_name(found) == name)


def linear_of(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Linear:
    """A linear layer over the memory of these."""
    layer = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=bias_N is not None, device="meta")
    layer.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
    if bias_N is not None:
        layer.bias = nn.Parameter(bias_N.detach(), requires_grad=False)
    return layer


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is, under every name that it has.

    torch's own encoder layers have a fused path that reads the weights of their children and does not call them; it
    is switched off where a child is replaced.
    """
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0
        if isinstance(parent, nn.TransformerEncoder) and any(m is new for m in parent.modules()):
            parent.use_nested_tensor = False


def replace_where(
    model: nn.Module,
    found: Iterable[tuple[str, Any]],
    reason: Callable[[Any], str | None],
    make: Callable[[Any], nn.Module],
) -> dict[str, str]:
    """Replace each module by `make(module)` unless there is a reason against it; return name → reason of the others."""
    left: dict[str, str] = {}
    for name, module in found:
        if why := reason(module):
            left[name] = why
        else:
            replace_module(model, module, make(module))
    return left


fused_attention = nn.functional.scaled_dot_product_attention


class AttentionBy(TorchFunctionMode):
    """While entered, every call of scaled_dot_product_attention goes to `attend`, with its own arguments."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        function = self._attend if func is fused_attention else func
        return function(*args, **(kwargs or {}))


def outputs(model: nn.Module, cases: Sequence[Case]) -> list[torch.Tensor]:
    """All output tensors of all cases; inputs are cloned first, for a case may hold state that a call writes to."""
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for case in cases:
            args, kwargs = nested.map_leaves(_copy, (case.args, case.kwargs))
            leaves = nested.leaves(model(*args, **kwargs))
            found += [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return found


def relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """By the Frobenius norm; 0 where zeros are expected."""
    norm = expected.norm()
    return ((got - expected).norm() / norm).item() if norm > 0 else 0.0


def worst_error(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """The largest relative error (Frobenius norm) of any tensor; infinite where the outputs do not correspond."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        a, b = a.double(), b.double()
        same = torch.equal(a.isfinite(), b.isfinite())
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        error = float((a - b).norm() / a.norm().clamp_min(1e-12)) if same else float("inf")
        worst = max(worst, error)
    return worst


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def stand_in_error(layer: Any, stand_in: nn.Module | None, x: torch.Tensor) -> float | None:
    """Relative error of what takes a layer's place, on the layer's input; None where nothing does."""
    # Not layer(x): the ranking calls this from a hook on the layer.
    return None if stand_in is None else relative_error(layer.forward(x).float(), stand_in(x).float())
