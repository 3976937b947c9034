"""Image requests in the format of OpenAI's API."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.models.diffusion.limits import LONGEST_PROMPT, MOST_GUIDANCE, MOST_SEED, MOST_STEPS
from torchwright.serve.limits import PICTURE_PIXELS, PICTURES
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Text

SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def _sized(text: str) -> str:
    if text == "auto":
        return text
    found = SIZE.fullmatch(text)
    if found is None:
        raise PydanticCustomError("size", "write 512x512, the width first, or auto")
    if int(found[1]) * int(found[2]) > PICTURE_PIXELS:
        raise PydanticCustomError(
            "size", "at most {pixels} pixels together", {"pixels": f"{PICTURE_PIXELS:,}"}
        )
    return text


class ImageRequest(Body):
    """POST /v1/images/generations"""

    refused: ClassVar[dict[str, str]] = {
        "background": "the model paints one",
        "input_fidelity": "no picture is taken",
        "moderation": "nobody looks at the pictures",
        "partial_images": "pictures come whole",
        "quality": "give steps",
        "stream": "pictures come whole",
        "style": "say it in the prompt",
    }

    prompt: Annotated[str, Field(min_length=1, max_length=LONGEST_PROMPT)]
    """Description of the picture."""
    model: Text | None = None
    """The served model's name."""
    n: Annotated[int, Field(ge=1, le=PICTURES)] = 1
    """Pictures; each has a seed of its own: the seed and the numbers that follow it."""
    size: Annotated[str, AfterValidator(_sized)] = "auto"
    """Width and height in pixels, such as 512x512; auto is the size that the model was trained for."""
    response_format: Literal["b64_json", "url"] = "b64_json"
    """Only b64_json: pictures are not stored, so they have no URL."""
    output_format: Literal["png", "jpeg", "webp"] = "png"
    """The form of the files."""
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """The quality of jpeg and webp, from 0 to 100; Pillow's own where it is left out."""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED - PICTURES)] | None = None
    """Equal seeds give equal pictures; one is drawn where it is left out (not OpenAI's)."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Steps of the denoiser. The default is the number that the model was trained for (not OpenAI's)."""
    guidance: Annotated[float, Field(ge=0, le=MOST_GUIDANCE)] | None = None
    """Strength of classifier-free guidance; 0 and 1 turn it off (not OpenAI's)."""
    negative_prompt: Annotated[str, Field(max_length=LONGEST_PROMPT)] | None = None
    """A prompt that the picture is guided away from (not OpenAI's)."""
    scheduler: Text | None = None
    """A scheduler in place of the model's own, such as euler or dpm++_2m (not OpenAI's)."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Named in the request's line of the log."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.response_format == "url":
            raise PydanticCustomError("form", "nothing is stored here, so that there is no url; use b64_json")
        if self.output_compression is not None and self.output_format == "png":
            raise PydanticCustomError("form", "output_compression is for output_format jpeg or webp")
        return self

    @property
    def height_width(self) -> tuple[int, int] | None:
        """(height, width), or None for the model's own."""
        found = SIZE.fullmatch(self.size)
        return None if found is None else (int(found[2]), int(found[1]))
