"""From a Hugging Face folder to an encoder and a decoder that answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from torchwright.core.errors import ModelError, unknown
from torchwright.core.scheme import Scheme
from torchwright.hardware.kernels import ops
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, read_config, resolve
from torchwright.models.decoder.config import UnsupportedArchitecture
from torchwright.models.decoder.load import DEFAULT_KV, KV_DTYPES, linear_maker
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.precision import read_precision
from torchwright.models.decoder.seq2seq.encoder import Encoder
from torchwright.models.decoder.seq2seq.rules import read_rules
from torchwright.models.decoder.seq2seq.source import SourceTokenizer
from torchwright.models.decoder.seq2seq.stack_weights import StackParts
from torchwright.models.decoder.seq2seq.stacks import SIDES, STACKS, stack_family
from torchwright.models.decoder.seq2seq.translator import Embedding, LoadedSeq2Seq
from torchwright.models.decoder.weights import MakeLinear, plain_linear

CPU = torch.device("cpu")


def load_seq2seq(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    kv: str | None = None,
    *,
    language: str | None = None,
    source_language: str | None = None,
) -> LoadedSeq2Seq:
    """The encoder-decoder text model of a Hugging Face folder or hub id on Torchwright's own layers, on the CPU.

    `dtype` and `kv` are those of `load_decoder`; `quantize` is a scheme such as w8a8 for both sides, or one each:
    encoder=w8a8,decoder=none. `language` is that of the answers, `source_language` of the texts, as the vocabulary of a
    model for many languages names them (fra_Latn, fr).

    Raises `UnsupportedArchitecture` for a family that is not in `STACKS`, and `UnknownName` for an unknown language.
    Raises `ModelError`, naming the file, for weights or configurations that cannot be used.
    """
    if dtype not in DEFAULT_KV:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(map(str, DEFAULT_KV)))
    kv = DEFAULT_KV[dtype] if kv is None else kv
    if kv not in KV_DTYPES:
        raise unknown("type of cached keys and values", kv, KV_DTYPES)
    path = resolve(str(folder))
    described = read_config(path)
    family = stack_family(described)
    if family is None:
        raise UnsupportedArchitecture(
            f"{path} holds no encoder and decoder that are known here",
            found=", ".join(map(str, described.get("architectures") or [])) or "no 'architectures'",
            allowed=", ".join(STACKS),
            next="`torchwright optimize` runs other models on transformers' own code",
        )
    fields, checkpoint = Fields(path / "config.json", described), Checkpoint(path, described)
    schemes = read_precision(quantize).schemes
    parts = {
        side: StackParts(family, fields, side, checkpoint, dtype, _maker(schemes[side], dtype))
        for side in SIDES
    }
    config = parts["decoder"].config
    rules = read_rules(fields, find_object(path / "generation_config.json"), config.vocabulary)
    tokenizer = SourceTokenizer(path) if language or source_language else None
    if tokenizer is not None and source_language is not None:
        tokenizer.language(source_language)
    if tokenizer is not None and language is not None:
        rules = replace(rules, first=tokenizer.language(language))
    return LoadedSeq2Seq(
        Embedding(parts["encoder"]).eval(),
        Encoder(parts["encoder"].config, parts["encoder"]).eval(),
        Decoder(config, parts["decoder"]).eval(),
        path,
        kv_dtype=KV_DTYPES[kv],
        rules=rules,
        source_language=source_language,
    )


def _maker(scheme: Scheme | None, dtype: torch.dtype) -> MakeLinear:
    """`linear_maker` for weights in float32, which PyTorch's own layers need in the stream's type."""
    if scheme is None and ops.on(CPU, dtype) is None:
        return lambda weight, bias: plain_linear(weight.to(dtype), None if bias is None else bias.to(dtype))
    return linear_maker(scheme, dtype, CPU)
