# pyright: basic
"""Which of torch's own kernels answers scaled_dot_product_attention."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import TOLERANCE, AttentionBy, outputs, worst_error
from torchwright.optimization.techniques.shared.wrapping import fused_attention as fused

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Technique):
    """Have one of torch's kernels answer every call of attention that it takes, and plain products the others."""

    name: ClassVar[str] = "attention_backend"
    phase: ClassVar[Phase] = Phase.ATTENTION
    needs: ClassVar[frozenset[str]] = frozenset({"sdpa"})
    gives: ClassVar[frozenset[str]] = frozenset({"rewritten_attention"})
    tolerance: ClassVar[float] = 1e-3

    backend: Literal["flash", "efficient", "cudnn", "math"] = "math"
    """`flash`: FlashAttention (Dao, 2023); `efficient`: memory-efficient attention (Rabe and Staats, 2021); `cudnn`:
    NVIDIA's library; `math`: matrix products and a softmax, which a compiler may fuse with what is around them."""

    def variants(self, target: Target) -> Iterable[Self]:
        # On a CPU flash is what torch takes by itself, wherever that takes the call.
        usual = "flash" if target.device.kind == "cpu" else None
        return [replace(self, backend=name) for name in KERNELS if name != usual]

    def refuse(self, target: Target) -> str | None:
        kind = target.device.kind
        if kind not in ("cpu", "cuda"):
            return f"which kernels torch has for {kind} is not known here"
        if kind == "cpu" and self.backend not in ON_CPU:
            return f"torch has this kernel for CUDA devices alone; for a CPU it has {' and '.join(ON_CPU)}"
        if self.backend == "cudnn" and not torch.backends.cudnn.is_available():
            return "this build of torch has no cuDNN"
        if (
            kind == "cuda"
            and self.backend == "flash"
            and not torch.backends.cuda.is_flash_attention_available()
        ):
            return "this build of torch has no FlashAttention"
        return None

    def apply(self, target: Target) -> None:
        cases = target.workload.cases(target.compute_dtype)
        with Choices() as usual:
            before = outputs(target.model, cases)
        model = WithBackend(target.model, KERNELS[self.backend])
        with Choices() as chosen:
            after = outputs(model, cases)
        wanted: int = KERNELS[self.backend].value
        if chosen.made == usual.made:
            raise RefusedTechnique(
                f"{self.backend} attention changes nothing",
                found=f"torch takes it for {usual.made.count(wanted)} of {len(usual.made)} calls already",
            )
        if wanted not in chosen.made:
            raise RefusedTechnique(
                f"{self.backend} attention takes no call", found=f"none of {len(chosen.made)}, torch says"
            )
        dtypes = {
            target.compute_dtype,
            *(tensor.dtype for tensor in before),
        }  # the user's own may be narrower
        error, limit = worst_error(before, after), max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
        if error > limit:
            raise RefusedTechnique(
                f"{self.backend} attention computes something else here",
                found=f"the outputs change by {error:.1e}, {limit:.0e} is allowed",
            )
        target.model = model
        target.settings.rewrites.append(functools.partial(expand_attention, KERNELS[self.backend]))
        self.cover(
            target,
            len(chosen.made),
            unit="calls of attention",
            kernel=self.backend,
            skipped={
                f"call {call}": "the kernel does not take it: plain products"
                for call, choice in enumerate(chosen.made)
                if choice != wanted
            },
        )


class WithBackend(nn.Module):
    """Runs the inner module with one kernel of attention and, for calls that it does not take, plain products."""

    def __init__(self, inner: nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.inner, self.backend = inner, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel([self.backend, SDPBackend.MATH]):
            return self.inner(*args, **kwargs)


class Choices(AttentionBy):
    """Notes which kernel torch chooses for each call of attention while it is entered."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.made: list[int] = []

    def _note(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.made.append(torch._fused_sdp_choice(*args, **kwargs))  # pyright: ignore[reportPrivateImportUsage]
        return fused(*args, **kwargs)


def expand_attention(backend: SDPBackend, graph_module: torch.fx.GraphModule) -> None:
    """Put what `backend` makes of each attention in an exported graph in its place.

    A graph holds attention whole, and whoever compiles it would choose the kernel.
    """
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        inputs = node.all_input_nodes

        def attend(*values: Any, node: torch.fx.Node = node, inputs: list[torch.fx.Node] = inputs) -> Any:
            known = dict(zip(inputs, values, strict=True))
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            return laid_out_as(node.meta["val"], ATTENTION.decompose(*args, **kwargs))

        with sdpa_kernel([backend, SDPBackend.MATH]):
            expanded = make_fx(attend, tracing_mode="symbolic")(
                *(given.meta["val"] for given in inputs)
            ).graph
        places = dict(zip(expanded.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            output = graph.graph_copy(expanded, places)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
    graph_module.recompile()


def laid_out_as(usual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return attention's output with its dimensions in memory as those of the kernel that it was exported with.

    An exported graph has views that only that order allows: (B, T, H·D) of flash attention's (B, H, T, D).
    """
    order = outer_first(usual)
    if outer_first(output) == order:
        return output
    back = sorted(range(len(order)), key=order.__getitem__)
    return output.permute(order).contiguous().permute(back)


def outer_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by their strides in the exported sizes, the largest first."""
    strides = [each.node.hint if isinstance(each, torch.SymInt) else each for each in tensor.stride()]
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
