"""Folders as Hugging Face lays them out: their files, and how a path or a hub id becomes one. No torch here."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError, shown
from torchwright.core.json_file import decode_json
from torchwright.core.regular_file import read_regular
from torchwright.hub.gguf.folder import opened
from torchwright.hub.run_folder import trained_model

MORE_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates that have a name."""
WEIGHTS = ("*.safetensors", "*.gguf")
"""Files of tensors."""
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.jinja2", "tokenizer*")
"""Files of a hub's model that are downloaded: no pickle, no code."""
HUGGING_FACE = "a Hugging Face folder: config.json beside *.safetensors; a pipeline has model_index.json"
LAYERS = re.compile(r"(layers?|depth)$")
LARGEST_OBJECT = 64 * 2**20
"""Bytes of a JSON file; the largest published index of tensors takes some 10 MB."""
SHARED: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list of names of classes"),
    "model_type": (str, "a string"),
    "quantization_config": (dict, "an object"),
    "is_encoder_decoder": (bool, "true or false"),
    "tie_word_embeddings": (bool, "true or false"),
    "id2label": (dict, "an object"),
    "label2id": (dict, "an object"),
    "text_config": (dict, "an object"),
    "vision_config": (dict, "an object"),
}
"""Fields that mean the same in every config.json → their type, which is checked before any of them is read."""
MOST_LAYERS = 2_000
"""The most layers: building an untrusted configuration takes milliseconds per layer, with or without weights."""
TARGETS = "a Hugging Face folder, a GGUF file, a hub id, package.module:factory, or an artifact folder"
MTP = "mtp"
"""In place of a draft's folder: the model's own MTP layer."""
OFFLINE = (
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectionError",
    "ConnectTimeout",
    "ConnectError",
)
"""Exceptions that huggingface_hub raises, or that cause one, if the hub cannot be reached."""


@dataclass(frozen=True)
class Wanted:
    """The models that a caller of `resolve` takes, for the error about one that is not there."""

    allowed: str
    next: str | None = None


BUNDLED = "bundled"
"""The name of the language model that comes with the package, where no file or folder has it."""
BUNDLED_FOLDER = Path(__file__).parents[1] / "workloads" / "bundled"
ANY_MODEL = Wanted(TARGETS, "leave the model out to take the bundled one")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise `ModelError` if the file holds anything else."""
    try:
        data = decode_json(read_regular(path, LARGEST_OBJECT))
    except OSError as error:
        raise ModelError(f"{path} cannot be read", found=str(error)) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON", found=str(error)) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object", found=type(data).__name__)
    return data


def find_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty for a missing file; raise `ModelError` for anything else in the file."""
    return read_object(path) if path.is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json.

    Raises `ModelError` if the folder or the file is missing, or if the file is not JSON. So it does for a wrong type of
    a field that every model shares, and for too many layers.
    """
    if not folder.exists():
        raise _missing(folder, ANY_MODEL)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json",
            found=", ".join(sorted(p.name for p in folder.iterdir())[:6]) if folder.is_dir() else "a file",
            allowed=HUGGING_FACE,
        )
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a config.json under any name; raise `ModelError` as `read_config` does."""
    config = read_object(path)
    for key, (kind, words) in SHARED.items():
        value = config.get(key)
        items = value if isinstance(value, list) else []
        if value is not None and not (isinstance(value, kind) and all(isinstance(x, str) for x in items)):
            raise ModelError(f"{path}: '{key}' cannot be used", found=shown(value, 300), allowed=words)
    for key, count in _depths(config):
        if count > MOST_LAYERS:
            raise ModelError(
                f"{path} describes more layers than any model has",
                found=f"{key} = {count:,}",
                allowed=f"up to {MOST_LAYERS:,}",
            )
    return config


