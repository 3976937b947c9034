"""A model's purpose and its digest, found without torch: the process that plans never imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.json_file import read_json
from torchwright.core.paths import file_digest
from torchwright.hub.architectures import named
from torchwright.hub.folder import find_object, model_files, read_config, resolve
from torchwright.map.options import TASKS, TaskName
from torchwright.optimization.artifact.folder import MANIFEST, MODEL, RECIPE

ModelKind = Literal["encoder", "classifier", "images", "recognizer", "writer"]
CAN: dict[ModelKind, tuple[TaskName, ...]] = {
    "encoder": ("embed", "score", "openai"),
    "classifier": ("classify", "score"),
    "images": ("classify",),
    "recognizer": ("transcribe",),
    "writer": ("generate", "openai"),
}
"""Kind of model → its tasks, the usual one first."""
NOUNS: dict[ModelKind, str] = {
    "encoder": "a sentence encoder",
    "classifier": "a classifier of text",
    "images": "a classifier of pictures",
    "recognizer": "a speech model",
    "writer": "a language model",
}
SERVED: dict[str, ModelKind] = {"writer": "writer", "translator": "writer", "recognizer": "recognizer"}
"""`workloads.base.Served` → kind."""
SAMPLES, SAMPLE_BYTES = 8, 4096
"""Pieces of a large file that its digest reads: weights of another training differ in all of them."""
WHOLE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MapModel:
    """A model as the planning process sees it."""

    target: str | None
    """The user's name for it; None is the bundled language model."""
    folder: Path
    """Its configuration and tokenizer."""
    artifact: Path | None
    kind: ModelKind
    digest: str
    threads: int | None = None
    """Threads that the artifact was measured with."""

    @property
    def name(self) -> str:
        """Return its name in requests, as the server has it."""
        if self.target is None:
            return "torchwright-bundled"
        path = Path(self.target)
        return path.resolve().name if path.exists() else self.target.partition("@")[0]

    @property
    def usual_task(self) -> TaskName:
        return CAN[self.kind][0]


def find_model(target: str | None, task: TaskName | None) -> MapModel:
    """Return the model of a target for a task.

    Raises `ModelError` for a target that is not a model of the task's kind, and `WorkloadError` for an unknown task.
    """
    if task is not None and task not in TASKS:
        raise WorkloadError(f"--task {task}", allowed=", ".join(TASKS))
    path = Path(target) if target is not None else None
    if path is not None and (path / MANIFEST).is_file():
        found = _artifact(path)
    else:
        found = _folder(target)
    if task is not None and task not in CAN[found.kind]:
        raise ModelError(
            f"{target or 'the bundled model'} is {NOUNS[found.kind]}, which does not {task}",
            allowed=", ".join(f"--task {name}" for name in CAN[found.kind]),
        )
    return found


def _artifact(path: Path) -> MapModel:
    manifest: Any = read_json(path / MANIFEST)
    recipe: Any = read_json(path / RECIPE)
    workload = recipe.get("workload") if isinstance(recipe, dict) else None
    described: dict[str, Any] = workload if isinstance(workload, dict) else {}
    kind = _artifact_kind(path, str(described.get("kind")), str(manifest.get("served_as") or ""))
    threads = manifest.get("threads")
    return MapModel(
        target=str(path),
        folder=path / MODEL,
        artifact=path,
        kind=kind,
        digest=file_digest(path / MANIFEST)[:24],
        threads=threads if isinstance(threads, int) and threads > 0 else None,
    )


def _artifact_kind(path: Path, workload: str, served_as: str) -> ModelKind:
    if workload == "encoder":
        return "encoder"
    if workload == "image":
        return "images"
    if served_as == "reader":
        return "classifier"
    if served_as in SERVED:
        return SERVED[served_as]
    raise ModelError(
        f"{path} is an artifact of kind '{workload}', which answers no rows of files",
        allowed=", ".join(NOUNS.values()),
        next=f'call it from Python: torchwright.load("{path}").model(...)',
    )


def _folder(target: str | None) -> MapModel:
    path = resolve(target) if target is not None else None
    kind: ModelKind | None = None if path is None else _folder_kind(path)
    if kind is None or path is None:
        try:
            from torchwright.serve.folder import find
        except ModuleNotFoundError as error:  # its packages are an extra
            raise ModelError(
                "this model runs in the server's engine, whose packages are not installed",
                found=str(error),
                next="pip install 'torchwright[serve]'",
            ) from error
        served = find(target)
        if served.served_as not in SERVED:
            raise ModelError(
                f"{target} is a model that answers no rows of files", allowed=", ".join(NOUNS.values())
            )
        path, kind = served.folder, SERVED[served.served_as]
    return MapModel(target=target, folder=path, artifact=None, kind=kind, digest=_digest(path))


def _folder_kind(path: Path) -> ModelKind | None:
    """Return the kind of a folder that only reads; None for one that speaks, writes or is unknown."""
    if (path / "modules.json").is_file():
        said = find_object(path / "config_sentence_transformers.json")
        return "classifier" if said.get("model_type") == "CrossEncoder" else "encoder"
    if not (path / "config.json").is_file():
        return None
    names = named(read_config(path))
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classifier"
    if any(name.endswith("ForImageClassification") for name in names):
        return "images"
    if any(name.endswith(("Model", "ForMaskedLM")) and "LMHead" not in name for name in names):
        return "encoder"
    return None


def _digest(folder: Path) -> str:
    """Digest of a folder's files: small ones as a whole, of weights their sizes and samples."""
    digest = hashlib.blake2b(digest_size=12)
    for name, path in sorted(_files(folder)):
        size = path.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with path.open("rb") as file:
            step = size if size <= WHOLE_BYTES else size // SAMPLES
            for start in range(0, size, max(1, step)):
                file.seek(start)
                digest.update(file.read(size if size <= WHOLE_BYTES else SAMPLE_BYTES))
    return digest.hexdigest()


def _files(folder: Path) -> Iterable[tuple[str, Path]]:
    inner = [path.name for path in folder.iterdir() if path.is_dir() and path.name[:1].isdigit()]
    return model_files(folder, weights=True, parts=inner).items()
