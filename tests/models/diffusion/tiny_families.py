# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""A small random pipeline of each family, saved as diffusers saves them.

python tests/models/diffusion/tiny_families.py FOLDER [FAMILY …]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from pixart import WORDS, stir, tokenizer, write_pixart

TEXT = 32


def t5() -> Any:
    config = transformers.T5Config(
        d_model=TEXT,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        vocab_size=32,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def clip(projected: bool = False) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=32,
        hidden_size=TEXT,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=TEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def words(longest: int = 77, more: tuple[str, ...] = ()) -> Any:
    found = tokenizer((*WORDS, *more))
    found.model_max_length = longest
    return found


def vae(channels: int = 4, **options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **options,
    )


def unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **options,
    )


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=words(),
        unet=unet(cross_attention_dim=TEXT),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
    )


def stable_diffusion_xl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip(),
        text_encoder_2=clip(projected=True),
        tokenizer=words(),
        tokenizer_2=words(),
        unet=unet(
            cross_attention_dim=2 * TEXT,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=TEXT + 6 * 8,
            use_linear_projection=True,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )


def stable_diffusion_3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=clip(projected=True),
        tokenizer=words(),
        text_encoder_2=clip(projected=True),
        tokenizer_2=words(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux() -> Any:
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=clip(),
        tokenizer=words(),
        text_encoder_2=t5(),
        tokenizer_2=words(64),
    )


def sana() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=32,
        hidden_size=TEXT,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return diffusers.SanaPipeline(
        tokenizer=words(),
        text_encoder=transformers.Gemma2Model(config),
        vae=diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=TEXT,
            sample_size=16,
            patch_size=1,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def qwen_image() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": TEXT,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "max_position_embeddings": 256,
        },
        vision_config={
            "depth": 1,
            "hidden_size": TEXT,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT,
        },
    )
    z_dim = 4
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * z_dim,
            out_channels=z_dim,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            guidance_embeds=False,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=z_dim,
            dim_mult=[1, 1, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1] * z_dim,
            latents_std=[0.9] * z_dim,
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=words(512),
    )


def cogvideox() -> Any:
    return diffusers.CogVideoXPipeline(
        tokenizer=words(226),
        text_encoder=t5(),
        vae=diffusers.AutoencoderKLCogVideoX(
            in_channels=3,
            out_channels=3,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=TEXT,
            num_layers=2,
            sample_width=2,
            sample_height=2,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=226,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def ltx() -> Any:
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False, False, False, False, False),
            upsample_residual=(False, False, False, False),
            upsample_factor=(1, 1, 1, 1),
            timestep_conditioning=False,
            patch_size=1,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
        ),
        text_encoder=t5(),
        tokenizer=words(128),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=TEXT,
        ),
    )


FAMILIES: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "stable_diffusion": (stable_diffusion, (16, 24)),
    "stable_diffusion_xl": (stable_diffusion_xl, (16, 24)),
    "stable_diffusion_3": (stable_diffusion_3, (16, 24)),
    "flux": (flux, (16, 24)),
    "sana": (sana, (32, 32)),
    "qwen_image": (qwen_image, (16, 24)),
    "cogvideox": (cogvideox, (32, 48)),
    "ltx": (ltx, (32, 64)),
}
"""How one is made, and a size (height, width) that is not square where the family allows it."""


def write(family: str, folder: Path, seed: int = 0) -> Path:
    """A pipeline of `FAMILIES`, or "pixart", in `folder`."""
    if family == "pixart":
        return write_pixart(folder, seed=seed)
    torch.manual_seed(seed)
    pipe = FAMILIES[family][0]()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            stir(part)
    pipe.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    place, *chosen = sys.argv[1:]
    for name in chosen or ["pixart", *FAMILIES]:
        print(write(name, Path(place) / name))
