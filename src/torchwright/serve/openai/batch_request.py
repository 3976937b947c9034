"""Requests that leave files and batches with the server, as OpenAI's client sends them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Text

HOUR_S = 3600
LONGEST_WINDOW_HOURS = 168
"""A week: a batch that needs longer is better given to `torchwright map`."""
LONGEST_KEPT_SECONDS = 30 * 24 * HOUR_S
"""OpenAI's own limit, and `Limits.stored_seconds`."""
PAIRS, KEY_CHARACTERS, VALUE_CHARACTERS = 16, 64, 512
"""Bounds of `metadata`, which are OpenAI's."""


class ExpiresAfter(Body):
    """Time for which a file is kept."""

    anchor: Literal["created_at"]
    """created_at: from when the file is there."""
    seconds: Annotated[int, Field(ge=HOUR_S, le=LONGEST_KEPT_SECONDS)]
    """An hour to 30 days."""


class FormExpiresAfter(ExpiresAfter):
    """Time for which a file is kept, in a form, whose fields are texts."""

    model_config = ConfigDict(strict=False)


class FileRequest(Body):
    """POST /v1/files"""

    media_type: ClassVar[str] = "multipart/form-data"
    model_config = ConfigDict(strict=False)

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    """Requests, a line of JSON each."""
    purpose: Literal["batch"]
    """batch."""
    expires_after: FormExpiresAfter | None = None
    """Time for which the file is kept, as the fields expires_after[anchor] and expires_after[seconds]; else 30 days."""


class BatchRequest(Body):
    """POST /v1/batches"""

    input_file_id: Text
    """The id of an uploaded file of requests."""
    endpoint: Text
    """The path that answers all of them, such as /v1/chat/completions."""
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}h$")]
    """Time after which what is left expires: 24h, or another number of hours up to 168h."""
    metadata: dict[str, Any] | None = None
    """At most 16 texts by name, which the batch repeats."""
    output_expires_after: ExpiresAfter | None = None
    """Time for which the files of results are kept: an anchor and seconds; 30 days where it is left out."""

    @property
    def window_s(self) -> float:
        return HOUR_S * int(self.completion_window.removesuffix("h"))

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.window_s > HOUR_S * LONGEST_WINDOW_HOURS:
            raise PydanticCustomError(
                "window", "completion_window is 1h to {most}h, such as 24h", {"most": LONGEST_WINDOW_HOURS}
            )
        pairs = self.metadata or {}
        fits = all(
            len(key) <= KEY_CHARACTERS and isinstance(value, str) and len(value) <= VALUE_CHARACTERS
            for key, value in pairs.items()
        )
        if len(pairs) > PAIRS or not fits:
            raise PydanticCustomError(
                "metadata",
                "metadata has at most {pairs} texts of {value} characters, with names of {key}",
                {"pairs": PAIRS, "value": VALUE_CHARACTERS, "key": KEY_CHARACTERS},
            )
        return self
