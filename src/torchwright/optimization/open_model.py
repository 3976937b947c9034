"""A language model that answers, or a speech model: an artifact's, or a Hugging Face folder's on native layers.

opened = open_model("path/to/folder", quantize="w4a8", kv="int8")

It imports no search, so that the first word does not wait for one. `continuation.py` asks what was opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ArtifactError, ModelError, WorkloadError, unknown
from torchwright.core.records import Recipe
from torchwright.hardware.devices import default_name, get_device
from torchwright.hardware.kernels import ops
from torchwright.hub.adapter import AdapterSettings, MergedAlone
from torchwright.hub.architectures import (
    UnsupportedArchitecture,
    folder_instead,
    named,
    recognize,
    runs_on_transformers,
)
from torchwright.hub.folder import Wanted, read_config, resolve
from torchwright.hub.language_part import language_part
from torchwright.hub.trained import trained_scheme
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.load import KV_DTYPES, load_decoder
from torchwright.models.decoder.low_rank import Adapter
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.models.decoder.seq2seq.stacks import stack_family
from torchwright.models.decoder.transformers_backend.load import load_on_transformers
from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.load import load_diffuser
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.load import load_speech
from torchwright.models.vision.encoder import encoder_of
from torchwright.models.vision.on_transformers import shows_on_transformers
from torchwright.models.vision.reader import seen_by_transformers, takes_pictures
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import load
from torchwright.report import view
from torchwright.workloads.generation import Writer
from torchwright.workloads.language import BUNDLED

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WANTED = Wanted(
    "a language model's folder, a GGUF file, a hub id, or the artifact of a language model",
    "leave the model out to take the bundled one",
)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A language model that is ready to answer."""

    model: Writer
    notices: tuple[str, ...] = ()
    """Notices for the user about how it runs."""
    recipe: Recipe | None = None
    """The artifact's recipe."""
    adapter: Adapter | None = None
    """The adapter that the model's calls are to be given, where it was not merged into the weights."""


def open_model(
    target: str | None,
    *,
    quantize: str | None = None,
    kv: str | None = None,
    dtype: str | None = None,
    quantize_vision: str | None = None,
    device: str | None = None,
    adapter: str | None = None,
    merge: bool = True,
    language: str | None = None,
    source_language: str | None = None,
    trust: bool = False,
    batched: bool = True,
) -> OpenedModel:
    """The language model of an artifact, or of a Hugging Face folder, training run, GGUF file or hub id; None is the
    bundled one.

    `quantize`, `kv` and `adapter` are those of `load_decoder`, but without `quantize` a folder whose weights were
    trained for a rounding runs in it (`hub/trained.py`); `dtype` is bf16 or fp32, by default bf16 where the compiled
    kernels are there; `device` is by default CUDA where there is a card. Languages are those of `load_seq2seq`, for a
    model of an encoder and a decoder. `quantize_vision` is that of `PictureEncoder`, for a model that takes pictures.
    An artifact has its own, so none of the eight is for it. Without `merge` the weights stay as they are, so that they
    may be quantized, a GGUF file's or an artifact's, and `OpenedModel.adapter` is the adapter; one that can only be
    merged is, and a notice says so. A model on transformers' own code runs by default in the type of its weights;
    `batched` lets it compute several sequences in one call, where their last bits depend on their company.

    Raises `WorkloadError` for options that an artifact does not take, `ArtifactError` for an artifact of another kind
    of model, and what `tw.load` and `load_decoder` raise.
    """
    if target is not None and is_artifact(target):
        settled = {"quantize": quantize, "kv": kv, "dtype": dtype, "device": device}
        settled |= {"language": language, "source_language": source_language}
        settled |= {"quantize_vision": quantize_vision, "adapter": adapter if merge else None}
        refuse_for_artifact(target, **settled)
        loaded = load(target, trust=trust)
        model, recipe, notices = loaded.model, loaded.recipe, tuple(loaded.notices)
        if not isinstance(model, Writer):
            raise ArtifactError(
                f"{target} holds no language model",
                found=f"the workload '{loaded.recipe.workload.get('kind')}'",
                next=folder_instead(loaded.recipe.workload) or "call it from Python: tw.load(DIR).model(…)",
            )
        if recipe.runs_as and loaded.how != recipe.runs_as:
            notices += (f"runs as {loaded.how}; {recipe.speedup} was measured as {recipe.runs_as}",)
        if adapter is not None and isinstance(model, LoadedDecoder):
            own = read_adapter(Path(adapter), model.decoder, model.folder)
        else:
            refuse_for_artifact(target, adapter=adapter)
            own = None
    else:
        _check_target(target, dtype)
        folder, recipe = resolve(str(BUNDLED if target is None else target), WANTED), None
        languages = {"language": language, "source_language": source_language}
        described = read_config(folder)
        if quantize_vision is not None and not takes_pictures(folder):
            raise WorkloadError(
                f"--quantize-vision {quantize_vision}: the model of {folder} takes text alone"
            )
        if stack_family(described) is not None or described.get("is_encoder_decoder") is True:
            return _seq2seq(folder, quantize, kv, dtype, device=device, adapter=adapter, **languages)
        if given := [flag(name) for name, value in languages.items() if value is not None]:
            raise WorkloadError(f"{', '.join(given)}: {folder} has no encoder that reads a source text")
        if _is_foreign(described, folder):
            more = {"device": device, "adapter": adapter, "batched": batched}
            return _on_transformers(folder, described, quantize, kv, dtype, **more)
        trained = trained_scheme(folder) if quantize is None else None
        options = (folder, quantize or trained, kv, dtype, device or default_name())
        model, own, notices = _with_adapter(partial(_decoder, *options), adapter, merge=merge)
        notices += () if model.stored is None else (model.stored,)
        if language_part(described) is not described:
            model.vision = encoder_of(
                folder,
                model.decoder.embedding.dtype,
                model.device,
                quantize=quantize_vision,
                rounded=(quantize or trained or "none") != "none",
            )
            takes = "text and pictures" if model.vision else "text alone"
            notices += (f"the language model of {', '.join(named(described))}; it takes {takes}",)
        if trained is not None:
            notices += (f"runs in {trained}, for which it was trained; --quantize none leaves it as it is",)
    fault = ops.fault(model.device.type) if isinstance(model, LoadedDecoder) else None
    if fault is not None:
        notices += (f"no fast kernels: {fault}",)
    return OpenedModel(model=model, notices=notices, recipe=recipe, adapter=own)


