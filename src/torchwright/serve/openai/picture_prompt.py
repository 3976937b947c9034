"""A conversation's prompt with its pictures and videos: each is read, and its tokens come where the chat template puts
it."""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.reader import PictureReader, Prepared, joined, placed, split
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import (
    INPUT_PICTURE_BYTES,
    INPUT_PICTURES,
    INPUT_VIDEO_BYTES,
    INPUT_VIDEOS,
    PREPARED_BYTES,
)
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parts import ImageUrl, Message, VideoUrl

DATA, BASE64 = "data:", ";base64"
REMOTE = ("http://", "https://")
FRAMES = "data:video/jpeg;"
"""Beginning of a data URL that holds a video's frames, in base64 with commas between them, as vLLM takes them."""
LONGEST: dict[str | None, int | None] = {"low": 512, "original": None}
"""`detail` → pixels of a picture's sides at most, before the model's own processor scales it."""
USUALLY_LONGEST = 2048
"""Those of other pictures, as OpenAI has it: an encoder's attention over a whole photo takes minutes on a CPU."""
SHOWN = 40
"""Characters of a URL in an error."""


class PicturesWanted(Exception):
    """A request that can be read only with the contents of these URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(f"{len(urls)} URLs")
        self.urls = urls


def prompt_of(
    language: Language,
    messages: Sequence[Message],
    asked: Tools,
    param: str,
    *,
    add_generation_prompt: bool = True,
    extra: dict[str, Any] | None = None,
    prepared_bytes: int = PREPARED_BYTES,
) -> Prompts:
    """Return the prompt of a conversation, which the request's field `param` brings.

    Raises `ApiError` (400) as `prompt_text` does, for pictures that cannot be used, and where the template has not
    one place for each. The same for pictures that take more than `prepared_bytes` once they are prepared. Raises
    `PicturesWanted` for URLs that are not in `language.fetched`.
    """
    template, reader = language.template, language.pictures
    media = [medium for message in messages for medium in message.media]
    if reader is None:
        without_pictures(messages, param)
        text = prompt_text(
            template, messages, asked, add_generation_prompt=add_generation_prompt, extra=extra
        )
        return Prompts([text], param, special=template.plain)
    _check_urls(media, language.fetched, param)
    _check_videos(reader, media, param)
    # Only the template makes places for pictures: the same words of a client are replaced meanwhile.
    written = {word: secrets.token_hex(16) for word in reader.words}
    text = prompt_text(
        template,
        messages,
        asked,
        add_generation_prompt=add_generation_prompt,
        extra=extra,
        placeholders=reader.placeholders,
        written=written,
    )
    pieces, kinds = split(text, reader.placeholders)
    ordered = placed(kinds, [(_kind(medium), medium) for medium in media])
    if ordered is None:
        raise invalid(
            f"the model's chat template makes {len(kinds)} places for {len(media)} pictures: send them in messages of "
            "the role user",
            param,
            "chat_template",
        )
    prepared = _prepared(reader, ordered, language.fetched, param, prepared_bytes)
    whole = joined(pieces, prepared)
    return Prompts(
        [whole],
        param,
        special=template.plain,
        pictures=[found.picture for found in prepared],
        literal={mark: word for word, mark in written.items() if mark in whole},
    )


def without_pictures(messages: Sequence[Message], param: str) -> None:
    """Raise `ApiError` (400) for messages with pictures, to a model that takes none."""
    if any(message.media for message in messages):
        text = "the served model takes text alone: send messages without pictures and videos"
        raise invalid(text, param, "invalid_image")


def check_places(ids: Sequence[int], pictures: Sequence[Any], tokens: Sequence[int], param: str) -> None:
    """Raise `ApiError` (400) for a prompt with other places for pictures than its own pictures take."""
    places, filled = sum(map(ids.count, tokens)), sum(picture.tokens for picture in pictures)
    if places != filled:
        named = " or ".join(map(str, tokens))
        raise invalid(
            f"'{param}' has {places} places for pictures, whose token is {named}, and pictures for {filled}: "
            "send pictures as parts of messages",
            param,
        )


def _kind(medium: ImageUrl | VideoUrl) -> str:
    return "video" if isinstance(medium, VideoUrl) else "image"


def _check_videos(reader: PictureReader, media: Sequence[ImageUrl | VideoUrl], param: str) -> None:
    """Raise `ApiError` (400) for videos to a model that takes none, or where they cannot be prepared."""
    videos = sum(isinstance(medium, VideoUrl) for medium in media)
    if videos > INPUT_VIDEOS:
        raise invalid(f"there are {videos} videos; at most {INPUT_VIDEOS} are read", param)
    if videos and (fault := reader.video_fault):
        raise invalid(f"the server takes no videos for this model: {fault}", param, "invalid_video")


def _check_urls(media: Sequence[ImageUrl | VideoUrl], fetched: Mapping[str, bytes], param: str) -> None:
    """Check what can be checked before any picture is read."""
    if len(media) > INPUT_PICTURES:
        raise invalid(f"there are {len(media)} pictures; at most {INPUT_PICTURES} are read", param)
    for number, medium in enumerate(media, 1):
        url, kind = medium.url, _kind(medium)
        head, comma, data = url.partition(",")
        if _is_remote(url):
            continue
        if head[: len(DATA)].lower() != DATA or not comma or not head.lower().endswith(BASE64):
            example = "video/mp4" if kind == "video" else "image/png"
            raise _refused(
                number,
                f"the URL begins with '{url[:SHOWN]}', and data:{example};base64,… or http(s) is taken",
                param,
                kind,
            )
        most = INPUT_VIDEO_BYTES if kind == "video" else INPUT_PICTURE_BYTES
        if len(data) > most * 4 // 3 + 4:
            raise _refused(number, f"it has more than {most} bytes, which is the most", param, kind)
    wanted = list(dict.fromkeys(medium.url for medium in media if _is_remote(medium.url)))
    if any(url not in fetched for url in wanted):
        raise PicturesWanted(wanted)


def _prepared(
    reader: PictureReader,
    media: Sequence[ImageUrl | VideoUrl],
    fetched: Mapping[str, bytes],
    param: str,
    most: int,
) -> list[Prepared]:
    found, size = list[Prepared](), 0
    for number, medium in enumerate(media, 1):
        try:
            found.append(_read(reader, medium, fetched))
        except PictureError as error:
            raise _refused(number, str(error), param, _kind(medium)) from error
        size += found[-1].picture.bytes
        if size > most:
            raise _refused(
                number,
                f"with it the model would read {size} bytes of pictures, and at most {most} are taken: "
                'send fewer or smaller ones, or with "detail": "low"',
                param,
                _kind(medium),
            )
    return found


def _read(reader: PictureReader, medium: ImageUrl | VideoUrl, fetched: Mapping[str, bytes]) -> Prepared:
    """Prepare one picture or video; raises `PictureError`."""
    if isinstance(medium, VideoUrl) and medium.url[: len(FRAMES)].lower() == FRAMES:
        return reader.read_frames([_decoded(data) for data in medium.url.split(",")[1:]])
    url = medium.url
    content = fetched[url] if _is_remote(url) else _decoded(url.partition(",")[2])
    if isinstance(medium, VideoUrl):
        return reader.read_video(content)
    return reader.read(content, longest=LONGEST.get(medium.detail, USUALLY_LONGEST))


def _decoded(data: str) -> bytes:
    data = "".join(data.split())  # some clients break it into lines, and leave the padding out
    try:
        return binascii.a2b_base64((data + "=" * (-len(data) % 4)).encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise PictureError("the data URL does not hold base64", found=str(error)) from error


def _is_remote(url: str) -> bool:
    return url[: len(REMOTE[1])].lower().startswith(REMOTE)


def _refused(number: int, reason: str, param: str, kind: str) -> ApiError:
    """The error of one picture or video; they are numbered together."""
    noun = "video" if kind == "video" else "picture"
    return invalid(f"{noun} {number} cannot be used: {reason}", param, f"invalid_{kind}")
