"""Pictures and videos as a model's own processor prepares them: transformers' class for its `model_type`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchwright.core.errors import ModelError, first_line
from torchwright.core.quiet import quiet_import
from torchwright.hub.architectures import shows_on_transformers
from torchwright.hub.folder import read_config
from torchwright.hub.language_part import HOSTS
from torchwright.models.vision.picture import PictureError, read_picture
from torchwright.models.vision.record import Picture, picture_of
from torchwright.models.vision.video import Video, VideoFacts, read_video, video_of_frames

OFFSETS = "text_replacement_offsets"
TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", OFFSETS)
"""Results of a processor that describe the text."""
VIDEOS = "video_processor"
PLACES = ("image_token_id", "image_token_index")
"""Fields of config.json that name the token in whose places embeddings of pictures go."""
VIDEO_PLACE = "video_token_id"
VIDEO_HOSTS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""`model_type` of models whose videos are read."""
RATE = 2.0
"""Frames a second that are sampled where the folder names no number, as Qwen's own tools do."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a folder that say how its model's pictures are prepared."""


Medium = TypeVar("Medium")


UNSEEN = ("gemma4",)
"""Hosts whose text runs on our layers and whose pictures do not: layers have inputs of their own in their places."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A picture or video, and the text that stands for it in a prompt."""

    text: str
    """It replaces the placeholder that the chat template writes."""
    picture: Picture


def split(text: str, placeholders: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the pieces of a text between its placeholders, and the kind of each of these."""
    kinds = {placeholder: kind for kind, placeholder in placeholders.items()}
    found = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    return found[::2], [kinds[placeholder] for placeholder in found[1::2]]


def placed(kinds: Sequence[str], media: Sequence[tuple[str, Medium]]) -> list[Medium] | None:
    """Return media, each with its kind, in the order of the places of that kind; None where there are others."""
    if sorted(kinds) != sorted(kind for kind, _ in media):
        return None
    rest = {kind: iter([medium for found, medium in media if found == kind]) for kind in kinds}
    return [next(rest[kind]) for kind in kinds]


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
        """Import transformers and load the processor now, rather than for the first picture; raise `ModelError`.

        Where the processor of videos alone cannot be loaded, `video_fault` says why.
        """
        _ = self.words
        if self.video_fault is None:
            try:
                _ = self._videos
            except ModelError as error:  # older folders have no file for videos
                self.video_fault = str(error)

    @property
    def placeholder(self) -> str:
        """The text by which a chat template says where a picture is."""
        return str(self._processor.image_token)

    @cached_property
    def video_placeholder(self) -> str | None:
        """The same for a video; None for a model that takes none."""
        return str(self._processor.video_token) if len(self.tokens) > 1 else None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the tokens in whose places embeddings go: a picture's, and a video's."""
        return media_tokens(self.folder)

    @property
    def placeholders(self) -> dict[str, str]:
        """The texts by which a chat template says where a picture or a video is, by `image` and `video`."""
        video = self.video_placeholder
        return {"image": self.placeholder} | ({} if video is None else {"video": video})

    @cached_property
    def video_fault(self) -> str | None:
        """The reason why videos cannot be read here; None where they can."""
        if len(self.tokens) == 1:
            return f"it is none of {', '.join(VIDEO_HOSTS)}"
        if find_spec("torchvision") is None:
            return "transformers prepares videos with torchvision, which is not installed"
        return None

    @property
    def words(self) -> frozenset[str]:
        """The texts that stand for a picture or video, or for a part of one, wherever a prompt has them."""
        named = self._processor.tokenizer.convert_ids_to_tokens(list(self.tokens))
        return frozenset({*self.placeholders.values(), *named})

    def read(self, source: Any, *, longest: int | None = None) -> Prepared:
        """Prepare one picture, scaled down first where a side has more than `longest` pixels.

        Raises `PictureError` for a picture that cannot be used.
        """
        from PIL import Image

        image = Image.fromarray(read_picture(source))
        if longest is not None:
            image.thumbnail((longest, longest))
        processor = self._processor
        return self._prepared(processor, "picture", text=processor.image_token, images=[image])

    def whole(self, text: str, source: Any) -> dict[str, np.ndarray]:
        """Return what the processor makes of a text with one picture, all that transformers' model is given."""
        found = self._called(self._processor, "picture", text=text, images=[read_picture(source)])
        return {name: np.asarray(value) for name, value in found.items() if name != OFFSETS}

    def read_video(self, source: bytes | Path) -> Prepared:
        """Prepare one video, sampled as the folder's processor says, or at `RATE`.

        Raises `PictureError` for a video that cannot be used.
        """
        return self._of_video(read_video(source, self._choose))

    def read_frames(self, pictures: Sequence[bytes]) -> Prepared:
        """Prepare a video whose frames are files of pictures, sampled before. Raises `PictureError`."""
        return self._of_video(video_of_frames(pictures, self._video_processor.fps or RATE))

    @property
    def _video_processor(self) -> Any:
        if self.video_fault is not None:
            raise PictureError("the model's videos cannot be read", found=self.video_fault)
        return self._videos.video_processor

    def _choose(self, facts: VideoFacts) -> list[int]:
        """Return the frames that the model's processor samples."""
        processor = self._video_processor
        rate = None if processor.num_frames else processor.fps or RATE
        try:
            found = processor.sample_frames(_metadata(facts), num_frames=processor.num_frames, fps=rate)
        except (ValueError, ZeroDivisionError) as error:
            raise PictureError(
                "the model's processor cannot sample the video", found=str(error)[:300]
            ) from error
        return found.tolist()

    def _of_video(self, video: Video) -> Prepared:
        processor, metadata = self._videos, _metadata(video.facts)
        metadata.frames_indices = video.indices
        return self._prepared(
            processor,
            "video",
            text=processor.video_token,
            videos=[video.frames_NHWC],
            video_metadata=[metadata],
            do_sample_frames=False,
        )

    def _called(self, processor: Any, kind: str, **inputs: Any) -> Any:
        try:
            with quiet_import():
                return processor(**inputs, return_tensors="np", return_text_replacement_offsets=True)
        except (ValueError, ZeroDivisionError) as error:  # such as sides of 1 to 300
            raise PictureError(
                f"the model's processor cannot take the {kind}", found=str(error)[:300]
            ) from error

    def _prepared(self, processor: Any, kind: str, **inputs: Any) -> Prepared:
        found = self._called(processor, kind, **inputs)
        tokens = int(np.count_nonzero(np.isin(np.asarray(found["input_ids"]), self.tokens)))
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in TEXT}
        [[place]] = found[OFFSETS]
        return Prepared(text=place["replacement"], picture=picture_of(arrays, tokens))

    @cached_property
    def _processor(self) -> Any:
        return self._load(still(_processor_class(self.folder)))

    @cached_property
    def _videos(self) -> Any:
        return self._load(_processor_class(self.folder))

    def _load(self, processor: Callable[..., Any]) -> Any:
        try:
            with quiet_import():
                return processor.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except ModelError:
            raise
        except Exception as error:  # a package that is missing, or files that are damaged
            raise ModelError(
                f"transformers cannot read pictures for {self.folder}", found=first_line(error)
            ) from error


