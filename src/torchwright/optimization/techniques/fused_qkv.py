"""One matrix for queries, keys and values of a denoiser's attention, as diffusers fuses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import part_of

FUSED = frozenset(
    {
        "CogVideoXTransformer3DModel",
        "FluxTransformer2DModel",
        "PixArtTransformer2DModel",
        "SD3Transformer2DModel",
        "UNet2DConditionModel",
    }
)
"""Denoisers whose attention reads fused layers; others have diffusers' method and ignore what it makes."""


@dataclass(frozen=True, kw_only=True)
class FusedQKV(Technique):
    """Compute queries, keys and values of a denoiser by one linear layer: less to start, one pass over its input."""

    name: ClassVar[str] = "fused_qkv"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"denoising_steps", "float_weights"})

    def refuse(self, target: Target) -> str | None:
        if not isinstance(target.workload, DiffusionWorkload):
            return "it has no denoiser of diffusers"
        denoiser = self._denoiser(target)
        if type(denoiser).__name__ not in FUSED:
            return f"diffusers fuses nothing of a {type(denoiser).__name__}"
        if any("Added" in type(each).__name__ for each in denoiser.attn_processors.values()):
            return (
                "its attention has keys and values of its own for the prompt, which diffusers does not fuse"
            )
        return None

    def apply(self, target: Target) -> None:
        denoiser = self._denoiser(target)
        layers = [module for module in denoiser.modules() if hasattr(module, "to_q")]
        with torch.no_grad():
            denoiser.fuse_qkv_projections()
        fused = sum(_drop_unused(layer) for layer in layers)
        self.cover(
            target,
            len(layers),
            changed=fused,
            unit="attention layers",
            kernel="one linear layer for queries, keys and values",
        )

    @staticmethod
    def _denoiser(target: Target) -> Any:
        assert isinstance(target.workload, DiffusionWorkload)
        return part_of(target.model, target.workload.opened.family.denoiser)


def _drop_unused(module: Any) -> bool:
    """Delete the layers that the fused one replaces, which diffusers keeps as well; return whether there were any."""
    names = ("to_q", "to_k", "to_v") if hasattr(module, "to_qkv") else ("to_k", "to_v")
    if not (hasattr(module, "to_qkv") or hasattr(module, "to_kv")):
        return False
    if hasattr(module, "to_added_qkv"):
        names += ("add_q_proj", "add_k_proj", "add_v_proj")
    for name in names:
        delattr(module, name)
    return True
