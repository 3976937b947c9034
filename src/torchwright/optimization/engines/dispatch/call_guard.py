# pyright: basic
"""Fast path: recognize a call that matches the last guarded signature.

Most callers make one kind of call for hours. Comparing with its signature takes a tenth of the time of a lookup, and
the dispatcher's whole budget is three microseconds. The tensors are compared by the guards of torch.compile, in one
call of C++.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

_Tensor = torch.Tensor


class CallGuard:
    """Knows one kind of call: plain tensors in CPU memory, by themselves or in flat dicts, lists and tuples.

    The guards know the mode, too (gradients, inference, autocast): in another one nothing looks alike.
    """

    __slots__ = ("_check", "_containers", "_count", "_names")

    def __init__(self, args: tuple[Any, ...], names: tuple[str, ...], tensors: list[torch.Tensor]) -> None:
        values, self._names = args, names
        self._count = len(values)
        self._containers = (
            None
            if all(type(value) is _Tensor for value in values)
            else [_container(value) for value in values]
        )
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        of_tensors: Any = TensorGuards  # whose stub knows sizes of one tensor only
        self._check = of_tensors(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> CallGuard | None:
        """For calls like this one, whose tensors are `tensors`; None where there is more in it than plain tensors."""
        values = (*args, *kwargs.values())
        flat: list[Any] = []
        for value in values:
            flat += [value] if type(value) is _Tensor else _parts(value)
        plain = all(
            type(t) is _Tensor
            and t.is_cpu
            and t.layout is torch.strided
            and not t.is_neg()
            and not t.is_complex()
            for t in flat
        )
        if not plain or len(flat) != len(tensors):
            return None
        return cls(values, (str(len(args)), *kwargs), flat)

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a call that looks like the known one, or None."""
        if kwargs:
            if (str(len(args)), *kwargs) != self._names:
                return None
            args = (*args, *kwargs.values())
        elif len(self._names) > 1:
            return None
        if len(args) != self._count:
            return None
        if self._containers is None:
            tensors = list(args)
        else:
            tensors = []
            for value, container in zip(args, self._containers, strict=False):
                if container is None:
                    tensors.append(value)
                elif type(value) is not container[0]:
                    return None
                elif container[0] is dict:
                    if tuple(value) != container[1]:
                        return None
                    tensors += value.values()
                elif len(value) != container[1]:
                    return None
                else:
                    tensors += value
        return tensors if self._check(*tensors) else None


def _parts(value: Any) -> list[Any]:
    """Return the leaves of a flat container; for anything else a value that is not a tensor."""
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else [value]


def _container(value: Any) -> tuple[type, Any] | None:
    if type(value) is _Tensor:
        return None
    return type(value), tuple(value) if type(value) is dict else len(value)
