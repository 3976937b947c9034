"""Simulated tensors of a card: they report to be on it, and compute on the CPU.

    with simulated(torch.device("cuda", 0)): ...

An operator that mixes them with CPU tensors fails as on a real device, and so does reading a tensor without fetching
it. Compiled code is not simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ACROSS = (aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default)
"""Operators that take tensors of both."""
FETCH = (torch.Tensor.cpu, torch.Tensor.to)


class Elsewhere(torch.Tensor):
    """A tensor of the CPU, `inner`, that says it lies at `place`."""

    inner: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, place: torch.device) -> Elsewhere:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        sizes = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        # A real card's would ask for a driver.
        found = make(cls, inner.size(), **sizes, dtype=inner.dtype, device="cpu")
        found.inner, found.place = inner, place
        return found

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.place

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.place.type == "cuda"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Elsewhere) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        torch.Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Elsewhere({self.inner!r}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        place = next(leaf.place for leaf in leaves if isinstance(leaf, Elsewhere))
        return _run(func, args, kwargs or {}, place)


@contextlib.contextmanager
def simulated(place: torch.device) -> Iterator[None]:
    """Inside, tensors of this thread may lie at `place`; gradients cannot be taken."""
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    inference: Any = torch.inference_mode
    enter, leave = inference.__enter__, inference.__exit__
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # In inference mode composite operators are not decomposed.
    inference.__enter__ = lambda self: None
    inference.__exit__ = lambda self, *error: None
    try:
        with _Numbered(place), _Dispatched(place), torch.no_grad():
            yield
    finally:
        inference.__enter__, inference.__exit__ = enter, leave
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


class _Dispatched(TorchDispatchMode):
    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self._place)


class _Numbered(TorchFunctionMode):
    """Says which card: PyTorch would ask a driver."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._place
        if func is torch.device and len(args) + len(kwargs or {}) > 1:  # it says which card already
            return func(*args, **kwargs or {})
        unnumbered = torch.device(place.type)

        def number(leaf: Any) -> Any:
            return place if leaf == place.type or leaf == unnumbered else leaf

        args, kwargs = pytree.tree_map_only((str, torch.device), number, (args, kwargs or {}))
        if func is torch.tensor and kwargs.get("device") == place:  # which copies past every operator
            made: Any = func(*args, **kwargs | {"device": "cpu"})
            return made.to(place)
        own = args and isinstance(args[0], Elsewhere)
        if func is torch.Tensor.__deepcopy__ and own:  # which copies the storage, that has none
            return args[0].clone()
        if func in FETCH and own:
            places = [
                where for where in (*args[1:], *kwargs.values()) if isinstance(where, str | torch.device)
            ]
            if func is torch.Tensor.cpu or any(torch.device(where).type == "cpu" for where in places):
                return func(args[0].inner.clone(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any], place: torch.device) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim()]
    if there and here and func not in ACROSS:
        raise RuntimeError(f"{func} expects all tensors to be on the same device, but found {place} and cpu")
    stays = isinstance(args[0], Elsewhere) if func is aten.copy_.default else bool(there)
    device = kwargs.get("device")
    if device is not None:
        stays = stays or torch.device(device).type == place.type
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = pytree.tree_map_only(Elsewhere, lambda leaf: leaf.inner, (args, kwargs))
    out = func(*args, **kwargs)
    if not stays:
        return out
    # An operator that writes in place returns what it was given.
    known = {id(tensor.inner): tensor for tensor in there}
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: known[id(leaf)] if id(leaf) in known else Elsewhere(leaf, place), out
    )
