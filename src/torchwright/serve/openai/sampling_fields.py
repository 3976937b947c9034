"""Fields that generating requests of every format share: a prompt for the served model, and sampling options."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import LOGIT_BIASES, STOP_CHARACTERS, STOPS, TOKENS
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Text

Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=TOKENS, fail_fast=True)]
Key = Annotated[int, Field(strict=False)]
"""A token id as JSON writes names: in a text."""
Bias = Annotated[float, Field(ge=-100, le=100)]


def _few(value: Any) -> Any:
    """Too many are refused before each is looked at."""
    if isinstance(value, dict) and len(value) > LOGIT_BIASES:
        raise PydanticCustomError("too_long", "more than {most} tokens have a bias", {"most": LOGIT_BIASES})
    return value


class Prompted(Body):
    """A request that generates from a prompt."""

    model: Text | None = None
    """The served model's name; the served one where it is left out. Another name is a 404."""

    EMPTY: ClassVar[dict[str, Any]]
    """The prompt's fields of a request whose prompts have been read."""

    def read(self, language: Language) -> Prompts:
        """Return the prompt to continue; raises `ApiError` (400) if the chat template refuses it."""
        raise NotImplementedError

    def bare(self) -> bytes:
        """The request as JSON, without its prompts."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=set(self.EMPTY))
        return msgspec.json.encode({**plain, **self.EMPTY})


class Sampled(Body):
    """Options by which the tokens of an answer are chosen, and those that end it."""

    temperature: float = Field(1.0, ge=0, le=100)
    """Logits are divided by it; 0 takes the most likely token."""
    top_p: float = Field(1.0, ge=0, le=1)
    """Draw among the fewest tokens that together reach this probability; 0 takes the most likely one."""
    top_k: int = Field(0, ge=-1, le=2**31)
    """Draw among the k most likely tokens; 0 or -1 is all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw no token less likely than this share of the most likely one."""
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """Logits of tokens in the prompt or the answer are divided by it, or multiplied where they are negative."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken from the logit of every token in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken from a token's logit for each time it is in the answer."""
    logit_bias: Annotated[dict[Key, Bias], BeforeValidator(_few)] = Field({}, max_length=LOGIT_BIASES)
    """Token id → what is added to its logit."""
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True)] | None = None
    """Texts that end an answer, not included in it."""
    stop_token_ids: list[TokenId] = Field([], max_length=STOPS, fail_fast=True)
    """Tokens that end an answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-text tokens."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
