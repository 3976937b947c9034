"""The user's interface: an `nn.Module` whose weights lie inside compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.engines.dispatch import opaque
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.messages import untraceable


class OptimizedModule(nn.Module):
    """Called like the original; runs the recipe's result, without gradients.

    It is callable from several threads, and from inside a model that is compiled. A copy shares its code. What an
    `nn.Module` does with its weights it refuses in words: they are inside compiled code, in types of their own.
    """

    def __init__(self, call: Callable[..., Any], device: str = "cpu") -> None:
        super().__init__()
        self._call, self._device = call, torch.device(device)
        self.training = False
        self._traced = opaque.traced(call) if isinstance(call, CallDispatcher) else None
        self._exported = opaque.refuses_export()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if opaque.exporting():
            return self._exported()
        if self._traced is not None and torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        return self._call(*args, **kwargs)

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__ = self.__dict__.copy()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(shared): shared for shared in (self._call, self._traced, self._exported)}
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __prepare_scriptable__(self) -> NoReturn:
        raise untraceable("torch.jit.script")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TorchwrightError(
            "an optimized model cannot be pickled: its code is compiled for this machine",
            next="result.save(DIR) keeps it, and tw.load(DIR).model brings it back",
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply `.to()`, `.half()`, `.cuda()`, … as far as they change nothing."""
        probe = torch.zeros(1, dtype=self._dtype(), device=self._device)
        moved = fn(probe)
        if moved.dtype != probe.dtype or moved.device.type != probe.device.type:
            _refuse(f"be brought to {moved.dtype} on {moved.device}", "optimize the original there")
        return self

    def _dtype(self) -> torch.dtype:
        """The type of the first floating-point input; the original's own, mostly."""
        calls = self._call.calls if isinstance(self._call, CallDispatcher) else []
        types = [getattr(torch, tensor.dtype) for call in calls for tensor in call.spec.tensors]
        return next((dtype for dtype in types if dtype.is_floating_point), torch.float32)

    def train(self, mode: bool = True) -> Self:
        if mode:
            _refuse(
                "be trained",
                "train the original, and optimize again; or call .train() of the parts that learn",
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            _refuse("record gradients", "train the original, and optimize again")
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        _refuse("name its parameters", "ask the original")

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        _refuse("give its parameters", "ask the original")

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        _refuse("name its buffers", "ask the original")

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        _refuse("give its buffers", "ask the original")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("give a state_dict", "result.save(DIR) keeps the model; the original has its weights")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("take a state_dict", "load it into the original, and optimize again")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load nothing as the child of a module that is given a state_dict."""
        if any(key.startswith(prefix) for key in state_dict):
            self.load_state_dict()


def _refuse(what: str, then: str) -> NoReturn:
    raise TorchwrightError(
        f"an optimized model cannot {what}: its weights are inside compiled code, without gradients",
        next=then,
    )
