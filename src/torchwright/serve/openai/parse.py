"""From bytes to a checked object: what every request's class has in common, and errors that name the field at fault."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import NESTING

_NO_STORE = "nothing is stored here"
_ONE_SPEAKER = "speakers are not told apart"
_ONE_KIND = "this server takes and gives text"
REFUSED = {
    "audio": _ONE_KIND,
    "modalities": _ONE_KIND,
    "background": _NO_STORE,
    "conversation": _NO_STORE,
    "previous_response_id": f"{_NO_STORE}; send the whole conversation as input",
    "metadata": _NO_STORE,
    "prompt_cache_key": "every prompt is looked up in the prefix cache",
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "best_of": "ask for n and choose",
    "suffix": "the model continues text and fills no gaps",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "speculation is chosen when the server is started",
    "reasoning": "give the template's own switch in chat_template_kwargs of a chat completion",
    "reasoning_effort": "give the template's own switch in chat_template_kwargs",
    "verbosity": "the model has no such switch",
    "service_tier": "there is one tier; use priority",
    "safety_identifier": "use user",
    "web_search_options": "there are no built-in tools",
    "include": "there is nothing to include",
    "max_tool_calls": "there are no built-in tools",
    "truncation": "a prompt that does not fit is refused",
    "dimensions": "embeddings have the model's own size",
    "chunking_strategy": "the model's own windows cut the sound",
    "hotwords": "use prompt",
    "keywords": "use prompt",
    "languages": "use language, or leave it out to have it detected",
    "known_speaker_names": _ONE_SPEAKER,
    "known_speaker_references": _ONE_SPEAKER,
    "guided_json": 'use structured_outputs: {"json": …}',
    "guided_regex": 'use structured_outputs: {"regex": …}',
    "guided_choice": 'use structured_outputs: {"choice": …}',
    "guided_grammar": 'use structured_outputs: {"grammar": …}',
}
"""Names that OpenAI or older servers know and this one does not take → why, or what to use instead."""


class Body(BaseModel):
    """A JSON object whose every field is known and has its own type: no text is taken for a number.

    The first thing that is wrong ends the reading: lists are declared with `fail_fast`, and names are looked at first.
    """

    media_type: ClassVar[str] = "application/json"
    """What it comes as."""
    refused: ClassVar[dict[str, str]] = {}
    """As `REFUSED`, for this request."""
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            names = _names(cls)
            unknown = next((name for name in data if name not in names), None)
            if unknown is not None:
                reason = cls.refused.get(unknown) or REFUSED.get(unknown) or ""
                raise PydanticCustomError("unknown_name", "unknown", {"name": unknown, "reason": reason})
        return data


Known = TypeVar("Known", bound=Body)


def parse(kind: type[Known], body: bytes) -> Known:
    """A request from its JSON; raises `ApiError` (400) that names the first field at fault."""
    try:
        data: Any = msgspec.json.decode(body)
        if not isinstance(data, dict):
            raise invalid("the body is not a JSON object", code="invalid_json")
        _bound_nesting(data)
        return checked(kind, data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None


def checked(kind: type[Known], data: dict[str, Any]) -> Known:
    """A request from its fields; raises `ApiError` (400) that names the first one at fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _fault(error) from None


@cache
def _names(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _bound_nesting(data: Any) -> None:
    """Raise `ApiError` for lists and objects in each other beyond `NESTING`: others read them by recursion."""
    level = [data]
    for _ in range(NESTING):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(
        f"the body has objects or lists in each other more than {NESTING} deep", code="invalid_json"
    )


def _fault(error: ValidationError) -> ApiError:
    first, *others = error.errors(include_url=False, include_input=False)
    # Of a field's alternatives the first says what it is not; one that it is, but for its size, says more.
    near = [e for e in others if e["loc"][:1] == first["loc"][:1] and not e["type"].endswith("_type")]
    first = near[0] if near and first["type"].endswith("_type") else first
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "unknown_name":
        name, reason = (str(first.get("ctx", {}).get(key)) for key in ("name", "reason"))
        where = f"{where}.{name}" if where else name
        message = f"'{where}' is not supported" + (f": {reason}" if reason else "")
        return invalid(message, where, "unsupported_parameter" if reason else "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"'{where}' is missing", where, "missing_parameter")
    return invalid(f"'{where}': {first['msg']}" if where else first["msg"], where or None, "invalid_value")


def _is_branch(part: str | int) -> bool:
    """Whether a step of pydantic's path names an alternative of a union rather than a field."""
    return isinstance(part, str) and (
        "[" in part or not part.isidentifier() or part in ("str", "int", "bool")
    )
