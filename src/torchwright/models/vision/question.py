"""A question about pictures, as a model's chat template writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import WorkloadError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.vision.reader import PictureReader, joined, takes_pictures
from torchwright.models.vision.record import Picture


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt whose tokens have places for pictures."""

    ids: list[int]
    pictures: list[Picture]


def question_about(folder: Path, text: str, images: Sequence[Any]) -> Question:
    """Return a user's message of some pictures, whatever `read_picture` takes, and a text behind them.

    Raises `PictureError` for a file that cannot be used. Raises `WorkloadError` where the folder's model takes text
    alone, or the text holds the word of a picture's place.
    """
    if not takes_pictures(folder):
        raise WorkloadError(f"the model of {folder} takes text alone", next="leave out --image")
    reader, template = PictureReader(folder), ChatTemplate(folder)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    pieces = template.render([{"role": "user", "content": content}], picture=reader.placeholder).split(
        reader.placeholder
    )
    if len(pieces) - 1 != len(images):
        raise WorkloadError(
            f"the prompt has {len(pieces) - 1} places for pictures",
            found=f"{len(images)} pictures",
            next=f"write the prompt without '{reader.placeholder}', which stands for a picture",
        )
    prepared = [reader.read(image) for image in images]
    ids = open_tokenizer(folder).encode(joined(pieces, prepared), add_special_tokens=template.plain).ids
    return Question(ids=ids, pictures=[found.picture for found in prepared])
