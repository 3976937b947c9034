"""Check that a module computes what one of torch's own layers does, so that a rewrite by type keeps its result.

`isinstance` cannot answer this: timm's `BatchNormAct2d` is an `nn.BatchNorm2d` that also applies an activation, its
`StdConv2d` an `nn.Conv2d` that standardizes its weight at every call.

    computes_as(layer, (nn.Linear, nn.Conv2d))    # True: exactly F.linear or F.conv2d of its weight and bias
    deviation(layer, (nn.Linear, nn.Conv2d))      # None, or the reason in words for a report
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static
from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

Kind = TypeVar("Kind", bound=nn.Module)

CALLING = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
"""Methods that every call of a module goes through."""
HARMLESS = frozenset(
    {
        "__init__",
        "__setstate__",
        "extra_repr",
        "reset_parameters",
        "_reset_parameters",
        "reset_running_stats",
        "_load_from_state_dict",
    }
)
"""Methods of torch's layers that take no part in a call."""


def computes_as(module: nn.Module, kinds: tuple[type[Kind], ...]) -> TypeGuard[Kind]:
    """Check that a call of `module` is what its base class among `kinds` computes, and nothing more."""
    return deviation(module, kinds) is None


def deviation(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """Return the reason why `module` cannot be replaced by a layer of one of `kinds` with its weights, or None."""
    return attached(module) or overridden(module, kinds)


def attached(module: nn.Module) -> str | None:
    """Return a reason if something hangs on this one module, which a replacement would lose, or None."""
    if module._forward_hooks or module._forward_pre_hooks or parametrize.is_parametrized(module):
        return "a hook or a parametrization is attached to it"
    return "its forward is not its class's" if "forward" in vars(module) else None


def overridden(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """Return a reason if `module` is not of `kinds`, or has another forward than the base class among them, or None.

    Hooks are not looked at: ranking by layer calls `forward` itself, from a hook of its own.
    """
    cls = type(module)
    base = next((each for each in cls.__mro__ if each in kinds), None)
    if base is None:
        return f"a {cls.__name__} is none of {', '.join(kind.__name__ for kind in kinds)}"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"a {cls.__name__} is read by its owner, not called"
    changed = [*_methods(module, base), *_properties(module, base)]
    return f"a {cls.__name__} may compute something else: it has its own {changed[0]}" if changed else None


def _methods(module: nn.Module, base: type[nn.Module]) -> Iterator[str]:
    """Methods that take part in a call and are not the base class's own."""
    own = (name for cls in _torch_classes(base) for name in vars(cls) if callable(getattr(base, name)))
    for name in dict.fromkeys((*CALLING, *own)):
        if name in HARMLESS or not hasattr(base, name):
            continue
        if name in vars(module) or getattr_static(type(module), name) is not getattr_static(base, name):
            yield name


def _properties(module: nn.Module, base: type[nn.Module]) -> Iterator[str]:
    """Settings and tensors of the base class that a subclass computes instead of storing."""
    settings = {*module._parameters, *module._buffers, *getattr(base, "__constants__", ())}
    mro = type(module).__mro__
    for cls in mro[: mro.index(base)]:
        yield from (name for name in vars(cls) if name in settings and isinstance(vars(cls)[name], property))


def _torch_classes(base: type[nn.Module]) -> list[type]:
    """The base class and its own bases below `nn.Module`."""
    return [cls for cls in base.__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
