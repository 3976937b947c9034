"""From a Hugging Face folder of any family to a model of transformers that answers, in batches where it can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import TorchwrightError, WorkloadError, first_line
from torchwright.core.scheme import read_scheme
from torchwright.hub.context import longest_context
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.shown import EncodesPictures
from torchwright.models.decoder.transformers_backend.attention import CannotPage
from torchwright.models.decoder.transformers_backend.check import check_paging
from torchwright.models.decoder.transformers_backend.packing import pack_layers
from torchwright.models.decoder.transformers_backend.paged import TransformersModel
from torchwright.models.decoder.transformers_backend.pictures import (
    CannotShow,
    PictureForm,
    PictureSample,
    Shows,
    check_paged_pictures,
    form_of,
    handed,
)
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter, first_token
from torchwright.models.decoder.weight_memory import require_memory
from torchwright.workloads.huggingface import load_model, quiet_transformers
from torchwright.workloads.language import generation_eos

UNLIMITED_CONTEXT = 8192
"""Context of models that name no limit, such as state-space models: a bound on the memory of one answer."""
COST = "10 to 30% slower than a native family"
"""Measured in batches of eight (benchmarks/llm/transformers_backend.py)."""


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
    shows: Shows | None = None,
) -> LoadedTransformers:
    """Load the causal language model of a Hugging Face folder on transformers' own code.

    With `shows` the folder's model takes pictures besides text; a notice says if it cannot be given any. With `batched`
    its attention runs over the paged cache where it can; otherwise it gives one answer at a time. Linear layers are
    packed as `load_decoder` packs them; `quantize` and `kv` are those of `load_decoder`. Raises `ModelError` with
    transformers' own reason where it cannot be built, and `WorkloadError` for `kv` where nothing is paged.
    """
    scheme = read_scheme(quantize)
    config = read_config(folder)
    if device == "cpu":
        require_memory(folder, config, None, dtype, schemes=False)  # it is whole before its layers are packed
    # No `to(dtype)`: it would also round what transformers keeps in float32, such as angles and biases of experts.
    auto = "AutoModelForCausalLM" if shows is None else "AutoModelForImageTextToText"
    model: Any = load_model(folder, auto, dtype=dtype)
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    context = UNLIMITED_CONTEXT
    if isinstance(positions, int) and positions > 0:  # XLNet says -1
        context = longest_context(config, positions)
    stop = tuple(
        sorted({*Fields(folder / "config.json", config).ids("eos_token_id"), *generation_eos(folder)})
    )
    with quiet_transformers():
        model.to(device)
        shown, takes = (None, "") if shows is None else _shown(model, shows)
        paged, why = _paged(model, context, shown) if batched else (None, "as asked for")
        # After the check: rounded inputs send tokens near a tie to other experts, which is no fault of the pages.
        packed = pack_layers(model, scheme, dtype, torch.device(device))
        if paged is not None:
            paged.stay_paged()
            loaded = LoadedPagedModel(paged, folder, kv_dtype=kv or dtype, stop=stop)
            loaded.vision = shown.vision if shown else None
            layers = f"{packed} linear layers packed, " if packed else ""
            how = f"runs on the transformers back end: {layers}attention over the paged cache; {COST}"
            return LoadedTransformers(loaded, (f"{type(model).__name__} {how}{takes}",))
        if kv is not None:
            raise WorkloadError(f"--kv is not for {folder}", found=f"it gives one answer at a time: {why}")
        vision = {"vision": shown.vision, "form": shown.form} if shown else {}
        writer = TransformersWriter(model, folder, context=context, stop=stop, **vision)
    notices = [f"{type(model).__name__} runs on transformers' own code, one answer at a time: {why}{takes}"]
    if not writer.cached:
        notices.append("its cache cannot be used: each token is computed from the whole text")
    return LoadedTransformers(writer, tuple(notices))


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """The encoder of a model, and the form in which its forward call takes the encoder's results."""

    vision: EncodesPictures
    form: PictureForm
    sample: PictureSample


def _shown(model: Any, shows: Shows) -> tuple[_Shown | None, str]:
    """Return how a model is given pictures, or None; and in words what it takes."""
    try:
        vision, sample = shows(model)
        found = _Shown(vision=vision, form=form_of(model, vision, sample), sample=sample)
    except (CannotShow, TorchwrightError) as error:
        return None, f"; it takes text alone: {error}"
    return found, "; it takes text and pictures"


def _paged(model: Any, context: int, shown: _Shown | None) -> tuple[TransformersModel | None, str]:
    """The model over the paged cache, or why it cannot be."""
    try:
        paged = TransformersModel(model, context=context, bos=first_token(model.config)).eval()
        check_paging(paged)
        if shown is not None:
            paged.picture_arguments = partial(handed, form=shown.form)
            check_paged_pictures(paged, shown.vision, shown.sample)
    except CannotPage as error:
        return None, str(error)
    except Exception as error:  # whatever a model's own code raises
        return None, f"{type(error).__name__}: {first_line(error)}"
    return paged, ""
