"""Which folder is served, found without torch: the bundled model, an artifact, a Hugging Face folder or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import ArtifactError, ModelError
from torchwright.core.json_file import read_json
from torchwright.hub.architectures import (
    UnsupportedArchitecture,
    folder_instead,
    named,
    recognize,
    runs_on_transformers,
)
from torchwright.hub.folder import (
    BUNDLED,
    BUNDLED_FOLDER,
    HUGGING_FACE,
    download,
    is_hub_id,
    local,
    read_config,
)
from torchwright.hub.language_part import language_part
from torchwright.models.diffusion.folder import is_pipeline, open_pipeline
from torchwright.models.speech.families import FAMILIES
from torchwright.models.vision.reader import seen_by_transformers, takes_pictures
from torchwright.optimization.artifact.folder import DRAFT, MANIFEST, MODEL, RECIPE

NATIVE = "native"
"""Prefix of the names of engines that run on the native decoder."""
BUNDLED_NAME = "torchwright-bundled"
TARGETS = "an artifact folder, a Hugging Face folder, or a hub id"
SERVED = (
    "language models, translators and summarizers, sentence encoders, classifiers of text, speech models and "
    "pipelines of pictures"
)


NO_DRAFT = "none"
"""In place of a draft's folder: leave out the artifact's own."""
DEVICES = ("cpu", "cuda")
"""Devices whose artifacts are served: our kernels run there. An artifact of another runs from Python."""


@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """The target of `torchwright serve`."""

    name: str
    """The model's name for clients."""
    folder: Path
    """The folder of config.json and the tokenizer."""
    artifact: Path | None = None
    draft: Path | None = None
    """The artifact's own draft model."""
    served_as: str = "writer"
    """`workloads.base.Served`: a reader is an artifact of a sentence encoder, or a classifier of text."""
    device: str = "cpu"
    """The device of an artifact."""
    fixed: bool = False
    """True if nothing is predicted of the model before it is loaded: calls of fixed shapes, transformers' own code."""


def find(target: str | None) -> ServeTarget:
    """Return the folder of a target; a hub id is downloaded first.

    Raises `ModelError` for a missing model or one that cannot be served, such as an architecture that neither the
    native decoder nor transformers knows. Raises `ArtifactError` for an artifact that cannot be read, or of a device
    that is not served.
    """
    if target is None or (target == BUNDLED and not Path(target).exists()):
        return ServeTarget(name=BUNDLED_NAME, folder=BUNDLED_FOLDER)
    path = Path(target)
    if (path / RECIPE).is_file() or (path / MANIFEST).is_file():
        workload, served_as, engine, device = _workload(path)
        if not served_as:
            raise ModelError(
                f"{path} is an artifact of kind '{workload['kind']}', which is not served",
                allowed=SERVED,
                next=folder_instead(workload)
                or f'call it from Python: torchwright.load("{path}").model(...)',
            )
        return ServeTarget(
            name=path.resolve().name,
            folder=path / MODEL,
            artifact=path,
            draft=path / DRAFT if (path / DRAFT).is_dir() else None,
            served_as=served_as,
            device=device,
            fixed=not engine.startswith(NATIVE),
        )
    if path.exists():
        path, name = local(path), path.resolve().name
    elif is_hub_id(target):
        path, name = download(target, allowed=TARGETS), target.partition("@")[0]
    else:
        raise ModelError(
            f"there is no model at {target}",
            allowed=TARGETS,
            next="leave the model out to take the bundled one",
        )
    if is_pipeline(path):
        return ServeTarget(name=name, folder=open_pipeline(path).path, served_as="painter")
    config = read_config(path) if (path / "config.json").is_file() else {}
    if any(name.endswith("ForSequenceClassification") for name in named(config)):
        return ServeTarget(name=name, folder=path, served_as="reader")
    if (path / "modules.json").is_file():
        raise ModelError(
            f"{path} is a folder of sentence-transformers, which is served as an artifact",
            next=f"torchwright optimize {target} -o out, and then torchwright serve out",
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json", allowed=HUGGING_FACE)
    speech = config.get("model_type") in FAMILIES
    if speech:
        return ServeTarget(name=name, folder=path, served_as="recognizer")
    if config.get("is_encoder_decoder") is True:
        return ServeTarget(name=name, folder=path, served_as="translator")
    try:
        recognize(language_part(config), path / "config.json")
    except UnsupportedArchitecture:
        if not runs_on_transformers(config) and not takes_pictures(path):
            raise
        return ServeTarget(name=name, folder=path, fixed=True)
    return ServeTarget(name=name, folder=path, fixed=seen_by_transformers(path))


def draft_of(asked: str | None, target: ServeTarget) -> str | None:
    """Return the draft that is asked for, or else that of the target's artifact; `NO_DRAFT` asks for none."""
    if asked is None:
        return None if target.draft is None else str(target.draft)
    return None if asked == NO_DRAFT else asked


def _workload(path: Path) -> tuple[dict[str, Any], str, str, str]:
    """Return an artifact's workload, what it is served as, its engine's name and its device."""
    recipe = _object(path / RECIPE)
    workload, manifest = recipe.get("workload"), {}
    if not isinstance(workload, dict) or not isinstance(workload.get("kind"), str):
        raise ArtifactError(
            f"{path / RECIPE} cannot be read", found="a workload without its kind", next="optimize again"
        )
    device = _device(path, recipe)
    if (path / MANIFEST).is_file():
        manifest = _object(path / MANIFEST)
    served_as = manifest.get("served_as")
    if served_as is None:  # of before: its class knows, and brings torch
        from torchwright.workloads.base import class_of

        served_as = class_of(workload).served_as(workload)
    return workload, str(served_as), str(manifest.get("engine") or NATIVE), device


def _device(path: Path, recipe: dict[str, Any]) -> str:
    """Return an artifact's device. Raises `ArtifactError` for one that is not served; loading checks the rest of the
    recipe.
    """
    found: Any = recipe
    for name in ("fingerprint", "device", "kind"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, str):  # of before recipes said so
        return DEVICES[0]
    if found not in DEVICES:
        raise ArtifactError(
            f"{path} cannot be served",
            found=f"an artifact for the device '{found}'",
            allowed=f"artifacts for {' and '.join(DEVICES)}",
            next=f'optimize again with --device cpu, or call it from Python: torchwright.load("{path}").model(...)',
        )
    return found


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in an artifact's file; raise `ArtifactError` for anything else."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} is not a JSON object", found=type(found).__name__, next="optimize again")
    return found
