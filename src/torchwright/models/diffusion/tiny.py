# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Small pipelines with random weights, saved as diffusers saves them: what tests and benchmarks open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "red", "blue", "bicycle", "dog", "on", "the", "sea", "house")


def tokenizer(words: Sequence[str] = WORDS) -> Any:
    """A tokenizer of these words, with T5's end of text and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *words))}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


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
    """A PixArt-Σ: `heads` heads of `width` in `layers` layers over latents of `sample` a side; returns `folder`."""
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
    _stir(denoiser)
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
        tokenizer=tokenizer(),
        text_encoder=transformers.T5EncoderModel(config),
        vae=vae,
        transformer=denoiser,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def _stir(model: torch.nn.Module) -> None:
    """Weights that diffusers begins at zero, such as the last layer's, as random as the others."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
