"""The part of a vision-language model that turns pictures into rows of embeddings: transformers' own modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import ModelError, TorchwrightError, first_line
from torchwright.hub.folder import read_config
from torchwright.models.decoder.axes import PromptAxes
from torchwright.models.decoder.shown import Embedded
from torchwright.models.vision.reader import picture_token, takes_pictures
from torchwright.models.vision.record import Picture
from torchwright.workloads.huggingface import quiet_transformers

LANGUAGE = ("language_model", "text_model")
"""Names in transformers for the language model, which the decoder computes."""

WHOLE = ("gemma3",)
"""`model_type` of models in which each token of a picture attends to the whole picture."""


class PictureEncoder:
    """A folder's vision encoder and projector.

    encoder = PictureEncoder(folder, torch.bfloat16)
    encoder.embed(picture).rows_NE
    encoder.axes(ids, [picture])            positions by axis, None where a token has one

    It is loaded with the first picture, or by `load`. Raises `ModelError` where transformers cannot load it.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.token, self.device = picture_token(folder), torch.device(device)
        self.whole = read_config(folder).get("model_type") in WHOLE
        self._folder, self._dtype = folder, dtype

    def load(self) -> None:
        """Load the encoder now, rather than with the first picture."""
        _ = self._model

    @cached_property
    def _model(self) -> Any:
        return _vision_part(self._folder, self._dtype).to(self.device)

    @cached_property
    def _takes(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._model.get_image_features).parameters)

    @torch.inference_mode()
    def embed(self, picture: Picture) -> Embedded:
        """Encode one picture. Raises `ModelError` where that fails, or where it does not fill its places."""
        with _as_model_error("the vision encoder fails on a picture"):
            arguments = {
                name: torch.from_numpy(array.numpy().copy()).to(self.device)
                for name, array in picture.arrays.items()
                if name in self._takes
            }
            found = self._model.get_image_features(**arguments, return_dict=True)
            rows_NE = _rows(found.pooler_output)
            deep = tuple(_rows(rows) for rows in getattr(found, "deepstack_features", None) or ())
        if len(rows_NE) != picture.tokens:
            raise ModelError(
                "the model's processor and its vision encoder disagree",
                found=f"{len(rows_NE)} embeddings for {picture.tokens} places",
            )
        return Embedded(rows_NE, deep)

    def axes(self, ids: Sequence[int], pictures: Sequence[Picture]) -> PromptAxes | None:
        """Return the positions of a prompt's tokens by axis, None where the model has one for each token.

        Raises `ModelError` where they cannot be computed.
        """
        index = getattr(self._model, "get_rope_index", None)
        if index is None or not pictures:
            return None
        with _as_model_error("the positions of pictures cannot be computed"):
            ids_1T = torch.tensor([list(ids)])
            grids = {
                name: torch.from_numpy(np.concatenate([picture.arrays[name].numpy() for picture in pictures]))
                for name in pictures[0].arrays
                if name.endswith("grid_thw")
            }
            positions_A1T, _ = index(ids_1T, mm_token_type_ids=(ids_1T == self.token).int(), **grids)
            return PromptAxes(positions_A1T[:, 0].numpy())


def encoder_of(folder: Path, dtype: torch.dtype, device: torch.device) -> PictureEncoder | None:
    """Return the encoder of a folder whose model takes pictures, None for another, and on devices other than CPUs."""
    takes = device.type == "cpu" and takes_pictures(folder)
    return PictureEncoder(folder, dtype, device) if takes else None


@contextlib.contextmanager
def _as_model_error(text: str) -> Iterator[None]:
    """Turn any exception of transformers' code into a `ModelError`, which ends one request and not the server."""
    try:
        yield
    except TorchwrightError:
        raise
    except Exception as error:
        raise ModelError(text, found=f"{type(error).__name__}: {first_line(error)}") from error


def _rows(found: Any) -> torch.Tensor:
    """Embeddings (N, E) of one picture, however a model lays its parts out."""
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _vision_part(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model without its language model, which is loaded with one layer and few tokens, then dropped."""
    config = read_config(folder)
    try:
        with quiet_transformers():
            import transformers

            described: Any = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            text = described.get_text_config()
            text.num_hidden_layers = 1
            text.vocab_size = 1 + max(_ids(text.to_dict()), default=0)
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:1]
            if hasattr(described, "quantization_config"):
                del described.quantization_config
            # The whole class: its conversions of published names of tensors are not all applied for its base model.
            auto: Any = transformers.AutoModelForImageTextToText
            whole, loaded = auto.from_pretrained(
                folder,
                config=described,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            f"transformers cannot load the vision encoder of {folder}", found=first_line(error)
        ) from error
    model: Any = whole.base_model
    part = next((name for name in LANGUAGE if hasattr(model, name)), None)
    elsewhere = ("lm_head", *(f"{whole.base_model_prefix}.{name}" for name in LANGUAGE))
    lacks = [name for name in loaded["missing_keys"] if not name.startswith(elsewhere)]
    if lacks or not hasattr(model, "get_image_features") or part is None:
        kind = f"{config.get('model_type')}: " + (
            f"{len(lacks)} tensors missing, such as {lacks[0]}" if lacks else ""
        )
        raise ModelError(f"the vision encoder of {folder} cannot be used", found=kind)
    delattr(model, part)
    return model.eval().requires_grad_(False)


def _ids(fields: dict[str, Any]) -> list[int]:
    """Special tokens, which must lie within the vocabulary."""
    return [value for name, value in fields.items() if name.endswith("_token_id") and isinstance(value, int)]
