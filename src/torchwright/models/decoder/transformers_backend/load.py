"""From a Hugging Face folder of any family to a model of transformers that answers, in batches where it can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError, WorkloadError, first_line
from torchwright.core.scheme import BF16, Scheme, read_scheme
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.context import longest_context
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.transformers_backend.attention import CannotPage
from torchwright.models.decoder.transformers_backend.check import check_paging
from torchwright.models.decoder.transformers_backend.paged import TransformersModel, linears_of
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.workloads.huggingface import load_model, quiet_transformers
from torchwright.workloads.language import generation_eos

UNLIMITED_CONTEXT = 8192
"""Context of models that name no limit, such as state-space models: a bound on the memory of one answer."""
ROUTERS = ("gate", "router")
"""Names of layers that choose experts. They are never rounded: a small error sends a token to other experts."""


@dataclass(frozen=True)
class LoadedTransformers:
    """A model on transformers' own code, and notices for the user about how it runs."""

    model: LoadedPagedModel[TransformersModel] | TransformersWriter
    notices: tuple[str, ...]


def load_on_transformers(
    folder: Path,
    dtype: torch.dtype,
    *,
    quantize: str | None = None,
    kv: torch.dtype | None = None,
    device: str = "cpu",
    batched: bool = True,
) -> LoadedTransformers:
    """Load the causal language model of a Hugging Face folder on transformers' own code.

    With `batched` its attention runs over the paged cache where it can; otherwise it gives one answer at a time. Linear
    layers are packed as `load_decoder` packs them; `quantize` and `kv` are those of `load_decoder`. Raises `ModelError`
    with transformers' own reason where it cannot be built, and `WorkloadError` for `kv` where nothing is paged.
    """
    scheme = read_scheme(quantize)
    config = read_config(folder)
    model: Any = load_model(folder, "AutoModelForCausalLM").to(dtype)
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    context = longest_context(config, positions) if type(positions) is int else UNLIMITED_CONTEXT
    stop = tuple(
        sorted({*Fields(folder / "config.json", config).ids("eos_token_id"), *generation_eos(folder)})
    )
    with quiet_transformers():
        packed = _pack(model, scheme, dtype, torch.device(device))
        model.to(device)
        why = "asked for" if not batched else None
        if batched:
            try:
                return _batched(model, folder, context, stop, kv or dtype, packed)
            except CannotPage as error:
                why = str(error)
        if kv is not None:
            raise WorkloadError(f"--kv is not for {folder}", found=f"it gives one answer at a time: {why}")
        writer = TransformersWriter(model, folder, context=context, stop=stop)
    notices = [f"{type(model).__name__} runs on transformers' own code, one answer at a time: {why}"]
    if not writer.cached:
        notices.append("its cache cannot be used: each token is computed from the whole text")
    return LoadedTransformers(writer, tuple(notices))


def _batched(
    model: Any, folder: Path, context: int, stop: tuple[int, ...], kv: torch.dtype, packed: int
) -> LoadedTransformers:
    """The model over the paged cache; raises `CannotPage` where that gives other logits."""
    try:
        paged = TransformersModel(
            model, context=context, bos=_first(getattr(model.config, "bos_token_id", None))
        ).eval()
        check_paging(paged, kv)
    except CannotPage:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise CannotPage(f"{type(error).__name__}: {first_line(error)}") from error
    paged.stay_paged()
    loaded = LoadedPagedModel(paged, folder, kv_dtype=kv, stop=stop)
    layers = f"{packed} linear layers packed, " if packed else ""
    notice = f"{paged.config.architecture} runs on the transformers back end: {layers}attention over the paged cache"
    return LoadedTransformers(loaded, (notice,))


def _pack(model: Any, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> int:
    """Replace the linear layers by packed ones where the kernels take them; return how many."""
    if (scheme is None and dtype == torch.float32) or ops.on(device, dtype) is None:
        if scheme is not None:
            raise ModelError(
                f"quantization to {scheme}", found="no compiled kernels for this device and dtype"
            )
        return 0
    linears = linears_of(model)
    packed = 0
    for owner, name, linear in linears:
        kept = scheme if scheme is not None and name not in ROUTERS else BF16
        if kept is BF16 and dtype == torch.float32:
            continue
        bias = None if linear.bias is None else linear.bias.detach()
        setattr(owner, name, PackedLinear(linear.weight.detach(), bias, kept, device=device))
        packed += 1
    return packed


def _first(ids: Any) -> int | None:
    return next(iter(ids), None) if isinstance(ids, list | tuple) else ids
