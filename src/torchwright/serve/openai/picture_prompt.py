"""A conversation's prompt with its pictures: each is read, and its tokens come where the chat template puts it."""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.reader import PictureReader, Prepared, joined
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import INPUT_PICTURE_BYTES, INPUT_PICTURES, PREPARED_BYTES
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parts import ImageUrl, Message

DATA, BASE64 = "data:", ";base64"
REMOTE = ("http://", "https://")
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
) -> Prompts:
    """Return the prompt of a conversation, which the request's field `param` brings.

    Raises `ApiError` (400) as `prompt_text` does, for pictures that cannot be used, and where the template has not
    one place for each. Raises `PicturesWanted` for URLs that are not in `language.fetched`.
    """
    template, reader = language.template, language.pictures
    images = [image for message in messages for image in message.images]
    if reader is None:
        without_pictures(messages, param)
        text = prompt_text(
            template, messages, asked, add_generation_prompt=add_generation_prompt, extra=extra
        )
        return Prompts([text], param, special=template.plain)
    _check_urls(images, language.fetched, param)
    # Only the template makes places for pictures: the same words of a client are replaced meanwhile.
    written = {word: secrets.token_hex(16) for word in reader.words}
    text = prompt_text(
        template,
        messages,
        asked,
        add_generation_prompt=add_generation_prompt,
        extra=extra,
        picture=reader.placeholder,
        written=written,
    )
    pieces = text.split(reader.placeholder)
    if len(pieces) - 1 != len(images):
        raise invalid(
            f"the model's chat template makes {len(pieces) - 1} places for {len(images)} pictures: send them in "
            "messages of the role user",
            param,
            "chat_template",
        )
    prepared = _prepared(reader, images, language.fetched, param)
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
    if any(message.images for message in messages):
        text = "the served model takes text alone: send messages without pictures"
        raise invalid(text, param, "invalid_image")


def check_places(ids: Sequence[int], pictures: Sequence[Any], token: int, param: str) -> None:
    """Raise `ApiError` (400) for a prompt with other places for pictures than its own pictures take."""
    places, tokens = ids.count(token), sum(picture.tokens for picture in pictures)
    if places != tokens:
        raise invalid(
            f"'{param}' has {places} places for pictures, whose token is {token}, and pictures for {tokens}: "
            "send pictures as parts of messages",
            param,
        )


def _check_urls(images: Sequence[ImageUrl], fetched: Mapping[str, bytes], param: str) -> None:
    """Check what can be checked before any picture is read."""
    if len(images) > INPUT_PICTURES:
        raise invalid(f"there are {len(images)} pictures; at most {INPUT_PICTURES} are read", param)
    for number, image in enumerate(images, 1):
        head, comma, data = image.url.partition(",")
        if _is_remote(image.url):
            continue
        if not head[: len(DATA)].lower() == DATA or not comma or not head.lower().endswith(BASE64):
            raise _refused(
                number,
                f"the URL begins with '{image.url[:SHOWN]}', and data:image/png;base64,… or http(s) is taken",
                param,
            )
        if len(data) > INPUT_PICTURE_BYTES * 4 // 3 + 4:
            raise _refused(number, f"it has more than {INPUT_PICTURE_BYTES} bytes, which is the most", param)
    wanted = list(dict.fromkeys(image.url for image in images if _is_remote(image.url)))
    if any(url not in fetched for url in wanted):
        raise PicturesWanted(wanted)


def _prepared(
    reader: PictureReader, images: Sequence[ImageUrl], fetched: Mapping[str, bytes], param: str
) -> list[Prepared]:
    found, size = list[Prepared](), 0
    for number, image in enumerate(images, 1):
        try:
            content = fetched[image.url] if _is_remote(image.url) else _decoded(image.url)
            found.append(reader.read(content, longest=LONGEST.get(image.detail, USUALLY_LONGEST)))
        except PictureError as error:
            raise _refused(number, str(error), param) from error
        size += found[-1].picture.bytes
        if size > PREPARED_BYTES:
            raise _refused(
                number,
                f"with it the model would read {size} bytes of pictures, and at most {PREPARED_BYTES} are taken: "
                'send fewer or smaller ones, or with "detail": "low"',
                param,
            )
    return found


def _decoded(url: str) -> bytes:
    data = "".join(
        url.partition(",")[2].split()
    )  # some clients break it into lines, and leave the padding out
    try:
        return binascii.a2b_base64((data + "=" * (-len(data) % 4)).encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise PictureError("the data URL does not hold base64", found=str(error)) from error


def _is_remote(url: str) -> bool:
    return url[: len(REMOTE[1])].lower().startswith(REMOTE)


def _refused(number: int, reason: str, param: str) -> ApiError:
    return invalid(f"picture {number} cannot be used: {reason}", param, "invalid_image")
