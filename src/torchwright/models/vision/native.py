"""The layers of a vision encoder on Torchwright's kernels, in place of transformers' own.

A layer is recognized by its parts, and the layer that replaces it is compared with it on random inputs, once for each
class; where they differ, transformers' layer stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import first_line
from torchwright.core.scheme import BF16, Scheme
from torchwright.hardware.kernels import ops, reference
from torchwright.hardware.kernels.limits import LARGEST_HEAD
from torchwright.hardware.kernels.linear import PackedLinear

LONGEST = 2048
"""Patches that attend to each other on our kernel; the scores of more would not fit the cache, and SDPA is faster."""
GATES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
"""Class of an activation in transformers → our kernel's name."""
TOLERANCE = 0.02
"""Relative error of a layer in bfloat16 on random inputs: rounding in another place costs 0.005, another layer 1."""


Pack = Callable[[str, torch.Tensor, torch.Tensor | None], PackedLinear]
"""Packs the layer of a name, a weight (N, K) and a bias (N,)."""


class Replacement(nn.Module):
    """A layer that computes what a layer of transformers does."""

    @abstractmethod
    def __init__(self, layer: Any, pack: Pack) -> None:
        super().__init__()

    @staticmethod
    @abstractmethod
    def takes(layer: Any) -> bool:
        """Check whether a layer has the parts of those that this one replaces."""

    @staticmethod
    @abstractmethod
    def example(layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords of a call of the layer, by which both are compared."""


class Patches(Replacement):
    """Patches as rows of pixels: a convolution whose window is the whole row is a linear layer."""

    def __init__(self, layer: Any, pack: Pack) -> None:
        super().__init__(layer, pack)
        conv: nn.Conv3d = layer.proj
        self.linear = pack("linear", conv.weight.flatten(1), conv.bias)
        self.dtype = conv.weight.dtype

    @staticmethod
    def takes(layer: Any) -> bool:
        parts = _parts(layer)
        conv = parts.get("proj")
        return len(parts) == 1 and type(conv) is nn.Conv3d and conv.stride == conv.kernel_size

    @staticmethod
    def example(layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = layer.proj.weight
        return (torch.randn(8, weight[0].numel(), dtype=weight.dtype),), {}

    def forward(self, pixels_NP: torch.Tensor) -> torch.Tensor:
        return self.linear(pixels_NP.view(-1, self.linear.in_features).to(self.dtype))


class Attention(Replacement):
    """Attention of patches within their sequences (`cu_seqlens`), with rotary embeddings.

    No mask is made: each sequence is computed by itself.
    """

    def __init__(self, layer: Any, pack: Pack) -> None:
        super().__init__(layer, pack)
        self.qkv = pack("qkv", layer.qkv.weight, layer.qkv.bias)
        self.proj = pack("proj", layer.proj.weight, layer.proj.bias)
        self.heads, self.scale = layer.num_heads, layer.scaling

    @staticmethod
    def takes(layer: Any) -> bool:
        if set(_parts(layer)) != {"qkv", "proj"} or not hasattr(layer, "scaling"):
            return False
        size = layer.qkv.out_features // (3 * layer.num_heads)
        return size % 2 == 0 and size <= LARGEST_HEAD

    @staticmethod
    def example(layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight, tokens = layer.qkv.weight, 24
        angles_NR = torch.randn(tokens, len(weight) // (6 * layer.num_heads))
        turned = torch.cat([angles_NR, angles_NR], -1)
        x_NE = torch.randn(tokens, weight.shape[1], dtype=weight.dtype)
        starts = torch.tensor([0, 16, 21, tokens], dtype=torch.int32)
        return (x_NE,), {"cu_seqlens": starts, "position_embeddings": (turned.cos(), turned.sin())}

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        qkv_NF = self.qkv(hidden_states)
        half = qkv_NF.shape[1] // (6 * self.heads)
        cos_NR, sin_NR = (angles[:, :half].float() for angles in position_embeddings)
        return self.proj(varlen_attention(qkv_NF, cos_NR, sin_NR, cu_seqlens, self.heads, self.scale))


class GatedMLP(Replacement):
    """A feed-forward block with a gate: the activation of one product times the other."""

    def __init__(self, layer: Any, pack: Pack) -> None:
        super().__init__(layer, pack)
        both = layer.gate_proj, layer.up_proj
        bias = None if both[0].bias is None else torch.cat([part.bias for part in both])
        self.gate_up = pack("gate_up", torch.cat([part.weight for part in both]), bias)
        self.down = pack("down", layer.down_proj.weight, layer.down_proj.bias)
        self.kind = GATES[_gate(layer)]

    @staticmethod
    def takes(layer: Any) -> bool:
        parts = _parts(layer)
        return {"gate_proj", "up_proj", "down_proj", "act_fn"} == set(parts) and _gate(layer) in GATES

    @staticmethod
    def example(layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = layer.gate_proj.weight
        return (torch.randn(8, weight.shape[1], dtype=weight.dtype),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(ops.gated(self.gate_up(x), self.kind))


class Norm(Replacement):
    """Root mean square normalization, in float32 within."""

    factor_E: torch.Tensor

    def __init__(self, layer: Any, pack: Pack) -> None:
        super().__init__(layer, pack)
        self.weight, self.eps = layer.weight, layer.variance_epsilon
        self.register_buffer("factor_E", layer.weight.detach().float(), persistent=False)

    @staticmethod
    def takes(layer: Any) -> bool:
        return hasattr(layer, "variance_epsilon") and not _parts(layer)

    @staticmethod
    def example(layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(8, len(layer.weight), dtype=layer.weight.dtype),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.factor_E, self.eps)


REPLACEMENTS: tuple[type[Replacement], ...] = (Patches, Attention, GatedMLP, Norm)


class OntoKernels:
    """Puts an encoder's layers on kernels, each as it is reached, so that no two copies of the weights are held.

    onto = OntoKernels(scheme)
    onto.replace(model)
    onto.kept           classes whose layers stayed → the reason

    `schemes` are those of some packed layers by name, in place of `scheme`.
    """

    def __init__(self, scheme: Scheme | None, schemes: Mapping[str, Scheme] | None = None) -> None:
        self._scheme, self._schemes = scheme or BF16, schemes or {}
        self._agreed: set[str] = set()
        self.kept: dict[str, str] = {}

    @torch.no_grad()
    def replace(self, owner: nn.Module, path: str = "") -> None:
        """Replace what is below a module, whose own name is `path`."""
        for name, layer in owner.named_children():
            inner = f"{path}.{name}" if path else name
            made = self._made(layer, inner)
            if made is None:
                self.replace(layer, inner)
            else:
                setattr(owner, name, made.eval())

    def _made(self, layer: Any, path: str) -> nn.Module | None:
        if type(layer) is nn.Linear:
            return packed(layer.weight, layer.bias, self._schemes.get(path, self._scheme))
        kind = type(layer).__name__
        for replacement in () if kind in self.kept else REPLACEMENTS:
            if not replacement.takes(layer):
                continue
            if kind not in self._agreed:
                fault = _difference(layer, replacement)
                if fault is not None:
                    self.kept[kind] = fault
                    return None
                self._agreed.add(kind)
            return replacement(layer, self._packer(path))
        return None

    def _packer(self, path: str) -> Pack:
        def pack(name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PackedLinear:
            return packed(weight_NK, bias_N, self._schemes.get(f"{path}.{name}", self._scheme))

        return pack


def packed(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, scheme: Scheme) -> PackedLinear:
    return PackedLinear(weight_NK.detach(), None if bias_N is None else bias_N.detach(), scheme)


def varlen_attention(
    qkv_NF: torch.Tensor,
    cos_NR: torch.Tensor,
    sin_NR: torch.Tensor,
    starts: torch.Tensor,
    heads: int,
    scale: float,
    *,
    longest: int = LONGEST,
) -> torch.Tensor:
    """See `reference.varlen_attention`; a sequence of more than `longest` patches goes through SDPA by itself.

    Which of the two computes a sequence depends on its own length alone.
    """
    ends = list(pairwise(starts.tolist()))
    if max((stop - start for start, stop in ends), default=0) <= longest:
        return ops.varlen_attention(qkv_NF, cos_NR, sin_NR, starts, heads, scale)
    found: list[torch.Tensor] = []
    for start, stop in ends:
        own = slice(start, stop)
        part = qkv_NF[own], cos_NR[own], sin_NR[own]
        if stop - start > longest:
            found.append(_sdpa(*part, heads, scale))
        else:
            alone = starts.new_tensor([0, stop - start])
            found.append(ops.varlen_attention(*part, alone, heads, scale))
    return torch.cat(found)


def _sdpa(
    qkv_NF: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    q_HND, k_HND, v_HND = reference.turned(qkv_NF, cos_NR, sin_NR, heads)
    out_HND = F.scaled_dot_product_attention(q_HND[None], k_HND[None], v_HND[None], scale=scale)[0]
    return out_HND.transpose(0, 1).flatten(1)


def _parts(layer: nn.Module) -> dict[str, Any]:
    return dict(layer.named_children())


def _gate(layer: Any) -> str:
    return type(layer.act_fn).__name__


def _difference(layer: Any, replacement: type[Replacement]) -> str | None:
    """Return how the results of two layers differ on the same random inputs, None where they agree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        args, keywords = replacement.example(layer)
    try:
        wanted = layer(*args, **keywords).float()
        got = replacement(layer, lambda _, weight, bias: packed(weight, bias, BF16))(
            *args, **keywords
        ).float()
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {first_line(error)}"
    if got.shape != wanted.shape:
        return f"outputs of shape {list(got.shape)} for {list(wanted.shape)}"
    error = float((got - wanted).norm() / wanted.norm())
    return None if error <= TOLERANCE else f"its results differ by {error:.2g}"
