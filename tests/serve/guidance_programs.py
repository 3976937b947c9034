"""guidance and outlines against the server at argv[1], whose model is argv[2]; prints what they found as JSON.

It runs in an environment of its own that has both.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import guidance  # pyright: ignore[reportMissingImports]
import openai
import outlines  # pyright: ignore[reportMissingImports]
from guidance import gen, select  # pyright: ignore[reportMissingImports]
from guidance import json as json_form  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, Field

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]  # a model that is not told to stop may write more than fits
    age: Annotated[int, Field(ge=0, le=99)]


def main() -> None:
    url, name = sys.argv[1:3]
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused"}
    found: dict[str, Any] = {}
    model = guidance.models.experimental.VLLMModel(model=name, echo=False, **options)
    with guidance.user():
        model += "A record, please."
    with guidance.assistant():
        code = gen("code", regex="[A-Z]{2}-[0-9]{3}")
        verdict = select(["good", "bad"], name="verdict")
        model += "Code " + code + " is " + verdict + json_form("flag", schema=SCHEMA)
    found["guidance"] = {key: model[key] for key in ("code", "verdict", "flag")}
    client = openai.OpenAI(**options)
    for wrap in ("from_vllm", "from_sglang"):
        served = getattr(outlines, wrap)(client, name)
        person = served("A person:", Person, max_tokens=200, temperature=0.0)
        found[wrap] = {
            "person": Person.model_validate_json(person).model_dump(),
            "regex": served("A number:", outlines.types.Regex("[0-9]{4}"), max_tokens=20),
        }
    grammar = outlines.types.CFG('?start: "yes" | "no" REST\nREST: /[!]{1,3}/')
    found["grammar"] = outlines.from_vllm(client, name)("Well?", grammar, max_tokens=20)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
