"""Pictures in the prompts of transformers' models: embeddings of their own encoder, handed back to their forward call.

Models of transformers take the results of their encoder in place of a picture's pixels (`mm_encoder_outputs`). So each
picture is encoded by itself, and may be remembered. What a model computes of a prompt with a picture is compared with
its own pass over pixels before any is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.core.errors import first_line
from torchwright.models.decoder.axes import PromptAxes
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.shown import Embedded, EncodesPictures, Shown, with_pictures
from torchwright.models.decoder.transformers_backend.attention import CannotPage
from torchwright.models.decoder.transformers_backend.check import differs
from torchwright.models.decoder.transformers_backend.paged import TransformersModel

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that tell a picture's tokens (1) from a text's (0)."""
LAYOUTS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda rows_NE: (rows_NE,),
    "rows": lambda rows_NE: rows_NE,
    "batch": lambda rows_NE: rows_NE[None],
}
"""Layouts in which models expect embeddings (N, E)."""
PIECES = 3
"""Forward calls in which a prompt with a picture is computed over pages: the picture is cut."""


class CannotShow(Exception):
    """A model that cannot be given pictures; the text says why."""


@dataclass(frozen=True)
class PictureForm:
    """The form in which a model takes encoded pictures."""

    layout: str
    """A name of `LAYOUTS`."""
    types: tuple[str, ...]
    """Arguments of `TYPES` that its forward call is given."""


@dataclass(frozen=True, kw_only=True)
class PictureSample:
    """A short prompt with one picture, to compare two ways of computing it."""

    ids: list[int]
    pictures: Sequence[Any]
    inputs: Mapping[str, torch.Tensor]
    """The prompt as the model's processor prepares it: tokens, pixels, and what else its forward call takes."""


Shows = Callable[[Any], tuple[EncodesPictures, PictureSample]]
"""Returns a model's own encoder, and a sample; raises `ModelError`."""


def handed(embedded: Embedded, form: PictureForm) -> dict[str, Any]:
    """Return the argument that hands a forward call the embeddings of its picture places, in order."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    found: Any = BaseModelOutputWithPooling(pooler_output=LAYOUTS[form.layout](embedded.rows_NE))
    if embedded.deep:
        found.deepstack_features = [LAYOUTS[form.layout](rows) for rows in embedded.deep]
    return {"mm_encoder_outputs": {"image": found}}


def prompt_arguments(
    model: Any, ids: Sequence[int], tokens: Sequence[int], axes: PromptAxes | None, form: PictureForm
) -> dict[str, Any]:
    """Return the arguments of a whole prompt with pictures: token ids, their types, and positions by axis."""
    device = model.get_input_embeddings().weight.device
    found = token_arguments(torch.tensor([list(ids)], device=device), tokens, form)
    if axes is not None:
        found["position_ids"] = positions(axes, range(len(ids)), device)
    return found


def token_arguments(ids_BT: torch.Tensor, tokens: Sequence[int], form: PictureForm) -> dict[str, Any]:
    """Return token ids (B, T) and their types as arguments; `tokens` stand for pictures."""
    types_BT = torch.isin(ids_BT, torch.tensor(tokens, device=ids_BT.device)).long()
    return {"input_ids": ids_BT, **dict.fromkeys(form.types, types_BT)}


def positions(axes: PromptAxes, places: range, device: torch.device) -> torch.Tensor:
    """Return the positions (3, 1, n) of the tokens at these places."""
    return torch.from_numpy(axes.at(places).copy()).to(device)[:, None]


@torch.inference_mode()
def form_of(model: Any, vision: EncodesPictures, sample: PictureSample) -> PictureForm:
    """Return the form in which a model takes embeddings; raise `CannotShow` where none gives its own logits."""
    expected_TV = expected(model, sample)
    reasons = dict[str, None]()
    shown = Shown.of(vision, sample.ids, sample.pictures)
    named = tuple(name for name in TYPES if name in sample.inputs)
    for form in [PictureForm(layout, types) for types in dict.fromkeys([named, ()]) for layout in LAYOUTS]:
        arguments = prompt_arguments(model, sample.ids, vision.tokens, shown.axes, form)
        try:
            found_TV = model(**arguments, **handed(shown.embedded, form), use_cache=False).logits[0].float()
        except Exception as error:  # whatever a model's own code raises
            reasons[f"{type(error).__name__}: {first_line(error)}"] = None
            continue
        if fault := differs(found_TV, expected_TV, model.get_input_embeddings().weight.dtype):
            reasons[f"{fault} for a picture differ from its own"] = None
        else:
            return form
    raise CannotShow("; ".join(reasons))


@torch.inference_mode()
def check_paged_pictures(model: TransformersModel, vision: EncodesPictures, sample: PictureSample) -> None:
    """Raise `CannotPage` unless a prompt with a picture has, in pieces over pages, its own logits."""
    expected_TV = expected(model.model, sample)
    shown = Shown.of(vision, sample.ids, sample.pictures)
    found = list[torch.Tensor]()
    with model.paged():
        pages, size = -(-len(sample.ids) // PAGE), -(-len(sample.ids) // PIECES)
        cache = PagedCache(model.config, pages=pages, dtype=model.dtype, device=model.embedding.device)
        sequence = cache.sequence(len(sample.ids), shown.axes)
        for start in range(0, len(sample.ids), size):
            ids = sample.ids[start : start + size]
            batch = with_pictures(cache.append([(sequence, ids)]), [(shown, start, len(ids))])
            rows_N = torch.arange(len(ids), device=cache.device)
            found.append(model.answer(batch, cache, rows_N).values_NV)
    if fault := differs(torch.cat(found), expected_TV, model.dtype):
        raise CannotPage(f"{fault} for a picture differ from its own: its tokens may see the whole picture")


def expected(model: Any, sample: PictureSample) -> torch.Tensor:
    """Return the logits (T, V) of the model's own pass over pixels; raise `CannotShow` where it fails."""
    device = model.get_input_embeddings().weight.device
    inputs = {
        name: array.to(device, model.dtype) if array.is_floating_point() else array.to(device)
        for name, array in sample.inputs.items()
    }
    try:
        return model(**inputs, use_cache=False).logits[0].float()
    except Exception as error:
        raise CannotShow(f"its own pass fails: {type(error).__name__}: {first_line(error)}") from error