def takes_pictures(folder: Path) -> bool:
    """Check whether a folder's model takes pictures in its prompts.

    The answer needs an import of transformers, without torch, only for a model of no native family.
    """
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in PROCESSORS):
        return False
    config = read_config(folder)
    if not any(isinstance(config.get(name), int) for name in PLACES):
        return False
    return config.get("model_type") in HOSTS or shows_on_transformers(config)


def seen_by_transformers(folder: Path) -> bool:
    """Check whether a folder's pictures are seen on transformers' own layers alone, though its text may run on ours."""
    if not takes_pictures(folder):
        return False
    kind = read_config(folder).get("model_type")
    return kind not in HOSTS or kind in UNSEEN


def media_tokens(folder: Path) -> tuple[int, ...]:
    """The ids of the tokens in whose places embeddings of pictures go, and those of videos where the model takes them.

    Raises `ModelError` where config.json has none.
    """
    config = read_config(folder)
    found = next((config[name] for name in PLACES if isinstance(config.get(name), int)), None)
    if found is None:
        raise ModelError(f"{folder / 'config.json'} names no token for pictures", allowed=" or ".join(PLACES))
    video = config.get(VIDEO_PLACE)
    if config.get("model_type") in VIDEO_HOSTS and isinstance(video, int) and video != found:
        return found, video
    return (found,)


def _metadata(facts: VideoFacts) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=facts.frames,
        fps=facts.rate,
        width=facts.width,
        height=facts.height,
        duration=facts.seconds,
    )


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
    from transformers.processing_utils import ProcessorMixin

    class WithoutVideos(ProcessorMixin):
        """Behind `base` in the order of classes: some hand their processor of videos on by name."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop(VIDEOS, None)
            super().__init__(*args, **options)

    class Still(base, WithoutVideos):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in base.get_attributes() if name != VIDEOS]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **options: Any) -> list[Any]:
            parts = iter(super()._get_arguments_from_pretrained(*args, **options))
            return [None if name == VIDEOS else next(parts) for name in base.get_attributes()]

    Still.__name__ = base.__name__  # by which folders' files are recognized
    return Still
