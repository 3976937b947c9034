"""Models as transformers builds them from a Hugging Face folder; it is imported only when one is built."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.quiet import quiet_import
from torchwright.hub.checkpoint import QUANTIZATION, Checkpoint
from torchwright.hub.folder import read_config
from torchwright.hub.tensor_header import read_header

PREPROCESSOR = "preprocessor_config.json"


def model_class(name: object) -> Any:
    """Return the transformers class of this name, or None if there is no model class of that name."""
    if not isinstance(name, str) or not name.isidentifier():
        return None
    with quiet_transformers():
        import transformers

        found = getattr(transformers, name, None)
        is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def cache_keyword(model: nn.Module) -> str:
    """The name of the argument in which this model of transformers takes its cache: `cache` since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_model(
    folder: Path, auto: str, labels: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Load the folder's model in `dtype` and eval mode, from safetensors or GGUF only, without code from the folder.

    Quantized weights are dequantized as they are read. With `labels` the model classifies these labels: the layers
    behind the base model are initialized at random, by torch's own generator, if the folder has none or has a
    different set.

    Raises `ModelError` with transformers' own reason if it cannot be built.
    """
    config = read_config(folder)
    try:
        with quiet_transformers():
            import transformers

            if config.get(QUANTIZATION) is None:
                cls, source = getattr(transformers, auto), {"pretrained_model_name_or_path": folder}
            else:
                cls, source = _made_wide(folder, config, getattr(transformers, auto), dtype)
            if labels is not None:
                source |= {"ignore_mismatched_sizes": True, "config": _telling(folder, labels)}
            model, loaded = cls.from_pretrained(
                **source,
                dtype=dtype,
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
    if labels is not None:
        inside = f"{model.base_model_prefix}."
        mismatched = (str(key if isinstance(key, str) else key[0]) for key in loaded["mismatched_keys"])
        missing = sorted(key for key in {*missing, *mismatched} if key.startswith(inside))
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
    """Return the cause of a failure; of a failed import the first cause, since transformers names only the requested
    class.
    """
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _telling(folder: Path, labels: Sequence[str]) -> Any:
    """The folder's configuration, for a model that tells these classes."""
    import transformers

    return transformers.AutoConfig.from_pretrained(
        folder,
        trust_remote_code=False,
        local_files_only=True,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )


def _made_wide(
    folder: Path, config: dict[str, Any], asked: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """The class of model that `asked` makes of a quantized folder, and its configuration and state dict made wide."""
    import transformers

    wide: Any = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    del wide.quantization_config
    with torch.device("meta"):
        cls = asked if issubclass(asked, transformers.PreTrainedModel) else type(asked.from_config(wide))
    tensors = dict(Checkpoint(folder, config).tensors(dtype))
    return cls, {"pretrained_model_name_or_path": None, "config": wide, "state_dict": tensors}


def open_picture_processor(folder: Path) -> Any:
    """Return the folder's preprocessor of pictures.

    Raises `ModelError` for a folder without one that transformers knows.
    """
    try:
        with quiet_transformers():
            from transformers import AutoImageProcessor

            return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder / PREPROCESSOR} does not say how pictures become the model's input",
            found=str(error).splitlines()[0],
            next="save the model's image processor of transformers into its folder",
        ) from error


def register_recorded(model: nn.Module) -> None:
    """Note which outputs the parts of an unpickled model record, as transformers does when it builds one."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", {})
    for part in model.modules():
        if hasattr(part, "_can_record_outputs"):
            registry[part] = part._can_record_outputs


def parameter_count(folder: Path, vocabulary: int = 0) -> int:
    """Return the parameters in the folder's safetensors, by their headers, without tables of `vocabulary` rows.

    Raises `ModelError`, naming the file, for a header that cannot be read.
    """
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shapes = [tensor.shape for tensor in read_header(path).values()]
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is no safetensors file", found=str(error)) from error
        count += sum(math.prod(shape) for shape in shapes if not shape or shape[0] != vocabulary)
    return count


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
