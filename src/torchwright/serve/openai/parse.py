"""From bytes to a checked object: what every request's class has in common, and errors that name the field at fault.

A field that the server knows is taken. One that cannot change the answer is taken without effect and noted
(`Body.without_effect`); one that would change the answer is refused by name (`REFUSED`). Null is a field left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import NESTING

_NO_STORE = "nothing is stored here"
_ONE_SPEAKER = "speakers are not distinguished"
_ONE_KIND = "this server takes and gives text"
_NO_BEAMS = "answers are drawn token by token"
REFUSED = {
    "audio": _ONE_KIND,
    "modalities": _ONE_KIND,
    "background": _NO_STORE,
    "conversation": _NO_STORE,
    "previous_response_id": f"{_NO_STORE}; send the whole conversation as input",
    "best_of": "ask for n and choose",
    "suffix": "the model continues text and fills no gaps",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "there are no built-in tools",
    "include": "there is nothing to include",
    "truncation": "a prompt that does not fit is refused",
    "dimensions": "embeddings have the model's own size",
    "chunking_strategy": "the model's own windows cut the sound",
    "hotwords": "use prompt",
    "keywords": "use prompt",
    "languages": "use language, or leave it out to have it detected",
    "known_speaker_names": _ONE_SPEAKER,
    "known_speaker_references": _ONE_SPEAKER,
    "enable_thinking": 'use chat_template_kwargs: {"enable_thinking": …}, or reasoning_effort "none"',
    "thinking": 'use chat_template_kwargs: {"thinking": …}, or reasoning_effort "none"',
    "reasoning": "use reasoning_effort",
    "json_schema": "use response_format",
    "guided_whitespace_pattern": "white space between the parts of JSON is bounded",
    "repeat_penalty": "use repetition_penalty",
    "length_penalty": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "skip_special_tokens": "special tokens are never part of the text",
    "spaces_between_special_tokens": "special tokens are never part of the text",
    "include_stop_str_in_output": "stop texts are never part of the answer",
    "container": "there are no built-in tools",
    "mcp_servers": "the client calls its tools itself",
}
"""Names that OpenAI, Anthropic or older servers know and that would change the answer → why, or what to use instead."""


class Body(BaseModel):
    """A JSON object whose every field is known and has its own type: no text is taken for a number.

    The first thing that is wrong ends the reading: lists are declared with `fail_fast`, and names are looked at first.
    """

    media_type: ClassVar[str] = "application/json"
    """The media type of the body."""
    refused: ClassVar[dict[str, str]] = {}
    """Refused fields of this request, as in `REFUSED`."""
    without_effect: ClassVar[dict[str, str]] = {}
    """Names that are taken and cannot change the answer → why; `noted` lists those that a request has."""
    defaults: ClassVar[dict[str, Sequence[Any]]] = {}
    """Names that are taken with these values alone, which say what the server does anyway."""
    dropped_tools: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the tool types that are dropped from `tools` and noted: a provider's own server would run them."""
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    _noted: list[str] = PrivateAttr(default_factory=list)

    @property
    def noted(self) -> list[str]:
        """Fields of this request that were taken without effect; who finds out later adds to the list."""
        return self._noted

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        kept, noted = {}, []
        for name, value in data.items():
            if name in _names(cls):
                if value is not None or name in _required(cls):
                    kept[name] = value
            elif not cls._says_nothing(name, value):
                if name not in cls.without_effect:
                    reason = cls.refused.get(name) or REFUSED.get(name) or ""
                    raise PydanticCustomError("unknown_name", "unknown", {"name": name, "reason": reason})
                noted.append(name)
        if cls.dropped_tools and isinstance(tools := kept.get("tools"), list):
            kept["tools"] = [tool for tool in tools if not _begins(tool, cls.dropped_tools)]
            noted += [f"tools.{tool['type']}" for tool in tools if _begins(tool, cls.dropped_tools)]
        found = handler(kept)
        found._noted.extend(noted)
        for name, value in found:
            if isinstance(value, Body):
                found._noted.extend(f"{name}.{field}" for field in value._noted)
        return found

    @classmethod
    def _says_nothing(cls, name: str, value: Any) -> bool:
        """Check for null, or a default spelled out, of a name that is known somewhere."""
        known = name in cls.without_effect or name in cls.defaults or name in REFUSED or name in cls.refused
        return known and (value is None or value in cls.defaults.get(name, ()))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Declare what `_known` takes: null for every optional field, and the fields without effect."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        properties = own.get("properties", {})
        for name in properties.keys() - set(own.get("required", ())):
            properties[name] = _nullable(properties[name])
        for name, reason in sorted(cls.without_effect.items()):
            properties.setdefault(name, {"description": f"Without effect: {reason}."})
        for name, values in sorted(cls.defaults.items()):
            properties.setdefault(name, {"enum": [*values, None], "description": "What is done anyway."})
        if properties:
            own["properties"] = properties
        return schema


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


@cache
def _required(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items() if field.is_required())


def _begins(tool: Any, types: tuple[str, ...]) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(types)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema that takes null, too."""
    branches = schema.get("anyOf")
    if branches is not None:
        return schema if {"type": "null"} in branches else schema | {"anyOf": [*branches, {"type": "null"}]}
    about = {name: schema[name] for name in ("description", "title", "default") if name in schema}
    bare = {name: value for name, value in schema.items() if name not in about}
    return {"anyOf": [bare, {"type": "null"}], **about}


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
    if first["type"] == "union_tag_invalid":
        kind, known = (first.get("ctx", {}).get(key) for key in ("tag", "expected_tags"))
        return invalid(f"'{where}': the type '{kind}' is not supported, only {known}", where, "invalid_value")
    if first["type"] == "missing":
        return invalid(f"'{where}' is missing", where, "missing_parameter")
    return invalid(f"'{where}': {first['msg']}" if where else first["msg"], where or None, "invalid_value")


def _is_branch(part: str | int) -> bool:
    """Check whether a step of pydantic's path names an alternative of a union rather than a field."""
    return isinstance(part, str) and (
        "[" in part or not part.isidentifier() or part in ("str", "int", "bool")
    )
