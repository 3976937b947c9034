"""Which folder is served, found without torch: the bundled model, an artifact, a Hugging Face folder or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torchwright.errors import ArtifactError, ModelError
from torchwright.plan.artifact import MANIFEST, MODEL, RECIPE

BUNDLED_NAME = "torchwright-bundled"
SERVED = ("language", "encoder")
"""Kinds of workload whose artifacts are served."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What `torchwright serve` was given."""

    name: str
    """The model's name for clients."""
    folder: Path
    """Where config.json and the tokenizer are."""
    artifact: Path | None = None
    encoder: bool = False
    """Whether it is an artifact of a sentence encoder."""


def find(target: str | None) -> Target:
    """The folder of a target; a hub id is downloaded first.

    Raises `ModelError` where there is no such model or one that is not served, and `ArtifactError` for an artifact that
    cannot be read.
    """
    if target is None:
        return Target(name=BUNDLED_NAME, folder=Path(__file__).parent.parent / "bundled")
    path = Path(target)
    if (path / RECIPE).is_file() or (path / MANIFEST).is_file():
        kind = _workload(path)
        if kind not in SERVED:
            raise ModelError(
                f"{path} is an artifact of kind '{kind}', which is not served",
                allowed="language models and sentence encoders",
                next=f'call it from Python: torchwright.load("{path}").model(...)',
            )
        return Target(name=path.resolve().name, folder=path / MODEL, artifact=path, encoder=kind == "encoder")
    if path.exists():
        name = path.resolve().name
    elif target.count("/") == 1 and not target.startswith((".", "/", "~")):
        path, name = _downloaded(target), target
    else:
        raise ModelError(
            f"there is no model at {target}",
            allowed="an artifact folder, a Hugging Face folder, or a hub id",
            next="`torchwright serve` with no model serves the bundled one",
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json", allowed="a Hugging Face folder: config.json beside *.safetensors"
        )
    return Target(name=name, folder=path)


def _workload(path: Path) -> str:
    try:
        return str(json.loads((path / RECIPE).read_text("utf-8"))["workload"]["kind"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path / RECIPE} cannot be read", found=f"{type(error).__name__}: {error}", next="optimize again"
        ) from error


def _downloaded(target: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.jinja2", "tokenizer*"]
    try:
        return Path(snapshot_download(target, allow_patterns=patterns))
    except Exception as error:  # the library's own, and its network's
        raise ModelError(
            f"'{target}' is neither a folder here nor a model that the hub gave",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            allowed="an artifact folder, a Hugging Face folder, or a hub id",
        ) from error
