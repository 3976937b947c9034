"""From a Hugging Face folder to a model that transcribes."""

from __future__ import annotations

from pathlib import Path

import torch

from torchwright.errors import ModelError, unknown
from torchwright.hub.folder import read_config, resolve
from torchwright.speech.base import Recognizer
from torchwright.speech.moonshine import Moonshine
from torchwright.speech.whisper.model import Whisper
from torchwright.workloads.huggingface import load_model

FAMILIES: dict[str, type[Recognizer]] = {family.model_type: family for family in (Whisper, Moonshine)}
"""By `model_type` of config.json. To add one, write a `Recognizer` and put it here."""
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
    return FAMILIES[kind](path, load_model(path, "AutoModelForSpeechSeq2Seq").to(dtype))
