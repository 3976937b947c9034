"""Requests that bring a sound, as OpenAI's clients send them: forms, whose fields come as texts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.models.speech.transcript import Options, Timestamps
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Text

Form = Literal["json", "text", "srt", "vtt", "verbose_json"]
PROMPT_CHARACTERS = 10_000
"""A model reads the end of a longer one anyway."""


def _list(value: Any) -> Any:
    """A field that was given once is a list of one."""
    return [value] if isinstance(value, str) else value


Granularities = Annotated[list[Timestamps], Field(max_length=2, fail_fast=True), BeforeValidator(_list)]


class TranslationRequest(Body):
    """A sound that becomes English text."""

    media_type: ClassVar[str] = "multipart/form-data"
    model_config = ConfigDict(strict=False)

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    """The sound file: WAV, FLAC, OGG, MP3, or a container that PyAV reads."""
    model: Text | None = None
    """The served model's name; the served one where it is left out. Another name is a 404."""
    prompt: Annotated[str, Field(max_length=PROMPT_CHARACTERS)] = ""
    """Text as if it had been said before: names and spellings to be expected."""
    response_format: Form = "json"
    """srt and vtt are subtitles; verbose_json has times."""
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Temperature of the first attempt at a window; an improbable one is decoded again at higher temperatures."""
    timestamp_granularities: Granularities = Field(default=["segment"])
    """Timestamps in verbose_json. Words take longer."""
    stream: bool = False
    """Send json or text as server-sent events, as it is found."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.response_format != "verbose_json" and "timestamp_granularities" in self.model_fields_set:
            raise PydanticCustomError("form", "timestamp_granularities are for response_format verbose_json")
        if self.stream and self.response_format not in ("json", "text"):
            raise PydanticCustomError("form", "{form} is not streamed", {"form": self.response_format})
        return self

    def options(self) -> Options:
        """Return the options for the model."""
        return self._options(translate=True)

    def _options(self, **more: Any) -> Options:
        words = "word" in self.timestamp_granularities
        return Options(
            timestamps="word" if words else "segment",
            prompt=self.prompt,
            temperature=self.temperature,
            **more,
        )


class TranscriptionRequest(TranslationRequest):
    """A sound that becomes text in the language that is spoken."""

    language: str | None = None
    """A code or a name, such as en or English; the model's own guess where it is left out."""

    def options(self) -> Options:
        return self._options(language=self.language)
