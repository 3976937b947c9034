"""A picture decoded in tiles: what the VAE holds at a time is a tile's, and neighbours are blended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torchwright.models.diffusion.workload import DiffusionWorkload
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import part_of

SMALLEST = 4
"""Latents per side of a tile: with fewer, diffusers' overlap of a quarter vanishes."""


@dataclass(frozen=True, kw_only=True)
class VaeTiling(Technique):
    """Decode large pictures tile by tile: less memory, for the overlaps' time and seams that are blended."""

    name: ClassVar[str] = "vae_tiling"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"denoising_steps"})

    tile: int = 64
    """Latents per side of a tile; a quarter of the side overlaps the next tile."""

    def variants(self, target: Target) -> Iterable[Self]:
        yield self

    def refuse(self, target: Target) -> str | None:
        if not isinstance(target.workload, DiffusionWorkload):
            return "it has no VAE"
        vae: Any = part_of(target.model, "vae")
        if type(vae).__name__ != "AutoencoderKL":
            return f"tiles are those of diffusers' AutoencoderKL; this VAE is a {type(vae).__name__}"
        if self.tile < SMALLEST:
            return f"a tile of {self.tile} latents a side: {SMALLEST} are the fewest"
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        height, width = (side // scale for side in (target.workload.height, target.workload.width))
        if max(height, width) <= self.tile:
            return f"the picture's latents are {height}x{width}, all of them in one tile of {self.tile}"
        return None

    def apply(self, target: Target) -> None:
        vae: Any = part_of(target.model, "vae")
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        vae.enable_tiling()
        vae.tile_latent_min_size, vae.tile_sample_min_size = self.tile, self.tile * scale
        self.cover(target, 1, unit="VAE", kernel=f"tiles of {self.tile} latents")
