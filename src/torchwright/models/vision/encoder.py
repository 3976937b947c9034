"""The part of a vision-language model that turns pictures into rows of embeddings.

It is transformers' own model. In bfloat16, and with quantized weights, its layers run on our kernels (`native.py`) if
the embeddings of an example stay what they are without them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import ModelError, TorchwrightError, first_line, unknown
from torchwright.core.scheme import BF16, W8A8, Scheme, read_scheme
from torchwright.hardware.kernels import ops
from torchwright.hub.folder import read_config
from torchwright.models.decoder.axes import PromptAxes
from torchwright.models.decoder.shown import Embedded
from torchwright.models.vision.load import vision_part
from torchwright.models.vision.native import OntoKernels
from torchwright.models.vision.reader import PictureReader, media_tokens, takes_pictures
from torchwright.models.vision.record import Picture

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Arrays of prepared pictures and videos by which positions are computed."""

WHOLE = ("gemma3",)
"""`model_type` of models in which each token of a picture attends to the whole picture."""


QUANTIZE = ("none", "w8a8")
"""Four-bit weights are not for encoders: with hundreds of rows they save no time, and they cost accuracy."""
LEAST_COSINE = 0.99
"""Mean cosine between embeddings with and without our kernels. Rounding in bfloat16 costs 0.0005, in 8 bits 0.003 or
more where a model has outliers, and a layer that computes another thing 0.1 or more."""


class PictureEncoder:
    """A folder's vision encoder and projector.

    encoder = PictureEncoder(folder, torch.bfloat16)
    encoder.embed(picture).rows_NE
    encoder.axes(ids, [picture])            positions by axis, None where a token has one

    `quantize` is `w8a8`, `none`, or None: as `rounded` says the language model is, if the embeddings agree. It is
    loaded with the first picture, or by `load`. Raises `ModelError` where transformers cannot load it.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        quantize: str | None = None,
        rounded: bool = False,
        model: Any = None,
        least_cosine: float = LEAST_COSINE,
    ) -> None:
        """`model` is the folder's whole model where it is loaded already; its encoder is used as it is.

        Our kernels are used where their embeddings have a cosine of `least_cosine` or more to transformers' own.
        """
        self.tokens, self.device = media_tokens(folder), torch.device(device)
        self.whole = read_config(folder).get("model_type") in WHOLE
        self.runs_as: str | None = None
        """The layers, precision and agreement, in words; None before it is loaded."""
        self._folder, self._dtype = folder, dtype
        self._schemes = _schemes(quantize, rounded)
        self._asked = quantize not in (None, "none")
        self._least_cosine = least_cosine
        self._model: Any = None
        if model is not None:
            self._model, self.runs_as = model.base_model, "transformers' modules"

    def load(self, example: Picture | None = None) -> None:
        """Load the encoder now, rather than with the first picture.

        `example` is the picture by which our kernels are judged, by default one that the folder's processor prepares.
        """
        if self._model is None:
            self._model = self._load(example)

    @property
    def model(self) -> Any:
        """transformers' model without its language model, its layers on our kernels where they can be."""
        self.load()
        return self._model

    def _load(self, example: Picture | None) -> Any:
        model = vision_part(self._folder, self._dtype).to(self.device)
        # In float32 a layer that no scheme rounds stays what it is.
        schemes = [scheme for scheme in self._schemes if scheme or self._dtype != torch.float32]
        if not schemes or ops.on(self.device, self._dtype) is None:
            if self._asked:
                raise ModelError(f"the vision encoder in {self._schemes[0]}", found="no compiled kernels")
            self.runs_as = "transformers' modules"
            return model
        example = example or PictureReader(self._folder).read(_example()).picture
        wanted = self._embed(model, example)
        faults: list[str] = []
        for scheme in schemes:
            onto = OntoKernels(scheme)
            cosine, fault = self._agreement(onto, model, example, wanted)
            if fault is None:
                left = [f"{kind} stays transformers': {reason}" for kind, reason in onto.kept.items()]
                how = f"our kernels in {scheme or BF16}, cosine {cosine:.4f} to transformers' modules"
                self.runs_as = "; ".join([how, *faults, *left])
                return model
            faults.append(f"{scheme or BF16}: {fault}")
            if self._asked:
                allowed = f"a cosine of {self._least_cosine} or more, on an example"
                raise ModelError(f"the vision encoder of {self._folder}", found=faults[0], allowed=allowed)
            model = vision_part(self._folder, self._dtype).to(self.device)  # its layers have been replaced
        self.runs_as = "; ".join(["transformers' modules", *faults])
        return model

    def _agreement(
        self, onto: OntoKernels, model: Any, example: Picture, wanted: Embedded
    ) -> tuple[float, str | None]:
        """Put a model on kernels; return the cosine to the embeddings without them, and what is wrong, if anything."""
        try:
            onto.replace(model)
            cosine = _cosine(wanted, self._embed(model, example))
        except (ModelError, RuntimeError, ValueError, AttributeError) as error:
            return 0.0, first_line(error)
        return (
            cosine,
            None if cosine >= self._least_cosine else f"its embeddings have a cosine of {cosine:.4f}",
        )

    def embed(self, picture: Picture) -> Embedded:
        """Encode one picture or video. Raises `ModelError` where that fails, or where it does not fill its places."""
        return self._embed(self.model, picture)

    @torch.inference_mode()
    def _embed(self, model: Any, picture: Picture) -> Embedded:
        with _as_model_error("the vision encoder fails on a picture"):
            encode = model.get_video_features if picture.moves else model.get_image_features
            takes = inspect.signature(encode).parameters
            arguments = {
                name: torch.from_numpy(array.numpy().copy()).to(self.device)
                for name, array in picture.arrays.items()
                if name in takes
            }
            found = encode(**arguments, return_dict=True)
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
        if not pictures:
            return None
        index = getattr(self.model, "get_rope_index", None)
        if index is None:
            return None
        with _as_model_error("the positions of pictures cannot be computed"):
            ids_1T = torch.tensor([list(ids)])
            types_1T = torch.zeros_like(ids_1T)
            for kind, token in enumerate(self.tokens, 1):  # 1 for a picture's tokens, 2 for a video's
                types_1T[ids_1T == token] = kind
            positions_A1T, _ = index(ids_1T, mm_token_type_ids=types_1T, **_joined(pictures, GRIDS))
            return PromptAxes(positions_A1T[:, 0].numpy())


