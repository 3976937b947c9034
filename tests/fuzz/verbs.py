"""Verbs on strangers' files, called in this process: each reads all that its command line reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchwright.answer import generate as answer_with
from torchwright.answer import open_speech
from torchwright.decoder.families import read_decoder_config
from torchwright.decoder.load import load_decoder
from torchwright.diffusion.folder import open_pipeline
from torchwright.exporter.base import exports
from torchwright.hub.chat_template import ChatTemplate
from torchwright.segment.load import load_segmenter
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.preflight import preflight
from torchwright.serve.text.codec import Tokenizer
from torchwright.train.kinds import kind_of_model
from torchwright.train.model import Transformer
from torchwright.train.model.weights import check_shapes, load_weights
from torchwright.train.planning.models import read_model
from torchwright.workloads.detect import from_target


def serve(folder: Path) -> None:
    """The checks before the start, the HTTP process's files, and what the engine loads."""
    target = find(str(folder))
    preflight(target, EngineOptions(model=str(folder)))
    Tokenizer(target.folder)
    ChatTemplate(target.folder)
    load_decoder(target.folder, torch.bfloat16)


def generate(folder: Path, **options: Any) -> None:
    answer_with(
        str(folder),
        "a b",
        **{
            "max_new_tokens": 2,
            "seed": 0,
            "sampling": {},
            "quantize": None,
            "kv": None,
            "dtype": "fp32",
            "device": "cpu",
            "adapter": None,
            "trust": False,
            **options,
        },
        on_text=lambda text: None,
        on_notice=lambda text: None,
    )


def quantize(folder: Path) -> None:
    generate(folder, quantize="w8a8", dtype=None)


def optimize(folder: Path) -> None:
    from_target(str(folder), prompt_tokens=4, new_tokens=2).build()


def export(folder: Path) -> None:
    """Write GGUF, which is made of the folder's files without the model."""
    out = folder.parent / "gguf"
    out.mkdir(exist_ok=True)
    exports.get("gguf").write(SimpleNamespace(folder=folder, name="a stranger's"), "q8_0", out)  # type: ignore[arg-type]


def train(folder: Path) -> None:
    kind_of_model(folder)
    with torch.device("meta"):
        model = Transformer(read_decoder_config(folder))
    check_shapes(model, folder)
    model.to_empty(device="cpu")
    load_weights(model, folder)


def plan(folder: Path) -> None:
    read_model(str(folder))


OF_FOLDERS: dict[str, Callable[[Path], None]] = {
    "serve": serve,
    "generate": generate,
    "quantize": quantize,
    "optimize": optimize,
    "export": export,
    "train": train,
    "plan-layout": plan,
    "transcribe": lambda folder: open_speech(str(folder)) and None,
    "segment": lambda folder: load_segmenter(folder) and None,
    "imagine": lambda folder: open_pipeline(folder) and None,
}
