"""From a Hugging Face folder to a model that transcribes."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import torch

from torchwright.errors import ModelError, unknown
from torchwright.hub.folder import read_config, resolve
from torchwright.speech.base import Recognizer
from torchwright.speech.families import FAMILIES
from torchwright.workloads.huggingface import load_model

DTYPES = (torch.float32, torch.bfloat16)


def load_speech(folder: str | Path, dtype: torch.dtype = torch.float32) -> Recognizer:
    """The speech model of a Hugging Face folder or hub id, on transformers' modules, in float32 or bfloat16.

    Raises `UnknownName` for a family that is not in `FAMILIES`, and `ModelError`, naming the file, for weights or
    configurations that cannot be used.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(map(str, DTYPES)))
    path = resolve(str(folder))
    kind = read_config(path).get("model_type")
    if kind not in FAMILIES:
        raise unknown(
            "family of speech models", str(kind), FAMILIES, next="`torchwright generate` runs text models"
        )
    family: type[Recognizer] = pkgutil.resolve_name(FAMILIES[kind])
    return family(path, load_model(path, "AutoModelForSpeechSeq2Seq").to(dtype))
