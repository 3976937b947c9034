"""Half-precision weights and arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.layer_types import computes_as
from torchwright.optimization.techniques.base import Phase, Target
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.half import LAYERS, Lower, lower
from torchwright.optimization.techniques.shared.wrapping import known_names, named, plain_name


@dataclass(frozen=True, kw_only=True)
class Dtype(ForParts):
    """Compute in bfloat16 or float16: half the bytes, and the machine's fast matrix units."""

    name: ClassVar[str] = "dtype"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32", "floating"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})
    tolerance: ClassVar[float] = 3e-2

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Type of weights and activations; float16 has more digits and less range."""
    autocast: bool = False
    """Keep weights in float32 and cast operation by operation, as torch.autocast does; with `keep_float32` layer by
    layer: everything but linear layers and convolutions stays in float32, too."""
    keep_float32: tuple[str, ...] = ()
    """Module names (prefixes) that stay in float32."""

    @property
    def kernel(self) -> str | None:
        return self.dtype

    @property
    def half(self) -> str | None:
        return self.dtype

    @property
    def epsilon(self) -> float:
        # autocast adds, normalizes and reduces in float32 (BERT loses 0.60% by it, 1.25% with all in bfloat16).
        return torch.finfo(getattr(torch, self.dtype)).eps / (2 if self.autocast else 1)

    @property
    def errors_add(self) -> bool:
        return True

    @property
    def removed(self) -> frozenset[str]:
        return super().removed | ({"float32_range"} if self.dtype == "float16" else frozenset())

    def variants(self, target: Target) -> Iterable[Self]:
        delicate = target.workload.delicate(target.model)
        for each in self.by_parts(target):
            yield replace(each, dtype="bfloat16")
            if kept := tuple(name for name in delicate if each.covers(name)):
                yield replace(each, dtype="bfloat16", keep_float32=kept)
            yield replace(each, dtype="float16")
        if "language" not in target.properties:
            yield replace(self, dtype="bfloat16", autocast=True)

    def refuse(self, target: Target) -> str | None:
        if self.autocast and self.parts:
            return "autocast casts operation by operation, whatever the component: it takes no parts"
        if fault := super().refuse(target):
            return fault
        rates = target.device.tflops
        fast, full = rates.get(self.dtype), rates.get("float32")
        if self.dtype == "float16" and fast and full and fast < full:
            return f"float16 matrix products reach {fast:.2f} TFLOP/s here, float32 {full:.2f}"
        return None

    def apply(self, target: Target) -> None:
        dtype = getattr(torch, self.dtype)
        names = [plain_name(name) for name, _ in target.model.named_modules()]
        known_names(f"{self.name}:keep_float32", self.keep_float32, names)
        floating = [name for name, m in target.model.named_modules() if self.covers(name) and _has_floats(m)]
        skipped = {name: "kept in float32 by option" for name in floating if self._kept(name)}
        if self.autocast and self.keep_float32:
            layers = dict(named(target.model, LAYERS))
            changed = [name for name in layers if not self._kept(name)]
            for name in changed:
                layers[name].forward = lower(layers[name], dtype)
            skipped |= {name: "no layer" for name in floating if plain_name(name) not in layers}
        elif self.autocast:
            target.model = Autocast(target.model, dtype, target.device.kind)
            target.settings.endings.append(target.model.cast_layers)
        else:
            target.model = target.workload.cast(target.model, dtype, lambda name, module: self._kept(name))
            target.compute_dtype = _most(target.model, dtype) if self.parts else dtype
        self.cover(
            target,
            len(floating),
            unit="modules with weights",
            kernel=f"autocast to {self.dtype}" if self.autocast else self.dtype,
            skipped=skipped,
        )

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        if not self.autocast or not isinstance(module, LAYERS):
            return None
        return Lower(module, getattr(torch, self.dtype))

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, keep_float32=(*self.keep_float32, *names)) if self.autocast else None

    def _kept(self, name: str) -> bool:
        if not self.covers(name):
            return True
        return any(f"{plain_name(name)}.".startswith(f"{plain_name(kept)}.") for kept in self.keep_float32)


class Autocast(nn.Module):
    """Runs the inner module under torch.autocast and returns float32."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.inner, self.dtype, self.device = inner, dtype, device

    def cast_layers(self) -> None:
        """Keep what layers alone read in the lower type, to which autocast would cast it in every call.

        A subclass may compute with its weights before it multiplies by them, as to standardize them: it has them as is.
        """
        modules = list(self.inner.modules())
        readers = Counter(id(tensor) for module in modules for tensor in module._parameters.values())
        for layer in modules:
            for tensor in layer._parameters.values() if computes_as(layer, LAYERS) else ():
                if tensor is not None and readers[id(tensor)] == 1:
                    tensor.data = tensor.data.to(self.dtype)

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device, dtype=self.dtype):
            output = self.inner(*args, **kwargs)
        return nested.map_leaves(
            lambda leaf: (
                leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == self.dtype else leaf
            ),
            output,
        )


def _most(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """`dtype` where at least half of the weights' numbers are in it, else float32."""
    sizes = [(weight.dtype, weight.numel()) for weight in model.parameters() if weight.is_floating_point()]
    inside = sum(size for found, size in sizes if found == dtype)
    return dtype if 2 * inside >= sum(size for _, size in sizes) else torch.float32


def _has_floats(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_floating_point() for tensor in tensors)
