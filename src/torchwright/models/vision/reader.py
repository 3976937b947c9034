"""Pictures as a model's own processor prepares them: transformers' class for its `model_type`, from the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchwright.core.errors import ModelError, first_line
from torchwright.core.quiet import quiet_import
from torchwright.hub.folder import read_config
from torchwright.hub.language_part import HOSTS
from torchwright.models.vision.picture import PictureError, read_picture
from torchwright.models.vision.record import Picture, picture_of

TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
"""Results of a processor that describe the text."""
VIDEOS = "video_processor"
PLACES = ("image_token_id", "image_token_index")
"""Fields of config.json that name the token in whose places embeddings of pictures go."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a folder that say how its model's pictures are prepared."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A picture, and the text that stands for it in a prompt."""

    text: str
    """It replaces the placeholder that the chat template writes."""
    picture: Picture


def joined(pieces: Sequence[str], prepared: Sequence[Prepared]) -> str:
    """Return a prompt from the pieces around its placeholders, with each picture's text between two of them."""
    return pieces[0] + "".join(found.text + piece for found, piece in zip(prepared, pieces[1:], strict=True))


class PictureReader:
    """Reads pictures for one model.

    reader = PictureReader(folder)
    prepared = reader.read(content)     bytes of a file, or what else `read_picture` takes
    text = text.replace(reader.placeholder, prepared.text, 1)

    Raises `ModelError` for a folder without a processor of pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> None:
        """Import transformers and load the processor now, rather than for the first picture; raise `ModelError`."""
        _ = self.words

    @property
    def placeholder(self) -> str:
        """The text by which a chat template says where a picture is."""
        return str(self._processor.image_token)

    @cached_property
    def token(self) -> int:
        """The id of the token in whose places the embeddings go."""
        return picture_token(self.folder)

    @property
    def words(self) -> frozenset[str]:
        """The texts that stand for a picture, or for a part of one, wherever a prompt has them."""
        return frozenset({self.placeholder, self._processor.tokenizer.convert_ids_to_tokens(self.token)})

    def read(self, source: Any, *, longest: int | None = None) -> Prepared:
        """Prepare one picture, scaled down first where a side has more than `longest` pixels.

        Raises `PictureError` for a picture that cannot be used.
        """
        from PIL import Image

        image = Image.fromarray(read_picture(source))
        if longest is not None:
            image.thumbnail((longest, longest))
        processor = self._processor
        try:
            found = processor(
                text=processor.image_token,
                images=[image],
                return_tensors="np",
                return_text_replacement_offsets=True,
            )
        except (ValueError, ZeroDivisionError) as error:  # such as sides of 1 to 300
            raise PictureError(
                "the model's processor cannot take the picture", found=str(error)[:300]
            ) from error
        tokens = int(np.count_nonzero(np.asarray(found["input_ids"]) == self.token))
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in TEXT}
        [[place]] = found["text_replacement_offsets"]
        return Prepared(text=place["replacement"], picture=picture_of(arrays, tokens))

    @cached_property
    def _processor(self) -> Any:
        try:
            with quiet_import():
                return still(_processor_class(self.folder)).from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False
                )
        except ModelError:
            raise
        except Exception as error:  # a package that is missing, or files that are damaged
            raise ModelError(
                f"transformers cannot read pictures for {self.folder}", found=first_line(error)
            ) from error


def takes_pictures(folder: Path) -> bool:
    """Check whether a folder's model takes pictures in its prompts; the answer needs no import of transformers."""
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in PROCESSORS):
        return False
    config = read_config(folder)
    return config.get("model_type") in HOSTS and any(isinstance(config.get(name), int) for name in PLACES)


def picture_token(folder: Path) -> int:
    """The id of the token in whose places embeddings of pictures go. Raises `ModelError` where config.json has none."""
    config = read_config(folder)
    found = next((config[name] for name in PLACES if isinstance(config.get(name), int)), None)
    if found is None:
        raise ModelError(f"{folder / 'config.json'} names no token for pictures", allowed=" or ".join(PLACES))
    return found


def _processor_class(folder: Path) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    names: Any = processing_auto
    kind = read_config(folder).get("model_type")
    name = names.PROCESSOR_MAPPING_NAMES.get(kind)
    if name is None:
        raise ModelError(f"transformers has no processor of pictures for model_type '{kind}'")
    return getattr(transformers, name)


def still(base: Any) -> Any:
    """A processor class without its processor of videos, which needs torchvision."""

    class Still(base):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in base.get_attributes() if name != VIDEOS]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **options: Any) -> list[Any]:
            parts = iter(super()._get_arguments_from_pretrained(*args, **options))
            return [None if name == VIDEOS else next(parts) for name in base.get_attributes()]

    Still.__name__ = base.__name__  # by which folders' files are recognized
    return Still
