"""From a Hugging Face folder to a model that transcribes."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import torch

from torchwright.core.errors import ModelError, unknown
from torchwright.hub.folder import Wanted, read_config, resolve
from torchwright.models.decoder.precision import Precision, read_precision
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.families import FAMILIES
from torchwright.models.speech.moonshine.native import FAMILY as MOONSHINE
from torchwright.models.speech.native_family import NativeFamily
from torchwright.models.speech.steps import SpeechModel, TransformersSpeech
from torchwright.models.speech.whisper.native import FAMILY as WHISPER
from torchwright.workloads.huggingface import load_model

NATIVE: dict[str, NativeFamily] = {"whisper": WHISPER, "moonshine": MOONSHINE}
"""Families that Torchwright's own layers compute."""
DTYPES = (torch.float32, torch.bfloat16)
WANTED = Wanted(
    "the folder or hub id of a Whisper or Moonshine of transformers, or an artifact of one",
    "leave the model out to take the bundled one, which knows a few hundred English words",
)


def load_speech(
    folder: str | Path | None = None,
    dtype: torch.dtype | None = torch.float32,
    quantize: str | None = None,
) -> Recognizer:
    """The speech model of a Hugging Face folder or hub id, in float32 or bfloat16; None is bfloat16 on our kernels.

    Without a folder it is the bundled one, of a few hundred English words.

    It runs on Torchwright's kernels where they take it, else on transformers' modules; `model.description` says which.
    `quantize` is a scheme such as w8a8 for the layers of encoder and decoder, or one each: encoder=w8a8,decoder=none.

    Raises `UnknownName` for a family that is not in `FAMILIES`, and `ModelError`, naming the file, for weights or
    configurations that cannot be used.
    """
    if dtype not in (None, *DTYPES):
        raise ModelError(f"dtype {dtype}", allowed=", ".join(map(str, DTYPES)))
    path = bundled() if folder is None else resolve(str(folder), WANTED)
    cls = family(path)
    return cls(path, _model(cls.model_type, path, dtype, read_precision(quantize)))


def family(folder: Path) -> type[Recognizer]:
    """Return the recognizer class of a folder; raises `UnknownName` for a family that is not in `FAMILIES`."""
    kind = read_config(folder).get("model_type")
    if kind not in FAMILIES:
        raise unknown(
            "family of speech models", str(kind), FAMILIES, next="`torchwright generate` runs text models"
        )
    return pkgutil.resolve_name(FAMILIES[kind])


def _model(kind: str, path: Path, dtype: torch.dtype | None, precision: Precision) -> SpeechModel:
    """On our kernels where they take it, else on transformers' modules, which nobody quantizes."""
    fault = f"a {kind} runs on transformers' modules"
    if kind in NATIVE:
        fault = NATIVE[kind].native_fault(path)
    if fault is None:
        return NATIVE[kind].load_native(path, dtype or torch.bfloat16, precision)
    if precision != Precision():
        raise ModelError(f"{path} cannot be quantized here", found=fault, next="leave --quantize out")
    return TransformersSpeech(load_model(path, "AutoModelForSpeechSeq2Seq").to(dtype or torch.float32))
