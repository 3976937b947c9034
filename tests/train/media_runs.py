"""Small runs over pictures and sounds for tests: files that can be told apart, a tiny model, a run file over them."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from runs import to_toml

from whispers import tiny

CLASSES = ("check", "disc", "stripes")
WORDS = {220: "low", 880: "high"}
"""Pitch → what it says."""


def draw(kind: str, random: np.random.Generator) -> np.ndarray:
    """A picture of a class in two colours, of any size."""
    height, width = random.integers(20, 50, 2)
    y, x = np.mgrid[:height, :width]
    period = random.integers(4, 8)
    inside = {
        "check": (y // period + x // period) % 2 == 0,
        "disc": (y - height / 2) ** 2 + (x - width / 2) ** 2 < (min(height, width) / 3) ** 2,
        "stripes": (y // period) % 2 == 0,
    }[kind]
    dark, bright = random.integers(0, 60, 3), random.integers(190, 256, 3)
    return np.where(inside[..., None], bright, dark).astype(np.uint8)


def make_pictures(folder: Path, each: int, seed: int = 0) -> Path:
    """A folder of classes."""
    random = np.random.default_rng(seed)
    for kind in CLASSES:
        (folder / kind).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(draw(kind, random)).save(folder / kind / f"{number:03}.png")
    return folder


def make_classifier(folder: Path, *, norms: bool = False, labels: int = 3) -> Path:
    """A ViT of 32 x 32 pixels, or a ResNet, which has batch norms."""
    import transformers as untyped
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    transformers: Any = untyped
    if norms:
        shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        model: Any = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(**shape, num_labels=labels)
        )
        processor: Any = ConvNextImageProcessorPil(size={"shortest_edge": 32})
    else:
        shape = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 2, "intermediate_size": 64}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**shape, num_labels=labels))
        processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_images(folder: Path, *, each: int = 12, norms: bool = False, **changes: Any) -> Path:
    """A run file over a folder of classes, one held out, and a classifier of three classes."""
    folder.mkdir(parents=True, exist_ok=True)
    make_pictures(folder / "train", each)
    make_pictures(folder / "held", 3, seed=1)
    make_classifier(folder / "base", norms=norms)
    run: dict[str, Any] = {
        "kind": "image-classification",
        "out": "out",
        "samples": 6 * 8,
        "batch": 8,
        "micro_batches": 2,
        "precision": "fp32",
        "threads": 1,
        "log_every": 1,
        "model": {"folder": "base"},
        "data": {"train": ["train"], "validation": ["held"]},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every_steps": 2, "keep": 9},
        **changes,
    }
    path = folder / "run.toml"
    path.write_text(to_toml(run))
    return path


def tone(path: Path, pitch: float, seconds: float) -> None:
    """A WAV file of 16 kHz."""
    samples = 0.4 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * 16_000)) / 16_000)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def make_sounds(folder: Path, name: str, count: int, seed: int = 0) -> Path:
    """A manifest of tones and what each says, the tones below it."""
    random, rows = np.random.default_rng(seed), []
    (folder / name).mkdir(parents=True)
    for number in range(count):
        pitch = random.choice(list(WORDS))
        tone(folder / name / f"{number}.wav", pitch * random.uniform(0.9, 1.1), random.uniform(0.5, 2.0))
        rows.append({"audio": f"{name}/{number}.wav", "text": WORDS[int(pitch)]})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_speech(folder: Path, *, count: int = 12, **changes: Any) -> Path:
    """A run file over a manifest, one held out, and a Whisper over windows of four seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    make_sounds(folder, "train", count)
    make_sounds(folder, "held", 4, seed=1)
    torch.manual_seed(0)
    tiny(folder / "base", peaks=1)
    run: dict[str, Any] = {
        "kind": "speech",
        "out": "out",
        "samples": 6 * 4,
        "batch": 4,
        "precision": "fp32",
        "threads": 1,
        "log_every": 1,
        "model": {"folder": "base"},
        "data": {"train": ["train.jsonl"], "validation": ["held.jsonl"]},
        "evaluation": {"transcribed": 0},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every_steps": 2, "keep": 9},
        **changes,
    }
    path = folder / "run.toml"
    path.write_text(to_toml(run))
    return path
