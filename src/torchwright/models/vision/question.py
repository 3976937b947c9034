"""A question about pictures and videos, as a model's chat template writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import WorkloadError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.vision.reader import PictureReader, joined, placed, split, takes_pictures
from torchwright.models.vision.record import Picture


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt whose tokens have places for pictures."""

    ids: list[int]
    pictures: list[Picture]


def question_about(folder: Path, text: str, images: Sequence[Any], videos: Sequence[Path] = ()) -> Question:
    """Return a user's message of some pictures, whatever `read_picture` takes, some videos and a text behind them.

    Raises `PictureError` for a file that cannot be used. Raises `WorkloadError` where the folder's model takes text
    alone, or the text holds the word of a picture's place.
    """
    if not takes_pictures(folder):
        raise WorkloadError(f"the model of {folder} takes text alone", next="leave out --image and --video")
    reader, template = PictureReader(folder), ChatTemplate(folder)
    if videos and reader.video_fault:
        raise WorkloadError(
            "--video is not for this model", found=reader.video_fault, next="leave out --video"
        )
    media = [*(("image", image) for image in images), *(("video", video) for video in videos)]
    content = [*({"type": kind} for kind, _ in media), {"type": "text", "text": text}]
    written = template.render([{"role": "user", "content": content}], placeholders=reader.placeholders)
    pieces, kinds = split(written, reader.placeholders)
    files = placed(kinds, media)
    if files is None:
        words = " and ".join(f"'{word}'" for word in reader.placeholders.values())
        raise WorkloadError(
            f"the prompt has {len(kinds)} places for pictures",
            found=f"{len(media)} pictures",
            next=f"write the prompt without {words}, which stand for pictures",
        )
    prepared = [
        reader.read_video(file) if kind == "video" else reader.read(file)
        for kind, file in zip(kinds, files, strict=True)
    ]
    ids = open_tokenizer(folder).encode(joined(pieces, prepared), add_special_tokens=template.plain).ids
    return Question(ids=ids, pictures=[found.picture for found in prepared])