def open_speech(
    target: str | None, dtype: torch.dtype | None = None, quantize: str | None = None, *, trust: bool = False
) -> Recognizer:
    """The speech model of an artifact, or of a Hugging Face folder or hub id as `load_speech` takes it.

    None is the bundled one. Raises `WorkloadError` for options that an artifact does not take, and `ArtifactError` for
    one of another kind.
    """
    if target is None or not is_artifact(target):
        return load_speech(target, dtype, quantize)
    refuse_for_artifact(target, dtype=None if dtype is None else str(dtype), quantize=quantize)
    loaded = load(target, trust=trust)
    if not isinstance(loaded.model, Recognizer):
        raise ArtifactError(
            f"{target} holds no speech model",
            found=f"the workload '{loaded.recipe.workload.get('kind')}'",
            next="call it from Python: tw.load(DIR).model(…)",
        )
    return loaded.model


def open_diffuser(target: str, *, trust: bool = False) -> Diffuser:
    """Return the model that generates pictures: an artifact's, or a pipeline's folder or hub id as `load_diffuser`
    takes it.
    """
    if not is_artifact(target):
        return load_diffuser(target)
    found = load(target, trust=trust).model
    if not isinstance(found, Diffuser):
        raise ModelError(f"{target} is an artifact that makes no pictures", next="name a pipeline's folder")
    return found


def promise(recipe: Recipe) -> dict[str, str | None]:
    """The speed-up that an artifact was written with, and what it is of, as `bench` and `verify` name them."""
    return {"promised": str(recipe.speedup), "promised_as": view.runs_as(recipe) or None}


def is_artifact(target: str) -> bool:
    """Check whether a folder is, or was meant to be, an artifact."""
    return (Path(target) / artifact.RECIPE).is_file() or (Path(target) / artifact.MANIFEST).is_file()


def refuse_for_artifact(target: str, **options: str | None) -> None:
    """Raises `WorkloadError` where an option is given that an artifact has settled already."""
    given = [f"{flag(name)} {value}" for name, value in options.items() if value is not None]
    if given:
        raise WorkloadError(
            f"{' '.join(given)} is not for {target}, which is an artifact and has its own",
            next="leave it out, or name the folder of the model it was made from",
        )


