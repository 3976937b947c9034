"""Request limits: every check that is possible before any work is done for a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.text.codec import Tokenizer
from torchwright.serve.wire.messages import EngineReady


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits for a request: the served model's names, its context and its vocabulary."""

    models: tuple[str, ...]
    context: int
    vocabulary: int
    answer: int | None = None
    """The most tokens of an answer that does not share the context with the prompt."""
    chunk: int = 1
    """Prompts take room in whole chunks of so many tokens."""
    pictures: bool = False
    """True if messages may have pictures."""


def request_limits_of(ready: EngineReady, *models: str) -> RequestLimits:
    context = min(ready.context, ready.pages * ready.page_tokens)
    return RequestLimits(models, context, ready.vocabulary, ready.answer, ready.chunk, ready.pictures)


def check_model(asked: str | None, served: Sequence[str]) -> None:
    """Raise `ApiError` (404), with the names that are served, for a model that is not the served one."""
    if asked is not None and asked not in served:
        names = ", ".join(f"'{name}'" for name in served)
        text = f"there is no model '{asked}'; {names} {'is' if len(served) == 1 else 'are'} served"
        raise ApiError(404, text, param="model", code="model_not_found")


def check_text(text: str, tokenizer: Tokenizer, limits: RequestLimits | None, most: int, param: str) -> None:
    """Raise `ApiError` (400) for a text whose length alone says that it cannot fit, before it is tokenized."""
    longest = tokenizer.longest
    if limits is not None and longest is not None and len(text) > longest * limits.context:
        raise invalid(
            f"the model's context is {limits.context} tokens here; '{param}' has {len(text)} characters, which are "
            f"at least {-(-len(text) // longest)} tokens",
            param,
            "context_length_exceeded",
        )
    if len(text) > most:
        raise invalid(f"'{param}' has {len(text)} characters; at most {most} are tokenized", param)


def check_ids(ids: Sequence[int], limits: RequestLimits, param: str) -> None:
    """Raise `ApiError` (400) for token ids that the model does not have."""
    ends = (min(ids, default=0), max(ids, default=0))
    wrong = next((token for token in ends if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        raise invalid(
            f"'{param}': token id {wrong} is out of range; the model has 0 to {limits.vocabulary - 1}", param
        )