def _depths(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every number of layers in a configuration, and in those within it."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _depths(value)
        elif isinstance(value, int | float) and LAYERS.search(str(key)):
            yield str(key), value


def resolve(target: str, wanted: Wanted = ANY_MODEL) -> Path:
    """Return the local folder of a path, a GGUF file, a training run's folder, a hub id or the bundled model.

    A hub id is downloaded by huggingface_hub. Raises `ModelError` if `target` is neither; the error names what the
    caller takes.
    """
    path = Path(target)
    if path.exists():
        return local(path)
    if target == BUNDLED:
        return BUNDLED_FOLDER
    if is_hub_id(target):
        return download(target, allowed=wanted.allowed)
    raise _missing(path, wanted)


def _missing(path: Path, wanted: Wanted) -> ModelError:
    """The error for a path that does not exist, with the nearest name in the same folder."""
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    hint = f"; did you mean {parent / near[0]}?" if near else ""
    return ModelError(f"there is no model at {path}{hint}", allowed=wanted.allowed, next=wanted.next)


def local(path: Path) -> Path:
    """The model folder of a GGUF file or a training run; any other path as it is."""
    return opened(trained_model(path))


def is_hub_id(target: str) -> bool:
    """Check for the form of a hub id: an owner and a name, and a revision behind @ if one is wanted."""
    return target.partition("@")[0].count("/") == 1 and not target.startswith((".", "/", "~"))


def at_revision(target: str | None, revision: str | None) -> str | None:
    """Return a hub id with its revision; raise `ModelError` where the target is none, or has another revision."""
    if revision is None:
        return target
    if target is None or Path(target).exists() or not is_hub_id(target) or "@" in target:
        raise ModelError(
            f"--revision {revision} is for a hub id",
            found=str(target or "no model"),
            allowed="such as ORG/NAME",
        )
    return f"{target}@{revision}"


def download(name: str, *, allowed: str) -> Path:
    """The folder of a hub id, fetched where it is not here yet; raises `ModelError` where the hub gives none.

    A revision stands behind @: a branch, a tag or a commit. Files that were begun are gone on with. `HF_HOME` says
    where they lie, and `HF_TOKEN` opens what is gated.
    """
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FETCHED)))
    except Exception as error:  # the library's own, and its network's
        if _is_offline(error):
            raise ModelError(
                f"there is no folder '{name}', and the hub id '{name}' cannot be downloaded: the hub is offline here",
                found="HF_HUB_OFFLINE is set, and the model is not in the hub's cache"
                if _offline_asked()
                else "no connection to the hub, and the model is not in its cache",
                allowed=allowed,
                next="download the model on a machine with a connection, and pass its folder",
            ) from error
        raise ModelError(
            f"'{name}' is neither a folder here nor a model that the hub gave",
            found=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            allowed=allowed,
            next=_cure(error),
        ) from error


def _cure(error: BaseException) -> str | None:
    """Return what helps against an answer of the hub."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "RevisionNotFoundError" in kinds:
        return "name a branch, a tag or a commit that the model has"
    if kinds & {"GatedRepoError", "RepositoryNotFoundError"}:
        return "check the name; for a private or gated model set HF_TOKEN, and accept its terms on the hub"
    return None


def _is_offline(error: BaseException | None) -> bool:
    """Check whether an error, or what caused it, says that the hub was not reached."""
    while error is not None:
        if any(kind.__name__ in OFFLINE for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _offline_asked() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def model_files(folder: Path, *, weights: bool, parts: Sequence[str] = ()) -> dict[str, Path]:
    """Configuration, tokenizer and licence files of a folder and its `parts`, and their safetensors if asked.

    Path inside the folder → the file.
    """
    patterns = [
        "*.json",
        "*.jinja",
        "*.jinja2",
        f"{MORE_TEMPLATES}/*.jinja",
        "*.txt",
        "LICENSE*",
        "*.model",
        "*.spm",
        *(WEIGHTS if weights else []),
    ]
    places = dict.fromkeys([folder, *(folder / part for part in parts)])
    files = {
        path for place in places for pattern in patterns for path in place.glob(pattern) if path.is_file()
    }
    wanted = sorted(path for path in files if weights or not path.name.endswith(".safetensors.index.json"))
    return {path.relative_to(folder).as_posix(): path for path in wanted}


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files to their paths inside a folder, as `model_files` names them."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
