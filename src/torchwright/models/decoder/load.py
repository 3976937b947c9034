"""From a Hugging Face folder to a decoder that answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from torchwright.core.errors import ModelError, unknown
from torchwright.core.scheme import BF16, Scheme, read_scheme
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.adapter import AdaptedCheckpoint
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.folder import read_config, resolve
from torchwright.hub.language_part import language_part
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.repack import repack, repack_as_stored
from torchwright.models.decoder.tensor_parallel.divide import divided_decoder
from torchwright.models.decoder.tensor_parallel.processes import meet
from torchwright.models.decoder.tensor_parallel.shape import Place, check_divides
from torchwright.models.decoder.tensor_parallel.weights import DividedWeights, MakePart
from torchwright.models.decoder.weight_memory import require_memory
from torchwright.models.decoder.weights import DecoderWeights, MakeLinear, Repack, plain_linear
from torchwright.workloads.language import generation_eos

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
DEFAULT_KV = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def load_decoder(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    kv: str | None = None,
    make_linear: MakeLinear | None = None,
    device: str = "cpu",
    adapter: str | Path | None = None,
    tp: int = 1,
) -> LoadedDecoder:
    """The language model of a Hugging Face folder, GGUF file or hub id on Torchwright's own decoder.

    `dtype` is float32 or bfloat16. `quantize` takes none, w8a8, w4a8 or w4a16, the last two with `:group_size=N` (32,
    64 or 128) if it is not 32; weights are rounded to nearest, and `optimize` chooses them with calibration. `kv` is
    the type of cached keys and values: fp32, bf16 or int8, by default the model's own. `make_linear(weight (N, K),
    bias (N,) or None)` makes every linear layer but the experts' routers, in place of `quantize`. `device` is cpu or
    cuda, which is the current card; each layer goes there once it is packed. `adapter` is a folder of LoRA or DoRA as
    peft writes it, added to the weights as they are read (`hub/adapter.py`). `tp` processes, which torchrun has
    started, compute the model together, each on its part of the weights (`tensor_parallel/`): all make the same calls
    with the same arguments, and get the same answers.

    Raises `UnsupportedArchitecture` for a family that is not in `FAMILIES`. Raises `ModelError`, naming the file, for
    weights or configurations that cannot be used, and `TorchwrightError` for a device that this machine lacks. Raises
    `ProcessesError` where there are other than `tp` processes.
    """
    if tp < 1:
        raise ModelError(f"tp={tp}", allowed="the number of processes, at least 1")
    if device != "cpu":
        get_device(device)
    if dtype not in DEFAULT_KV:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(str(dtype) for dtype in DEFAULT_KV))
    kv = DEFAULT_KV[dtype] if kv is None else kv
    if kv not in KV_DTYPES:
        raise unknown("type of cached keys and values", kv, KV_DTYPES)
    place = torch.device(device)
    scheme = read_scheme(quantize)
    if tp > 1 and make_linear is not None:
        raise ModelError(
            f"tp={tp} and make_linear", allowed="one of them: layers are made of parts of weights"
        )
    keep = None if make_linear or tp > 1 else _repacker(quantize, scheme, dtype, place)
    path = resolve(str(folder))
    whole = read_config(path)
    described = language_part(whole)
    config = decoder_config(described, path / "config.json")
    if device == "cpu":
        require_memory(path, whole, scheme, dtype, ways=tp)
    adapted = None if adapter is None else AdaptedCheckpoint(path, described, Path(adapter))
    checkpoint = adapted or Checkpoint(path, described)
    if tp > 1:
        decoder = _divided(tp, config, checkpoint, dtype, scheme, place)
        if adapted is not None:
            adapted.finish()
        return LoadedDecoder(decoder, path, kv_dtype=KV_DTYPES[kv], stop=stop_ids(config, path))
    make_linear = make_linear or linear_maker(scheme, dtype, place)
    weights = DecoderWeights(
        config, checkpoint, dtype, make_linear, place, rounded=scheme is not None, repack=keep
    )
    decoder = Decoder(config, weights).eval()
    if adapted is not None:
        adapted.finish()
    stored = None
    if checkpoint.quantized:
        stored = f"{checkpoint.format}: {_became(weights.repacked, scheme, dtype)}"
    return LoadedDecoder(decoder, path, kv_dtype=KV_DTYPES[kv], stop=stop_ids(config, path), stored=stored)


def _divided(
    tp: int,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    scheme: Scheme | None,
    device: torch.device,
) -> Decoder:
    """Return this process's part of a decoder, once all `tp` processes have met."""
    if checkpoint.quantized:
        raise ModelError(
            f"tp={tp} divides weights in float types",
            found=f"a checkpoint quantized by {checkpoint.format}",
            next="take the model's original checkpoint, with quantize='w8a8', 'w4a8' or 'w4a16'",
        )
    check_divides(config, tp, scheme)
    processes = meet(tp, device.type)
    weights = DividedWeights(
        config,
        checkpoint,
        dtype,
        linear_maker(scheme, dtype, device),
        device,
        Place(processes.rank, tp),
        rounded=scheme is not None,
    )
    return divided_decoder(config, weights, processes).eval()


def stop_ids(config: DecoderConfig, folder: Path) -> tuple[int, ...]:
    """End-of-text ids of config.json and of generation_config.json, which may name more."""
    return tuple(sorted({*config.eos, *generation_eos(folder)}))


def linear_maker(scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> MakePart:
    """Return the factory of linear layers: PyTorch's in float32, else packed ones where the kernels are available."""
    if scheme is None and (dtype == torch.float32 or ops.on(device, dtype) is None):
        return plain_linear
    return lambda weight, bias, columns=None: PackedLinear(
        weight, bias, scheme or BF16, device=device, columns=columns
    )


def _repacker(
    quantize: str | None, scheme: Scheme | None, dtype: torch.dtype, device: torch.device
) -> Repack | None:
    """Return the function that repacks a checkpoint's own numbers.

    The target is the requested scheme or, without one and in bfloat16, the checkpoint's own."""
    if scheme is not None:
        return lambda weights, bias: repack(weights, bias, scheme, device)
    if quantize is not None or dtype == torch.float32 or ops.on(device, dtype) is None:
        return None
    return lambda weights, bias: repack_as_stored(weights, bias, device)


def _became(repacked: Mapping[str, int], scheme: Scheme | None, dtype: torch.dtype) -> str:
    """Describe how quantized weights are kept: number of layers by scheme, "" where they were dequantized."""
    name = str(dtype).removeprefix("torch.")
    if not repacked:
        return f"read as {name}"
    wide = f"dequantized to {name}"
    if scheme is not None:
        wide = f"dequantized, then rounded to {scheme.name}"
    words = {kept: f"repacked as {kept}" if kept else wide for kept in repacked}
    if len(words) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{count} layers {words[kept]}" for kept, count in repacked.items())
