"""Fold each batch norm into the convolution or linear layer before it, where that is the same function.

Classes decide nothing here, because subclasses compute more than their base (timm's `BatchNormAct2d` applies an
activation, its `Conv2dSame` pads, its `StdConv2d` standardizes its weight). A layer takes a batch norm if one call of
the model shows that its output is a product of its own weight and bias; of a batch norm's subclass what follows
`F.batch_norm` stays (`rest_of_norm.py`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.overrides import TorchFunctionMode

from torchwright.core import nested
from torchwright.core.layer_types import attached
from torchwright.optimization.techniques.shared.rest_of_norm import NORMS, rest_of_norm
from torchwright.optimization.techniques.shared.wrapping import named, replace_module
from torchwright.workloads.base import Case

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FOLDABLE = (*PLAIN, *TRANSPOSED, nn.Linear)
PRODUCTS = frozenset(
    {
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.linear,
    }
)
"""Functions of (input, weight, bias) whose output channels scale with those of weight and bias."""


@dataclass(kw_only=True)
class Folded:
    """The result of `fold`."""

    replaced: list[tuple[nn.Module, nn.Module]]
    """(old, new) modules, in the order of replacement."""
    skipped: dict[str, str]
    """Batch norms left alone, and why."""
    total: int

    def undo(self, model: nn.Module) -> None:
        for old, new in reversed(self.replaced):
            replace_module(model, new, old)


def fold(model: nn.Module, cases: Sequence[Case]) -> Folded:
    """Fold the batch norms of `model` that can be; a call on the first case shows which layer each one follows."""
    norms = dict(named(model, NORMS))
    folded = Folded(replaced=[], skipped={}, total=len(norms))
    trace = trace_calls(model, cases[0])
    for name, norm in norms.items():
        layer, reason = trace.layer_before(norm)
        if layer is None:
            folded.skipped[name] = reason
            continue
        rest = rest_of_norm(norm)
        if rest is None:
            folded.skipped[name] = f"a {type(norm).__name__} does not begin with its batch norm"
            continue
        for old, new in ((layer, _fuse(layer, norm)), (norm, rest)):
            replace_module(model, old, new)
            folded.replaced.append((old, new))
    return folded


@dataclass(kw_only=True)
class NormTrace:
    """Who made each tensor that a batch norm read, and who else read it, in one call of the model."""

    source: dict[nn.Module, nn.Module | None] = field(default_factory=dict)
    """Batch norm → the layer whose output it was given."""
    calls: Counter[nn.Module] = field(default_factory=Counter)
    shared: set[nn.Module | None] = field(default_factory=set)
    """Layers whose output is read by more than their batch norm."""
    other: set[nn.Module] = field(default_factory=set)
    """Layers that gave something else than a product of their weight and bias."""
    dims: dict[nn.Module, int] = field(default_factory=dict)

    def layer_before(self, norm: Any) -> tuple[Any, str]:
        """Return the layer that `norm` can be folded into, or None and the reason."""
        layer = self.source.get(norm)
        if self.calls[norm] == 0:
            return None, "it is not called on the example inputs"
        if self.calls[norm] > 1:
            return None, f"it is called {self.calls[norm]} times"
        if layer is None:
            return None, "its input is not the output of a convolution or linear layer"
        if self.calls[layer] > 1:
            return None, f"the layer before it is called {self.calls[layer]} times"
        if layer in self.shared:
            return None, "something else reads the output of the layer before it"
        if norm.training or norm.running_mean is None:
            return None, "it normalizes by the statistics of the batch"
        if reason := attached(norm):
            return None, reason
        if reason := attached(layer):
            return None, f"the layer before it: {reason}"
        if layer in self.other:
            return None, f"the layer before it, a {type(layer).__name__}, computes something else"
        if isinstance(layer, TRANSPOSED) and layer.groups > 1:
            return None, "the layer before it is a transposed convolution in groups"
        if isinstance(layer, nn.Linear) and self.dims[layer] != 2:
            return None, "it normalizes over another axis than the linear layer's outputs"
        return layer, ""


def trace_calls(model: nn.Module, case: Case) -> NormTrace:
    """Run one case and watch the layers and batch norms in it."""
    trace = NormTrace()
    product: tuple[Any, ...] = (None, None, None)  # the last one: output, weight and bias
    made: dict[int, tuple[nn.Module, weakref.ref[torch.Tensor]]] = {}
    inside: list[nn.Module] = []

    def maker(value: Any) -> nn.Module | None:
        layer, tensor = made.get(id(value), (None, None))
        return layer if tensor is not None and tensor() is value else None

    class Readers(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if not inside and getattr(func, "__name__", "") not in ("__get__", "dim", "size"):
                trace.shared |= {maker(leaf) for leaf in nested.leaves((args, kwargs or {}))}
            result = func(*args, **(kwargs or {}))
            if func in PRODUCTS:
                nonlocal product
                product = result, *_weight_and_bias(*args, **(kwargs or {}))
            return result

    def layer_done(module: Any, args: tuple[Any, ...], output: Any) -> None:
        trace.calls[module] += 1
        own = output, module._parameters.get("weight"), module._parameters.get("bias")
        if any(one is not other for one, other in zip(product, own, strict=True)):
            trace.other.add(module)
        if isinstance(output, torch.Tensor):
            made[id(output)] = module, weakref.ref(output)
            trace.dims[module] = output.dim()

    def norm_called(module: nn.Module, args: tuple[Any, ...]) -> None:
        trace.calls[module] += 1
        inside.append(module)
        layer = maker(args[0]) if args else None
        if layer in trace.source.values():
            trace.shared.add(layer)
        trace.source[module] = layer

    def norm_done(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inside.pop()

    handles = []
    for module in model.modules():
        if isinstance(module, FOLDABLE):
            handles.append(module.register_forward_hook(layer_done))
        elif isinstance(module, NORMS):
            handles.append(module.register_forward_pre_hook(norm_called))
            handles.append(module.register_forward_hook(norm_done))
    try:
        with torch.no_grad(), Readers():
            result = model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    trace.shared |= {maker(leaf) for leaf in nested.leaves(result)}
    return trace


def _weight_and_bias(
    input: Any, weight: Any, bias: Any = None, *rest: Any, **settings: Any
) -> tuple[Any, Any]:
    """The two arguments of any of `PRODUCTS`."""
    return weight, bias


def _fuse(layer: Any, norm: Any) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, TRANSPOSED))
