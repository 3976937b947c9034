"""Requests to encoders and classifiers: classify texts, score pairs, rank documents for a query."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import MESSAGES, PROMPTS, READ_CHARACTERS, SCORED_TOKENS
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Message, Text
from torchwright.serve.openai.sampling_fields import TokenId, TokenIds

Read = Annotated[str, Field(min_length=1, max_length=READ_CHARACTERS)]
Texts = Read | Annotated[list[Read], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]


class Asked(Body):
    """The fields that these requests share."""

    model: Text | None = None
    """The served model's name."""
    use_activation: bool = True
    """Probabilities, or scores as the model's folder makes them of its logits; false gives the logits (vLLM's name)."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Named in the request's line of the log."""


class ClassifyRequest(Asked):
    """POST /v1/classify"""

    input: Texts | None = None
    """A text or a list of texts, or `messages` or `text` instead."""
    text: Texts | None = None
    """SGLang's name of `input`: each text's logits are answered, in SGLang's form."""
    pairs: Texts | None = None
    """With `input`: a second text for each, which the model reads with the first."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)] | None = None
    """A conversation, through the chat template: what a reward model judges."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """With `messages`: more variables for the chat template."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(given is not None for given in (self.input, self.text, self.messages)) != 1:
            raise PydanticCustomError("one_of", "give input or messages")
        if self.pairs is not None and (self.input is None or len(self.seconds or ()) != len(self.texts)):
            raise PydanticCustomError("pairs", "give one of pairs for each text of input")
        return self

    @property
    def texts(self) -> list[str]:
        return _many(self.input or self.text or [])

    @property
    def seconds(self) -> list[str] | None:
        return None if self.pairs is None else _many(self.pairs)


class PoolingRequest(Asked):
    """POST /pooling"""

    input: Texts
    """A text or a list of texts."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or little-endian float32 in base64."""

    @property
    def texts(self) -> list[str]:
        return _many(self.input)


class ScoreRequest(Asked):
    """POST /v1/score"""

    query: Read | TokenIds | None = None
    """For a language model: what comes before each of `items` (SGLang's form)."""
    items: (
        Texts | Annotated[list[TokenIds], Field(min_length=1, max_length=PROMPTS, fail_fast=True)] | None
    ) = None
    """With `query`: texts or token ids that are judged."""
    label_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=SCORED_TOKENS, fail_fast=True)] | None
    ) = None
    """With `query`: the tokens whose probabilities right after each item are its scores."""
    apply_softmax: bool = False
    """With `query`: the scores of an item add up to one."""
    item_first: bool = False
    """With `query`: the item comes before the query."""
    text_1: Texts | None = None
    """A text, or a list as long as the other's."""
    text_2: Texts | None = None
    """A text or a list of texts."""
    queries: Texts | None = None
    """The newer name of text_1."""
    documents: Texts | None = None
    """The newer name of text_2."""

    @model_validator(mode="after")
    def _two(self) -> Self:
        old, new = (self.text_1, self.text_2), (self.queries, self.documents)
        judged = (self.query, self.items, self.label_token_ids)
        if any(given is not None for given in judged):
            if None in judged or any(old) or any(new):
                raise PydanticCustomError(
                    "three_of", "give query, items and label_token_ids, and no other texts"
                )
            return self
        if (None in old) == (None in new) or any(old) == any(new):
            raise PydanticCustomError("two_of", "give text_1 and text_2, or queries and documents")
        first, second = self.pairs
        if len(first) != len(second):
            raise PydanticCustomError(
                "pairs",
                "there are {first} first texts and {second} second ones; give one first text or one for each",
                {"first": len(first), "second": len(second)},
            )
        return self

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """First and second texts, one of each for every score."""
        first = _many(self.text_1 or self.queries or [])
        second = _many(self.text_2 or self.documents or [])
        return (first * len(second) if len(first) == 1 else first), second


class Document(Body):
    text: Read


class RerankRequest(Asked):
    """POST /v1/rerank"""

    query: Read
    """The query that ranks the documents."""
    documents: Annotated[list[Read | Document], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
    """Texts, or objects with a `text`."""
    top_n: int = Field(0, ge=0)
    """So many of the best; 0 is all."""
    return_documents: bool = True
    """Give the documents' texts too."""

    @property
    def texts(self) -> list[str]:
        return [item if isinstance(item, str) else item.text for item in self.documents]


def _many(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
