"""Denoisers of diffusers among the hundred: a step at 512 x 512 pixels, as guidance calls it (two rows).

Widths, heads, texts and latents are those that PixArt-alpha and Stable Diffusion 3 medium publish; the depth is cut to
what one thread calls in seconds, and all layers are alike. Random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hundred_models import Entry, Inputs

LATENT = 64
"""Latent pixels of a side: an autoencoder's eighth."""
STEPS = 1000
"""Of the noise, of which a call names one."""


def pixart(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, LATENT, LATENT),
        "encoder_hidden_states": torch.randn(batch, 120, 4096),
        "timestep": torch.randint(STEPS, (batch,)),
    }


def stable_diffusion_3(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 16, LATENT, LATENT),
        "encoder_hidden_states": torch.randn(batch, 333, 4096),
        "pooled_projections": torch.randn(batch, 2048),
        "timestep": torch.rand(batch) * STEPS,
    }


def entries() -> dict[str, Entry]:
    """By the class's name; none where diffusers is not installed."""
    try:
        import diffusers
    except ImportError:
        return {}

    def entry(name: str, feed: Callable[[int], Inputs], layers: int, whole: int, **published: Any) -> Entry:
        def build(batch: int, **fields: Any) -> tuple[nn.Module, Inputs]:
            settings = {"sample_size": LATENT, "num_layers": layers} | published | fields
            return getattr(diffusers, name)(**settings), feed(batch)

        return Entry(kind="denoiser", make=build, cut=f"{layers} layers of {whole}, 512 x 512 pixels")

    return {
        "PixArtTransformer2DModel": entry("PixArtTransformer2DModel", pixart, 4, 28, caption_channels=4096),
        "SD3Transformer2DModel": entry(
            "SD3Transformer2DModel",
            stable_diffusion_3,
            2,
            24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
        ),
    }
