"""Conversations about pictures to what a vision-language model takes: tokens, labels, and prepared pictures.

A row has messages as a row of text has. A part of the type image shows the picture that it names, or the next one of
the row's column of pictures. The folder's chat template writes the conversation, and its processor prepares
each picture, as they do in the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.reader import PictureReader, Prepared
from torchwright.models.vision.record import Picture
from torchwright.train.data.documents import ChatEncoder
from torchwright.train.data.messages import RowFault, RowPictures
from torchwright.train.data.turns import Marked, Span, conversation
from torchwright.train.media.config import ChatData, VisionRun
from torchwright.train.media.listing import Item, Listing, hold_out, list_chats
from torchwright.train.media.samples import MediaBatch
from torchwright.train.model.vocabulary import IGNORE

DATA = re.compile(r"data:[^,]{0,100};base64,", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Chats:
    """A run's data, listed."""

    train: Listing
    validation: Listing


@dataclass(frozen=True, kw_only=True)
class ShownChat:
    """A conversation as the model sees it."""

    ids: np.ndarray
    """int64."""
    trained: np.ndarray
    """bool: which of them are labels."""
    pictures: list[Picture]


class ChatTask:
    """Rows to tokens and prepared pictures."""

    def __init__(self, model: Path, data: ChatData) -> None:
        """Raises `ModelError` for a folder without a processor of pictures."""
        self.data, self.reader, self.tokenizer = data, PictureReader(model), open_tokenizer(model)
        self.reader.load()
        config = Fields(model / "config.json", read_config(model))
        ends = config.ids("eos_token_id") or config.section("text_config").ids("eos_token_id")
        self.encoder = ChatEncoder(self.tokenizer, ChatTemplate(model), ends[0] if ends else None, ends)

    def prepare(self, item: Item, draw: int | None) -> ShownChat:
        """Return a row's tokens and pictures. Raises `WorkloadError` for one that cannot be trained on."""
        row = json.loads(str(item.target))
        pictures = RowPictures(column=list(row["images"]))
        try:
            texts = conversation(
                row["messages"],
                self.encoder.chat,
                None,
                self.encoder.stops,
                pictures=pictures,
                placeholders=self.reader.placeholders,
            )
        except RowFault as fault:
            raise WorkloadError(str(fault)) from fault
        if pictures.column:
            raise WorkloadError(f"{len(pictures.column)} pictures of the row have no place in its messages")
        if len(texts) > 1:
            raise WorkloadError(
                "the chat template writes earlier answers otherwise once others follow",
                next="give each answer a row of its own, with the conversation before it",
            )
        prepared = [self._read(source) for source in pictures.sources]
        [document] = self.encoder.encode([expanded(texts[0], self.reader.placeholder, prepared)])
        if len(document.ids) > self.data.context:
            raise WorkloadError(
                "the conversation is too long",
                found=f"{len(document.ids)} tokens",
                allowed=f"data.context = {self.data.context}",
            )
        places = int(np.isin(document.ids, self.reader.tokens).sum())
        if places != sum(one.picture.tokens for one in prepared):
            raise WorkloadError("a message holds a word that stands for a picture", found=f"{places} places")
        return ShownChat(
            ids=document.ids, trained=document.trained, pictures=[one.picture for one in prepared]
        )

    def _read(self, source: str) -> Prepared:
        if DATA.match(source):
            import base64

            try:
                return self.reader.read(base64.b64decode(source.partition(",")[2], validate=True))
            except ValueError as error:
                raise PictureError("a picture of the row does not hold base64") from error
        return self.reader.read(Path(source))

    def collate(self, samples: Sequence[ShownChat | None]) -> MediaBatch:
        """Rows padded on the right; each label is the token that follows."""
        longest = max(2, *(len(sample.ids) for sample in samples if sample)) if any(samples) else 2
        ids_BT = torch.zeros(len(samples), longest, dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        labels_BT = torch.full_like(ids_BT, IGNORE)
        for row, sample in enumerate(samples):
            count = len(sample.ids) if sample else 1
            mask_BT[row, :count] = 1
            if sample is not None:
                ids_BT[row, :count] = torch.from_numpy(sample.ids)
                wanted = torch.from_numpy(np.where(sample.trained, sample.ids, IGNORE))
                labels_BT[row, : count - 1] = wanted[1:]
        return MediaBatch(
            inputs={
                "input_ids": ids_BT,
                "attention_mask": mask_BT,
                "pictures": [sample.pictures if sample else [] for sample in samples],
            },
            labels=labels_BT,
        )


def expanded(text: Marked, placeholder: str, prepared: Sequence[Prepared]) -> Marked:
    """Return a conversation with each picture's text in its place, and its spans moved along.

    Raises `WorkloadError` unless there is a place for each.
    """
    places = [found.start() for found in re.finditer(re.escape(placeholder), text.text)]
    if len(places) != len(prepared):
        raise WorkloadError(
            f"the chat template makes {len(places)} places for {len(prepared)} pictures",
            next=f"write messages without '{placeholder}', and show pictures in a user's messages",
        )
    ends = [place + len(placeholder) for place in places]
    pieces = [text.text[begin:end] for begin, end in zip([0, *ends], [*places, len(text.text)], strict=True)]
    whole = pieces[0] + "".join(one.text + piece for one, piece in zip(prepared, pieces[1:], strict=True))
    growth = [0, *np.cumsum([len(one.text) - len(placeholder) for one in prepared]).tolist()]

    def moved(place: int) -> int:
        return place + growth[sum(end <= place for end in ends)]

    spans: tuple[Span, ...] | None = None
    if text.spans is not None:
        spans = tuple((moved(begin), moved(end)) for begin, end in text.spans)
    return Marked(text=whole, spans=spans, begun=text.begun, ended=text.ended, notes=text.notes)


def list_conversations(run: VisionRun, folder: Path, *, strict: bool | None = None) -> Chats:
    """Raises `DataError` as `list_chats`."""
    data = run.data if strict is None else run.data.model_copy(update={"strict": strict})
    train, held_out = hold_out(list_chats(data.train, data, folder), data.hold_out, data.seed)
    if data.validation:
        held_out = list_chats(data.validation, data, folder)
    return Chats(train=train, validation=held_out)