def encoder_of(
    folder: Path, dtype: torch.dtype, device: torch.device, **options: Any
) -> PictureEncoder | None:
    """Return the encoder of a folder whose model takes pictures, None for another, and on devices other than CPUs.

    `options` are those of `PictureEncoder`.
    """
    takes = device.type == "cpu" and takes_pictures(folder)
    return PictureEncoder(folder, dtype, device, **options) if takes else None


def _schemes(quantize: str | None, rounded: bool) -> tuple[Scheme | None, ...]:
    """The schemes to try, in order; None leaves weights as they are."""
    if quantize is None:
        return (W8A8, None) if rounded else (None,)
    if quantize not in QUANTIZE:
        raise unknown("quantization of a vision encoder", quantize, QUANTIZE)
    return (read_scheme(quantize),)


def _example() -> np.ndarray:
    """Return a picture (H, W, 3) of coloured fields with noise, whose sides cut windows."""
    draw = np.random.default_rng(0)
    fields = np.kron(draw.uniform(30, 225, (5, 7, 3)), np.ones((28, 28, 1)))
    return (fields + draw.normal(0, 10, fields.shape)).clip(0, 255).astype(np.uint8)


def _cosine(one: Embedded, other: Embedded) -> float:
    """The mean cosine between rows of two pictures' embeddings; NaN where one has NaN."""
    pairs = zip((one.rows_NE, *one.deep), (other.rows_NE, *other.deep), strict=True)
    return float(torch.cat([torch.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in pairs]).mean())


def _joined(pictures: Sequence[Picture], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return arrays of all pictures one after another, of those that have them."""
    found = {
        name: [picture.arrays[name].numpy() for picture in pictures if name in picture.arrays]
        for name in names
    }
    return {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in found.items() if arrays}


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
