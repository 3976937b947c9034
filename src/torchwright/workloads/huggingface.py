"""Reading Hugging Face folders and hub ids; transformers is imported only when a model is built."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from torchwright.errors import ModelError
from torchwright.hub.checkpoint import QUANTIZATION, Checkpoint
from torchwright.hub.files import read_object
from torchwright.hub.gguf.folder import opened
from torchwright.quiet import quiet_import

WEIGHTS = ("*.safetensors", "*.gguf")
"""Files of tensors."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises `ModelError` when the folder or the file is not there or is not JSON.
    """
    if not folder.exists():
        raise ModelError(
            f"there is no model at {folder}",
            allowed="a Hugging Face folder, a GGUF file, a hub id, package.module:factory, or an artifact folder",
            next="`torchwright optimize` with no model runs the bundled one",
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json",
            found=", ".join(sorted(p.name for p in folder.iterdir())[:6]) if folder.is_dir() else "a file",
            allowed="a Hugging Face folder: config.json beside *.safetensors",
        )
    return read_object(path)


def model_class(name: object) -> Any:
    """The class of transformers of this name, or None where it has no model class of it."""
    if not isinstance(name, str) or not name.isidentifier():
        return None
    with quiet_transformers():
        import transformers

        found = getattr(transformers, name, None)
        is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def load_model(folder: Path, auto: str) -> nn.Module:
    """The folder's model in float32 and eval mode, weights from safetensors or GGUF only, no code from the folder.

    Quantized weights are made wide as they are read: what the model computes with is what its integers stand for.

    Raises `ModelError` with transformers' own reason when it cannot be built.
    """
    import torch

    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    try:
        with quiet_transformers():
            import transformers

            if config.get(QUANTIZATION) is None:
                cls, source = getattr(transformers, auto), {"pretrained_model_name_or_path": folder}
            else:
                cls, source = _made_wide(folder, config, getattr(transformers, auto))
            model, loaded = cls.from_pretrained(
                **source,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers cannot load {folder}",
            found=_first_line(error),
            next="run it again with a whole transformers"
            if isinstance(error, ImportError)
            else "check that config.json and the *.safetensors belong together",
        ) from error
    # transformers fills what a file lacks with random numbers; only a pooler, which nothing here reads, may be missing.
    missing = sorted(key for key in loaded["missing_keys"] if "pooler" not in key)
    if missing:
        raise ModelError(
            f"the weights in {folder} are not those of {type(model).__name__}",
            found=f"{len(missing)} missing, such as {missing[0]}",
            next="check that config.json and the *.safetensors belong together",
        )
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _first_line(error: BaseException) -> str:
    """What went wrong; of a failed import its first cause: transformers names only the class it was asked for."""
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _made_wide(folder: Path, config: dict[str, Any], asked: Any) -> tuple[Any, dict[str, Any]]:
    """The class of model that `asked` makes of a quantized folder, and its configuration and state dict made wide."""
    import torch
    import transformers

    wide: Any = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    del wide.quantization_config
    with torch.device("meta"):
        cls = asked if issubclass(asked, transformers.PreTrainedModel) else type(asked.from_config(wide))
    tensors = dict(Checkpoint(folder, config).tensors(torch.float32))
    return cls, {"pretrained_model_name_or_path": None, "config": wide, "state_dict": tensors}


def register_recorded(model: nn.Module) -> None:
    """Note which outputs the parts of an unpickled model record, as transformers does when it builds one."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", {})
    for part in model.modules():
        if hasattr(part, "_can_record_outputs"):
            registry[part] = part._can_record_outputs


def parameter_count(folder: Path, vocabulary: int = 0) -> int:
    """Parameters in the folder's safetensors, from their headers alone, without tables of `vocabulary` rows."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
        count += sum(math.prod(shape) for shape in shapes if not shape or shape[0] != vocabulary)
    return count


def resolve(target: str) -> Path:
    """A local folder for a path, a GGUF file or a hub id; hub ids are downloaded by transformers' own library.

    Raises `ModelError` when it is none of them.
    """
    path = Path(target)
    looks_like_id = target.count("/") == 1 and not target.startswith((".", "/", "~"))
    if path.exists() or not looks_like_id:
        return opened(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(target, allow_patterns=["*.json", "*.safetensors", "*.txt", "tokenizer*"])
        )
    except Exception as error:
        raise ModelError(
            f"'{target}' is neither a folder here nor a model that the hub gave",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            allowed="a Hugging Face folder, a GGUF file, a hub id, package.module:factory, or an artifact folder",
        ) from error


def model_files(folder: Path, *, weights: bool, parts: Sequence[str] = ()) -> dict[str, Path]:
    """Configuration, tokenizer and licence files of a folder and its `parts`, and their safetensors if asked.

    Path inside the folder → the file.
    """
    patterns = ["*.json", "*.jinja", "*.txt", "LICENSE*", "*.model", *(WEIGHTS if weights else [])]
    places = dict.fromkeys([folder, *(folder / part for part in parts)])
    files = {
        path for place in places for pattern in patterns for path in place.glob(pattern) if path.is_file()
    }
    wanted = sorted(path for path in files if weights or not path.name.endswith(".safetensors.index.json"))
    return {path.relative_to(folder).as_posix(): path for path in wanted}


@contextlib.contextmanager
def quiet_transformers():
    """transformers, and what it imports, without warnings and progress bars; both are restored afterwards."""
    with quiet_import():
        import transformers

        bars = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers.utils.logging.enable_progress_bar()
