"""From a Hugging Face folder to a decoder that answers."""

from __future__ import annotations

from pathlib import Path

import torch

from torchwright.decoder.config import read_decoder_config
from torchwright.decoder.fields import Fields, read_object
from torchwright.decoder.generate import LoadedDecoder
from torchwright.decoder.model import Decoder
from torchwright.decoder.weights import Checkpoint, DecoderWeights, MakeLinear, plain_linear
from torchwright.errors import ModelError, RefusedTechnique, unknown
from torchwright.workloads.huggingface import resolve

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
DEFAULT_KV = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def load_decoder(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    kv: str | None = None,
    make_linear: MakeLinear | None = None,
) -> LoadedDecoder:
    """The language model of a Hugging Face folder or hub id on Torchwright's own decoder.

    `dtype` is float32 or bfloat16; `kv` is the type of cached keys and values: fp32, bf16 or int8, by default the
    model's own. `make_linear(weight (N, K), bias (N,) or None)` makes every linear layer but the experts' routers.

    Raises `UnsupportedArchitecture` for a family that is not in `FAMILIES`, and `ModelError`, naming the file, for
    weights or configurations that cannot be used.
    """
    if dtype not in DEFAULT_KV:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(str(dtype) for dtype in DEFAULT_KV))
    kv = DEFAULT_KV[dtype] if kv is None else kv
    if kv not in KV_DTYPES:
        raise unknown("type of cached keys and values", kv, KV_DTYPES)
    if quantize is not None and make_linear is None:
        raise RefusedTechnique(
            f"quantize='{quantize}' is not available yet", allowed="None", next="pass make_linear instead"
        )
    path = resolve(str(folder))
    config = read_decoder_config(path)
    weights = DecoderWeights(config, Checkpoint(path), dtype, make_linear or plain_linear)
    decoder = Decoder(config, weights).eval()
    stop = tuple(sorted({*config.eos, *_generation_eos(path)}))
    return LoadedDecoder(decoder, path, kv_dtype=KV_DTYPES[kv], stop=stop)


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, which may name more than config.json does."""
    path = folder / "generation_config.json"
    return Fields(path, read_object(path)).ids("eos_token_id") if path.is_file() else ()
