# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Train a small diffusion transformer that draws digits, and a classifier that reads them.

    python examples/glyphs/train_glyphs.py FOLDER [--seconds 240] [--seed 0] [--look SECONDS]

FOLDER is a pipeline of diffusers (PixArt's architecture), with `reader/` next to its components. It learns in
minutes of one core by these choices: pictures of 32 x 32 whose latents are 8 x 8, 2 x 2 per token, so 16 tokens each;
a text encoder that stays random, since its words differ enough; flow matching, whose target has the same size at every
step. Seconds are of the processor, so that a busy machine trains as long as a quiet one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from torch import nn

import glyphs

FILES = {"sans": "DejaVuSans-Bold.ttf", "serif": "DejaVuSerif-Bold.ttf", "mono": "DejaVuSansMono.ttf"}
PATCH, CHANNELS = 4, 4
"""Pixels of a latent's side, and numbers that describe it."""
WIDTH, HEADS, LAYERS, TEXT = 128, 4, 4, 32
BATCH, RATE, WARM_UP, EMA = 64, 2e-3, 60, 0.995
UNPROMPTED = 0.1
"""Pictures that are learnt without their prompt, which guidance needs."""
VARIANTS = 100


def draw(font: str, digit: int, random: np.random.Generator) -> np.ndarray:
    """A digit, white on black, (32, 32) from 0 to 1, somewhat off the middle and of a size of its own."""
    picture = Image.new("L", (glyphs.SIDE, glyphs.SIDE))
    face = ImageFont.truetype(FILES[font], float(random.uniform(25, 30)))
    x, y = (glyphs.SIDE / 2 + random.uniform(-1.5, 1.5, 2)).tolist()
    ImageDraw.Draw(picture).text((x, y), str(digit), fill=255, font=face, anchor="mm")
    return np.asarray(picture, dtype=np.float32) / 255


def corpus(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (N, 1, 32, 32) from 0 to 1, and the number of each one's prompt."""
    random = np.random.default_rng(seed)
    prompts = glyphs.prompts()
    pictures = [
        draw(prompt.split()[1], glyphs.digit_of(prompt), random)
        for prompt in prompts
        for _ in range(VARIANTS)
    ]
    numbers = torch.arange(len(prompts)).repeat_interleave(VARIANTS)
    return torch.from_numpy(np.stack(pictures))[:, None], numbers


class Clock:
    """Processor time from now on, and the progress within a share of that time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, time.process_time()

    @property
    def done(self) -> float:
        return (time.process_time() - self.begun) / self.seconds

    def steps(self) -> Iterator[int]:
        step = 0
        while self.done < 1:
            yield step
            step += 1


def train_reader(pictures_N1HW: torch.Tensor, numbers_N: torch.Tensor, seconds: float) -> nn.Module:
    """A classifier of digits, trained under noise, so that it reads what is drawn a little wrong."""
    reader, clock = glyphs.make_reader(), Clock(seconds)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=2e-3)
    digits_N = numbers_N % len(glyphs.DIGITS)
    for _ in clock.steps():
        chosen = torch.randint(len(pictures_N1HW), (64,))
        noisy = pictures_N1HW[chosen] + 0.2 * torch.rand(64, 1, 1, 1) * torch.randn(64, 1, 32, 32)
        loss = F.cross_entropy(reader(noisy), digits_N[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * max(0.05, 1 - clock.done)
    return reader.eval()


def to_latents(pictures_N1HW: torch.Tensor) -> torch.Tensor:
    """(N, 4, 8, 8): the four directions in which patches of 4 x 4 pixels differ most, each of mean 0 and deviation 1.

    A linear encoder that needs no training; the VAE's decoder learns its way back.
    """
    patches_NPL = F.unfold(pictures_N1HW * 2 - 1, PATCH, stride=PATCH)
    flat_MP = patches_NPL.transpose(1, 2).flatten(0, 1)
    flat_MP = flat_MP - flat_MP.mean(0)
    values, vectors_PP = torch.linalg.eigh(flat_MP.T @ flat_MP / len(flat_MP))
    print(f"latents keep {values[-CHANNELS:].sum() / values.sum():.1%} of what patches differ by", flush=True)
    latents_MC = flat_MP @ vectors_PP[:, -CHANNELS:]
    latents_MC /= latents_MC.std(0)
    side = glyphs.SIDE // PATCH
    return latents_MC.view(len(pictures_N1HW), side, side, CHANNELS).permute(0, 3, 1, 2).contiguous()


def make_vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=glyphs.SIDE,
        scaling_factor=1.0,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )


def train_decoder(latents_N: torch.Tensor, pictures_N1HW: torch.Tensor, seconds: float) -> Any:
    """A VAE whose decoder gives the pictures of these latents; its encoder is never asked, and stays as it began."""
    vae, clock = make_vae(), Clock(seconds)
    trained = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=4e-3)
    loss = torch.zeros(())
    for _ in clock.steps():
        chosen = torch.randint(len(latents_N), (24,))
        given = latents_N[chosen] + 0.1 * torch.randn(24, CHANNELS, 8, 8)
        wanted = (pictures_N1HW[chosen] * 2 - 1).expand(-1, 3, -1, -1)
        loss = F.mse_loss(vae.decode(given).sample, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * max(0.05, 1 - clock.done)
    print(f"decoder: mean square {loss.item():.4f}", flush=True)
    return vae.eval()


def make_pipeline(vae: Any) -> Any:
    """The pipeline around an untrained denoiser."""
    words = ["a", *glyphs.FONTS, *glyphs.DIGITS]
    config = transformers.T5Config(
        d_model=TEXT,
        d_ff=2 * TEXT,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        vocab_size=len(words) + 3,
        feed_forward_proj="gated-gelu",
    )
    denoiser = diffusers.PixArtTransformer2DModel(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT,
        sample_size=glyphs.SIDE // PATCH,
        patch_size=2,
        use_additional_conditions=False,
    )
    return diffusers.PixArtAlphaPipeline(
        tokenizer=glyphs.tokenizer(words),
        text_encoder=transformers.T5EncoderModel(config).eval(),
        vae=vae,
        transformer=denoiser,
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
        ),
    )


def train_denoiser(
    pipe: Any, latents_N: torch.Tensor, numbers_N: torch.Tensor, clock: Clock, look: Any
) -> None:
    """Flow matching: from (1 − t) x + t ε it learns ε − x. The pipeline gets the mean of the last weights."""
    with torch.no_grad():
        text_PTE, mask_PT, *_ = pipe.encode_prompt(
            [*glyphs.prompts(), ""], do_classifier_free_guidance=False, max_sequence_length=6
        )
    text_PTE, mask_PT = text_PTE.detach(), mask_PT.detach()
    model, mean = pipe.transformer.train(), deepcopy(pipe.transformer).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    for step in clock.steps():
        rate = (
            RATE
            * min(1, (step + 1) / WARM_UP)
            * (0.02 + 0.98 * math.cos(math.pi / 2 * min(clock.done, 1)) ** 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(latents_N), (BATCH,))
        x, noise = latents_N[chosen], torch.randn(BATCH, *latents_N.shape[1:])
        t = torch.sigmoid(1.2 * torch.randn(BATCH))
        prompt = torch.where(torch.rand(BATCH) < UNPROMPTED, len(text_PTE) - 1, numbers_N[chosen])
        given = torch.lerp(x, noise, t[:, None, None, None])
        said = model(
            given, text_PTE[prompt], 1000 * t, encoder_attention_mask=mask_PT[prompt], return_dict=False
        )
        loss = F.mse_loss(said[0], noise - x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep = min(EMA, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 1 - keep)
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"step {step + 1}, {clock.done:.0%}: {sum(losses[-50:]) / 50:.4f}", flush=True)
        look(step, mean)
    pipe.transformer = mean


def contact_sheet(pipe: Any, reader: nn.Module, path: Path) -> float:
    """Draw every prompt once into one picture, and say which share of them the reader reads."""
    prompts = glyphs.prompts()
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        prompts,
        num_inference_steps=20,
        generator=[torch.Generator().manual_seed(i) for i in range(len(prompts))],
        output_type="pt",
        use_resolution_binning=False,
        clean_caption=False,
        height=glyphs.SIDE,
        width=glyphs.SIDE,
    ).images
    found = glyphs.read(reader, drawn)
    columns = len(glyphs.DIGITS)
    rows = [torch.cat(list(drawn[i : i + columns]), 2) for i in range(0, len(drawn), columns)]
    sheet = (torch.cat(rows, 1).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    Image.fromarray(sheet).resize((columns * 96, len(rows) * 96), Image.Resampling.NEAREST).save(path)
    return sum(a == glyphs.digit_of(b) for a, b in zip(found, prompts, strict=True)) / len(prompts)


def save(pipe: Any, reader: nn.Module, folder: Path) -> None:
    """Save the pipeline as diffusers does, with the reader and a file of prompts next to its components."""
    pipe.save_pretrained(folder)
    (folder / glyphs.READER).parent.mkdir(exist_ok=True)
    save_file(reader.state_dict(), folder / glyphs.READER)
    (folder / "prompts.txt").write_text("\n".join(glyphs.prompts()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=240, help="of the processor, for the denoiser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look", type=float, default=60, help="seconds between two sheets of pictures")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    pictures, numbers = corpus(asked.seed)
    reader = train_reader(pictures, numbers, 12)
    fresh, answers = corpus(asked.seed + 1)
    right = sum(
        a == b % 10
        for a, b in zip(glyphs.read(reader, fresh.expand(-1, 3, -1, -1)), answers.tolist(), strict=True)
    )
    print(f"the reader reads {right / len(fresh):.1%} of new pictures", flush=True)
    latents = to_latents(pictures)
    pipe = make_pipeline(train_decoder(latents, pictures, 40))
    clock, seen = Clock(asked.seconds), [0]

    def look(step: int, mean: Any) -> None:
        if clock.done * asked.seconds < (seen[0] + 1) * asked.look:
            return
        seen[0] += 1
        trained, pipe.transformer = pipe.transformer, mean
        share = contact_sheet(pipe, reader, asked.folder.with_suffix(f".{seen[0]}.png"))
        save(pipe, reader, asked.folder)
        pipe.transformer = trained
        print(f"step {step + 1}: {share:.0%} of the prompts are read", flush=True)

    train_denoiser(pipe, latents, numbers, clock, look)
    save(pipe, reader, asked.folder)
    share = contact_sheet(pipe, reader, asked.folder.with_suffix(".png"))
    print(f"{share:.0%} of the prompts are read at last")


if __name__ == "__main__":
    main()
