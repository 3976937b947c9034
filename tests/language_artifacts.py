"""Artifacts of a tiny language model, written without a search: one of each kind of engine that answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from factories import make_recipe
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.packed import write_packed
from torchwright.optimization.artifact import folder as artifact
from torchwright.workloads.language import LanguageWorkload

PROMPT, NEW = 32, 16


def native_artifact(folder: Path, out: Path, quantize: str = "w8a8", draft: Path | None = None) -> Path:
    """The native decoder's, with packed weights and 8-bit keys and values."""
    with artifact.writing(out) as temporary:
        write_packed(load_decoder(folder, torch.bfloat16, quantize, "int8"), temporary)
        if draft is not None:
            shutil.copytree(draft, temporary / artifact.DRAFT)
        _finish(folder, temporary, "native", weights=False)
    return out


def fixed_artifact(folder: Path, out: Path) -> Path:
    """transformers' model over two calls of fixed shapes."""
    with artifact.writing(out) as temporary:
        _finish(folder, temporary, "eager", weights=True)
    return out


def _finish(folder: Path, temporary: Path, engine: str, *, weights: bool) -> None:
    workload = LanguageWorkload(folder, batch=1, prompt_tokens=PROMPT, new_tokens=NEW)
    for name, file in workload.files(weights=weights).items():
        (temporary / artifact.MODEL).mkdir(exist_ok=True)
        shutil.copy2(file, temporary / artifact.MODEL / name)
    dtype = "bfloat16" if engine == "native" else "float32"
    recipe = make_recipe(engine=engine, workload=workload.describe(), steps=())
    artifact.finish(temporary, recipe, {"engine": engine, "dtype": dtype})
