"""The form that an answer must have, by each of the names that clients use for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.grammar.compile import GrammarJob
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import StructuredOutputs, Text

AskedForm = tuple[GrammarJob, str]
"""A grammar, and the name of the field that asks for it."""


class Structured(Body):
    """The fields that ask for a form: vLLM's newer one, its older ones, and SGLang's."""

    structured_outputs: StructuredOutputs | None = None
    """A form that the answer must have: json, regex, choice or grammar."""
    guided_json: dict[str, Any] | bool | Text | None = None
    """The older name of structured_outputs.json; also as a text."""
    guided_regex: Text | None = None
    """The older name of structured_outputs.regex."""
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """The older name of structured_outputs.choice."""
    guided_grammar: Text | None = None
    """The older name of structured_outputs.grammar."""
    regex: Text | None = None
    """SGLang's name of structured_outputs.regex."""
    ebnf: Text | None = None
    """SGLang's name of structured_outputs.grammar."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if isinstance(self.guided_json, str):
            schema_text(self.guided_json, "guided_json")
        if len({job for job, _ in self._forms()}) > 1:
            names = [name for _, name in self._forms()]
            raise PydanticCustomError(
                "two_forms", "{one} and {other} ask for different forms", {"one": names[0], "other": names[1]}
            )
        return self

    @property
    def form(self) -> AskedForm | None:
        """Return the grammar that these fields ask for."""
        forms = self._forms()
        return forms[0] if forms else None

    def _forms(self) -> list[AskedForm]:
        """Every form that is asked for: clients name one twice, by an older and a newer name."""
        forms = [] if self.structured_outputs is None else [_of(self.structured_outputs)]
        if self.guided_json is not None:
            schema = self.guided_json
            text = schema if isinstance(schema, str) else json.dumps(schema)
            forms.append((GrammarJob(kind="json", text=text), "guided_json"))
        if self.guided_choice is not None:
            forms.append((GrammarJob(kind="choice", text=json.dumps(self.guided_choice)), "guided_choice"))
        for name in ("guided_regex", "regex"):
            if (regex := getattr(self, name)) is not None:
                forms.append((GrammarJob(kind="regex", text=regex), name))
        for name in ("guided_grammar", "ebnf"):
            if (grammar := getattr(self, name)) is not None:
                forms.append((GrammarJob(kind="grammar", text=grammar), name))
        return forms


def schema_text(text: str, name: str) -> None:
    """Raise `PydanticCustomError` for a text that is not a JSON schema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        raise PydanticCustomError("schema", "{name} is not the text of a JSON schema", {"name": name})


def _of(structured: StructuredOutputs) -> AskedForm:
    if structured.regex is not None:
        return GrammarJob(kind="regex", text=structured.regex), "structured_outputs.regex"
    if structured.choice is not None:
        return GrammarJob(kind="choice", text=json.dumps(structured.choice)), "structured_outputs.choice"
    if structured.grammar is not None:
        return GrammarJob(kind="grammar", text=structured.grammar), "structured_outputs.grammar"
    return GrammarJob(kind="json", text=json.dumps(structured.json_schema)), "structured_outputs.json"
