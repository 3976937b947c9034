"""A pipeline's folder as diffusers lays it out: the classes it names, and whether all is there. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError, unknown
from torchwright.hub.folder import Wanted, read_object, resolve

INDEX = "model_index.json"
MODELS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
"""Components that compute. They are read from safetensors."""
READERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that a picture from text does without."""
LIBRARIES = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The properties that differ between pipelines."""

    denoiser: str = "transformer"
    patch: int = 1
    """Latents of a side that the pipeline packs into one before the denoiser sees them, where no configuration says."""
    previews: bool = True
    """True if the scheduler's output is the VAE's input, up to a factor and a shift."""
    turns: int = 1
    """Calls of the denoiser that a step makes: two where guidance is a second call, the first with the prompt."""
    video: bool = False
    together: int = 1
    """Steps in time that the VAE takes at once, but for the first frame's."""
    multiple: int = 1
    """Pixels that the pipeline asks sides to be multiples of, whatever its VAE needs."""
    guidance: str = "guidance_scale"
    """The argument of the pipeline that says how much guidance there is."""
    negative: bool = True
    """True if guidance moves away from a second prompt."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Given to each call of the pipeline."""


PLAIN_SIZE = (("use_resolution_binning", False), ("clean_caption", False))
FAMILIES = {
    "CogVideoXPipeline": Family(video=True, previews=False, together=2),
    "FluxPipeline": Family(patch=2, previews=False, negative=False),
    "LTXPipeline": Family(video=True, previews=False, multiple=32),
    "PixArtAlphaPipeline": Family(arguments=PLAIN_SIZE),
    "PixArtSigmaPipeline": Family(arguments=PLAIN_SIZE),
    "QwenImagePipeline": Family(
        previews=False, turns=2, guidance="true_cfg_scale", arguments=(("negative_prompt", " "),)
    ),
    "SanaPipeline": Family(multiple=32, arguments=PLAIN_SIZE),
    "StableDiffusion3Pipeline": Family(),
    "StableDiffusionPipeline": Family(denoiser="unet"),
    "StableDiffusionXLPipeline": Family(denoiser="unet"),
}
"""By `_class_name` of model_index.json."""


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """A folder that was looked through: its pipeline's class, and library and class of each component by name."""

    path: Path
    pipeline: str
    components: dict[str, tuple[str, str]]
    constants: dict[str, Any]
    """The other entries of model_index.json."""
    notices: tuple[str, ...]
    """Notices for the user."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.pipeline]

    @property
    def models(self) -> list[str]:
        return [name for name in MODELS if name in self.components]


def is_pipeline(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def open_pipeline(source: str | Path) -> PipelineFolder:
    """The pipeline in a folder, or of a hub id.

    Raises `UnknownName` for a pipeline that is not in `FAMILIES`. Raises `ModelError` for a folder without
    model_index.json, a missing component, and one of another library than diffusers and transformers.
    """
    path = resolve(str(source), Wanted("a folder as diffusers saves a pipeline, or the hub id of one"))
    if not is_pipeline(path):
        raise ModelError(
            f"{source} has no {INDEX}" if path.exists() else f"there is no folder {source}",
            allowed="a folder as diffusers saves a pipeline",
        )
    index = read_object(path / INDEX)
    kind = index.get("_class_name")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unknown("pipeline", str(kind)[:80], FAMILIES)
    entries = {name: value for name, value in index.items() if not name.startswith("_")}
    components = {
        name: _component(path, name, value)
        for name, value in entries.items()
        if isinstance(value, list) and name not in UNUSED and value != [None, None]
    }
    for name in (FAMILIES[kind].denoiser, "vae", "scheduler"):
        if name not in components:
            raise ModelError(f"{path / INDEX} names no {name}", found=", ".join(components))
    checker = entries.get("safety_checker") not in (None, [None, None])
    return PipelineFolder(
        path=path,
        pipeline=kind,
        components=components,
        constants={name: value for name, value in entries.items() if isinstance(value, bool | int | float)},
        notices=(
            "its safety checker is not run: nobody looks at the pictures"
            if checker
            else "it has no safety checker: nobody looks at the pictures",
        ),
    )


def _component(path: Path, name: str, value: list[Any]) -> tuple[str, str]:
    """Library and class of a component that is there."""
    if name not in (*MODELS, *READERS, "scheduler"):
        raise ModelError(f"{path / INDEX} names the component {name[:80]!r}", allowed="those of its pipeline")
    library, cls = value if len(value) == 2 else (None, None)
    if library not in LIBRARIES or not (isinstance(cls, str) and cls.isidentifier()):
        raise ModelError(
            f"{path / INDEX} names code that is not run: {name} is {str(value)[:80]}",
            allowed=f"classes of {' and '.join(LIBRARIES)}",
        )
    part = path / name
    if not part.is_dir():
        raise ModelError(f"{path} lacks the component {name}", allowed=f"the folder {part}")
    return library, cls