def _check_target(target: str | None, dtype: str | None) -> None:
    if target is not None and ":" in target and not Path(target).exists():
        raise ModelError(
            f"{target} names a factory; the native decoder runs language models",
            allowed="a Hugging Face folder, a GGUF file, a hub id, or an artifact folder",
        )
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)


def _decoder(
    folder: Path, quantize: str | None, kv: str | None, dtype: str | None, device: str, adapter: str | None
) -> LoadedDecoder:
    get_device(device).start()
    name = dtype or ("bf16" if ops.fault(device) is None else "fp32")
    return load_decoder(folder, DTYPES[name], quantize, kv, device=device, adapter=adapter)


def _with_adapter(
    decoder: Callable[[str | None], LoadedDecoder], adapter: str | None, *, merge: bool
) -> tuple[LoadedDecoder, Adapter | None, tuple[str, ...]]:
    """Load a decoder with an adapter merged into its weights, or next to them; and a notice where it could only be
    merged.
    """
    if adapter is None or merge:
        return decoder(adapter), None, ()
    try:
        return *_next_to_weights(decoder, Path(adapter)), ()
    except MergedAlone as error:
        notice = f"--adapter {adapter} is merged into the weights: {error.reason}"
    return decoder(adapter), None, (notice,)


def _next_to_weights(
    decoder: Callable[[str | None], LoadedDecoder], adapter: Path
) -> tuple[LoadedDecoder, Adapter]:
    AdapterSettings(adapter).check_rows()  # before the model is read
    model = decoder(None)
    return model, read_adapter(adapter, model.decoder, model.folder)


def _is_foreign(described: dict[str, Any], folder: Path) -> bool:
    """Check whether a model runs on transformers' layers: of no native family, or with pictures that only they see."""
    try:
        recognize(language_part(described), folder / "config.json")
    except UnsupportedArchitecture:
        return runs_on_transformers(described) or takes_pictures(folder)
    return seen_by_transformers(folder)


def _stored_dtype(described: dict[str, Any], device: str) -> str:
    """The type of a checkpoint's weights: bf16 where they have 16 bits and the kernels take it, else fp32."""
    stored = str(described.get("dtype") or described.get("torch_dtype"))
    return "bf16" if stored in ("bfloat16", "float16") and ops.fault(device) is None else "fp32"


def _on_transformers(
    folder: Path,
    described: dict[str, Any],
    quantize: str | None,
    kv: str | None,
    dtype: str | None,
    *,
    device: str | None,
    adapter: str | None,
    batched: bool,
) -> OpenedModel:
    """Open a model of another family, on the CPU unless asked otherwise."""
    if adapter is not None:
        raise WorkloadError(
            f"--adapter {adapter} is not for {folder}",
            found="a model that runs on transformers' own code",
            allowed="--quantize, --kv, --dtype, --device",
        )
    if kv is not None and kv not in KV_DTYPES:
        raise unknown("type of cached keys and values", kv, KV_DTYPES)
    name = device or "cpu"
    get_device(name).start()
    loaded = load_on_transformers(
        folder,
        DTYPES[dtype or _stored_dtype(described, name)],
        quantize=quantize,
        kv=None if kv is None else KV_DTYPES[kv],
        device=name,
        batched=batched,
        shows=shows_on_transformers(folder) if takes_pictures(folder) else None,
    )
    return OpenedModel(model=loaded.model, notices=loaded.notices)


def _seq2seq(
    folder: Path,
    quantize: str | None,
    kv: str | None,
    dtype: str | None,
    *,
    device: str | None,
    adapter: str | None,
    language: str | None,
    source_language: str | None,
) -> OpenedModel:
    """An encoder and a decoder, which run on CPUs so far."""
    if device not in (None, "cpu") or adapter is not None:
        what = f"--adapter {adapter}" if adapter is not None else f"--device {device}"
        raise WorkloadError(
            f"{what} is not for {folder}, an encoder and a decoder", allowed="the CPU, no adapter"
        )
    fault = ops.fault("cpu")
    name = dtype or ("bf16" if fault is None else "fp32")
    model = load_seq2seq(
        folder, DTYPES[name], quantize, kv, language=language, source_language=source_language
    )
    notices = [f"generation_config.json's {setting} is not followed" for setting in model.rules.not_followed]
    if fault is not None:
        notices.append(f"no fast kernels: {fault}")
    return OpenedModel(model=model, notices=tuple(notices))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
