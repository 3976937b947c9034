# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""A small pipeline with random weights, saved as diffusers saves it, for tests and benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "examples" / "glyphs"))
from glyphs import tokenizer

WORDS = ("a", "red", "blue", "bicycle", "dog", "on", "the", "sea", "house")


def write_pixart(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 2,
    width: int = 16,
    sample: int = 8,
    text: int = 32,
    seed: int = 0,
) -> Path:
    """Write a PixArt-Σ of `heads` heads of `width` in `layers` layers, latents of `sample` a side; return `folder`."""
    import diffusers
    import transformers

    torch.manual_seed(seed)
    inner = heads * width
    denoiser = diffusers.PixArtTransformer2DModel(
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=width,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=inner,
        caption_channels=text,
        sample_size=sample,
        patch_size=2,
        use_additional_conditions=False,
    )
    stir(denoiser)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=2 * sample,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    config = transformers.T5Config(
        d_model=text,
        d_ff=2 * text,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        vocab_size=32,
        feed_forward_proj="gated-gelu",
    )
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer(WORDS),
        text_encoder=transformers.T5EncoderModel(config),
        vae=vae,
        transformer=denoiser,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def stir(model: torch.nn.Module) -> None:
    """Make weights that diffusers begins at zero, such as the last layer's, as random as the others."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
